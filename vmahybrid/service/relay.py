"""Bytes carried between two connections, by a process of its own: for programs that have accepted a ticket
(service/tickets.py) and can't bring it here. The process outlives the service, as long as there is a connection left.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import select
import socket
import struct
import subprocess
import sys
import termios
import time
from asyncio import get_running_loop
from collections import deque
from collections.abc import Iterable

from vmahybrid.service.reaper import RESET_ON_CLOSE, close_foreign

log = logging.getLogger("vmahybrid.service")

NO_LINGER = struct.pack("ii", 0, 0)
SEND_SECONDS = 1.0
AT_ONCE = 65536     # bytes
TURNS = 16          # of a pair, before the next one has its own
LOOK_SECONDS = 0.1  # between looks whether what was acknowledged before a reset has come


class Relays:
    """The service's end, on its event loop: the process begins with the first pair."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None
        self._waiting: deque[tuple[socket.socket, socket.socket]] = deque()
        self.process: subprocess.Popen[bytes] | None = None

    def add(self, one: socket.socket, other: socket.socket) -> None:
        """Two connected TCP sockets, which are taken over."""
        self._waiting.append((one, other))
        if len(self._waiting) == 1:
            self._send()

    def _send(self) -> None:
        while self._waiting:
            try:
                self._send_one(*self._waiting[0])
            except BlockingIOError:
                assert self._control is not None
                get_running_loop().add_writer(self._control, self._send)
                return
            except OSError as error:
                log.warning("connections that a program without the shim accepted are reset: %s", error)
                self._give_up()
                return
            self._waiting.popleft()
        if self._control is not None:
            get_running_loop().remove_writer(self._control)

    def _send_one(self, one: socket.socket, other: socket.socket) -> None:
        for last in (False, True):
            if self._control is None:
                self._control = self._started()
            try:
                socket.send_fds(self._control, [b"+"], [one.fileno(), other.fileno()])
                break
            except ConnectionError:     # somebody has ended it
                self._hang_up()
                if last:
                    raise
        close_foreign([one.detach(), other.detach()])

    def _started(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            command = [sys.executable, "-P", "-m", "vmahybrid.service.relay", str(theirs.fileno())]
            try:
                self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd="/",
                                                stderr=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                                                start_new_session=True)
            except OSError:
                ours.close()
                raise
        return ours

    def _hang_up(self) -> None:
        if self._control is not None:
            get_running_loop().remove_writer(self._control)
            self._control.close()
            self._control = None
        if self.process is not None:
            self.process.poll()

    def _give_up(self) -> None:
        for pair in self._waiting:
            for sock in pair:
                reset(sock)
        self._waiting.clear()
        self._hang_up()

    def close(self) -> None:
        """No more will come."""
        end = time.monotonic() + SEND_SECONDS
        while self._waiting and self._control is not None and (left := end - time.monotonic()) > 0:
            select.select([], [self._control], [], left)
            self._send()
        self._give_up()


