"""A kernel TCP socket on its way to a user-space stack and back, by TCP_REPAIR. See docs/tcp-home.md.

- :func:`freeze` holds an established socket still and reads it; :func:`thaw` lets it go on as it was.
  :func:`freezing` and :func:`together` do that with several in the time of one.
- :func:`park` keeps a frozen socket in repair mode, without data and timers, while a user-space stack owns the stream:
  `ss` shows it, the port stays taken, close() is silent, send() and recv() are refused (EINVAL, EPERM).
- :func:`rebuild` writes a newer state into the same socket and makes it the kernel's again; :func:`nudge` makes the
  peer tell what it has; :func:`end` closes our side, if that was closed.

Every call works in the socket's own network namespace, needs CAP_NET_ADMIN there (and CAP_NET_BIND_SERVICE for a local
port below 1024) and never waits but for the grace period of freeze().

Who calls keeps the program from using the socket meanwhile, and frames away from the kernel from before :func:`park`
until after :func:`rebuild`: for some microseconds the kernel has no socket for the connection, and would answer by a
reset. From freeze() to thaw() or rebuild() a filter on the socket drops what still comes there, so that the kernel
acknowledges nothing that the other stack would never see.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import select
import socket
import struct
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from vmahybrid.contracts import addr_to_bytes, addr_to_text, family_of
from vmahybrid.errors import Refused, VmahybridError
from vmahybrid.net import tcpsock
from vmahybrid.net.tcpask import Names
from vmahybrid.net.tcpsock import NO_QUEUE, RECV_QUEUE, SEND_QUEUE, SOL, TCP, Buffers, Info, Vitals, Window
from vmahybrid.net.tcpstate import MAX_QUEUE, MIN_MSS, SEQ_MASK, TcpFlag, TcpPhase, TcpState, after, seq
from vmahybrid.steering.reasons import Reason

_T = TypeVar("_T")

_READS = 8                      # attempts at a state that does not change while it is read
_WINDOW_ROOM = 8 << 20          # bytes of an announced window that a receive buffer is made for
_SMALL_WINDOW = 536             # TCP_MSS_DEFAULT: one segment may fill it
_SAME_CLOCK = 1000              # ms that a ring's clock may be ahead of that of the socket it was adopted from,
_LONG_MOVE = 60_000             # and behind it when its connection comes home
_CLOCK_WAIT = 10                # ms
_SEGMENT_COSTS = 2048           # bytes of a send buffer, beside the data
_WHAT = "TCP connection"
_WAITS = object()               # of together()
_FROZEN = (TcpPhase.ESTABLISHED, TcpPhase.CLOSE_WAIT, TcpPhase.FIN_WAIT2)

_SWITCHES = {                   # level, name; read as a bool
    TcpFlag.NODELAY: (TCP, socket.TCP_NODELAY),
    TcpFlag.CORK: (TCP, tcpsock.TCP_CORK),
    TcpFlag.KEEPALIVE: (SOL, socket.SO_KEEPALIVE),
}
_NUMBERS = {                    # field of TcpState: level, name
    "keep_idle_s": (TCP, tcpsock.TCP_KEEPIDLE),
    "keep_intvl_s": (TCP, tcpsock.TCP_KEEPINTVL),
    "keep_cnt": (TCP, tcpsock.TCP_KEEPCNT),
    "user_timeout_ms": (TCP, tcpsock.TCP_USER_TIMEOUT),
}
_IPV4_NUMBERS = {"ttl": (socket.SOL_IP, socket.IP_TTL), "tos": (socket.SOL_IP, socket.IP_TOS)}
_IPV6_NUMBERS = {"ttl": (socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS),
                 "tos": (socket.IPPROTO_IPV6, socket.IPV6_TCLASS)}
_AGREED = ((tcpsock.TCPI_OPT_WSCALE, TcpFlag.WSCALE), (tcpsock.TCPI_OPT_SACK, TcpFlag.SACK),
           (tcpsock.TCPI_OPT_TIMESTAMPS, TcpFlag.TIMESTAMPS))


class MoveFailed(VmahybridError):
    """The kernel refused a step of a move. ``alive``: the kernel's socket serves the connection again, as before."""

    def __init__(self, step: str, error: BaseException, alive: bool) -> None:
        super().__init__(_WHAT, f"{step}: {getattr(error, 'strerror', None) or error}")
        self.step, self.alive = step, alive
        self.errno: int | None = getattr(error, "errno", None)


