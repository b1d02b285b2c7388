"""A program that ends while its threads are in calls: they see nothing of it, its peers have all bytes and the end."""

from __future__ import annotations

import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from net.introduced_lab import introduced  # noqa: F401
from net.service_lab import Api, compiled, until
from net.test_tcp_shim import offloaded

from vmahybrid.bench.sandbox import Program, Side
from vmahybrid.bench.served import Service

pytestmark = [pytest.mark.root, pytest.mark.timeout(60)]

CONNS = 40
# the first connection is the quiet one
PEER = """
import asyncio, sys
async def one():
    reader, writer = await asyncio.open_connection(sys.argv[1], int(sys.argv[2]))
    return reader
async def all_of(reader):
    first, got, end = "", 0, "end"
    try:
        while data := await reader.read(65536):
            first = first or str(data[0])
            got += len(data)
    except ConnectionError as error:
        end = type(error).__name__
    print(f"<{first} {got} {end}>", flush=True)
async def main():
    readers = [await one() for _ in range(int(sys.argv[3]) + 1)]
    await asyncio.gather(*(all_of(reader) for reader in readers))
    print("all", flush=True)
asyncio.run(main())
"""
TERM, USR1, USR2 = -signal.SIGTERM, -signal.SIGUSR1, -signal.SIGUSR2
STATUS = {"exit": (7,), "_exit": (7,), "TERM": (TERM,), "vfork": (TERM,), "quick_exit": (7,), "exits": (7, 8),
          "twice": (TERM,), "both": (7, TERM), "returns": (7, 8), "oneshot": (7,), "abort": (7,), "once": (USR2,),
          "two": (TERM, USR1)}  # fmt: skip


@pytest.fixture
def start(service: Service) -> Iterator[Callable[..., Program]]:
    """On side b, or another; none outlives its test."""
    started: list[Program] = []

    def start(argv: list[str], side: Side = service.sandbox.b) -> Program:
        started.append(service.sandbox.start(side, argv, env=service.env))
        return started[-1]

    yield start
    for program in started:
        program.stop(signal.SIGKILL)


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory, "ending_calls.c", "-pthread")


@pytest.mark.parametrize("policy", ["offload", "adaptive", ""], ids=["from the SYN", "adopted", "plain"])
@pytest.mark.parametrize("how", list(STATUS))
def test_threads_see_nothing_of_the_end(service: Service, start: Callable[[list[str]], Program], calls: Path,
                                        tmp_path: Path, how: str, policy: str) -> None:  # fmt: skip
    counts, port = tmp_path / "counts", 7421
    words = [str(calls), how, str(port), str(CONNS), str(counts)]
    if policy:
        words = service.run_argv(words, "none", VMA_TRACELEVEL="warn", VMA_HYBRID_TCP=policy)
    program = start(words)
    program.wait_for("ready")
    told = policy == "adaptive" or (policy and service.softverbs)   # there the kernel listens
    if policy and not told:
        assert until(lambda: any(s["offloaded"] for s in Api(service).call("GET", "/v1/sockets")[1]), 10)
    peer = service.sandbox.start(service.sandbox.a, [sys.executable, "-S", "-c", PEER, service.sandbox.b.address,
                                                     str(port), str(CONNS)])  # fmt: skip
    program.wait_for("there")
    if told:
        assert Api(service).call("POST", f"/v1/processes/{program.pid}/move", {"to": "ring"})[0] == 204
    assert until(lambda: len(offloaded(service)) >= (CONNS if policy else 0), 10)
    with counts.open("r+b") as file:
        file.seek(8 * 255)
        file.write(b"\1")
    assert program.wait(20) in STATUS[how], program.output + program.errors
    peer.wait_for("all")
    ends = [words.split() for words in peer.output.replace("<", "").split(">") if words.strip() and "all" not in words]
    taken = struct.unpack(f"<{CONNS}Q", counts.read_bytes()[: CONNS * 8])
    assert [end for *_, end in ends] == ["end"] * (CONNS + 1), ends
    # the last send() may have been taken, and not been counted yet
    assert all(0 <= int(got) - taken[int(first)] <= 3000 for first, got, _ in (e for e in ends if len(e) == 3)), ends
    assert "woken" not in program.output, program.output
    assert not program.errors, program.errors
    assert not service.program.errors.count("Traceback"), service.program.errors


@pytest.fixture(scope="module")
def with_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = compiled(tmp_path_factory, "ending_library.c", "-shared", "-fPIC", "-DLIBRARY", "-pthread")
    return compiled(tmp_path_factory, "ending_library.c", "-Wl,--no-as-needed", str(library))


