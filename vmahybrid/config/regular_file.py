"""Reads files whose names people give, as the shim does (vmh_file_load() in shim/fd.c)."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read(path: Path) -> bytes:
    """Of a regular file only: a FIFO would be waited for, a device may never end. Raises OSError."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOCTTY | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", str(path))
        return file.read()
