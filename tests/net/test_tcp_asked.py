"""What a program asks about a connection while it is moved: the answers are the connection's, never those of a socket
that the service is rebuilding."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator

import pytest
from net.service_lab import Api, tcp_echo, under_shim
from net.test_tcp_shim import without_offloads

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

SECONDS = 4
PORT = 7940
PROGRAM = f"""
import collections, fcntl, json, select, socket, struct, sys, threading, time

TCP, IP, ALL = socket.IPPROTO_TCP, socket.IPPROTO_IP, socket.SOL_SOCKET
s = socket.create_connection((sys.argv[1], {PORT}))
s.setsockopt(TCP, socket.TCP_NODELAY, 1)
s.setsockopt(ALL, socket.SO_KEEPALIVE, 1)
here, there = s.getsockname(), s.getpeername()
p = select.poll()
p.register(s, select.POLLIN)
wrong, end, rounds = collections.Counter(), time.monotonic() + {SECONDS}, 0

def queue(request):
    return struct.unpack("i", fcntl.ioctl(s, request, bytes(4)))[0]

QUESTIONS = dict(
    unread=lambda: queue(0x541b) == 5, unsent=lambda: queue(0x5411) == 0, poll=lambda: p.poll(0) == [(s.fileno(), 1)],
    peeked=lambda: s.recv(9, socket.MSG_PEEK) == b"hello", state=lambda: s.getsockopt(TCP, socket.TCP_INFO, 8)[0] == 1,
    mss=lambda: s.getsockopt(TCP, socket.TCP_MAXSEG) > 1000, mtu=lambda: s.getsockopt(IP, 14) == 1500,
    keepalive=lambda: s.getsockopt(ALL, socket.SO_KEEPALIVE) == 1,
    reuse=lambda: s.getsockopt(ALL, socket.SO_REUSEADDR) == 0, repair=lambda: s.getsockopt(TCP, 19) == 0,
    peername=lambda: len(s.getsockopt(ALL, 28, 16)) == 16, there=lambda: s.getpeername() == there,
    here=lambda: s.getsockname() == here, error=lambda: s.getsockopt(ALL, socket.SO_ERROR) == 0)

def asks():
    for _ in range(20):
        for name, question in QUESTIONS.items():
            try:
                right = question()
            except OSError as error:
                right = False
                name = f"{{name}}: {{error}}"
            wrong[name] += not right

print("connected", flush=True)
while time.monotonic() < end:
    s.sendall(b"hello")
    p.poll(3000)
    while len(s.recv(9, socket.MSG_PEEK)) < 5:
        pass
    while queue(0x5411):    # until what was sent is acknowledged
        pass
    others = [threading.Thread(target=asks) for _ in range(2)]
    for other in others:
        other.start()
    for other in others:
        other.join()
    s.recv(5)
    rounds += 1
print(json.dumps([rounds, {{name: n for name, n in wrong.items() if n}}]))
"""


@pytest.fixture(scope="module")
def service(softverbs: bool) -> Iterator[Service]:
    with Sandbox("test") as sandbox, Service(without_offloads(sandbox), softverbs=softverbs) as running:
        yield running


@pytest.mark.parametrize("policy", ["adaptive", "offload"])
def test_each_answer_is_the_connections(service: Service, policy: str) -> None:
    box = service.sandbox
    echo = box.start(box.b, [sys.executable, "-c", tcp_echo(PORT)])
    echo.wait_for("ready")
    argv = under_shim(service, [sys.executable, "-c", PROGRAM, box.b.address], profile="adaptive",
                      VMA_HYBRID_TCP=policy)
    program = box.start(box.a, argv, env=service.env)
    program.wait_for("connected")
    api, chance, end = Api(service), random.Random(1), time.monotonic() + SECONDS
    while time.monotonic() < end:
        api.call("POST", f"/v1/processes/{program.pid}/move", {"to": chance.choice(("kernel", "ring"))})
        time.sleep(0.03 * chance.random())
    rounds, wrong = json.loads(program.result(20).splitlines()[-1])
    counted = api.status()["counters"]
    echo.close()
    assert wrong == {}
    assert rounds > 5
    assert counted.get("tcp_homed_total", 0) >= 3, counted
