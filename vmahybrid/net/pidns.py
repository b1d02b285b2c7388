"""PID namespaces: which one a process is in, and what it is called there."""

import os
import re
from pathlib import Path

_NSPID = re.compile(r"^NSpid:.*\s(\d+)$", re.M)


def own_pid(pid: int) -> tuple[int, int]:
    """Inode of its PID namespace, and its pid there; zeros if the kernel does not say, or not to us."""
    try:
        inode = os.stat(f"/proc/{pid}/ns/pid").st_ino
        found = _NSPID.search(Path(f"/proc/{pid}/status").read_text(errors="replace"))
    except OSError:
        return 0, 0
    return (inode, int(found[1])) if found else (0, 0)


def current() -> int:
    """Inode of the caller's. 0 where its /proc is another one's, whose numbers then are those that it sees."""
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return 0
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
