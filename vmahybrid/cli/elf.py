"""Whether ld.so will put a library of ours into a program: elf(5), and ld.so(8) on secure execution."""

import os
import stat
import struct
import sys
from enum import Enum

ELF_MAGIC = b"\x7fELF"
PT_INTERP = 3
EI_CLASS, CLASS64 = 4, 2
MAX_HEADERS = 1024

SHIM = "LD_PRELOAD", "the shim", "The program will run on the kernel"
SOFTVERBS = "LD_LIBRARY_PATH", "the software device", "The program will not find the software device"


class Fit(Enum):
    """How a program takes a library, and what is said of it."""

    TAKES = ""  # or nobody can tell
    PRIVILEGED = "it gains privileges, and ld.so then ignores {variable}"
    NARROW = "a 32-bit program, and {library} is a 64-bit library"
    STATIC = "statically linked: there is no ld.so"
    MUSL = "a program of musl, and {library} is a library of glibc"     # musl's ld.so ends it for the preload

    def problem(self, what: tuple[str, str, str]) -> str:
        """A sentence if the library can't get in, else "". ``what``: the variable that brings it, its name, the
        consequence."""
        variable, library, no_effect = what
        return f"{self.value.format(variable=variable, library=library)}. {no_effect}" if self.value else ""


def preload_problem(path: str, what: tuple[str, str, str] = SHIM) -> str:
    return fit(path).problem(what)


def fit(path: str, depth: int = 4) -> Fit:
    """Scripts are followed to their interpreter."""
    try:
        with open(path, "rb") as file:
            info = os.fstat(file.fileno())
            head = file.read(256)
            if head[:2] == b"#!":
                words = head[2:].split(b"\n")[0].split()
                return fit(os.fsdecode(words[0]), depth - 1) if words and depth else Fit.TAKES
            if head[:4] != ELF_MAGIC:
                return Fit.TAKES
            if _secure(info, path):
                return Fit.PRIVILEGED
            if head[EI_CLASS] != CLASS64:
                return Fit.NARROW
            file.seek(0)
            return _linked_by(_loader(file.read(1 << 16)))
    except (OSError, ValueError, IndexError, OverflowError, struct.error):
        return Fit.TAKES


def _linked_by(loader: bytes | None) -> Fit:
    if loader is None:
        return Fit.STATIC
    return Fit.MUSL if os.path.basename(loader).startswith(b"ld-musl") else Fit.TAKES


def _secure(info: os.stat_result, path: str) -> bool:
    """AT_SECURE (getauxval(3)): another effective user or group, or capabilities of the file."""
    if info.st_mode & stat.S_ISUID and info.st_uid != os.getuid():
        return True
    if info.st_mode & stat.S_ISGID and info.st_mode & stat.S_IXGRP and info.st_gid != os.getgid():
        return True
    try:
        os.getxattr(path, "security.capability")
    except OSError:
        return False
    return os.getuid() != 0


def _loader(data: bytes) -> bytes | None:
    """ld.so(8), or another, that links the program; None: there is none."""
    order = "<" if sys.byteorder == "little" else ">"
    (table,) = struct.unpack_from(order + "Q", data, 32)       # e_phoff
    size, count = struct.unpack_from(order + "HH", data, 54)   # e_phentsize, e_phnum
    starts = range(table, table + size * min(count, MAX_HEADERS), size)
    for start in starts:
        if struct.unpack_from(order + "I", data, start)[0] == PT_INTERP:
            (at,) = struct.unpack_from(order + "Q", data, start + 8)    # p_offset
            return data[at:].split(b"\0")[0]
    return None
