"""unshare() and setns() that only a process of one thread may call: the internal thread is out of the way."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from net.service_lab import Api, tcp_echo, udp_echo
from net.test_tcp_shim import introduce, offloaded, without_offloads

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

PORT = 7480
CALLS = {
    "user": "call(libc.unshare, 0x10000000)",
    "user, by syscall()": "call(libc.syscall, 272, 0x10000000)",
    "own mount namespace": "call(libc.setns, os.open('/proc/self/ns/mnt', os.O_RDONLY), 0x20000)",
    "what no process may": "call(libc.unshare, 1)",
}
SERVER = f"""
import ctypes, errno, os, socket, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def call(function, *arguments):
    r = function(*arguments)
    print(r and errno.errorcode[ctypes.get_errno()], flush=True)
if sys.argv[3:]:
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
listener = socket.create_server((sys.argv[1], {PORT}))
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind((sys.argv[1], {PORT}))
print("ready", flush=True)
s = listener.accept()[0]
for _ in range(50):
    s.sendall(s.recv(100))
exec(sys.argv[2])
for _ in range(50):
    s.sendall(s.recv(100))
print("threads", len(os.listdir("/proc/self/task")), flush=True)
data, peer = udp.recvfrom(100)
udp.sendto(data, peer)
while data := s.recv(100):
    s.sendall(data)
"""
CLIENT = f"""
import socket, sys, time
s = socket.create_connection((sys.argv[1], {PORT}), 5)
for _ in range(100):
    s.sendall(b"x" * 50)
    assert len(s.recv(50, socket.MSG_WAITALL)) == 50
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.settimeout(5)
udp.sendto(b"datagram", (sys.argv[1], {PORT}))
assert udp.recv(100) == b"datagram"
print("halfway", flush=True)
time.sleep(1)
"""

# A thread with a descriptor table of its own, whose copy of the connection outlives the others' close()
PARTED = f"""
import ctypes, os, socket, sys, threading
s = socket.create_connection((sys.argv[1], {PORT}), 5)
s.settimeout(None)
number, parted, closed = s.fileno(), threading.Event(), threading.Event()
def ask():
    os.write(number, b"x" * 50)
    return len(os.read(number, 50))
def run():
    print("unshare", ctypes.CDLL(None).unshare(0x400), flush=True)
    parted.set()
    closed.wait(5)
    print("goes on", sum(ask() for _ in range(50)), flush=True)
ask()
thread = threading.Thread(target=run)
thread.start()
parted.wait(5)
s.close()
closed.set()
thread.join(5)
"""
# The first thread begins with sockets when another has a table of its own, with other files by the same numbers
APART = f"""
import ctypes, socket, sys, threading
parted, made, asked = threading.Event(), threading.Event(), threading.Event()
def connect():
    s = socket.create_connection((sys.argv[1], {PORT}), 5)
    s.settimeout(None)
    return s
def ask(s, word, times):
    for i in range(times):
        data = b"%s %d" % (word, i)
        s.sendall(data)
        assert s.recv(100) == data
def run():
    assert ctypes.CDLL(None).unshare(0x400) == 0
    others = [socket.socketpair() for _ in range(20)]
    parted.set()
    made.wait(5)
    for _ in range(20):
        socket.socket().close()
    mine = connect()
    ask(mine, b"own", 200)
    for pair in others:
        for end in pair:
            end.setblocking(False)
            try:
                print("unasked", end.recv(100))
            except BlockingIOError:
                pass
    asked.set()
thread = threading.Thread(target=run)
thread.start()
parted.wait(5)
s = connect()
made.set()
asked.wait(5)
ask(s, b"all", 200)
more = [connect() for _ in range(3)]
for one in more:
    ask(one, b"more", 200)
print("done", flush=True)
threading.Event().wait(1)
"""
# Datagrams go to and fro while another thread leaves
DATAGRAMS = f"""
import ctypes, select, socket, sys, threading
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(("0.0.0.0", 0))
udp.connect((sys.argv[1], {PORT}))
poll = select.poll()
poll.register(udp, select.POLLIN)
udp.setblocking(sys.argv[3] == "recv")
def ask():
    udp.send(b"x" * 50)
    if sys.argv[3] == "poll":
        poll.poll()
    return len(udp.recv(100)) == 50
for _ in range(50):
    assert ask()
answers = []
thread = threading.Thread(target=lambda: answers.append(ctypes.CDLL(None).unshare(int(sys.argv[2]))))
thread.start()
came = 0
while not answers or came < 100:
    came += ask()
