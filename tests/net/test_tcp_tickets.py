"""Connections that came by a ring and that nobody had accepted when their listener went to another process: whoever
accepts has them, however it waits, and their peers notice nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator

import pytest
from net.test_tcp_shim import with_ipv6, without_offloads
from net.test_tcp_syn import know

from vmahybrid.bench.sandbox import Program, Sandbox
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

PORT, CLIENTS = 7470, 24
SERVER = r"""
import asyncio, ctypes, json, os, select, signal, socket, struct, subprocess, sys, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
how, address, backlog, options = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
family = socket.AF_INET6 if ":" in address else socket.AF_INET
l = socket.socket(family)
l.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
l.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 9))
for level, name, value in options:
    l.setsockopt(level, name, value)
l.bind((address, int(sys.argv[5])))
l.listen(64)
print("ready", flush=True)
first = l.accept()[0]
print("accepted", flush=True)
signal.sigwait([signal.SIGUSR1])        # clients come meanwhile
began = time.monotonic()
if how.endswith("leaves"):
    l.listen(backlog)

def name(fd):
    return os.readlink(f"/proc/self/fd/{fd}")

def serve(s, peer, who):
    assert s.getpeername() == peer and s.getsockname()[1] == l.getsockname()[1]
    assert s.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8) == struct.pack("ii", 1, 9)
    assert not os.get_inheritable(s.fileno())
    assert s.getblocking() and s.recv(100).startswith(b"question")
    s.sendall(f"{who} {peer[1]}".encode())
    s.close()

def accepts(who):
    l.settimeout(None)
    while True:
        serve(*l.accept(), who)

def ready(who, wait):
    l.setblocking(False)
    while True:
        wait()
        try:
            s, peer = l.accept()
        except BlockingIOError:
            continue
        s.setblocking(True)
        serve(s, peer, who)

def epoll(who):
    e = select.epoll()
    e.register(l, select.EPOLLIN)
    ready(who, e.poll)

async def loop(who):
    async def visit(r, w):
        assert (await r.read(100)).startswith(b"question")
        w.write(f"{who} {w.get_extra_info('peername')[1]}".encode())
        w.close()
    async with await asyncio.start_server(visit, sock=l) as server:
        await server.serve_forever()

def raw(who):       # accept4(2) tells the whole name, or as much as there is room for, and sets the mode
    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_uint(6)
    peer = (ctypes.c_ubyte * 16)(*[0xee] * 16)
    while True:
        size.value = 6
        fd = libc.accept4(l.fileno(), peer, ctypes.byref(size), socket.SOCK_NONBLOCK)
        s = socket.socket(fileno=fd)
        assert size.value == 16 and bytes(peer)[6:] == b"\xee" * 10
        assert int.from_bytes(bytes(peer)[2:4], "big") == s.getpeername()[1]
        assert os.get_inheritable(fd) and not os.get_blocking(fd) and fd == lowest
        s.setblocking(True)
        s.set_inheritable(False)
        serve(s, s.getpeername(), who)

WAYS = {"raw": raw, "accept": accepts, "select": lambda who: ready(who, lambda: select.select([l], [], [])),
        "epoll": epoll, "asyncio": lambda who: asyncio.run(loop(who))}
def fork_and_exec(argv):
    if not os.fork():
        os.execv(argv[0], argv)

def inetd(argv):            # it waits for the first, and has the rest served
    select.select([l], [], [])
    if not os.fork():
        os.dup2(l.fileno(), 0)
        os.execv(argv[0], [*argv[:3], "0"])

heirs = {"execs": lambda argv: os.execv(argv[0], argv), "forks and execs": fork_and_exec, "inetd": inetd,
         "popen": lambda argv: subprocess.Popen(argv, pass_fds=[l.fileno()]),
         "spawns": lambda argv: os.posix_spawn(argv[0], argv, os.environ)}
