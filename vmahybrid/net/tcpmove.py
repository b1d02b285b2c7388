"""Moves of TCP connections from end to end, for the service: `adopt` and `home`, each wholly or not at all.

The descriptor is one that a program has passed; it stays the caller's. Everything may be called from any thread, and
blocks: an adoption for an RCU grace period, what fails for up to ``timeout``. What the callables of the caller take
comes on top.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Container, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

from vmahybrid.errors import Refused
from vmahybrid.net import tcprepair, tcpsock
from vmahybrid.net.tcprepair import Kept, MoveFailed
from vmahybrid.net.tcpstate import TcpFlag, TcpState, seq
from vmahybrid.steering.reasons import Reason

_T = TypeVar("_T")

_PAUSE = 0.02   # seconds between attempts
_FINAL = frozenset({errno.EINVAL, errno.EDOM, errno.EPERM, errno.ENOPROTOOPT, errno.EBADF})


class Steering(Protocol):
    """Who gets the frames of a connection. All are idempotent, and may raise anything."""

    def steer(self) -> None:
        """Not the kernel, from now on: they wait in the ring."""
        ...

    def unsteer(self, *others: Self) -> None:
        """The kernel, and those that wait in the ring are given to it. ``others``: for these, too, at once."""
        ...

    def give(self, frames: Sequence[tuple[Self, TcpState]]) -> None:
        """To the kernel for each: tcpfin.fin_frame() where the peer has ended its stream, and will not say so again,
        else tcpfin.stale_frame()."""
        ...


@dataclass(frozen=True, slots=True)
class Homing:
    """A connection on its way to the kernel. ``begins``: in a new socket, as another stack has opened it. ``anywhere``:
    as of tcprepair.begin()."""

    fd: int
    state: TcpState
    steering: Steering
    begins: bool = False
    anywhere: bool = False


@dataclass(slots=True)
class MoveCounts:
    """Since the start of the service. ``rolled_back``: adoptions undone; ``retries``: attempts that did not succeed at
    first; ``untold``: homecomings whose peer was not told the kernel's window; ``failed``: moves that ended with
    MoveFailed."""

    adopted: int = 0
    shown: int = 0
    homed: int = 0
    refused: int = 0
    rolled_back: int = 0
    retries: int = 0
    untold: int = 0
    failed: int = 0


class Mover:
    """Moves sockets. Two moves of one socket at a time are refused."""

    def __init__(self, timeout: float = 2.0) -> None:
        """``timeout``: seconds for which a failing step is repeated."""
        self._timeout = timeout
        self._counts = MoveCounts()
        self._lock = threading.Lock()
        self._moving: set[int] = set()      # inodes
        self._kept: dict[int, Kept] = {}    # of parked sockets, by inode

    def counts(self) -> MoveCounts:
        """A copy."""
        with self._lock:
            return dataclasses.replace(self._counts)

    def forget(self, inode: int) -> None:
        """The parked socket with this inode is closed."""
        with self._lock:
            self._kept.pop(inode, None)

    def adopt(self, fd: int, steering: Steering, prepare: Callable[[TcpState], None] | None = None) -> TcpState:
        """Take the connection out of the kernel. ``prepare`` makes the other stack ready to go on from the state, or
        raises; it begins when adopt() has returned, and with the ``tsval_now`` of the state that is returned.

        Raises Refused, MoveFailed, OSError, what ``steering`` and ``prepare`` raise. The connection is the kernel's
        then as before, with one exception: MoveFailed with ``alive`` False, after ``timeout`` seconds in which the
        kernel took it neither back nor as parked. Frames stay steered then, for the other stack to go on if it can.
        """
        (found,) = self.adopt_all([(fd, steering)], prepare and (lambda _, state: prepare(state)))
        if isinstance(found, BaseException):
            raise found
        return found

    def adopt_all(self, wanted: Sequence[tuple[int, Steering]], prepare: Callable[[int, TcpState], None] | None = None,
                  done: Callable[[int, TcpState | BaseException], None] | None = None
                  ) -> list[TcpState | BaseException]:
        """adopt() of several, in the time of one: what it returns or raises of each. ``prepare`` and ``done`` hear of
        each by its place; ``done`` as soon as there is something to say, and does not raise."""
        steps = [self._adopting(fd, steering, prepare and functools.partial(prepare, at))
                 for at, (fd, steering) in enumerate(wanted)]
        return tcprepair.together(steps, [tcprepair.graceful], done)

    def _adopting(self, fd: int, steering: Steering, prepare: Callable[[TcpState], None] | None
                  ) -> Generator[None, None, TcpState]:
        with self._move(fd) as (sock, inode):
            tcprepair.examine(sock)     # a refusal takes no frame from whoever has the connection
            try:
                steering.steer()
                started = time.monotonic()
                state, kept = yield from tcprepair.freezing(sock)
            except BaseException:
                self._persist(steering.unsteer)
                raise
            try:
                if prepare is not None:
                    prepare(state)
            except BaseException:
                tcprepair.thaw(sock, kept, probe=False)
                self._roll_back(sock, state, kept, steering)
                raise
            try:
                state = tcprepair.park(sock, state, kept)
            except MoveFailed as error:
                if not error.alive:
                    late = _later(state, time.monotonic() - started)
                    self._persist(lambda: tcprepair.rebuild(sock, late, kept, fin_follows=True))
                self._roll_back(sock, state, kept, steering)
                raise MoveFailed(error.step, error.__cause__ or error, alive=True) from error
            with self._lock:
                self._kept[inode] = kept
            self._count("adopted")
            return state

    def home(self, fd: int, state: TcpState, steering: Steering) -> None:
        """Give the connection back to the kernel, in the state that the other stack left it in; that one stays silent
        from before the call on.

        Raises Refused, and MoveFailed with ``alive`` False: it is still the other stack's, and home() may be tried
        again. MoveFailed with ``alive`` True: it is the kernel's, but frames could not be given to it.
        """
        (found,) = self.home_all([Homing(fd, state, steering)])
        if isinstance(found, BaseException):
            raise found

    def home_all(self, wanted: Sequence[Homing]) -> list[BaseException | None]:
        """home() of several, which share what takes longest, and ``timeout``: what it raises of each. A new socket is
        as it was where it is not the connection's."""
        until = time.monotonic() + self._timeout

        def unsteer(at: list[int]) -> None:
            first, *others = (wanted[i].steering for i in at)
            self._persist(lambda: first.unsteer(*others), until)

        def give(at: list[int]) -> dict[int, Exception]:
            lost = self._give([(wanted[i].steering, wanted[i].state) for i in at], until)
            return {at[i]: error for i, error in lost.items()}

        return tcprepair.together([self._homing(one, until) for one in wanted], [unsteer, give])

    def _homing(self, one: Homing, until: float) -> Generator[None, None, None]:
        """Waits until the frames are the kernel's, and until it has what give() gives."""
        with self._move(one.fd) as (sock, inode):
            if one.begins:
                kept = self._persist(lambda: tcprepair.begin(sock, one.state, one.anywhere), until, tcpsock.NO_ROUTE)
            else:
                kept = self._rebuild(sock, inode, one.state, until)
            with _ending(sock, one.state):
                yield
                tcprepair.nudge(sock, kept)
                yield
            self._count("homed")

    def _rebuild(self, sock: socket.socket, inode: int, state: TcpState, until: float) -> Kept:
        with self._lock:
            known = self._kept.get(inode)
        if known is not None and not known.is_of(state):
            known = None    # of a socket long closed; rebuild() asks this one
        kept = self._persist(lambda: tcprepair.rebuild(sock, state, known, fin_follows=True), until, tcpsock.NO_ROUTE)
        self.forget(inode)
        return kept

    def placehold(self, fd: int, local: Any, peer: Any) -> int:
        """tcprepair.placehold(); the inode of the socket. Raises Refused, OSError."""
        with self._move(fd) as (sock, inode):
            kept = tcprepair.placehold(sock, local, peer)
            with self._lock:
                self._kept[inode] = kept
            self._count("shown")
            return inode

    def _roll_back(self, sock: socket.socket, state: TcpState, kept: Kept, steering: Steering) -> None:
        """The socket is the kernel's again: so are the frames."""
        self._count("rolled_back")
        with _ending(sock, state):
            self._persist(steering.unsteer)
            tcprepair.nudge(sock, kept)
            if lost := self._give([(steering, state)]):
                raise lost[0]

    def _give(self, frames: Sequence[tuple[Steering, TcpState]], until: float | None = None) -> dict[int, Exception]:
        """A FIN of the peer has to come: of those that did not, by their place, why. Else it is for the window: the
        other stack may have left the peer one too small for a segment, and the kernel takes it for told of its own by
        nudge(), of which the peer takes no window. Without this the peer asks after its RTO, 0.2 s."""
        until = until or time.monotonic() + self._timeout
        try:
            frames[0][0].give(frames)
            return {}
        except Exception as error:
            if len(frames) == 1:
                lost = {0: error}
            else:   # it may be one's own affair
                lost = self._give_each(dict(enumerate(frames)))
        fins = {at: error for at, error in lost.items() if frames[at][1].flags & TcpFlag.PEER_FIN}
        for _ in range(len(lost) - len(fins)):
            self._count("untold")
        while again := {at: frames[at] for at, error in fins.items() if self._may_yet(error, until)}:
            self._count("retries")
            time.sleep(_PAUSE)
            fins = {at: error for at, error in fins.items() if at not in again} | self._give_each(again)
        return fins

    @staticmethod
    def _give_each(frames: Mapping[int, tuple[Steering, TcpState]]) -> dict[int, Exception]:
        """What it raises of each, by its place."""
        lost: dict[int, Exception] = {}
        for at, one in frames.items():
            try:
                one[0].give([one])
            except Exception as error:
                lost[at] = error
        return lost

    @staticmethod
    def _may_yet(error: Exception, until: float, hopeless: Container[int] = ()) -> bool:
        """Is it worth another attempt?"""
        number = getattr(error, "errno", None)
        return not isinstance(error, Refused) and number not in _FINAL and number not in hopeless and (
            time.monotonic() < until)

    def _persist(self, step: Callable[[], _T], until: float | None = None, hopeless: Container[int] = ()) -> _T:
        """Until it succeeds, or it is that time, ``timeout`` from now. A refusal is final, and so is what the kernel
        will not say otherwise the next time, or who calls can wait for better: ``hopeless``, by errno."""
        until = until or time.monotonic() + self._timeout
        while True:
            try:
                return step()
            except Exception as error:
                if not self._may_yet(error, until, hopeless):
                    raise
            self._count("retries")
            time.sleep(_PAUSE)

    @contextlib.contextmanager
    def _move(self, fd: int) -> Iterator[tuple[socket.socket, int]]:
        inode = os.fstat(fd).st_ino
        with self._lock:
            if inode in self._moving:
                self._counts.refused += 1
                raise Refused("TCP connection", "it is being moved already", Reason.TCP_STATE.remedy, Reason.TCP_STATE)
            self._moving.add(inode)
        try:
            with _borrowed(fd) as sock:
                yield sock, inode
        except Refused:
            self._count("refused")
            raise
        except MoveFailed:
            self._count("failed")
            raise
        finally:
            with self._lock:
                self._moving.discard(inode)

    def _count(self, name: str) -> None:
        with self._lock:
            setattr(self._counts, name, getattr(self._counts, name) + 1)


def _later(state: TcpState, seconds: float) -> TcpState:
    """With a clock that has gone on."""
    return dataclasses.replace(state, tsval_now=seq(state.tsval_now + int(seconds * 1000) + 2))


@contextlib.contextmanager
def _ending(sock: socket.socket, state: TcpState) -> Iterator[None]:
    """While frames are given to a kernel that has the connection; then our FIN."""
    try:
        yield
    except Exception as error:
        raise MoveFailed("giving frames to the kernel", error, alive=True) from error
    finally:
        tcprepair.end(sock, state)


@contextlib.contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """A socket object of a descriptor that stays the caller's. Raises OSError if it is none."""
    sock = socket.socket(fileno=fd)
    try:
        yield sock
    finally:
        sock.detach()
