"""Switching an interface between generic XDP, tcx and nothing while traffic comes."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from net.service_lab import until
from net.xdp_lab import B, Lab, image, nothing_comes, payload, receive, run, steer, view

from vmahybrid.contracts import action, flow_key, lib
from vmahybrid.errors import Refused
from vmahybrid.steering.reasons import Reason
from vmahybrid.xdp import switch
from vmahybrid.xdp.above import Stack
from vmahybrid.xdp.attach import Attachment, attach
from vmahybrid.xdp.bpf import load_set
from vmahybrid.xdp.holder import attached
from vmahybrid.xdp.port import XdpPort
from vmahybrid.xdp.ring import open_ring

pytestmark = pytest.mark.root

SWITCHES = 40
ROUNDS = 150  # of each of two threads that set a rule and take it away
OFF = "generic XDP, off: no rule"
KEY = flow_key(B, 5001)
HEADER = 8  # bytes of the sequence number


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab() as made:
        yield made


@pytest.fixture
def port(lab: Lab) -> Iterator[XdpPort]:
    with lab.port(switch=True) as opened:
        yield opened


class Sender(threading.Thread):
    """Numbered datagrams to 10.0.0.2:5001, no more than the ring can hold ahead of its reader."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(daemon=True)   # a test that fails leaves it at it
        self.sent = 0
        self.seen = 0
        self.stopped = threading.Event()
        self._sock = sock

    def run(self) -> None:
        while not self.stopped.is_set():
            if self.sent - self.seen > 400:
                time.sleep(0.0005)
                continue
            self._sock.sendto(self.sent.to_bytes(HEADER, "big"), (B, 5001))
            self.sent += 1


@pytest.mark.parametrize("direct", [True, False])
def test_nothing_is_lost_when_it_switches_back_and_forth(lab: Lab, port: XdpPort, direct: bool) -> None:
    ring = open_ring(port, direct_allowed=direct)
    assert ring.near_ifindex
    assert ring.far is direct
    steer(port, ring, 5001)
    by_queue = [0, 0]
    numbers: list[int] = []
    with view(ring) as mine, lab.kernel_socket() as peer:
        sender = Sender(peer)
        sender.start()

        def drain() -> None:
            for queue in range(len(ring.xsk_fds)):
                frames = mine.receive(queue=queue)
                by_queue[queue] += len(frames)
                numbers.extend(int.from_bytes(payload(f)[:HEADER], "big") for f in frames)
            sender.seen = len(numbers)

        for number in range(SWITCHES):
            way = len(ring.xsk_fds) - 1 if port.switch.tcx else 0
            until = by_queue[way] + 300
            deadline = time.monotonic() + 5
            while by_queue[way] < until and time.monotonic() < deadline:
                drain()
            assert by_queue[way] >= until, f"silence in state {number} ({port.hook})"
            switched = port.worker.call(port.switch.to_xdp if port.switch.tcx else port.switch.to_tcx)
            assert switched, port.switch.problem
        sender.stopped.set()
        sender.join()
        deadline = time.monotonic() + 2
        while len(numbers) < sender.sent and time.monotonic() < deadline:
            drain()
    assert sorted(numbers) == list(range(sender.sent))  # none lost, none twice
    assert port.switch.switches == SWITCHES
    assert port.outs()["pass-ring-gone"] == 0


@pytest.fixture
def bare(lab: Lab) -> Iterator[XdpPort]:
    """A port that goes off without rules."""
    with lab.port(switch=True, detach=True) as opened:
        yield opened


def look(port: XdpPort, times: int = switch.CALM_TICKS) -> bool:
    """As the service does, without the time between: did it turn, at the last look and not before?"""
    for _ in range(times - 1):
        assert not port.watch()
    return port.watch() and port.turn()


def there(port: XdpPort) -> dict[str, int]:
    """Programs on the interface, whosever."""
    return port.worker.call(attached, port.ifindex)


@pytest.fixture
def other(lab: Lab, bare: XdpPort) -> Iterator[Attachment]:
    """Another XDP program, that took the interface while nothing was attached."""
    assert look(bare)
    with load_set(image(), ["steer"]) as programs, lab.b.call(
            attach, programs.programs["steer"], bare.ifindex, "generic") as held:
        yield held


