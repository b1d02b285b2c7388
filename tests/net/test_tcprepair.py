"""An established connection leaves the kernel's socket and comes back into it, while bulk data runs both ways."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import os
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from net.tcp_lab import Drop, Hold, connection, counters, one_cpu, streaming, tcp_lab
from net.xdp_lab import A, B, Lab, run

from vmahybrid.errors import Refused
from vmahybrid.net import tcprepair, tcpsock
from vmahybrid.net.tcpfin import unreachable_frame
from vmahybrid.net.tcprepair import Kept, MoveFailed
from vmahybrid.net.tcpstate import TcpFlag, TcpPhase, TcpState, seq
from vmahybrid.steering.reasons import Reason

pytestmark = pytest.mark.root

SOL, TCP = socket.SOL_SOCKET, socket.IPPROTO_TCP


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with tcp_lab() as made:
        yield made


@pytest.fixture
def hold(lab: Lab) -> Iterator[Hold]:
    with Hold(lab) as made:
        yield made


@pytest.fixture
def pair(lab: Lab) -> Iterator[tuple[socket.socket, socket.socket]]:
    """The peer's socket, and the one that moves; what waits for the peer waits 5 s at most."""
    peer, moving = connection(lab)
    peer.settimeout(5)
    with peer, moving:
        yield peer, moving


Change = Callable[[TcpState], TcpState]


def same(state: TcpState) -> TcpState:
    return state


def move(steering: Drop, sock: socket.socket, change: Change = same, *, frozen: Change = same) -> TcpState:
    """Out of the kernel and back; ``change`` is what the other stack does meanwhile, ``frozen`` what the kernel is
    made to say of itself. The state as it was frozen."""
    steering.steer(sock)
    state, kept = tcprepair.freeze(sock)
    state = tcprepair.park(sock, frozen(state), kept, anew=True)
    newer = change(state)
    tcprepair.rebuild(sock, newer, kept, fin_follows=bool(newer.flags & TcpFlag.PEER_FIN))
    steering.unsteer()
    tcprepair.nudge(sock, kept)
    tcprepair.end(sock, newer)
    return state


def talk(peer: socket.socket, moving: socket.socket) -> None:
    """Does the connection work in both directions?"""
    for number in range(20):
        for one, other in ((peer, moving), (moving, peer)):
            one.sendall(b"word %d" % number)
            assert receive(other, 6 + len(str(number)) - 1) == b"word %d" % number


def receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        assert select.select([sock], [], [], 5)[0], f"{data[:40]!r}: {len(data)} of {size}"
        piece = sock.recv(size - len(data))
        assert piece
        data += piece
    return data


# -- bulk data


@pytest.mark.parametrize(("kind", "moves", "accepted"), [(Hold, 500, False), (Hold, 500, True), (Drop, 300, True)])
def test_moves_under_bulk_data(lab: Lab, kind: type[Drop], moves: int, accepted: bool) -> None:
    """At random moments, with frames held or lost meanwhile; all queues are in use; no byte is lost or doubled, no
    reset is sent, and the peer's PAWS drops nothing of ours."""
    chance = random.Random(moves)
    before = [counters(worker) for worker in (lab.a, lab.b)]
    seen = {"send": 0, "unsent": 0, "receive": 0}
    with one_cpu(), kind(lab) as steering, streaming(*connection(lab, accepted), moves) as stream:
        for _ in range(moves):
            time.sleep(chance.random() * 0.01)
            with stream.lock:
                state = move(steering, stream.moving)
            for name in seen:
                seen[name] += bool(getattr(state, name))
            assert stream.errors == []
        stream.finish()
        after = [counters(worker) for worker in (lab.a, lab.b)]
    assert [end["Tcp.OutRsts"] for end in after] == [end["Tcp.OutRsts"] for end in before]
    assert after[0]["TcpExt.PAWSEstab"] == before[0]["TcpExt.PAWSEstab"]
    if kind is Hold:    # after losses there is seldom anything to read
        assert min(seen.values()) > moves / 50, seen
    assert seen["send"] > moves / 50
    assert min(stream.sent) > 1 << 20


