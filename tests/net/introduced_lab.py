"""A sandbox without offloads whose sides know each other, and a service in it, for TCP programs on rings. On side
``a`` an echo server, on the kernel."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator

import pytest
from net.service_lab import tcp_echo
from net.test_tcp_shim import introduce, without_offloads

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service

ECHO_PORT = 7777


@pytest.fixture(scope="module", name="service")
def introduced(softverbs: bool) -> Iterator[Service]:
    """One for the file that imports this; programs get AF_XDP rings, or raw packet QPs."""
    with Sandbox("test") as sandbox, Service(without_offloads(sandbox), softverbs=softverbs) as running:
        introduce(sandbox)
        yield running


@pytest.fixture(scope="module", name="echo_port")
def echoing(service: Service) -> Iterator[int]:
    """One server for the file."""
    echo = service.sandbox.start(service.sandbox.a, [sys.executable, "-S", "-c", tcp_echo(ECHO_PORT)])
    echo.wait_for("ready")
    yield ECHO_PORT
    echo.stop(signal.SIGKILL)
