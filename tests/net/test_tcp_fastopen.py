"""MSG_FASTOPEN: sending connects. The kernel opens the connection, whatever the policy, and says what it says alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from net.service_lab import tcp_echo
from net.test_tcp_shim import introduce, without_offloads

from vmahybrid.bench.sandbox import Sandbox, run_command
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

PORT = 7430
PROGRAM = """
import json, select, socket, sys
server, F = (sys.argv[1], int(sys.argv[2])), socket.MSG_FASTOPEN
told = []
def tell(call, *arguments):
    try:
        told.append(str(call(*arguments)))
    except OSError as error:
        told.append(error.errno)
def new():
    sock = socket.socket()
    sock.settimeout(5)
    return sock
def converse(sock):
    tell(lambda: sock.getpeername()[:2])
    for i in range(50):
        text = b"%05d" % i
        sock.sendall(text)
        assert sock.recv(5, socket.MSG_WAITALL) == text
    sock.close()
for blocking in True, False:
    for call in ("sendto", "sendmsg"):
        sock = new()
        sock.setblocking(blocking)
        tell(*((sock.sendto, b"hello", F, server) if call == "sendto" else (sock.sendmsg, [b"hello"], [], F, server)))
        sent = told[-1] == "5"  # else it has only begun to connect
        assert select.select([], [sock], [], 5)[1]
        tell(sock.getsockopt, socket.SOL_SOCKET, socket.SO_ERROR)
        sock.settimeout(5)
        if sent:
            tell(sock.recv, 5)
        if blocking:
            tell(sock.connect, server)
        converse(sock)
        sock = new()
        tell(*((sock.sendto, b"hello", F, (server[0], 1)) if call == "sendto" else
               (sock.sendmsg, [b"hello"], [], F, (server[0], 1))))
        tell(sock.connect, server)
        sock.close()
sock = new()
tell(sock.sendto, b"x", socket.MSG_NOSIGNAL, server)
tell(sock.connect, server)
tell(sock.sendto, b"again", 0, server)
tell(sock.recv, 5)
print(json.dumps(told))
"""

# What a further connect() says once the connection is open, in whatever way it was begun.
AGAIN = """
import json, os, select, socket, struct, sys
server, F, FASTOPEN_CONNECT = (sys.argv[1], int(sys.argv[2])), socket.MSG_FASTOPEN, 30
told = []
def tell(call, *arguments):
    try:
        told.append(str(call(*arguments)))
    except OSError as error:
        told.append(error.errno)
def send(call, *arguments):
    global sent
    tell(call, *arguments)
    sent += int(told[-1]) if isinstance(told[-1], str) else 0
def ready(sock):
    assert select.select([], [sock], [], 5)[1]
def begin(how, sock):
    if how == "bound":
        sock.bind((sys.argv[3], 0))
    if how == "put off":
        sock.setsockopt(6, FASTOPEN_CONNECT, 1)
    if how == "sent":
        send(sock.sendto, b"hello", F, server)
    else:
        tell(sock.connect_ex, server)
    if how == "without address":
        ready(sock)
        send(sock.send, b"x", F)
        send(sock.sendto, b"x", 0, server)
for how in "plain", "bound", "put off", "sent", "without address":
    for blocking in True, False:
        for then in "at once", "used", "home":
            told.append((how, blocking, then))
            sock, sent = socket.socket(), 0
            sock.setblocking(blocking)
            begin(how, sock)
            if how == "put off":
                send(sock.send, b"first")
            ready(sock)
            if then != "at once":
                send(sock.send, b"again")
                sock.setblocking(True)
                told.append(sock.recv(sent, socket.MSG_WAITALL).decode())
                sock.setblocking(blocking)
            if then == "home":
                os.close(os.dup(sock.fileno()))
            for _ in range(3):
                tell(sock.connect_ex, server)
            tell(sock.getsockopt, socket.SOL_SOCKET, socket.SO_ERROR)
            send(sock.send, b"12345")
            sock.close()
sock = socket.socket()
for call in (sock.send, b"x", F), (sock.connect_ex, server), (sock.sendto, b"x", F, server), (sock.send, b"y", F), \\
        (sock.sendto, b"z", F, server):
    tell(*call)
sock = socket.socket()
for call in (sock.sendto, b"x", F, ("127.0.0.1", 0)), (sock.send, b"x", F), (sock.connect_ex, server), \\
        (sock.sendmsg, [b"x"], [], F, server), (sock.connect_ex, server):
    tell(*call)
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Sandbox("fast") as sandbox, Service(without_offloads(sandbox)) as running:
        introduce(sandbox)
        yield running


@pytest.mark.parametrize("cookies", [False, True], ids=["", "cookies"])
@pytest.mark.parametrize("policy", ["offload", "adaptive"])
@pytest.mark.parametrize("program", [PROGRAM, AGAIN], ids=["", "again"])
def test_the_kernel_says_the_same(service: Service, policy: str, cookies: bool, program: str) -> None:
    """With cookies the server gives one, and the next connection's data is in its SYN."""
    box = service.sandbox
    listens = tcp_echo(PORT)
    if cookies:
        listens = listens.replace("print(", "listener.setsockopt(6, socket.TCP_FASTOPEN, 16)\nprint(", 1)
        for side in box.sides:
            run_command(*side.command(["sysctl", "-qw", "net.ipv4.tcp_fastopen=3"]))
    server = box.start(box.b, [sys.executable, "-uc", listens])
    server.wait_for("ready")
    argv = [sys.executable, "-c", program, box.b.address, str(PORT), box.a.address]

    def told(shim: bool) -> Any:
        mine = service.run_argv(argv, "none", VMA_HYBRID_TCP=policy, VMA_RX_POLL="100", VMA_TRACELEVEL="warn")
        return json.loads(box.start(box.a, mine if shim else argv, env=service.env if shim else None).result(30))

    try:
        told(False)  # the cookie
        assert told(True) == told(False)
    finally:
        server.close()
        for side in box.sides:
            run_command(*side.command(["sysctl", "-qw", "net.ipv4.tcp_fastopen=1"]))
