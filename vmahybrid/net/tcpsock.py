"""TCP_REPAIR and what else the kernel tells of a TCP socket, typed (linux/tcp.h).

O_NONBLOCK belongs to the open file, which the program shares: nothing here touches it, and nothing here waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import select
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from vmahybrid.net.tcpstate import seq

TCP = socket.IPPROTO_TCP
SOL = socket.SOL_SOCKET

# linux/tcp.h
TCP_CORK, TCP_KEEPIDLE, TCP_KEEPINTVL, TCP_KEEPCNT, TCP_WINDOW_CLAMP, TCP_USER_TIMEOUT = 3, 4, 5, 6, 10, 18
TCP_REPAIR, TCP_REPAIR_QUEUE, TCP_QUEUE_SEQ, TCP_REPAIR_OPTIONS, TCP_TIMESTAMP = 19, 20, 21, 22, 24
TCP_REPAIR_WINDOW, TCP_FASTOPEN_CONNECT, TCP_ULP = 29, 30, 31
REPAIR_ON, REPAIR_OFF, REPAIR_OFF_NO_WP = 1, 0, -1
NO_QUEUE, RECV_QUEUE, SEND_QUEUE = range(3)
TCPI_OPT_TIMESTAMPS, TCPI_OPT_SACK, TCPI_OPT_WSCALE, TCPI_OPT_USEC_TS = 1, 2, 4, 64
TCPOPT_MSS, TCPOPT_WINDOW, TCPOPT_SACK, TCPOPT_TIMESTAMP = 2, 3, 4, 8   # kinds of RFC 9293 and 7323
MAX_TCP_WINDOW = 32767      # the most that TCP_MAXSEG takes
# asm-generic/socket.h
SO_ATTACH_FILTER, SO_DETACH_FILTER, SO_SNDBUFFORCE, SO_RCVBUFFORCE = 26, 27, 32, 33
SO_PEEK_OFF, SO_ZEROCOPY, SO_BINDTOIFINDEX, SO_BUF_LOCK = 42, 60, 62, 72
SNDBUF_LOCK, RCVBUF_LOCK = 1, 2
_SO_GET_FILTER = 26
_SIOCINQ, _SIOCOUTQ = 0x541B, 0x5411    # linux/sockios.h
_IP_TRANSPARENT = 19    # linux/in.h
_LOOPBACK = 1           # the ifindex of lo, in each network namespace
_HEADER_MAX = 1024      # bytes, as much as Python takes. A routing header of RFC 8754, to ::1, and nothing after that:
_VIA_LOOPBACK = struct.pack("BBBBBxxx16s", 0, 2, 4, 0, 0, socket.inet_pton(socket.AF_INET6, "::1"))
NO_ROUTE = frozenset({errno.ENETUNREACH, errno.EHOSTUNREACH})

_MEMBARRIER = {"x86_64": 324, "aarch64": 283, "riscv64": 283, "ppc64le": 365}
_MEMBARRIER_GLOBAL = 1
_CHUNK = 1 << 18    # bytes per write into a queue
_NO_MARK = (1 << 31) - 1    # bytes: TCP_NOTSENT_LOWAT that never matters

_libc = ctypes.CDLL(None, use_errno=True)


class Info(NamedTuple):
    """The part of struct tcp_info that is used here (kernel 4.6); times in microseconds."""

    state: int
    retransmits: int
    options: int
    wscales: int            # the peer's shift in the low half, ours in the high one
    rto: int
    snd_mss: int
    pmtu: int
    rtt: int
    rttvar: int
    ssthresh: int
    cwnd: int
    advmss: int
    total_retrans: int
    bytes_acked: int
    bytes_received: int
    segs_out: int
    segs_in: int
    notsent: int

    @classmethod
    def of(cls, data: bytes) -> Self:
        """Of a struct tcp_info."""
        return cls._make(_INFO.unpack_from(data))


_INFO = struct.Struct("=BxBxxBBxI4xI40xI4xIIIII12xI16xQQIII")


class Window(NamedTuple):
    """struct tcp_repair_window, in bytes."""

    snd_wl1: int
    snd_wnd: int
    max_window: int
    rcv_wnd: int
    rcv_wup: int


_WINDOW = struct.Struct("=5I")


class Vitals(NamedTuple):
    """What changes whenever a connection does anything. The sequence numbers are the kernel's: FINs count."""

    state: int
    segs_in: int
    segs_out: int
    notsent: int
    unread: int
    unacked: int
    write_seq: int
    rcv_nxt: int
    window: Window


def grace() -> None:
    """Wait until no CPU handles a frame any more that came before: an RCU grace period. Raises OSError."""
    number = _MEMBARRIER.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, "membarrier: the number of the system call is not known on this machine")
    if _libc.syscall(number, _MEMBARRIER_GLOBAL, 0, 0) != 0:
        raise _last_error()


