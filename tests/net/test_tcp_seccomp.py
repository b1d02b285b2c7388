"""Programs that install a seccomp filter: the kernel serves them from then on, and the shim makes no other calls."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from net.service_lab import compiled
from net.test_tcp_seen import service_of_tcp  # noqa: F401

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


def test_a_program_without_sockets(service: Service, program: Path) -> None:
    """Nothing is made for it, and nothing said."""
    argv = service.run_argv([str(program), "nothing", "before", "own", "127.0.0.1", "1"], "none")
    running = service.sandbox.start(service.sandbox.a, argv, env=service.env)
    assert running.wait(10) == 0
    assert (running.output, running.errors) == ("done\n", "")
