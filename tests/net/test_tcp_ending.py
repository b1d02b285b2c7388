"""A program that ends while its threads are in calls: they see nothing of it, its peers have all bytes and the end."""

from __future__ import annotations

import signal
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from net.introduced_lab import introduced  # noqa: F401
from net.service_lab import Api, compiled, until
from net.test_tcp_shim import offloaded

from vmahybrid.bench.sandbox import Program
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
STATUS = {"exit": (7,), "_exit": (7,), "TERM": (-signal.SIGTERM,), "vfork": (-signal.SIGTERM,),
          "quick_exit": (7,), "exits": (7, 8), "twice": (-signal.SIGTERM,), "both": (7, -signal.SIGTERM),
          "returns": (7, 8), "oneshot": (7,), "abort": (7,), "once": (-signal.SIGUSR2,),
          "two": (-signal.SIGTERM, -signal.SIGUSR1)}  # fmt: skip


@pytest.fixture
def start(service: Service) -> Iterator[Callable[[list[str]], Program]]:
    """On side b; none outlives its test."""
    started: list[Program] = []

    def start(argv: list[str]) -> Program:
        started.append(service.sandbox.start(service.sandbox.b, argv, env=service.env))
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
