"""Program `tc_steer`: the verdicts of `steer` without its reach into AF_XDP, and super-packets left alone."""

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
    REMOTE,
    REMOTE6,
    STAG,
    TCP,
    eth,
    ipv4,
    ipv6,
    tcp4,
    tcp6,
    udp,
    udp4,
    udp6,
    vlan,
)
from bpf.harness import DEV, DROP, KERNEL, MTU, RING, Outcome, TcSteer
from vmahybrid.contracts import lib

pytestmark = pytest.mark.root

MISS = Outcome("pass", "pass-miss")
GONE = "pass-ring-gone"
GROUP = "239.1.2.3:30001"
WHOLE = udp4(payload=bytes(MTU - 28))


@pytest.fixture(autouse=True)
def rings(tc_steer: TcSteer) -> None:
    """The rings in XSKMAP slots 0 and 64, and the device in DEVMAP slot 3, can be reached."""
    for slot in (0, 1, lib.VMH_NEAR_DEV + 3):
        tc_steer.near(slot)


def ring(rule: int) -> Outcome:
    return Outcome("redirect", "ring", rule)


def test_no_rule(tc_steer: TcSteer) -> None:
    frames = (udp4(), udp6(), tcp4(), tcp6(), WHOLE, vlan(udp4(), 5), vlan(udp4(), 7, 5, outer=STAG))
    assert [tc_steer.run(frame) for frame in frames] == [MISS] * len(frames)


@pytest.mark.parametrize(("frame", "dst", "src"), [
    (udp4(), LOCAL, REMOTE), (udp4(), LOCAL, ""), (udp6(), LOCAL6, REMOTE6), (udp6(), LOCAL6, ""),
    (udp4(payload=b""), LOCAL, ""), (WHOLE, LOCAL, ""), (WHOLE, LOCAL, REMOTE),
])
def test_hit(tc_steer: TcSteer, frame: bytes, dst: str, src: str) -> None:
    rule = tc_steer.rule(dst, src)
    assert tc_steer.run(frame) == ring(rule)


def test_a_five_tuple_goes_before_a_three_tuple_and_that_before_a_group(tc_steer: TcSteer) -> None:
    group = tc_steer.rule(GROUP, multicast=True)
    three = tc_steer.rule(LOCAL, kind=KERNEL)
    five = tc_steer.rule(LOCAL, REMOTE, target=64)
    assert tc_steer.run(udp4()) == ring(five)
    assert tc_steer.run(udp4(src="10.0.0.9:1")) == Outcome("pass", "pass-rule", three)
    assert tc_steer.run(udp4(dst=GROUP)) == ring(group)
    assert tc_steer.run(udp4(dst="239.1.2.4:30001")) == MISS


@pytest.mark.parametrize(("kind", "target", "verdict", "out"), [
    (RING, 0, "redirect", "ring"), (RING, 64, "redirect", "ring"), (RING, 128, "pass", GONE),
    (RING, 63 * 64, "pass", GONE), (RING, lib.VMH_MAX_XSK * 64, "pass", GONE),
    (DEV, 3, "redirect", "dev"), (DEV, 4, "pass", GONE), (DEV, 0, "pass", GONE), (DEV, 5000, "pass", GONE),
    (DROP, 0, "drop", "drop"), (KERNEL, 0, "pass", "pass-rule"), (77, 0, "pass", "pass-rule"),
])
def test_each_verdict(tc_steer: TcSteer, kind: int, target: int, verdict: str, out: str) -> None:
    rule = tc_steer.rule(LOCAL, kind=kind, target=target)
    assert tc_steer.run(udp4()) == Outcome(verdict, out, rule)


@pytest.mark.parametrize(("frame", "size"), [
    (tcp4(payload=bytes(3300)), 1448), (tcp4(), 4), (udp4(payload=bytes(1000)), 500), (udp6(), 4), (WHOLE, 1000),
])
def test_a_super_packet_is_the_kernels_however_short(tc_steer: TcSteer, frame: bytes, size: int) -> None:
    """A datagram that the sender left to be cut must not come to a ring as one."""
    for where in (LOCAL, LOCAL6):
        tc_steer.rule(where)
        tc_steer.rule(where, proto=TCP, kind=DROP)
    assert tc_steer.run_gso(frame, size) == Outcome("pass", "pass-too-long")


@pytest.mark.parametrize(("frame", "out"), [
    (udp4(payload=bytes(MTU + 1 - 28)), "pass-too-long"),
    (udp6(payload=bytes(MTU + 1 - 48)), "pass-too-long"),
    (eth() + ipv4(udp(), fragment=MF), "pass-fragment"),
    (eth() + ipv4(udp(), fragment=100), "pass-fragment"),
    (eth(ETH_ARP) + bytes(46), "pass-not-ip"),
    (eth() + ipv4(bytes(20), proto=ICMP), "pass-not-l4"),
    (eth(ETH_IPV6) + ipv6(bytes(20), proto=HOP_BY_HOP), "pass-ip6-ext"),
    (eth() + ipv4(udp(length=500)), "pass-bad-l4"),
    (eth() + ipv4(udp(), version=5), "pass-bad-ip"),
    (vlan(udp4(), 5)[:30], "pass-short-ip"),
    (eth() + ipv4(bytes(4)), "pass-short-l4"),
    (vlan(udp4(), 1, 2, 3), "pass-vlan-depth"),
    (vlan(udp4(), 5)[:16], "pass-short-vlan"),
], ids=lambda value: value if isinstance(value, str) else None)
def test_what_is_no_whole_datagram_passes(tc_steer: TcSteer, frame: bytes, out: str) -> None:
    tc_steer.rule(LOCAL)
    tc_steer.rule(LOCAL6)
    assert tc_steer.run(frame) == Outcome("pass", out)


@pytest.mark.parametrize(("kind", "verdict", "out"), [
    (RING, "pass", GONE), (DEV, "pass", GONE), (DROP, "drop", "drop"), (KERNEL, "pass", "pass-rule"),
])
def test_tagged_frames_are_dropped_by_rule_but_reach_no_ring(tc_steer: TcSteer, kind: int, verdict: str,
                                                             out: str) -> None:
    """The kernel has taken the tag out of the frame: a ring would see it untagged."""
    one = tc_steer.rule(LOCAL, kind=kind, target=3 if kind == DEV else 0, vlan=5)
    two = tc_steer.rule(LOCAL, kind=kind, target=3 if kind == DEV else 0, vlan=7, vlan2=5)
    assert tc_steer.run(vlan(udp4(), 5)) == Outcome(verdict, out, one)
    assert tc_steer.run(vlan(udp4(), 7, 5)) == Outcome(verdict, out, two)
    assert tc_steer.run(udp4()) == MISS


def test_a_priority_tag_is_none(tc_steer: TcSteer) -> None:
    rule = tc_steer.rule(LOCAL)
    assert tc_steer.run(vlan(udp4(), 0)) == ring(rule)


def test_a_ring_that_is_gone_leaves_its_frames_to_the_kernel(tc_steer: TcSteer) -> None:
    rule = tc_steer.rule(LOCAL)
    assert tc_steer.run(udp4()) == ring(rule)
    tc_steer.near(0, 0)
    assert tc_steer.run(udp4()) == Outcome("pass", GONE, rule)
