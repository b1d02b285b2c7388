"""Handlers of pthread_atfork() that use sockets, or wait for a thread that does."""

from __future__ import annotations

from pathlib import Path

import pytest
from net.introduced_lab import echoing, introduced  # noqa: F401
from net.service_lab import compiled

from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

HANDLERS = [(who, what) for what in ("connect", "option", "first") for who in ("prepare", "parent", "child")]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory, "fork_handlers.c", "-pthread")


@pytest.mark.parametrize("policy", ["plain", "kernel", "adaptive", "offload"])
@pytest.mark.parametrize(("who", "what"), [*HANDLERS, ("all", "lock")])
def test_they_are_as_without(service: Service, program: Path, echo_port: int, who: str, what: str, policy: str) -> None:
    argv = [str(program), who, what, service.sandbox.a.address, str(echo_port)]
    if policy != "plain":
        argv = service.run_argv(argv, "none", VMA_HYBRID_TCP=policy, VMA_HYBRID_TCP_ROUNDS="4", VMA_RX_POLL="100",
                                VMA_HYBRID_TCP_BUDGET="100", VMA_TRACELEVEL="warn")
    run = service.sandbox.start(service.sandbox.b, argv, env=service.env)
    assert run.result(40) == "fine\n"
    assert not run.errors
