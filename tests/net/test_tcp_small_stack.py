"""Calls on a stack of 8 KiB, as coroutines and signal handlers (SIGSTKSZ) have it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from net.introduced_lab import echoing, introduced  # noqa: F401
from net.service_lab import compiled, xdp_only

from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

BYTES = 8192
MARGIN = 512  # for what another libc or compiler takes


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory, "tcp_small_stack.c")


@xdp_only("libibverbs and its drivers take 12 KiB when a device is opened")
@pytest.mark.parametrize("spins", ["spinning", "sleeping"])
@pytest.mark.parametrize(("of", "policy"), [("coroutine", "offload"), ("coroutine", "adaptive"),
                                            ("handler", "offload")])
def test_a_stack_of_8_kib(service: Service, program: Path, echo_port: int, of: str, policy: str, spins: str) -> None:
    if "VMH_SANITIZER_RUNTIME" in os.environ:
        pytest.skip("a sanitizer's frames are larger")
    argv = [str(program), of, str(BYTES), service.sandbox.a.address, str(echo_port)]
    argv = service.run_argv(argv, "none", VMA_HYBRID_TCP=policy, VMA_HYBRID_TCP_ROUNDS="16",
                            VMA_RX_POLL="0" if spins == "sleeping" else "100000")
    said = service.sandbox.start(service.sandbox.b, argv, env=service.env).result(30)
    used = re.search(r"fine, (\d+) used", said)
    assert used and int(used[1]) <= BYTES - MARGIN, said
