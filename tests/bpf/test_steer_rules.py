"""Which rule a frame meets, and what its action does."""

from __future__ import annotations

import socket

import pytest

from bpf.frames import (
    CTAG,
    LOCAL,
    LOCAL6,
    REMOTE,
    REMOTE6,
    STAG,
    TCP,
    UDP,
    eth,
    ipv4,
    tag,
    tcp4,
    tcp6,
    udp,
    udp4,
    udp6,
    vlan,
)
from bpf.harness import DEV, DROP, KERNEL, RING, Outcome, Steer, index
from vmahybrid.contracts import lib

pytestmark = pytest.mark.root

MISS = Outcome("pass", "pass-miss")
GROUP, GROUP6 = "239.1.2.3:30001", "[ff15::7]:30001"


@pytest.fixture(autouse=True)
def rings(steer: Steer) -> None:
    for slot in (0, 64, 128):
        steer.xsk("xsks", slot)


def ring(rule: int) -> Outcome:
    return Outcome("redirect", "ring", rule)


def test_no_rule(steer: Steer) -> None:
    assert [steer.run(frame) for frame in (udp4(), udp6(), tcp4(), tcp6(), vlan(udp4(), 5))] == [MISS] * 5


@pytest.mark.parametrize(("frame", "dst", "src", "proto"), [
    (udp4(), LOCAL, REMOTE, UDP), (tcp4(), LOCAL, REMOTE, TCP), (udp6(), LOCAL6, REMOTE6, UDP),
    (tcp6(), LOCAL6, REMOTE6, TCP), (udp4(), LOCAL, "", UDP), (tcp4(), LOCAL, "", TCP), (udp6(), LOCAL6, "", UDP),
    (tcp6(), LOCAL6, "", TCP),
])
def test_hit(steer: Steer, frame: bytes, dst: str, src: str, proto: int) -> None:
    assert steer.run(frame) == MISS
    rule = steer.rule(dst, src, proto=proto)
    assert steer.run(frame) == ring(rule)


@pytest.mark.parametrize("frame", [
    pytest.param(udp4(dst="10.0.0.3:11111"), id="destination address"),
    pytest.param(udp4(dst="10.0.0.1:11112"), id="destination port"),
    pytest.param(udp4(src="10.0.0.3:4242"), id="source address"),
    pytest.param(udp4(src="10.0.0.2:4243"), id="source port"),
    pytest.param(tcp4(), id="protocol"),
    pytest.param(udp4(src=LOCAL, dst=REMOTE), id="direction"),
    pytest.param(vlan(udp4(), 5), id="tag"),
    pytest.param(udp6("[::ffff:10.0.0.2]:4242", "[::ffff:10.0.0.1]:11111"), id="mapped address on the wire"),
])
def test_five_tuple_differs_in_one_field(steer: Steer, frame: bytes) -> None:
    steer.rule(LOCAL, REMOTE)
    assert steer.run(frame) == MISS


@pytest.mark.parametrize(("frame", "hit"), [
    (udp4(src="192.0.2.9:1"), True), (udp4(src="10.0.0.2:65535"), True), (udp4(src="10.0.0.2:0"), True),
    (udp4(src="0.0.0.0:68"), True), (udp4(dst="10.0.0.3:11111"), False), (udp4(dst="10.0.0.1:11112"), False),
    (tcp4(), False), (vlan(udp4(), 5), False),
])
def test_three_tuple_takes_every_source(steer: Steer, frame: bytes, hit: bool) -> None:
    rule = steer.rule(LOCAL)
    assert steer.run(frame) == (ring(rule) if hit else MISS)


def test_five_tuple_goes_before_three_tuple(steer: Steer) -> None:
    three = steer.rule(LOCAL, target=0)
    five = steer.rule(LOCAL, REMOTE, target=64)
    assert steer.run(udp4()) == ring(five)
    assert steer.run(udp4(src="10.0.0.2:4243")) == ring(three)


def test_a_five_tuple_for_the_kernel_makes_a_hole_in_a_three_tuple(steer: Steer) -> None:
    three = steer.rule(LOCAL)
    hole = steer.rule(LOCAL, REMOTE, kind=KERNEL)
    assert steer.run(udp4()) == Outcome("pass", "pass-rule", hole)
    assert steer.run(udp4(src="10.0.0.2:4243")) == ring(three)


def test_same_ports_udp_and_tcp(steer: Steer) -> None:
    over_udp, over_tcp = steer.rule(LOCAL, proto=UDP), steer.rule(LOCAL, proto=TCP, kind=DROP)
    assert steer.run(udp4()) == ring(over_udp)
    assert steer.run(tcp4()) == Outcome("drop", "drop", over_tcp)


# multicast

@pytest.mark.parametrize(("group", "frame"), [
    (GROUP, udp4(dst=GROUP)), (GROUP, udp4("192.0.2.9:1", GROUP)), ("224.0.0.1:30001", udp4(dst="224.0.0.1:30001")),
    ("239.255.255.255:30001", udp4(dst="239.255.255.255:30001")), (GROUP6, udp6(dst=GROUP6)),
])
def test_multicast(steer: Steer, group: str, frame: bytes) -> None:
    rule = steer.rule(group, multicast=True)
    assert steer.run(frame) == ring(rule)


