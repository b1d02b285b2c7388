"""-k: the directory of the statistics files (VMA_STATS_SHMEM_DIR), and the files of dead processes in it.

The counters come from the service; the directory only says whose: with -k, processes that have a file there.
"""

import ctypes
import fcntl
import mmap
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from vmahybrid.config import catalogue

_NAME = re.compile(r"vmastat\.(\d+)")
_MAGIC = b"VMS1"  # VMH_STATS_MAGIC; libvma's own files of the same name are left alone


def of_programs(environ: Mapping[str, str]) -> str:
    """Where programs with that environment have their files."""
    name = "VMA_STATS_SHMEM_DIR"
    return environ.get(name) or str(catalogue.load()[name].default)


def pids_in(directory: str) -> set[int]:
    """Raises OSError."""
    return {int(match[1]) for name in os.listdir(directory) if (match := _NAME.fullmatch(name))}


def remove_stale(directory: str) -> list[int]:
    """Removes our files whose process is gone; what may not be removed stays. Returns the pids. Raises OSError."""
    return [pid for pid in sorted(pids_in(directory)) if _remove(os.path.join(directory, f"vmastat.{pid}"), pid)]


def _remove(path: str, pid: int) -> bool:
    try:
        # Not O_RDONLY alone: the name is anybody's to make, so no link is followed and no FIFO waited for.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or (info.st_uid not in {os.geteuid(), 0} and os.geteuid() != 0):
            return False
        if os.pread(fd, 4, 0) != _MAGIC or _owned(pid, fd) or not os.path.samestat(info, os.lstat(path)):
            return False
        os.unlink(path)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _owned(pid: int, fd: int) -> bool:
    """Does the process that made the file live? It holds a lock on it, whatever its pid is called here; and where it
    has lost that, nobody else who has the pid now can have begun before the file was made, and the page is mapped
    unless another program runs there by exec(3)."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    from vmahybrid.contracts import ffi  # slow to import, and seldom needed

    started = int.from_bytes(os.pread(fd, 8, ffi.offsetof("struct vmh_stats_page", "started_ns")), "little") / 1e9
    try:
        return (began(pid) < started + 1 or not started) and _mapped(pid, fd)
    except FileNotFoundError:
        return False


def _mapped(pid: int, fd: int) -> bool:
    """Has the process a mapping of the file? True where nobody can tell. One of our own, never looked into, shows what
    the kernel calls the file there: fstat(2) has other numbers on btrfs and overlayfs."""
    try:
        with mmap.mmap(fd, 1, access=mmap.ACCESS_COPY) as own:
            at = ctypes.addressof(ctypes.c_char.from_buffer(own))
            (file,) = (file for place, file in _mappings("self") if at in place)
        there = {file for _, file in _mappings(str(pid))}
    except (OSError, ValueError):
        return True
    return file in there or not there  # none: its first thread has ended, or it ends


def _mappings(process: str) -> Iterator[tuple[range, tuple[str, str]]]:
    """Addresses, and the device and inode of their file. Raises OSError."""
    with open(f"/proc/{process}/maps", "rb") as lines:
        for line in lines:
            place, _, _, device, inode = line.decode("ascii", "replace").split(maxsplit=5)[:5]
            low, high = (int(word, 16) for word in place.split("-"))
            yield range(low, high), (device, inode)


def began(pid: int) -> float:
    """When the process was made, in seconds since the epoch. Raises OSError."""
    words = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    up = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - up + int(words[19]) / os.sysconf("SC_CLK_TCK")