@dataclass(frozen=True, slots=True)
class Kept:
    """What is the kernel's alone: the two ends as the socket names them, and what a move changes there. ``claimed``:
    the local end is a program's word, so it has to be an address of the machine."""

    local: Any                  # sockaddr as getsockname() has it
    peer: Any
    reuse: bool = True
    window_clamp: int = 0       # bytes, 0 unknown
    claimed: bool = False

    @classmethod
    def of(cls, sock: socket.socket) -> Kept:
        """Of a connected socket. SO_REUSEADDR of one that is in repair mode is not known any more; True lets a server
        bind its port again. Raises OSError."""
        ends = _plain(sock.getsockname()), _plain(sock.getpeername())
        if tcpsock.repairing(sock):
            return cls(*ends)
        return cls(*ends, bool(sock.getsockopt(SOL, socket.SO_REUSEADDR)),
                   sock.getsockopt(TCP, tcpsock.TCP_WINDOW_CLAMP))

    def is_of(self, state: TcpState) -> bool:
        """Are these the ends of ``state``?"""
        return self.names() == (state.laddr, state.lport, state.raddr, state.rport)

    def names(self) -> Names:
        """Of the connection."""
        return Names(addr_to_bytes(self.local[0]), self.local[1], addr_to_bytes(self.peer[0]), self.peer[1])


def _plain(name: Any) -> Any:
    """A sockaddr without the name of an interface, which need not be one of this namespace: the index stays."""
    return name[0].partition("%")[0], *name[1:]


def _refuse(why: str) -> Refused:
    return Refused(_WHAT, why, Reason.TCP_STATE.remedy, Reason.TCP_STATE)


# -- may it be moved?


def examine(sock: socket.socket) -> TcpPhase:
    """The state of a socket that may be moved, as far as can be seen from outside. Changes nothing.

    Raises Refused (TCP_STATE) with the reason, for: no TCP of its own (MPTCP, SMC), opening or closing, repair mode, an
    upper layer (TLS), a socket filter, SO_PEEK_OFF, urgent data to read, a pending error, unacknowledged MSG_ZEROCOPY,
    timestamps in microseconds. Not visible, so the caller's to know: urgent data sent, TCP_MD5SIG, TCP-AO, sockmaps.
    """
    if (sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM
            or sock.getsockopt(SOL, socket.SO_PROTOCOL) != TCP):
        raise _refuse("it is no plain TCP socket")
    phase = _examine_state(sock)
    if tcpsock.repairing(sock):
        raise _refuse("it is in repair mode already")
    if sock.getsockopt(TCP, tcpsock.TCP_ULP, 16).rstrip(b"\0"):
        raise _refuse("a protocol above it is in the kernel (TLS)")
    if tcpsock.info(sock).options & tcpsock.TCPI_OPT_USEC_TS:
        raise _refuse("its timestamps count microseconds")
    if tcpsock.has_filter(sock):
        raise _refuse("a filter is attached to it")
    if _peek_offset(sock) >= 0:
        raise _refuse("SO_PEEK_OFF is set")
    if sock.getsockopt(SOL, tcpsock.SO_ZEROCOPY) and tcpsock.unacked(sock):
        raise _refuse("zero-copy sends are not acknowledged yet")
    return phase


def _examine_state(sock: socket.socket) -> TcpPhase:
    """What frames can change."""
    phase = TcpPhase(tcpsock.info(sock).state)
    if phase not in _FROZEN:
        raise _refuse(f"its state is {phase.name}")
    events = tcpsock.events(sock, select.POLLPRI)
    if events & select.POLLPRI:
        raise _refuse("urgent data waits to be read")
    if events & select.POLLERR:
        raise _refuse("an error or a message of the error queue waits to be read")
    return phase


def _peek_offset(sock: socket.socket) -> int:
    try:
        return sock.getsockopt(SOL, tcpsock.SO_PEEK_OFF)
    except OSError:     # before 6.9 TCP does not know it
        return -1


# -- freeze and thaw


