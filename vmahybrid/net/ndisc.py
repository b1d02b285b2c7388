"""Neighbour discovery of IPv6 (RFC 4861): what the kernel does not say of a device.

A MAC that changes is told to nobody (net.ipv6.conf.*.ndisc_notify=0): a peer learns it when the kernel next asks for
that peer's own, by the address that the question comes from. The service's questions come from the link-local address,
and what it has resolved no socket asks for again, so the peer would go on to send to the old MAC.
"""

import contextlib
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

from vmahybrid.net.page import LinkInfo

_ADVERTISEMENT, _ROUTER, _OVERRIDE, _TARGET_MAC = 136, 0x80000000, 0x20000000, 2
_HOPS = 255     # else it is no neighbour's
_ALL_NODES = "ff02::1"


def advertisement(address: bytes, mac: bytes, router: bool) -> bytes:
    """An unsolicited one; the kernel fills in the checksum. Who hears that one is no router any more forgets its
    routes."""
    flags = _OVERRIDE | _ROUTER * router
    return struct.pack("!BBHI", _ADVERTISEMENT, 0, 0, flags) + address + struct.pack("!BB", _TARGET_MAC, 1) + mac


def _routes(name: str) -> bool:
    try:
        return int(Path(f"/proc/sys/net/ipv6/conf/{name}/forwarding").read_text()) != 0
    except (OSError, ValueError):
        return False


def advertise(link: LinkInfo, addresses: Iterable[bytes]) -> None:
    """To all on the link: these addresses of it (16 bytes each) are at its MAC. In its namespace. One that is gone, or
    not valid yet, is left out."""
    router = _routes(link.name)
    for address in addresses:
        with contextlib.suppress(OSError), \
                socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6) as raw:
            raw.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, _HOPS)
            raw.bind((socket.inet_ntop(socket.AF_INET6, address), 0, 0, link.ifindex))
            raw.sendto(advertisement(address, link.mac, router), (_ALL_NODES, 0, 0, link.ifindex))
