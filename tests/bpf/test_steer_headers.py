"""Headers that are whole but say something odd: each goes to the kernel under its own name, or is a plain flow."""

from __future__ import annotations

import pytest

from bpf.frames import (
    AH,
    CTAG,
    DEST_OPTS,
    DF,
    ESP,
    ETH_ARP,
    ETH_IPV4,
    ETH_IPV6,
    FRAGMENT,
    GRE,
    HOP_BY_HOP,
    ICMP,
    ICMP6,
    MF,
    MOBILITY,
    NO_NEXT,
    ROUTING,
    STAG,
    TCP,
    UDP,
    eth,
    ipv4,
    ipv6,
    tag,
    tcp,
    tcp4,
    tcp6,
    udp,
    udp4,
    udp6,
    vlan,
)
from bpf.harness import MTU, Outcome, Steer

pytestmark = pytest.mark.root


def rules(steer: Steer) -> None:
    """Every untagged frame to port 11111 goes to a ring, unless its headers stop it."""
    steer.xsk("xsks", 0)
    for proto in (UDP, TCP):
        for dst in ("10.0.0.1:11111", "[fd00::1]:11111"):
            steer.rule(dst, proto=proto)


def udp4_of(size: int) -> bytes:
    """An untagged frame of ``size`` bytes."""
    return udp4(payload=bytes(size - 14 - 20 - 8))


REDIRECTED = {
    "plain": udp4(),
    "padded to 60 bytes": udp4(payload=b"x").ljust(60, b"\0"),
    "padded without payload": udp4(payload=b"").ljust(60, b"\0"),
    "padded ipv6": udp6(payload=b"").ljust(80, b"\0"),
    "padded tcp": tcp4(payload=b"").ljust(60, b"\0"),
    "udp shorter than the IP payload": eth() + ipv4(udp(b"x" * 20, length=12)),
    "don't fragment": eth() + ipv4(udp(), fragment=DF),
    "fragmentation allowed": eth() + ipv4(udp(), fragment=0),
    "reserved flag": eth() + ipv4(udp(), fragment=0x8000),
    "longest IP header": eth() + ipv4(udp(), options=bytes(40)),
    "tcp with options": eth() + ipv4(tcp(options=bytes([1] * 20)), proto=TCP),
    "longest tcp header": eth() + ipv4(tcp(options=bytes([1] * 40)), proto=TCP),
    "tcp over ipv6": tcp6(),
    "frame of the MTU": udp4_of(MTU + 14),
    "priority tag": vlan(udp4(), 0),
}

