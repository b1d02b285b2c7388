"""A connection without descriptors is in no epoll set any more: the service, by which it came home, has none either."""

from __future__ import annotations

import pytest
from net.test_tcp_seen import Lab, lab, service_of_tcp  # noqa: F401

pytestmark = pytest.mark.root

STEPS = """
import select, time

def dup2(fd):
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, fd)
    gone.append(fd)
    os.close(null)

def dup(fd):
    other = os.dup(fd)
    os.close(fd)
    os.close(other)

def dup3(fd):
    other = tcp()
    os.dup2(other.fileno(), fd, inheritable=False)
    gone.append(fd)
    other.close()

def connects():
    global conn, told
    conn, told = tcp(), select.epoll()
    conn.connect(far)
    told.register(conn, select.EPOLLIN | select.EPOLLOUT)

def stale(way, seconds=0.05):
    assert told.poll(1), "not ready"
    way(conn.detach())
    end, seen = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        seen += len(told.poll(0))
    told.close()
    for fd in gone:
        os.close(fd)
    gone.clear()
    return seen

gone = []
"""
ROUNDS = 12


@pytest.mark.parametrize("way", ["dup2", "dup3", "dup"])
@pytest.mark.parametrize("policy", ["offload", "kernel"])
def test_nothing_is_told(lab: Lab, policy: str, way: str) -> None:  # noqa: F811
    program = lab.program(VMA_HYBRID_TCP=policy)
    program.do(STEPS)
    for _ in range(ROUNDS):
        program.do("connects()")
        lab.accept().sendall(b"unread")
        assert program.do(f"stale({way})") == 0
