"""Who else is bound to a port: sock_diag(7) in the namespace of the flow.

The kernel copies multicast to every socket on the port, and gives unicast of a port shared by SO_REUSEADDR to the
newest socket. A ring can do neither for sockets that are not its own, so such flows go home.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

from vmahybrid.contracts import addr_to_bytes, addr_to_text
from vmahybrid.steering.flow import Flow, Kind
from vmahybrid.steering.keys import ANY_ADDR

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20  # linux/sock_diag.h
NLM_F_REQUEST, NLM_F_DUMP = 0x1, 0x300
NLMSG_ERROR, NLMSG_DONE = 2, 3
_HEADER = struct.Struct("=IHHII")
_SOCKID = struct.Struct("=2s2s16s16sIII")            # inet_diag_sockid; ports and addresses in network order
_REQUEST = struct.Struct("=BBBBI")                   # inet_diag_req_v2 up to the sockid
_REPLY_HEAD, _REPLY_TAIL = struct.Struct("=BBBB"), struct.Struct("=IIIII")


@dataclass(frozen=True, slots=True)
class Bound:
    """A socket bound to a port: addresses are 16 bytes, zeros for any."""

    inode: int
    uid: int
    local: bytes
    remote: bytes
    remote_port: int = 0    # host order


def bound_sockets(port: int, proto: int = socket.IPPROTO_UDP) -> list[Bound]:
    """All sockets of the calling thread's namespace bound to ``port`` (host order), both families. Raises OSError."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_SOCK_DIAG) as diag:
        return [found for family in (socket.AF_INET, socket.AF_INET6) for found in _dump(diag, family, port, proto)]


def _dump(diag: socket.socket, family: int, port: int, proto: int) -> list[Bound]:
    ident = _SOCKID.pack(struct.pack("!H", port), b"", b"", b"", 0, 0xFFFFFFFF, 0xFFFFFFFF)
    body = _REQUEST.pack(family, proto, 0, 0, 0xFFFFFFFF) + ident
    length = _HEADER.size + len(body)
    diag.send(_HEADER.pack(length, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST | NLM_F_DUMP, 1, 0) + body)
    found: list[Bound] = []
    while True:
        data = diag.recv(1 << 16)
        while len(data) >= _HEADER.size:
            size, kind, *_ = _HEADER.unpack_from(data)
            if kind == NLMSG_DONE:
                return found
            if kind == NLMSG_ERROR:
                code = struct.unpack_from("=i", data, _HEADER.size)[0]
                if code:
                    raise OSError(-code, "sock_diag")
                return found
            found.append(_parse(data[_HEADER.size:size]))
            data = data[(size + 3) & ~3:]


def _parse(body: bytes) -> Bound:
    family = _REPLY_HEAD.unpack_from(body)[0]
    _sport, dport, src, dst, *_ = _SOCKID.unpack_from(body, _REPLY_HEAD.size)
    _expires, _rqueue, _wqueue, uid, inode = _REPLY_TAIL.unpack_from(body, _REPLY_HEAD.size + _SOCKID.size)
    return Bound(inode, uid, _address(family, src), _address(family, dst), int.from_bytes(dport, "big"))


def _address(family: int, raw: bytes) -> bytes:
    packed = raw[:4] if family == socket.AF_INET else raw
    return ANY_ADDR if not any(packed) else addr_to_bytes(packed)


def competitors(flow: Flow, bound: list[Bound], own: set[int]) -> list[Bound]:
    """Sockets other than ``own`` (inodes) that the kernel would serve beside or before this flow's."""
    others = [b for b in bound if b.inode not in own]
    if flow.kind is Kind.MULTICAST:
        return [b for b in others if b.local in (ANY_ADDR, flow.local) and b.remote == ANY_ADDR]
    if flow.kind is Kind.FIVE:  # only a socket connected to the very same peer scores as high
        return [b for b in others if b.remote == flow.remote and b.local == flow.local]
    if flow.wildcard:
        return others
    return [b for b in others if b.local == flow.local or b.remote != ANY_ADDR]


def describe(bound: list[Bound]) -> str:
    return ", ".join(f"inode {b.inode} of uid {b.uid} at {addr_to_text(b.local)}" for b in bound)
