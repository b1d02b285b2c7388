"""A connection in more epoll sets than most programs have: each tells of it, on the ring and at home."""

from __future__ import annotations

import sys

import pytest
from net.introduced_lab import echoing, introduced  # noqa: F401
from net.service_lab import homed

from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

SETS = 100
# how many tell of an answer: on the ring, when it has been read, at home, and when it has been read there
PROGRAM = f"""
import os, select, socket, sys
conn = socket.create_connection((sys.argv[1], int(sys.argv[2])))
def round():
    conn.sendall(b"a")
    assert conn.recv(1) == b"a"
for _ in range(200):
    round()
sets = [select.epoll() for _ in range({SETS})]
for s in sets:
    s.register(conn, select.EPOLLIN)
for _ in range(200):
    round()
def told():
    return sum(bool(s.poll(0)) for s in sets)
def answered():
    conn.sendall(b"a")
    sets[-1].poll(5)
    return told()
print(answered())
conn.recv(1)
print(told())
os.close(os.dup(conn.fileno()))
print(answered())
conn.recv(1)
print(told())
"""


@pytest.mark.parametrize("policy", ["offload", "adaptive"])
def test_all_tell_of_it(service: Service, echo_port: int, policy: str) -> None:
    before = homed(service)
    argv = service.run_argv([sys.executable, "-S", "-c", PROGRAM, service.sandbox.a.address, str(echo_port)], "none",
                            VMA_HYBRID_TCP=policy, VMA_HYBRID_TCP_ROUNDS="50", VMA_HYBRID_TCP_BUDGET="100")
    said = service.sandbox.start(service.sandbox.b, argv, env=service.env).result(30)
    assert said.split() == [str(SETS), "0", str(SETS), "0"]
    assert homed(service) > before