def test_freeze_and_thaw_under_bulk_data(lab: Lab) -> None:
    """Nobody steers: what comes to the frozen socket is dropped and sent again."""
    with streaming(*connection(lab), 7) as stream:
        for _ in range(200):
            time.sleep(0.005)
            with stream.lock:
                state, kept = tcprepair.freeze(stream.moving)
                tcprepair.thaw(stream.moving, kept)
            state.check()
        stream.finish()


# -- what is read and written


def test_the_state(pair: tuple[socket.socket, socket.socket], hold: Hold) -> None:
    peer, moving = pair
    moving.setsockopt(TCP, socket.TCP_NODELAY, 1)
    peer.sendall(b"unread")
    assert receive(peer, moving.send(b"x" * 100)) == b"x" * 100
    assert select.select([moving], [], [], 5)[0]
    hold.steer(moving)
    state, kept = tcprepair.freeze(moving)
    tcprepair.thaw(moving, kept, probe=False)
    hold.unsteer()
    assert (state.phase, state.receive, state.send, state.unsent) == (TcpPhase.ESTABLISHED, b"unread", b"", 0)
    assert kept.is_of(state) and kept.local == moving.getsockname()
    agreed = TcpFlag.WSCALE | TcpFlag.SACK | TcpFlag.TIMESTAMPS
    assert state.flags == agreed | TcpFlag.NODELAY
    assert (state.mss, state.snd_mss, state.pmtu, state.ttl) == (1460, 1448, 1500, 64)
    assert state.bytes_received == 6 and state.bytes_acked == 101   # the SYN counts
    assert TcpState.unpack(state.pack()) == state
    assert receive(moving, 6) == b"unread"
    talk(peer, moving)


def test_queues_are_rebuilt(pair: tuple[socket.socket, socket.socket], hold: Hold) -> None:
    """Data that was sent and not acknowledged, never sent (the peer's window is full), and not read."""
    peer, moving = pair
    peer.sendall(b"r" * 5000)
    moving.setblocking(False)
    data = random.Random(1).randbytes(32 << 20)
    sent = 0
    while select.select([], [moving], [], 0.3)[1]:
        sent += moving.send(data[sent:sent + (1 << 16)])
    state = move(hold, moving)
    assert state.receive == b"r" * 5000
    assert 0 < state.unsent <= len(state.send)
    assert state.send == data[sent - len(state.send):sent]
    assert moving.recv(10000) == b"r" * 5000
    assert receive(peer, sent) == data[:sent]
    assert os.get_blocking(moving.fileno()) is False


def test_a_newer_state_into_the_same_socket(pair: tuple[socket.socket, socket.socket], hold: Hold) -> None:
    """The other stack's program has read a part, and written; a segment came that the kernel never saw."""
    peer, moving = pair
    peer.sendall(b"0123456789")
    assert select.select([moving], [], [], 5)[0]
    before = moving.fileno()

    def live(state: TcpState) -> TcpState:
        peer.sendall(b"abc")        # held in the ring; the other stack takes it, and the kernel gets it again
        return dataclasses.replace(state, receive=state.receive[4:] + b"abc", send=b"answer",
                                   rcv_nxt=seq(state.rcv_nxt + 3), rcv_wnd=state.rcv_wnd - 3,
                                   rcv_wup=seq(state.rcv_wup + 3))

    assert move(hold, moving, live).receive == b"0123456789"
    assert moving.fileno() == before
    assert receive(moving, 9) == b"456789abc"
    assert receive(peer, 6) == b"answer"
    talk(peer, moving)


def test_an_untouched_socket_is_not_made_again(pair: tuple[socket.socket, socket.socket], hold: Hold) -> None:
    """Without data in the queues park leaves the connection in place: its counters go on."""
    peer, moving = pair
    talk(peer, moving)
    time.sleep(0.2)     # the last word is acknowledged after the delay of the peer
    before = tcpsock.info(moving)
    hold.steer(moving)
    state, kept = tcprepair.freeze(moving)
    state = tcprepair.park(moving, state, kept)
    tcprepair.rebuild(moving, state, kept)
    hold.unsteer()
    tcprepair.nudge(moving, kept)
    assert tcpsock.info(moving).bytes_received == before.bytes_received > 0
    assert tcpsock.info(moving).cwnd == before.cwnd
    talk(peer, moving)