def _last_error() -> OSError:
    return OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def info(sock: socket.socket) -> Info:
    return Info.of(sock.getsockopt(TCP, socket.TCP_INFO, 256))


def events(sock: socket.socket, wanted: int) -> int:
    """Of poll(2), now; POLLERR and POLLHUP unasked."""
    poll = select.poll()
    poll.register(sock, wanted)
    return dict(poll.poll(0)).get(sock.fileno(), 0)


def unread(sock: socket.socket) -> int:
    """Bytes in the receive queue."""
    return int(struct.unpack("=i", fcntl.ioctl(sock, _SIOCINQ, bytes(4)))[0])


def unacked(sock: socket.socket) -> int:
    """Bytes in the send queue, sent or not."""
    return int(struct.unpack("=i", fcntl.ioctl(sock, _SIOCOUTQ, bytes(4)))[0])


# -- the filter


def has_filter(sock: socket.socket) -> bool:
    """Has somebody attached a filter, classic or eBPF?"""
    length = ctypes.c_uint32(0)     # of 0: the kernel tells how many instructions there are, and copies none
    result = _libc.getsockopt(sock.fileno(), SOL, _SO_GET_FILTER, None, ctypes.byref(length))
    return result != 0 or length.value != 0


def drop_all(sock: socket.socket) -> None:
    """Segments for the socket are dropped before they touch its state: `BPF_RET | BPF_K, 0`. Raises OSError."""
    code = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))
    sock.setsockopt(SOL, SO_ATTACH_FILTER, struct.pack("@HP", 1, ctypes.addressof(code)))


def take_all(sock: socket.socket) -> None:
    """Undo drop_all(). Idempotent."""
    with contextlib.suppress(FileNotFoundError):
        sock.setsockopt(SOL, SO_DETACH_FILTER, 0)


# -- repair mode


def repairing(sock: socket.socket) -> bool:
    return sock.getsockopt(TCP, TCP_REPAIR) != 0


def enter(sock: socket.socket) -> None:
    """Raises PermissionError without CAP_NET_ADMIN in the socket's network namespace."""
    sock.setsockopt(TCP, TCP_REPAIR, REPAIR_ON)


def leave(sock: socket.socket, *, reuse: bool, probe: bool) -> None:
    """``reuse``: SO_REUSEADDR as it was before repair mode, which clears it. ``probe``: the peer is asked to tell
    what it has; if it does not know the connection, it answers by a reset."""
    sock.setsockopt(TCP, TCP_REPAIR_QUEUE, NO_QUEUE)
    sock.setsockopt(TCP, TCP_REPAIR, REPAIR_OFF if probe else REPAIR_OFF_NO_WP)
    sock.setsockopt(SOL, socket.SO_REUSEADDR, reuse)


@contextlib.contextmanager
def queue(sock: socket.socket, which: int) -> Iterator[None]:
    """Choose a queue. No longer than needed: while it is the send queue, the kernel counts what it would send as sent,
    and a send() of the program would get into the chosen one."""
    sock.setsockopt(TCP, TCP_REPAIR_QUEUE, which)
    try:
        yield
    finally:
        sock.setsockopt(TCP, TCP_REPAIR_QUEUE, NO_QUEUE)


def get_u32(sock: socket.socket, name: int) -> int:
    """An option above 2^31 is a negative int."""
    return int(struct.unpack("=I", sock.getsockopt(TCP, name, 4))[0])


def set_u32(sock: socket.socket, name: int, value: int) -> None:
    sock.setsockopt(TCP, name, struct.pack("=I", seq(value)))


def get_seq(sock: socket.socket, which: int) -> int:
    """Of the end of a queue."""
    with queue(sock, which):
        return get_u32(sock, TCP_QUEUE_SEQ)


def set_seq(sock: socket.socket, which: int, value: int) -> None:
    """In CLOSE only, else PermissionError."""
    with queue(sock, which):
        set_u32(sock, TCP_QUEUE_SEQ, value)


def peek(sock: socket.socket, which: int, length: int) -> bytes:
    """The last ``length`` bytes of a queue, or fewer if it has not so many."""
    if length == 0:
        return b""
    # The first segment of the send queue may be acknowledged in part but is given whole; it has 64 KiB at most.
    with queue(sock, which), contextlib.suppress(BlockingIOError):
        return sock.recv(length + (1 << 17), socket.MSG_PEEK | socket.MSG_DONTWAIT)[-length:]
    return b""


@contextlib.contextmanager
def _any_amount_unsent(sock: socket.socket) -> Iterator[None]:
    """TCP_NOTSENT_LOWAT, or net.ipv4.tcp_notsent_lowat, is for what a program sends anew. Raises OSError."""
    mark = sock.getsockopt(TCP, socket.TCP_NOTSENT_LOWAT)
    sock.setsockopt(TCP, socket.TCP_NOTSENT_LOWAT, _NO_MARK)
    try:
        yield
    finally:
        sock.setsockopt(TCP, socket.TCP_NOTSENT_LOWAT, mark)


