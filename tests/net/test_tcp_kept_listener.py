"""What a listener is to the kernel for good, its connections are as well."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator

import pytest
from net.service_lab import Api
from net.test_tcp_shim import introduce, without_offloads

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

PORT, VISITS = 7460, 40
TCP_MD5SIG = 14     # linux/tcp.h, not in Python
SERVER = f"""
import os, socket, sys
how = sys.argv[2]
l = socket.socket()
l.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
if how == "reuseport":
    l.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
l.bind((sys.argv[1], {PORT}))
if how == "signed":
    l.setsockopt(socket.IPPROTO_TCP, {TCP_MD5SIG}, bytes.fromhex(sys.argv[3]))
l.listen(64)
if how == "forked" and os.fork():
    print("ready", flush=True)
    os.wait()
    sys.exit()
if how != "forked":
    print("ready", flush=True)
while True:
    with l.accept()[0] as s:
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := s.recv(100):
            s.sendall(data)
"""
CLIENT = f"""
import socket, sys
visits, rounds = int(sys.argv[2]), int(sys.argv[3])
for _ in range(visits):
    s = socket.socket()
    s.settimeout(5)
    if len(sys.argv) > 4:
        s.setsockopt(socket.IPPROTO_TCP, {TCP_MD5SIG}, bytes.fromhex(sys.argv[4]))
    s.connect((sys.argv[1], {PORT}))
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(rounds):
        s.sendall(b"question")
        assert s.recv(100) == b"question"
    s.close()
print("done", flush=True)
"""


@pytest.fixture
def running() -> Iterator[Service]:
    with Sandbox("kept") as sandbox, Service(without_offloads(sandbox)) as service:
        introduce(sandbox)
        yield service


def signed(address: str) -> str:
    """struct tcp_md5sig: with whom, the key."""
    family_and_address = struct.pack("=HH4s", 2, 0, bytes(int(part) for part in address.split(".")))
    key = b"secret"
    return (family_and_address.ljust(128, b"\0") + struct.pack("=BBHI80s", 0, 0, len(key), 0, key)).hex()


def visit(service: Service, how: str, policy: str, visits: int, rounds: int) -> dict[str, int]:
    """The service's counters afterwards."""
    box = service.sandbox
    words, more = ([signed(box.a.address)], [signed(box.b.address)]) if how == "signed" else ([], [])
    argv = service.run_argv([sys.executable, "-S", "-c", SERVER, box.b.address, how, *words], "none",
                            VMA_HYBRID_TCP=policy, VMA_HYBRID_TCP_ROUNDS="8", VMA_HYBRID_TCP_BUDGET="100")
    server = box.start(box.b, argv, env=service.env)
    server.wait_for("ready")
    client = box.start(box.a, [sys.executable, "-S", "-c", CLIENT, box.b.address, str(visits), str(rounds), *more])
    assert client.result(30).split() == ["done"]
    counters: dict[str, int] = Api(service).status()["counters"]
    server.stop()
    return counters


@pytest.mark.parametrize("how", ["forked", "reuseport"])
def test_short_connections_of_a_shared_listener(running: Service, how: str) -> None:
    """An adoption each takes many times as long as the visit."""
    assert not visit(running, how, "offload", VISITS, 2).get("tcp_taken_total")


@pytest.mark.parametrize("how", ["forked", "reuseport"])
def test_busy_ones_come_to_the_ring(running: Service, how: str) -> None:
    assert visit(running, how, "offload", 1, 3000)["tcp_taken_total"] >= 1


@pytest.mark.parametrize("policy", ["offload", "adaptive"])
def test_signed_segments(running: Service, policy: str) -> None:
    """TCP_MD5SIG of the listener is also that of its connections."""
    assert not visit(running, "signed", policy, 3, 500).get("tcp_taken_total")