AGREED = {"window_scaling": TcpFlag.WSCALE, "sack": TcpFlag.SACK, "timestamps": TcpFlag.TIMESTAMPS}


@pytest.mark.parametrize("missing", AGREED)
def test_what_the_syns_agreed_upon(lab: Lab, hold: Hold, missing: str) -> None:
    run(lab.a, "sysctl", "-qw", f"net.ipv4.tcp_{missing}=0")
    try:
        peer, moving = connection(lab)
    finally:
        run(lab.a, "sysctl", "-qw", f"net.ipv4.tcp_{missing}=1")
    with streaming(peer, moving) as stream:
        for _ in range(20):
            time.sleep(0.01)
            with stream.lock:
                state = move(hold, moving)
            assert not state.flags & AGREED[missing] or missing == "window_scaling"
        after_moves = tcpsock.info(moving)
        stream.finish()
    if missing == "window_scaling":
        # the kernel is told a scale of 0, which it shows as agreed
        assert (state.snd_wscale, state.rcv_wscale, after_moves.wscales) == (0, 0, 0)
        assert state.rcv_wnd <= 65535
    # without timestamps the kernel shows 1448 and sends 1460
    assert after_moves.snd_mss == 1448 and state.mss == 1460


def test_the_options_of_the_socket(lab: Lab, hold: Hold) -> None:
    """What a move changes meanwhile is as before it; the rest stays."""
    options = [(SOL, socket.SO_KEEPALIVE), (SOL, socket.SO_REUSEADDR), (TCP, socket.TCP_NODELAY), (TCP, 18), (TCP, 4),
               (SOL, socket.SO_SNDBUF), (SOL, socket.SO_RCVBUF), (SOL, tcpsock.SO_BUF_LOCK), (TCP, 10),
               (socket.SOL_IP, socket.IP_TTL), (TCP, socket.TCP_MAXSEG)]

    def setup(sock: socket.socket) -> None:
        for level, name, value in ((SOL, socket.SO_KEEPALIVE, 1), (TCP, socket.TCP_NODELAY, 1), (TCP, 18, 12345),
                                   (TCP, 4, 77), (SOL, socket.SO_SNDBUF, 50000), (SOL, socket.SO_RCVBUF, 60000),
                                   (socket.SOL_IP, socket.IP_TTL, 33)):
            sock.setsockopt(level, name, value)

    for accepted in (False, True):
        peer, moving = connection(lab, accepted, setup)
        with peer, moving:
            before = [moving.getsockopt(*option) for option in options]
            state = move(hold, moving)
            assert [moving.getsockopt(*option) for option in options] == before
            assert before[:2] == [1, int(accepted)]
            assert (state.user_timeout_ms, state.keep_idle_s, state.sndbuf, state.ttl) == (12345, 77, 50000, 33)
            assert state.flags & TcpFlag.KEEPALIVE
            talk(peer, moving)