lowest = os.dup(0)
os.close(lowest)
way, _, kind = how.partition("-")
if kind == "closes":
    if os.fork():
        l.close()
        os.wait()
    else:
        l.close()
        left = [f for f in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{f}") and "socket" in name(f)]
        print("left", [name(f) for f in left if f != str(first.fileno())], flush=True)
        time.sleep(60)
elif kind == "daemon":      # by hand: the first is gone
    if os.fork():
        os._exit(0)
    WAYS[way]("child")
elif kind == "three":
    who = "parent"
    for n in range(2):
        if not os.fork():
            who = f"child{n}"
            break
    WAYS[way](who)
elif kind == "ends":        # the child does not want them
    if not os.fork():
        os._exit(0)
    os.wait()
    WAYS[way]("parent")
elif kind == "leaves":      # the child accepts none, and goes on
    if not os.fork():
        l.close()
        time.sleep(60)
    WAYS[way]("parent")
elif kind in heirs:         # another program has it
    os.set_inheritable(l.fileno(), True)
    heirs[kind]([sys.executable, "-uc", sys.argv[6], str(l.fileno())])
    time.sleep(60)
elif kind == "goes on":     # beside another one
    os.set_inheritable(l.fileno(), True)
    assert subprocess.run(["/bin/cat"], input=b"x", close_fds=False, stdout=subprocess.PIPE).stdout == b"x"
    WAYS[way]("parent")
elif kind == "shuts":
    if way == "forked" and not os.fork():
        time.sleep(60)
    l.shutdown(socket.SHUT_RD)
    time.sleep(60)
elif kind == "passes":
    ours, theirs = socket.socketpair()
    if os.fork():
        socket.send_fds(ours, [b"x"], [l.fileno()])
        time.sleep(60)
    l.close()
    l = socket.socket(fileno=socket.recv_fds(theirs, 1, 1)[1][0])
    l.set_inheritable(False)
    WAYS[way]("child")
elif os.fork():
    time.sleep(60)          # the parent has no more to do with it
else:
    WAYS[way]("child")
"""
HEIR = r"""
import socket, sys
l = socket.socket(fileno=int(sys.argv[1]))
while True:
    s, peer = l.accept()
    assert s.getpeername() == peer and s.recv(100).startswith(b"question")
    s.sendall(f"heir {peer[1]}".encode())
    s.close()
"""
CLIENT = """
import json, signal, socket, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
n, address, port = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
first = socket.create_connection((address, port), 5)
signal.sigwait([signal.SIGUSR1])
mine = [socket.create_connection((address, port), 5) for _ in range(n)]
for s in mine:
    s.sendall(b"question")
print("asked", flush=True)
seen = {}
for s in mine:
    s.settimeout(10)
    try:
        who, port = s.recv(100).split()
        assert int(port) == s.getsockname()[1]
        seen[who.decode()] = seen.get(who.decode(), 0) + 1
    except (OSError, ValueError) as error:
        seen[type(error).__name__] = seen.get(type(error).__name__, 0) + 1
print(json.dumps(seen), flush=True)
"""


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Sandbox("tickets") as sandbox, Service(without_offloads(with_ipv6(sandbox))) as running:
        for ip in "46":
            know(sandbox, ip)
        yield running


def visits(service: Service, how: str, *, listens: str = "", n: int = CLIENTS, backlog: int = 64,
           options: tuple[tuple[int, int, int], ...] = ()) -> tuple[dict[str, int], Program, Program]:
    """What the clients saw, by whom they were answered; their program and the server's."""
    shim = {"VMA_HYBRID_TCP": "offload", "VMA_RX_POLL": "100"}
    sandbox, port = service.sandbox, str(PORT)
    v6 = "fd77::2" if (socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1) in options or listens == "fd77::2" else ""
    argv = service.run_argv([sys.executable, "-uc", SERVER, how, listens or sandbox.b.address, str(backlog),
                             json.dumps(options), port, HEIR], **shim)
    b = sandbox.start(sandbox.b, argv, env=service.env)
    b.wait_for("ready")
    a = sandbox.start(sandbox.a, [sys.executable, "-uc", CLIENT, str(n), v6 or sandbox.b.address, port])
    b.wait_for("accepted")
    a.process.send_signal(signal.SIGUSR1)
    a.wait_for("asked")
    time.sleep(0.1)
    b.process.send_signal(signal.SIGUSR1)
    return json.loads(a.wait_for(r"\{.*\}", 30)[0]), a, b


def ended(*programs: Program) -> None:
    for program in programs:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.process.pid, signal.SIGKILL)   # children, too
        program.stop(signal.SIGKILL)


