"""VMA_THREAD_MODE in a program under the shim: what a thread does that waits for a socket's lock. That 1 spins, and 2
does not, is tested in unit/c/test_lock.c: no system call shows it."""

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


@pytest.mark.parametrize(("mode", "barriers", "yields"), [("0", True, False), ("1", False, False), ("2", False, False),
                                                          ("3", False, True)])  # fmt: skip
def test_waiting_for_a_lock(program: Path, tmp_path: Path, mode: str, barriers: bool, yields: bool) -> None:
    """0: the owner takes none, others stop it by membarrier(2). 3: the processor is given away before sleeping."""
    runtime = [name for name in os.environ.get("LD_PRELOAD", "").split(":") if name]
    settings = {"LD_PRELOAD": ":".join([*runtime, str(library())]), "VMA_THREAD_MODE": mode, "VMA_TRACELEVEL": "warn",
                "VMA_HYBRID_SOCKET": "/nonexistent", "VMA_STATS_SHMEM_DIR": ""}  # fmt: skip
    chosen = [word for name, value in settings.items() for word in ("-E", f"{name}={value}")]
    trace = tmp_path / "trace"
    argv = ["strace", "-f", "--seccomp-bpf", "-qq", "-e", "trace=membarrier", "-o", trace, *chosen, program]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 77:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    (given,) = re.findall(r"yields (\d+)", done.stdout)
    assert (int(given) >= ROUNDS) is yields
    assert (trace.read_text().count("membarrier(") > ROUNDS / 2) is barriers
