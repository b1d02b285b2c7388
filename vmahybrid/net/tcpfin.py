"""Frames as of the peer, for a kernel socket that comes home: the end of its stream, which the kernel has not seen,
and some that make the kernel speak."""

from __future__ import annotations

import struct

from vmahybrid.contracts import family_of
from vmahybrid.net.tcpstate import TcpState, seq

_ICMP, _TCP, _ICMPV6 = 1, 6, 58
_IPV4, _IPV6 = b"\x08\x00", b"\x86\xdd"   # types of Ethernet
_FIN, _ACK = 1, 16
_SOURCE_MAC = b"\x02\0\0\0\0\0"     # locally administered; nobody reads it behind the driver


def fin_frame(state: TcpState, mac: bytes) -> bytes:
    """For a connection with TcpFlag.PEER_FIN: an Ethernet frame to the interface with address ``mac``."""
    return _frame(state, mac, state.rcv_nxt, _FIN | _ACK)


def stale_frame(state: TcpState, mac: bytes) -> bytes:
    """One before the window, which changes nothing: the kernel answers by an ACK that says its window (RFC 9293,
    3.10.7.4)."""
    return _frame(state, mac, seq(state.rcv_nxt - 1), _ACK)


def unreachable_frame(state: TcpState, mac: bytes) -> bytes:
    """An ICMP message that what was sent last did not reach the peer: a kernel that waits for a timeout sends it again
    at once (RFC 6069)."""
    source, target = state.raddr, state.laddr
    segment = struct.pack(">HHIIBBHHH", state.lport, state.rport, state.snd_una, state.rcv_nxt, 5 << 4, _ACK, 0, 0, 0)
    if family_of(source) == 6:
        quoted = _ipv6_head(_TCP, len(segment), target, source) + segment
        message = struct.pack(">BBHI", 1, 0, 0, 0) + quoted     # no route
        pseudo = source + target + struct.pack(">II", len(message), _ICMPV6)
        message = message[:2] + _checksum(pseudo + message) + message[4:]
        return mac + _SOURCE_MAC + _IPV6 + _ipv6_head(_ICMPV6, len(message), source, target) + message
    quoted = _ipv4_head(_TCP, len(segment), target, source) + segment
    message = struct.pack(">BBHI", 3, 1, 0, 0) + quoted         # host unreachable
    message = message[:2] + _checksum(message) + message[4:]
    return mac + _SOURCE_MAC + _IPV4 + _ipv4_head(_ICMP, len(message), source, target) + message


def _ipv6_head(proto: int, length: int, source: bytes, target: bytes) -> bytes:
    return struct.pack(">IHBB", 6 << 28, length, proto, 64) + source + target


def _ipv4_head(proto: int, length: int, source: bytes, target: bytes) -> bytes:
    head = struct.pack(">BBHHHBBH", 0x45, 0, 20 + length, 0, 0, 64, proto, 0) + source[12:] + target[12:]
    return head[:10] + _checksum(head) + head[12:]


def _frame(state: TcpState, mac: bytes, number: int, flags: int) -> bytes:
    """Without a timestamp, which the kernel takes: a made-up one would stand against the peer's real ones (PAWS)."""
    source, target = state.raddr, state.laddr
    tcp = struct.pack(">HHIIBBHHH", state.rport, state.lport, number, state.snd_una, 5 << 4, flags,
                      min(state.snd_wnd >> state.snd_wscale, 0xFFFF), 0, 0)
    tcp = sealed(tcp, source, target)
    if family_of(source) == 6:
        return mac + _SOURCE_MAC + _IPV6 + _ipv6_head(_TCP, len(tcp), source, target) + tcp
    return mac + _SOURCE_MAC + _IPV4 + _ipv4_head(_TCP, len(tcp), source, target) + tcp


def sealed(tcp: bytes, source: bytes, target: bytes) -> bytes:
    """A segment of even length with its checksum, which was 0; the addresses are of 16 bytes."""
    if family_of(source) == 6:
        pseudo = source + target + struct.pack(">II", len(tcp), _TCP)
    else:
        pseudo = source[12:] + target[12:] + struct.pack(">HH", _TCP, len(tcp))
    return tcp[:16] + _checksum(pseudo + tcp) + tcp[18:]


def _checksum(data: bytes) -> bytes:
    """RFC 1071, of an even number of bytes."""
    total: int = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return (~total & 0xFFFF).to_bytes(2, "big")