def freezing(sock: socket.socket) -> Generator[None, None, tuple[TcpState, Kept]]:
    """freeze() in two steps, for several at a time: whoever goes on after the first has waited for an RCU grace period
    (tcpsock.grace()), or throws in why not."""
    examine(sock)
    kept = Kept.of(sock)
    try:
        tcpsock.drop_all(sock)
        yield
        _examine_state(sock)
        tcpsock.enter(sock)
        return _read(sock), kept
    except BaseException as error:
        tcpsock.take_all(sock)
        if tcpsock.repairing(sock):
            tcpsock.leave(sock, reuse=kept.reuse, probe=True)
        if isinstance(error, PermissionError):
            raise _refuse("the kernel forbids TCP_REPAIR, or a filter on it (CAP_NET_ADMIN)") from error
        raise


def freeze(sock: socket.socket) -> tuple[TcpState, Kept]:
    """Hold the connection still and read it; the socket is in repair mode then, and has lost nothing.

    Takes an RCU grace period (5 to 30 ms) in which the segments that came before are done with; it is one for steering,
    too. Raises Refused (TCP_STATE), OSError; the socket is as it was then.
    """
    (found,) = together([freezing(sock)], [graceful])
    if isinstance(found, BaseException):
        raise found
    return found


def unfreeze(sock: socket.socket, check: Callable[[TcpState], object]) -> TcpState:
    """Of one that somebody else froze, and has left so: it goes on as it was. ``check`` raises where it may not. Raises
    Refused (TCP_STATE), OSError."""
    if not tcpsock.repairing(sock):
        raise _refuse("it is not in repair mode")
    state, kept = _read(sock), Kept.of(sock)
    check(state)
    tcpsock.take_all(sock)
    tcpsock.leave(sock, reuse=kept.reuse, probe=True)
    return state


def together(steps: Sequence[Generator[None, None, _T]],
             waits: Sequence[Callable[[list[int]], Mapping[int, Exception] | None]],
             done: Callable[[int, _T | BaseException], None] | None = None) -> list[_T | BaseException]:
    """What each returns, or raises, of several that wait for the same: at each yield for the next of ``waits``, which
    is told the places of those that do, and whose error is thrown into each of them; those that it returns, into those
    at these places. ``done`` hears of each by its place, at once."""
    found: list[Any] = [_WAITS] * len(steps)

    def go_on(failed: Mapping[int, Exception]) -> None:
        for at in _places(found):
            found[at] = _step(partial(steps[at].throw, failed[at]) if at in failed else steps[at].__next__)
            if found[at] is not _WAITS and done is not None:
                done(at, found[at])

    go_on({})
    for wait in waits:
        failed: Mapping[int, Exception] = {}
        if waiting := _places(found):
            try:
                failed = wait(waiting) or {}
            except Exception as error:
                failed = dict.fromkeys(waiting, error)
        go_on(failed)
    return found


def _places(found: list[Any]) -> list[int]:
    """Of those that wait."""
    return [at for at, end in enumerate(found) if end is _WAITS]


def _step(step: Callable[[], None]) -> Any:
    try:
        step()
    except StopIteration as end:
        return end.value
    except BaseException as error:
        return error
    return _WAITS


def graceful(waiting: list[int]) -> None:
    """For together(): an RCU grace period. Raises OSError."""
    tcpsock.grace()


def thaw(sock: socket.socket, kept: Kept, *, probe: bool = True) -> None:
    """A frozen socket that was not parked goes on as it was. ``probe``: ask the peer for what was dropped meanwhile;
    False as long as frames are steered away. Raises OSError."""
    tcpsock.take_all(sock)
    tcpsock.leave(sock, reuse=kept.reuse, probe=probe)


def _read(sock: socket.socket) -> TcpState:
    """Megabytes take tens of milliseconds on a busy machine, and reading sends the ACK that the kernel owes: a queue in
    which nothing has moved is not read again."""
    held: dict[int, tuple[tuple[int, int], bytes]] = {}    # by queue: its length and end, and its bytes

    def queued(which: int, length: int, end: int) -> bytes:
        if which not in held or held[which][0] != (length, end):
            held[which] = (length, end), tcpsock.peek(sock, which, length)
        return held[which][1]

    for _ in range(_READS):
        before = tcpsock.vitals(sock)
        if max(before.unacked, before.unread) > MAX_QUEUE:
            raise _refuse(f"more than {MAX_QUEUE} bytes are in a queue")
        send = queued(SEND_QUEUE, before.unacked, before.write_seq)
        receive = queued(RECV_QUEUE, before.unread, before.rcv_nxt)
        state = _state(sock, before, send, receive)
        if tcpsock.vitals(sock) == before and (len(send), len(receive)) == (before.unacked, before.unread):
            return state
    raise _refuse("it does not come to rest")


