"""Whole moves, and what is left when a step of one fails: the connection, always."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
from net.tcp_lab import RULE, Hold, connection, streaming, tcp_key, tcp_lab
from net.test_tcprepair import receive, talk
from net.xdp_lab import A, B, Lab, run

from vmahybrid.errors import Refused
from vmahybrid.net import tcpsock
from vmahybrid.net.tcpfin import fin_frame, stale_frame
from vmahybrid.net.tcpmove import Homing, MoveCounts, Mover
from vmahybrid.net.tcprepair import MoveFailed
from vmahybrid.net.tcpstate import TcpFlag, TcpPhase, TcpState, seq
from vmahybrid.steering.keys import Act, Action
from vmahybrid.steering.reasons import Reason

pytestmark = pytest.mark.root

Pair = tuple[socket.socket, socket.socket]


class Steered:
    """Of one connection, by a Hold; fails as often as told."""

    def __init__(self, hold: Hold, sock: socket.socket, mac: str) -> None:
        self._hold, self._sock, self._mac = hold, sock, bytes.fromhex(mac.replace(":", ""))
        self.fail: dict[str, int] = {}
        self.calls: list[str] = []

    def _step(self, name: str) -> None:
        self.calls.append(name)
        if self.fail.get(name, 0):
            self.fail[name] -= 1
            raise OSError(12, f"no {name}")

    def steer(self) -> None:
        self._step("steer")
        self._hold.steer(self._sock)

    def unsteer(self, *others: Steered) -> None:
        assert not others
        self._step("unsteer")
        self._hold.unsteer()

    def give(self, frames: Sequence[tuple[Steered, TcpState]]) -> None:
        ((_, state),) = frames
        fin = state.flags & TcpFlag.PEER_FIN
        self._step("give_fin" if fin else "give_stale")
        self._hold.give([(fin_frame if fin else stale_frame)(state, self._mac)])


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with tcp_lab() as made:
        yield made


@pytest.fixture
def hold(lab: Lab) -> Iterator[Hold]:
    with Hold(lab) as made:
        yield made


@pytest.fixture
def pair(lab: Lab) -> Iterator[Pair]:
    peer, moving = connection(lab)
    peer.settimeout(5)
    with peer, moving:
        yield peer, moving


@pytest.fixture
def steered(lab: Lab, hold: Hold, pair: Pair) -> Steered:
    return Steered(hold, pair[1], lab.mac("vb"))


@pytest.fixture
def mover() -> Mover:
    return Mover(timeout=0.3)


def test_out_and_home_under_bulk_data(lab: Lab, hold: Hold, mover: Mover) -> None:
    """The state goes through its bytes, as through the control socket."""
    chance = random.Random(3)
    peer, moving = connection(lab)
    steered = Steered(hold, moving, lab.mac("vb"))
    with streaming(peer, moving) as stream:
        for _ in range(200):
            time.sleep(chance.random() * 0.01)
            with stream.lock:
                state = mover.adopt(moving.fileno(), steered)
                time.sleep(chance.random() * 0.005)
                mover.home(moving.fileno(), TcpState.unpack(state.pack()), steered)
        stream.finish()
    assert mover.counts() == MoveCounts(adopted=200, homed=200)


def test_the_peer_has_ended_its_stream(pair: Pair, steered: Steered, mover: Mover) -> None:
    """CLOSE_WAIT with unread data: the kernel gets the peer's FIN again, and the program its end of the stream."""
    peer, moving = pair
    peer.sendall(b"last words")
    peer.shutdown(socket.SHUT_WR)
    time.sleep(0.1)
    state = mover.adopt(moving.fileno(), steered)
    assert state.phase is TcpPhase.CLOSE_WAIT and state.flags & TcpFlag.PEER_FIN and state.receive == b"last words"
    mover.home(moving.fileno(), dataclasses.replace(state, send=b"answer"), steered)
    assert tcpsock.info(moving).state == TcpPhase.CLOSE_WAIT
    assert receive(moving, 10) == b"last words" and moving.recv(1) == b""
    assert receive(peer, 6) == b"answer"
    moving.shutdown(socket.SHUT_WR)
    assert peer.recv(1) == b""


