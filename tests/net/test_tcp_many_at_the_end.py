"""The service stops: more connections than a program brings home in a moment all go on."""

from __future__ import annotations

import signal
import sys

import pytest
from net.introduced_lab import introduced  # noqa: F401
from net.service_lab import Api, xdp_only

from vmahybrid.bench.served import Service

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]

PORT, COUNT = 7790, 3000
SERVER = f"""
import select, socket
listener = socket.create_server(("", {PORT}), backlog=1000)
print("ready", flush=True)
conns, ep = {{}}, select.epoll()
ep.register(listener, select.EPOLLIN)
while True:
    for fd, _ in ep.poll():
        if fd == listener.fileno():
            conn = listener.accept()[0]
            conns[conn.fileno()] = conn
            ep.register(conn, select.EPOLLIN)
        elif data := conns[fd].recv(100):
            conns[fd].sendall(data)
        else:
            del conns[fd]
"""
CLIENT = f"""
import signal, socket, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
conns = []
def answered():
    n = 0
    for c in conns:
        try:
            c.sendall(b"ask")
            n += c.recv(3, socket.MSG_WAITALL) == b"ask"
        except OSError as e:
            print(e, file=sys.stderr)
    return n
for _ in range({COUNT}):
    conns.append(socket.create_connection((sys.argv[1], {PORT})))
    conns[-1].settimeout(10)
print("answered", answered(), flush=True)
signal.sigwait([signal.SIGUSR1])
print("and then", answered(), flush=True)
"""


@xdp_only("a raw packet QP has no listeners: what the kernel accepts is adopted by and by")
def test_all_of_them_come_home(service: Service) -> None:
    sandbox = service.sandbox
    argv = service.run_argv([sys.executable, "-S", "-c", SERVER], "none", VMA_HYBRID_TCP="offload")
    sandbox.start(sandbox.b, argv, env=service.env).wait_for("ready")
    client = sandbox.start(sandbox.a, [sys.executable, "-S", "-c", CLIENT, sandbox.b.address])
    client.wait_for(rf"answered {COUNT}\n", 60)
    flows = Api(service).socket_flows()
    assert sum(flow["packets"] for flow in flows if flow["action"] == "ring") >= 2 * COUNT  # of each the SYN, the ACK
    service.stop(60)
    client.process.send_signal(signal.SIGUSR1)
    assert client.wait(60) == 0
    assert f"and then {COUNT}\n" in client.output, client.errors[-500:]
