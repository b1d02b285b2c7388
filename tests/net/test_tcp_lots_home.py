"""Many connections that go home at once, as their program forks, executes another, or ends: each with all its bytes, in
the time of a few."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Sequence

import pytest
from net.introduced_lab import introduced  # noqa: F401
from net.service_lab import Api, homed, until
from net.test_tcp_shim import offloaded

from vmahybrid.bench.sandbox import Program
from vmahybrid.bench.served import Service

pytestmark = [pytest.mark.root, pytest.mark.timeout(90)]

PORT = 7411
CONNS = 75      # two whole lots, and some

# answers "give N\n" by N bytes, "late N\n" by them when the other side has closed, and "end N\n" by closing itself,
# too; tells what it got until the end: "bye N\n"
GIVER = """
import asyncio, sys
async def serve(reader, writer):
    ended = late = 0
    def give(n):
        writer.write((bytes(range(256)) * (n // 256 + 1))[:n])
    try:
        while line := await reader.readline():
            word, n = line.split()
            if word in (b"give", b"end"):
                give(int(n))
            if word == b"end":
                writer.close()
                return
            if word == b"late":
                late = int(n)
            if word == b"bye":
                ended = int(n)
        if late:
            await asyncio.sleep(1)
            give(late)
        writer.close()
    except ConnectionError as error:
        ended = "lost"
    if ended:
        print("bye", ended, flush=True)
async def main():
    server = await asyncio.start_server(serve, "0.0.0.0", int(sys.argv[1]), backlog=512)
    print("ready", flush=True)
    await server.serve_forever()
asyncio.run(main())
"""

COMMON = """
import ctypes, fcntl, os, signal, socket, sys, time
def given(n):
    return (bytes(range(256)) * (n // 256 + 1))[:n]
def ask(s, n, word="give"):
    s.sendall(b"%s %d\\n" % (word.encode(), n))
def read(s, n):
    data = b""
    while len(data) < n:
        more = s.recv(n - len(data))
        assert more, (s.fileno(), len(data), n)
        data += more
    assert data == given(n), (s.fileno(), n)
def kind(i):
    '''What is asked for before, and how much of it.'''
    if i == 3: # much
        return "give", 300000
    return (("give", 1000), ("give", 1), ("late", 50), ("end", 900), ("", 0))[i % 5]
def check(conns):
    '''What is unread, one more round, or the end.'''
    for i, s in conns:
        s.settimeout(40)
        word, n = kind(i)
        read(s, n)
        if word in ("late", "end"):
            assert s.recv(1) == b""
        if word == "end":
            ask(s, 1)
        if word in ("give", ""):
            ask(s, 700)
    for i, s in conns:
        if kind(i)[0] in ("give", ""):
            read(s, 700)
"""

PROGRAM = COMMON + """
how, address, n = sys.argv[1], sys.argv[2], int(sys.argv[3])
conns = [socket.create_connection((address, int(sys.argv[4]))) for _ in range(n)]
for s in conns:
    fcntl.fcntl(s, fcntl.F_SETFD, 0)
for _ in range(5):
    for s in conns:
        ask(s, 30)
    for s in conns:
        read(s, 30)
go = []
signal.signal(signal.SIGUSR1, lambda *_: go.append(1))
print("there", flush=True)
while not go:
    for s in conns:
        ask(s, 30)
    for s in conns:
        read(s, 30)
    time.sleep(0.02)
for i, s in enumerate(conns):
    word, n = kind(i)
    if word:
        ask(s, n, word)
    if word == "late":
        s.shutdown(socket.SHUT_WR)
time.sleep(0.3)
words = [str(s.fileno()) for s in conns]
begun = time.monotonic()
if how == "fork":
    child = os.fork()
    took = time.monotonic() - begun
    check([(i, s) for i, s in enumerate(conns) if i % 2 == bool(child)])
    if not child:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
elif how == "lone fork":
    child = os.fork()
    if not child:
        os._exit(0)
    print("forked", flush=True)
    took = time.monotonic() - begun
    check(list(enumerate(conns)))
    assert os.waitpid(child, 0)[1] == 0
elif how == "spawn":
    env = {**os.environ, "VMA_HYBRID_TCP": "kernel"}
    child = os.posix_spawn(sys.executable, [sys.executable, "-S", "-c", sys.argv[5], *words], env)
    took = time.monotonic() - begun
    assert os.waitpid(child, 0)[1] == 0
elif how == "exec":
    os.execv(sys.executable, [sys.executable, "-S", "-c", sys.argv[5], *words])
elif how == "dup":
    for s in conns:
        os.dup(s.fileno())
    took = time.monotonic() - begun
elif how.endswith("exit"):
    for i, s in enumerate(conns):
        if kind(i)[0] in ("give", ""):
            read(s, kind(i)[1])
            ask(s, 1000 + i, "bye")
    took = 0
    if how == "_exit":
        os._exit(0)
    if how == "TERM exit":
        libc = ctypes.CDLL(None)
        libc.signal.restype = ctypes.c_void_p
        assert not libc.signal(int(signal.SIGTERM), None)   # SIG_DFL it was, and is
        assert not libc.signal(int(signal.SIGTERM), None)
        print("done", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
print("done", took, flush=True)
"""

HEIR = COMMON + """
conns = [(i, socket.socket(fileno=int(word))) for i, word in enumerate(sys.argv[1:])]
check(conns)
print("done", 0, flush=True)
"""


@pytest.fixture
def giver(service: Service) -> Iterator[Program]:
    program = service.sandbox.start(service.sandbox.a, [sys.executable, "-S", "-c", GIVER, str(PORT)])
    program.wait_for("ready")
    yield program
    program.stop(signal.SIGKILL)


@pytest.fixture(params=["offload", "adaptive", ""], ids=["from the SYN", "adopted", "plain"])
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def begun(service: Service, how: str, policy: str, conns: int = CONNS, limits: Sequence[str] = ()) -> Program:
    """With its connections on rings, as ``policy`` has it; "": not under the shim. It goes on with SIGUSR1. ``limits``:
    a command that runs it."""
    words = [*limits, sys.executable, "-S", "-c", PROGRAM, how, service.sandbox.a.address, str(conns), str(PORT), HEIR]
    if policy:
        words = service.run_argv(words, "none", VMA_TRACELEVEL="warn", VMA_HYBRID_TCP=policy)
    program = service.sandbox.start(service.sandbox.b, words, env=service.env)
    program.wait_for("there")
    if policy == "adaptive":
        assert Api(service).call("POST", f"/v1/processes/{program.pid}/move", {"to": "ring"})[0] == 204
    assert until(lambda: len(offloaded(service)) == (conns if policy else 0), 10)
    return program


def run(service: Service, how: str, policy: str, conns: int = CONNS, limits: Sequence[str] = ()) -> tuple[Program, int]:
    """begun(), to the end. How many came home."""
    program = begun(service, how, policy, conns, limits)
    before = homed(service)
    program.process.send_signal(signal.SIGUSR1)
    assert program.wait(40) == (-signal.SIGTERM if "TERM" in how else 0), program.errors + program.output
    return program, homed(service) - before


@pytest.mark.parametrize("how", ["fork", "spawn", "exec"])
def test_another_process_goes_on(service: Service, giver: Program, how: str, policy: str) -> None:
    """Parent and child, or who comes after, find what was unread, and what comes next."""
    program, came = run(service, how, policy)
    assert program.wait_for(r"done (\S+)")
    assert not program.errors, program.errors
    assert came >= CONNS if policy else came == 0
    assert not service.program.errors.count("Traceback"), service.program.errors
    assert "lost" not in giver.output


def test_the_service_hangs_at_a_fork(service: Service, giver: Program) -> None:
    """The parent's connections stand still until it goes on, and none is lost."""
    program = begun(service, "lone fork", "adaptive" if service.softverbs else "offload", 40)
    program.process.send_signal(signal.SIGUSR1)
    time.sleep(0.1)
    service.program.process.send_signal(signal.SIGSTOP)
    try:
        program.wait_for("forked", 10)
        time.sleep(1)
    finally:
        service.program.process.send_signal(signal.SIGCONT)
    assert program.wait(50) == 0, program.errors + program.output
    assert "reset" not in program.errors
    assert "lost" not in giver.output


def test_few_descriptors_may_be_on_their_way(service: Service, giver: Program, policy: str) -> None:
    """A lot's are more than RLIMIT_NOFILE, which counts where a user has no privileges."""
    limits = ("setpriv", "--bounding-set", "-sys_admin,-sys_resource", "prlimit", "--nofile=56")   # 55 are open
    program, came = run(service, "fork", policy, 34, limits)
    assert not program.errors, program.errors
    assert came == (34 if policy else 0)
    assert "lost" not in giver.output


@pytest.mark.parametrize("how", ["exit", "_exit", "TERM exit"])
def test_the_process_ends(service: Service, giver: Program, how: str, policy: str) -> None:
    """The peers have all that was sent, and the end."""
    program, came = run(service, how, policy)
    told = [1000 + i for i in range(CONNS) if i == 3 or i % 5 not in (2, 3)]
    assert until(lambda: sorted(int(n) for n in giver.output.split() if n.isdigit()) == told, 5), giver.output
    assert not program.errors, program.errors
    assert came >= CONNS if policy == "adaptive" else True


def test_in_the_time_of_a_few(service: Service, giver: Program, softverbs: bool,
                              monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork stands still for less than what they take one after the other."""
    monkeypatch.setenv("VMA_HYBRID_TCP_SHOW", "0")  # the service has nothing else to do meanwhile
    together, alone = (min(float(run(service, how, "offload")[0].wait_for(r"done (\S+)")[1]) for _ in range(2))
                       for how in ("fork", "dup"))
    assert together < alone * (0.9 if softverbs else 0.7), (together, alone)
