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
import logging
import socket
import time
from asyncio import Task, get_running_loop, sleep
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from vmahybrid.contracts import addr_to_bytes
from vmahybrid.net.netns import NetnsWorker
from vmahybrid.service.proof import netns_cookie_of
from vmahybrid.service.reaper import close_foreign
from vmahybrid.service.relay import RESET, Relays
from vmahybrid.service.shared import bound_sockets
from vmahybrid.steering.reasons import Reason
from vmahybrid.steering.table import refuse

log = logging.getLogger("vmahybrid.service")

KEPT_MAX = 4096
SHOWN = 16384       # bytes of a connection that its ticket has from the beginning
LOOK_SECONDS, LOOK_SECONDS_MAX = 0.1, 1.0   # between looks at who was accepted
LOOK_SHARE = 20     # no more than one part in so many of the time

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


class Tickets:
    """``relayed``: called for each that is carried."""

    def __init__(self, relayed: Callable[[str], None]) -> None:
        self._kept: dict[Key, Kept] = {}
        self._relayed = relayed
        self.relays = Relays()
        self._looking: Task[None] | None = None
        self._pause = 0.0

    def keep(self, connection: int, ticket: int, worker: NetnsWorker) -> None:
        """Both are taken over. Raises Refused."""
        sock, ticket_sock = _tcp(connection, ticket)
        kept = Kept(worker, sock, ticket_sock)
        try:
            key = _key(kept.ticket, by_peer=False)
            if len(self._kept) >= KEPT_MAX or key in self._kept:
                raise OSError(errno.ENOSPC, "too many")
            _show(kept)
            get_running_loop().add_reader(kept.ticket.fileno(), self._spoken, key)
        except OSError:
            close_foreign([kept.connection.detach(), kept.ticket.detach()])
            raise refuse("ticket", Reason.TCP_STATE) from None
        self._kept[key] = kept
        self._pause = LOOK_SECONDS
        if self._looking is None or self._looking.done():
            self._looking = get_running_loop().create_task(self._look(), name="look at tickets")

    def fetch(self, accepted: int) -> socket.socket:
        """What the ticket stands for whose other end was accepted. Takes that over; raises Refused."""
        [sock] = _tcp(accepted)
        try:
            kept = self._take(_key(sock, by_peer=True))
        except (OSError, KeyError):
            raise refuse("ticket", Reason.NOT_OWNER) from None
        finally:
            close_foreign([sock.detach()])
        close_foreign([kept.ticket.detach()])
        return kept.connection

    def _take(self, key: Key) -> Kept:
        kept = self._kept.pop(key)
        get_running_loop().remove_reader(kept.ticket.fileno())
        return kept

    def _spoken(self, key: Key) -> None:
        """Its other end is closed, or is used."""
        try:
            self._kept[key].ticket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            kept = self._take(key)
            reset(kept.connection)
            close_foreign([kept.ticket.detach()])
            return
        self._relay(key)

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
            self._pause = max(min(2 * self._pause, LOOK_SECONDS_MAX), LOOK_SHARE * took)

    async def _look_at(self, worker: NetnsWorker, port: int) -> None:
        bound = await worker.call_async(bound_sockets, port, socket.IPPROTO_TCP)
        accepted = {(b.remote, b.remote_port) for b in bound if b.inode}
        for key, kept in list(self._kept.items()):
            if kept.worker is worker and key[2][1] == port and (addr_to_bytes(key[1][0]), key[1][1]) in accepted:
                if kept.accepted:
                    self._relay(key)
                kept.accepted = True

    def _relay(self, key: Key) -> None:
        kept = self._take(key)
        fds = kept.connection.fileno(), kept.ticket.fileno()
        try:
            while kept.shown and (data := kept.connection.recv(kept.shown, socket.MSG_DONTWAIT)):
                kept.shown -= len(data)
            self.relays.add(*fds)
        except OSError as error:
            log.warning("a connection that a program without the shim accepted is reset: %s", error)
            reset(kept.connection)
            reset(kept.ticket)
            return
        self._relayed(f"from {key[1][0]}:{key[1][1]} to {key[2][0]}:{key[2][1]}")
        close_foreign([kept.connection.detach(), kept.ticket.detach()])

    def close(self) -> None:
        """Who accepts one from now on can't bring it."""
        for key in list(self._kept):
            self._relay(key)
        self.relays.close()


def _show(kept: Kept) -> None:
    """A listener with TCP_DEFER_ACCEPT waits for it, and a program that uses the ticket has it at once."""
    try:
        data = kept.connection.recv(SHOWN, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError:     # none, or it is reset, which is for who accepts it
        return
    if data:
        kept.shown = kept.ticket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    close_foreign([sock.detach()])