def reset(sock: socket.socket) -> None:
    """Takes it over."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    close_foreign([sock.detach()])


# ---- the process


class End:
    """One of the two. ``pending``: bytes for it. ``ended``: nothing more comes from it. ``shut``: it had our FIN."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.other = self
        self.pending = memoryview(b"")
        self.ended = self.reset = self.shut = False
        self.watched: int | None = None     # events of epoll

    def read(self) -> None:
        """For the other one, if that has room."""
        try:
            data = self.sock.recv(AT_ONCE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:     # what had come before is read
            self.ended = self.reset = True
            return
        self.ended = not data
        self.other.pending = memoryview(data)

    def write(self) -> None:
        try:
            self.pending = self.pending[self.sock.send(self.pending, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL):]
        except BlockingIOError:
            pass
        except OSError:
            self.pending = memoryview(b"")
            self.reset = True

    def is_unread(self) -> bool:
        """Its peer's kernel has not acknowledged everything."""
        try:
            return bool(struct.unpack("i", fcntl.ioctl(self.sock, termios.TIOCOUTQ, bytes(4)))[0])
        except OSError:
            return False


class Carrier:
    def __init__(self, control: socket.socket) -> None:
        """``control``: pairs come by it until it ends."""
        self._control: socket.socket | None = control
        self._epoll = select.epoll()
        self._ends: dict[int, End] = {}
        self._leaving: set[End] = set()     # to be reset when all has come
        self._epoll.register(control, select.EPOLLIN)

    def run(self) -> None:
        """Until ``control`` and all pairs have ended."""
        while self._control is not None or self._ends:
            for fd, events in self._epoll.poll(LOOK_SECONDS if self._leaving else None):
                if self._control is not None and fd == self._control.fileno():
                    self._receive(self._control)
                elif fd in self._ends:
                    self._turn(self._ends[fd], events)
            for end in list(self._leaving):
                self._go_on(end)

    def _receive(self, control: socket.socket) -> None:
        word, fds, *_ = socket.recv_fds(control, 1, 2)
        socks = [socket.socket(fileno=fd) for fd in fds]
        if not word:
            self._epoll.unregister(control)
            control.close()
            self._control = None
        elif len(socks) == 2:
            one, other = map(End, socks)
            one.other, other.other = other, one
            for end in (one, other):
                end.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)  # if somebody ends us
                end.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._ends[end.sock.fileno()] = end
            self._go_on(one)
        else:   # no descriptor is left
            _close(socks, RESET_ON_CLOSE)

    def _turn(self, end: End, events: int) -> None:
        if events & select.EPOLLERR:
            end.reset = True
        if end.pending and events & select.EPOLLOUT:
            end.write()
        self._go_on(end)

    def _go_on(self, end: End) -> None:
        """As far as both can."""
        for source in (end, end.other):
            for _ in range(TURNS):
                if source.ended or source.other.pending or source.other.reset:
                    break
                source.read()
                if not source.other.pending:
                    break
                source.other.write()
        for source in (end, end.other):
            sink = source.other
            if source.ended and not source.reset and not sink.pending and not sink.shut and not sink.reset:
                sink.shut = True
                with contextlib.suppress(OSError):
                    sink.sock.shutdown(socket.SHUT_WR)
        if not self._over(end):
            for one in (end, end.other):
                self._watch(one)

    def _over(self, end: End) -> bool:
        """Closes both, if so."""
        pair = (end, end.other)
        if any(one.reset for one in pair):
            for one in pair:    # what the dead one had sent first
                if not one.reset and (one.pending or (one.other.reset and not one.other.ended) or one.is_unread()):
                    self._leaving.add(one)
                    return False
            how = RESET_ON_CLOSE
        elif all(one.ended and one.shut for one in pair):
            how = NO_LINGER
        else:
            return False
        for one in pair:
            self._leaving.discard(one)
            self._watch(one, over=True)
            del self._ends[one.sock.fileno()]
        _close((one.sock for one in pair), how)
        return True

    def _watch(self, end: End, over: bool = False) -> None:
        """What is reset, or has ended both ways, is told of for ever."""
        events: int | None = None
        if not (over or end.reset or (end.ended and end.shut)):
            events = (select.EPOLLOUT if end.pending else 0) | (
                select.EPOLLIN if not end.ended and not end.other.pending and not end.other.reset else 0)
        if events == end.watched:
            return
        if events is None:
            self._epoll.unregister(end.sock)
        elif end.watched is None:
            self._epoll.register(end.sock, events)
        else:
            self._epoll.modify(end.sock, events)
        end.watched = events


def _close(socks: Iterable[socket.socket], linger: bytes) -> None:
    for sock in socks:
        with sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


if __name__ == "__main__":
    Carrier(socket.socket(fileno=int(sys.argv[1]))).run()