print(*answers, "done", flush=True)
thread.join()
"""
# Sockets come and go in eight threads while another leaves
NEW_ONES = f"""
import ctypes, socket, sys, threading, time
lost, over = [], threading.Event()
def visits():
    while not over.is_set():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            udp.bind(("0.0.0.0", 0))
            udp.connect((sys.argv[1], {PORT}))
            udp.settimeout(2)
            for _ in range(6):
                udp.send(b"x")
                try:
                    udp.recv(1)
                except TimeoutError:
                    lost.append(udp)
threads = [threading.Thread(target=visits) for _ in range(8)]
for thread in threads:
    thread.start()
time.sleep(0.5)
answers = []
leaves = threading.Thread(target=lambda: answers.append(ctypes.CDLL(None).unshare(int(sys.argv[2]))))
leaves.start()
leaves.join()
time.sleep(0.3)
over.set()
for thread in threads:
    thread.join()
print(*answers, len(lost), "lost", flush=True)
"""
# A thread leaves with nothing of what the others wait for, and has sockets by the same numbers
WATCHED = f"""
import ctypes, select, socket, sys, threading
libc, left, well = ctypes.CDLL(None), threading.Event(), []
events = select.epoll()
sockets = [socket.create_connection((sys.argv[1], {PORT}), 5) for _ in range(10)]
for s in sockets:
    s.settimeout(None)
    events.register(s, select.EPOLLIN)
by_number = {{s.fileno(): s for s in sockets}}
once = select.EPOLLIN | select.EPOLLONESHOT
def rounds(events, by_number, to, again=0):
    for _ in range(60):
        for s in to:
            s.send(b"x")
        silent = set(by_number)
        while silent:
            found = events.poll(3)
            assert found, silent
            for fd, _ in found:
                assert by_number[fd].recv(1) == b"x"
                silent.remove(fd)
                if again:
                    events.modify(fd, again)
def leave():
    first = events.fileno()
    if sys.argv[2] == "close_range":
        assert libc.close_range(first, 1000, 2) == 0
    else:
        assert libc.unshare(0x400) == 0 and libc.close_range(first, 1000, 0) == 0
    own = select.epoll()
    pairs = [socket.socketpair() for _ in range(8)]
    mine = {{a.fileno(): a for a, b in pairs}}
    for fd in mine:
        own.register(fd, once)
    left.set()
    rounds(own, mine, [b for a, b in pairs], once)
    for fd in mine:
        own.unregister(fd)
    well.append(fd)
rounds(events, by_number, sockets)
thread = threading.Thread(target=leave)
thread.start()
assert left.wait(10)
rounds(events, by_number, sockets)
thread.join()
assert well
rounds(events, by_number, sockets)
print("done", flush=True)
"""
# Threads that have waited, and leave
WAITED = f"""
import ctypes, os, socket, sys, threading
def run():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.bind(("0.0.0.0", 0))
        udp.connect((sys.argv[1], {PORT}))
        udp.send(b"x")
        udp.recv(1)
        udp.settimeout(0.1)
        try:
            udp.recv(1)
        except TimeoutError:
            together.wait()
    assert ctypes.CDLL(None).unshare(0x400) == 0
    left.append(udp)
def of(fd):
    try:
        return os.readlink(f"/proc/self/fd/{{fd}}")
    except FileNotFoundError:
        return ""
def wakers():
    return sum("eventfd" in of(fd) for fd in os.listdir("/proc/self/fd"))
left, most = [], 0
def note():
    global most
    most = wakers()
together = threading.Barrier(8, note)
threads = [threading.Thread(target=run) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(left), most >= 8, wakers() <= most - 8, flush=True)
"""
ECHO = f"""
import socket, sys
listener = socket.create_server((sys.argv[1], {PORT}))
print("ready", flush=True)
s = listener.accept()[0]
while data := s.recv(100):
    s.sendall(data)
