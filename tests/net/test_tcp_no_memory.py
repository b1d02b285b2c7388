"""A program that may map no byte more (RLIMIT_AS, RLIMIT_DATA): its connections go home all the same."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from net.introduced_lab import echoing, introduced  # noqa: F401
from net.service_lab import compiled, homed, under_shim

from vmahybrid.bench.served import Service

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif("VMH_SANITIZER_RUNTIME" in os.environ, reason="a sanitizer maps memory of its own"),
]

CONNECTIONS = 10


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory, "no_memory.c")


@pytest.mark.parametrize("limit", ["as", "data"])
@pytest.mark.parametrize("policy", ["", "offload", "adaptive"], ids=["kernel", "offload", "adaptive"])
def test_a_fork(service: Service, program: Path, echo_port: int, policy: str, limit: str) -> None:
    argv = [str(program), service.sandbox.a.address, str(echo_port), limit]
    if policy:
        argv = under_shim(service, argv, profile="none", VMA_HYBRID_TCP=policy, VMA_HYBRID_TCP_ROUNDS="40",
                          VMA_HYBRID_TCP_BUDGET="100", VMA_HYBRID_TCP_MANY="100")  # fmt: skip
    before = homed(service)
    done = service.sandbox.start(service.sandbox.b, argv, env=service.env).result(30)
    assert done == "0 before, 0 of the child, 0 after\n"
    assert homed(service) - before == CONNECTIONS * bool(policy)
