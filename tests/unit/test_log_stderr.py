"""The log of a program whose descriptor 2 is no longer, or never was, the stderr that it was started with."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vmahybrid.cli.run import library

SOCKET = "import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('127.0.0.1', 0))\n"
TO = "f = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o600)\n"
REOPEN = """
import ctypes
libc = ctypes.CDLL(None)
libc.freopen.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p]
libc.freopen(sys.argv[1].encode(), b"w", ctypes.c_void_p.in_dll(libc, "stderr"))
"""
BANNER = "VMA INFO: VMA_VERSION: "


def logs(tmp_path: Path, code: str, shell: str = "", **env: str) -> tuple[str, str]:
    """What the program's own file (sys.argv[1]) and its stderr hold at the end."""
    mine, first = tmp_path / "mine", tmp_path / "stderr"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("VMA_")}
    shim = {"LD_PRELOAD": str(library()), "VMA_HYBRID_SOCKET": str(tmp_path / "none"), "VMA_STATS_SHMEM_DIR": ""}
    with first.open("w") as stderr:
        subprocess.run(["sh", "-c", f'exec "$@" {shell}', "sh", sys.executable, "-c", f"import os, sys\n{code}", mine],
                       env=clean | shim | env, stderr=stderr, timeout=20, check=True)
    return (mine.read_text() if mine.exists() else ""), first.read_text()


def test_the_banner_says_which_commit_it_is(tmp_path: Path) -> None:
    """Where the sources are in git. Its last digits may be -dirty, as built before the last commit."""
    head = logs(tmp_path, SOCKET)[1].splitlines()[1:4]
    known = (Path(__file__).parents[2] / ".git").exists()
    assert BANNER in head[0] and bool(re.fullmatch(r".*Git: [0-9a-f]{40}(-dirty)?", head[1])) is known
    assert "Cmd Line: " in head[2 if known else 1]


@pytest.mark.parametrize(("code", "shell"), [
    ("os.close(2)\n" + TO, ""),
    ("os.closerange(0, 3)\n[os.open('/dev/null', os.O_RDWR) for _ in range(2)]\n" + TO, ""),
    (SOCKET + "os.close(2)\n" + TO + "s.setsockopt(1, 2, 1)\n", ""),
    (TO, "2>&-"),
], ids=["closed", "daemon", "after-the-banner", "begun-without"])  # fmt: skip
def test_a_file_of_the_programs_that_got_the_number_is_spared(tmp_path: Path, code: str, shell: str) -> None:
    """A daemon closes 0 to 2, and its database gets number 2."""
    ends = "assert f == 2; os.write(f, b'RECORD1\\n')\n" + SOCKET + "s.close(); os.write(f, b'RECORD2\\n')"
    mine, _ = logs(tmp_path, code + ends, shell, VMA_TRACELEVEL="debug")
    assert mine == "RECORD1\nRECORD2\n"


@pytest.mark.parametrize("code", [
    TO + "os.dup2(f, 2)\n", TO + "os.dup2(f, 2, inheritable=False)\n", TO + "os.close(2); os.dup2(f, 2)\n", REOPEN,
    TO + "import ctypes; ctypes.CDLL(None).syscall({'x86_64': 292, 'aarch64': 24}[os.uname().machine], f, 2, 0)\n",
], ids=["dup2", "dup3", "close-dup2", "freopen", "syscall"])  # fmt: skip
def test_a_stderr_that_the_program_laid_elsewhere_is_followed(tmp_path: Path, code: str) -> None:
    mine, stderr = logs(tmp_path, code + SOCKET)
    assert BANNER in mine and not stderr


@pytest.mark.parametrize("before", ["", SOCKET, "if os.fork(): os.wait(); os._exit(0)\n"],
                         ids=["first", "socket", "forked"])
def test_what_the_child_of_a_vfork_lays_under_2_is_its_own(tmp_path: Path, before: str) -> None:
    """subprocess: the child has descriptors of its own and runs in the memory of its parent until its exec."""
    code = before + "import subprocess\nsubprocess.run(['true'], stderr=subprocess.PIPE, check=True)\n" + TO
    mine, stderr = logs(tmp_path, code + SOCKET + "socket.socket().bind(('', 0))", VMA_TRACELEVEL="debug")
    assert not mine and "bind" in stderr[stderr.rindex("socket("):]


def test_a_program_that_began_without_is_told_nothing(tmp_path: Path) -> None:
    mine, stderr = logs(tmp_path, TO + "os.dup2(f, 9); os.close(f); os.dup2(9, 2)\n" + SOCKET, "2>&-")
    assert not mine and not stderr


def test_the_terminal_of_a_forkpty(tmp_path: Path) -> None:
    code = f"""
import pty
pid, master = pty.fork()
if not pid:
    {SOCKET.strip()}
    os._exit(0)
read = b''
try:
    while part := os.read(master, 1000):
        read += part
except OSError:
    pass
os.wait()
open(sys.argv[1], 'wb').write(read)
"""
    mine, stderr = logs(tmp_path, code)
    assert BANNER in mine and not stderr
