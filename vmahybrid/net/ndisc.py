"""Neighbour discovery of IPv6 (RFC 4861): what the kernel does not say of a device.

A MAC that changes is told to nobody (net.ipv6.conf.*.ndisc_notify=0): a peer learns it when the kernel next asks for
that peer's own, by the address that the question comes from. The service's questions come from the link-local address,
and what it has resolved no socket asks for again, so the peer would go on to send to the old MAC.
"""

import contextlib
import socket
import struct
from collections.abc import Iterable

_ADVERTISEMENT, _OVERRIDE, _TARGET_MAC = 136, 0x20000000, 2
_HOPS = 255     # else it is no neighbour's
_ALL_NODES = "ff02::1"


def advertisement(address: bytes, mac: bytes) -> bytes:
    """An unsolicited one; the kernel fills in the checksum."""
    return struct.pack("!BBHI", _ADVERTISEMENT, 0, 0, _OVERRIDE) + address + struct.pack("!BB", _TARGET_MAC, 1) + mac


def advertise(ifindex: int, mac: bytes, addresses: Iterable[bytes]) -> None:
    """To all on the link: these addresses of the device (16 bytes each) are at this MAC. In its namespace. One that is
    gone, or not valid yet, is left out."""
    for address in addresses:
        with contextlib.suppress(OSError), \
                socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6) as raw:
            raw.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, _HOPS)
            raw.bind((socket.inet_ntop(socket.AF_INET6, address), 0, 0, ifindex))
            raw.sendto(advertisement(address, mac), (_ALL_NODES, 0, 0, ifindex))
