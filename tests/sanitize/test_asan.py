"""The shim with AddressSanitizer and UndefinedBehaviorSanitizer: socket-call cases and real programs, no report.

`make test-asan` runs every test of programs so, these are the ones that `make test` always runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from apps import test_sockperf
from apps.shimmed import Stage, stop
from apps.test_programs import ASK, ECHO
from compare.programs import build, case_names
from compare.test_calls import Rig
from net.service_lab import xdp_only
from sanitize.build import compile_program, ours, sanitized

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service

# libgcc unwinds a cancelled thread without a word to AddressSanitizer, which then takes the stack of functions that are
# gone for poisoned ("may be a false positive", its report says). And it looks at bad addresses, and at all 2 GiB of an
# address that is said to be so long, before the shim does.
NOT_SANITIZED = ("cancel ", "bad addresses", "kernel addresses", "send address length")

pytestmark = [pytest.mark.apps, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def served(softverbs: bool) -> Iterator[tuple[Sandbox, Service]]:
    with Sandbox("asan") as sandbox, Service(sandbox, softverbs=softverbs) as service:
        peer = sandbox.start(sandbox.b, [str(build() / "peer"), sandbox.b.address, "900"])
        peer.wait_for("ready")
        yield sandbox, service


@pytest.fixture
def reports(tmp_path: Path) -> Iterator[Path]:
    """Where the sanitizers report; fails the test afterwards when one names our sources."""
    path = tmp_path / "reports"
    path.mkdir()
    with sanitized(path):
        yield path
    found = ours(path)
    assert not found, "\n\n".join(found)


@pytest.fixture
def stage(served: tuple[Sandbox, Service], reports: Path) -> Stage:
    return Stage(*served, profile="none")


@xdp_only("whether the sanitizers watch is asked once")
def test_an_overrun_is_found(served: tuple[Sandbox, Service], tmp_path: Path) -> None:
    """The sanitizers watch the shim's own code, on rings, and their reports arrive."""
    sandbox, service = served
    reports = tmp_path / "reports"
    reports.mkdir()
    program = compile_program("overrun.c", tmp_path / "overrun")
    with sanitized(reports):
        argv = service.run_argv([str(program), sandbox.b.address, "7001"])
        running = sandbox.start(sandbox.a, argv, env=service.env)
    code = running.wait(60)
    found = ours(reports)
    assert code and found, f"exit {code}, {running.output} {running.errors}"
    assert "heap-buffer-overflow" in found[0] and "sock_rx.c" in found[0]


@pytest.mark.parametrize(("softverbs", "profile"), [("xdp", "none"), ("xdp", "latency"), ("softverbs", "none")],
                         indirect=["softverbs"], scope="module")
def test_socket_calls(served: tuple[Sandbox, Service], reports: Path, profile: str) -> None:
    """The cases of tests/compare run to their ends; whether they say what the kernel says is theirs to tell."""
    sandbox, service = served
    names = [name for name in case_names() if not name.startswith(NOT_SANITIZED)]
    rig = Rig(sandbox, service, profile)
    ran = rig.run(names, 10)
    missing = [name for name in names if name not in ran]
    assert not missing, f"{missing} did not run after {list(ran.items())[-1]}: {rig.said}"
    assert not [line for lines in ran.values() for line in lines if "ended with" in line]


def test_sockperf_ping_pong(stage: Stage) -> None:
    target = ["-i", stage.sandbox.b.address, "-p", str(test_sockperf.PORT)]
    said = test_sockperf.run(stage, target, ["ping-pong", *target, "--data-integrity", "-m", "1400"])
    assert test_sockperf.dropped(said) == 0


def test_sockperf_epoll(stage: Stage, tmp_path: Path) -> None:
    ports = range(test_sockperf.PORT, test_sockperf.PORT + 4)
    options = ["-F", "epoll", "-f"]
    options.append(test_sockperf.feed(stage, tmp_path, [f"{stage.sandbox.b.address}:{port}" for port in ports]))
    said = test_sockperf.run(stage, options, ["ping-pong", *options])
    assert test_sockperf.dropped(said) == 0


def test_sockperf_multicast(stage: Stage) -> None:
    server, client = test_sockperf.multicast_options(stage)
    said = test_sockperf.run(stage, server, ["ping-pong", *client])
    assert test_sockperf.dropped(said) == 0


def test_asyncio_echo(stage: Stage) -> None:
    serving = stage.serve(sys.executable, "-c", ECHO, stage.sandbox.b.address)
    serving.wait_for("listening", 20)
    said = stage.client(sys.executable, "-c", ASK, stage.sandbox.b.address).result(60)
    assert "answered 2000 bad 0" in said
    stop(serving)
