"""The kernel socket of a connection that lived on a ring alone serves the next one, and no program can tell.

spare_calls.c opens the connections, and says "done" where each was what it should be."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from net.introduced_lab import introduced  # noqa: F401
from net.service_lab import compiled, tcp_echo, under_shim

from vmahybrid.bench.sandbox import Program
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

PORT = 7480
CASES = ["reused", "several", "looks", "changed", "sets", "ends", "forks", "closed_unseen", "aged", "users",
         "namespaces", "left_before", *["left_by_others"] * 4, "threads", "tables", "handlers",
         "forks_meanwhile"]  # fmt: skip
ASK = """
import socket, sys
for _ in range(50):
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10) as sock:
        for _ in range(3):
            sock.sendall(b"x")
            assert sock.recv(1) == b"x"
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory, "spare_calls.c", "-pthread")


@pytest.fixture(scope="module")
def server(service: Service) -> Iterator[Program]:
    box = service.sandbox
    echo = box.start(box.b, [sys.executable, "-c", tcp_echo(PORT)])
    echo.wait_for("ready")
    yield echo
    echo.close()


def begin(service: Service, argv: list[str], shim: bool, level: str = "warn") -> Program:
    box = service.sandbox
    if not shim:
        return box.start(box.a, [*argv, "kernel"])
    argv = under_shim(service, argv, profile="none", VMA_RX_POLL="100", VMA_SELECT_POLL="100", VMA_TRACELEVEL=level,
                      VMA_HYBRID_TCP="offload")
    return box.start(box.a, argv, env=service.env)


@pytest.mark.parametrize("shim", [False, True], ids=["kernel", "shim"])
@pytest.mark.parametrize("case", CASES)
def test_short_connections(service: Service, server: Program, program: Path, case: str, shim: bool) -> None:
    running = begin(service, [str(program), case, service.sandbox.b.address, str(PORT)], shim)
    assert (running.wait(40), running.output) == (0, "done\n"), running.output + running.errors


def test_who_enters_another_network_namespace_is_told(service: Service, server: Program, program: Path) -> None:
    running = begin(service, [str(program), "namespaces", service.sandbox.b.address, str(PORT)], True, level="info")
    assert (running.wait(40), running.output) == (0, "done\n"), running.output + running.errors
    assert "INFO: the program has entered another network namespace: rings and routes are" in running.errors


@pytest.mark.parametrize("case", ["accepts", "inherits"])
@pytest.mark.parametrize("shim", [False, True], ids=["kernel", "shim"])
def test_accepted_ones(service: Service, program: Path, shim: bool, case: str, softverbs: bool) -> None:
    box = service.sandbox
    # the listeners of a raw packet QP are the kernel's, and so is each socket
    listener = begin(service, [str(program), case, box.a.address, str(PORT), *(["kernel"] if softverbs else [])], shim)
    listener.wait_for("ready")
    asking = box.start(box.b, [sys.executable, "-c", ASK, box.a.address, str(PORT)])
    assert (listener.wait(40), listener.output) == (0, "ready\ndone\n"), listener.output + listener.errors
    assert asking.wait(10) == 0, asking.errors
