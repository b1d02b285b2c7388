"""The TCP stack: two instances on a wire made of memory, as released and with the sanitizers."""

import functools
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tcp_build import BOTH, SANITIZED, build

HERE = Path(__file__).resolve().parent


def start(program: Path, *arguments: str, ip: str = "4", look_us: int = 0) -> subprocess.CompletedProcess[str]:
    """``look_us``: both ends take together what comes within that time, so that segments are merged."""
    env = dict(os.environ)
    if ip == "6":
        env["WIRE_IPV6"] = "1"
    if look_us:
        env["WIRE_LOOK"] = str(look_us * 1000)
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=100, check=False, env=env)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done


def run(program: Path, *arguments: str, ip: str = "4", look_us: int = 0) -> str:
    return start(program, *arguments, ip=ip, look_us=look_us).stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """A program of a test on the wire: made once, run over both families."""
    @functools.cache
    def make(compiler: str, test: str) -> Path:
        return build(tmp_path_factory.mktemp("stack") / "program", compiler, HERE / test, HERE / "tcp_wire.c")

    return make


@pytest.mark.parametrize("ip", ["4", "6"])
@pytest.mark.parametrize("compiler", BOTH)
@pytest.mark.parametrize("test", ["test_tcp_basic.c", "test_tcp_states.c", "test_tcp_ports.c", "test_tcp_threads.c",
                                  "test_tcp_hold.c", "test_tcp_cookies.c", "test_tcp_merge.c"])
def test_stack(built: Callable[[str, str], Path], compiler: str, test: str, ip: str) -> None:
    assert ", 0 failed" in run(built(compiler, test), ip=ip)


@pytest.mark.parametrize("compiler", BOTH)
def test_acks_that_wait(tmp_path: Path, compiler: str) -> None:
    assert ", 0 failed" in run(build(tmp_path / "program", compiler, HERE / "test_tcp_acks.c"))


@pytest.mark.parametrize("compiler", BOTH)
def test_window_of_cubic(tmp_path: Path, compiler: str) -> None:
    assert ", 0 failed" in run(build(tmp_path / "program", compiler, HERE / "test_tcp_cubic.c", HERE / "tcp_wire.c"))


@pytest.mark.parametrize("compiler", BOTH)
def test_the_end_of_a_flight_is_lost(tmp_path: Path, compiler: str) -> None:
    assert ", 0 failed" in run(build(tmp_path / "program", compiler, HERE / "test_tcp_tail.c", HERE / "tcp_wire.c"))


@pytest.mark.parametrize("compiler", BOTH)
def test_what_comes_late_or_twice(tmp_path: Path, compiler: str) -> None:
    program = build(tmp_path / "program", compiler, HERE / "test_tcp_undo.c", HERE / "tcp_wire.c")
    assert ", 0 failed" in run(program)
    assert ", 0 failed" in run(program, ip="6")


@pytest.mark.parametrize("compiler", BOTH)
def test_a_way_that_becomes_longer(tmp_path: Path, compiler: str) -> None:
    program = build(tmp_path / "program", compiler, HERE / "test_tcp_way.c", HERE / "tcp_wire.c")
    assert ", 0 failed" in run(program)


@pytest.mark.parametrize("compiler", BOTH)
def test_what_goes_again_and_is_lost_again(tmp_path: Path, compiler: str) -> None:
    program = build(tmp_path / "program", compiler, HERE / "test_tcp_again.c", HERE / "tcp_wire.c")
    assert ", 0 failed" in run(program)
    assert ", 0 failed" in run(program, ip="6")


@pytest.mark.parametrize("compiler", BOTH)
def test_what_may_go(tmp_path: Path, compiler: str) -> None:
    assert ", 0 failed" in run(build(tmp_path / "program", compiler, HERE / "test_tcp_nagle.c", HERE / "tcp_wire.c"))


@pytest.mark.parametrize("compiler", BOTH)
def test_buffers_of_a_long_way(tmp_path: Path, compiler: str) -> None:
    assert ", 0 failed" in run(build(tmp_path / "program", compiler, HERE / "test_tcp_buffers.c", HERE / "tcp_wire.c"))


@pytest.mark.parametrize("compiler", BOTH)
def test_streams_over_a_wire_with_faults(tmp_path: Path, compiler: str) -> None:
    program = build(tmp_path / "program", compiler, HERE / "test_tcp_faults.c", HERE / "tcp_wire.c")
    assert ", 0 failed" in run(program)
    assert ", 0 failed" in run(program, look_us=20)
    if compiler == "gcc":
        assert ", 0 failed" in run(program, ip="6")
        assert ", 0 failed" in run(program, ip="6", look_us=3)
        assert ", 0 failed" in run(program, look_us=200)


@pytest.mark.slow
@pytest.mark.parametrize(("ip", "look_us"), [("4", 0), ("6", 0), ("4", 20)])
def test_header_prediction_changes_nothing(built: Callable[[str, str], Path], ip: str, look_us: int) -> None:
    """Every frame and the state after each step, with it and without."""
    predicted, plain = (start(built(compiler, "test_tcp_fast.c"), ip=ip, look_us=look_us)
                        for compiler in ("sanitized", "unpredicted"))
    assert int(predicted.stderr) > 5000, "segments that were predicted"
    assert int(plain.stderr) == 0
    assert len(plain.stdout) > 10_000_000, "what is compared"
    different = [pair for pair in zip(predicted.stdout.splitlines(), plain.stdout.splitlines(), strict=False)
                 if pair[0] != pair[1]]
    assert different[:1] == []
    assert len(predicted.stdout) == len(plain.stdout)


@pytest.mark.parametrize(("compiler", "moves"), [("gcc", 1000), SANITIZED(200)])
def test_moves_of_a_connection(tmp_path: Path, compiler: str, moves: int) -> None:
    program = build(tmp_path / "program", compiler, HERE / "test_tcp_move.c", HERE / "tcp_wire.c")
    assert ", 0 failed" in run(program, str(moves))
    assert ", 0 failed" in run(program, str(moves // 10), ip="6")
    assert ", 0 failed" in run(program, str(moves // 10), look_us=20)


@pytest.mark.parametrize(("compiler", "arguments"), [("gcc", ["100000"]), SANITIZED(["20000", "leaks only"])])
def test_many_connections(tmp_path: Path, compiler: str, arguments: list[str]) -> None:
    program = build(tmp_path / "program", compiler, HERE / "test_tcp_many.c", HERE / "tcp_wire.c")
    assert ", 0 failed" in run(program, *arguments)


@pytest.mark.slow
def test_instances_in_threads_do_not_share_memory(tmp_path: Path) -> None:
    program = build(tmp_path / "program", "threads", HERE / "test_tcp_threads.c", HERE / "tcp_wire.c")
    assert ", 0 failed" in run(program)
