"""A signal handler that interrupts the program's malloc(), which has a lock of libc's then, and closes or sends."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from net.introduced_lab import echoing, introduced  # noqa: F401
from net.service_lab import compiled
from net.test_tcp_shim import flows

from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

RING = 20  # of the program's 24 connections: some may wait for their turn


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory, "tcp_handler.c")


@pytest.mark.parametrize("call", ["close", "send"])
def test_a_handler_in_malloc_may(service: Service, program: Path, echo_port: int, call: str) -> None:
    argv = [str(program), call, service.sandbox.a.address, str(echo_port)]
    argv = service.run_argv(argv, "none", VMA_HYBRID_TCP="offload", VMA_RX_POLL="0")
    user = service.sandbox.start(service.sandbox.b, argv, env=service.env)
    user.wait_for(r"(?m)^old$", 20)
    assert len([flow for flow in flows(service) if flow["pid"] == user.pid]) >= RING
    user.process.send_signal(signal.SIGUSR1)
    try:
        assert "went on, 0 failed" in user.result(10)
    finally:
        user.stop(signal.SIGKILL)  # one that is stuck has put off the others
