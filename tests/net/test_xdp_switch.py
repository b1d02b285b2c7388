"""Switching an interface between generic XDP and tcx while traffic comes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from net.xdp_lab import B, Lab, payload, steer, view

from vmahybrid.xdp.port import XdpPort
from vmahybrid.xdp.ring import open_ring

pytestmark = pytest.mark.root

SWITCHES = 40
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
        super().__init__()
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
