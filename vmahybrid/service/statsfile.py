"""The statistics page that a program hands over: read through the descriptor it passed, never by its path.

The file is the program's: it may be anything, lie on a file system whose server does not answer, change and shrink.
It is accepted only from file systems that live in this kernel, read with pread, and removed after the program's death
only as the program's user could remove it himself.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import logging
import os
import select
import stat
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from vmahybrid import contracts
from vmahybrid.errors import Refused
from vmahybrid.service.reaper import fulfil, in_thread
from vmahybrid.vma_stats import directory

log = logging.getLogger(__name__)
_T = TypeVar("_T")

MAX_SIZE = 64 << 20  # bytes
PROBE_SECONDS = 0.5
DYING_SECONDS = 1.0     # in which a process that was killed is gone after its connection
# f_type of statfs(2), linux/magic.h: tmpfs, ext2-4, xfs, btrfs, overlayfs, ramfs, f2fs
LOCAL_FS = {0x01021994, 0xEF53, 0x58465342, 0x9123683E, 0x794C7630, 0x858458F6, 0xF2F52010}
SYS_SETGROUPS = {"x86_64": 116, "aarch64": 159}

_libc = ctypes.CDLL(None, use_errno=True)


class StatsFile:
    """Owner of the descriptor. ``size`` is that of the moment of acceptance."""

    def __init__(self, fd: int, size: int, inode: tuple[int, int]) -> None:
        self.fd, self.size, self._inode = fd, size, inode
        self._ordered: Future[None] | None = None

    @classmethod
    async def accept(cls, fd: int) -> StatsFile | None:
        """Takes ``fd``; None (and closed) if it is no page of ours or its file system does not answer in 0.5 s."""
        future = _thread(lambda: _probe(fd), "stats-probe")
        try:
            found = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(future)), PROBE_SECONDS)
        except TimeoutError:
            # The probing thread hangs and still uses the descriptor: it closes it when it comes back.
            future.add_done_callback(lambda _: os.close(fd))
            return None
        if found is None:
            _thread(lambda: os.close(fd), "stats-close")
            return None
        return cls(fd, found.st_size, (found.st_dev, found.st_ino))

    def read(self) -> bytes:
        """The page as it is now; shorter when the program cut it. Raises OSError."""
        chunks: list[bytes] = []
        at = 0
        while at < self.size and (chunk := os.pread(self.fd, self.size - at, at)):
            chunks.append(chunk)
            at += len(chunk)
        return b"".join(chunks)

    async def order(self, give: Callable[[int], None]) -> None:
        """``give`` writes, in a thread: another writer of the file, which is the program's, may hold its lock for ever.
        Raises Refused."""
        if self._ordered is not None and not self._ordered.done():
            raise Refused("statistics page", "an earlier order has not been written yet")
        try:
            fd = os.dup(self.fd)
        except OSError as error:
            raise Refused("statistics page", error.strerror or str(error)) from None

        def work() -> None:
            try:
                give(fd)
            finally:
                os.close(fd)

        self._ordered = _thread(work, "stats-order")
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self._ordered)), PROBE_SECONDS)
        except TimeoutError:
            raise Refused("statistics page", "the program keeps others from writing it") from None
        except OSError as error:
            raise Refused("statistics page", f"it can't be written: {error.strerror}") from None

    def remove_for(self, process: int, pid: int, uid: int, gid: int) -> Future[bool]:
        """Unlink the file that a program left, with its user's rights, in a thread; then close. One that lives keeps
        it: the service may stop. Takes ``process``, its pidfd. True: removed."""
        path = os.readlink(f"/proc/self/fd/{self.fd}")
        ours = os.path.basename(path) == f"vmastat.{pid}" and os.path.isabs(path)
        fd, self.fd = self.fd, -1

        def work() -> bool:
            dead = _dies(process)
            os.close(process)
            try:
                kept = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            finally:
                os.close(fd)
            try:
                return ours and (dead or _unlocked(kept)) and _unlink_as(path, self._inode, uid, gid)
            finally:
                os.close(kept)

        return _thread(work, "stats-remove", ends=True)

    def close(self) -> None:
        """Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def remove_stale_files() -> None:
    """Of programs that were killed while no service was there."""
    try:
        gone = directory.remove_stale(directory.of_programs(os.environ))
    except OSError as error:
        log.debug("statistics of dead processes: %s", error)
        return
    if gone:
        log.info("removed the statistics of dead processes: %s", ", ".join(map(str, gone)))


def _probe(fd: int) -> os.stat_result | None:
    buffer = ctypes.create_string_buffer(256)  # struct statfs begins with f_type, a long
    if _libc.fstatfs(fd, buffer) != 0:
        return None
    if ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF not in LOCAL_FS:
        return None
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        return None
    return found if contracts.size_of("struct vmh_stats_page") <= found.st_size <= MAX_SIZE else None


def _dies(process: int) -> bool:
    ask = select.poll()
    ask.register(process, select.POLLIN)
    return bool(ask.poll(1000 * DYING_SECONDS))


def _unlocked(fd: int) -> bool:
    """The lock of the shim is gone, though the process lives: exec(3). ``fd`` has a description of its own."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _unlink_as(path: str, inode: tuple[int, int], uid: int, gid: int) -> bool:
    # setgroups, setfsgid and setfsuid act on this thread alone when called raw; the thread ends after this. With a
    # foreign fsuid the kernel drops this thread's file capabilities: a path made of links leads nowhere new.
    number = SYS_SETGROUPS.get(os.uname().machine)
    if uid != 0:
        if number is None or _libc.syscall(number, 0, None) != 0:
            return False
        _libc.setfsgid(gid)
        _libc.setfsuid(uid)
        if _libc.setfsuid(-1) & 0xFFFFFFFF != uid:
            return False
    try:
        found = os.lstat(path)  # the path was read a moment ago: another file may be there now
        if not stat.S_ISREG(found.st_mode) or found.st_uid != uid or (found.st_dev, found.st_ino) != inode:
            return False
        os.unlink(path)
    except OSError:
        return False
    return True


def _thread(work: Callable[[], _T], name: str, ends: bool = False) -> Future[_T]:
    future: Future[_T] = Future()
    in_thread(lambda: fulfil(future, work), name, ends)
    return future
