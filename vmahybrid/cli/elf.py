"""Whether ld.so will put a library of ours into a program: elf(5), and ld.so(8) on secure execution."""

import os
import stat
import struct
import sys

ELF_MAGIC = b"\x7fELF"
PT_INTERP = 3
EI_CLASS, CLASS64 = 4, 2
MAX_HEADERS = 1024

SHIM = "LD_PRELOAD", "the shim", "The program will run on the kernel"
SOFTVERBS = "LD_LIBRARY_PATH", "the software device", "The program will not find the software device"


def preload_problem(path: str, what: tuple[str, str, str] = SHIM, depth: int = 4) -> str:
    """A sentence if the library can't get in, "" if it can or nobody can tell. Scripts are followed to their
    interpreter. ``what``: the variable that brings it, its name, the consequence."""
    variable, library, no_effect = what
    try:
        with open(path, "rb") as file:
            info = os.fstat(file.fileno())
            head = file.read(256)
            if head[:2] == b"#!":
                words = head[2:].split(b"\n")[0].split()
                return preload_problem(os.fsdecode(words[0]), what, depth - 1) if words and depth else ""
            if head[:4] != ELF_MAGIC:
                return ""
            if _secure(info, path):
                return f"it gains privileges, and ld.so then ignores {variable}. {no_effect}"
            if head[EI_CLASS] != CLASS64:
                return f"a 32-bit program, and {library} is a 64-bit library. {no_effect}"
            file.seek(0)
            return "" if _has_interpreter(file.read(1 << 16)) else f"statically linked: there is no ld.so. {no_effect}"
    except (OSError, ValueError, IndexError, OverflowError, struct.error):
        return ""


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


def _has_interpreter(data: bytes) -> bool:
    order = "<" if sys.byteorder == "little" else ">"
    (table,) = struct.unpack_from(order + "Q", data, 32)       # e_phoff
    size, count = struct.unpack_from(order + "HH", data, 54)   # e_phentsize, e_phnum
    starts = range(table, table + size * min(count, MAX_HEADERS), size)
    return PT_INTERP in [struct.unpack_from(order + "I", data, start)[0] for start in starts]
