"""Policy `offload` where the kernel opens the connections (its listener, beside raw packet QPs): they take turns."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from net.service_lab import until
from net.test_tcp_kept_listener import CLIENT, SERVER
from net.test_tcp_many import ECHO, THREADS, answered, checked, clients, moves, server
from net.test_tcp_shim import introduce, offloaded, without_offloads

from vmahybrid.bench.sandbox import Program, Sandbox
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

VISITS = 300
MANY = 20
LONG = {"VMA_HYBRID_TCP_BUDGET": "1"}   # a second for each move


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Sandbox("test") as sandbox, Service(without_offloads(sandbox), softverbs=True) as running:
        introduce(sandbox)
        yield running


@contextmanager
def python_server(service: Service, text: str, *words: str, **variables: str) -> Iterator[Program]:
    side = service.sandbox.b
    argv = service.run_argv([sys.executable, "-S", "-c", text, side.address, *words], "none", VMA_HYBRID_TCP="offload",
                            **(LONG | variables))
    program = service.sandbox.start(side, argv, env=service.env)
    try:
        yield program
    finally:
        program.stop(signal.SIGKILL)


def test_short_connections_are_the_kernel_s(service: Service) -> None:
    """But for one now and then."""
    with python_server(service, SERVER, "") as program:
        program.wait_for("ready")
        client = service.sandbox.start(
            service.sandbox.a, [sys.executable, "-S", "-c", CLIENT, service.sandbox.b.address, str(VISITS), "2"])
        assert client.result(30).split() == ["done"]
        assert 1 <= len(moves(service, program)) <= 5


def test_one_that_waits_says_so(service: Service) -> None:
    with server(service, "offload", VMA_HYBRID_TCP_ROUNDS="1000000", **LONG) as program:
        client = clients(service, 3, 2)
        until(lambda: service.ask("explain", str(program.pid)).count("tcp-turn") == 2, 2)
        assert len(offloaded(service)) == 1
        assert answered(client, 3) > 300


@pytest.mark.parametrize("together", ["1024", "0"])
def test_those_in_use_come_together(service: Service, together: str) -> None:
    with server(service, "offload", VMA_HYBRID_TCP_TOGETHER=together, **LONG) as program:
        client = clients(service, MANY, 3)
        assert answered(client, MANY) > 50 * MANY
        at = moves(service, program)
    if together == "0":
        assert 1 <= len(at) <= 5
    else:
        assert len(at) == MANY
        assert at[-1] - at[1] < 1   # the first one goes alone


def test_each_thread_moves_its_own(service: Service) -> None:
    with python_server(service, THREADS) as program:
        port = int(program.wait_for(r"port (\d+)")[1])
        assert checked(service, port, 12, 3).result(20).startswith("rounds")
        assert len(moves(service, program)) == 12


def test_no_byte_is_lost(service: Service) -> None:
    with python_server(service, ECHO) as program:
        port = int(program.wait_for(r"port (\d+)")[1])
        assert checked(service, port, 100, 3).result(30).startswith("rounds")
        assert len(moves(service, program)) == 100


CLOSES = """
import select, socket, sys, time
listener = socket.create_server((sys.argv[1], 0))
print("port", listener.getsockname()[1], flush=True)
waits = select.epoll()
stale = 0
for _ in range(20):
    conn = listener.accept()[0]
    conn.setblocking(False)
    waits.register(conn, select.EPOLLIN)
    while waits.poll(5) and (data := conn.recv(100)):
        conn.sendall(data)
    conn.close()
    end = time.monotonic() + 0.03
    while time.monotonic() < end:
        stale += len(waits.poll(0))
print("stale", stale, flush=True)
"""
ASKS = """
import socket, sys
for _ in range(20):
    with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as conn:
        for _ in range(300):
            conn.sendall(b"x")
            conn.recv(1)
"""


def test_no_event_of_one_that_was_closed(service: Service) -> None:
    """The service may hold the socket a moment longer than the program."""
    more = {"VMA_HYBRID_TCP_BUDGET": "100", "VMA_HYBRID_TCP_PAYS": "0"}
    with python_server(service, CLOSES, **more) as program:
        port = program.wait_for(r"port (\d+)")[1]
        argv = [sys.executable, "-S", "-c", ASKS, service.sandbox.b.address, port]
        service.sandbox.start(service.sandbox.a, argv).result(30)
        assert program.wait_for(r"stale (\d+)", 5)[1] == "0"
        assert len(moves(service, program)) >= 15
