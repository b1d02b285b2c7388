"""Options that act on an open connection and that only the kernel has: set before it could come to a ring they keep it
on the kernel, as they send it home when it has come. Others don't."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from net.service_lab import Api, under_shim
from net.test_tcp_reasons import ECHO, PORT
from net.test_tcp_shim import without_offloads

from vmahybrid.bench.sandbox import Program, Sandbox, Side
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

# argv: connect or accept, address, port, option; "accept": the option is the listener's, and the peer connects
PROGRAM = """
import json, select, socket, struct, sys, time
OPTIONS = {
    "rcvlowat": (socket.SOL_SOCKET, socket.SO_RCVLOWAT, 10),
    "pacing": (socket.SOL_SOCKET, 47, 1 << 20),
    "inq": (socket.IPPROTO_TCP, 36, 1),
    "notsent": (socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, 4096),
    "congestion": (socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno"),
    "busy poll": (socket.SOL_SOCKET, 46, 50),
    "no port": (socket.IPPROTO_IP, 24, 1),
    "oobinline": (socket.SOL_SOCKET, socket.SO_OOBINLINE, 1),
    "lingers for ever": (socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, -1)),
}
how, address, port, option = sys.argv[1:]
s = socket.socket()
s.setsockopt(*OPTIONS[option])
if how == "accept":
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind((address, int(port)))
    s.listen()
    print("listens", flush=True)
    s, _ = s.accept()
else:
    s.connect((address, int(port)))
s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for _ in range(400):
    s.sendall(b"x" * 20)
    assert len(s.recv(20, socket.MSG_WAITALL)) == 20
s.sendall(b"abc")
time.sleep(0.2)
told = {"readable": bool(select.select([s], [], [], 0)[0])}
if option != "rcvlowat":
    data, control, _, _ = s.recvmsg(10, 100)
    told |= {"data": data.decode(), "control": len(control)}
print(json.dumps(told), flush=True)
sys.stdin.read()
"""
EARLY = {"VMA_HYBRID_TCP_ROUNDS": "8", "VMA_HYBRID_TCP_PAYS": "0", "VMA_HYBRID_TCP_BUDGET": "100", "VMA_RX_POLL": "100",
         "VMA_HYBRID_TCP_PROCESSOR": "0", "VMA_HYBRID_TCP_TURN": "0"}
KEEPS = ["rcvlowat", "pacing", "notsent", "congestion"]
OTHERS = ["busy poll", "no port", "oobinline", "inq", "lingers for ever"]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Sandbox("test") as sandbox, Service(without_offloads(sandbox)) as running:
        sandbox.start(sandbox.b, [sys.executable, "-uc", ECHO, sandbox.b.address, str(PORT)]).wait_for("ready")
        yield running


Saw = tuple[dict[str, Any], list[dict[str, Any]]]


def told(service: Service, policy: str, option: str, how: str = "connect") -> Saw:
    """What the program saw, and its sockets as the service knows them."""
    box = service.sandbox
    at: Side = box.a
    argv = [sys.executable, "-uc", PROGRAM, how, at.address if how == "accept" else box.b.address,
            "7500" if how == "accept" else str(PORT), option]
    if policy:
        argv = under_shim(service, argv, profile="none", VMA_HYBRID_TCP=policy, **EARLY)
    with subprocess.Popen(at.command(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                          env=os.environ | service.env) as program:
        assert program.stdin is not None and program.stdout is not None
        try:
            peer: Program | None = None
            if how == "accept":
                assert program.stdout.readline() == "listens\n"
                peer = box.start(box.b, [sys.executable, "-uc", PEER, at.address, "7500"])
            saw = json.loads(program.stdout.readline())
            known = Api(service).call("GET", "/v1/sockets")[1] if policy else []
            sockets = [s for s in known if s["pid"] == program.pid and not s["remote"].endswith(":0")]
            if peer:
                peer.stop()
        finally:
            program.stdin.close()
            program.wait(20)
    return saw, sockets


PEER = """
import socket, sys
s = socket.create_connection((sys.argv[1], int(sys.argv[2])))
while data := s.recv(65536):
    s.sendall(data)
"""


@pytest.mark.parametrize("how", ["connect", "accept"])
@pytest.mark.parametrize("policy", ["offload", "adaptive"])
@pytest.mark.parametrize("option", KEEPS + OTHERS)
def test_set_before(service: Service, policy: str, option: str, how: str) -> None:
    saw, sockets = told(service, policy, option, how)
    assert saw == told(service, "", option, how)[0]
    assert len(sockets) == 1, sockets
    assert sockets[0]["offloaded"] == (option in OTHERS), sockets
    if option in KEEPS:
        assert sockets[0]["reason"] == "sockopt", sockets


FULL = """
import os, socket, sys
s = socket.create_connection((sys.argv[1], int(sys.argv[2])))
for _ in range(20):
    s.sendall(b"x" * 20)
    assert len(s.recv(20, socket.MSG_WAITALL)) == 20
s.setblocking(False)
sent = 0
try:
    while True:
        sent += s.send(b"y" * 65536)
except BlockingIOError:
    os.dup(s.fileno())
s.setblocking(True)
s.settimeout(20)
got = 0
while got < sent:
    got += len(s.recv(1 << 20))
print("all", got == sent)
"""


@pytest.mark.parametrize("policy", ["offload", "adaptive"])
def test_home_with_more_unsent_than_the_system_wants(service: Service, policy: str) -> None:
    box = service.sandbox
    mark = box.a.command(["sysctl", "-qw", "net.ipv4.tcp_notsent_lowat=16384"])
    none = [*mark[:-1], "net.ipv4.tcp_notsent_lowat=4294967295"]
    subprocess.run(mark, check=True, timeout=10)
    try:
        for _ in range(3):
            argv = under_shim(service, [sys.executable, "-uc", FULL, box.b.address, str(PORT)], profile="none",
                              VMA_HYBRID_TCP=policy, VMA_HYBRID_TCP_BULK="0", **EARLY)
            program = box.start(box.a, argv, env=service.env)
            assert program.result(40) == "all True\n", service.log
    finally:
        subprocess.run(none, check=True, timeout=10)
