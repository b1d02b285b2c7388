"""A frame cut at every byte of every header goes to the kernel, counted where it broke.

Two kinds of cut. In a *cut* the frame ends early and the lengths still speak of the whole: IP sees that the total
length is beyond the frame. In a *short* one the lengths agree with what is there, so the transport header is missing.
"""

from __future__ import annotations

import errno

import pytest

from bpf.frames import ETH_IPV4, ETH_IPV6, STAG, TCP, eth, ipv4, ipv6, tag, tcp, tcp4, udp, udp4, udp6, vlan
from bpf.harness import Outcome, Steer, kernel_cuts
from vmahybrid.xdp.bpf import BpfError
from vmahybrid.xdp.image import Image

pytestmark = pytest.mark.root

OPTIONS = bytes([1] * 12)  # NOPs


def rule_for_everything(steer: Steer) -> None:
    """Rules and rings for every flow here: only the cut can make the frames pass."""
    for slot in (0, 1):
        steer.xsk("xsks", slot)
    for ids in ((0, 0), (5, 0), (7, 5)):
        for proto in (17, 6):
            for dst in ("10.0.0.1:11111", "[fd00::1]:11111"):
                steer.rule(dst, proto=proto, vlan=ids[0], vlan2=ids[1])


WHOLE = {
    "udp4": udp4(),
    "udp4 without payload": udp4(payload=b""),
    "udp4 one tag": vlan(udp4(), 5),
    "udp4 two tags": vlan(udp4(), 7, 5, outer=STAG),
    "udp4 options": eth() + ipv4(udp(), options=OPTIONS),
    "udp4 all options": eth() + ipv4(udp(), options=bytes([1] * 40)),
    "udp6": udp6(),
    "udp6 two tags": vlan(udp6(), 7, 5),
    "tcp4": tcp4(),
    "tcp4 options": eth() + ipv4(tcp(options=OPTIONS), proto=TCP),
    "tcp6": eth(ETH_IPV6) + ipv6(tcp(), proto=TCP),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_frame_is_redirected(steer: Steer, name: str) -> None:
    rule_for_everything(steer)
    outcome = steer.run(WHOLE[name])
    assert (outcome.verdict, outcome.out) == ("redirect", "ring")
    assert outcome.rule is not None


@pytest.mark.parametrize("length", range(14))
def test_ethernet_cut(image: Image, length: int) -> None:
    """The program sees less than an Ethernet header, or the kernel does not let such a frame near it."""
    with Steer(image, frags=True) as steer:
        rule_for_everything(steer)
        if kernel_cuts(steer):
            assert steer.run(udp4(), linear=length) == Outcome("pass", "pass-short-eth")
        else:
            with pytest.raises(BpfError) as refused:
                steer.test_run(udp4()[:length])
            assert refused.value.errno == errno.EINVAL


def cuts(frame: bytes, start: int, end: int, out: str) -> list[tuple[bytes, int, str]]:
    """(frame, bytes kept, way out) for every length from start to end - 1."""
    return [(frame, length, out) for length in range(start, end)]


ONE_TAG, TWO_TAGS = WHOLE["udp4 one tag"], WHOLE["udp4 two tags"]
CUTS = {
    "ethernet only": cuts(WHOLE["udp4"], 14, 15, "pass-short-ip"),
    "one tag": cuts(ONE_TAG, 14, 18, "pass-short-vlan"),
    "two tags, first": cuts(TWO_TAGS, 14, 18, "pass-short-vlan"),
    "two tags, second": cuts(TWO_TAGS, 18, 22, "pass-short-vlan"),
    "ipv4": cuts(WHOLE["udp4"], 14, 34, "pass-short-ip"),
    "ipv4 behind one tag": cuts(ONE_TAG, 18, 38, "pass-short-ip"),
    "ipv4 behind two tags": cuts(TWO_TAGS, 22, 42, "pass-short-ip"),
    "ipv4 options": cuts(WHOLE["udp4 options"], 34, 46, "pass-short-ip"),
    "ipv6": cuts(WHOLE["udp6"], 14, 54, "pass-short-ip"),
    "ipv6 behind two tags": cuts(WHOLE["udp6 two tags"], 22, 62, "pass-short-ip"),
    "udp over ipv4": cuts(WHOLE["udp4"], 34, 42, "pass-bad-ip"),
    "udp over ipv4 with options": cuts(WHOLE["udp4 options"], 46, 54, "pass-bad-ip"),
    "udp over ipv6": cuts(WHOLE["udp6"], 54, 62, "pass-bad-ip"),
    "udp payload": cuts(WHOLE["udp4"], 42, 51, "pass-bad-ip"),
    "tcp over ipv4": cuts(WHOLE["tcp4"], 34, 54, "pass-bad-ip"),
    "tcp options": cuts(WHOLE["tcp4 options"], 54, 66, "pass-bad-ip"),
    "tcp over ipv6": cuts(WHOLE["tcp6"], 54, 74, "pass-bad-ip"),
}


@pytest.mark.parametrize(("frame", "length", "out"), [
    pytest.param(*case, id=f"{name} at {case[1]}") for name, cases in CUTS.items() for case in cases])
def test_cut(steer: Steer, frame: bytes, length: int, out: str) -> None:
    rule_for_everything(steer)
    assert steer.run(frame[:length]) == Outcome("pass", out)


@pytest.mark.parametrize("length", range(8))
@pytest.mark.parametrize("header", [
    lambda l4: eth() + ipv4(l4), lambda l4: eth() + ipv4(l4, options=OPTIONS), lambda l4: eth(ETH_IPV6) + ipv6(l4),
    lambda l4: eth(0x8100) + tag(5) + ipv4(l4),
], ids=["ipv4", "ipv4 options", "ipv6", "tagged"])
def test_short_udp(steer: Steer, header: object, length: int) -> None:
    rule_for_everything(steer)
    assert callable(header)
    assert steer.run(header(udp()[:length])) == Outcome("pass", "pass-short-l4")


@pytest.mark.parametrize("length", range(20))
@pytest.mark.parametrize("version", [4, 6])
def test_short_tcp(steer: Steer, version: int, length: int) -> None:
    rule_for_everything(steer)
    segment = tcp()[:length]
    frame = eth() + ipv4(segment, proto=TCP) if version == 4 else eth(ETH_IPV6) + ipv6(segment, proto=TCP)
    assert steer.run(frame) == Outcome("pass", "pass-short-l4")


@pytest.mark.parametrize("length", [*range(20), 8])
def test_short_transport_in_padding(steer: Steer, length: int) -> None:
    """Padding to 60 bytes is no transport header: the IP length says where the packet ends."""
    rule_for_everything(steer)
    frame = (eth() + ipv4(tcp()[:length], proto=TCP)).ljust(60, b"\0")
    assert steer.run(frame) == Outcome("pass", "pass-short-l4")


def test_ethertype_is_that_of_the_last_tag() -> None:
    """The builder's own frames: 802.1ad outside, 802.1Q inside, IPv4 last."""
    assert TWO_TAGS[12:22] == bytes.fromhex("88a8 0007 8100 0005") + ETH_IPV4.to_bytes(2, "big")
