"""A program at the limit of its descriptors: a move needs none, and calls say what the kernel says."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from net.service_lab import Api
from net.test_tcp_shim import introduce, without_offloads

from vmahybrid.bench.sandbox import Program, Sandbox
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

PORT = 7460
COMMON = f"""
import errno, os, resource, select, socket, sys, threading, time
ADDRESS, PORT = sys.argv[1], {PORT}
def limit(n):
    resource.setrlimit(resource.RLIMIT_NOFILE, (n, n))
def full():
    held = []
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError as error:
        assert error.errno == errno.EMFILE, error
    return held
def rounds(s, n, size=4):
    for _ in range(n):
        s.sendall(b"x" * size)
        got = 0
        while got < size:
            data = s.recv(size - got)
            assert data, "the end of the stream"
            got += len(data)
def server():
    return socket.create_server((ADDRESS, PORT), backlog=64)
def nodelay(s):
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return s
def client():
    return nodelay(socket.create_connection((ADDRESS, PORT), 5))
"""
ECHO = COMMON + """
listener = server()
print("ready", flush=True)
def echo(s):
    while data := s.recv(65536):
        s.sendall(data)
    s.close()
while True:
    threading.Thread(target=echo, args=(nodelay(listener.accept()[0]),), daemon=True).start()
"""
# one answer that is longer than what the peer reads at once, and the end
ANSWERS = COMMON + """
listener = server()
print("ready", flush=True)
limit(256)
for visit in range(2):
    s = nodelay(listener.accept()[0])
    for _ in range(200):
        s.sendall(s.recv(4))
    HELD
    s.sendall(b"R" * 100000)
    END
    for fd in held:
        os.close(fd)
print("done", flush=True)
"""
READS = COMMON + """
for visit in range(2):
    s = client()
    rounds(s, 200)
    time.sleep(0.3)
    got = 0
    while data := s.recv(65536):
        got += len(data)
        time.sleep(0.01)
    print(got, flush=True)
"""
LIMITS = {"descriptors": "held = full()", "file size": "held = []; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"}
ENDS = {
    "close": "s.close()",
    "shutdown": "s.shutdown(socket.SHUT_WR); s.close()",
    "exit": "\n    if visit:\n        print('done', flush=True)\n        sys.exit(0)\n    s.close()",
}
# until socket() says no; nothing that was there is lost, and one that is closed makes room for another
CONNECTS = COMMON + """
limit(48)
there = []
try:
    while True:
        there.append(client())
        rounds(there[-1], 100 if len(there) < 4 else 1)
except OSError as error:
    print(errno.errorcode[error.errno], flush=True)
for s in there[:6] + there[-3:]:
    rounds(s, 20)
    rounds(s, 2, 5000)
try:
    there[0].dup()
except OSError as error:
    print(errno.errorcode[error.errno], flush=True)
for s in there:
    rounds(s, 5)
for s in there[-3:]:  # the shim may want one or two that it could not have
    s.close()
s = client()
rounds(s, 100)
print("done", flush=True)
"""
# descriptors run out between connect() and adoption; a thread sleeps in a set meanwhile
BECOMES_BUSY = COMMON + """
def asks(n):
    for _ in range(n):
        s.send(b"x")
        assert ready.poll(5), "nothing came"
        assert s.recv(9) == b"x"
limit(64)
first = client()
rounds(first, 100)
ready = select.epoll()
s = client()
s.setblocking(False)
ready.register(s, select.EPOLLIN)
held = full()
asks(400)
rounds(first, 100)
for fd in held:
    os.close(fd)
time.sleep(0.1)
asks(1000)
print("done", flush=True)
"""


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Sandbox("test") as sandbox:
        introduce(without_offloads(sandbox))
        with Service(sandbox) as running:
            yield running


def taken(service: Service) -> int:
    return int(Api(service).status()["counters"].get("tcp_taken_total", 0))


def start(service: Service, side: str, text: str, policy: str) -> Program:
    sandbox = service.sandbox
    argv = [sys.executable, "-c", text, sandbox.b.address]
    if policy:
        argv = service.run_argv(argv, VMA_HYBRID_TCP=policy, VMA_HYBRID_TCP_BUDGET="100", VMA_RX_POLL="200")
    return sandbox.start(getattr(sandbox, side), argv, env=service.env)


def ended(program: Program) -> list[str]:
    assert program.wait(30) == 0, program.output + program.errors
    assert "could not go home" not in program.errors and "lost" not in program.errors, program.errors
    return program.output.splitlines()


@pytest.mark.parametrize("policy", ["", "adaptive", "offload"])
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("end", ENDS)
def test_the_peer_gets_everything_and_the_end(service: Service, policy: str, limit: str, end: str) -> None:
    server = start(service, "b", ANSWERS.replace("HELD", LIMITS[limit]).replace("END", ENDS[end]), policy)
    server.wait_for("ready")
    assert ended(start(service, "a", READS, "")) == ["100000", "100000"]
    server.wait(10)


@pytest.mark.parametrize("policy", ["", "adaptive", "offload"])
def test_a_client_hears_of_the_limit_and_loses_nothing(service: Service, policy: str) -> None:
    server = start(service, "b", ECHO, "")
    server.wait_for("ready")
    try:
        said = ended(start(service, "a", CONNECTS, policy))
        # dup() may find the place of one that the shim had for a moment when the last connect() met the limit
        assert (said[0], said[-1]) == ("EMFILE", "done")
        assert policy or said == ["EMFILE", "EMFILE", "done"]
    finally:
        server.stop()


@pytest.mark.parametrize("policy", ["", "adaptive", "offload"])
def test_a_connection_that_becomes_busy_at_the_limit(service: Service, policy: str) -> None:
    server = start(service, "b", ECHO, "")
    server.wait_for("ready")
    before = taken(service)
    try:
        assert ended(start(service, "a", BECOMES_BUSY, policy)) == ["done"]
    finally:
        server.stop()
    if policy == "adaptive":
        assert taken(service) - before == 2, "both come to the ring"
