"""An end or a reset of the peer at every state: what the program sees, and whether the peer is answered by a reset, on
the kernel and on a ring (VMA_HYBRID_TCP=offload). The peer is made of frames."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import pytest
from net.frame_peer import ACK, FIN, PSH, RST, SYN, FramePeer
from net.service_lab import Api
from net.test_tcp_shim import bare_pair, served  # noqa: F401
from net.test_tcp_syn import Calls, known, nobody  # noqa: F401

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service
from vmahybrid.net.netns import NetnsWorker

pytestmark = pytest.mark.root

QUIET = 0.06  # seconds in which the other side has said what it says
ISN = 1 << 28
PORTS = itertools.count(20000)
EVENTS = {  # flags, sequence number beside the next one, data
    "FIN": (FIN | ACK, 0, b""), "data and FIN": (FIN | PSH | ACK, 0, b"0123456789"),
    "FIN before its turn": (FIN | ACK, 10, b""), "FIN without ACK": (FIN, 0, b""),
    "RST": (RST, 0, b""), "RST and ACK": (RST | ACK, 0, b""), "RST of another number": (RST, 100, b""),
    "RST of an old number": (RST, -5, b""),
    "data, corrupted": (PSH | ACK, 0, b"0123456789"),
    "FIN, corrupted": (FIN | ACK, 0, b""),
    "RST, corrupted": (RST | ACK, 0, b""), "SYN, corrupted": (SYN, 0, b""),
}
DIFFERENT = {
    # the kernel keeps of such a connection hardly more than its name, and a reset within its window ends it
    ("FIN_WAIT_2, closed", "RST of another number"), ("FIN_WAIT_2, closed", "RST of an old number"),
    ("CLOSE_WAIT, unread", "data and FIN"),  # behind an end, which no peer sends: an ACK more
}
STATES = [
    "LISTEN", "SYN_SENT", "SYN_RCVD", "ESTABLISHED", "opened by us", "unread", "unacknowledged",
    "FIN_WAIT_1", "FIN_WAIT_2", "CLOSING", "CLOSE_WAIT", "CLOSE_WAIT, unread", "LAST_ACK",
    "FIN_WAIT_1, closed", "FIN_WAIT_2, closed",
    "LAST_ACK, closed", "TIME_WAIT",
]


class Scene:
    """One connection: "s" of the program to the peer."""

    def __init__(self, stage: Stage, peer: FramePeer) -> None:
        self.stage, self.program, self.peer = stage, stage.program, peer
        self.seq, self.ack, self.heard = ISN, 0, 0
        self.open: set[str] = set()

    def say(self, flags: int, data: bytes = b"") -> None:
        self.peer.send(flags, self.seq, self.ack, data)
        self.seq += len(data) + bool(flags & (SYN | FIN))

    def hear(self) -> list[str]:
        """What comes until it is quiet, but what is sent again."""
        heard: list[str] = []
        while True:
            try:
                got = self.peer.receive()
            except TimeoutError:
                return heard
            if got.flags & SYN:
                self.peer.port = got.port
            end = got.seq + len(got.data) + bool(got.flags & (SYN | FIN))
            if end <= self.heard and end != got.seq:
                continue
            self.ack = self.heard = max(self.heard, end)
            what = "RST" if got.flags & RST else f"{got.ack - ISN if got.flags & ACK else ''} {len(got.data)} " \
                f"{'FIN' if got.flags & FIN else ''}"
            if what not in heard:
                heard.append(what)

    def answered(self) -> None:
        """A busy machine is late: without a handshake the program would wait in accept() for the rest of the tests."""
        deadline = time.monotonic() + 3
        while not self.hear():
            assert time.monotonic() < deadline, "no SYN"

    def listens(self) -> None:
        self.peer.port = self.program.do("listen", name="l", address=self.program.side.address)
        self.program.do("poll", name="l")
        self.open.add("l")

    def closes(self, name: str) -> None:
        self.program.do("close", name=name)
        self.open.remove(name)

    def opens(self, state: str) -> None:
        if state in ("SYN_SENT", "opened by us"):
            self.program.do("new", name="s", blocking=False)
            self.open.add("s")
            own = socket.inet_ntoa(self.peer.own)
            self.program.call("s", "connect", [own, self.peer.own_port])
            self.answered()
            if state != "SYN_SENT":
                self.say(SYN | ACK)
                self.hear()
            return
        self.listens()
        if state == "LISTEN":
            return
        self.say(SYN)
        self.answered()
        if state != "SYN_RCVD":
            self.say(ACK)
            self.program.do("accept", name="l", new="s")
            self.program.call("s", "setblocking", False)
            self.open.add("s")

    def comes_to(self, state: str) -> None:
        self.opens(state)
        if "unread" in state:
            self.say(PSH | ACK, b"unread")
            self.hear()
        if state.startswith(("CLOSE_WAIT", "LAST_ACK")):
            self.say(FIN | ACK)
            self.hear()
        if state == "unacknowledged":
            unacked = self.ack
            self.program.call("s", "send", "x" * 100)
            self.hear()
            self.ack = unacked
        if state.startswith(("FIN_WAIT", "CLOSING", "LAST_ACK", "TIME_WAIT")):
            unacked = self.ack
            if state.endswith("closed") or state == "TIME_WAIT":
                self.closes("s")
            else:
                self.program.call("s", "shutdown", 1)
            self.hear()
            if not state.startswith(("FIN_WAIT_2", "TIME_WAIT")):
                self.ack = unacked
        if state.startswith("FIN_WAIT_2"):
            self.say(ACK)
        if state in ("CLOSING", "TIME_WAIT"):
            self.say(FIN | ACK)
            self.hear()

    def seen(self, state: str, event: str) -> list[Any]:
        self.comes_to(state)
        self.stage.is_where_it_should(self.open)
        flags, beside, data = EVENTS[event]
        wrong = 0x1234 if event.endswith("corrupted") else 0
        self.peer.send(flags, self.seq + beside, self.ack if flags & ACK else 0, data, wrong)
        seen: list[Any] = [self.hear()]
        if state in ("LISTEN", "SYN_RCVD"):
            return [*seen, self.program.do("poll", name="l")]
        if state.endswith("closed") or state == "TIME_WAIT":
            return seen
        s = self.program
        seen += [s.do("state", name="s"), s.do("poll", name="s"), s.call("s", "recv", 100), s.call("s", "recv", 100)]
        seen += [s.call("s", "send", "x"), s.do("option", name="s", level="SOL_SOCKET", option="SO_ERROR")]
        return [*seen, s.call("s", "send", "x"), s.do("poll", name="s"), "RST" in self.hear()]

    def ends(self) -> None:
        """However it stands: nothing of it comes into the next one."""
        for name in sorted(self.open):
            self.program.do("linger", name=name, seconds=0)
            self.closes(name)
        self.peer.send(RST, self.seq)


class Stage:
    """A program, on the kernel or under the shim, and a socket for frames of its peer."""

    def __init__(self, service: Service, sandbox: Sandbox, worker: NetnsWorker, shim: bool) -> None:
        self.to, self.own = sandbox.b, nobody(sandbox.b, 55)
        self.sock = worker.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x800))
        self.sock.bind((sandbox.a.device, 0x800))
        self.sock.settimeout(QUIET)
        self.program = Calls(service, sandbox.b, shim)
        self.api = Api(service) if shim else None

    def is_where_it_should(self, names: set[str]) -> None:
        """All that the program has are on rings; else the kernel would be compared with itself."""
        if self.api:
            listed = [s for s in self.api.call("GET", "/v1/sockets")[1] if s["pid"] == self.program.pid]
            assert sum(s["offloaded"] for s in listed) == len(names), (names, listed)

    def close(self) -> None:
        self.sock.close()
        self.program.close()

    def play(self, state: str, event: str) -> list[Any]:
        peer = FramePeer(self.sock, ("02:00:00:00:00:55", self.to.mac), (self.own, self.to.address), next(PORTS))
        scene = Scene(self, peer)
        try:
            return scene.seen(state, event)
        finally:
            scene.ends()


Play = Callable[[str, str], tuple[Any, Any]]


@pytest.fixture(scope="module")
def play(service: Service, netns_pair: Sandbox) -> Iterator[Play]:
    """What is seen on a ring, and on the kernel: they wait a lot, side by side."""
    with NetnsWorker.open_path(netns_pair.a.netns) as worker, ExitStack() as stack, ThreadPoolExecutor(2) as threads:
        stages = [stack.enter_context(closing(Stage(service, netns_pair, worker, shim))) for shim in (True, False)]

        def both(state: str, event: str) -> tuple[Any, Any]:
            seen, expected = threads.map(lambda stage: stage.play(state, event), stages)
            return seen, expected

        yield both


@pytest.mark.parametrize("softverbs", ["xdp"], indirect=True)  # else the kernel listens, and closes
@pytest.mark.parametrize(("state", "event"), [
    case for case in itertools.product(STATES, EVENTS) if case not in DIFFERENT])
def test_as_the_kernel(play: Play, state: str, event: str) -> None:
    seen, expected = play(state, event)
    if seen != expected:  # a busy machine may be late with an answer
        seen, expected = play(state, event)
    assert seen == expected