KEEPER = """
import socket, sys, time
server = socket.create_server(("0.0.0.0", int(sys.argv[1])))
print("ready", flush=True)
kept = [server.accept() for _ in range(2)]
time.sleep(60)
"""


@pytest.mark.parametrize("policy", ["offload", ""], ids=["from the SYN", "plain"])
@pytest.mark.parametrize("call", ["recv", "send", "poll", "epoll_wait"])
def test_a_destructor_ends_a_thread(service: Service, start: Callable[[list[str]], Program], with_library: Path,
                                    call: str, policy: str) -> None:  # fmt: skip
    """It runs after the shim's own, and finds a connection that it can shut down."""
    keeper = service.sandbox.start(service.sandbox.a, [sys.executable, "-S", "-c", KEEPER, "7422"])
    keeper.wait_for("ready")
    words = [str(with_library), call, service.sandbox.a.address, "7422"]
    if policy:
        words = service.run_argv(words, "none", VMA_TRACELEVEL="warn", VMA_HYBRID_TCP=policy)
    program = start(words)
    program.wait_for("there")
    assert until(lambda: len(offloaded(service)) == (1 if policy else 0), 5)
    assert program.wait(6) == 7, program.errors
    assert not program.errors, program.errors
    keeper.stop(signal.SIGKILL)


@pytest.fixture(scope="module")
def begins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory, "ending_begins.c", "-pthread")


# tells of connections with another end than that of a whole one; "all N": so many were whole
TAKER = """
import asyncio, sys
whole, there, asked = 0, 0, False
async def take(reader, writer):
    global whole, there, asked
    there += 1
    got, end = 0, "end"
    try:
        while data := await reader.read(65536):
            if data == b"?":
                there -= 1
                while there:
                    await asyncio.sleep(0.05)
                asked = True
                print("all", whole, flush=True)
                writer.close()
                return
            got += len(data)
    except ConnectionError as error:
        end = type(error).__name__
    there -= 1
    if (got, end) == (3008, "end"):
        whole += 1
        if asked:       # what the last threads sent may be sent again
            print("all", whole, flush=True)
    else:
        print(f"<{got} {end}>", flush=True)
    writer.close()
async def main():
    server = await asyncio.start_server(take, "0.0.0.0", int(sys.argv[1]), backlog=512)
    print("ready", flush=True)
    await server.serve_forever()
asyncio.run(main())
"""
ASKER = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as s:
    s.sendall(b"?")
    s.shutdown(socket.SHUT_WR)
    s.recv(1)
"""
# as a client, until nobody listens any more: how many got all. Others nobody has accepted
COMER = """
import socket, sys, threading
wholes = []
def whole(s):
    got = 0
    try:
        s.sendall(bytes(8))
        while data := s.recv(65536):
            got += len(data)
    except (ConnectionResetError, BrokenPipeError):
        return False
    return got == 3000
def come():
    try:
        while True:
            try:
                with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5) as s:
                    wholes.append(whole(s))
            except ConnectionResetError:
                pass
    except ConnectionRefusedError:
        pass
