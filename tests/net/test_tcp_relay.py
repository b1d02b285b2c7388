"""Connections that came by a ring and that nobody had accepted when a program without the shim got their listener: it
accepts them, and their peers notice nothing; nor when the service stops."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator

import pytest
from net.service_lab import Api, until
from net.test_tcp_shim import without_offloads
from net.test_tcp_syn import know
from net.test_tcp_tickets import ended

from vmahybrid.bench.sandbox import Program, Sandbox
from vmahybrid.bench.served import Service
from vmahybrid.net.netns import NetnsWorker

pytestmark = pytest.mark.root

PORT, CLIENTS, MUCH = 7471, 8, 8 << 20
# accepts one, then has another program serve the listener, to which its environment says nothing of the shim
LAUNCHER = r"""
import os, signal, socket, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
l = socket.create_server((sys.argv[1], int(sys.argv[2])), backlog=64)
print("ready", flush=True)
first = l.accept()[0]
print("accepted", flush=True)
signal.sigwait([signal.SIGUSR1])        # clients come meanwhile
l.set_inheritable(True)
if sys.argv[4] == "deferred":
    l.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 5)
env = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
os.execve(sys.executable, [sys.executable, "-uc", sys.argv[3], str(l.fileno()), sys.argv[4]], env)
"""
HEIR = r"""
import hashlib, socket, struct, sys, threading
l, how = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
assert not any("libvmahybrid" in line for line in open("/proc/self/maps"))
def serve(s):
    if how == "greets":
        s.sendall(b"hello")
    if how == "closes":
        s.recv(100)
    elif how == "resets":
        s.recv(100)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    else:
        said = hashlib.sha256()
        while data := s.recv(1 << 20):
            said.update(data)
            if how == "echoes":
                s.sendall(data)
        s.sendall(said.hexdigest().encode())
    s.close()
if how == "shuts":
    l.close()
    threading.Event().wait()
while True:
    threading.Thread(target=serve, args=(l.accept()[0],)).start()
"""


@pytest.fixture
def service() -> Iterator[Service]:
    with Sandbox("relay") as sandbox, Service(without_offloads(sandbox)) as running:
        know(sandbox, "4")
        yield running


def inherited(service: Service, how: str, question: bytes) -> tuple[list[socket.socket], Program]:
    """Connections of this process, which have asked and wait, and the program that has the listener by now."""
    sandbox = service.sandbox
    argv = service.run_argv([sys.executable, "-uc", LAUNCHER, sandbox.b.address, str(PORT), HEIR, how],
                            VMA_HYBRID_TCP="offload", VMA_RX_POLL="100")
    program = sandbox.start(sandbox.b, argv, env=service.env)
    program.wait_for("ready")
    with NetnsWorker.open_path(sandbox.a.netns) as worker:
        socks = [worker.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(CLIENTS + 1)]
    for number, sock in enumerate(socks):
        sock.settimeout(15)
        sock.connect((sandbox.b.address, PORT))
        if not number:
            program.wait_for("accepted")
            socks[0].close()
        elif question:
            sock.sendall(question)
    time.sleep(0.1)
    program.process.send_signal(signal.SIGUSR1)
    return socks[1:], program


def relayed(service: Service) -> int:
    return int(Api(service).status()["counters"].get("tcp_relayed_total", 0))


def all_of(sock: socket.socket) -> bytes:
    data = b""
    while more := sock.recv(1 << 20):
        data += more
    return data


def digest(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()


@pytest.mark.parametrize(("how", "late"), [("reads", False), ("reads", True), ("greets", False), ("greets", True),
                                           ("deferred", False)])
def test_it_accepts_them(service: Service, how: str, late: bool) -> None:
    clients, program = inherited(service, how, b"" if late else b"question")
    if late:
        time.sleep(0.5)
    for sock in clients:
        if late:
            sock.sendall(b"question")
        sock.sendall(b" and answer")
        sock.shutdown(socket.SHUT_WR)
    for sock in clients:
        greeting = b"hello" if how == "greets" else b""
        assert all_of(sock) == greeting + digest(b"question and answer"), program.errors
        sock.close()
    assert until(lambda: relayed(service) == CLIENTS)
    ended(program)


def test_they_end_as_the_program_ends_them(service: Service) -> None:
    for how, end in (("closes", b""), ("resets", None), ("shuts", None)):
        clients, program = inherited(service, how, b"question")
        for sock in clients:
            if end is None:
                with pytest.raises(ConnectionResetError):
                    sock.recv(1)
            else:
                assert sock.recv(1) == end
            sock.close()
        ended(program)


def test_much_both_ways_and_the_service_stops(service: Service) -> None:
    clients, program = inherited(service, "echoes", b"begin")
    for sock in clients:
        assert sock.recv(5, socket.MSG_WAITALL) == b"begin"
    assert until(lambda: relayed(service) == CLIENTS)
    data = os.urandom(MUCH)
    sock = clients[0]
    sock.setblocking(False)
    sent = sock.send(data)
    sock.settimeout(15)
    service.stop()
    got = b""
    while sent < MUCH:
        sent += sock.send(data[sent:sent + (64 << 10)])
        while len(got) < sent - (32 << 10):
            got += sock.recv(1 << 20)
    sock.shutdown(socket.SHUT_WR)
    assert got + all_of(sock) == data + digest(b"begin" + data)
    for sock in clients[1:]:
        sock.shutdown(socket.SHUT_WR)
        assert all_of(sock) == digest(b"begin")
    for sock in clients:
        sock.close()
    ended(program)
