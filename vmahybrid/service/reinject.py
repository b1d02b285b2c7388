"""Datagrams that a ring had delivered and the program had not read yet, back on the way to its kernel socket; and TCP
segments that a ring got while their connection went home.

The program says what the datagram was, and the kernel will believe it: so it must be one that only the program's own
socket gets, addressed as that socket is bound.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

from vmahybrid.contracts import ANY_ADDR, addr_to_bytes, family_of, ntohs
from vmahybrid.service.namespaces import LinkRow
from vmahybrid.service.ports import ARPHRD_ETHER
from vmahybrid.service.proof import not_owner
from vmahybrid.steering.flow import Flow, Kind, endpoint
from vmahybrid.steering.keys import is_multicast
from vmahybrid.steering.reasons import Reason
from vmahybrid.steering.table import refuse
from vmahybrid.xdp.bpf import LIVE_FRAME_MAX

ETH_IP, IP_HEADER = b"\x08\x00", 20
ETH_IP6, IP6_HEADER = b"\x86\xdd", 40
DONT_FRAGMENT, MORE_FRAGMENTS = 0x4000, 0x2000  # RFC 791
SOURCE_MAC = b"\x02\0\0\0\0\0"      # locally administered; nobody reads it behind the driver
# Bytes of IP payload in a frame; a multiple of 8, as the offsets of fragments count in 8 bytes.
PAYLOAD_MAX = (LIVE_FRAME_MAX - 14 - IP_HEADER) & ~7

SO_RCVBUFFORCE = 33
SO_MEMINFO = 55     # asm-generic/socket.h; SK_MEMINFO_RMEM_ALLOC and _RCVBUF are the first two of linux/sock_diag.h
FRAME_COST = 8192   # bytes of receive buffer that a live frame takes at most: it is charged with its whole page

_idents = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Datagram:
    """Addresses are 16 bytes, ports in host order; ``data`` is the UDP payload."""

    src: bytes
    src_port: int
    dst: bytes
    dst_port: int
    ttl: int
    tos: int
    data: bytes

    @classmethod
    def of(cls, body: Any) -> Self:
        """Of a struct vmh_msg_reinject (cffi) whose length was checked."""
        return cls(bytes(body.src_addr), ntohs(body.src_port), bytes(body.dst_addr), ntohs(body.local_port),
                   body.ttl, body.tos, bytes(body.data)[: body.len])


def check_link(link: LinkRow) -> None:
    """Raises Refused where no ring is."""
    if link.loopback or link.arphrd != ARPHRD_ETHER:
        raise refuse(f"interface {link.name}", Reason.IF_UNSUPPORTED)


def packets_in(data: bytes) -> Iterator[bytes]:
    """Of struct vmh_tcp_frame, one behind the other, up to the first that is not whole; without those that are too long
    to be injected."""
    at = 0
    while at + 4 <= len(data):
        (length,) = struct.unpack_from("=I", data, at)
        if at + 4 + length > len(data):
            return
        if length <= LIVE_FRAME_MAX - 14:
            yield data[at + 4:at + 4 + length]
        at += 4 + length + 7 & ~7


def segment_frame(packet: bytes, flow: Flow, mac: bytes) -> bytes:
    """The frame of an IP packet with a TCP segment for the connection of ``flow``, whose owner's socket was proved.

    ``mac``: the interface's. Raises Refused when the packet is of another connection, or of none.
    """
    four = packet[:1] and packet[0] >> 4 == 4
    head = (packet[0] & 15) * 4 if four else IP6_HEADER
    if len(packet) < head + 4 or (packet[9] if four else packet[6]) != socket.IPPROTO_TCP:
        raise not_owner(f"{len(packet)} bytes that are no TCP segment")
    found = packet[12:20] if four else packet[8:40]
    half = len(found) // 2
    ports = struct.unpack("!2H", packet[head:head + 4])
    ours = (addr_to_bytes(found[:half]), addr_to_bytes(found[half:]), *ports)
    if ours != (flow.remote, flow.local, flow.remote_port, flow.local_port):
        raise not_owner(f"a segment from {endpoint(ours[0], ports[0])} to {endpoint(ours[1], ports[1])}")
    return mac + SOURCE_MAC + (ETH_IP if four else ETH_IP6) + packet


def check(datagram: Datagram, flow: Flow, link: LinkRow, addresses: list[bytes]) -> None:
    """Would it come to the socket that ``flow`` describes by this interface (check_link)? Raises Refused."""
    if flow.family != 4 or family_of(datagram.src) != 4 or family_of(datagram.dst) != 4:
        raise refuse(f"datagram to {flow.local_text}", Reason.FAMILY)
    source, to = endpoint(datagram.src, datagram.src_port), endpoint(datagram.dst, datagram.dst_port)
    if datagram.src == ANY_ADDR or is_multicast(datagram.src):
        raise not_owner(f"{source} is no source")
    far = (flow.remote, flow.remote_port) if flow.kind is Kind.FIVE else flow.peer
    if far[1] and (datagram.src, datagram.src_port) != far:
        raise not_owner(f"from {source}, but the socket is connected to {endpoint(*far)}")
    if flow.wildcard:
        if not is_multicast(datagram.dst) and datagram.dst not in addresses:
            raise not_owner(f"to {to}, which is no address of {link.name}")
    elif datagram.dst != flow.local:
        raise not_owner(f"to {to}, not {flow.local_text}")


@contextlib.contextmanager
def room_for(sock: socket.socket, count: int, unread: int) -> Iterator[None]:
    """Room in the receive buffer for ``count`` frames while they are put in, however full it is.

    The kernel counts a page and more for each, so that a default buffer takes about 50 of the ``unread`` datagrams
    that the program's rings may hold; more than these are refused. What is queued stays when the size is back.
    Raises Refused.
    """
    used, size = struct.unpack("2I", sock.getsockopt(socket.SOL_SOCKET, SO_MEMINFO, 8))
    wanted = used + count * FRAME_COST
    if wanted <= size:
        yield
        return
    if wanted > size + unread * FRAME_COST:
        raise refuse("datagram: the socket's receive buffer", Reason.RING_LIMIT)
    sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, min(wanted // 2 + 1, (1 << 30) - 1))
    try:
        yield
    finally:
        sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, size // 2)  # the kernel doubles it


def frames(datagram: Datagram, mac: bytes) -> list[bytes]:
    """As Ethernet frames: one, or fragments where the kernel takes no frame of that size. ``mac``: the interface's."""
    target = mac
    if is_multicast(datagram.dst):
        target = b"\x01\x00\x5e" + bytes([datagram.dst[13] & 0x7F]) + datagram.dst[14:]  # RFC 1112, 6.4
    # No UDP checksum (RFC 768): the one of the wire was verified when the ring got it.
    packet = struct.pack("!4H", datagram.src_port, datagram.dst_port, 8 + len(datagram.data), 0) + datagram.data
    ident = next(_idents) & 0xFFFF
    found = []
    for at in range(0, len(packet), PAYLOAD_MAX):
        part = packet[at:at + PAYLOAD_MAX]
        place = at >> 3 | (MORE_FRAGMENTS if at + len(part) < len(packet) else 0)
        if len(packet) <= PAYLOAD_MAX:
            place = DONT_FRAGMENT
        found.append(target + SOURCE_MAC + ETH_IP + _ip_header(datagram, ident, place, len(part)) + part)
    return found


def _ip_header(datagram: Datagram, ident: int, place: int, size: int) -> bytes:
    def packed(checksum: int) -> bytes:
        return struct.pack("!BBHHHBBH4s4s", 0x45, datagram.tos, IP_HEADER + size, ident, place, datagram.ttl,
                           socket.IPPROTO_UDP, checksum, datagram.src[12:], datagram.dst[12:])

    total = sum(struct.unpack("!10H", packed(0)))
    total = (total & 0xFFFF) + (total >> 16)
    return packed(~(total + (total >> 16)) & 0xFFFF)
