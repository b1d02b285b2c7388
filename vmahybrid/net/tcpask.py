"""A question to the peers of connections whose stack is gone, so that they learn of it.

A reset must have the very number that the peer expects next, which nobody here knows any more (RFC 5961). A segment
with any other number is answered with an ACK that has the right one; the kernel, which has no such connection, answers
that with a reset that fits.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
from collections.abc import Iterable
from typing import NamedTuple

from vmahybrid.contracts import addr_to_text, family_of
from vmahybrid.net.tcpfin import sealed

_ACK = 16


class Names(NamedTuple):
    """Of a connection: addresses of 16 bytes, and ports."""

    laddr: bytes
    lport: int
    raddr: bytes
    rport: int


def ask(connections: Iterable[Names]) -> int:
    """Send one bare ACK with numbers by chance to each peer, by the routes of this thread's network namespace; how many
    were sent. Where there is no such address or no route any more the peer learns of it when it sends. Needs
    CAP_NET_RAW."""
    sent = 0
    with contextlib.ExitStack() as stack:
        sockets: dict[bytes, socket.socket] = {}
        for names in connections:
            with contextlib.suppress(OSError):
                if names.laddr not in sockets:
                    sockets[names.laddr] = stack.enter_context(_socket_of(names.laddr))
                sockets[names.laddr].sendto(_segment(names), (_text(names.raddr), 0))
                sent += 1
    return sent


def _socket_of(address: bytes) -> socket.socket:
    """A raw socket that sends from it."""
    sock = socket.socket(socket.AF_INET6 if family_of(address) == 6 else socket.AF_INET, socket.SOCK_RAW,
                         socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 0)     # each segment of this host comes here, too
        sock.setblocking(False)
        sock.bind((_text(address), 0))
    except BaseException:
        sock.close()
        raise
    return sock


def _text(address: bytes) -> str:
    return socket.inet_ntop(socket.AF_INET6, address) if family_of(address) == 6 else addr_to_text(address)


def _segment(names: Names) -> bytes:
    number, ack = random.getrandbits(32), random.getrandbits(32)
    tcp = struct.pack(">HHIIBBHHH", names.lport, names.rport, number, ack, 5 << 4, _ACK, 0, 0, 0)
    return sealed(tcp, names.laddr, names.raddr)
