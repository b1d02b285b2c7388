"""Programs of musl are executed without the shim: musl's ld.so ends a program for a preload that it can't link. Here
glibc's stands at such a name, and the program tells what it was given."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vmahybrid.cli.elf import preload_problem
from vmahybrid.cli.run import library

pytestmark = pytest.mark.skipif("VMH_SANITIZER_RUNTIME" in os.environ, reason="a sanitizer's runtime has to be first")

SOURCE = Path(__file__).parent / "c/exec_ways.c"
WAYS = ("execve", "execv", "execvp", "execvpe", "execl", "execlp", "execle", "fexecve", "execveat", "empty", "flags",
        "syscall", "posix_spawn", "posix_spawnp", "vfork")  # fmt: skip
OTHER = "/nowhere/libother.so"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the program as `glibc` and as `musl`, and scripts of the latter."""
    directory = tmp_path_factory.mktemp("exec")
    subprocess.run(["cc", "-O1", "-Wall", "-Werror", "-o", directory / "glibc", SOURCE], check=True)
    loader = directory / "ld-musl-x86_64.so.1"
    found = subprocess.run(["cc", "-print-file-name=ld-linux-x86-64.so.2"], capture_output=True, text=True, check=True)
    loader.symlink_to(Path(found.stdout.strip()).resolve())
    subprocess.run(["cc", "-O1", "-o", directory / "musl", SOURCE, f"-Wl,--dynamic-linker={loader}"], check=True)
    (directory / "not").mkdir()     # in PATH before it: files that are found there and can't be executed
    for name in ("musl", "glibc"):
        (directory / "not" / name).write_bytes((directory / {"musl": "glibc", "glibc": "musl"}[name]).read_bytes())
    for name, interpreter in (("script", "musl"), ("script2", "script")):
        (directory / name).write_text(f"#! {directory / interpreter}\n")
        (directory / name).chmod(0o755)
    return directory


def told(made: Path, way: str, program: str, *preloads: str) -> str:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("VMA_")}
    shim = {"LD_PRELOAD": ":".join(preloads), "VMA_HYBRID_SOCKET": str(made / "none"), "VMA_TRACELEVEL": "none",
            "VMA_STATS_SHMEM_DIR": str(made)}  # fmt: skip
    return subprocess.run([made / "glibc", way, made / program], env=clean | shim, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, text=True, timeout=60, check=True).stdout  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_without_the_shim(made: Path, way: str) -> None:
    assert told(made, way, "musl", str(library()), OTHER) == f"{OTHER}\n"
    assert told(made, way, "musl", OTHER, str(library()), OTHER) == f"{OTHER}:{OTHER}\n"
    assert told(made, way, "musl", str(library())) == "\n"


@pytest.mark.parametrize("way", WAYS)
def test_those_of_glibc_have_it(made: Path, way: str) -> None:
    given = f"{library()}:{OTHER}"
    assert told(made, way, "glibc", *given.split(":")) == f"{given}\n"


@pytest.mark.parametrize("script", ["script", "script2"])
def test_scripts(made: Path, script: str) -> None:
    assert told(made, "execv", script, str(library()), OTHER) == f"{OTHER}\n"


def test_an_environment_that_can_not_be_read(made: Path) -> None:
    assert told(made, "bad", "musl", str(library())) == "Bad address\n"
    assert told(made, "bad", "glibc", str(library())) == "Bad address\n"


@pytest.mark.parametrize("program", ["musl", "glibc"])
def test_no_environment(made: Path, program: str) -> None:
    assert told(made, "nothing", program, str(library())) == "none\n"


def test_under_another_name(made: Path) -> None:
    other = made / "another.so"
    other.symlink_to(library())
    assert told(made, "execv", "musl", str(other), OTHER) == f"{OTHER}\n"


def test_run_leaves_it_out(made: Path) -> None:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("VMA_", "LD_"))}
    command = [sys.executable, "-P", "-m", "vmahybrid.cli.main", "run", "--", made / "musl"]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "none\n"
    assert done.stderr == (f"vmahybrid: {made / 'musl'}: a program of musl, and the shim is a library of glibc. The "
                           "program will run on the kernel\n")  # fmt: skip
    assert preload_problem(str(made / "script")).startswith("a program of musl")
