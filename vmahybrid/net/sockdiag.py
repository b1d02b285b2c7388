"""Sockets of a network namespace: sock_diag(7), asked in a thread of it."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from vmahybrid.contracts import ANY_ADDR, addr_to_bytes, family_of
from vmahybrid.net.tcpask import Names
from vmahybrid.net.tcpsock import Info

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20  # linux/sock_diag.h
NLM_F_REQUEST, NLM_F_DUMP = 0x1, 0x300
NLMSG_ERROR, NLMSG_DONE = 2, 3
_ANY_STATE, _NO_COOKIE = 0xFFFFFFFF, 0xFFFFFFFF
_HEADER = struct.Struct("=IHHII")
_SOCKID = struct.Struct("=2s2s16s16sIII")            # inet_diag_sockid; ports and addresses in network order
_REQUEST = struct.Struct("=BBBBI")                   # inet_diag_req_v2 up to the sockid
_REPLY_HEAD, _REPLY_TAIL = struct.Struct("=BBBB"), struct.Struct("=IIIII")
_REPLY_LEN = _REPLY_HEAD.size + _SOCKID.size + _REPLY_TAIL.size
_ATTRIBUTE = struct.Struct("=HH")
_INFO = 2   # INET_DIAG_INFO


@dataclass(frozen=True, slots=True)
class Bound:
    """A socket bound to a port: addresses are 16 bytes, zeros for any."""

    inode: int
    uid: int
    local: bytes
    remote: bytes
    remote_port: int = 0    # host order


class Found(NamedTuple):
    """``state``: TcpPhase. ``inode``: 0 of one that nobody has a descriptor of. ``queued``: bytes that the peer has not
    acknowledged, or not got yet; ``acked``: those that it has. ``retransmits``: since it acknowledged something."""

    inode: int
    state: int
    queued: int
    acked: int
    retransmits: int


def bound_sockets(port: int, proto: int = socket.IPPROTO_UDP) -> list[Bound]:
    """All sockets of the calling thread's namespace bound to ``port`` (host order), both families. Raises OSError."""
    with _opened() as diag:
        ident = _SOCKID.pack(struct.pack("!H", port), b"", b"", b"", 0, _NO_COOKIE, _NO_COOKIE)
        return [_bound(reply) for family in (socket.AF_INET, socket.AF_INET6)
                for reply in _ask(diag, family, proto, ident, NLM_F_DUMP)]


def connections(wanted: list[tuple[Names, int]]) -> list[Found | None]:
    """TCP connections of the calling thread's namespace by their names and interface; None where there is no such one,
    and no listener that would have it. Raises OSError."""
    with _opened() as diag:
        return [_connection(diag, names, ifindex) for names, ifindex in wanted]


def _opened() -> socket.socket:
    return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_SOCK_DIAG)


def _connection(diag: socket.socket, names: Names, ifindex: int) -> Found | None:
    v6 = family_of(names.laddr) == 6
    ends = [address if v6 else address[12:] for address in (names.laddr, names.raddr)]
    ident = _SOCKID.pack(struct.pack("!H", names.lport), struct.pack("!H", names.rport), *ends, ifindex, _NO_COOKIE,
                         _NO_COOKIE)
    try:
        (reply,) = _ask(diag, socket.AF_INET6 if v6 else socket.AF_INET, socket.IPPROTO_TCP, ident, info=True)
    except FileNotFoundError:
        return None
    _expires, _rqueue, queued, _uid, inode = _REPLY_TAIL.unpack_from(reply, _REPLY_HEAD.size + _SOCKID.size)
    raw = dict(_attributes(reply[_REPLY_LEN:])).get(_INFO)
    info = Info.of(raw) if raw else None    # none in TIME_WAIT
    counts = (info.bytes_acked, info.retransmits) if info else (0, 0)
    return Found(inode, _REPLY_HEAD.unpack_from(reply)[1], queued, *counts)


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= _ATTRIBUTE.size:
        size, kind = _ATTRIBUTE.unpack_from(data)
        yield kind, data[_ATTRIBUTE.size:size]
        data = data[max(size + 3 & ~3, _ATTRIBUTE.size):]


def _ask(diag: socket.socket, family: int, proto: int, ident: bytes, flags: int = 0, *, info: bool = False
         ) -> Iterator[bytes]:
    body = _REQUEST.pack(family, proto, info << _INFO - 1, 0, _ANY_STATE) + ident
    length = _HEADER.size + len(body)
    diag.send(_HEADER.pack(length, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST | flags, 1, 0) + body)
    while True:
        data = diag.recv(1 << 16)
        while len(data) >= _HEADER.size:
            size, kind, *_ = _HEADER.unpack_from(data)
            if kind == NLMSG_DONE:
                return
            if kind == NLMSG_ERROR:
                code = struct.unpack_from("=i", data, _HEADER.size)[0]
                if code:
                    raise OSError(-code, "sock_diag")
                return
            yield data[_HEADER.size:size]
            data = data[(size + 3) & ~3:]
        if not flags:
            return


def _bound(body: bytes) -> Bound:
    family = _REPLY_HEAD.unpack_from(body)[0]
    _sport, dport, src, dst, *_ = _SOCKID.unpack_from(body, _REPLY_HEAD.size)
    _expires, _rqueue, _wqueue, uid, inode = _REPLY_TAIL.unpack_from(body, _REPLY_HEAD.size + _SOCKID.size)
    return Bound(inode, uid, _address(family, src), _address(family, dst), int.from_bytes(dport, "big"))


def _address(family: int, raw: bytes) -> bytes:
    packed = raw[:4] if family == socket.AF_INET else raw
    return ANY_ADDR if not any(packed) else addr_to_bytes(packed)
