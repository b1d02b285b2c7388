"""Frames, written as a network engineer says them. Checksums stay 0: the XDP programs do not look at them.

Headers are joined with ``+`` from the outside in; lengths are filled from what follows unless a case sets them wrong:
``eth() + ipv4(udp(b"hi"))``. Endpoints are "ADDR:PORT", IPv6 "[ADDR]:PORT".
"""

from __future__ import annotations

import socket
import struct

LOCAL, REMOTE = "10.0.0.1:11111", "10.0.0.2:4242"
LOCAL6, REMOTE6 = "[fd00::1]:11111", "[fd00::2]:4242"
OWN_MAC = "02:00:00:00:00:01"
PEER_MAC = "02:00:00:00:00:02"

ETH_IPV4, ETH_IPV6, ETH_ARP = 0x0800, 0x86DD, 0x0806
CTAG, STAG = 0x8100, 0x88A8

HOP_BY_HOP, TCP, UDP, ROUTING, FRAGMENT, ESP, AH, ICMP6, NO_NEXT, DEST_OPTS, MOBILITY = (
    0, 6, 17, 43, 44, 50, 51, 58, 59, 60, 135)
ICMP, GRE = 1, 47

DF, MF = 0x4000, 0x2000


def endpoint(text: str) -> tuple[str, int]:
    """("10.0.0.1", 11111) of "10.0.0.1:11111"."""
    address, _, port = text.rpartition(":")
    return address.strip("[]"), int(port)


def mac(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))


def eth(ethertype: int = ETH_IPV4, *, src: str = PEER_MAC, dst: str = OWN_MAC) -> bytes:
    return mac(dst) + mac(src) + struct.pack("!H", ethertype)


def tag(vid: int, ethertype: int = ETH_IPV4, *, priority: int = 0) -> bytes:
    """The four bytes after a tag's own ethertype: priority and VID, then what comes next."""
    return struct.pack("!HH", priority << 13 | vid, ethertype)


def ipv4(payload: bytes, *, src: str = REMOTE, dst: str = LOCAL, proto: int = UDP, options: bytes = b"",
         version: int = 4, ihl: int | None = None, total: int | None = None, fragment: int = DF) -> bytes:
    """``fragment``: the flags and the offset (in 8-byte units) as they stand in the header."""
    header = 20 + len(options)
    return struct.pack("!BBHHHBBH4s4s", version << 4 | (header // 4 if ihl is None else ihl), 0,
                       header + len(payload) if total is None else total, 1, fragment, 64, proto, 0,
                       socket.inet_aton(endpoint(src)[0]), socket.inet_aton(endpoint(dst)[0])) + options + payload


def ipv6(payload: bytes, *, src: str = REMOTE6, dst: str = LOCAL6, proto: int = UDP, version: int = 6,
         length: int | None = None) -> bytes:
    return struct.pack("!IHBB16s16s", version << 28, len(payload) if length is None else length, proto, 64,
                       socket.inet_pton(socket.AF_INET6, endpoint(src)[0]),
                       socket.inet_pton(socket.AF_INET6, endpoint(dst)[0])) + payload


def udp(payload: bytes = b"vmahybrid", *, src: str = REMOTE, dst: str = LOCAL, length: int | None = None) -> bytes:
    return struct.pack("!HHHH", endpoint(src)[1], endpoint(dst)[1], 8 + len(payload) if length is None else length,
                       0) + payload


def tcp(payload: bytes = b"vmahybrid", *, src: str = REMOTE, dst: str = LOCAL, options: bytes = b"",
        doff: int | None = None) -> bytes:
    words = (20 + len(options)) // 4 if doff is None else doff
    return struct.pack("!HHIIBBHHH", endpoint(src)[1], endpoint(dst)[1], 1, 1, words << 4, 0x18, 512, 0,
                       0) + options + payload


def udp4(src: str = REMOTE, dst: str = LOCAL, payload: bytes = b"vmahybrid") -> bytes:
    """A whole untagged UDP frame."""
    return eth() + ipv4(udp(payload, src=src, dst=dst), src=src, dst=dst)


def udp6(src: str = REMOTE6, dst: str = LOCAL6, payload: bytes = b"vmahybrid") -> bytes:
    return eth(ETH_IPV6) + ipv6(udp(payload, src=src, dst=dst), src=src, dst=dst)


def tcp4(src: str = REMOTE, dst: str = LOCAL, payload: bytes = b"vmahybrid") -> bytes:
    return eth() + ipv4(tcp(payload, src=src, dst=dst), src=src, dst=dst, proto=TCP)


def tcp6(src: str = REMOTE6, dst: str = LOCAL6, payload: bytes = b"vmahybrid") -> bytes:
    return eth(ETH_IPV6) + ipv6(tcp(payload, src=src, dst=dst), src=src, dst=dst, proto=TCP)


def vlan(frame: bytes, *vids: int, outer: int = CTAG) -> bytes:
    """The frame with these tags, the outermost first; two tags: 802.1ad outside if ``outer`` says so."""
    for vid in reversed(vids):
        frame = frame[:12] + struct.pack("!HH", CTAG, vid) + frame[12:]
    return frame[:12] + struct.pack("!H", outer) + frame[14:] if vids else frame
