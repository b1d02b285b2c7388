"""What the peer sends while a connection goes home comes to the kernel at once, not when the peer sends it again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from net.service_lab import Api, homed, until
from net.test_tcp_policy import NEVER
from net.test_tcp_shim import ShimPeer, introduce, offloaded, without_offloads

from vmahybrid.bench.sandbox import Sandbox, Side, run_command
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

PORT, VISITS, ROUNDS = 7440, 100, 70
SPEAKS = f"""
import socket, sys
with socket.create_server((sys.argv[1], {PORT}), backlog=16) as listener:
    print("ready", flush=True)
    while True:
        with listener.accept()[0] as s:
            s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range({ROUNDS}):
                s.sendall(s.recv(1))
            s.sendall(b"speaks")
            s.recv(1)
"""
VISITOR = f"""
import select, socket, sys, time
late = 0
for visit in range({VISITS}):
    s = socket.create_connection((sys.argv[1], {PORT}))
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range({ROUNDS}):
        s.sendall(b"a")
        s.recv(1)
    then = time.monotonic() + visit % 20 * 1e-4
    while time.monotonic() < then:
        pass
    other = s.dup()
    began = time.monotonic()
    assert select.select([other], [], [], 5)[0]
    late += time.monotonic() - began > 0.15
    assert other.recv(9) == b"speaks"
    s.close()
    other.close()
print("late", late, flush=True)
"""


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Sandbox("flight") as sandbox, Service(without_offloads(sandbox)) as running:
        introduce(sandbox)
        yield running


def moved(service: Service, a: ShimPeer, to: str) -> float:
    """The connections of ``a``, to "ring" or "kernel"; when they were there."""
    before, api = homed(service), Api(service)
    assert api.call("POST", f"/v1/processes/{a.pid}/move", {"to": to, "fd": None})[0] == 204
    until(lambda: homed(service) > before if to == "kernel" else bool(offloaded(service)))
    return time.monotonic()


@contextmanager
def connection(service: Service) -> Iterator[tuple[ShimPeer, ShimPeer]]:
    """A program whose connection begins on a ring, and its peer on the kernel."""
    a_side, b_side = service.sandbox.sides
    with ShimPeer(service, b_side, "") as b, ShimPeer(service, a_side, "offload", **NEVER) as a:
        port = b.do("listen", address=b_side.address)
        a.do("connect", address=b_side.address, port=port)
        b.do("accept")
        yield a, b


def sent_again(side: Side) -> int:
    """Segments, by the kernel there."""
    argv = side.command(["nstat", "-asz", "TcpRetransSegs"])
    return int(subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()[-2])


@contextmanager
def busy(service: Service) -> Iterator[None]:
    """The service has no time."""
    os.kill(service.program.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(service.program.pid, signal.SIGCONT)


def test_a_whole_flight_comes_to_the_kernel(service: Service) -> None:
    side = service.sandbox.b
    run_command(*side.command(["sysctl", "-qw", "net.ipv4.tcp_slow_start_after_idle=0"]))
    with connection(service) as (a, b):
        a.do("drain", size=2_000_000)
        b.do("pour", size=2_000_000)    # it may send many at once then
        a.do("drained")
        b.do("nodelay")
        before = sent_again(side)
        leaves = threading.Thread(target=a.do, args=("dup",))
        with busy(service):
            leaves.start()
            time.sleep(0.02)
            b.do("burst", count=200, size=400)
            time.sleep(0.02)
        leaves.join()
        assert len(a.do("read", size=80_000)) == 80_000
        assert sent_again(side) - before < 30


def test_the_peer_hears_of_the_kernels_window(service: Service) -> None:
    """The ring has said that it has no room, and the kernel has: the peer does not wait until it asks."""
    with connection(service) as (a, b):
        moved(service, a, "kernel")
        a.do("drain", size=100_000_000)
        b.do("pour", 20, size=100_000_000)  # the kernel's buffer grows with it
        assert a.do("drained")[0]
        moved(service, a, "ring")
        b.do("fill", 20)
        there = moved(service, a, "kernel")
        assert b.do("goes_on") - there < 0.1


@pytest.mark.parametrize("policy", ["offload", "adaptive"])
def test_the_peer_speaks_meanwhile(service: Service, policy: str) -> None:
    box = service.sandbox
    server = box.start(box.b, [sys.executable, "-S", "-c", SPEAKS, box.b.address])
    server.wait_for("ready")
    argv = service.run_argv([sys.executable, "-S", "-c", VISITOR, box.b.address], "none", VMA_HYBRID_TCP=policy,
                            VMA_RX_POLL="200", VMA_HYBRID_TCP_ROUNDS="8", VMA_HYBRID_TCP_BUDGET="100")
    before = homed(service)
    program = box.start(box.a, argv, env=service.env)
    said = program.result(60)
    server.stop()
    assert homed(service) - before > VISITS // 2
    assert int(said.split()[1]) <= VISITS // 50, said
