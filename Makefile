# vmahybrid: what one types. Every target installs what it needs; nothing is written outside the tree but apt packages.
VENV := .venv/bin
PYTEST := $(VENV)/pytest
UNIT := $(PYTEST) -q -n $$(($$(nproc) + 1)) --dist worksteal tests/unit

.DEFAULT_GOAL := help
.PHONY: help deps build run test check lint unit unit-slow bench asan test-asan test-vm clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | column -t -s '|'

deps: ## install the Debian packages that are missing (root)
	@scripts/deps

build: deps ## .venv/bin/vmahybrid, .venv/bin/vma_stats and libvmahybrid.so
	@scripts/build

run: build ## sockperf in a sandbox, on the kernel and on rings, with the numbers (root, 3 minutes)
	@$(VENV)/python -P -m vmahybrid.bench.run

test: build ## every test (root, 20 to 36 minutes on 2 cores, by the host); CI runs what fails once more
	@$(VENV)/python -P scripts/run_tests.py

check: build lint unit ## the fast part: ruff, mypy, unit tests (2 minutes)

unit-slow: build ## the unit tests that check leaves out: C with sanitizers (2 minutes)
	@$(UNIT) -m slow

lint:
	@$(VENV)/ruff check .
	@$(VENV)/mypy

unit:
	@$(UNIT) -m 'not slow'

bench: build ## every figure of the issue beside its target (root; --only tcp alone takes 23 minutes)
	@$(VENV)/python -P -m vmahybrid.bench.bench

asan: build ## build-asan/: libvmahybrid.so with address and undefined-behaviour sanitizers
	@scripts/asan

test-asan: build ## the tests that run real programs, with the shim of make asan (root)
	@env $$(scripts/asan) $(VENV)/python -P -m pytest tests/net tests/apps tests/test_zz_leftovers.py

test-vm: build ## real uverbs without an RDMA NIC: rdma_rxe in an emulated machine (root, more than 10 minutes; 200 MB of packages)
	@$(VENV)/python -P tests/vm/image.py
	@$(VENV)/python -P -m pytest tests/vm tests/test_zz_leftovers.py -m ''

clean: ## remove everything that was built, .venv as well
	rm -rf build build-asan build-tsan build-vm .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis libvmahybrid.so vmahybrid/*.so vmahybrid/bpf \
		vmahybrid/bench/xsk_raw vmahybrid/bench/udp_mmsg vmahybrid/bench/loop_pairs vmahybrid/bench/tcp_many vmahybrid/bench/tcp_rate vmahybrid/verbs/softverbs/lib
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
