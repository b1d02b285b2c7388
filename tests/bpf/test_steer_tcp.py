"""A rule for a TCP port: what the kernel has a connection of is the kernel's, all else the ring's."""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bpf.frames import (
    DF,
    ETH_IPV6,
    FRAGMENT,
    LOCAL,
    LOCAL6,
    MF,
    REMOTE6,
    TCP,
    UDP,
    eth,
    ipv4,
    ipv6,
    tcp,
    tcp4,
    tcp6,
    udp,
    udp4,
    udp6,
    vlan,
)
from bpf.harness import DEV, DROP, KERNEL, MTU, RING, Outcome, Steer, TcSteer, index
from vmahybrid.contracts import addr_to_bytes, lib
from vmahybrid.net.netns import NetnsWorker
from vmahybrid.net.tcpfin import sealed
from vmahybrid.xdp.image import Image

pytestmark = pytest.mark.root

PASS = Outcome("pass", "pass-kernel-tcp")
SYN, ACK, SYN_ACK, RST, PSH = 0x02, 0x10, 0x12, 0x04, 0x08
LISTEN = int(lib.VMH_ACT_F_LISTEN)


@pytest.fixture(params=[Steer, TcSteer])
def either(request: pytest.FixtureRequest, image: Image) -> Iterator[Steer]:
    """Both programs look at the kernel's sockets of their namespace: in a test run, ours."""
    with request.param(image) as steer:
        if isinstance(steer, TcSteer):
            steer.near(0)
        else:
            steer.xsk("xsks", 0)
        yield steer