@pytest.mark.parametrize("direct", [True, False])
def test_off_without_a_rule_and_back_before_the_first(lab: Lab, bare: XdpPort, direct: bool) -> None:
    ring = open_ring(bare, direct_allowed=direct)
    with view(ring) as mine, lab.kernel_socket() as peer, lab.kernel_socket(5001, "b") as local:
        for number in range(5):
            assert there(bare)
            assert look(bare)
            assert (there(bare), bare.attached, bare.hook) == ({}, False, OFF)
            assert not look(bare)
            before = bare.outs()
            peer.sendto(b"to the kernel", (B, 5001))
            assert local.recv(100) == b"to the kernel"
            assert bare.outs() == before
            steer(bare, ring, 5001)
            assert (list(there(bare)), bare.attached, bare.hook) == (["generic"], True, "generic XDP")
            peer.sendto(b"to the ring", (B, 5001))
            assert [payload(frame) for frame in receive(mine, 1)] == [b"to the ring"]
            assert nothing_comes(local, 0.01)
            assert not look(bare, 3 * switch.CALM_TICKS)
            bare.remove(KEY)
            assert bare.switch.switches == 2 * number + 2
    assert (bare.switch.failures, bare.switch.problem, bare.refused) == (0, "", None)


def test_rings_and_rules_that_came_and_went_begin_the_time_anew(bare: XdpPort) -> None:
    to_ring = open_ring(bare).action(1)
    assert not look(bare, switch.CALM_TICKS - 1)
    bare.install(KEY, to_ring)
    bare.remove(KEY)
    assert not look(bare, switch.CALM_TICKS - 1)
    open_ring(bare)
    assert not look(bare, switch.CALM_TICKS - 1)
    assert look(bare, 1)
    open_ring(bare)
    assert there(bare)


def test_a_rule_that_is_set_in_the_worker(bare: XdpPort) -> None:
    to_ring = open_ring(bare).action(1)
    assert look(bare)
    bare.worker.call(bare.install, KEY, to_ring)
    assert list(there(bare)) == ["generic"]


def test_a_rule_that_came_since_the_look_keeps_it(bare: XdpPort) -> None:
    ring = open_ring(bare)
    assert [bare.watch() for _ in range(switch.CALM_TICKS)][-1]
    steer(bare, ring, 5001)
    assert not bare.turn()
    assert bare.attached