@pytest.mark.parametrize("sent", [True, False])
def test_both_have_closed(pair: Pair, steered: Steered, mover: Mover, sent: bool) -> None:
    """LAST_ACK of the other stack, and CLOSE_WAIT where our FIN waits behind the data: what the peer has not
    acknowledged is sent, and our side is gone without TIME_WAIT, since the peer closed first."""
    peer, moving = pair
    peer.shutdown(socket.SHUT_WR)
    time.sleep(0.1)
    state = mover.adopt(moving.fileno(), steered)
    flags = state.flags | TcpFlag.FIN_WANTED | (TcpFlag.FIN_SENT if sent else TcpFlag(0))
    ours = dataclasses.replace(state, send=b"last words", flags=flags, snd_nxt=seq(state.snd_nxt + 10 * sent))
    mover.home(moving.fileno(), ours, steered)
    assert receive(peer, 10) == b"last words" and peer.recv(1) == b""
    deadline = time.monotonic() + 1
    while (phase := tcpsock.info(moving).state) != TcpPhase.CLOSE and time.monotonic() < deadline:
        time.sleep(0.01)
    assert phase == TcpPhase.CLOSE
    with pytest.raises(OSError, match="not connected"):
        moving.getpeername()


def test_prepare_says_no(pair: Pair, steered: Steered, mover: Mover) -> None:
    peer, moving = pair
    peer.sendall(b"unread")
    seen: list[TcpState] = []

    def prepare(state: TcpState) -> None:
        seen.append(state)
        raise KeyError("no room")

    with pytest.raises(KeyError, match="no room"):
        mover.adopt(moving.fileno(), steered, prepare)
    assert seen[0].receive == b"unread"
    assert steered.calls == ["steer", "unsteer", "give_stale"]
    assert mover.counts() == MoveCounts(rolled_back=1)
    assert receive(moving, 6) == b"unread"
    talk(peer, moving)


@pytest.mark.parametrize(("fail", "times", "error"), [("steer", 1, OSError), ("unsteer", 2, None)])
def test_steering_fails(pair: Pair, steered: Steered, mover: Mover, fail: str, times: int,
                        error: type[Exception] | None) -> None:
    """Before the move: nothing has happened. Afterwards: it is tried again."""
    peer, moving = pair
    steered.fail[fail] = times
    if error:
        with pytest.raises(error):
            mover.adopt(moving.fileno(), steered)
    else:
        mover.home(moving.fileno(), mover.adopt(moving.fileno(), steered), steered)
        assert mover.counts() == MoveCounts(adopted=1, homed=1, retries=2)
    talk(peer, moving)


def test_frames_can_not_be_given_back(pair: Pair, steered: Steered, mover: Mover, hold: Hold) -> None:
    """It is said that the kernel has the connection."""
    peer, moving = pair
    state = mover.adopt(moving.fileno(), steered)
    steered.fail["unsteer"] = 1000
    with pytest.raises(MoveFailed, match="giving frames") as raised:
        mover.home(moving.fileno(), state, steered)
    assert raised.value.alive
    assert mover.counts().failed == 1
    hold.unsteer()
    talk(peer, moving)


def without_address(lab: Lab, seconds: float) -> threading.Timer:
    """The address of b goes away for a while: the kernel refuses to bind to it."""
    def back() -> None:
        run(lab.b, "ip", "address", "add", f"{B}/24", "dev", "vb")
        run(lab.b, "ip", "neigh", "replace", A, "lladdr", lab.mac("va"), "dev", "vb", "nud", "permanent")

    run(lab.b, "ip", "address", "del", f"{B}/24", "dev", "vb")
    timer = threading.Timer(seconds, back)
    timer.start()
    return timer


def test_parking_fails(lab: Lab, pair: Pair, steered: Steered) -> None:
    """The kernel takes the connection neither as parked nor back at first: tried again until it does."""
    peer, moving = pair
    mover = Mover(timeout=5)
    peer.sendall(b"unread")
    assert select.select([moving], [], [], 5)[0]
    timers: list[threading.Timer] = []

    def prepare(state: TcpState) -> None:
        timers.append(without_address(lab, 0.3))

    with pytest.raises(MoveFailed, match="parking: Cannot assign") as raised:
        mover.adopt(moving.fileno(), steered, prepare)
    timers[0].join()
    assert raised.value.alive
    counts = mover.counts()
    assert counts.retries >= 2 and (counts.failed, counts.rolled_back, counts.adopted) == (1, 1, 0)
    assert receive(moving, 6) == b"unread"
    talk(peer, moving)