@pytest.mark.parametrize(("how", "by"), [
    ("accept-", "child"), ("select-", "child"), ("epoll-", "child"), ("asyncio-", "child"), ("raw-", "child"),
    ("accept-daemon", "child"), ("epoll-daemon", "child"), ("epoll-ends", "parent"), ("accept-leaves", "parent"),
    ("accept-passes", "child"), ("epoll-goes on", "parent")])
def test_who_accepts_has_them(service: Service, how: str, by: str) -> None:
    seen, *programs = visits(service, how)
    ended(*programs)
    assert seen == {by: CLIENTS}, (seen, programs[1].errors)


@pytest.mark.parametrize("how", ["execs", "forks and execs", "inetd", "popen", "spawns"])
def test_another_program_that_gets_the_listener(service: Service, how: str) -> None:
    seen, *programs = visits(service, f"accept-{how}")
    ended(*programs)
    assert seen == {"heir": CLIENTS}, (seen, programs[1].errors)


@pytest.mark.parametrize("how", ["alone", "forked"])
def test_a_listener_that_is_shut_down(service: Service, how: str) -> None:
    seen, *programs = visits(service, f"{how}-shuts")
    ended(*programs)
    assert seen == {"ConnectionResetError": CLIENTS}, seen


def test_of_several_processes_each_has_some(service: Service) -> None:
    seen, *programs = visits(service, "epoll-three", n=60)
    ended(*programs)
    assert sum(seen.values()) == 60 and set(seen) <= {"parent", "child0", "child1"}, (seen, programs[1].errors)


def test_closed_by_all_they_are_reset(service: Service) -> None:
    """As the kernel does with those of its queue."""
    seen, a, b = visits(service, "accept-closes")
    assert b.wait_for(r"left (.*)")[1] == "[]"
    ended(a, b)
    assert seen == {"ConnectionResetError": CLIENTS}, seen


@pytest.mark.parametrize(("listens", "only_v6"), [("0.0.0.0", 0), ("::", 0), ("::", 1), ("fd77::2", 0)])
def test_of_a_listener_on(service: Service, listens: str, only_v6: int) -> None:
    options = ((socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1),) if only_v6 else ()
    seen, *programs = visits(service, "epoll-", listens=listens, options=options)
    ended(*programs)
    assert seen == {"child": CLIENTS}, (seen, programs[1].errors)


def test_of_a_listener_that_waits_for_data(service: Service) -> None:
    seen, *programs = visits(service, "accept-", options=((socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 5),))
    ended(*programs)
    assert seen == {"child": CLIENTS}, (seen, programs[1].errors)


@pytest.mark.parametrize("why", ["queue", "loopback"])
def test_what_has_no_ticket_stays_with_the_parent(service: Service, why: str) -> None:
    """Where we can't come to the listener ourselves."""
    if why == "loopback":
        service.sandbox.b.ip("link", "set", "lo", "down")
    try:
        seen, *programs = visits(service, "accept-leaves", n=9, backlog=1 if why == "queue" else 64)
    finally:
        service.sandbox.b.ip("link", "set", "lo", "up")
    ended(*programs)
    assert seen == {"parent": 9}, (seen, programs[1].errors)
