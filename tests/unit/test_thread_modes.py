"""VMA_THREAD_MODE in a program under the shim: what a thread does that waits for a socket's lock."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from vmahybrid.cli.run import library

SOURCES = Path(__file__).parent / "c"
ROUNDS = 100  # of lock_modes


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of lock_modes and lock_pauses."""
    where = tmp_path_factory.mktemp("modes")
    for name in ("lock_modes", "lock_pauses"):
        subprocess.run(["gcc", "-O1", "-Wall", "-Wextra", "-Werror", "-rdynamic", "-o", where / name,
                        SOURCES / f"{name}.c", "-lpthread"], check=True)  # fmt: skip
    return where


def settings(mode: str) -> dict[str, str]:
    runtime = [name for name in os.environ.get("LD_PRELOAD", "").split(":") if name]
    return {"LD_PRELOAD": ":".join([*runtime, str(library())]), "VMA_THREAD_MODE": mode, "VMA_TRACELEVEL": "warn",
            "VMA_HYBRID_SOCKET": "/nonexistent", "VMA_STATS_SHMEM_DIR": ""}


@pytest.mark.parametrize(("mode", "barriers", "yields"), [("0", True, False), ("1", False, False), ("2", False, False),
                                                          ("3", False, True)])  # fmt: skip
def test_waiting_for_a_lock(programs: Path, tmp_path: Path, mode: str, barriers: bool, yields: bool) -> None:
    """0: the owner takes none, others stop it by membarrier(2). 3: the processor is given away before sleeping."""
    chosen = [word for name, value in settings(mode).items() for word in ("-E", f"{name}={value}")]
    trace = tmp_path / "trace"
    argv = ["strace", "-f", "--seccomp-bpf", "-qq", "-e", "trace=membarrier", "-o", trace, *chosen,
            programs / "lock_modes"]  # fmt: skip
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 77:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    (given,) = re.findall(r"yields (\d+)", done.stdout)
    assert (int(given) >= ROUNDS) is yields
    assert (trace.read_text().count("membarrier(") > ROUNDS / 2) is barriers


@pytest.mark.parametrize(("mode", "pauses"), [("1", 100), ("2", 0), ("3", 0)])
def test_one_spins_and_two_sleeps_at_once(programs: Path, mode: str, pauses: int) -> None:
    """By single steps, because loops of some 2 us are lost in what going to sleep and waking up takes."""
    done = subprocess.run([programs / "lock_pauses"], env={**os.environ, **settings(mode)}, capture_output=True,
                          text=True, timeout=60, check=False)  # fmt: skip
    if done.returncode == 77:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"pauses {pauses}\n"