def test_homecoming_fails(lab: Lab, pair: Pair, steered: Steered, mover: Mover) -> None:
    """The other stack keeps the connection, and brings it home later."""
    peer, moving = pair
    peer.sendall(b"unread")
    assert select.select([moving], [], [], 5)[0]
    state = mover.adopt(moving.fileno(), steered)
    timer = without_address(lab, 1.0)
    with pytest.raises(MoveFailed, match="rebuilding") as raised:
        mover.home(moving.fileno(), state, steered)
    assert not raised.value.alive
    timer.join()
    mover.home(moving.fileno(), state, steered)
    assert receive(moving, 6) == b"unread"
    talk(peer, moving)


def test_after_a_restart_of_the_service(pair: Pair, steered: Steered, mover: Mover) -> None:
    peer, moving = pair
    moving.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    state = mover.adopt(moving.fileno(), steered)
    Mover().home(moving.fileno(), state, steered)
    assert moving.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    talk(peer, moving)


def test_one_move_at_a_time(pair: Pair, steered: Steered, mover: Mover) -> None:
    peer, moving = pair

    def again(state: TcpState) -> None:
        mover.adopt(moving.fileno(), steered)

    with pytest.raises(Refused, match="being moved already"):
        mover.adopt(moving.fileno(), steered, again)
    talk(peer, moving)


def test_refusals_are_counted_and_descriptors_stay(pair: Pair, steered: Steered, mover: Mover) -> None:
    moving = pair[1]
    before = len(os.listdir("/proc/self/fd"))
    state = mover.adopt(moving.fileno(), steered)
    with pytest.raises(Refused, match="repair mode already"):
        mover.adopt(moving.fileno(), steered)
    assert steered.calls == ["steer"]   # the refusal has not touched the frames of the parked connection
    mover.home(moving.fileno(), state, steered)
    with pytest.raises(Refused, match="not parked"):
        mover.home(moving.fileno(), state, steered)
    with open("/dev/null") as null, pytest.raises(OSError, match="Socket operation on non-socket"):
        mover.adopt(null.fileno(), steered)
    assert mover.counts() == MoveCounts(adopted=1, homed=1, refused=2)
    assert len(os.listdir("/proc/self/fd")) == before
    talk(*pair)


class Lost:
    """Of one of many connections: its frames are dropped while it moves."""

    def __init__(self, hold: Hold, sock: socket.socket) -> None:
        self._port, self._key = hold.port, tcp_key(sock)

    def steer(self) -> None:
        self._port.install(self._key, Action(Act.DROP, 0, RULE).to_bytes())

    def unsteer(self, *others: Lost) -> None:
        for one in (self, *others):
            one._port.remove(one._key)

    def give(self, frames: Sequence[tuple[Lost, TcpState]]) -> None:
        assert not any(state.flags & TcpFlag.PEER_FIN for _, state in frames)


