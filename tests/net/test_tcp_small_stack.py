"""Calls on a stack of 8 KiB, as coroutines and signal handlers (SIGSTKSZ) have it."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from net.service_lab import compiled, tcp_echo, xdp_only
from net.test_tcp_shim import introduce, without_offloads

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

PORT = 7778
BYTES = 8192
MARGIN = 512  # for what another libc or compiler takes


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory, "tcp_small_stack.c")


@pytest.fixture(scope="module")
def service(softverbs: bool) -> Iterator[Service]:
    with Sandbox("test") as sandbox, Service(without_offloads(sandbox), softverbs=softverbs) as running:
        introduce(sandbox)
        echo = sandbox.start(sandbox.a, [sys.executable, "-c", tcp_echo(PORT)])
        echo.wait_for("ready")
        yield running
        echo.stop(signal.SIGKILL)


@xdp_only("libibverbs and its drivers take 12 KiB when a device is opened")
@pytest.mark.parametrize("spins", ["spinning", "sleeping"])
@pytest.mark.parametrize(("of", "policy"), [("coroutine", "offload"), ("coroutine", "adaptive"),
                                            ("handler", "offload")])
def test_a_stack_of_8_kib(service: Service, program: Path, of: str, policy: str, spins: str) -> None:
    if "VMH_SANITIZER_RUNTIME" in os.environ:
        pytest.skip("a sanitizer's frames are larger")
    argv = [str(program), of, str(BYTES), service.sandbox.a.address, str(PORT)]
    argv = service.run_argv(argv, "none", VMA_HYBRID_TCP=policy, VMA_HYBRID_TCP_ROUNDS="16",
                            VMA_RX_POLL="0" if spins == "sleeping" else "100000")
    said = service.sandbox.start(service.sandbox.b, argv, env=service.env).result(30)
    used = re.search(r"fine, (\d+) used", said)
    assert used and int(used[1]) <= BYTES - MARGIN, said
