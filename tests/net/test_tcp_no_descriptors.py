"""A program that lowers RLIMIT_NOFILE when it has all it needs, as sandboxes do: poll(2) refuses more entries than
that, and ours come to those of the program."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator

import pytest
from net.introduced_lab import introduced  # noqa: F401
from net.service_lab import under_shim

from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

PORT, UDP_PORT = 7461, 7462
# each answer comes late, so that the program sleeps for it
PEER = f"""
import socket, sys, threading, time
def serve(s):
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for n in range(1000000):
        if not (data := s.recv(100)):
            return
        time.sleep(0.004 if n > 150 else 0)
        s.sendall(data)
def datagrams():
    u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    u.bind((sys.argv[1], {UDP_PORT}))
    while True:
        data, who = u.recvfrom(100)
        time.sleep(0.004)
        u.sendto(data, who)
threading.Thread(target=datagrams, daemon=True).start()
listener = socket.create_server(("", {PORT}))
print("ready", flush=True)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""
PROGRAM = f"""
import resource, select, socket, sys, time
address, kind, way, limit = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
if kind == "tcp":
    s = socket.create_connection((address, {PORT}))
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
else:
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.connect((address, {UDP_PORT}))
for _ in range(120 if kind == "tcp" else 2):
    s.send(b"before")
    s.recv(100)
poller = select.epoll() if way == "epoll" else select.poll()
poller.register(s, select.POLLIN)
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
for n in range(30):
    s.send(b"%d" % n)
    if way == "select":
        assert select.select([s], [], [], 5) == ([s], [], [])
    elif way != "recv":
        assert poller.poll(5000) == [(s.fileno(), select.POLLIN)]
    assert s.recv(100) == b"%d" % n
before = time.process_time()
time.sleep(0.5)
print("rested" if time.process_time() - before < 0.2 else "was busy")
"""
POLICIES = {
    "safe": {"VMA_HYBRID_TCP": "kernel"},
    "adaptive": {"VMA_HYBRID_TCP": "adaptive", "VMA_HYBRID_TCP_ROUNDS": "40", "VMA_HYBRID_TCP_BUDGET": "100"},
    "latency": {"VMA_HYBRID_TCP": "offload", "VMA_RX_POLL": "0", "VMA_SELECT_POLL": "0"},
}


@pytest.fixture(scope="module", autouse=True)
def peer(service: Service) -> Iterator[None]:
    running = service.sandbox.start(service.sandbox.a, [sys.executable, "-S", "-c", PEER, service.sandbox.a.address])
    running.wait_for("ready")
    yield
    running.stop(signal.SIGKILL)


@pytest.mark.parametrize(("way", "limit"), [("recv", 0), ("poll", 1), ("select", 0), ("epoll", 2)])
@pytest.mark.parametrize(("policy", "kind"), [
    ("kernel", "tcp"), ("kernel", "udp"), ("safe", "udp"), ("adaptive", "tcp"), ("latency", "tcp"), ("latency", "udp"),
])  # fmt: skip
def test_it_is_served(service: Service, policy: str, kind: str, way: str, limit: int) -> None:
    """Of poll() with a limit of 0 the kernel says EINVAL, too."""
    argv = [sys.executable, "-S", "-c", PROGRAM, service.sandbox.a.address, kind, way, str(limit)]
    if policy in POLICIES:
        argv = under_shim(service, argv, profile="none", **POLICIES[policy])
    assert service.sandbox.start(service.sandbox.b, argv, env=service.env).result(30) == "rested\n"
