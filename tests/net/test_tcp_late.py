"""TCP connections of a program whose service stops for longer than a program waits: they go on when it does."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from net.introduced_lab import ECHO_PORT, echoing, introduced  # noqa: F401
from net.service_lab import until
from net.test_tcp_many import moves
from net.test_tcp_shim import offloaded

from vmahybrid.bench.served import Service

pytestmark = [pytest.mark.root, pytest.mark.timeout(90), pytest.mark.usefixtures("echo_port")]

HUNG = 4.0      # seconds; a program waits for three
# a round each 10 ms: how long the longest has taken, and how many there were
ROUNDS = """
import os, signal, socket, sys, time
conns = [socket.create_connection((sys.argv[1], int(sys.argv[2]))) for _ in range(int(sys.argv[3]))]
for c in conns:
    c.settimeout(20)
signal.signal(signal.SIGUSR1, lambda *_: os.dup(conns[0].fileno()))
end, longest, n = time.monotonic() + float(sys.argv[4]), 0, 0
print("begun", flush=True)
while time.monotonic() < end:
    begun = time.monotonic()
    for c in conns:
        c.sendall(b"ask")
        assert c.recv(3, socket.MSG_WAITALL) == b"ask"
    longest = max(longest, time.monotonic() - begun)
    n += 1
    time.sleep(0.01)
print("rounds", n, longest, flush=True)
"""


@contextmanager
def hung(service: Service) -> Iterator[None]:
    service.program.process.send_signal(signal.SIGSTOP)
    try:
        yield
        time.sleep(HUNG)
    finally:
        service.program.process.send_signal(signal.SIGCONT)


def argv(service: Service, conns: int, seconds: float, **variables: str) -> list[str]:
    words = [sys.executable, "-S", "-c", ROUNDS, service.sandbox.a.address, str(ECHO_PORT), str(conns), str(seconds)]
    return service.run_argv(words, "none", VMA_TRACELEVEL="warn", **variables)


@pytest.mark.parametrize("conns", [1, 12])
def test_on_the_way_to_a_ring(service: Service, conns: int) -> None:
    """One by itself, and several together: the program has given them up when the service sees what it wanted."""
    more = {"VMA_HYBRID_TCP_ROUNDS": "50", "VMA_HYBRID_TCP_BUDGET": "100"}
    program = service.sandbox.start(
        service.sandbox.b, argv(service, conns, 9, VMA_HYBRID_TCP="adaptive", **more), env=service.env)
    program.wait_for("begun")
    time.sleep(0.1)
    with hung(service):
        pass
    n, longest = program.result(30).split()[2:]
    assert int(n) > 100
    assert float(longest) < 4
    assert not program.errors.count("lost"), program.errors


def test_on_the_way_home(service: Service) -> None:
    """It stands still until the service goes on, and not for ever."""
    program = service.sandbox.start(
        service.sandbox.b, argv(service, 1, 14, VMA_HYBRID_TCP="offload"), env=service.env)
    program.wait_for("begun")
    assert until(lambda: offloaded(service), 3)
    assert not moves(service, program)
    with hung(service):
        program.process.send_signal(signal.SIGUSR1)
    n, longest = program.result(40).split()[2:]
    assert int(n) > 100
    assert float(longest) < 12
