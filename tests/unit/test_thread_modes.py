"""VMA_THREAD_MODE in a program under the shim: what a thread does that waits for a socket's lock."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from vmahybrid.cli.run import library

SOURCE = Path(__file__).parent / "c" / "lock_modes.c"
ROUNDS = 100  # of the program


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("modes") / "lock_modes"
    subprocess.run(["gcc", "-O1", "-Wall", "-Wextra", "-Werror", "-rdynamic", "-o", built, SOURCE, "-lpthread"],
                   check=True)  # fmt: skip
    return built


def settings(mode: str) -> dict[str, str]:
    runtime = [name for name in os.environ.get("LD_PRELOAD", "").split(":") if name]
    return {"LD_PRELOAD": ":".join([*runtime, str(library())]), "VMA_THREAD_MODE": mode, "VMA_TRACELEVEL": "warn",
            "VMA_HYBRID_SOCKET": "/nonexistent", "VMA_STATS_SHMEM_DIR": ""}


@pytest.mark.parametrize(("mode", "barriers", "yields"), [("0", True, False), ("1", False, False), ("2", False, False),
                                                          ("3", False, True)])  # fmt: skip
def test_waiting_for_a_lock(program: Path, tmp_path: Path, mode: str, barriers: bool, yields: bool) -> None:
    """0: the owner takes none, others stop it by membarrier(2). 3: the processor is given away before sleeping."""
    chosen = [word for name, value in settings(mode).items() for word in ("-E", f"{name}={value}")]
    trace = tmp_path / "trace"
    argv = ["strace", "-f", "--seccomp-bpf", "-qq", "-e", "trace=membarrier", "-o", trace, *chosen, program]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 77:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    (given,) = re.findall(r"yields (\d+)", done.stdout)
    assert (int(given) >= ROUNDS) is yields
    assert (trace.read_text().count("membarrier(") > ROUNDS / 2) is barriers


def spent(program: Path, mode: str) -> int:
    """Nanoseconds of the processor in a call that waits for a millisecond."""
    done = subprocess.run([program], env={**os.environ, **settings(mode)}, capture_output=True, text=True, timeout=60,
                          check=False)  # fmt: skip
    if done.returncode == 77:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    return int(re.findall(r"spent (\d+)", done.stdout)[0])


def test_one_spins_and_two_sleeps_at_once(program: Path) -> None:
    """100 loops are 2 or 3 us, beside some 7 for going to sleep and waking up."""
    seen = []
    for _ in range(3):  # other work on the machine costs either of a pair more
        pairs = [(spent(program, "1"), spent(program, "2")) for _ in range(9)]
        if sum(spins > 1.05 * sleeps for spins, sleeps in pairs) >= 7:
            return
        seen.append(pairs)
    pytest.fail(f"ns of mode 1 and 2: {seen}")