def _state(sock: socket.socket, vitals: Vitals, send: bytes, receive: bytes) -> TcpState:
    info = tcpsock.info(sock)
    mss = sock.getsockopt(TCP, socket.TCP_MAXSEG)   # in repair mode: what the peer's SYN allowed
    if mss < MIN_MSS:
        raise _refuse(f"the peer takes no more than {mss} bytes in a segment")
    local, peer = _plain(sock.getsockname()), _plain(sock.getpeername())
    flags, linger_s = _flags(sock, info)
    write_seq, rcv_nxt, window = _without_fins(vitals, flags)
    # The kernel's own idea of its window may be larger than what the header can announce.
    window = window._replace(rcv_wnd=min(window.rcv_wnd, 0xFFFF << (info.wscales >> 4)))
    return TcpState(
        phase=TcpPhase(info.state), flags=flags,
        laddr=addr_to_bytes(local[0]), lport=local[1], raddr=addr_to_bytes(peer[0]), rport=peer[1],
        snd_wscale=info.wscales & 15, rcv_wscale=info.wscales >> 4,
        snd_una=seq(write_seq - len(send)), snd_nxt=seq(write_seq - vitals.notsent), rcv_nxt=rcv_nxt,
        **window._asdict(), send=send, receive=receive,
        mss=mss, snd_mss=info.snd_mss, rcv_mss=info.advmss, pmtu=info.pmtu,
        tsval_now=_clock(sock) if flags & TcpFlag.TIMESTAMPS else 0,
        srtt_us=info.rtt, rttvar_us=info.rttvar, rto_us=info.rto, retries=info.retransmits,
        cwnd=min(info.cwnd * info.snd_mss, SEQ_MASK), ssthresh=min(info.ssthresh * info.snd_mss, SEQ_MASK),
        **{field: sock.getsockopt(*option) for field, option in _options(addr_to_bytes(local[0])).items()},
        linger_s=linger_s, **_fixed_buffers(sock), bytes_acked=info.bytes_acked, bytes_received=info.bytes_received,
        segs_out=info.segs_out, segs_in=info.segs_in, retransmits=info.total_retrans)


def _clock(sock: socket.socket) -> int:
    """The next TSval. The lowest bit is not the clock's but says microseconds: rounded up, and more than what the
    kernel may send within the next millisecond; a step back would make the peer's PAWS drop all that follows."""
    return seq((tcpsock.get_u32(sock, tcpsock.TCP_TIMESTAMP) | 1) + 2)


def _options(address: bytes) -> dict[str, tuple[int, int]]:
    """``address``: one of the connection's. What goes out on an AF_INET6 socket over IPv4 has the options of IPv4."""
    return _NUMBERS | (_IPV4_NUMBERS if family_of(address) == 4 else _IPV6_NUMBERS)


def _flags(sock: socket.socket, info: Info) -> tuple[TcpFlag, int]:
    """And the seconds of SO_LINGER."""
    flags = TcpFlag(0)
    for bit, flag in _AGREED:
        if info.options & bit:
            flags |= flag
    for flag, option in _SWITCHES.items():
        if sock.getsockopt(*option):
            flags |= flag
    if info.state == TcpPhase.CLOSE_WAIT:
        flags |= TcpFlag.PEER_FIN
    elif tcpsock.events(sock, select.POLLRDHUP) & select.POLLRDHUP:
        flags |= TcpFlag.SHUT_RD
    if info.state == TcpPhase.FIN_WAIT2:
        flags |= TcpFlag.FIN_WANTED | TcpFlag.FIN_SENT | TcpFlag.FIN_ACKED
    on, seconds = struct.unpack("=ii", sock.getsockopt(SOL, socket.SO_LINGER, 8))
    return flags | (TcpFlag.LINGER if on else TcpFlag(0)), seconds % 2**32   # "for ever" has any sign here


