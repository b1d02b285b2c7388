"""The linker version script and the interposers agree: what replaces a libc function is exported, nothing else is."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import vmahybrid

LIBRARY = Path(vmahybrid.__file__).parent / "libvmahybrid.so"
LIBC = Path("/lib/x86_64-linux-gnu/libc.so.6")


def symbols(*arguments: str, kinds: str) -> set[str]:
    """Names of the given nm types, without versions."""
    listing = subprocess.run(["nm", *arguments], capture_output=True, text=True, check=True).stdout
    rows = (line.split() for line in listing.splitlines())
    return {row[-1].split("@")[0] for row in rows if len(row) >= 2 and row[-2] in kinds}


# local functions that share a libc name and replace nothing: ours by chance, and one that libc links into each library
NOT_INTERPOSERS = {"_init", "_fini", "warn", "pthread_atfork"}


@pytest.fixture(scope="module")
def libc() -> set[str]:
    return symbols("-D", "--defined-only", str(LIBC), kinds="TWi")


@pytest.fixture(scope="module")
def exported() -> set[str]:
    return symbols("-D", "--defined-only", str(LIBRARY), kinds="TWBDR")


def test_only_libc_names_and_ours_are_exported(libc: set[str], exported: set[str]) -> None:
    assert not {name for name in exported if name not in libc and not name.startswith("vmh_")}


def test_what_replaces_a_libc_function_is_exported(libc: set[str], exported: set[str]) -> None:
    """A name missing in libvmahybrid.map turns an interposer into a local function, silently."""
    local = symbols(str(LIBRARY), kinds="t")
    assert local, "the library is stripped: this test sees nothing"
    assert local & libc - NOT_INTERPOSERS == set()


def test_the_basic_calls_are_interposed(exported: set[str]) -> None:
    wanted = {"socket", "bind", "connect", "sendto", "recvfrom", "recvmsg", "close", "poll", "select", "epoll_wait"}
    assert wanted <= exported
