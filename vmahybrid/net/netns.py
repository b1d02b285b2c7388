"""Network namespaces: who they are, and a thread that works inside one.

Sockets, XDP attachments and ring veths belong to the namespace of the thread that makes them, and the service serves
every namespace of the host: one :class:`NetnsWorker` per namespace enters it (setns(2)) and makes them there. The file
descriptors then work from any thread. The caller's thread is never moved.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import queue
import select
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

_T = TypeVar("_T")

CLONE_NEWNET = 0x40000000
SO_PEERPIDFD = 77  # asm-generic/socket.h, kernel 6.5
PIDFD_GET_NET_NAMESPACE = 0xFF04  # linux/pidfd.h, kernel 6.11
NAMED = Path("/run/netns")

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, order=True)
class Netns:
    """Identity of a network namespace: device and inode of its nsfs file. Hashable, ordered; valid while it lives."""

    dev: int
    ino: int

    @classmethod
    def of_fd(cls, fd: int) -> Self:
        """Of an open /proc/PID/ns/net or /run/netns file."""
        stat = os.fstat(fd)
        return cls(stat.st_dev, stat.st_ino)

    @classmethod
    def of_path(cls, path: str | Path) -> Self:
        stat = os.stat(path)
        return cls(stat.st_dev, stat.st_ino)

    @classmethod
    def of_pid(cls, pid: int) -> Self:
        """Of a process's main thread. Raises FileNotFoundError or ProcessLookupError when it is gone."""
        return cls.of_path(f"/proc/{pid}/ns/net")

    @classmethod
    def current(cls) -> Self:
        """Of the calling thread."""
        return cls.of_path("/proc/thread-self/ns/net")

    @property
    def name(self) -> str:
        """"host" for the namespace of process 1 and for the service's own unless it has a name, the name under
        /run/netns, else "net:[inode]"."""
        if self._is_of("/proc/1/ns/net"):
            return "host"
        return self._bound_name() or ("host" if self._is_of("/proc/self/ns/net") else f"net:[{self.ino}]")

    def _is_of(self, path: str) -> bool:
        try:
            return self == Netns.of_path(path)
        except OSError:  # process 1 may be hidden (hidepid)
            return False

    def _bound_name(self) -> str | None:
        try:
            candidates = sorted(NAMED.iterdir())
        except OSError:
            return None
        for path in candidates:
            try:
                if Netns.of_path(path) == self:
                    return path.name
            except OSError:
                continue
        return None

    def __str__(self) -> str:
        return self.name


def peer_pidfd(connection: socket.socket) -> int:
    """A new pidfd of the process at the other end of a Unix socket (the one that connected). Raises OSError."""
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, 4)
        return int(struct.unpack("i", raw)[0])
    except OSError:
        # Before 6.5 the pid may in theory have been reused since connect(); only the credential is left to ask.
        pid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        return os.pidfd_open(pid)


def netns_fd_of_pidfd(pidfd: int) -> int:
    """A new fd of the network namespace of a process, proof against reuse of its pid. Raises OSError."""
    try:
        return fcntl.ioctl(pidfd, PIDFD_GET_NET_NAMESPACE)
    except OSError:
        pass  # before 6.11: by /proc, then make sure the process lived throughout
    fd = os.open(f"/proc/{_pid_of(pidfd)}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    if poll.poll(0):
        os.close(fd)
        raise ProcessLookupError("the process ended")
    return fd


def _pid_of(pidfd: int) -> int:
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
        if line.startswith("Pid:"):
            return int(line.split()[1])
    raise ProcessLookupError("not a pidfd")


def _check(result: int, call: str) -> None:
    if result != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"{call}: {os.strerror(errno)}")


class NetnsWorker:
    """A daemon thread inside one network namespace.

    The thread keeps the namespace alive until :meth:`close`. Calls run one after another in the order they came.
    ``netns`` is the identity of the namespace.
    """

    def __init__(self, enter: Callable[[], None], label: str = "netns") -> None:
        """Runs ``enter`` in the new thread; what it raises is raised here. Use the ``open_*`` class methods."""
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        started: Future[Netns] = Future()
        self._thread = threading.Thread(target=self._run, args=(enter, started), name=label, daemon=True)
        self._thread.start()
        self.netns = started.result()

    @classmethod
    def open_fd(cls, fd: int) -> Self:
        """In the namespace of a namespace file or of a pidfd; ``fd`` stays the caller's. Raises OSError."""
        return cls(lambda: _check(_libc.setns(fd, CLONE_NEWNET), "setns"), f"netns-fd-{fd}")

    @classmethod
    def open_path(cls, path: str | Path) -> Self:
        """In /run/netns/NAME, /proc/PID/ns/net or a bare NAME of `ip netns`. Raises OSError."""
        full = NAMED / path  # an absolute path wins over NAMED
        fd = os.open(full, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return cls.open_fd(fd)
        finally:
            os.close(fd)

    @classmethod
    def open_netns_of(cls, other: NetnsWorker) -> Self:
        """In the namespace of another worker. Raises OSError."""
        fd = other.namespace_fd()
        try:
            return cls.open_fd(fd)
        finally:
            os.close(fd)

    @classmethod
    def open_current(cls) -> Self:
        """In the namespace of the calling thread."""
        return cls.open_path("/proc/thread-self/ns/net")

    @classmethod
    def open_private(cls) -> Self:
        """In a new, empty namespace that nobody else can name."""
        return cls(lambda: _check(_libc.unshare(CLONE_NEWNET), "unshare"), "netns-private")

    def _run(self, enter: Callable[[], None], started: Future[Netns]) -> None:
        try:
            enter()
            started.set_result(Netns.current())
        except BaseException as error:
            started.set_exception(error)
            return
        while (job := self._jobs.get()) is not None:
            future, work = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            # Frames of the last job would keep its objects, and so their fds, until the next one.
            del job, future, work

    def _submit(self, work: Callable[[], _T]) -> Future[_T]:
        future: Future[_T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the worker of namespace {self.netns.ino} is closed")
            self._jobs.put((future, work))
        return future

    def call(self, fn: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        """Run ``fn`` in the namespace and wait; from any thread, the worker's own included. Raises what it raises."""
        if threading.current_thread() is self._thread:
            return fn(*args, **kwargs)
        return self._submit(lambda: fn(*args, **kwargs)).result()

    def call_within(self, seconds: float, fn: Callable[..., _T], *args: Any) -> _T:
        """Like :meth:`call`, but waits no longer: raises TimeoutError then, and the call comes to its end later."""
        if threading.current_thread() is self._thread:
            return fn(*args)
        return self._submit(lambda: fn(*args)).result(seconds)

    async def call_async(self, fn: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        """Like :meth:`call`, without blocking the event loop. Cancelling does not stop a call that has begun."""
        return await asyncio.wrap_future(self._submit(lambda: fn(*args, **kwargs)))

    def socket(self, family: int, kind: int, proto: int = 0) -> socket.socket:
        """A socket of the namespace, for use anywhere."""
        return self.call(socket.socket, family, kind, proto)

    def namespace_fd(self) -> int:
        """A new fd of the namespace (close it)."""
        return self.call(os.open, "/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Finish what was submitted, end the thread, let the namespace go. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()