# where the kernel listens, and by which address it is connected to: the last one over IPv4 to an AF_INET6 socket
HOSTS = [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1")]


@pytest.fixture(params=HOSTS, ids=["ipv4", "ipv6", "both"])
def hosts(request: pytest.FixtureRequest) -> tuple[str, str]:
    listens, connects = request.param
    return listens, connects


def text(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def name(sock: socket.socket, peer: bool = False) -> str:
    address, port = (sock.getpeername() if peer else sock.getsockname())[:2]
    return text(address.removeprefix("::ffff:"), port)


def segment(src: str, dst: str, flags: int, size: int = 0, numbers: tuple[int, int] = (1, 1)) -> bytes:
    v6 = src.startswith("[")
    frame = (tcp6 if v6 else tcp4)(src, dst, bytes(size))
    at = 14 + (40 if v6 else 20)
    return frame[:at + 4] + struct.pack("!2I2B", *numbers, 5 << 4, flags) + frame[at + 14:]


@contextlib.contextmanager
def kernel(hosts: tuple[str, str] = HOSTS[0]) -> Iterator[tuple[socket.socket, socket.socket, socket.socket]]:
    """A listener of the kernel, and both ends of a connection to it."""
    family = socket.AF_INET6 if ":" in hosts[0] else socket.AF_INET
    with socket.create_server((hosts[0], 0), family=family, dualstack_ipv6=hosts[0] == "::") as listener, \
            socket.create_connection((hosts[1], listener.getsockname()[1])) as there:
        here, _ = listener.accept()
        with here:
            yield listener, here, there


@pytest.mark.parametrize("flags", [SYN, ACK, SYN_ACK, RST])
@pytest.mark.parametrize("listens", [0, LISTEN])
def test_nobody_has_it(either: Steer, hosts: tuple[str, str], flags: int, listens: int) -> None:
    rule = either.rule(text(hosts[1], 9), proto=TCP, flags=listens)
    assert either.run(segment(text(hosts[1], 4000), text(hosts[1], 9), flags)) == Outcome("redirect", "ring", rule)


@pytest.mark.parametrize("flags", [SYN, ACK, RST])
@pytest.mark.parametrize("listens", [0, LISTEN])
@pytest.mark.parametrize("kind", [RING, DEV])
def test_the_kernels_connection(either: Steer, hosts: tuple[str, str], flags: int, listens: int, kind: int) -> None:
    with kernel(hosts) as (_, here, _there):
        either.rule(name(here), proto=TCP, flags=listens, kind=kind)
        assert either.run(segment(name(here, peer=True), name(here), flags)) == PASS


def test_one_that_closes(either: Steer, hosts: tuple[str, str]) -> None:
    with kernel(hosts) as (_, here, there):
        either.rule(name(here), proto=TCP, flags=LISTEN)
        names = name(here, peer=True), name(here)
        here.close()
        assert there.recv(1) == b""
        assert either.run(segment(*names, ACK)) == PASS  # FIN_WAIT2
        there.close()
        assert either.run(segment(*names, ACK)) == PASS  # TIME_WAIT


@pytest.mark.parametrize(("listens", "flags", "ring"), [
    (LISTEN, SYN, True), (LISTEN, ACK, True), (LISTEN, RST, True),
    (0, SYN, False), (0, ACK, True), (0, SYN_ACK, True), (0, RST, True),
])
def test_the_kernel_listens(either: Steer, hosts: tuple[str, str], listens: int, flags: int, ring: bool) -> None:
    """Where no ring listens SYNs are the kernel's; what it would answer by a reset never is."""
    with kernel(hosts) as (_, here, _there):
        rule = either.rule(name(here), proto=TCP, flags=listens)
        seen = either.run(segment(text(hosts[1], 1), name(here), flags))
        assert seen == (Outcome("redirect", "ring", rule) if ring else PASS)


def cookie(hosts: tuple[str, str], port: int) -> tuple[int, int]:
    """The numbers of an ACK that answers a cookie which the listener gave to port 4000: nobody there says so."""
    four = ":" not in hosts[1]
    source = addr_to_bytes(hosts[1])
    syn = struct.pack("!2H2I2B3H", 4000, port, 1000, 0, 5 << 4, SYN, 512, 0, 0)
    with socket.socket(socket.AF_INET if four else socket.AF_INET6, socket.SOCK_RAW, TCP) as raw:
        raw.settimeout(5)
        raw.sendto(sealed(syn, source, source), (hosts[1], 0))
        while True:
            answer = raw.recv(100)[20 if four else 0:]
            if answer[13] == SYN_ACK and answer[:4] == struct.pack("!2H", port, 4000):
                return 1001, struct.unpack("!I", answer[4:8])[0] + 1


@pytest.mark.parametrize("listens", [0, LISTEN])
def test_the_kernels_cookies(either: Steer, hosts: tuple[str, str], listens: int) -> None:
    """The kernel has nothing of such a connection, and knows it by its ACK: that is the kernel's, and no other one."""
    def look() -> None:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        for always in (2, 0):
            Path("/proc/sys/net/ipv4/tcp_syncookies").write_text(str(always))
            with kernel(hosts) as (listener, here, _there):
                rule = either.rule(name(here), proto=TCP, flags=listens)
                numbers = cookie(hosts, listener.getsockname()[1])
                source = text(hosts[1], 4000)
                ring = Outcome("redirect", "ring", rule)
                for flags, payload in ((ACK, 0), (ACK | PSH, 9)):
                    frame = segment(source, name(here), flags, payload, numbers)
                    assert either.run(frame) == (PASS if always else ring)
                other = numbers[0], numbers[1] + 64  # the lowest bits stand for an MSS
                for wrong in ((source, name(here), ACK, 0, other), (source, name(here), RST | ACK, 0, numbers),
                              (text(hosts[1], 4001), name(here), ACK, 0, numbers)):
                    assert either.run(segment(*wrong)) == ring

    with contextlib.closing(NetnsWorker.open_private()) as worker:
        worker.call(look)


def test_rules_of_a_connection_are_stronger(either: Steer, hosts: tuple[str, str]) -> None:
    """Its kernel socket is parked."""
    with kernel(hosts) as (_, here, _there):
        either.rule(name(here), proto=TCP, flags=LISTEN)
        rule = either.rule(name(here), name(here, peer=True), proto=TCP)
        assert either.run(segment(name(here, peer=True), name(here), ACK)) == Outcome("redirect", "ring", rule)


@pytest.mark.parametrize(("kind", "verdict", "out"), [(DROP, "drop", "drop"), (KERNEL, "pass", "pass-rule")])
def test_rules_of_the_operator(either: Steer, kind: int, verdict: str, out: str) -> None:
    with kernel() as (_, here, _):
        rule = either.rule(name(here), proto=TCP, kind=kind)
        assert either.run(segment(name(here, peer=True), name(here), ACK)) == Outcome(verdict, out, rule)


def test_datagrams_are_not_asked_about(either: Steer, hosts: tuple[str, str]) -> None:
    with kernel(hosts) as (_, here, _there):
        rule = either.rule(name(here))
        frame = (udp6 if hosts[1] == "::1" else udp4)(name(here, peer=True), name(here))
        assert either.run(frame) == Outcome("redirect", "ring", rule)


def configure(steer: Steer, five: bool = False) -> None:
    steer.configure(lib.VMH_PORT_F_TCP | (lib.VMH_PORT_F_5T if five else 0))


TOO_LONG = Outcome("pass", "pass-too-long")


def test_too_long_for_a_ring(steer: Steer, hosts: tuple[str, str]) -> None:
    """The kernel would reset a connection that it does not know, and drops what comes for one that is parked. So the
    ring gets the headers, and the shim knows."""
    (one, two), nobody = (text(hosts[1], port) for port in (4000, 9)), text(hosts[1], 10)
    long = segment(one, two, ACK, MTU)
    steer.xsk("xsks", 0)
    rule = steer.rule(two, proto=TCP, flags=LISTEN)
    assert steer.run(long) == TOO_LONG  # nobody said that there are such rules
    configure(steer)
    assert steer.run(long) == Outcome("redirect", "ring-too-long", rule)
    assert steer.run(segment(one, nobody, ACK, MTU)) == TOO_LONG
    assert steer.run(udp4("127.0.0.1:4000", "127.0.0.1:9", bytes(MTU))) == TOO_LONG
    assert steer.run(eth() + ipv4(bytes(MTU), proto=TCP, fragment=1)) == TOO_LONG
    with kernel(hosts) as (_, here, _there):
        steer.rule(name(here), proto=TCP, flags=LISTEN)
        frame = segment(name(here, peer=True), name(here), ACK, MTU)
        configure(steer)
        assert steer.run(frame) == TOO_LONG
        rule = steer.rule(two, one, proto=TCP)
        assert steer.run(long) == TOO_LONG  # 5-tuples as well: only if somebody said so
        configure(steer, five=True)
        assert steer.run(long) == Outcome("redirect", "ring-too-long", rule)
        assert steer.run(frame) == TOO_LONG


def fragment6(payload: bytes, place: int, proto: int = TCP) -> bytes:
    """``place``: the offset in bytes, and 1 if more follows."""
    return eth(ETH_IPV6) + ipv6(struct.pack("!BxHI", proto, place, 7) + payload, proto=FRAGMENT)


def fragment4(payload: bytes, place: int, proto: int = TCP) -> bytes:
    return eth() + ipv4(payload, proto=proto, fragment=place)


FIRST = {
    LOCAL: [fragment4(tcp(), MF), fragment4(tcp(), DF | MF), vlan(fragment4(tcp(), MF), 0)],
    LOCAL6: [fragment6(tcp(src=REMOTE6, dst=LOCAL6), place) for place in (1, 0)],  # 0: all there is (RFC 6946)
}
OTHERS = [
    (fragment4(tcp(), MF | 1), "pass-fragment"), (fragment4(tcp(), 1), "pass-fragment"),
    (fragment4(udp(), MF, UDP), "pass-fragment"), (fragment4(tcp()[:19], MF), "pass-short-l4"),
    (fragment4(tcp(doff=15), MF), "pass-bad-l4"), (fragment6(tcp(), 8), "pass-ip6-ext"),
    (fragment6(tcp(), 9), "pass-ip6-ext"), (fragment6(udp(dst=LOCAL6), 1, UDP), "pass-ip6-ext"),
    (fragment6(b"", 1)[:-2], "pass-bad-ip"), (eth(ETH_IPV6) + ipv6(bytes(7), proto=FRAGMENT), "pass-ip6-ext"),
    (fragment6(bytes(8) + tcp(), 1, FRAGMENT), "pass-ip6-ext"), (fragment6(tcp()[:19], 1), "pass-short-l4"),
]


@pytest.mark.parametrize("to", [LOCAL, LOCAL6])
def test_the_first_fragment_of_a_segment(either: Steer, to: str) -> None:
    """It goes where a whole one would: the ring's program has to know."""
    rule = either.rule(to, proto=TCP, flags=LISTEN)
    either.configure(0)
    for frame in FIRST[to]:  # nobody said that there are such rules
        assert either.run(frame) == Outcome("pass", "pass-fragment" if to == LOCAL else "pass-ip6-ext")
    configure(either)
    for frame in FIRST[to]:
        assert either.run(frame) == Outcome("redirect", "ring", rule)
    either.rule(to)
    configure(either)
    for frame, way in OTHERS:
        assert either.run(frame) == Outcome("pass", way)


HOP_BY_HOP, ROUTING, AH, DEST_OPTS = 0, 43, 51, 60
FOR_US = {"src": REMOTE6, "dst": LOCAL6}
SYN_SEGMENT = bytearray(tcp(**FOR_US))
SYN_SEGMENT[13] = 2


def extended(*kinds: int, then: int = TCP, units: int = 0, segment: bytes = tcp(**FOR_US)) -> bytes:
    """IPv6 with a header of each kind before the segment, of ``units`` times 8 bytes more than the least."""
    following = (*kinds[1:], then)
    headers = b"".join(bytes([kind, units]) + bytes(6 + 8 * units) for kind in following)
    return eth(ETH_IPV6) + ipv6(headers + segment, proto=kinds[0], **FOR_US)


def test_headers_between_ipv6_and_a_segment(either: Steer) -> None:
    """Three at the most; who opens a connection with them does so with the kernel."""
    rule = either.rule(LOCAL6, proto=TCP, flags=LISTEN)
    either.rule(LOCAL6)
    taken = [extended(DEST_OPTS), extended(HOP_BY_HOP, units=3), extended(ROUTING),
             extended(HOP_BY_HOP, ROUTING, DEST_OPTS), extended(DEST_OPTS, FRAGMENT)]
    left = [extended(HOP_BY_HOP, DEST_OPTS, ROUTING, DEST_OPTS), extended(AH), extended(DEST_OPTS, AH),
            extended(DEST_OPTS, then=UDP, segment=udp(dst=LOCAL6)), extended(DEST_OPTS, segment=bytes(SYN_SEGMENT)),
            extended(DEST_OPTS, segment=tcp(**FOR_US)[:19]), extended(DEST_OPTS, units=200, segment=b"")[:300],
            eth(ETH_IPV6) + ipv6(b"\x06", proto=DEST_OPTS), eth(ETH_IPV6) + ipv6(b"\x06\1" + bytes(9), proto=DEST_OPTS)]
    either.configure(0)
    for frame in taken:
        assert either.run(frame) == Outcome("pass", "pass-ip6-ext")
    configure(either)
    for frame in taken:
        assert either.run(frame) == Outcome("redirect", "ring", rule)
    for number, frame in enumerate(left):
        assert either.run(frame) == Outcome("pass", "pass-bad-ip" if number == 6 else "pass-ip6-ext"), number


def test_the_first_fragment_of_the_kernel_s_segment(either: Steer, hosts: tuple[str, str]) -> None:
    with kernel(hosts) as (_, here, _there):
        either.rule(name(here), proto=TCP, flags=LISTEN)
        configure(either)
        src, dst = name(here, peer=True), name(here)
        if hosts[1] == "::1":
            packet = ipv6(struct.pack("!BxHI", TCP, 1, 7) + tcp(src=src, dst=dst), src=src, dst=dst, proto=FRAGMENT)
            assert either.run(eth(ETH_IPV6) + packet) == PASS
        else:
            packet = ipv4(tcp(src=src, dst=dst), src=src, dst=dst, proto=TCP, fragment=MF)
            assert either.run(eth() + packet) == PASS


def test_too_long_and_no_ring(steer: Steer) -> None:
    long = segment("127.0.0.1:4000", "127.0.0.1:9", ACK, MTU)
    for kind in (DROP, KERNEL):
        steer.rule("127.0.0.1:9", proto=TCP, kind=kind)
        configure(steer)
        assert steer.run(long) == TOO_LONG


@pytest.mark.parametrize("vids", [(5,), (7, 5), (0,)])
def test_too_long_with_tags(steer: Steer, vids: tuple[int, ...]) -> None:
    """What is cut off is counted from the TCP header on."""
    outer, inner = ([vid for vid in vids if vid] + [0, 0])[:2]
    steer.xsk("xsks", 0)
    rule = steer.rule("10.0.0.1:9", "10.0.0.2:4000", proto=TCP, vlan=outer, vlan2=inner)
    configure(steer, five=True)
    frame = vlan(tcp4("10.0.0.2:4000", "10.0.0.1:9", bytes(MTU)), *vids)
    assert steer.run(frame) == Outcome("redirect", "ring-too-long", rule)


@pytest.mark.parametrize("kind", [RING, DEV])
@pytest.mark.parametrize("frags", [False, True])
def test_a_ring_that_takes_long_frames(image: Image, frags: bool, kind: int) -> None:
    """Whole, as any other frame; datagrams are the kernel's."""
    with Steer(image, frags=frags) as steer:
        steer.xsk("xsks", 0)
        steer.maps["devs"].update(index(0), index(1))
        long = tcp4("10.0.0.2:4000", "10.0.0.1:9", bytes(60000 if frags else 3000))
        rule = steer.rule("10.0.0.1:9", "10.0.0.2:4000", proto=TCP, kind=kind)
        steer.rule("10.0.0.1:9", kind=kind)
        configure(steer, five=True)
        assert steer.run(long) == Outcome("redirect", "ring-too-long", rule)
        steer.configure(lib.VMH_PORT_F_CHAINS | lib.VMH_PORT_F_5T)
        assert steer.run(long) == TOO_LONG  # nobody said that there are rules of TCP
        steer.configure(lib.VMH_PORT_F_CHAINS | lib.VMH_PORT_F_TCP | lib.VMH_PORT_F_5T)
        assert steer.run(long) == Outcome("redirect", "ring" if kind == RING else "dev", rule)
        assert steer.run(udp4("10.0.0.2:4000", "10.0.0.1:9", bytes(MTU))) == TOO_LONG
        rule = steer.rule("10.0.0.1:9", "10.0.0.2:4000", proto=TCP, kind=DROP)
        steer.configure(lib.VMH_PORT_F_CHAINS | lib.VMH_PORT_F_TCP | lib.VMH_PORT_F_5T)
        assert steer.run(long) == TOO_LONG


@pytest.mark.parametrize("kind", [RING, DEV])
def test_super_packets_for_a_ring_that_takes_them(image: Image, kind: int) -> None:
    with TcSteer(image) as steer:
        steer.near(0 if kind == RING else int(lib.VMH_NEAR_DEV))
        rule = steer.rule("127.0.0.1:9", proto=TCP, flags=LISTEN, kind=kind)
        steer.rule("127.0.0.1:9", kind=kind)
        steer.configure(lib.VMH_PORT_F_CHAINS | lib.VMH_PORT_F_TCP)
        for size in (1000, 3000):
            frame = segment("127.0.0.1:4000", "127.0.0.1:9", ACK, size)
            assert steer.run_gso(frame, 100) == Outcome("redirect", "ring" if kind == RING else "dev", rule)
        assert steer.run_gso(udp4("127.0.0.1:4000", "127.0.0.1:9", bytes(1000)), 100) == TOO_LONG


@pytest.mark.parametrize("frags", [False, True])
def test_a_frame_of_64_kilobytes(image: Image, frags: bool) -> None:
    """In pieces, too, which is how the kernel has them with a program that takes pieces."""
    with Steer(image, frags=frags) as steer:
        steer.xsk("xsks", 0)
        rule = steer.rule("10.0.0.1:9", "10.0.0.2:4000", proto=TCP)
        configure(steer, five=True)
        payload = bytes(60000 if frags else 3000)
        assert steer.run(tcp4("10.0.0.2:4000", "10.0.0.1:9", payload)) == Outcome("redirect", "ring-too-long", rule)


def test_super_packets_at_tcx(image: Image) -> None:
    with TcSteer(image) as steer:
        steer.near(0)
        rule = steer.rule("127.0.0.1:9", proto=TCP, flags=LISTEN)
        frame = segment("127.0.0.1:4000", "127.0.0.1:9", ACK, 1000)
        assert steer.run_gso(frame, 100) == TOO_LONG
        configure(steer)
        assert steer.run_gso(frame, 100) == Outcome("redirect", "ring-too-long", rule)
        datagrams = udp4("127.0.0.1:4000", "127.0.0.1:9", bytes(1000))
        assert steer.run_gso(datagrams, 100) == TOO_LONG
        with kernel() as (_, here, _):
            steer.rule(name(here), proto=TCP, flags=LISTEN)
            configure(steer)
            frame = segment(name(here, peer=True), name(here), ACK, 1000)
            assert steer.run_gso(frame, 100) == TOO_LONG