def test_many_connections_at_once(lab: Lab, hold: Hold, mover: Mover) -> None:
    """One Mover, a thread for each connection."""
    errors: list[BaseException] = []

    def moves(peer: socket.socket, moving: socket.socket) -> None:
        try:
            steered = Lost(hold, moving)
            for _ in range(10):
                mover.home(moving.fileno(), mover.adopt(moving.fileno(), steered), steered)
                talk(peer, moving)
        except BaseException as error:
            errors.append(error)

    with contextlib.ExitStack() as sockets:
        threads = []
        for _ in range(8):
            ends = connection(lab)
            for end in ends:
                sockets.enter_context(end)
            threads.append(threading.Thread(target=moves, args=ends, daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert errors == [] and not any(thread.is_alive() for thread in threads)
    assert mover.counts() == MoveCounts(adopted=80, homed=80)


class Failing(Lost):
    """``fails``: what does not succeed, and how often yet. All of a lot have the same."""

    fails: dict[str, int]

    def unsteer(self, *others: Lost) -> None:
        self._fail("unsteer")
        super().unsteer(*others)

    def give(self, frames: Sequence[tuple[Lost, TcpState]]) -> None:
        self._fail("give")
        super().give(frames)

    def _fail(self, what: str) -> None:
        if self.fails.get(what, 0):
            self.fails[what] -= 1
            raise OSError(12, f"no {what}")


@pytest.mark.parametrize(("fails", "counts"), [
    ({}, MoveCounts(adopted=4, homed=3, refused=1)),
    ({"unsteer": 2}, MoveCounts(adopted=4, homed=3, refused=1, retries=2)),
    ({"give": 1}, MoveCounts(adopted=4, homed=3, refused=1)),
    ({"give": 4}, MoveCounts(adopted=4, homed=3, refused=1, untold=3)),
])
def test_several_home_at_once(lab: Lab, hold: Hold, mover: Mover, fails: dict[str, int], counts: MoveCounts) -> None:
    """One of them has another's state, and stays where it is."""
    with contextlib.ExitStack() as sockets:
        pairs = [connection(lab) for _ in range(4)]
        for end in (end for pair in pairs for end in pair):
            end.settimeout(5)
            sockets.enter_context(end)
        steered = [Failing(hold, moving) for _, moving in pairs]
        for one in steered:
            one.fails = fails
        states = [mover.adopt(moving.fileno(), one) for (_, moving), one in zip(pairs, steered, strict=True)]
        found = mover.home_all([Homing(moving.fileno(), states[at], steered[at])
                                for (_, moving), at in zip(pairs, (0, 1, 1, 3), strict=True)])
        assert [type(end) for end in found] == [type(None), type(None), Refused, type(None)]
        assert mover.counts() == counts
        mover.home(pairs[2][1].fileno(), states[2], steered[2])
        for peer, moving in pairs:
            talk(peer, moving)


class OfAnInterface(Lost):
    """``gone``: it is no more."""

    def __init__(self, hold: Hold, sock: socket.socket, mac: str) -> None:
        super().__init__(hold, sock)
        self.gone = False
        self._hold, self._mac = hold, bytes.fromhex(mac.replace(":", ""))

    def give(self, frames: Sequence[tuple[Lost, TcpState]]) -> None:
        if any(isinstance(one, OfAnInterface) and one.gone for one, _ in frames):
            raise Refused("interface 9", "it is gone", "", Reason.NO_INTERFACE)
        self._hold.give([fin_frame(state, self._mac) for _, state in frames])


def test_one_of_several_has_no_interface(lab: Lab, hold: Hold, mover: Mover) -> None:
    """The others hear of the end of their peers' streams all the same."""
    with contextlib.ExitStack() as sockets:
        pairs = [connection(lab) for _ in range(3)]
        for end in (end for pair in pairs for end in pair):
            end.settimeout(5)
            sockets.enter_context(end)
        for peer, _ in pairs:
            peer.sendall(b"x")
            peer.shutdown(socket.SHUT_WR)
        assert all(select.select([moving], [], [], 5)[0] for _, moving in pairs)
        steered = [OfAnInterface(hold, moving, lab.mac("vb")) for _, moving in pairs]
        states = [dataclasses.replace(mover.adopt(moving.fileno(), one), receive=b"")     # it is read there
                  for (_, moving), one in zip(pairs, steered, strict=True)]
        steered[1].gone = True
        found = mover.home_all([Homing(moving.fileno(), state, one)
                                for (_, moving), state, one in zip(pairs, states, steered, strict=True)])
        assert [isinstance(end, MoveFailed) and end.alive for end in found] == [False, True, False], found
        assert (found[0], found[2]) == (None, None)
        assert [pairs[at][1].recv(1) for at in (0, 2)] == [b"", b""]
        assert not select.select([pairs[1][1]], [], [], 0.3)[0]
        assert mover.counts() == MoveCounts(adopted=3, homed=2, failed=1)


def test_none_of_several_has_its_frames(lab: Lab, hold: Hold, mover: Mover) -> None:
    """It is said of each that the kernel has the connection."""
    with contextlib.ExitStack() as sockets:
        pairs = [connection(lab) for _ in range(2)]
        for end in (end for pair in pairs for end in pair):
            sockets.enter_context(end)
        steered = [Failing(hold, moving) for _, moving in pairs]
        for one in steered:
            one.fails = {}
        wanted = [Homing(moving.fileno(), mover.adopt(moving.fileno(), one), one)
                  for (_, moving), one in zip(pairs, steered, strict=True)]
        steered[0].fails["unsteer"] = 1000
        found = mover.home_all(wanted)
        assert [isinstance(end, MoveFailed) and end.alive for end in found] == [True, True]
        assert mover.counts().failed == 2
        Lost.unsteer(*steered)
        for peer, moving in pairs:
            talk(peer, moving)