PASSED = {
    # not IP
    "arp": (eth(ETH_ARP) + bytes(28), "pass-not-ip"),
    "arp behind a tag": (eth(CTAG) + tag(5, ETH_ARP) + bytes(28), "pass-not-ip"),
    "802.3 length": (eth(0x0026) + bytes(46), "pass-not-ip"),
    "ethertype 0": (eth(0) + bytes(46), "pass-not-ip"),
    "ethertype ffff": (eth(0xFFFF) + bytes(46), "pass-not-ip"),
    "three tags": (vlan(udp4(), 7, 5, 3), "pass-vlan-depth"),
    "three tags, 802.1ad inside": (eth(STAG) + tag(7, STAG) + tag(5, STAG) + tag(3) + ipv4(udp()), "pass-vlan-depth"),
    # neither UDP nor TCP
    "icmp": (eth() + ipv4(bytes(8), proto=ICMP), "pass-not-l4"),
    "gre": (eth() + ipv4(udp(), proto=GRE), "pass-not-l4"),
    "icmp6": (eth(ETH_IPV6) + ipv6(bytes(8), proto=ICMP6), "pass-not-l4"),
    "esp over ipv6": (eth(ETH_IPV6) + ipv6(udp(), proto=ESP), "pass-not-l4"),
    "no next header": (eth(ETH_IPV6) + ipv6(b"", proto=NO_NEXT), "pass-not-l4"),
    # fragments of IPv4
    "first fragment": (eth() + ipv4(udp(), fragment=MF), "pass-fragment"),
    "middle fragment": (eth() + ipv4(udp(), fragment=MF | 185), "pass-fragment"),
    "last fragment": (eth() + ipv4(udp(), fragment=185), "pass-fragment"),
    "fragment at offset 1": (eth() + ipv4(udp(), fragment=1), "pass-fragment"),
    "fragment at the last offset": (eth() + ipv4(udp(), fragment=0x1FFF), "pass-fragment"),
    "fragment with don't fragment": (eth() + ipv4(udp(), fragment=DF | MF), "pass-fragment"),
    "tcp fragment": (eth() + ipv4(tcp(), proto=TCP, fragment=MF), "pass-fragment"),
    "empty last fragment": (eth() + ipv4(b"", fragment=185), "pass-fragment"),
    # extension headers of IPv6
    "hop-by-hop": (eth(ETH_IPV6) + ipv6(bytes(8) + udp(), proto=HOP_BY_HOP), "pass-ip6-ext"),
    "routing": (eth(ETH_IPV6) + ipv6(bytes(8) + udp(), proto=ROUTING), "pass-ip6-ext"),
    "ipv6 fragment": (eth(ETH_IPV6) + ipv6(bytes(8) + udp(), proto=FRAGMENT), "pass-ip6-ext"),
    "authentication": (eth(ETH_IPV6) + ipv6(bytes(12) + udp(), proto=AH), "pass-ip6-ext"),
    "destination options": (eth(ETH_IPV6) + ipv6(bytes(8) + udp(), proto=DEST_OPTS), "pass-ip6-ext"),
    "mobility": (eth(ETH_IPV6) + ipv6(bytes(8) + udp(), proto=MOBILITY), "pass-ip6-ext"),
    "jumbogram": (eth(ETH_IPV6) + ipv6(bytes(8) + udp(), proto=HOP_BY_HOP, length=0), "pass-ip6-ext"),
    # the IP header contradicts itself or the frame
    "ihl 0": (eth() + ipv4(udp(), ihl=0), "pass-bad-ip"),
    "ihl 4": (eth() + ipv4(udp(), ihl=4), "pass-bad-ip"),
    "ihl beyond the frame": (eth() + ipv4(udp(b""), ihl=15), "pass-short-ip"),
    "ihl beyond the total length": (eth() + ipv4(udp(bytes(40)), ihl=15, total=59), "pass-bad-ip"),
    "total length 0": (eth() + ipv4(udp(), total=0), "pass-bad-ip"),
    "total length 19": (eth() + ipv4(udp(), total=19), "pass-bad-ip"),
    "total length one beyond": (eth() + ipv4(udp(b"x" * 9), total=38), "pass-bad-ip"),
    "total length 65535": (eth() + ipv4(udp(), total=65535), "pass-bad-ip"),
    "version 6 in ipv4": (eth() + ipv4(udp(), version=6), "pass-bad-ip"),
    "version 0 in ipv4": (eth() + ipv4(udp(), version=0), "pass-bad-ip"),
    "ipv6 packet as ipv4": (eth(ETH_IPV4) + ipv6(udp()), "pass-bad-ip"),
    "ipv4 packet as ipv6": (eth(ETH_IPV6) + ipv4(udp(bytes(40))), "pass-bad-ip"),
    "version 4 in ipv6": (eth(ETH_IPV6) + ipv6(udp(), version=4), "pass-bad-ip"),
    "ipv6 length one beyond": (eth(ETH_IPV6) + ipv6(udp(b"x"), length=10), "pass-bad-ip"),
    "ipv6 length 0": (eth(ETH_IPV6) + ipv6(udp(), length=0), "pass-short-l4"),
    "ipv6 length 7": (eth(ETH_IPV6) + ipv6(udp(), length=7), "pass-short-l4"),
    # the transport header contradicts itself or IP
    "udp length 0": (eth() + ipv4(udp(length=0)), "pass-bad-l4"),
    "udp length 7": (eth() + ipv4(udp(length=7)), "pass-bad-l4"),
    "udp length one beyond": (eth() + ipv4(udp(b"x", length=10)), "pass-bad-l4"),
    "udp length 65535": (eth() + ipv4(udp(length=65535)), "pass-bad-l4"),
    "udp length reaches into padding": ((eth() + ipv4(udp(b"x", length=20))).ljust(60, b"\0"), "pass-bad-l4"),
    "udp length 0 over ipv6": (eth(ETH_IPV6) + ipv6(udp(length=0)), "pass-bad-l4"),
    "udp length one beyond over ipv6": (eth(ETH_IPV6) + ipv6(udp(b"x", length=10)), "pass-bad-l4"),
    "tcp data offset 0": (eth() + ipv4(tcp(doff=0), proto=TCP), "pass-bad-l4"),
    "tcp data offset 4": (eth() + ipv4(tcp(doff=4), proto=TCP), "pass-bad-l4"),
    "tcp data offset beyond": (eth() + ipv4(tcp(b"", doff=6), proto=TCP), "pass-bad-l4"),
    "tcp data offset 15 beyond": (eth() + ipv4(tcp(doff=15), proto=TCP), "pass-bad-l4"),
    "tcp data offset 4 over ipv6": (eth(ETH_IPV6) + ipv6(tcp(doff=4), proto=TCP), "pass-bad-l4"),
    # longer than the MTU: GSO super-packets, jumbo frames
    "one byte too long": (udp4_of(MTU + 15), "pass-too-long"),
    "super-packet": (udp4_of(3400), "pass-too-long"),
    "tcp super-packet": (tcp4(payload=bytes(3300)), "pass-too-long"),
    "ipv6 one byte too long": (udp6(payload=bytes(MTU + 1 - 48)), "pass-too-long"),
    "too long and not ip": (eth(ETH_ARP) + bytes(MTU + 1), "pass-too-long"),
}


@pytest.mark.parametrize("name", REDIRECTED)
def test_redirected(steer: Steer, name: str) -> None:
    rules(steer)
    outcome = steer.run(REDIRECTED[name])
    assert (outcome.verdict, outcome.out) == ("redirect", "ring")


@pytest.mark.parametrize("name", PASSED)
def test_passed(steer: Steer, name: str) -> None:
    rules(steer)
    frame, out = PASSED[name]
    assert steer.run(frame) == Outcome("pass", out)


@pytest.mark.parametrize(("tags", "size", "out"), [
    ((5,), MTU + 18, "ring"), ((5,), MTU + 19, "pass-too-long"),
    ((7, 5), MTU + 22, "ring"), ((7, 5), MTU + 23, "pass-too-long"),
    ((0,), MTU + 18, "ring"), ((0,), MTU + 19, "pass-too-long"),
])
def test_a_tag_adds_four_bytes_to_the_longest_frame(steer: Steer, tags: tuple[int, ...], size: int, out: str) -> None:
    steer.xsk("xsks", 0)
    steer.rule("10.0.0.1:11111", vlan=tags[0], vlan2=tags[1] if len(tags) > 1 else 0)
    frame = vlan(udp4_of(size - 4 * len(tags)), *tags)
    assert len(frame) == size
    assert steer.run(frame).out == out


def test_nothing_is_redirected_before_the_port_is_configured(steer: Steer) -> None:
    """max_frame 0, as the map is made: every frame is too long, so a half-made port is the kernel's."""
    rules(steer)
    steer.maps["port"].zero(bytes(4))
    assert steer.run(udp4()) == Outcome("pass", "pass-too-long")
