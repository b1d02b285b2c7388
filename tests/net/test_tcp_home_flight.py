"""What the peer sends while a connection goes home comes to the kernel at once, not when the peer sends it again."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from net.service_lab import Api
from net.test_tcp_shim import introduce, without_offloads

from vmahybrid.bench.sandbox import Sandbox
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


@pytest.mark.parametrize("policy", ["offload", "adaptive"])
def test_the_peer_speaks_meanwhile(service: Service, policy: str) -> None:
    box = service.sandbox
    server = box.start(box.b, [sys.executable, "-S", "-c", SPEAKS, box.b.address])
    server.wait_for("ready")
    argv = service.run_argv([sys.executable, "-S", "-c", VISITOR, box.b.address], "none", VMA_HYBRID_TCP=policy,
                            VMA_RX_POLL="200", VMA_HYBRID_TCP_ROUNDS="8", VMA_HYBRID_TCP_BUDGET="100")
    before = Api(service).status()["counters"].get("tcp_homed_total", 0)
    program = box.start(box.a, argv, env=service.env)
    said = program.result(60)
    server.stop()
    assert Api(service).status()["counters"]["tcp_homed_total"] - before > VISITS // 2
    assert int(said.split()[1]) <= VISITS // 50, said
