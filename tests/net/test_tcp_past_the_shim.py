"""What calls libc past the shim: a library opened with RTLD_DEEPBIND, and who asks libc's own handle for fork()."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from net.introduced_lab import echoing, introduced  # noqa: F401
from net.service_lab import compiled, homed

from vmahybrid.bench.sandbox import SandboxError
from vmahybrid.bench.served import Service

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif("VMH_SANITIZER_RUNTIME" in os.environ, reason="a sanitizer refuses RTLD_DEEPBIND"),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = compiled(tmp_path_factory, "deep_bind.c", "-DPLUGIN", "-fPIC", "-shared")
    library = library.rename(library.with_name("libdeep_bind.so"))
    return compiled(tmp_path_factory, "deep_bind.c", f"-Wl,-rpath,{library.parent}", "-Wl,--enable-new-dtags")


def said(service: Service, program: Path, port: int, policy: str, **variables: str) -> str:
    argv = [str(program), service.sandbox.a.address, str(port)]
    if policy:
        argv = service.run_argv(argv, "none", VMA_HYBRID_TCP=policy, VMA_HYBRID_TCP_ROUNDS="50",
                                VMA_HYBRID_TCP_BUDGET="100", **variables)
    return service.sandbox.start(service.sandbox.b, argv, env=service.env).result(30)


@pytest.mark.parametrize("policy", ["", "offload", "adaptive"], ids=["kernel", "offload", "adaptive"])
def test_they_are_served(service: Service, program: Path, echo_port: int, policy: str) -> None:
    """And a fork that nobody interposed sends the connection home, as any other."""
    before = homed(service)
    assert said(service, program, echo_port, policy).endswith("fine\n")
    assert homed(service) - before == bool(policy)


def test_the_flag_may_be_left(service: Service, program: Path, echo_port: int) -> None:
    with pytest.raises(SandboxError, match="by the library"):
        said(service, program, echo_port, "offload", VMA_HYBRID_DEEP_BIND="1")