threads = [threading.Thread(target=come) for _ in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
print("all", sum(wholes), flush=True)
"""
THREADS = 3


def ended(counts: Path, end: bool = False) -> int:
    """Connections that the program's threads have ended; ``end``: it is to end itself."""
    if end:
        with counts.open("r+b") as file:
            file.seek(8 * 255)
            file.write(b"\1")
    return sum(struct.unpack(f"<{THREADS}Q", counts.read_bytes()[: THREADS * 8]))


@pytest.mark.parametrize("policy", ["offload", ""], ids=["from the SYN", "plain"])
@pytest.mark.parametrize("how", ["exit", "_exit", "TERM"])
@pytest.mark.parametrize("direction", ["connect", "accept"])
def test_connections_begin_until_the_end(service: Service, start: Callable[..., Program], begins: Path,
                                         tmp_path: Path, direction: str, how: str, policy: str) -> None:  # fmt: skip
    sandbox, counts, port = service.sandbox, tmp_path / "counts", "7423"
    side = sandbox.a if direction == "connect" else sandbox.b
    words = [str(begins), how, direction, side.address, port, str(counts)]
    if policy:
        words = service.run_argv(words, "none", VMA_TRACELEVEL="warn", VMA_HYBRID_TCP=policy)
    if direction == "connect":
        peer = start([sys.executable, "-S", "-c", TAKER, port], sandbox.a)
        peer.wait_for("ready")
    program = start(words)
    program.wait_for("there")
    if direction == "accept":
        peer = start([sys.executable, "-S", "-c", COMER, side.address, port], sandbox.a)
    assert until(lambda: ended(counts) > 20, 10)
    ended(counts, end=True)
    began = time.monotonic()
    assert program.wait(10) == (-signal.SIGTERM if how == "TERM" else 7), program.output + program.errors
    assert time.monotonic() - began < 3
    if direction == "connect":
        start([sys.executable, "-S", "-c", ASKER, side.address, port], sandbox.a).wait(10)
    peer.wait_for("all \\d")
    assert not peer.errors, peer.errors
    until(lambda: int(peer.output.split()[-1]) >= ended(counts), 5)
    whole, others = int(peer.output.split()[-1]), re.findall(r"<(\d+) (\w+)>", peer.output)
    # a thread that ends with the program has one in its hands, which may be whole by then
    assert 0 <= whole - ended(counts) <= THREADS, peer.output
    assert len(others) <= THREADS and all(end == "end" for _, end in others), others
    assert "failed" not in program.output, program.output
    assert not program.errors, program.errors


DEAF = """
import socket, sys, time
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("0.0.0.0", int(sys.argv[1])))
server.listen()
print("ready", flush=True)
kept = server.accept()[0]
kept.send(b"unread"[:int(sys.argv[2])])
time.sleep(60)
"""
LINGERS = """
import pathlib, select, socket, struct, sys, time
c = socket.create_connection((sys.argv[1], int(sys.argv[2])))
print("there", flush=True)
while not pathlib.Path(sys.argv[3]).exists():
    select.select([c], [], [], 0.01)
if sys.argv[4] != "0":
    select.select([c], [], [], 5)
c.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 1))
c.send(b"x" * 40000)
begun = time.monotonic()
c.close()
print("took", time.monotonic() - begun, flush=True)
"""


def lingering(service: Service, start: Callable[..., Program], policy: str, arguments: list[str]) -> Program:
    """LINGERS, whose connection is where the policy has it."""
    words = [sys.executable, "-S", "-c", *arguments]
    if policy:
        words = service.run_argv(words, "none", VMA_TRACELEVEL="warn", VMA_HYBRID_TCP=policy)
    program = start(words)
    program.wait_for("there")
    if policy == "adaptive":
        assert Api(service).call("POST", f"/v1/processes/{program.pid}/move", {"to": "ring"})[0] == 204
    assert until(lambda: len(offloaded(service)) == (1 if policy else 0), 10)
    return program


@pytest.mark.parametrize("policy", ["offload", "adaptive", ""], ids=["from the SYN", "adopted", "plain"])
def test_a_close_that_lingers_for_a_silent_peer(service: Service, start: Callable[..., Program], tmp_path: Path,
                                                policy: str) -> None:  # fmt: skip
    """It goes home meanwhile, stuck, and lingers for the rest of the time there."""
    port, go, a = "7426", tmp_path / "go", service.sandbox.a
    start([sys.executable, "-S", "-c", DEAF, port, "0"], a).wait_for("ready")
    code = LINGERS.replace('struct.pack("ii", 1, 1)', 'struct.pack("ii", 1, 3)').replace("40000", "1")
    program = lingering(service, start, policy, [code, a.address, port, str(go), "0"])
    silence = ["ip", "route", "add", "blackhole", f"{service.sandbox.b.address}/32"]
    subprocess.run(a.command(silence), check=True)
    try:
        go.touch()
        took = float(program.wait_for(r"took (\S+)")[1])
        assert 2.9 < took < 3.8 and program.wait(5) == 0
    finally:
        silence[2] = "del"
        subprocess.run(a.command(silence), check=True)


@pytest.mark.parametrize("unread", [0, 6])
@pytest.mark.parametrize("policy", ["offload", "adaptive", ""], ids=["from the SYN", "adopted", "plain"])
def test_a_close_that_lingers(service: Service, start: Callable[..., Program], tmp_path: Path, policy: str,
                              unread: int) -> None:  # fmt: skip
    """Also at the kernel, where the service has a copy of the descriptor for some moments. With something unread the
    peer is reset at once."""
    port, go, a = "7425", tmp_path / "go", service.sandbox.a
    start([sys.executable, "-S", "-c", DEAF, port, str(unread)], a).wait_for("ready")
    program = lingering(service, start, policy, [LINGERS, a.address, port, str(go), str(unread)])
    go.touch()
    took = float(program.wait_for(r"took (\S+)")[1])
    assert (took < 0.5 if unread else 0.9 < took < 1.6) and program.wait(5) == 0