def fill(sock: socket.socket, which: int, data: bytes) -> None:
    """Append to a queue; with NO_QUEUE, outside repair mode, simply send. Raises OSError: EAGAIN when it is full."""
    if not data:
        return
    view = memoryview(data)
    with (queue(sock, which) if which != NO_QUEUE else contextlib.nullcontext(),
          _any_amount_unsent(sock) if which != RECV_QUEUE else contextlib.nullcontext()):
        while view:
            view = view[sock.send(view[:_CHUNK], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL):]


def get_window(sock: socket.socket) -> Window:
    return Window._make(_WINDOW.unpack(sock.getsockopt(TCP, TCP_REPAIR_WINDOW, _WINDOW.size)))


def set_window(sock: socket.socket, window: Window) -> None:
    sock.setsockopt(TCP, TCP_REPAIR_WINDOW, _WINDOW.pack(*window))


def vitals(sock: socket.socket) -> Vitals:
    """In repair mode."""
    now = info(sock)
    return Vitals(now.state, now.segs_in, now.segs_out, now.notsent, unread(sock), unacked(sock),
                  get_seq(sock, SEND_QUEUE), get_seq(sock, RECV_QUEUE), get_window(sock))


def disconnect(sock: socket.socket) -> None:
    """connect(AF_UNSPEC): in repair mode the connection is forgotten without a word to the peer."""
    if _libc.connect(sock.fileno(), struct.pack("=H14x", socket.AF_UNSPEC), 16) != 0:
        raise _last_error()


def join(sock: socket.socket, local: Any, peer: Any, *, anywhere: bool) -> None:
    """In repair mode, so that nothing is sent: the socket has these names, and is connected. It may be bound before.

    The kernel wants an address that is there, and a route, which a connection may lack for a time while it lives: its
    interface is down, or its address on the way to another. Then it is made over ``lo``, and finds its route when it
    sends. ``anywhere``: the address need not be there then. Raises OSError, of NO_ROUTE also where it is not.
    """
    try:
        _bind_and_connect(sock, local, peer)
    except OSError as error:
        if error.errno not in NO_ROUTE:
            raise
        with _by_loopback(sock, error, anywhere):
            _bind_and_connect(sock, local, peer)


def _bind_and_connect(sock: socket.socket, local: Any, peer: Any) -> None:
    try:
        sock.bind(local)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise OSError(errno.ENETUNREACH, error.strerror) from error
        if error.errno != errno.EINVAL:     # it was bound before, and still is
            raise
    sock.connect(peer)


@contextlib.contextmanager
def _by_loopback(sock: socket.socket, why: OSError, anywhere: bool) -> Iterator[None]:
    """Without a route IPv4 takes a peer to be on the link of the socket's device; IPv6 looks for the way to the first
    hop of a routing header. In the end the socket forgets the way. Raises ``why`` where that can't be, as with an
    address of the link, or the program has such a header."""
    wanted: list[tuple[int, int, int | bytes]] = [(SOL, SO_BINDTOIFINDEX, _LOOPBACK)]
    if anywhere:
        wanted.append((socket.SOL_IP, _IP_TRANSPARENT, 1))
    if sock.family == socket.AF_INET6:
        wanted.append((socket.IPPROTO_IPV6, socket.IPV6_RTHDR, _VIA_LOOPBACK))
    with contextlib.ExitStack() as back:
        try:
            for level, name, value in wanted:
                was: int | bytes = sock.getsockopt(level, name, *[_HEADER_MAX] * isinstance(value, bytes))
                if isinstance(was, bytes) and was:
                    raise why
                sock.setsockopt(level, name, value)
                back.callback(sock.setsockopt, level, name, was)
            yield
        except OSError:
            raise why from None


# -- buffers


@dataclass(frozen=True, slots=True)
class Buffers:
    """SO_SNDBUF and SO_RCVBUF as the kernel counts them, and which of them the program has fixed."""

    send: int
    receive: int
    locks: int

    @classmethod
    def of(cls, sock: socket.socket) -> Self:
        return cls(sock.getsockopt(SOL, socket.SO_SNDBUF), sock.getsockopt(SOL, socket.SO_RCVBUF),
                   sock.getsockopt(SOL, SO_BUF_LOCK))

    def apply(self, sock: socket.socket) -> None:
        """Set what differs; autotuning goes on where it did."""
        for name, force, value in ((socket.SO_SNDBUF, SO_SNDBUFFORCE, self.send),
                                   (socket.SO_RCVBUF, SO_RCVBUFFORCE, self.receive)):
            if sock.getsockopt(SOL, name) != value:
                sock.setsockopt(SOL, force, value // 2)     # the kernel doubles it
        sock.setsockopt(SOL, SO_BUF_LOCK, self.locks)
