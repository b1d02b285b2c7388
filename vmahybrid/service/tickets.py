"""TCP connections that nobody had accepted when their listener went home, for whichever process accepts them.

Each has a ticket, a connection over loopback by which its program came to the listener itself: it stands in the queue
of the kernel's listener, and who accepts it brings it here. When it is reset (the listener is closed), what it stands
for is, too, as the kernel does with its own. A program that accepts it and does not bring it (it has no shim, or no
descriptor for another session) uses it as the connection: it is that from then on, and what it stands for is carried to
it (relay.py).
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from asyncio import Task, TimerHandle, get_running_loop, sleep
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from vmahybrid.contracts import addr_to_bytes
from vmahybrid.net.netns import NetnsWorker
from vmahybrid.net.sockdiag import bound_sockets
from vmahybrid.service.proof import netns_cookie_of
from vmahybrid.service.reaper import close_foreign
from vmahybrid.service.relay import Relays, reset
from vmahybrid.steering.reasons import Reason
from vmahybrid.steering.table import refuse

KEPT_MAX = 4096
SHOWN = 16384       # bytes of a connection that its ticket has from the beginning
LOOK_SECONDS, LOOK_SECONDS_MAX = 0.1, 1.0   # between looks at who was accepted
LOOK_SHARE = 20     # no more than one part in so many of the time
FETCH_SECONDS = 1.0     # between the two steps of a fetch

Key: TypeAlias = tuple[int, tuple[str, int], tuple[str, int]]


@dataclass(slots=True)
class Kept:
    worker: NetnsWorker     # of its namespace
    connection: socket.socket
    ticket: socket.socket
    shown: int = 0          # bytes that both have
    accepted: bool = False  # at the last look


def _key(sock: socket.socket, by_peer: bool) -> Key:
    """Namespace, the ticket's end and the listener's. Raises OSError."""
    ends = [sock.getsockname()[:2], sock.getpeername()[:2]]
    mine, theirs = (_plain(end) for end in (ends[::-1] if by_peer else ends))
    return netns_cookie_of(sock), mine, theirs


def _plain(end: tuple[str, int]) -> tuple[str, int]:
    return end[0].removeprefix("::ffff:"), end[1]


def _tcp(*fds: int) -> list[socket.socket]:
    """Takes them over. Raises Refused."""
    socks = []
    try:
        for fd in fds:
            socks.append(socket.socket(fileno=fd))
            if socks[-1].type != socket.SOCK_STREAM or socks[-1].family not in {socket.AF_INET, socket.AF_INET6}:
                raise OSError(errno.EPROTOTYPE, "no TCP socket")
    except OSError:
        for sock in socks:
            sock.detach()
        close_foreign(fds)
        raise refuse("ticket", Reason.TYPE) from None
    return socks


@dataclass(frozen=True, slots=True)
class Fetched:
    key: Key
    kept: Kept
    session: int
    timer: TimerHandle


class Tickets:
    """``relayed``: called for each that is carried."""

    def __init__(self, relayed: Callable[[str], None]) -> None:
        self._kept: dict[Key, Kept] = {}
        self._fetched: dict[int, Fetched] = {}  # which somebody is about to be handed
        self._relayed = relayed
        self.relays = Relays()
        self._looking: Task[None] | None = None
        self._pause = 0.0
        self._closed = False

    def keep(self, connection: int, ticket: int, worker: NetnsWorker) -> None:
        """Both are taken over. Raises Refused."""
        sock, ticket_sock = _tcp(connection, ticket)
        kept = Kept(worker, sock, ticket_sock)
        try:
            key = _key(kept.ticket, by_peer=False)
            if self._closed or len(self._kept) >= KEPT_MAX or key in self._kept or _is_other_end(kept, key):
                raise OSError(errno.EINVAL, "too many, or nonsense")
            _show(kept)
            get_running_loop().add_reader(kept.ticket.fileno(), self._spoken, key)
        except OSError:
            close_foreign([kept.connection.detach(), kept.ticket.detach()])
            raise refuse("ticket", Reason.TCP_STATE) from None
        self._kept[key] = kept
        self._pause = LOOK_SECONDS
        if self._looking is None or self._looking.done():
            self._looking = get_running_loop().create_task(self._look(), name="look at tickets")

    def fetch(self, accepted: int, session: int) -> int:
        """A number for what the ticket stands for whose other end was accepted. Takes that over; raises Refused."""
        [sock] = _tcp(accepted)
        try:
            key = _key(sock, by_peer=True)
            kept = self._take(key)
        except (OSError, KeyError):
            raise refuse("ticket", Reason.NOT_OWNER) from None
        finally:
            close_foreign([sock.detach()])
        number = kept.connection.fileno()
        timer = get_running_loop().call_later(FETCH_SECONDS, self._not_fetched, number)
        self._fetched[number] = Fetched(key, kept, session, timer)
        return number

    def hand(self, number: int, session: int) -> socket.socket:
        """What has that number. Raises Refused."""
        fetched = self._fetched.get(number)
        if fetched is None or fetched.session != session:
            raise refuse("ticket", Reason.NOT_OWNER)
        del self._fetched[number]
        fetched.timer.cancel()
        close_foreign([fetched.kept.ticket.detach()])
        return fetched.kept.connection

    def _not_fetched(self, number: int) -> None:
        """Who asked waits no longer, and may use the ticket."""
        fetched = self._fetched.pop(number)
        self._relay(fetched.key, fetched.kept)

    def _take(self, key: Key) -> Kept:
        kept = self._kept.pop(key)
        get_running_loop().remove_reader(kept.ticket.fileno())
        return kept

    def _spoken(self, key: Key) -> None:
        """Its other end is closed, or is used."""
        try:
            self._kept[key].ticket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError:     # also of no data, but an error queue: no ticket of ours has one
            kept = self._take(key)
            reset(kept.connection)
            reset(kept.ticket)
            return
        self._relay(key, self._take(key))

    async def _look(self) -> None:
        """Who has accepted one and waits for what comes, says nothing by which we know. Who brings it has time for that
        until the second look."""
        while self._kept:
            await sleep(self._pause)
            began = time.monotonic()
            for worker, port in {(kept.worker, key[2][1]) for key, kept in self._kept.items()}:
                with contextlib.suppress(OSError, RuntimeError):    # the namespace is gone
                    await self._look_at(worker, port)
            took = time.monotonic() - began
            soon = any(kept.accepted for kept in self._kept.values())
            self._pause = max(LOOK_SECONDS if soon else min(2 * self._pause, LOOK_SECONDS_MAX), LOOK_SHARE * took)

    async def _look_at(self, worker: NetnsWorker, port: int) -> None:
        bound = await worker.call_async(bound_sockets, port, socket.IPPROTO_TCP)
        accepted = {(b.remote, b.remote_port) for b in bound if b.inode}
        for key, kept in list(self._kept.items()):
            if kept.worker is worker and key[2][1] == port and (addr_to_bytes(key[1][0]), key[1][1]) in accepted:
                if kept.accepted:
                    self._relay(key, self._take(key))
                kept.accepted = True

    def _relay(self, key: Key, kept: Kept) -> None:
        with contextlib.suppress(OSError):  # it is reset, which the program is to see
            while kept.shown and (data := kept.connection.recv(kept.shown, socket.MSG_DONTWAIT)):
                kept.shown -= len(data)
        self.relays.add(kept.connection, kept.ticket)
        self._relayed(f"from {key[1][0]}:{key[1][1]} to {key[2][0]}:{key[2][1]}")

    def close(self) -> None:
        """Who accepts one from now on can't bring it."""
        self._closed = True
        for key in list(self._kept):
            self._relay(key, self._take(key))
        for number, fetched in list(self._fetched.items()):
            fetched.timer.cancel()
            self._not_fetched(number)
        self.relays.close()


def _is_other_end(kept: Kept, key: Key) -> bool:
    """What was carried would come back."""
    with contextlib.suppress(OSError):  # it is reset
        return _key(kept.connection, by_peer=True) == key
    return False


def _show(kept: Kept) -> None:
    """A listener with TCP_DEFER_ACCEPT waits for it, and a program that uses the ticket has it at once."""
    try:
        data = kept.connection.recv(SHOWN, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError:     # none, or it is reset, which is for who accepts it
        return
    if data:
        kept.shown = kept.ticket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
