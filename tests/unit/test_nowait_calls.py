"""Calls that don't wait, on connections that the kernel serves, are the system call itself, not libc's function: the
program sees no difference, and a library that stands below the shim is called all the same."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from vmahybrid.cli.run import library

BELOW = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <sys/types.h>
static int n;
ssize_t recv(int fd, void *buf, size_t len, int flags)
{
	static ssize_t (*next)(int, void *, size_t, int);
	if (!next)
		next = (ssize_t (*)(int, void *, size_t, int))dlsym(RTLD_NEXT, "recv");
	n++;
	return next(fd, buf, len, flags);
}
__attribute__((destructor)) static void said(void) { fprintf(stderr, "below %d\\n", n); }
"""


def built(directory: Path, name: str) -> Path:
    subprocess.run(["cc", "-O1", "-Wall", "-Werror", "-Wno-unused-result", "-pthread", "-o", directory / name,
                    Path(__file__).parent / f"c/{name}.c"], check=True)  # fmt: skip
    return directory / name


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("nowait"), "nowait_calls")


def told(program: Path, *preloads: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("VMA_")}
    shim = {"LD_PRELOAD": ":".join(map(str, preloads)), "VMA_HYBRID_SOCKET": str(program.parent / "none"),
            "VMA_STATS_SHMEM_DIR": str(program.parent), "VMA_TRACELEVEL": "none", **variables}
    return subprocess.run([program], env=clean | shim, capture_output=True, text=True, timeout=60, check=True)


@pytest.fixture(scope="module")
def plain(program: Path) -> str:
    return told(program).stdout


@pytest.mark.parametrize("policy", ["adaptive", "offload", "kernel"])
def test_as_the_kernel(program: Path, plain: str, policy: str) -> None:
    assert plain.count("cancelled") == 3 * 15 and "goes on" not in plain and plain.count("EAGAIN") == 3 * 11
    assert told(program, library(), VMA_HYBRID_TCP=policy).stdout == plain


def test_a_library_below_is_called(program: Path, tmp_path: Path) -> None:
    (tmp_path / "below.c").write_text(BELOW)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "below.so", tmp_path / "below.c"], check=True)
    plain, shim = told(program, tmp_path / "below.so"), told(program, library(), tmp_path / "below.so")
    assert shim.stdout == plain.stdout
    (calls,), (same,) = (re.findall(r"^below (\d+)$", run.stderr, re.M) for run in (plain, shim))
    assert int(same) >= int(calls) >= 18    # the shim asks for some read() by recv()


@pytest.mark.parametrize("policy", ["adaptive", "offload"])
def test_a_thread_with_descriptors_of_its_own(tmp_path: Path, policy: str) -> None:
    program = built(tmp_path, "apart_calls")
    plain = told(program).stdout
    assert "same numbers 1" in plain and "-1" not in plain
    assert told(program, library(), VMA_HYBRID_TCP=policy).stdout == plain
