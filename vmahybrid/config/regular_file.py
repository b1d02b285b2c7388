"""Reads files whose names people give, as the shim does (vmh_file_load() in shim/fd.c)."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

_OF_THE_SHELL = re.compile(r"/dev/(stdin|fd/\d+)|/proc/self/fd/\d+")
_LIMIT = 1 << 16     # more than any of our files may have


def read(path: Path) -> bytes:
    """Of a regular file: a FIFO would be waited for, a device may never end. Or of what a shell has opened, as for
    `config check <(command)`. Raises OSError."""
    if _OF_THE_SHELL.fullmatch(str(path)):
        with open(path, "rb") as file:
            return file.read(_LIMIT)
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOCTTY | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", str(path))
        return file.read(_LIMIT)
