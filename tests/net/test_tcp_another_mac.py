"""An interface gets another MAC while it is up, and nobody tells the peer: it learns it as it does from the kernel
alone, for connections on rings, and for programs that have no shim."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator

import pytest
from net.service_lab import until
from net.test_tcp_shim import over, with_ipv6, without_offloads

from vmahybrid.bench.sandbox import Sandbox, run_command
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

PORT = 7463
MAC = "02:76:6d:68:02:09"
ECHO = f"""
import socket, sys, threading
def serve(s):
    while data := s.recv(100):
        s.sendall(data)
listener = socket.create_server((sys.argv[1], {PORT}), family=socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
print("ready", flush=True)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""
# how long an answer took at most
CLIENT = f"""
import socket, sys, time
s = socket.create_connection((sys.argv[1], {PORT}))
s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
def ask():
    began = time.monotonic()
    s.sendall(b"x")
    assert s.recv(1)
    return time.monotonic() - began
def asks(seconds):
    end, worst = time.monotonic() + seconds, 0.0
    while time.monotonic() < end:
        worst = max(worst, ask())
        time.sleep(float(sys.argv[2]))
    return worst
asks(4)  # by then `ss` shows one that began on a ring, and it outlives this
print("hot", flush=True)
print("%.2f" % asks(5))
"""


OVERRIDE, ROUTER = 1, 4
# each neighbour advertisement: of which address, its flags, the MAC
HEARS = """
import socket
raw = socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6)
print("ready", flush=True)
while True:
    data = raw.recv(2000)
    if data[0] == 136:
        print(socket.inet_ntop(socket.AF_INET6, data[8:24]), data[4] >> 5, data[26:32].hex(":"), flush=True)
"""


@pytest.fixture(scope="module")
def service(softverbs: bool) -> Iterator[Service]:
    with Sandbox("test") as sandbox, Service(with_ipv6(without_offloads(sandbox)), softverbs=softverbs) as running:
        yield running


@pytest.mark.parametrize(("policy", "ip"), [("", "6"), ("offload", "4"), ("offload", "6"), ("adaptive", "6")])
def test_the_peer_learns_it(service: Service, policy: str, ip: str) -> None:
    a, b = service.sandbox.sides
    to = over(b, ip).address
    server = service.sandbox.start(b, [sys.executable, "-S", "-c", ECHO, to])
    server.wait_for("ready")
    try:
        argv = [sys.executable, "-S", "-c", CLIENT, to, "0.002"]
        shimmed = service.run_argv(argv, "none", VMA_HYBRID_TCP=policy or "kernel", VMA_HYBRID_TCP_BUDGET="100",
                                   VMA_HYBRID_TCP_ROUNDS="40")  # fmt: skip
        clients = [service.sandbox.start(a, shimmed, env=service.env)]
        if policy:  # one of the kernel alone, that asks seldom
            clients.append(service.sandbox.start(a, [*argv[:-1], "0.5"]))
        for client in clients:
            client.wait_for("hot", 20)
        a.ip("link", "set", a.device, "address", MAC)
        for client in clients:
            assert float(client.result(30).split()[-1]) < 3.5, service.sandbox.b.ip("neigh")
    finally:
        server.close()
        a.ip("link", "set", a.device, "address", a.mac)
        b.ip("neigh", "flush", "dev", b.device)


def test_it_is_advertised_when_it_is_up(service: Service) -> None:
    """Many interfaces change it only while they are down. A router says that it is one, or its routes are forgotten."""
    a, b = service.sandbox.sides
    own = over(a, "6").address
    run_command(*a.command(["sysctl", "-qw", f"net.ipv6.conf.{a.device}.keep_addr_on_down=1"]))
    heard = service.sandbox.start(b, [sys.executable, "-S", "-c", HEARS])
    heard.wait_for("ready")
    try:
        for router, mac in ((0, "02:76:6d:68:02:0a"), (ROUTER, "02:76:6d:68:02:0b")):
            run_command(*a.command(["sysctl", "-qw", f"net.ipv6.conf.{a.device}.forwarding={router}"]))
            a.ip("link", "set", a.device, "down")
            time.sleep(0.3)     # the service has seen it down
            a.ip("link", "set", a.device, "address", mac)
            time.sleep(0.3)
            a.ip("link", "set", a.device, "up")
            until(lambda line=f"{own} {OVERRIDE | router} {mac}": line in heard.output.splitlines())
    finally:
        heard.stop(signal.SIGKILL)
        run_command(*a.command(["sysctl", "-qw", f"net.ipv6.conf.{a.device}.forwarding=0"]))
        a.ip("link", "set", a.device, "address", a.mac)