@pytest.mark.parametrize("tcx", [True, False], ids=["with tcx", "without"])
def test_off_does_not_ask_for_tcx(lab: Lab, tcx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From tcx it goes off directly, and comes back in XDP; a kernel without tcx says so still when it is back."""
    if not tcx:
        monkeypatch.setattr(switch, "tcx_missing", lambda _prog: "no tcx here")
    with lab.port(switch=True, detach=True) as port:
        ring = open_ring(port)
        steer(port, ring, 5001)
        assert port.worker.call(port.switch.to_tcx) is tcx
        port.remove(KEY)
        assert [port.watch() for _ in range(switch.CALM_TICKS)][-1]
        assert port.turn()
        assert (there(port), port.hook, port.switch.tcx) == ({}, OFF, False)
        steer(port, ring, 5001)
        assert list(there(port)) == ["generic"]
        assert port.hook == ("generic XDP" if tcx else "generic XDP, no tcx for bulk traffic: no tcx here")


@pytest.mark.parametrize(("mode", "detach"), [("native", True), ("generic", False)])
def test_what_never_goes_off(lab: Lab, mode: str, detach: bool) -> None:
    """A native attachment, whose NIC would reset its queues, and one that the operator wants to stay."""
    with lab.port(mode, switch=True, detach=detach) as port:
        assert not look(port, 3 * switch.CALM_TICKS)
        assert not port.turn()
        assert list(there(port)) == [mode]


def test_every_frame_after_install_is_steered_while_it_goes_off(lab: Lab, bare: XdpPort) -> None:
    """Two threads with a rule each, that come and go, and a third that looks and turns all the time."""
    ring = open_ring(bare)
    seen: set[bytes] = set()
    missed: list[bytes] = []
    ended = threading.Event()

    def turns() -> None:
        while not ended.is_set():
            if bare.watch():
                bare.turn()

    def rules(port: int) -> None:
        with lab.kernel_socket() as peer:
            for number in range(ROUNDS):
                steer(bare, ring, port, rule=port)
                text = f"{port} {number}".encode()
                peer.sendto(text, (B, port))
                deadline = time.monotonic() + 2
                while text not in seen and time.monotonic() < deadline:
                    time.sleep(0.0005)
                if text not in seen:
                    missed.append(text)
                if missed:
                    return
                bare.remove(flow_key(B, port))
                time.sleep(random.random() * 0.01)

    threads = [threading.Thread(target=rules, args=(port,)) for port in (5001, 5002)]
    turner = threading.Thread(target=turns)
    with view(ring) as mine:
        for thread in [*threads, turner]:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            seen |= {payload(frame) for queue in range(len(ring.xsk_fds)) for frame in mine.receive(queue=queue)}
        ended.set()
        turner.join()
    assert missed == []
    assert len(seen) == 2 * ROUNDS
    assert bare.switch.switches > ROUNDS / 2, "it did not go off between the rules"
    assert bare.switch.failures == 0


def test_taken_meanwhile(lab: Lab, bare: XdpPort, other: Attachment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules and rings are refused with the holder's name; when it has gone it is attached, and the rule steers."""
    monkeypatch.setattr(switch, "RETRY_SECONDS", 0.1)
    drop = action(lib.VMH_ACT_DROP, rule=1)
    with pytest.raises(Refused, match="held by process") as refused:
        open_ring(bare)
    assert refused.value.reason == Reason.IF_BUSY
    assert bare.rings == []
    for _ in range(3):
        with pytest.raises(Refused, match="held by process") as refused:
            bare.install(KEY, drop)
    assert list(bare.present()) == [KEY]
    assert bare.refused is not None
    assert (bare.refused.reason, bare.hook) == (Reason.IF_BUSY, f"generic XDP, off: {refused.value.why}")
    with lab.kernel_socket() as peer, lab.kernel_socket(5001, "b") as local:
        peer.sendto(b"to the kernel", (B, 5001))
        assert local.recv(100) == b"to the kernel"
        time.sleep(0.15)
        assert bare.watch()
        assert not bare.turn()
        assert not bare.watch()  # not at once
        assert bare.switch.failures == 1
        other.close()
        time.sleep(0.15)
        assert bare.watch()
        assert bare.turn()
        assert (bare.refused, bare.hook, bare.attached) == (None, "generic XDP", True)
        peer.sendto(b"dropped", (B, 5001))
        assert nothing_comes(local)
    assert bare.outs()["drop"] == 1


def test_free_again_without_a_rule(bare: XdpPort, other: Attachment, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was refused is tried, so that nobody is told of a holder which has gone; then it goes off again."""
    monkeypatch.setattr(switch, "RETRY_SECONDS", 0.0)
    with pytest.raises(Refused):
        open_ring(bare)
    other.close()
    assert bare.watch()
    assert bare.turn()
    assert (bare.refused, bare.attached) == (None, True)
    assert look(bare, switch.CALM_TICKS - 1)
    assert bare.hook == OFF


def test_a_ring_and_a_rule_after_the_interface_has_gone(lab: Lab, bare: XdpPort) -> None:
    to_ring = open_ring(bare).action(1)
    assert look(bare)
    run(lab.a, "ip", "link", "del", "va")
    with pytest.raises(Refused) as refused:
        bare.install(KEY, to_ring)
    assert refused.value.reason == Reason.IF_GONE
    bare.close()
    with pytest.raises(Refused) as refused:
        bare.install(KEY, to_ring)
    assert refused.value.reason == Reason.IF_GONE
    assert not bare.watch()


@pytest.fixture
def bridge(lab: Lab) -> str:
    """Above the interface of the rings, which is part of it."""
    run(lab.b, "ip", "link", "add", "br0", "type", "bridge")
    run(lab.b, "ip", "link", "set", "br0", "up")
    run(lab.b, "ip", "link", "set", "vb", "master", "br0")
    return "br0"


def test_ours_above_steps_aside(lab: Lab, bridge: str) -> None:
    """The kernel takes no program on an interface while one above it has one."""
    stack = Stack()
    with XdpPort.open(lab.b, image(), bridge, detach=True, stack=stack) as upper:
        upper.install(KEY, action(lib.VMH_ACT_DROP, rule=1))
        with XdpPort.open(lab.b, image(), "vb", detach=True, stack=stack) as lower:
            for _ in range(2):
                for port in (upper, lower):
                    assert lab.b.call(attached, port.ifindex).keys() == {"generic"}
                    assert port.hook == "generic XDP" and port.refused is None
                lower.switch.off = True  # as the port does
                lab.b.call(lower.switch.to_off)
                assert not lab.b.call(attached, lower.ifindex)
                lower.install(KEY, action(lib.VMH_ACT_PASS, rule=2))
        with lab.kernel_socket() as peer:
            peer.sendto(b"x", (B, 5001))
            until(lambda: upper.hits(1) == (1, 43))


def test_another_s_above_is_named(lab: Lab, bridge: str) -> None:
    with load_set(image(), ["steer"]) as programs:
        index = lab.b.call(socket.if_nametoindex, bridge)
        theirs = lab.b.call(attach, programs.programs["steer"], index)
        with theirs:
            with pytest.raises(Refused, match=r"an interface above it \(br0\) has an XDP program") as refused:
                XdpPort.open(lab.b, image(), "vb", stack=Stack())
            assert refused.value.reason is Reason.IF_BUSY
            assert lab.b.call(attached, index)
        with XdpPort.open(lab.b, image(), "vb"):
            pass