@pytest.mark.parametrize("frame", [udp4(dst="239.1.2.4:30001"), udp4(dst="239.1.2.3:30002"), vlan(udp4(dst=GROUP), 5),
                                   tcp4(dst=GROUP)])
def test_another_group_port_vlan_or_protocol(steer: Steer, frame: bytes) -> None:
    steer.rule(GROUP, multicast=True)
    assert steer.run(frame) == MISS


@pytest.mark.parametrize("dst", ["223.255.255.255:1", "240.0.0.1:1", "255.255.255.255:1", "10.0.0.1:1"])
def test_the_multicast_table_is_for_multicast_only(steer: Steer, dst: str) -> None:
    steer.rule(dst, multicast=True)
    assert steer.run(udp4(dst=dst)) == MISS


def test_the_multicast_table_is_for_multicast_only_ipv6(steer: Steer) -> None:
    steer.rule("[fe80::1]:1", multicast=True)
    assert steer.run(udp6(dst="[fe80::1]:1")) == MISS


def test_five_tuple_goes_before_multicast(steer: Steer) -> None:
    group = steer.rule(GROUP, multicast=True)
    kernel = steer.rule(GROUP, REMOTE, kind=KERNEL)
    assert steer.run(udp4(dst=GROUP)) == Outcome("pass", "pass-rule", kernel)
    assert steer.run(udp4("10.0.0.9:9", GROUP)) == ring(group)


# VLANs

@pytest.mark.parametrize(("rule", "frame", "hit"), [
    ((5, 0), vlan(udp4(), 5), True),
    ((5, 0), vlan(udp4(), 5, outer=STAG), True),
    ((5, 0), eth(CTAG) + tag(5, priority=7) + ipv4(udp()), True),
    ((4095, 0), vlan(udp4(), 4095), True),
    ((5, 0), udp4(), False),
    ((5, 0), vlan(udp4(), 6), False),
    ((5, 0), vlan(udp4(), 5, 6), False),
    ((0, 0), vlan(udp4(), 5), False),
    ((0, 0), vlan(udp4(), 0), True),
    ((7, 5), vlan(udp4(), 7, 5), True),
    ((7, 5), vlan(udp4(), 7, 5, outer=STAG), True),
    ((7, 5), vlan(udp4(), 5, 7), False),
    ((7, 5), vlan(udp4(), 7), False),
    ((5, 0), vlan(udp4(), 0, 5), True),
    ((0, 5), vlan(udp4(), 0, 5), False),
])
def test_vlan(steer: Steer, rule: tuple[int, int], frame: bytes, hit: bool) -> None:
    number = steer.rule(LOCAL, vlan=rule[0], vlan2=rule[1])
    assert steer.run(frame) == (ring(number) if hit else MISS)


# actions

def test_drop(steer: Steer) -> None:
    assert steer.run(udp4()) == MISS
    rule = steer.rule(LOCAL, kind=DROP)
    assert steer.run(udp4()) == Outcome("drop", "drop", rule)


def test_an_action_of_a_newer_version_is_the_kernels(steer: Steer) -> None:
    rule = steer.rule(LOCAL, kind=99)
    assert steer.run(udp4()) == Outcome("pass", "pass-rule", rule)


@pytest.mark.parametrize("target", [192, lib.VMH_MAX_XSK - 64, lib.VMH_MAX_XSK, 0xFFFFFFFF])
def test_empty_or_impossible_ring_slot(steer: Steer, target: int) -> None:
    rule = steer.rule(LOCAL, kind=RING, target=target)
    assert steer.run(udp4()) == Outcome("pass", "pass-ring-gone", rule)


def test_the_last_ring_slot(steer: Steer) -> None:
    steer.xsk("xsks", lib.VMH_MAX_XSK - 64)
    rule = steer.rule(LOCAL, target=lib.VMH_MAX_XSK - 64)
    assert steer.run(udp4()) == ring(rule)


def test_a_ring_that_goes_away_gives_its_flow_to_the_kernel(steer: Steer) -> None:
    rule = steer.rule(LOCAL, target=64)
    assert steer.run(udp4()) == ring(rule)
    assert steer.maps["xsks"].delete(index(64))
    assert steer.run(udp4()) == Outcome("pass", "pass-ring-gone", rule)


def test_device(steer: Steer) -> None:
    rule = steer.rule(LOCAL, kind=DEV, target=3)
    assert steer.run(udp4()) == Outcome("pass", "pass-ring-gone", rule)
    steer.maps["devs"].update(index(3), index(socket.if_nametoindex("lo")))
    assert steer.run(udp4()) == Outcome("redirect", "dev", rule)


def test_device_slot_beyond_the_map(steer: Steer) -> None:
    rule = steer.rule(LOCAL, kind=DEV, target=lib.VMH_MAX_DEV)
    assert steer.run(udp4()) == Outcome("pass", "pass-ring-gone", rule)


def test_a_rule_without_a_counter_still_acts(steer: Steer) -> None:
    steer._rules = lib.VMH_MAX_RULES + 5
    steer.rule(LOCAL, kind=DROP)
    steer._rules = 0
    assert steer.run(udp4()) == Outcome("drop", "drop")