print("end", flush=True)
"""


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Sandbox("test") as sandbox, Service(without_offloads(sandbox)) as running:
        introduce(sandbox)
        yield running


def visit(service: Service, argv: list[str], on_ring: bool) -> list[str]:
    """What the server has printed."""
    server = service.sandbox.start(service.sandbox.b, argv, env=service.env)
    server.wait_for("ready", 15)
    client = service.sandbox.start(service.sandbox.a, [sys.executable, "-c", CLIENT, service.sandbox.b.address])
    client.wait_for("halfway", 20)
    assert [s["pid"] for s in offloaded(service)] == ([server.pid] if on_ring else [])
    client.result(5)
    return server.result(10).splitlines()


@pytest.mark.parametrize("threads", [[], ["more"]], ids=["one-thread", "more-threads"])
@pytest.mark.parametrize("call", list(CALLS))
def test_as_the_kernel_says(service: Service, call: str, threads: list[str]) -> None:
    argv = [sys.executable, "-c", SERVER, service.sandbox.b.address, CALLS[call], *threads]
    *plain, own = visit(service, argv, on_ring=False)
    *shimmed, with_ours = visit(service, service.run_argv(argv, "latency"), on_ring=True)
    assert own == f"threads {len(threads) + 1}"
    assert with_ours == f"threads {len(threads) + 2}"
    assert shimmed == plain


@pytest.mark.parametrize("policy", ["offload", "adaptive"])
def test_a_thread_keeps_what_the_others_close(service: Service, policy: str) -> None:
    a, b = service.sandbox.sides
    for around in ([], service.run_argv([], "latency", VMA_HYBRID_TCP=policy, VMA_HYBRID_TCP_ROUNDS="8")):
        echo = service.sandbox.start(b, [sys.executable, "-c", ECHO, b.address])
        echo.wait_for("ready", 5)
        client = service.sandbox.start(a, [*around, sys.executable, "-c", PARTED, b.address], env=service.env)
        assert client.result(20) == "unshare 0\ngoes on 2500\n"
        assert echo.result(5) == "ready\nend\n"


@pytest.mark.parametrize("policy", ["offload", "adaptive"])
def test_a_thread_with_a_table_of_its_own(service: Service, policy: str) -> None:
    a, b = service.sandbox.sides
    around = service.run_argv([], "latency", VMA_HYBRID_TCP=policy, VMA_HYBRID_TCP_ROUNDS="8", VMA_STATS_FD_NUM="6")
    echoes = service.sandbox.start(b, [sys.executable, "-c", tcp_echo(PORT)])
    echoes.wait_for("ready", 5)
    client = service.sandbox.start(a, [*around, sys.executable, "-c", APART, b.address], env=service.env)
    client.wait_for("done", 15)
    # rings are reached by descriptors, of which the two tables have different ones: the kernel serves the program
    assert offloaded(service) == []
    assert "has left the others' table of descriptors" in client.errors
    assert client.result(5) == "done\n"
    assert "VMA WARNING" not in client.errors.replace("VMA WARNING: *", "")
    echoes.close()


@pytest.fixture
def datagrams(service: Service) -> Iterator[None]:
    """They are sent back."""
    b = service.sandbox.b
    echo = service.sandbox.start(b, [sys.executable, "-c", udp_echo(PORT), b.address])
    echo.wait_for("ready", 5)
    yield
    echo.close()


def granted(service: Service) -> int:
    return int(Api(service).status()["counters"].get("flows_total", 0))


def ran(service: Service, times: int, program: str, profile: str, *arguments: str) -> list[str]:
    """What it printed each time, with sockets on a ring in the beginning."""
    a, b = service.sandbox.sides
    before = granted(service)
    argv = service.run_argv([sys.executable, "-c", program, b.address, *arguments], profile)
    said = [service.sandbox.start(a, argv, env=service.env).result(20) for _ in range(times)]
    assert granted(service) >= before + times
    return said


@pytest.mark.usefixtures("datagrams")
@pytest.mark.parametrize("how", ["recv", "poll"])
@pytest.mark.parametrize("profile", ["latency", "adaptive"])
@pytest.mark.parametrize("flag", [0x400, 0x40000000], ids=["CLONE_FILES", "CLONE_NEWNET"])
def test_no_datagram_is_lost_when_a_thread_leaves(service: Service, flag: int, profile: str, how: str) -> None:
    assert ran(service, 12, DATAGRAMS, profile, str(flag), how) == ["0 done\n"] * 12


@pytest.mark.usefixtures("datagrams")
@pytest.mark.parametrize("flag", [0x400, 0x40000000], ids=["CLONE_FILES", "CLONE_NEWNET"])
def test_no_datagram_is_lost_of_sockets_that_are_new(service: Service, flag: int) -> None:
    assert ran(service, 6, NEW_ONES, "latency", str(flag)) == ["0 0 lost\n"] * 6


@pytest.mark.usefixtures("datagrams")
def test_no_descriptor_of_a_thread_that_has_left_stays(service: Service) -> None:
    assert ran(service, 1, WAITED, "safe") == ["8 True True\n"]


@pytest.mark.parametrize("how", ["unshare", "close_range"])
@pytest.mark.parametrize(("policy", "rounds"), [("offload", 8), ("adaptive", 8), ("adaptive", 100000)])
def test_what_the_others_watch(service: Service, policy: str, rounds: int, how: str) -> None:
    """On rings until then, or never."""
    a, b = service.sandbox.sides
    echoes = service.sandbox.start(b, [sys.executable, "-c", tcp_echo(PORT)])
    echoes.wait_for("ready", 5)
    shim = service.run_argv([], "latency", VMA_HYBRID_TCP=policy, VMA_HYBRID_TCP_ROUNDS=str(rounds))
    for around in ([], shim):
        client = service.sandbox.start(a, [*around, sys.executable, "-c", WATCHED, b.address, how], env=service.env)
        assert client.result(20) == "done\n"
    echoes.close()
