"""-k: the directory of the statistics files (VMA_STATS_SHMEM_DIR), and the files of dead processes in it.

The counters come from the service; the directory only says whose: with -k, processes that have a file there.
"""

import os
import re
import stat
from pathlib import Path

_NAME = re.compile(r"vmastat\.(\d+)")
_MAGIC = b"VMS1"  # VMH_STATS_MAGIC; libvma's own files of the same name are left alone


def pids_in(directory: str) -> set[int]:
    """Raises OSError."""
    return {int(match[1]) for name in os.listdir(directory) if (match := _NAME.fullmatch(name))}


def remove_stale(directory: str) -> list[int]:
    """Removes our files whose process is gone; what may not be removed stays. Returns the pids. Raises OSError."""
    gone = [pid for pid in sorted(pids_in(directory)) if not Path(f"/proc/{pid}").exists()]
    return [pid for pid in gone if _remove(os.path.join(directory, f"vmastat.{pid}"))]


def _remove(path: str) -> bool:
    try:
        # Not O_RDONLY alone: the name is anybody's to make, so no link is followed and no FIFO waited for.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or (info.st_uid not in {os.geteuid(), 0} and os.geteuid() != 0):
            return False
        if os.pread(fd, 4, 0) != _MAGIC:
            return False
        os.unlink(path)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
