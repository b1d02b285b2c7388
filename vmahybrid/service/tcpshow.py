"""Connections that began on a ring, for who looks at the kernel's sockets: what a program wants to have shown."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass
from typing import Any, Self

from vmahybrid.contracts import addr_to_text, ntohs
from vmahybrid.errors import Refused
from vmahybrid.net.tcpmove import Mover
from vmahybrid.service import proof
from vmahybrid.steering.flow import Flow, FlowAction, Kind, Source

log = logging.getLogger("vmahybrid.service")

# Of limits.rules: beyond it rules are for those that need them, and those with traffic need them more.
SHOWN_SHARE, BUSY_SHARE = 0.75, 0.9


@dataclass(frozen=True, slots=True)
class Wanted:
    """``fd`` is the socket that came with the message, ``number`` the program's for it."""

    fd: int
    number: int
    port_flow: int
    ifindex: int
    local: bytes
    local_port: int
    remote: bytes
    remote_port: int

    @classmethod
    def of_wire(cls, conn: Any, fd: int) -> Self:
        """Of a struct vmh_tcp_shown."""
        return cls(fd, int(conn.fd), int(conn.flow_id), int(conn.ifindex), bytes(conn.local_addr),
                   ntohs(conn.local_port), bytes(conn.remote_addr), ntohs(conn.remote_port))

    def of(self, port: Flow) -> bool:
        """Is it a connection at this port?"""
        return (port.proto == socket.IPPROTO_TCP and port.kind is Kind.THREE and port.local_port == self.local_port
                and (port.wildcard or port.local == self.local) and port.ifindex in (0, self.ifindex)
                and self.ifindex != 0 and self.remote_port != 0)

    def flow(self, port: Flow) -> Flow:
        """By the same ring as what the rule of the port steers."""
        return Flow(action=FlowAction.RING, source=Source.SOCKET, kind=Kind.FIVE, owner=port.owner,
                    proto=socket.IPPROTO_TCP, local=self.local, local_port=self.local_port, remote=self.remote,
                    remote_port=self.remote_port, ifindex=self.ifindex, netns=port.netns, fd=self.number,
                    lane=port.lane, of_port=True, family=proof.family_of(self.fd))


def placehold(mover: Mover, conns: list[Wanted]) -> list[int]:
    """Park the socket of each; its inode, or 0 where that can't be. Blocks for some 0.1 ms each."""
    return [_placehold(mover, conn) for conn in conns]


def _name(fd: int, address: bytes, port: int) -> tuple[str, int]:
    """As a socket of that family calls it."""
    return (socket.inet_ntop(socket.AF_INET6, address) if proof.family_of(fd) == 6 else addr_to_text(address)), port


def _placehold(mover: Mover, conn: Wanted) -> int:
    try:
        return mover.placehold(conn.fd, _name(conn.fd, conn.local, conn.local_port),
                               _name(conn.fd, conn.remote, conn.remote_port))
    except (Refused, OSError) as error:
        log.debug("TCP %s:%d: not shown: %s", addr_to_text(conn.local), conn.local_port, error)
        return 0
