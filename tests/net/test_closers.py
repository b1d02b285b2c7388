"""Threads that close what another waits for, and that look at what it waits with, beside the plain kernel."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from net.introduced_lab import introduced  # noqa: F401
from net.service_lab import compiled

from vmahybrid.bench.served import Service

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("softverbs")]

PEER = """
import socket, sys, threading, time
listener = socket.create_server((sys.argv[1], 0), backlog=100)
print("port", listener.getsockname()[1], flush=True)
told = 0
def serve(connection):
    global told
    connection.settimeout(8)
    connection.recv(1)
    time.sleep(0.1)
    connection.send(b"y")
    while connection.recv(1000000):
        pass
    told += 1
    print("told", told, flush=True)
while True:
    threading.Thread(target=serve, args=[listener.accept()[0]], daemon=True).start()
"""
POLICIES = ["kernel", "offload", "adaptive"]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory, "closers.c", "-pthread")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("what", "says", "told"), [("two", [], 12), ("moved", ["12 right"], 0),
                                                  ("closed", ["12 right"], 12), ("datagrams", ["12 right"], 0),
                                                  ("listeners", ["12 right"], 0),
                                                  ("forks", ["12 right"], 12),
                                                  ("vforks", ["12 right"], 12),
                                                  ("large", ["12 right"], 0),
                                                  ("pieces", ["12 right"], 12),
                                                  ("starved", ["4 right"], 4),
                                                  ("jumps", ["0 pages more"], 0),
                                                  ("array", ["50 seen", "1 ready"], 0)])
def test_threads(service: Service, program: Path, policy: str, what: str, says: list[str], told: int) -> None:
    a_side, b_side = service.sandbox.sides
    peer = service.sandbox.start(b_side, [sys.executable, "-S", "-c", PEER, b_side.address])
    argv = [str(program), what, b_side.address, peer.wait_for(r"port (\d+)", 10)[1], a_side.address]
    if policy != "kernel":
        argv = service.run_argv(argv, "none", VMA_HYBRID_TCP=policy, VMA_HYBRID_TCP_ROUNDS="1")
    running = service.sandbox.start(a_side, argv, env=service.env)
    running.wait_for("done", 30)
    assert running.output.split("\n")[:-2] == says
    if told:
        peer.wait_for(f"told {told}\n", 3)  # all connections have ended, and the program lives
    running.stop(signal.SIGKILL)
    peer.stop(signal.SIGKILL)
