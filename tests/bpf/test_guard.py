"""What a process may send through its ring veth, and what a ring veth's far end delivers."""

from __future__ import annotations

import pytest

from bpf.frames import (
    ETH_ARP,
    ETH_IPV6,
    HOP_BY_HOP,
    ICMP,
    LOCAL,
    LOCAL6,
    MF,
    OWN_MAC,
    PEER_MAC,
    TCP,
    UDP,
    eth,
    ipv4,
    ipv6,
    tcp,
    udp,
    vlan,
)
from bpf.harness import Guard, Outcome, RingIn, index

pytestmark = pytest.mark.root

SENT = Outcome("redirect", "sent")
PEER, PEER6 = "10.0.0.2:4242", "[fd00::2]:4242"


def out4(src: str = LOCAL, *, mac: str = OWN_MAC, proto: int = UDP, fragment: int = 0) -> bytes:
    """A frame that the process sends to its peer."""
    transport = udp(src=src, dst=PEER) if proto == UDP else tcp(src=src, dst=PEER)
    return eth(src=mac, dst=PEER_MAC) + ipv4(transport, src=src, dst=PEER, proto=proto, fragment=fragment)


def out6(src: str = LOCAL6) -> bytes:
    return eth(ETH_IPV6, src=OWN_MAC, dst=PEER_MAC) + ipv6(udp(src=src, dst=PEER6), src=src, dst=PEER6)


@pytest.mark.parametrize(("grant", "frame"), [
    (LOCAL, out4()), (LOCAL6, out6()), ("*:11111", out4()), ("*:11111", out4("10.9.9.9:11111")), ("[*]:11111", out6()),
    (LOCAL, out4().ljust(60, b"\0")), (LOCAL, out4(fragment=0x4000)),
])
def test_sent(guard: Guard, grant: str, frame: bytes) -> None:
    guard.grant(grant)
    assert guard.run(frame) == SENT


def test_sent_tcp(guard: Guard) -> None:
    guard.grant(LOCAL, proto=TCP)
    assert guard.run(out4(proto=TCP)) == SENT


@pytest.mark.parametrize(("frame", "out"), [
    pytest.param(out4(mac=PEER_MAC), "bad-mac", id="another MAC"),
    pytest.param(out4(mac="03:00:00:00:00:01"), "bad-mac", id="first byte of the MAC"),
    pytest.param(out4(mac="02:00:00:00:00:00"), "bad-mac", id="last byte of the MAC"),
    pytest.param(out4("10.0.0.3:11111"), "bad-source", id="another address"),
    pytest.param(out4("10.0.0.1:53"), "bad-source", id="another port"),
    pytest.param(out4(proto=TCP), "bad-source", id="another protocol"),
    pytest.param(out4("0.0.0.0:11111"), "bad-source", id="unspecified address"),
    pytest.param(out6(), "bad-source", id="another family"),
    pytest.param(out6("[::ffff:10.0.0.1]:11111"), "bad-source", id="mapped address on the wire"),
    pytest.param(out4(fragment=MF), "not-flow", id="first fragment"),
    pytest.param(out4(fragment=5), "not-flow", id="later fragment"),
    pytest.param(vlan(out4(), 5), "not-flow", id="into a VLAN"),
    pytest.param(vlan(out4(), 0), "not-flow", id="priority tag"),
    pytest.param(vlan(out4(), 7, 5), "not-flow", id="two tags"),
    pytest.param(eth(ETH_ARP, src=OWN_MAC) + bytes(46), "not-flow", id="arp"),
    pytest.param(eth(src=OWN_MAC) + ipv4(bytes(8), src=LOCAL, proto=ICMP), "not-flow", id="icmp"),
    pytest.param(eth(ETH_IPV6, src=OWN_MAC) + ipv6(bytes(8) + udp(src=LOCAL6), src=LOCAL6, proto=HOP_BY_HOP),
                 "not-flow", id="extension header"),
    pytest.param(eth(src=OWN_MAC) + ipv4(udp(src=LOCAL, length=7), src=LOCAL), "not-flow", id="udp length 7"),
    pytest.param(eth(src=OWN_MAC) + ipv4(udp(src=LOCAL), src=LOCAL, total=1000), "not-flow", id="total length"),
])
def test_refused(guard: Guard, frame: bytes, out: str) -> None:
    guard.grant(LOCAL)
    assert guard.run(frame) == Outcome("drop", out)


@pytest.mark.parametrize("length", range(14, len(out4())))
def test_cut(guard: Guard, length: int) -> None:
    guard.grant(LOCAL)
    assert guard.run(out4()[:length]) == Outcome("drop", "not-flow")


def test_wildcard_of_ipv4_is_not_one_of_ipv6(guard: Guard) -> None:
    guard.grant("*:11111")
    assert guard.run(out6()) == Outcome("drop", "bad-source")


def test_wildcard_is_for_one_port(guard: Guard) -> None:
    guard.grant("*:11111")
    assert guard.run(out4("10.0.0.1:11112")) == Outcome("drop", "bad-source")


def test_nothing_granted(guard: Guard) -> None:
    assert guard.run(out4()) == Outcome("drop", "bad-source")


def test_a_grant_taken_back(guard: Guard) -> None:
    guard.grant(LOCAL)
    assert guard.run(out4()) == SENT
    [key] = guard.maps["granted"].keys()
    assert guard.maps["granted"].delete(key)
    assert guard.run(out4()) == Outcome("drop", "bad-source")


def test_no_interface(guard: Guard) -> None:
    guard.grant(LOCAL)
    assert guard.maps["guard_dev"].delete(index(0))
    assert guard.run(out4()) == Outcome("drop", "no-dev")


def test_no_mac_configured(guard: Guard) -> None:
    """A map as it is made: only a frame from 00:00:00:00:00:00 would match, and it needs a grant."""
    guard.grant(LOCAL)
    guard.maps["guard"].zero(index(0))
    assert guard.run(out4()) == Outcome("drop", "bad-mac")


@pytest.mark.parametrize("frame", [out4(), eth(ETH_ARP) + bytes(46), bytes(14), eth() + bytes(3000)])
def test_ring_in_takes_everything(ring_in: RingIn, frame: bytes) -> None:
    assert ring_in.run(frame) == Outcome("drop", "gone")
    ring_in.xsk("rin_xsks", 0)
    assert ring_in.run(frame) == Outcome("redirect", "ring")
