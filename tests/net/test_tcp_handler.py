"""A signal handler that interrupts the program's malloc(), which has a lock of libc's then, and closes or sends."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from net.service_lab import compiled, tcp_echo
from net.test_tcp_shim import flows, introduce, without_offloads

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

PORT = 7777
RING = 20  # of the program's 24 connections: some may wait for their turn


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory, "tcp_handler.c")


@pytest.fixture(scope="module")
def service(softverbs: bool) -> Iterator[Service]:
    with Sandbox("test") as sandbox, Service(without_offloads(sandbox), softverbs=softverbs) as running:
        introduce(sandbox)
        echo = sandbox.start(sandbox.a, [sys.executable, "-c", tcp_echo(PORT)])
        echo.wait_for("ready")
        yield running
        echo.stop(signal.SIGKILL)


@pytest.mark.parametrize("call", ["close", "send"])
def test_a_handler_in_malloc_may(service: Service, program: Path, call: str) -> None:
    argv = [str(program), call, service.sandbox.a.address, str(PORT)]
    argv = service.run_argv(argv, "none", VMA_HYBRID_TCP="offload", VMA_RX_POLL="0")
    user = service.sandbox.start(service.sandbox.b, argv, env=service.env)
    user.wait_for(r"(?m)^old$", 20)
    assert len([flow for flow in flows(service) if flow["pid"] == user.pid]) >= RING
    user.process.send_signal(signal.SIGUSR1)
    try:
        assert "went on, 0 failed" in user.result(10)
    finally:
        user.stop(signal.SIGKILL)  # one that is stuck has put off the others