def _without_fins(vitals: Vitals, flags: TcpFlag) -> tuple[int, int, Window]:
    """write_seq, rcv_nxt and the window as tcp_state.h counts them."""
    write_seq, rcv_nxt, window = vitals.write_seq, vitals.rcv_nxt, vitals.window
    if flags & TcpFlag.FIN_SENT:
        write_seq = seq(write_seq - 1)
    if flags & TcpFlag.PEER_FIN:
        rcv_nxt = seq(rcv_nxt - 1)
        if after(window.rcv_wup, rcv_nxt):
            window = window._replace(rcv_wup=rcv_nxt, rcv_wnd=window.rcv_wnd + 1)
    return write_seq, rcv_nxt, window


def _fixed_buffers(sock: socket.socket) -> dict[str, int]:
    buffers = Buffers.of(sock)
    return {"sndbuf": buffers.send // 2 if buffers.locks & tcpsock.SNDBUF_LOCK else 0,
            "rcvbuf": buffers.receive // 2 if buffers.locks & tcpsock.RCVBUF_LOCK else 0}


# -- park


def park(sock: socket.socket, state: TcpState, kept: Kept, *, anew: bool = False) -> TcpState:
    """The frozen socket becomes a silent placeholder. ``state`` is what freeze() gave: if it has data, or by ``anew``,
    the connection is made again without, as the kernel would go on resending it.

    Returned is ``state`` with the clock as it is now: the kernel's timers have gone on since freeze(), and an older
    timestamp than those that they sent would not be taken by the peer. Raises MoveFailed; the connection is the
    kernel's again if that says ``alive``.
    """
    anew = anew or bool(state.send or state.receive)
    try:
        sock.setsockopt(SOL, socket.SO_KEEPALIVE, 0)
        if anew:
            tcpsock.disconnect(sock)    # ends the timers, and leaves the clock
        if state.flags & TcpFlag.TIMESTAMPS:
            state = dataclasses.replace(state, tsval_now=_clock(sock))
        if anew:
            _write(sock, _emptied(state), kept, clock=False)
    except OSError as error:
        raise MoveFailed("parking", error, _back(sock, state, kept)) from error
    return state


def _emptied(state: TcpState) -> TcpState:
    return dataclasses.replace(state, send=b"", receive=b"", snd_una=state.write_seq, snd_nxt=state.write_seq,
                               rcv_wup=state.rcv_nxt)


def _back(sock: socket.socket, state: TcpState, kept: Kept) -> bool:
    """After a park that failed: the connection as it was frozen. Frames are still steered away. Did it succeed?"""
    try:
        if _untouched(sock, state):
            _finish(sock, state, kept, b"")
        else:
            _write_and_finish(sock, state, kept)
    except OSError:
        return False
    return True


def _untouched(sock: socket.socket, state: TcpState) -> bool:
    """Is the socket in repair mode still what ``state`` says? Positions in the two streams say what is in between."""
    vitals = tcpsock.vitals(sock)
    write_seq, rcv_nxt, _ = _without_fins(vitals, state.flags)
    return ((vitals.state, vitals.unread, vitals.unacked, vitals.notsent, write_seq, rcv_nxt)
            == (state.phase, len(state.receive), len(state.send), state.unsent, state.write_seq, state.rcv_nxt))


# -- home


def rebuild(sock: socket.socket, state: TcpState, kept: Kept | None = None, *, fin_follows: bool = False) -> Kept:
    """Give the connection back to the kernel, under the same descriptor. Frames are still steered away; when they are
    not any more, the caller gives the kernel those that came meanwhile, and calls :func:`nudge`.

    ``kept`` is what freeze() gave; without, it is guessed. Returned is what was used. With TcpFlag.PEER_FIN the caller
    promises by ``fin_follows`` to give the kernel :func:`vmahybrid.net.tcpfin.fin_frame` as well: the peer does not
    repeat what was acknowledged. Our FIN comes last, by :func:`end`.

    Raises Refused (TCP_STATE), the socket being as it was; MoveFailed: it is parked again, or closed if that can't be,
    and the user-space stack keeps the connection.
    """
    kept = _check_home(sock, state, kept, fin_follows)
    try:
        if _untouched(sock, state):
            _set_clock(sock, state)
            tcpsock.set_window(sock, _window(state))
            _finish(sock, state, kept, b"")
        else:
            _write_and_finish(sock, state, kept)
    except OSError as error:
        with contextlib.suppress(OSError):
            tcpsock.drop_all(sock)
            _write(sock, _emptied(state), kept)
        raise MoveFailed("rebuilding", error, alive=False) from error
    return kept


def begin(sock: socket.socket, state: TcpState, anywhere: bool = False) -> Kept:
    """Make a socket that was never bound or connected that of a connection which the other stack has opened. Returned
    is what nudge() needs. ``anywhere``: its address need not be there.

    Raises Refused (TCP_STATE), MoveFailed: the socket is as it was.
    """
    try:
        _check_state(state)
        if tcpsock.repairing(sock) or tcpsock.info(sock).state != TcpPhase.CLOSE:
            raise _refuse("the socket is in use")
        kept = Kept(_name(sock, state.laddr, state.lport), _name(sock, state.raddr, state.rport),
                    bool(sock.getsockopt(SOL, socket.SO_REUSEADDR)), claimed=not anywhere)
        tcpsock.drop_all(sock)
    except (OSError, ValueError) as error:
        raise _refuse(f"no connection can be so: {error}") from error
    try:
        _write_and_finish(sock, state, kept)
    except OSError as error:
        with contextlib.suppress(OSError):
            tcpsock.enter(sock)
            tcpsock.disconnect(sock)
            tcpsock.take_all(sock)
            tcpsock.leave(sock, reuse=kept.reuse, probe=False)
        raise MoveFailed("beginning", error, alive=False) from error
    return kept


def placehold(sock: socket.socket, local: Any, peer: Any) -> Kept:
    """Park a socket that was never bound or connected as one of a connection that another stack has, without its state:
    rebuild() or forgetting it comes next. Frames of the connection must not reach the kernel.

    Raises Refused (TCP_STATE): the socket is as it was, but that it may be bound now.
    """
    try:
        if tcpsock.repairing(sock) or tcpsock.info(sock).state != TcpPhase.CLOSE:
            raise _refuse("the socket is in use")
        kept = Kept(local, peer, bool(sock.getsockopt(SOL, socket.SO_REUSEADDR)))
        tcpsock.drop_all(sock)
        sock.setsockopt(SOL, socket.SO_KEEPALIVE, 0)
        tcpsock.enter(sock)
    except OSError as error:
        raise _refuse(f"it can't be parked: {error}") from error
    try:
        _join(sock, dataclasses.replace(kept, claimed=True))
    except OSError as error:
        with contextlib.suppress(OSError):
            tcpsock.disconnect(sock)
            tcpsock.take_all(sock)
            tcpsock.leave(sock, reuse=kept.reuse, probe=False)
        raise _refuse(f"it can't be parked: {error}") from error
    return kept


def _name(sock: socket.socket, address: bytes, port: int) -> tuple[str, int]:
    """As a socket of that family has it. Raises ValueError for an IPv6 address on an AF_INET socket."""
    if sock.family == socket.AF_INET6:
        return socket.inet_ntop(socket.AF_INET6, address), port
    if family_of(address) == 6:
        raise ValueError("an IPv6 address on an AF_INET socket")
    return addr_to_text(address), port


def _check_state(state: TcpState) -> None:
    state.check()
    _check_lives(state)


def _check_lives(state: TcpState) -> None:
    if state.flags & TcpFlag.PEER_FIN and state.flags & TcpFlag.FIN_ACKED:
        raise _refuse("both sides have closed it")
    if state.error:
        raise _refuse(f"it has failed: errno {state.error}")


def _check_home(sock: socket.socket, state: TcpState, kept: Kept | None, fin_follows: bool) -> Kept:
    """The state comes from an unprivileged process: it must be of this very connection."""
    try:
        state.check()
        if not tcpsock.repairing(sock):
            raise _refuse("the socket is not parked")
        ends = None if tcpsock.info(sock).state == TcpPhase.CLOSE else Kept.of(sock)
        kept = kept or ends or Kept.of(sock)
    except ValueError as error:
        raise _refuse(f"no connection can be so: {error}") from error
    except OSError as error:
        raise _refuse(f"the socket is not parked: {error.strerror}") from error
    if not kept.is_of(state) or (ends and not ends.is_of(state)):
        raise _refuse("the state is of another connection than the socket")
    _check_lives(state)
    if state.flags & TcpFlag.PEER_FIN and not fin_follows:
        raise _refuse("the peer's FIN can't be repeated")
    return kept


def _write_and_finish(sock: socket.socket, state: TcpState, kept: Kept) -> None:
    lasting = _lasting(Buffers.of(sock), state)
    # The kernel counts its own structures, too, of each segment.
    send = 2 * len(state.send) + len(state.send) // _segment(state) * _SEGMENT_COSTS + (1 << 17)
    dataclasses.replace(lasting, send=max(lasting.send, send),
                        receive=max(lasting.receive, 2 * len(state.receive) + (1 << 17))).apply(sock)
    try:
        _write(sock, state, kept)
        _finish(sock, state, kept, state.send[len(state.send) - state.unsent:])
    finally:
        lasting.apply(sock)


def _lasting(buffers: Buffers, state: TcpState) -> Buffers:
    """The buffers that stay: a larger one for a window that the other stack announced, and the kernel would not have.
    Never for a window of the kernel's own, or each move would make it larger."""
    if buffers.locks & tcpsock.RCVBUF_LOCK or state.rcv_wnd <= buffers.receive:
        return buffers
    return dataclasses.replace(buffers, receive=max(buffers.receive, 2 * min(state.rcv_wnd, _WINDOW_ROOM)))


def _set_clock(sock: socket.socket, state: TcpState) -> None:
    """In repair mode."""
    if state.flags & TcpFlag.TIMESTAMPS and not _own_clock_will_do(sock, state):
        tcpsock.set_u32(sock, tcpsock.TCP_TIMESTAMP, seq(state.tsval_now + 1) & ~1)


def _own_clock_will_do(sock: socket.socket, state: TcpState) -> bool:
    """Whether the socket's own clock is not behind any timestamp that was sent. A ring's runs some milliseconds ahead
    of it (_clock()): where one was sent so lately they are waited for. Else the peer's TIME_WAIT would not take the
    SYN of the next connection of this name, which has the kernel's clock."""
    own = tcpsock.get_u32(sock, tcpsock.TCP_TIMESTAMP)
    if own & 1 or not -_LONG_MOVE <= _signed(state.tsval_now - own) <= _SAME_CLOCK:
        return False    # microseconds; or it began on a ring, with a clock of that
    behind = _signed(state.tsval_now - state.tsval_idle - own)
    if behind > _CLOCK_WAIT:
        return False
    if behind > 0:
        time.sleep(behind / 1000)
    return True


def _signed(difference: int) -> int:
    """Of two numbers modulo 2^32."""
    return (difference + (1 << 31)) % (1 << 32) - (1 << 31)


def _write(sock: socket.socket, state: TcpState, kept: Kept, *, clock: bool = True) -> None:
    """The connection anew, from CLOSE, with the queues but for what was never sent. It stays in repair mode.
    Without ``clock`` the kernel goes on with its own, else with that of ``state`` where its own will not do."""
    tcpsock.enter(sock)
    tcpsock.disconnect(sock)
    own = tcpsock.get_u32(sock, tcpsock.TCP_TIMESTAMP)
    if sock.getsockopt(TCP, tcpsock.TCP_FASTOPEN_CONNECT):  # it would put off the connect() below
        sock.setsockopt(TCP, tcpsock.TCP_FASTOPEN_CONNECT, 0)
    tcpsock.set_seq(sock, SEND_QUEUE, state.snd_una)
    tcpsock.set_seq(sock, RECV_QUEUE, state.copied_seq)
    # The segment size is computed on connecting, from this alone; TCP_REPAIR_OPTIONS comes too late for it.
    sock.setsockopt(TCP, socket.TCP_MAXSEG, _segment(state))
    _join(sock, kept)
    sock.setsockopt(TCP, socket.TCP_MAXSEG, 0)
    sock.setsockopt(TCP, tcpsock.TCP_REPAIR_OPTIONS, _agreed(state))
    if clock:
        _set_clock(sock, state)
    elif tcpsock.get_u32(sock, tcpsock.TCP_TIMESTAMP) & 1:     # connect() has made it one of microseconds
        tcpsock.set_u32(sock, tcpsock.TCP_TIMESTAMP, seq(own + 2) & ~1)
    tcpsock.fill(sock, RECV_QUEUE, state.receive)
    tcpsock.fill(sock, SEND_QUEUE, state.send[:len(state.send) - state.unsent])
    tcpsock.set_window(sock, _window(state))


def _join(sock: socket.socket, kept: Kept) -> None:
    """tcpsock.join(), unless the program has bound the socket to another name: raises OSError (EPERM) then, and it is
    not connected."""
    tcpsock.join(sock, kept.local, kept.peer, anywhere=not kept.claimed)
    if Kept.of(sock).names() != kept.names():
        tcpsock.disconnect(sock)
        raise OSError(errno.EPERM, "the socket is bound to another name")


def _segment(state: TcpState) -> int:
    """At most half of the largest window, as tcp_bound_to_half_wnd() has it, which knows of none yet: a longer segment
    would wait for a probe each time."""
    largest = max(state.max_window, state.snd_wnd)
    half = largest // 2 if largest > _SMALL_WINDOW else largest
    return min(state.mss, tcpsock.MAX_TCP_WINDOW, max(half, MIN_MSS) if half else state.mss)


def _agreed(state: TcpState) -> bytes:
    """struct tcp_repair_opt of what the SYNs said. Without a scale for windows the kernel must be told 0, or it scales
    ours by the one that it would have proposed."""
    scales = state.snd_wscale | state.rcv_wscale << 16 if state.flags & TcpFlag.WSCALE else 0
    options = [(tcpsock.TCPOPT_MSS, state.mss), (tcpsock.TCPOPT_WINDOW, scales)]
    if state.flags & TcpFlag.SACK:
        options.append((tcpsock.TCPOPT_SACK, 0))
    if state.flags & TcpFlag.TIMESTAMPS:
        options.append((tcpsock.TCPOPT_TIMESTAMP, 0))
    return b"".join(struct.pack("=II", *option) for option in options)


def _window(state: TcpState) -> Window:
    """The kernel takes no ``snd_wl1`` outside the window, but has one itself when it took a window back for want of
    memory."""
    end = seq(state.rcv_nxt + state.rcv_wnd)
    return Window(end if after(state.snd_wl1, end) else state.snd_wl1, state.snd_wnd,
                  max(state.max_window, state.snd_wnd), state.rcv_wnd, state.rcv_wup)


def _finish(sock: socket.socket, state: TcpState, kept: Kept, unsent: bytes) -> None:
    """Out of repair mode; then what the kernel does by itself: send, close, count options."""
    if kept.window_clamp:
        sock.setsockopt(TCP, tcpsock.TCP_WINDOW_CLAMP, kept.window_clamp)
    tcpsock.take_all(sock)
    tcpsock.leave(sock, reuse=kept.reuse, probe=False)
    tcpsock.fill(sock, NO_QUEUE, unsent)
    _restore_options(sock, state)
    if state.flags & TcpFlag.SHUT_RD:
        sock.shutdown(socket.SHUT_RD)


def _restore_options(sock: socket.socket, state: TcpState) -> None:
    """Numbers that the kernel does not take stay as they are: they are a program's, and the connection goes on."""
    for flag, option in _SWITCHES.items():
        wanted = bool(state.flags & flag)
        if bool(sock.getsockopt(*option)) != wanted:
            sock.setsockopt(*option, wanted)
    for field, option in _options(state.laddr).items():
        number = getattr(state, field)
        if 0 < number < 1 << 31 and sock.getsockopt(*option) != number:
            with contextlib.suppress(OSError):
                sock.setsockopt(*option, number)


def end(sock: socket.socket, state: TcpState) -> None:
    """Our FIN, if the program has closed its side: after nudge(), for which the connection has to be whole, and after
    the peer's FIN, so that the one who closed first has TIME_WAIT."""
    if state.flags & TcpFlag.FIN_WANTED:
        with contextlib.suppress(OSError):  # ENOTCONN: the peer has reset it
            sock.shutdown(socket.SHUT_WR)


def nudge(sock: socket.socket, kept: Kept) -> None:
    """Ask the peer what it has, by a window probe: once frames reach the kernel again. The acknowledgement shows what
    was lost on the way, in a round trip instead of a timeout (a second, after rebuild()). Raises OSError."""
    if tcpsock.info(sock).state == TcpPhase.ESTABLISHED:
        tcpsock.enter(sock)
        tcpsock.leave(sock, reuse=kept.reuse, probe=True)
