"""Programs that install a seccomp filter: the kernel serves them from then on, and the shim makes no other calls."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from net.service_lab import compiled, tcp_echo, until
from net.test_tcp_seen import service_of_tcp  # noqa: F401
from net.test_tcp_shim import offloaded

from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

PORTS = itertools.count(7850)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory, "filtered_calls.c")


@pytest.mark.parametrize("threads", ["own", "all"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("filtered", ["server", "client"])
@pytest.mark.parametrize("policy", ["offload", "adaptive", "kernel", ""])
def test_as_without(service: Service, program: Path, policy: str, filtered: str, when: str, threads: str) -> None:
    """The other one has a filter, but no shim. "": neither has one."""
    a_side, b_side = service.sandbox.sides
    port = str(next(PORTS))

    def argv(role: str) -> list[str]:
        mine = [str(program), role, when, threads, b_side.address, port]
        if not policy or role != filtered:
            return mine
        return service.run_argv(mine, "none", VMA_HYBRID_TCP=policy, VMA_HYBRID_TCP_ROUNDS="8",
                                VMA_HYBRID_TCP_BUDGET="100", VMA_HYBRID_TCP_PAYS="1")

    server = service.sandbox.start(b_side, argv("server"), env=service.env)
    server.wait_for("ready", 5)
    client = service.sandbox.start(a_side, argv("client"), env=service.env)
    for one in (client, server):
        assert one.wait(10) == 0, one.errors
        assert one.output.endswith("done\n")


@pytest.mark.parametrize(("what", "how"), [
    *itertools.product(["signal", "sigaction", "epoll_ctl", "dup2"], ["kill", "errno"]), ("ask", "none")])
@pytest.mark.parametrize("policy", ["offload", "kernel", ""])
def test_what_the_filter_lets_through(service: Service, tmp_path_factory: pytest.TempPathFactory, policy: str,
                                      what: str, how: str) -> None:
    """Such a call makes no other one, and SIGTERM ends the program as if there were no shim."""
    a_side, b_side = service.sandbox.sides
    port = str(next(PORTS))
    server = service.sandbox.start(b_side, [sys.executable, "-c", tcp_echo(int(port))])
    server.wait_for("ready", 5)
    argv = [str(compiled(tmp_path_factory, "filtered_ends.c")), b_side.address, port, what, how]
    if policy:
        argv = service.run_argv(argv, "none", VMA_HYBRID_TCP=policy)
    with subprocess.Popen(a_side.command(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                          env={**os.environ, **service.env}) as running:
        assert running.stdin is not None and running.stdout is not None
        try:
            assert running.stdout.readline() == "filtered\n"
            if what == "ask" and policy == "offload":
                until(lambda: [s["pid"] for s in offloaded(service)] == [running.pid], 5)
            if what == "signal":
                running.terminate()
            running.stdin.close()
            assert running.wait(5) == (-signal.SIGTERM if what == "signal" else 0)
        finally:
            running.kill()
            server.close()


def test_a_program_without_sockets(service: Service, program: Path) -> None:
    """Nothing is made for it, and nothing said."""
    argv = service.run_argv([str(program), "nothing", "before", "own", "127.0.0.1", "1"], "none")
    running = service.sandbox.start(service.sandbox.a, argv, env=service.env)
    assert running.wait(10) == 0
    assert (running.output, running.errors) == ("done\n", "")
