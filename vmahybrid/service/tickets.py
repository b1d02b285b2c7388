"""TCP connections that nobody had accepted when their listener went home, for whichever process accepts them.

Each has a ticket, a connection over loopback by which its program came to the listener itself: it stands in the queue
of the kernel's listener, and who accepts it brings it here. When it ends in another way (the listener is closed, or a
program without the shim has accepted it), what it stands for is reset, as the kernel does with its own.
"""

from __future__ import annotations

import errno
import socket
import struct
from asyncio import get_running_loop
from dataclasses import dataclass
from typing import TypeAlias

from vmahybrid.service.proof import netns_cookie_of
from vmahybrid.service.reaper import close_foreign
from vmahybrid.steering.reasons import Reason
from vmahybrid.steering.table import refuse

KEPT_MAX = 4096
RESET = struct.pack("ii", 1, 0)

Key: TypeAlias = tuple[int, tuple[str, int], tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Kept:
    connection: socket.socket
    ticket: socket.socket


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
    def __init__(self) -> None:
        self._kept: dict[Key, Kept] = {}

    def keep(self, connection: int, ticket: int) -> None:
        """Both are taken over. Raises Refused."""
        kept = Kept(*_tcp(connection, ticket))
        try:
            key = _key(kept.ticket, by_peer=False)
            if len(self._kept) >= KEPT_MAX or key in self._kept:
                raise OSError(errno.ENOSPC, "too many")
            get_running_loop().add_reader(kept.ticket.fileno(), self._ended, key)
        except OSError:
            close_foreign([kept.connection.detach(), kept.ticket.detach()])
            raise refuse("ticket", Reason.TCP_STATE) from None
        self._kept[key] = kept

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

    def _ended(self, key: Key) -> None:
        kept = self._take(key)
        reset(kept.connection)
        close_foreign([kept.ticket.detach()])

    def close(self) -> None:
        for key in list(self._kept):
            self._ended(key)


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    close_foreign([sock.detach()])
