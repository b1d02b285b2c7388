"""The peer of a connection on a ring whose program is killed, or closes it, learns of it as the kernel's would: it need
not send."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from net.service_lab import Api, compiled, until
from net.test_tcp_shim import offloaded, without_offloads

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

PEER = """
import socket, sys
listener = socket.create_server((sys.argv[1], 0), family=socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
print("port", listener.getsockname()[1], flush=True)
s = listener.accept()[0]
try:
    while data := s.recv(100):
        s.sendall(data)
    print("told", flush=True)
except ConnectionResetError:
    print("told", flush=True)
"""
KILLED = """
import socket, sys, time
s = socket.create_connection((sys.argv[1], int(sys.argv[2])))
for _ in range(30):
    s.sendall(b"x")
    assert s.recv(1) == b"x"
print("asked", flush=True)
time.sleep(60)
"""

SERVER = """
import socket, sys, time
listener = socket.create_server((sys.argv[1], 0), backlog=256)
print("port", listener.getsockname()[1], flush=True)
accepted = [listener.accept()[0] for _ in range(int(sys.argv[2]))]
accepted[0].setblocking(False)
accepted[0].send(bytes(1 << 20))
accepted.pop(0).close()     # which is still closing: its peer does not read
print("accepted", flush=True)
time.sleep(60)
"""
CLIENTS = """
import socket, sys, time
clients = [socket.create_connection((sys.argv[1], int(sys.argv[2]))) for _ in range(int(sys.argv[3]))]
print("connected", flush=True)
time.sleep(1)   # the server is killed
for client in clients:
    client.settimeout(2)
    try:
        while client.recv(1 << 20):
            pass
    except ConnectionResetError:
        pass
print("all told", flush=True)
"""


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Sandbox("test") as sandbox, Service(without_offloads(sandbox)) as running:
        yield running


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory, "recv_left.c")


@pytest.mark.parametrize("peer", ["", "offload"], ids=["kernel peer", "offloaded peer"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize(("policy", "lived"), [("offload", 0.0), ("offload", 2.5), ("adaptive", 0.0)])
def test_the_peer_is_told(service: Service, policy: str, lived: float, number: int, peer: str) -> None:
    a_side, b_side = service.sandbox.sides
    argv = [sys.executable, "-c", PEER, b_side.address]
    if peer:
        argv = service.run_argv(argv, "adaptive", VMA_HYBRID_TCP=peer)
    waiting = service.sandbox.start(b_side, argv, env=service.env)
    port = waiting.wait_for(r"port (\d+)", 10)[1]
    argv = service.run_argv([sys.executable, "-c", KILLED, b_side.address, port], "adaptive", VMA_HYBRID_TCP=policy,
                            VMA_HYBRID_TCP_ROUNDS="8")
    program = service.sandbox.start(a_side, argv, env=service.env)
    program.wait_for("asked", 10)
    until(lambda: [s for s in offloaded(service) if s["pid"] == program.pid])
    time.sleep(0.2 + lived)  # what it has heard is acknowledged, so the peer has nothing to send again
    program.process.send_signal(number)
    waiting.wait_for("told", 3)
    assert waiting.wait(5) == 0


@pytest.mark.parametrize("slots", ["100", "0"])
def test_peers_of_many_young_ones_are_told(service: Service, slots: str) -> None:
    """Of a server that is killed: accepted ones, such that wait for that, and one that it has closed."""
    a_side, b_side = service.sandbox.sides
    argv = [sys.executable, "-c", SERVER, a_side.address, "200"]
    argv = service.run_argv(argv, "none", VMA_HYBRID_TCP="offload", VMA_STATS_FD_NUM=slots)
    server = service.sandbox.start(a_side, argv, env=service.env)
    argv = [sys.executable, "-c", CLIENTS, a_side.address, server.wait_for(r"port (\d+)", 10)[1], "300"]
    clients = service.sandbox.start(b_side, argv)
    server.wait_for("accepted", 10)
    clients.wait_for("connected", 10)
    server.process.send_signal(signal.SIGKILL)
    clients.wait_for("all told", 5)


@pytest.mark.parametrize("before", ["connects", "moves"])
@pytest.mark.parametrize("closes", ["same", "other"])
@pytest.mark.parametrize("how", ["jump", "cancel"])
def test_a_receive_call_that_was_left(service: Service, left: Path, how: str, closes: str, before: str) -> None:
    """It does not keep the connection open."""
    a_side, b_side = service.sandbox.sides
    waiting = service.sandbox.start(b_side, [sys.executable, "-c", PEER, b_side.address])
    argv = [str(left), how, closes, before, b_side.address, waiting.wait_for(r"port (\d+)", 10)[1]]
    program = service.sandbox.start(a_side, service.run_argv(argv, "none", VMA_HYBRID_TCP="offload"), env=service.env)
    until(lambda: [s for s in offloaded(service) if s["pid"] == program.pid])
    program.wait_for("closed", 5)
    waiting.wait_for("told", 2)
    program.stop(signal.SIGKILL)


@pytest.mark.parametrize("closes", ["same", "other"])
@pytest.mark.parametrize("how", ["jump", "cancel"])
def test_an_accept_that_was_left(service: Service, left: Path, how: str, closes: str) -> None:
    """It does not keep the port in use."""
    a_side = service.sandbox.a
    argv = [str(left), how, closes, "listens", a_side.address, "7411"]
    program = service.sandbox.start(a_side, service.run_argv(argv, "none", VMA_HYBRID_TCP="offload"), env=service.env)
    program.wait_for("open", 5)
    until(lambda: [s for s in Api(service).call("GET", "/v1/sockets")[1] if s["pid"] == program.pid and s["offloaded"]])
    program.wait_for("closed", 5)
    program.stop(signal.SIGKILL)