def test_congestion_control_and_fast_open(lab: Lab, hold: Hold) -> None:
    """TCP_FASTOPEN_CONNECT would put off the connect() of a rebuild, and means nothing after it."""
    fast_open = 30

    def setup(sock: socket.socket) -> None:
        sock.setsockopt(TCP, socket.TCP_CONGESTION, b"reno")
        sock.setsockopt(TCP, fast_open, 1)

    run(lab.a, "sysctl", "-qw", "net.ipv4.tcp_fastopen=515")    # both roles, without a cookie
    run(lab.b, "sysctl", "-qw", "net.ipv4.tcp_fastopen=5")
    try:
        with lab.a.socket(socket.AF_INET, socket.SOCK_STREAM) as listener, \
                lab.b.socket(socket.AF_INET, socket.SOCK_STREAM) as moving:
            listener.bind((A, 0))
            listener.setsockopt(TCP, socket.TCP_FASTOPEN, 5)
            listener.listen()
            setup(moving)
            moving.connect(listener.getsockname())
            moving.send(b"with the SYN")
            with listener.accept()[0] as peer:
                assert receive(peer, 12) == b"with the SYN"
                time.sleep(0.1)
                move(hold, moving)
                assert moving.getsockopt(TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == b"reno"
                talk(peer, moving)
    finally:
        for worker in (lab.a, lab.b):
            run(worker, "sysctl", "-qw", "net.ipv4.tcp_fastopen=1")


@pytest.mark.parametrize("reuse", [0, 1])
def test_beside_the_listener_of_the_port(lab: Lab, hold: Hold, reuse: int) -> None:
    """An accepted connection moves while its listener works on; the port is as free afterwards as it was before."""
    with lab.b.socket(socket.AF_INET, socket.SOCK_STREAM) as listener, contextlib.ExitStack() as sockets:
        listener.setsockopt(SOL, socket.SO_REUSEADDR, reuse)
        listener.bind((B, 0))
        listener.listen()
        address = listener.getsockname()

        def one_more() -> tuple[socket.socket, socket.socket]:
            peer = sockets.enter_context(lab.a.socket(socket.AF_INET, socket.SOCK_STREAM))
            peer.connect(address)
            return peer, sockets.enter_context(listener.accept()[0])

        peer, moving = one_more()
        move(hold, moving)
        talk(*one_more())
        talk(peer, moving)
        listener.close()
        with lab.b.socket(socket.AF_INET, socket.SOCK_STREAM) as again:
            again.setsockopt(SOL, socket.SO_REUSEADDR, 1)
            with contextlib.nullcontext() if reuse else pytest.raises(OSError, match="in use"):
                again.bind(address)
                again.listen()


@pytest.mark.parametrize("mapped", [False, True])
def test_ipv6(lab: Lab, mapped: bool) -> None:
    """Addresses of IPv6, and IPv4 addresses on a socket of IPv6; in one namespace, so nothing needs to be steered."""
    host = "::ffff:127.0.0.1" if mapped else "::1"
    with Lab() as own:
        run(own.b, "sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=0", "net.ipv6.conf.lo.disable_ipv6=0")
        run(own.b, "ip", "link", "set", "lo", "up")
        with own.b.socket(socket.AF_INET6, socket.SOCK_STREAM) as listener:
            listener.bind((host, 0))
            listener.listen()
            moving = own.b.socket(socket.AF_INET6, socket.SOCK_STREAM)
            moving.connect(listener.getsockname())
            peer = listener.accept()[0]
        with peer, moving:
            peer.sendall(b"unread")
            state, kept = tcprepair.freeze(moving)
            state = tcprepair.park(moving, state, kept)
            tcprepair.rebuild(moving, TcpState.unpack(state.pack()), kept)
            tcprepair.nudge(moving, kept)
            assert receive(moving, 6) == b"unread"
            talk(peer, moving)


# -- a parked socket


def test_a_parked_socket(lab: Lab, hold: Hold, pair: tuple[socket.socket, socket.socket]) -> None:
    """ss shows it, its port is taken, the program can't use it by mistake, and it says nothing to the peer."""
    peer, moving = pair
    moving.setsockopt(SOL, socket.SO_KEEPALIVE, 1)
    peer.sendall(b"unread")
    assert select.select([moving], [], [], 5)[0]
    hold.steer(moving)
    state, kept = tcprepair.freeze(moving)
    state = tcprepair.park(moving, state, kept)
    port = moving.getsockname()[1]
    assert f"{B}:{port}" in run(lab.b, "ss", "-tnH", "state", "established")
    assert moving.getsockopt(SOL, socket.SO_KEEPALIVE) == 0
    with pytest.raises(OSError, match="Invalid argument"):
        moving.send(b"x")
    with pytest.raises(PermissionError):
        moving.recv(1)
    with lab.b.socket(socket.AF_INET, socket.SOCK_STREAM) as other, pytest.raises(OSError, match="in use"):
        other.bind((B, port))
    segments = tcpsock.info(peer).segs_in
    moving.close()
    time.sleep(0.3)
    assert tcpsock.info(peer).segs_in == segments
    assert tcpsock.info(peer).state == TcpPhase.ESTABLISHED
    hold.unsteer()


def test_nothing_reaches_a_frozen_socket(pair: tuple[socket.socket, socket.socket]) -> None:
    """Without any steering: what the peer sends is not acknowledged, and comes again after thaw()."""
    peer, moving = pair
    _, kept = tcprepair.freeze(moving)
    peer.sendall(b"late")
    time.sleep(0.1)
    assert tcpsock.unacked(peer) == 4
    assert tcpsock.unread(moving) == 0
    tcprepair.thaw(moving, kept)
    assert receive(moving, 4) == b"late"
    talk(peer, moving)


def test_a_window_that_was_taken_back(pair: tuple[socket.socket, socket.socket], hold: Hold) -> None:
    """Without memory the kernel announces no window at once; what came last was then beyond it."""
    def without_window(state: TcpState) -> TcpState:
        return dataclasses.replace(state, snd_wl1=seq(state.rcv_nxt + 11584), rcv_wnd=0, rcv_wup=state.rcv_nxt)

    peer, moving = pair
    talk(peer, moving)
    move(hold, moving, without_window)
    talk(peer, moving)
    move(hold, moving, frozen=without_window)
    talk(peer, moving)


@pytest.mark.parametrize("late", ["before parking", "while parking"])
def test_the_clock_never_goes_back(lab: Lab, pair: tuple[socket.socket, socket.socket], hold: Hold,
                                   monkeypatch: pytest.MonkeyPatch, late: str) -> None:
    """The frozen kernel resends with timestamps later than the one that was read; what follows must not be older."""
    peer, moving = pair
    disconnect = tcpsock.disconnect

    def slowly(sock: socket.socket) -> None:
        monkeypatch.undo()
        time.sleep(0.5)
        disconnect(sock)

    moving.setsockopt(TCP, socket.TCP_NODELAY, 1)
    talk(peer, moving)
    hold.steer(moving)
    moving.send(b"unacknowledged ")
    assert receive(peer, 15) == b"unacknowledged "
    state, kept = tcprepair.freeze(moving)
    before = counters(lab.b)["Tcp.RetransSegs"]
    if late == "before parking":
        time.sleep(0.5)
    else:
        monkeypatch.setattr(tcpsock, "disconnect", slowly)
    state = tcprepair.park(moving, state, kept)
    assert counters(lab.b)["Tcp.RetransSegs"] > before
    paws = counters(lab.a)["TcpExt.PAWSEstab"]
    tcprepair.rebuild(moving, dataclasses.replace(state, send=state.send + b"and unsent"), kept)
    assert receive(peer, 10) == b"and unsent"
    assert counters(lab.a)["TcpExt.PAWSEstab"] == paws
    hold.unsteer()
    tcprepair.nudge(moving, kept)
    talk(peer, moving)


# -- half-closed


def test_after_our_fin(pair: tuple[socket.socket, socket.socket], hold: Hold) -> None:
    """FIN_WAIT2: the FIN is sent again and acknowledged again; the peer's stream goes on, and ends."""
    peer, moving = pair
    moving.sendall(b"last words")
    moving.shutdown(socket.SHUT_WR)
    assert receive(peer, 10) == b"last words" and peer.recv(1) == b""
    time.sleep(0.05)
    state = move(hold, moving)
    assert state.phase is TcpPhase.FIN_WAIT2
    assert state.flags & TcpFlag.FIN_ACKED and not state.send
    deadline = time.monotonic() + 3
    while tcpsock.info(moving).state != TcpPhase.FIN_WAIT2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert tcpsock.info(moving).state == TcpPhase.FIN_WAIT2
    peer.sendall(b"answer")
    peer.shutdown(socket.SHUT_WR)
    assert receive(moving, 6) == b"answer" and moving.recv(1) == b""


def test_a_wanted_fin_is_sent_after_the_data(pair: tuple[socket.socket, socket.socket], hold: Hold) -> None:
    """The other stack's program has written and closed, and nothing of it went out yet."""
    peer, moving = pair
    move(hold, moving, lambda state: dataclasses.replace(state, send=b"bye", flags=state.flags | TcpFlag.FIN_WANTED))
    assert receive(peer, 3) == b"bye"
    assert peer.recv(1) == b""


# -- refusals


@contextlib.contextmanager
def refused(sock: socket.socket, why: str) -> Iterator[None]:
    """freeze() says ``why``, and nothing of the socket has changed after it."""
    names = [(SOL, socket.SO_REUSEADDR), (SOL, socket.SO_KEEPALIVE), (SOL, socket.SO_SNDBUF), (SOL, socket.SO_ERROR)]
    before = [sock.getsockopt(*name) for name in names]
    with pytest.raises(Refused, match=why) as raised:
        tcprepair.freeze(sock)
    assert raised.value.reason == Reason.TCP_STATE
    assert [sock.getsockopt(*name) for name in names] == before
    yield


def test_refused_states(lab: Lab) -> None:
    with lab.b.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        with refused(sock, "CLOSE"):
            pass
        sock.bind((B, 0))
        sock.listen()
        with refused(sock, "LISTEN"):
            pass
    with lab.b.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, pytest.raises(Refused, match="no plain TCP"):
        tcprepair.freeze(sock)
    with lab.b.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        run(lab.b, "ip", "neigh", "replace", "10.0.0.77", "lladdr", "02:00:00:00:00:77", "dev", "vb", "nud",
            "permanent")
        sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            sock.connect(("10.0.0.77", 9))
        with refused(sock, "SYN_SENT"):
            pass


def test_refused_while_closing(pair: tuple[socket.socket, socket.socket], lab: Lab) -> None:
    peer, moving = pair
    with Drop(lab) as drop:
        drop.steer(moving)          # our FIN is not acknowledged
        moving.shutdown(socket.SHUT_WR)
        with refused(moving, "FIN_WAIT1"):
            pass
        drop.unsteer()
    peer.close()
    time.sleep(0.5)
    with pytest.raises(Refused, match=r"TIME_WAIT|CLOSE"):
        tcprepair.freeze(moving)


def test_refused_with_urgent_data(pair: tuple[socket.socket, socket.socket]) -> None:
    peer, moving = pair
    peer.send(b"!", socket.MSG_OOB)
    assert select.select([], [], [moving], 5)[2]
    with refused(moving, "urgent"):
        assert moving.recv(1, socket.MSG_OOB) == b"!"
    talk(peer, moving)


def test_refused_with_a_filter(pair: tuple[socket.socket, socket.socket]) -> None:
    peer, moving = pair
    everything = ctypes.create_string_buffer(struct.pack("=HBBI", 6, 0, 0, 0xFFFFFFFF))
    moving.setsockopt(SOL, 26, struct.pack("@HP", 1, ctypes.addressof(everything)))
    with refused(moving, "filter"):
        talk(peer, moving)
    assert tcpsock.has_filter(moving)


def test_refused_with_a_peek_offset(pair: tuple[socket.socket, socket.socket]) -> None:
    peer, moving = pair
    moving.setsockopt(SOL, tcpsock.SO_PEEK_OFF, 3)
    with refused(moving, "PEEK_OFF"):
        moving.setsockopt(SOL, tcpsock.SO_PEEK_OFF, -1)
    talk(peer, moving)


def test_refused_with_zero_copy_in_flight(pair: tuple[socket.socket, socket.socket], lab: Lab) -> None:
    peer, moving = pair
    moving.setsockopt(SOL, tcpsock.SO_ZEROCOPY, 1)
    with Drop(lab) as drop:
        drop.steer(moving)
        data = b"z" * 20000     # the kernel reads it as long as it has not been acknowledged
        moving.send(data, 0x4000000)    # MSG_ZEROCOPY
        with refused(moving, "zero-copy"):
            drop.unsteer()
    assert receive(peer, 20000) == data


def test_refused_under_mptcp(lab: Lab) -> None:
    with lab.b.call(socket.socket, socket.AF_INET, socket.SOCK_STREAM, 262) as sock, \
            pytest.raises(Refused, match="no plain TCP"):
        tcprepair.freeze(sock)


class WithTls(socket.socket):
    """Says what the kernel says of a socket with TLS: its module need not be there."""

    def getsockopt(self, level: int, name: int, size: int = 0) -> int | bytes:      # type: ignore[override]
        if (level, name) == (TCP, tcpsock.TCP_ULP):
            return b"tls" + bytes(size - 3)
        return super().getsockopt(level, name, size) if size else super().getsockopt(level, name)


def test_refused_under_tls(pair: tuple[socket.socket, socket.socket]) -> None:
    with WithTls(fileno=os.dup(pair[1].fileno())) as moving, refused(moving, "TLS"):
        talk(*pair)


def test_refused_without_privilege(pair: tuple[socket.socket, socket.socket]) -> None:
    """And unharmed: the filter is gone again."""
    peer, moving = pair
    said: list[BaseException] = []

    def unprivileged() -> None:
        libc = ctypes.CDLL(None)
        libc.syscall(117, 65534, 65534, 65534)      # setresuid of this thread only
        try:
            tcprepair.freeze(moving)
        except Refused as error:
            said.append(error)

    thread = threading.Thread(target=unprivileged)
    thread.start()
    thread.join(10)
    assert len(said) == 1 and "CAP_NET_ADMIN" in str(said[0])
    talk(peer, moving)


def test_a_frozen_socket_is_not_frozen_again(pair: tuple[socket.socket, socket.socket]) -> None:
    peer, moving = pair
    _, kept = tcprepair.freeze(moving)
    with pytest.raises(Refused, match="repair mode already"):
        tcprepair.freeze(moving)
    tcprepair.thaw(moving, kept)
    talk(peer, moving)


def test_states_of_other_connections_are_refused(pair: tuple[socket.socket, socket.socket], hold: Hold) -> None:
    """They come from programs: none may take what is not its own."""
    peer, moving = pair
    hold.steer(moving)
    state, kept = tcprepair.freeze(moving)
    state = tcprepair.park(moving, state, kept)
    for change, why in (({"lport": 22}, "another connection"), ({"raddr": state.laddr}, "another connection"),
                        ({"mss": 1}, "no connection can be so"), ({"error": 104}, "failed"),
                        ({"flags": state.flags | TcpFlag.PEER_FIN}, "FIN can't be repeated"),
                        ({"flags": state.flags | TcpFlag(0xF0)}, "both sides")):
        with pytest.raises(Refused, match=why):
            tcprepair.rebuild(moving, dataclasses.replace(state, **change))     # type: ignore[arg-type]
    tcprepair.rebuild(moving, state)    # without what was kept: after a restart of the service
    hold.unsteer()
    with pytest.raises(Refused, match="not parked"):
        tcprepair.rebuild(moving, state, kept)
    assert moving.getsockopt(SOL, socket.SO_REUSEADDR) == 1
    talk(peer, moving)


# -- faults


@contextlib.contextmanager
def without_address(lab: Lab, lo: str) -> Iterator[None]:
    """Of the side that moves. ``lo`` is up or down meanwhile."""
    run(lab.b, "ip", "link", "set", "lo", lo)
    run(lab.b, "ip", "address", "del", f"{B}/24", "dev", "vb")
    try:
        yield
    finally:
        run(lab.b, "ip", "address", "add", f"{B}/24", "dev", "vb")
        run(lab.b, "ip", "neigh", "replace", A, "lladdr", lab.mac("va"), "dev", "vb", "nud", "permanent")
        run(lab.b, "ip", "link", "set", "lo", "down")


def parked(hold: Hold, pair: tuple[socket.socket, socket.socket]) -> tuple[TcpState, Kept]:
    """With something unread."""
    peer, moving = pair
    peer.sendall(b"unread")
    assert select.select([moving], [], [], 5)[0]
    hold.steer(moving)
    state, kept = tcprepair.freeze(moving)
    return tcprepair.park(moving, state, kept), kept


def goes_on_at_home(hold: Hold, pair: tuple[socket.socket, socket.socket], kept: Kept) -> None:
    peer, moving = pair
    hold.unsteer()
    tcprepair.nudge(moving, kept)
    assert receive(moving, 6) == b"unread"
    talk(peer, moving)


def test_a_rebuild_that_fails_can_be_repeated(lab: Lab, hold: Hold, pair: tuple[socket.socket, socket.socket]) -> None:
    """The address is gone for a moment: the other stack keeps the connection, and the next attempt succeeds."""
    _, moving = pair
    state, kept = parked(hold, pair)
    with without_address(lab, "down"):
        for _ in range(2):
            with pytest.raises(MoveFailed, match="rebuilding") as raised:
                tcprepair.rebuild(moving, state, kept)
            assert not raised.value.alive
    tcprepair.rebuild(moving, state, kept)
    goes_on_at_home(hold, pair, kept)


def test_home_without_an_address(lab: Lab, hold: Hold, pair: tuple[socket.socket, socket.socket]) -> None:
    """The kernel's connection outlives that as well. Of the way over lo nothing stays."""
    _, moving = pair
    state, kept = parked(hold, pair)
    with without_address(lab, "up"):
        tcprepair.rebuild(moving, state, kept)
        assert moving.getsockopt(SOL, tcpsock.SO_BINDTOIFINDEX) == 0
        assert moving.getsockopt(socket.SOL_IP, 19) == 0    # IP_TRANSPARENT
        assert (moving.getsockname(), moving.getpeername()) == (kept.local, kept.peer)
    goes_on_at_home(hold, pair, kept)
    assert tcpsock.info(moving).pmtu == 1500


def test_the_kernel_sends_again_when_it_is_told_of_a_closed_way(lab: Lab, hold: Hold,
                                                                 pair: tuple[socket.socket, socket.socket]) -> None:
    """In a timeout, by RFC 6069: the next one would be over 0.5 s later."""
    peer, moving = pair
    talk(peer, moving)
    state, kept = tcprepair.freeze(moving)
    tcprepair.thaw(moving, kept, probe=False)
    mac, own = lab.mac("va"), bytes.fromhex(lab.mac("vb").replace(":", ""))
    run(lab.a, "ip", "link", "set", "va", "address", "02:00:00:00:00:99")
    moving.sendall(b"lost")
    time.sleep(0.7)     # 20, 60, 140, 300 and 620 ms
    run(lab.a, "ip", "link", "set", "va", "address", mac)
    begun = time.monotonic()
    hold.give([unreachable_frame(state, own)] * 4)  # each takes one doubling back
    assert receive(peer, 4) == b"lost"
    assert time.monotonic() - begun < 0.2
    talk(peer, moving)


def test_a_program_can_not_bind_it_to_another_port(hold: Hold, pair: tuple[socket.socket, socket.socket]) -> None:
    """In repair mode the kernel lets it: it does not come home so, but is parked again as what it was."""
    _, moving = pair
    hold.steer(moving)
    state, kept = tcprepair.freeze(moving)
    state = tcprepair.park(moving, state, kept)
    tcpsock.disconnect(moving)  # it forgets the port, too, which connect() has chosen
    moving.bind((B, 0))
    with pytest.raises(MoveFailed, match="another name") as raised:
        tcprepair.rebuild(moving, state, kept)
    assert raised.value.errno == errno.EPERM and not raised.value.alive
    assert tcpsock.repairing(moving) and Kept.of(moving).is_of(state)
    hold.unsteer()


def test_a_program_can_not_claim_an_address(lab: Lab, hold: Hold, pair: tuple[socket.socket, socket.socket]) -> None:
    """Of a connection that began on a ring the kernel has to know the address."""
    _, moving = pair
    hold.steer(moving)
    state, kept = tcprepair.freeze(moving)
    with without_address(lab, "up"), lab.b.socket(socket.AF_INET, socket.SOCK_STREAM) as new:
        with pytest.raises(MoveFailed, match="beginning") as raised:
            tcprepair.begin(new, state)
        assert raised.value.errno == errno.ENETUNREACH
        assert new.getsockname() == ("0.0.0.0", 0)
        assert new.getsockopt(SOL, tcpsock.SO_BINDTOIFINDEX) == 0
    tcprepair.thaw(moving, kept, probe=False)
    hold.unsteer()


def test_what_can_be_guessed() -> None:
    assert Kept(("10.0.0.1", 1), ("10.0.0.2", 2)).reuse
