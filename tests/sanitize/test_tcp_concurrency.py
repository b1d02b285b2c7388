"""Threads that share TCP connections on rings: on the shim as released, and with each of the sanitizers.

VMH_STRESS_SECONDS (1) is for each test."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from net.test_tcp_shim import without_offloads
from sanitize.build import CLOSED_IN_USE, compile_program, ours, sanitized, tsan_library

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service

pytestmark = [pytest.mark.apps, pytest.mark.slow, pytest.mark.timeout(300)]

SECONDS = os.environ.get("VMH_STRESS_SECONDS", "1")
SERVERS = Path(__file__).parents[1] / "apps" / "tcp_servers.py"
PORT = "7801"
OFFLOAD = {"VMA_HYBRID_TCP": "offload", "VMA_TRACELEVEL": "warn"}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Sandbox, Service]]:
    with Sandbox("tcpthreads") as sandbox, Service(without_offloads(sandbox)) as service:
        for side, other in (sandbox.sides, sandbox.sides[::-1]):
            side.ip("neigh", "replace", other.address, "lladdr", other.mac, "dev", side.device, "nud", "permanent")
        sandbox.start(sandbox.b, [sys.executable, str(SERVERS), "threads", sandbox.b.address, PORT]).wait_for("ready")
        yield sandbox, service


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    where = tmp_path_factory.mktemp("programs")
    return {"plain": compile_program("tcp_threads.c", where / "plain"),
            "tsan": compile_program("tcp_threads.c", where / "tsan", "-fsanitize=thread")}


# connections one after another, of some at a time, until the server has gone
CLIENT = """
import socket, sys, threading
def some():
    try:
        while True:
            with socket.create_connection((sys.argv[1], int(sys.argv[2])), 2) as sock:
                for turn in range(4):
                    sent = bytes((turn * 500 + n) % 256 for n in range(500))
                    sock.sendall(sent)
                    got = b""
                    while len(got) < 500 and (part := sock.recv(500)):
                        got += part
    except OSError:
        pass
threads = [threading.Thread(target=some) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.parametrize("on", ["shim", "asan", "tsan"])
@pytest.mark.parametrize("mode", ["share", "home", "close", "serve"])
def test_threads_share_connections(
    served: tuple[Sandbox, Service], programs: dict[str, Path], tmp_path: Path, on: str, mode: str
) -> None:
    """That one thread closes what another uses is the purpose of "close"; every byte counts in the others."""
    sandbox, service = served
    reports, statistics, known = tmp_path / "reports", tmp_path / "statistics", tmp_path / "known"
    reports.mkdir()
    known.write_text("race:^close$\nrace:^dup2$\n")
    argv = [str(programs["tsan" if on == "tsan" else "plain"]), sandbox.b.address, PORT, SECONDS, mode]
    variables = {**OFFLOAD, "VMA_STATS_FILE": str(statistics)}
    if on == "tsan":
        # the shim is before the runtime, which the program brings: addresses as TSan knows them, without randomisation
        options = f"log_path={reports}/tsan:suppressions={known}:exitcode=0:history_size=7"
        settings = [f"{name}={value}" for name, value in variables.items()]
        command = ["setarch", "-R", "env", f"LD_PRELOAD={tsan_library()}", f"TSAN_OPTIONS={options}", *settings, *argv]
        running = sandbox.start(sandbox.a, command, env=service.env)
    else:
        with sanitized(reports) if on == "asan" else nullcontext():
            running = sandbox.start(sandbox.a, service.run_argv(argv, profile="none", **variables), env=service.env)
    if mode == "serve":
        running.wait_for("ready", 20)
        asking = sandbox.start(sandbox.b, [sys.executable, "-S", "-c", CLIENT, sandbox.a.address, str(int(PORT) + 1)])
    code = running.wait(float(SECONDS) + 60)
    if mode == "serve":
        asking.wait(20)
    found = ours(reports, CLOSED_IN_USE if mode == "close" else "")
    assert code == 0 and not found, (code, running.output, running.errors[-2000:], *found)
    count = {name: int(value) for name, value in re.findall(r"(\w+) (\d+)", running.output)}
    assert count["strange"] == 0 and count["got"] > 10_000, count
    if mode == "serve":
        assert count["sent"] == count["got"] and count["opened"] > 20, count
    elif mode != "close":
        assert count["sent"] == count["got"], count
    else:
        assert count["opened"] > 20, count
    by_ring = [int(n) for n in re.findall(r"Tx Offload: \d+ / (\d+) ", statistics.read_text())]
    assert sum(by_ring) > 100, statistics.read_text()
