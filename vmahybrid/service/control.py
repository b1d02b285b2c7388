"""The control socket: connections, one request at a time, and the descriptors that come with them.

A connection is read only when its last request is answered (but for NEIGH, of which a few may be under way), so a
program that floods waits for itself; a token bucket bounds what one connection may take of the service.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Self

from vmahybrid.contracts import lib
from vmahybrid.service.messages import FDS_MAX, MESSAGE_MAX, ProtocolError, Request, parse
from vmahybrid.service.reaper import close_foreign, in_thread

BACKLOG = 128
SEND_BUFFER = 1 << 22    # bytes: thousands of events to a program that is busy elsewhere
RATE = 4000.0            # requests per second and connection
BURST = 2000.0

assert MESSAGE_MAX == lib.VMH_MSG_MAX


class ConnectionLost(Exception):
    """The program closed the connection, died, or does not read."""


class ReceivedFds:
    """Owner of the descriptors of one message: those not taken are closed on every path."""

    def __init__(self, fds: Sequence[int]) -> None:
        self._fds = list(fds)

    def __len__(self) -> int:
        return len(self._fds)

    def take(self) -> int:
        """The next descriptor, now the caller's."""
        return self._fds.pop(0)

    def close(self) -> None:
        fds, self._fds = self._fds, []
        close_foreign(fds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


class TokenBucket:
    """``rate`` per second on average, ``burst`` at once; ``delay`` takes one and says how long to wait for it (s)."""

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate, self.burst, self._clock = rate, burst, clock
        self._tokens, self._then = burst, clock()

    def delay(self) -> float:
        now = self._clock()
        self._tokens = min(self.burst, self._tokens + (now - self._then) * self.rate) - 1
        self._then = now
        return max(0.0, -self._tokens / self.rate)


class Connection:
    """One program's end, non-blocking, on the event loop."""

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        sock.setblocking(False)
        try:
            sock.setsockopt(socket.SOL_SOCKET, 32, SEND_BUFFER)  # SO_SNDBUFFORCE, asm-generic/socket.h
        except PermissionError:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        self.sock, self._loop = sock, loop
        self._bucket = TokenBucket(RATE, BURST)
        self._waiter: asyncio.Future[None] | None = None
        self._watched = False   # by the event loop
        self._lost = False

    @property
    def lost(self) -> bool:
        return self._lost

    async def receive(self) -> tuple[Request, ReceivedFds]:
        """The next request. Raises ProtocolError (answer it and close), ConnectionLost."""
        if (wait := self._bucket.delay()) > 0:
            await asyncio.sleep(wait)
        while not self._lost:
            try:
                return self._read()
            except (BlockingIOError, InterruptedError):
                await self._readable()
        raise ConnectionLost

    def _read(self) -> tuple[Request, ReceivedFds]:
        room = socket.CMSG_SPACE(FDS_MAX * 4)
        try:
            data, control, flags, _ = self.sock.recvmsg(MESSAGE_MAX, room, socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, InterruptedError):
            raise
        except OSError as error:
            raise ConnectionLost from error
        fds = array.array("i")
        for level, kind, payload in control:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
        received = ReceivedFds(fds)
        try:
            if not data and not fds:
                raise ConnectionLost  # an empty datagram can't be told from the end, and is no message either
            request = parse(data, len(fds), bool(flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)))
        except BaseException:
            received.close()
            raise
        return request, received

    async def _readable(self) -> None:
        self._waiter = self._loop.create_future()
        if not self._watched:
            self._loop.add_reader(self.sock.fileno(), self._wake)
            self._watched = True
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        """Most programs wait for the reply before they send again: the loop goes on watching, and ends that only where
        something comes for which nobody waits."""
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
        elif self._watched:
            self._unwatch()

    def _unwatch(self) -> None:
        self._watched = False
        if self.sock.fileno() >= 0:
            self._loop.remove_reader(self.sock.fileno())

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send one message, never waiting. Raises ConnectionLost, also for a program that does not read."""
        try:
            if fds:
                socket.send_fds(self.sock, [data], list(fds), socket.MSG_NOSIGNAL)
            else:
                self.sock.send(data, socket.MSG_NOSIGNAL)
        except OSError as error:
            self.lose()
            raise ConnectionLost(str(error)) from error

    def lose(self) -> None:
        """The program is gone: what waits in ``receive`` ends."""
        self._lost = True
        self._wake()

    def close(self) -> None:
        """Idempotent. Unread messages may hold foreign descriptors, so the last close is not ours to wait for."""
        self.lose()
        self._unwatch()
        fd = self.sock.detach()
        if fd >= 0:
            peer = socket.socket(fileno=fd)
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)  # the program sees the end now
            in_thread(peer.close, "close-connection")


class ControlServer:
    """Listens at ``path`` and hands every connection to ``accept``."""

    def __init__(self, path: str, mode: int, group: int | None, accept: Callable[[socket.socket], None]) -> None:
        self.path, self._mode, self._group, self._accept = path, mode, group, accept
        self._sock: socket.socket | None = None

    def open(self) -> None:
        """Raises OSError (a directory that is missing, an address in use)."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            # Bound under a umask: nobody connects in the moment before the mode is right.
            old = os.umask(0o777)
            try:
                sock.bind(self.path)
            finally:
                os.umask(old)
            if self._group is not None:
                os.chown(self.path, -1, self._group)
            sock.listen(BACKLOG)
            os.chmod(self.path, self._mode)
        except BaseException:
            sock.close()
            raise
        self._sock = sock
        self._listen()

    def _listen(self) -> None:
        if self._sock is not None:
            asyncio.get_running_loop().add_reader(self._sock.fileno(), self._ready)

    def _ready(self) -> None:
        assert self._sock is not None
        loop = asyncio.get_running_loop()
        for _ in range(BACKLOG):
            try:
                connection, _address = self._sock.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                    # Still readable, so we would spin: look again when something may have been closed.
                    loop.remove_reader(self._sock.fileno())
                    loop.call_later(0.2, self._listen)
                return
            self._accept(connection)

    def close(self) -> None:
        """Stop listening and remove the socket. Idempotent."""
        if self._sock is None:
            return
        asyncio.get_running_loop().remove_reader(self._sock.fileno())
        self._sock.close()
        self._sock = None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)


__all__ = ["Connection", "ConnectionLost", "ControlServer", "ProtocolError", "ReceivedFds", "TokenBucket"]
