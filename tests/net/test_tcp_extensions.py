"""A peer whose packets have extension headers of IPv6: what any host may pass by a ring passes by, too."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from net.service_lab import Api, homed
from net.test_tcp_shim import over, with_ipv6, without_offloads

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

PORT = 7481
SERVER = f"""
import socket
listener = socket.create_server(("::", {PORT}), family=socket.AF_INET6)
print("ready", flush=True)
while True:
    connection = listener.accept()[0]
    while data := connection.recv(100):
        connection.sendall(data)
"""
# IPV6_DSTOPTS or IPV6_HOPOPTS, of padding alone
CLIENT = f"""
import socket, sys, time
s, worst = socket.socket(socket.AF_INET6), 0
s.settimeout(10)
def begin():
    s.setsockopt(socket.IPPROTO_IPV6, int(sys.argv[2]), bytes([0, 0, 1, 4, 0, 0, 0, 0]))
if sys.argv[3] == "syn":
    begin()
s.connect((sys.argv[1], {PORT}))
s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for n in range(200):
    if n == 100:
        begin()
    begun = time.monotonic()
    s.sendall(b"%d" % n)
    assert s.recv(100) == b"%d" % n
    worst = max(worst, time.monotonic() - begun)
    time.sleep(0.005)
print("worst", worst, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Sandbox("test") as sandbox, Service(with_ipv6(without_offloads(sandbox))) as running:
        yield running


@pytest.mark.parametrize("start", ["later", "syn"])
@pytest.mark.parametrize("option", [59, 54], ids=["dstopts", "hopopts"])
def test_it_is_on_the_ring(service: Service, option: int, start: str) -> None:
    """Which is the ring. One whose SYN has such a header is opened by the kernel, and adopted."""
    sandbox, before = service.sandbox, homed(service)
    argv = service.run_argv([sys.executable, "-c", SERVER], "none", VMA_HYBRID_TCP="offload", VMA_RX_POLL="200")
    server = sandbox.start(sandbox.b, argv, env=service.env)
    try:
        server.wait_for("ready")
        argv = [sys.executable, "-c", CLIENT, over(sandbox.b, "6").address, str(option), start]
        client = sandbox.start(sandbox.a, argv)
        try:
            worst = float(client.wait_for(r"worst (\S+)", 30)[1])
            sockets = [s for s in Api(service).call("GET", "/v1/sockets")[1] if s["pid"] == server.pid]
            assert [s["offloaded"] for s in sockets] == [True, True]  # the listener, and this
            assert homed(service) == before
            assert worst < 0.2
        finally:
            client.stop()
    finally:
        server.stop()
