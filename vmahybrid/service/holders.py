"""Which processes hold a socket: after a fork the kernel serves it until one holder is left."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def held_elsewhere(inode: int, pid: int, proc: Path = Path("/proc")) -> bool:
    """Does a process other than ``pid`` have a descriptor of the socket with this inode?

    Reads the descriptors of every process, so it belongs in a thread. Processes that may not be looked at count as not
    holding."""
    wanted = f"socket:[{inode}]"
    for entry in proc.iterdir():
        if not entry.name.isdecimal() or int(entry.name) == pid:
            continue
        with contextlib.suppress(OSError):  # gone meanwhile, or a kernel thread
            for fd in os.scandir(entry / "fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(fd.path) == wanted:
                        return True
    return False
