"""Builds C programs with the TCP stack in them, as released and with the sanitizers."""

import functools
import importlib.util
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHIM = ROOT / "vmahybrid" / "shim"
PROGRAMS = ROOT / "tests" / "unit" / "c"

spec = importlib.util.spec_from_file_location("lwip", ROOT / "scripts" / "lwip.py")
assert spec and spec.loader
lwip = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lwip)

SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
FUZZ = ["clang-14", "-g", "-O1", "-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all"]
# lwIP's assertions, and each block of memory by itself
STRICT = ["-DVMH_TCP_ASSERT", "-DVMH_TCP_PLAIN_MALLOC", "-DVMH_PLAIN_MALLOC"]
COMPILERS = {
    "gcc": ["gcc", *lwip.RELEASE],
    "sanitized": ["clang-14", "-g", "-O1", *SANITIZE, *STRICT],
    "unpredicted": ["gcc", *lwip.RELEASE, "-DVMH_TCP_NO_PREDICTION"],
    "threads": ["clang-14", "-g", "-O1", "-fsanitize=thread"],
}
SANITIZED = functools.partial(pytest.param, "sanitized", marks=pytest.mark.slow)  # and more parameters
BOTH = ["gcc", SANITIZED()]
FLAGS = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-D_GNU_SOURCE"]
FLAGS += [f"-I{ROOT / path}" for path in ("bpf", "vmahybrid/contracts", "vmahybrid/shim", "vmahybrid/shim/tcp")]
FLAGS += [f"-I{PROGRAMS}"]
STACK = [SHIM / "tcp" / "tcp_stack.c", SHIM / "heap.c", SHIM / "lock.c"]  # and the cores
RING = [SHIM / name for name in ("ring.c", "ring_xdp.c", "ring_xdp_clock.c", "ring_xdp_open.c", "fd.c", "frame.c",
                                 "tcp/tcp_ring.c")]


def cores(compiler: list[str]) -> Path:
    """The copies of the core; made once and kept in build/lwip."""
    made = lwip.cores(ROOT / "build" / "lwip", compiler)
    assert isinstance(made, Path)
    return made


def build(target: Path, compiler: str, *sources: Path) -> Path:
    parts = [*sources, *STACK, cores(COMPILERS[compiler])]
    command = [*COMPILERS[compiler], *FLAGS, *map(str, parts), "-o", str(target), "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return target
