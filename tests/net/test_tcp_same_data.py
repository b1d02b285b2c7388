"""epoll sets in which several descriptors have the same data, as the two sides of a proxied session may: each event is
told, as by the kernel, and none that nobody has."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from net.test_tcp_shim import introduce, without_offloads

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

PORT, DATA = 7480, 7
ECHO = f"""
import socket, sys, threading
def echo(s):
    while data := s.recv(100):
        s.sendall(data)
l = socket.create_server((sys.argv[1], {PORT}))
print("ready", flush=True)
while True:
    threading.Thread(target=echo, args=(l.accept()[0],), daemon=True).start()
"""
PROGRAM = f"""
import ctypes, os, select, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
class Event(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("events", ctypes.c_uint32), ("data", ctypes.c_uint64)]

def add(e, sock, events):
    assert not libc.epoll_ctl(e, 1, sock.fileno(), ctypes.byref(Event(events, {DATA})))

def told(e):
    found = (Event * 8)()
    return sorted((f.events, f.data) for f in found[:libc.epoll_wait(e, found, 8, 50)])

def other(kind):
    if kind == "unix":
        return socket.socketpair()
    if kind == "unconnected":
        return socket.socket(), None
    with socket.create_server(("127.0.0.1", 0)) as l:
        return socket.create_connection(l.getsockname()), l.accept()[0]

for kind in "unix", "loopback", "unconnected":
    for events in select.EPOLLIN, select.EPOLLIN | select.EPOLLOUT, select.EPOLLIN | select.EPOLLRDHUP, \\
            select.EPOLLIN | select.EPOLLET:
        e = libc.epoll_create1(0)
        ring = socket.create_connection((sys.argv[1], {PORT}))
        mine, theirs = other(kind)
        add(e, mine, events)
        add(e, ring, events)
        seen = [told(e)]
        ring.sendall(b"question")
        time.sleep(0.05)
        if theirs:
            theirs.sendall(b"x")
        seen.append(told(e))
        seen += [ring.recv(100), mine.recv(9) if theirs else b"", told(e)]
        if theirs:
            theirs.close()
        seen.append(told(e))
        print(kind, hex(events), seen, flush=True)
        os.close(e)
        ring.close()
        mine.close()
"""


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Sandbox("data") as sandbox, Service(without_offloads(sandbox)) as running:
        introduce(sandbox)
        sandbox.start(sandbox.b, [sys.executable, "-uc", ECHO, sandbox.b.address]).wait_for("ready")
        yield running


def test_the_same_data(service: Service) -> None:
    box = service.sandbox
    argv = [sys.executable, "-uc", PROGRAM, box.b.address]
    kernel = box.start(box.a, argv).result(30).splitlines()
    # the kernel's descriptors are looked at by each call
    shim = service.run_argv(argv, profile="none", VMA_HYBRID_TCP="offload", VMA_RX_POLL="100", VMA_SELECT_SKIP_OS="1",
                            VMA_SELECT_POLL_OS_RATIO="1", VMA_TRACELEVEL="warning")
    assert box.start(box.a, shim, env=service.env).result(30).splitlines() == kernel
    assert len(kernel) == 12
