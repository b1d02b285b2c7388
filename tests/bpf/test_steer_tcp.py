"""A rule for a TCP port: what the kernel has a connection of is the kernel's, all else the ring's."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator

import pytest

from bpf.frames import TCP, eth, ipv4, tcp4, udp4
from bpf.harness import DEV, DROP, KERNEL, MTU, RING, Outcome, Steer, TcSteer
from vmahybrid.contracts import lib
from vmahybrid.xdp.image import Image

pytestmark = pytest.mark.root

PASS = Outcome("pass", "pass-kernel-tcp")
SYN, ACK, SYN_ACK, RST = 0x02, 0x10, 0x12, 0x04
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


def name(sock: socket.socket, peer: bool = False) -> str:
    address, port = sock.getpeername() if peer else sock.getsockname()
    return f"{address}:{port}"


def segment(src: str, dst: str, flags: int, size: int = 0) -> bytes:
    frame = tcp4(src, dst, bytes(size))
    at = 14 + 20 + 13
    return frame[:at] + struct.pack("B", flags) + frame[at + 1:]


@contextlib.contextmanager
def kernel() -> Iterator[tuple[socket.socket, socket.socket, socket.socket]]:
    """A listener of the kernel, and both ends of a connection to it."""
    with socket.create_server(("127.0.0.1", 0)) as listener, \
            socket.create_connection(listener.getsockname()) as there:
        here, _ = listener.accept()
        with here:
            yield listener, here, there


@pytest.mark.parametrize("flags", [SYN, ACK, SYN_ACK, RST])
@pytest.mark.parametrize("listens", [0, LISTEN])
def test_nobody_has_it(either: Steer, flags: int, listens: int) -> None:
    rule = either.rule("127.0.0.1:9", proto=TCP, flags=listens)
    assert either.run(segment("127.0.0.1:4000", "127.0.0.1:9", flags)) == Outcome("redirect", "ring", rule)


@pytest.mark.parametrize("flags", [SYN, ACK, RST])
@pytest.mark.parametrize("listens", [0, LISTEN])
@pytest.mark.parametrize("kind", [RING, DEV])
def test_the_kernels_connection(either: Steer, flags: int, listens: int, kind: int) -> None:
    with kernel() as (listener, here, _):
        either.rule(name(listener), proto=TCP, flags=listens, kind=kind)
        assert either.run(segment(name(here, peer=True), name(here), flags)) == PASS


def test_one_that_closes(either: Steer) -> None:
    with kernel() as (listener, here, there):
        either.rule(name(listener), proto=TCP, flags=LISTEN)
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
def test_the_kernel_listens(either: Steer, listens: int, flags: int, ring: bool) -> None:
    """Where no ring listens SYNs are the kernel's; what it would answer by a reset never is."""
    with kernel() as (listener, _, _):
        rule = either.rule(name(listener), proto=TCP, flags=listens)
        seen = either.run(segment("127.0.0.1:1", name(listener), flags))
        assert seen == (Outcome("redirect", "ring", rule) if ring else PASS)


def test_rules_of_a_connection_are_stronger(either: Steer) -> None:
    """Its kernel socket is parked."""
    with kernel() as (_, here, _):
        either.rule(name(here), proto=TCP, flags=LISTEN)
        rule = either.rule(name(here), name(here, peer=True), proto=TCP)
        assert either.run(segment(name(here, peer=True), name(here), ACK)) == Outcome("redirect", "ring", rule)


@pytest.mark.parametrize(("kind", "verdict", "out"), [(DROP, "drop", "drop"), (KERNEL, "pass", "pass-rule")])
def test_rules_of_the_operator(either: Steer, kind: int, verdict: str, out: str) -> None:
    with kernel() as (_, here, _):
        rule = either.rule(name(here), proto=TCP, kind=kind)
        assert either.run(segment(name(here, peer=True), name(here), ACK)) == Outcome(verdict, out, rule)


def test_datagrams_are_not_asked_about(either: Steer) -> None:
    with kernel() as (_, here, _):
        rule = either.rule(name(here))
        assert either.run(udp4(name(here, peer=True), name(here))) == Outcome("redirect", "ring", rule)


def configure(steer: Steer, five: bool = False) -> None:
    steer.configure(lib.VMH_PORT_F_TCP3 | (lib.VMH_PORT_F_5T if five else 0))


def test_too_long_for_a_ring(steer: Steer) -> None:
    """The kernel would reset a connection that it does not know."""
    long = segment("127.0.0.1:4000", "127.0.0.1:9", ACK, MTU)
    steer.rule("127.0.0.1:9", proto=TCP, flags=LISTEN)
    assert steer.run(long) == Outcome("pass", "pass-too-long")  # nobody said that there are such rules
    configure(steer)
    assert steer.run(long) == Outcome("drop", "drop-too-long")
    assert steer.run(segment("127.0.0.1:4000", "127.0.0.1:10", ACK, MTU)) == Outcome("pass", "pass-too-long")
    assert steer.run(udp4("127.0.0.1:4000", "127.0.0.1:9", bytes(MTU))) == Outcome("pass", "pass-too-long")
    assert steer.run(eth() + ipv4(bytes(MTU), proto=TCP, fragment=1)) == Outcome("pass", "pass-too-long")
    with kernel() as (_, here, _):
        steer.rule(name(here), proto=TCP, flags=LISTEN)
        frame = segment(name(here, peer=True), name(here), ACK, MTU)
        assert steer.run(frame) == Outcome("pass", "pass-too-long")
        steer.rule("127.0.0.1:9", "127.0.0.1:4000", proto=TCP)
        configure(steer, five=True)
        assert steer.run(long) == Outcome("pass", "pass-too-long")  # the parked socket drops it


def test_super_packets_at_tcx(image: Image) -> None:
    with TcSteer(image) as steer:
        steer.near(0)
        steer.rule("127.0.0.1:9", proto=TCP, flags=LISTEN)
        frame = segment("127.0.0.1:4000", "127.0.0.1:9", ACK, 1000)
        assert steer.run_gso(frame, 100) == Outcome("pass", "pass-too-long")
        configure(steer)
        assert steer.run_gso(frame, 100) == Outcome("drop", "drop-too-long")
        datagrams = udp4("127.0.0.1:4000", "127.0.0.1:9", bytes(1000))
        assert steer.run_gso(datagrams, 100) == Outcome("pass", "pass-too-long")
        with kernel() as (_, here, _):
            steer.rule(name(here), proto=TCP, flags=LISTEN)
            configure(steer)
            frame = segment(name(here, peer=True), name(here), ACK, 1000)
            assert steer.run_gso(frame, 100) == Outcome("pass", "pass-too-long")
