"""The TCP stack: two instances on a wire made of memory, as released and with the sanitizers."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent.parent
SHIM = ROOT / "vmahybrid" / "shim"

spec = importlib.util.spec_from_file_location("lwip", ROOT / "scripts" / "lwip.py")
assert spec and spec.loader
lwip = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lwip)

SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
COMPILERS = {
    "gcc": ["gcc", *lwip.RELEASE],
    "sanitized": ["clang-14", "-g", "-O1", *SANITIZE, "-DVMH_TCP_ASSERT", "-DVMH_TCP_PLAIN_MALLOC"],
}
FLAGS = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-D_GNU_SOURCE"]
FLAGS += [f"-I{ROOT / path}" for path in ("bpf", "vmahybrid/contracts", "vmahybrid/shim", "vmahybrid/shim/tcp")]
FLAGS += [f"-I{HERE}"]


def build(target: Path, compiler: str, *sources: Path) -> Path:
    cores = lwip.cores(ROOT / "build" / "lwip", COMPILERS[compiler])
    parts = [*sources, SHIM / "tcp" / "tcp_stack.c", SHIM / "lock.c", cores]
    command = [*COMPILERS[compiler], *FLAGS, *map(str, parts), "-o", str(target), "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return target


def run(program: Path, *arguments: str) -> str:
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("test", ["test_tcp_basic.c", "test_tcp_states.c"])
def test_stack(tmp_path: Path, compiler: str, test: str) -> None:
    assert ", 0 failed" in run(build(tmp_path / "program", compiler, HERE / test, HERE / "tcp_wire.c"))


@pytest.mark.parametrize("compiler", COMPILERS)
def test_streams_over_a_wire_with_faults(tmp_path: Path, compiler: str) -> None:
    program = build(tmp_path / "program", compiler, HERE / "test_tcp_faults.c", HERE / "tcp_wire.c")
    assert ", 0 failed" in run(program)


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_thousand_moves_of_a_connection(tmp_path: Path, compiler: str) -> None:
    program = build(tmp_path / "program", compiler, HERE / "test_tcp_move.c", HERE / "tcp_wire.c")
    assert ", 0 failed" in run(program, "1000")


@pytest.mark.parametrize(("compiler", "arguments"), [("gcc", ["100000"]), ("sanitized", ["20000", "leaks only"])])
def test_many_connections(tmp_path: Path, compiler: str, arguments: list[str]) -> None:
    program = build(tmp_path / "program", compiler, HERE / "test_tcp_many.c", HERE / "tcp_wire.c")
    assert ", 0 failed" in run(program, *arguments)
