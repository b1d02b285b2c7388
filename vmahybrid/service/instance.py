"""One service per control socket: the lock, who holds it, and what a dead predecessor left.

The lock is flock(2) on ``<control path>.lock``: the kernel drops it with its holder, whatever killed that.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from vmahybrid.errors import NotPossibleHere, UsageError, VmahybridError
from vmahybrid.net.netns import NAMED, Netns, NetnsWorker
from vmahybrid.service.ports import OWN_VETHS

log = logging.getLogger("vmahybrid.service")

SETTLE_SECONDS = 0.1  # between the two looks at a ring veth without its program


class Instance:
    """Owner of the run directory's lock, from ``acquire`` to ``release``."""

    def __init__(self, control: Path) -> None:
        self.control = control
        self.lock_path = control.with_name(control.name + ".lock")
        self._fd = -1
        self._made: list[Path] = []  # directories, the innermost first

    def acquire(self) -> None:
        """Make the directory, take the lock, remove a dead service's sockets. Raises VmahybridError."""
        refuse_other_files("control.path", self.control)
        try:
            self.make_directory(self.control)
            self._fd = self._lock()
        except PermissionError as error:
            raise NotPossibleHere("service", f"{error.filename}: {error.strerror}",
                                  "start the service as root") from None
        except OSError as error:
            raise VmahybridError("service", f"{error.filename}: {error.strerror}",
                                 "choose another --control") from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        # A lock file that somebody deleted proves nothing: ask the socket as well.
        if (pid := listener(self.control)) is not None:
            self.release()
            raise self._held_by(pid)
        if remove_socket(self.control):
            log.info("removed the control socket of a service that is gone: %s", self.control)

    def _lock(self) -> int:
        while True:
            fd = os.open(self.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
                os.close(fd)
                raise self._held_by(listener(self.control) or (int(holder) if holder.isdigit() else 0)) from None
            # The holder before us may have removed the file between our open and our lock.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(self.lock_path)):
                    return fd
            os.close(fd)

    def _held_by(self, pid: int) -> VmahybridError:
        who = f"process {pid}" if pid else "another process"
        return VmahybridError(f"control socket {self.control}", f"{who} serves it already",
                              f"stop it{f' (kill {pid})' if pid else ''}, or choose another socket with --control")

    def release(self) -> None:
        """Remove the lock file and the directories that we made and that are empty. Idempotent."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self.lock_path)
            os.close(self._fd)
            self._fd = -1
        for directory in self._made:
            with contextlib.suppress(OSError):
                directory.rmdir()
        self._made.clear()

    def make_directory(self, socket_path: Path) -> None:
        """Make the directories that lead to a socket and note them for ``release``. Raises OSError."""
        missing = [path for path in socket_path.parents if not path.exists()]
        for directory in reversed(missing):
            directory.mkdir(mode=0o755, exist_ok=True)
            self._made.insert(0, directory)


def listener(path: Path) -> int | None:
    """The pid that listens at a Unix SEQPACKET or stream socket, None if nobody does."""
    for kind in (socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
        with socket.socket(socket.AF_UNIX, kind) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(path))
            except OSError:
                continue
            # of the listener, at the time of its listen(2)
            pid: int = struct.unpack("=iII", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
            return pid
    return None


def refuse_other_files(key: str, path: Path) -> None:
    """Raise UsageError if there is a file at ``path`` that is no socket: it is not ours to replace."""
    with contextlib.suppress(OSError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise UsageError(f"{key} {path}", "there is a file that is no socket", f"choose another {key}")


def remove_socket(path: Path) -> bool:
    """Unlink a socket file; anything else is left alone. True if there was one."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return False
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def network_namespaces() -> Iterator[Path]:
    """One path per network namespace that a process or a name under /run/netns holds."""
    seen: set[Netns] = set()
    candidates = [*Path("/proc").glob("[0-9]*/ns/net")]
    if NAMED.is_dir():
        candidates += NAMED.iterdir()
    for path in candidates:
        try:
            netns = Netns.of_path(path)
        except OSError:  # the process ended, or it is a stale name
            continue
        if netns not in seen:
            seen.add(netns)
            yield path


def remove_stale_veths() -> list[str]:
    """Delete ring veths of services that were killed, in all namespaces; their names.

    Their guard program died with its service, those of a living one have theirs: so several services may run."""
    removed: list[str] = []
    for path in network_namespaces():
        try:
            if not any(name.startswith(OWN_VETHS) for name in _names_in(path)):
                continue
            with NetnsWorker.open_path(path) as worker:
                removed += worker.call(_remove_here)
        except OSError as error:
            log.debug("%s: %s", path, error)
    if removed:
        log.info("removed ring veths of a service that is gone: %s", ", ".join(removed))
    return removed


def _names_in(path: Path) -> list[str]:
    with NetnsWorker.open_path(path) as worker:
        return worker.call(lambda: [name for _, name in socket.if_nameindex()])


def _remove_here() -> list[str]:
    from vmahybrid.xdp.ringveth import ALIAS

    first = _unguarded(ALIAS)
    if not first:
        return []
    time.sleep(SETTLE_SECONDS)  # one that is just being made gets its program within a few milliseconds
    stale = {index: name for index, name in _unguarded(ALIAS).items() if index in first}
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    removed: list[str] = []
    with IPRoute() as route:
        for index, name in stale.items():
            try:
                route.link("del", index=index)
            except NetlinkError as error:   # went with the other end, or another service was first
                log.debug("%s: %s", name, error)
                continue
            removed.append(name)
    return removed


def _unguarded(alias: str) -> dict[int, str]:
    from pyroute2 import IPRoute

    found: dict[int, str] = {}
    with IPRoute() as route:
        for link in route.get_links():
            name = str(link.get_attr("IFLA_IFNAME"))
            xdp = link.get_attr("IFLA_XDP")
            attached = xdp.get_attr("IFLA_XDP_ATTACHED") if xdp is not None else 0
            if name.startswith(OWN_VETHS) and link.get_attr("IFLA_IFALIAS") == alias and not attached:
                found[link["index"]] = name
    return found
