"""Windows that are shut, or tiny, of a peer that is made of frames, on the kernel and on a ring: nothing goes beyond
them, and a window that opens without a word (its announcement is lost) is found by probes."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from net.frame_peer import ACK, PSH, FramePeer
from net.test_tcp_every_state import PORTS, Scene, Stage
from net.test_tcp_shim import bare_pair, served  # noqa: F401
from net.test_tcp_syn import known, nobody  # noqa: F401

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service
from vmahybrid.net.netns import NetnsWorker

pytestmark = [pytest.mark.root, pytest.mark.parametrize("softverbs", ["xdp"], indirect=True)]

SENT = "0123456789" * 40


@pytest.fixture
def scene(service: Service, netns_pair: Sandbox, shim: bool) -> Iterator[Scene]:
    with NetnsWorker.open_path(netns_pair.a.netns) as worker:
        stage = Stage(service, netns_pair, worker, shim)
        peer = FramePeer(stage.sock, ("02:00:00:00:00:55", stage.to.mac), (stage.own, stage.to.address), next(PORTS))
        made = Scene(stage, peer)
        try:
            made.comes_to("ESTABLISHED")
            stage.is_where_it_should(made.open)
            yield made
        finally:
            made.ends()
            stage.close()


def announce(scene: Scene, window: int) -> None:
    """With a byte: nothing that is as new as what came before makes a window smaller."""
    scene.peer.send(PSH | ACK, scene.seq, scene.ack, b"w", window=window)
    scene.seq += 1
    while (scene.peer.receive().ack - scene.seq) % 2**32:   # a busy machine may be late: it has to know it
        pass


def receive(scene: Scene, first: int, window: int, seconds: float) -> tuple[int, int]:
    """How far the stream came within a window that begins with what is acknowledged, and how many segments came."""
    end, count, until = first, 0, time.monotonic() + seconds
    while time.monotonic() < until and (not window or end < first + window):
        try:
            got = scene.peer.receive()
        except TimeoutError:
            continue
        count += 1
        if got.data and got.seq <= end:
            # one byte beyond a shut window is a probe
            assert got.seq + len(got.data) <= first + max(window, 1), (got, first, window)
            end = max(end, min(got.seq + len(got.data), first + window))
    return end, count


@pytest.mark.parametrize("shim", [False, True], ids=["kernel", "ring"])
def test_shut_window_that_opens_unseen(scene: Scene, shim: bool) -> None:
    first = scene.ack
    announce(scene, 8192)
    announce(scene, 0)
    assert scene.program.call("s", "send", SENT) == len(SENT)
    _, probes = receive(scene, first, 0, 1.2)
    assert probes >= 1, "no probe"      # the announcement of its window is lost; whoever asks is told
    deadline = time.monotonic() + 10
    while True:
        assert time.monotonic() < deadline, "no probe any more"
        try:
            scene.peer.receive()
            break
        except TimeoutError:
            pass
    scene.peer.send(ACK, scene.seq, first, window=8192)
    assert receive(scene, first, len(SENT), 3)[0] == first + len(SENT)


@pytest.mark.parametrize("window", [1, 7, 100])
@pytest.mark.parametrize("shim", [False, True], ids=["kernel", "ring"])
def test_tiny_window(scene: Scene, shim: bool, window: int) -> None:
    """All comes through it, piece by piece, and nothing beside it."""
    sent = SENT[:3 * window]
    first = scene.ack
    announce(scene, 8192)
    announce(scene, window)
    assert scene.program.call("s", "send", sent) == len(sent)
    end, begun = first, time.monotonic()
    while end < first + len(sent):
        assert time.monotonic() - begun < 15, (first, end)
        end, _ = receive(scene, end, min(window, first + len(sent) - end), 1)
        scene.peer.send(ACK, scene.seq, end, window=window)
    scene.ack = scene.heard = end
