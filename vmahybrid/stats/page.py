"""Reads a program's statistics page (contracts/stats_page.h) into the views that the API serves.

The page belongs to the program: it may lie, shrink, or change while it is read. So it is read with pread, never
mapped; every length is checked against the bytes that were obtained; text is stripped of control characters; and
nothing of it is believed but numbers. A slot that the program frees or fills during the read gives old or mixed
counters of that one slot, never an error.
"""

import ipaddress
import os
import socket
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from vmahybrid._contracts import ffi, lib
from vmahybrid.errors import VmahybridError
from vmahybrid.net.tcpask import Names
from vmahybrid.printable import clean
from vmahybrid.service.view import IomuxView, RingView, SocketView
from vmahybrid.stats.counters import IOMUX, RING, SOCKET
from vmahybrid.stats.sockopts import option_name
from vmahybrid.steering.reasons import Reason

MAX_SOCKETS = 1024  # VMA_STATS_FD_NUM is capped there (manual)
HEADER_SIZE: int = ffi.sizeof("struct vmh_stats_page")
SOCKET_SIZE: int = ffi.sizeof("struct vmh_sock_stats")
OPEN_SIZE: int = ffi.sizeof("struct vmh_open_name")

TCP_STATES = (
    "CLOSED", "LISTEN", "SYN_SENT", "SYN_RCVD", "ESTABLISHED", "FIN_WAIT_1", "FIN_WAIT_2", "CLOSE_WAIT", "CLOSING",
    "LAST_ACK", "TIME_WAIT",
)  # fmt: skip
PROTOCOLS = {socket.IPPROTO_UDP: "udp", socket.IPPROTO_TCP: "tcp", socket.IPPROTO_RAW: "raw"}
_RING_KINDS = {lib.VMH_RING_DIRECT: "direct", lib.VMH_RING_VETH: "veth", lib.VMH_RING_VERBS: "verbs"}
_MAPPED = bytes(10) + b"\xff\xff"

Read = Callable[[int, int], bytes]


class PageError(VmahybridError):
    """The file is no statistics page of this version, or is cut short."""

    def __init__(self, why: str) -> None:
        super().__init__(
            "statistics page", why, "restart the program; shim and service must be of one installation"
        )


@dataclass(slots=True)
class StatsPage:
    """One reading. ``rings`` hold what the page knows; the service fills in queues, frames and namespaces."""

    pid: int
    comm: str
    connected: bool                 # to a service
    reason: str                     # slug: why kernel only
    session: int
    started: float                  # seconds since the epoch
    sockets_over: int               # sockets that found no slot
    homecomings: int
    log_level: int
    log_details: int
    orders_waiting: bool            # it has not looked since the last one
    sockets: list[SocketView]
    iomux: list[IomuxView]
    rings: list[RingView]


def read_page(fd: int, pid: int | None = None) -> StatsPage:
    """The page behind ``fd``. ``pid`` (of SO_PEERCRED) replaces what the page claims.

    Raises PageError; OSError if the descriptor can't be read (a directory, a closed fd).
    """
    return decode(lambda size, offset: _pread(fd, size, offset), pid)


def decode_bytes(data: bytes, pid: int | None = None) -> StatsPage:
    """As :func:`read_page`, from a copy of the file. Raises PageError."""
    return decode(lambda size, offset: data[offset : offset + size], pid)


def header(fd: int) -> Any:
    """What stands before the sockets: struct vmh_stats_page. Raises PageError and OSError."""
    return _header(_pread(fd, HEADER_SIZE, 0))


def slots(fd: int, count: int) -> Iterable[Any]:
    """struct vmh_sock_stats of the sockets, as far as the file has them."""
    return _slots(_pread(fd, count * SOCKET_SIZE, HEADER_SIZE))


def open_connections(fd: int) -> list[Names]:
    """struct vmh_open_name: TCP connections of the program's rings of which the service was not told. Raises PageError
    and OSError."""
    body = _pread(fd, lib.VMH_STATS_OPEN * OPEN_SIZE, HEADER_SIZE + header(fd).nsocks * SOCKET_SIZE)
    count = len(body) // OPEN_SIZE
    if not count:
        return []
    return [
        Names(bytes(name.local_addr), socket.ntohs(name.local_port),
              bytes(name.remote_addr), socket.ntohs(name.remote_port))
        for name in ffi.from_buffer("struct vmh_open_name[]", body[: count * OPEN_SIZE]) if name.used
    ]


def decode(read: Read, pid: int | None = None) -> StatsPage:
    """``read(size, offset)`` gives at most ``size`` bytes; fewer means the end of the file. Raises PageError."""
    page = _header(read(HEADER_SIZE, 0))
    body = read(page.nsocks * SOCKET_SIZE, HEADER_SIZE)
    owner = int(page.pid) if pid is None else pid
    comm = _text(page.comm)
    return StatsPage(
        pid=owner,
        comm=comm,
        connected=page.state == 1,
        reason=Reason.from_code(page.reason).slug,
        session=int(page.session),
        started=page.started_ns / 1e9,
        sockets_over=int(page.socks_over),
        homecomings=int(page.calls_home),
        log_level=_signed(page.log_level),
        log_details=_signed(page.log_details),
        orders_waiting=page.asked != page.taken,
        sockets=_sockets(body, owner, comm),
        iomux=_iomux(page),
        rings=[_ring(ring, owner) for ring in page.rings if ring.used],
    )


def _header(data: bytes) -> Any:
    if len(data) < HEADER_SIZE:
        raise PageError(f"{len(data)} bytes long, its header alone is {HEADER_SIZE}")
    page = ffi.from_buffer("struct vmh_stats_page *", data)
    _check(page)
    return page


def _check(page: Any) -> None:
    if page.magic != lib.VMH_STATS_MAGIC:
        raise PageError(f"magic 0x{page.magic:08x}, not 0x{lib.VMH_STATS_MAGIC:08x}")
    if page.version != lib.VMH_STATS_VERSION:
        raise PageError(f"version {page.version}, this service reads version {lib.VMH_STATS_VERSION}")
    if page.sock_size != SOCKET_SIZE:
        raise PageError(f"sock_size {page.sock_size}, not {SOCKET_SIZE}")
    if page.nsocks > MAX_SOCKETS:
        raise PageError(f"nsocks {page.nsocks}, at most {MAX_SOCKETS} are possible")


def _sockets(body: bytes, pid: int, comm: str) -> list[SocketView]:
    return [_socket(slot, pid, comm) for slot in _slots(body) if slot.used]


def _slots(body: bytes) -> Iterable[Any]:
    count = len(body) // SOCKET_SIZE  # a file that shrank meanwhile has fewer slots than it said
    found: Iterable[Any] = ffi.from_buffer("struct vmh_sock_stats[]", body[: count * SOCKET_SIZE]) if count else ()
    return found


def _inode(slot: Any, pid: int) -> int:
    """0 if nobody knows. The shim asks for that of a TCP socket when it is about to come to a ring."""
    if slot.inode or slot.proto != socket.IPPROTO_TCP:
        return int(slot.inode)
    try:
        return os.stat(f"/proc/{pid}/fd/{slot.fd}").st_ino
    except OSError:
        return 0


def _socket(slot: Any, pid: int, comm: str) -> SocketView:
    proto = PROTOCOLS.get(slot.proto, str(slot.proto))
    reason = Reason.from_code(slot.reason)
    groups = [socket.inet_ntoa(slot.groups[i].to_bytes(4, sys.byteorder))
              for i in range(min(slot.ngroups, lib.VMH_STATS_GROUPS))]
    return SocketView(
        socket_id=f"{pid}:{slot.fd}",
        pid=pid,
        comm=comm,
        fd=slot.fd,
        inode=_inode(slot, pid),
        proto=proto,
        offloaded=bool(slot.offloaded),
        rx_offloaded=bool(slot.rx_offloaded),
        tx_offloaded=bool(slot.tx_offloaded),
        blocking=bool(slot.blocking),
        mc_loop=bool(slot.mc_loop),
        state=_state(slot.state) if proto == "tcp" else "",
        local=_endpoint(slot.local_addr, slot.local_port, slot.family),
        remote=_endpoint(slot.remote_addr, slot.remote_port, slot.family),
        mc_if=_address(slot.mc_if) if any(slot.mc_if) else "",
        groups=groups,
        reason=reason.slug,
        reason_text=reason.text,
        remedy=reason.remedy,
        reason_detail=option_name(slot.reason_detail),
        flow_id=slot.flow_id,
        ring_id=slot.ring_id,
        thread_rx=slot.thread_rx,
        thread_tx=slot.thread_tx,
        tx_os_reason=Reason.from_code(slot.tx_os_reason).slug,
        counters={c.name: int(getattr(slot, c.name)) for c in SOCKET},
    )


def _iomux(page: Any) -> list[IomuxView]:
    """poll, select, then the epoll sets in the order of their slots (the order in which vma_stats prints)."""
    views = [_iomux_view("poll", page.poll), _iomux_view("select", page.select)]
    return views + [_iomux_view("epoll", epoll) for epoll in page.epoll if epoll.used]


def _iomux_view(kind: str, slot: Any) -> IomuxView:
    epfd = int(slot.epfd) if kind == "epoll" else -1
    counters = {c.name: int(getattr(slot, c.name)) for c in IOMUX}
    return IomuxView(kind=kind, epfd=epfd, thread=slot.thread, counters=counters)


def _ring(slot: Any, pid: int) -> RingView:
    verbs = slot.kind == lib.VMH_RING_VERBS
    return RingView(
        ring_id=slot.ring_id,
        pid=pid,
        interface=_text(slot.ifname),
        ifindex=slot.ifindex,
        netns="",
        kind=_RING_KINDS.get(slot.kind, "direct"),
        mode="none" if verbs else "native" if slot.xdp_mode == lib.VMH_XDP_NATIVE else "generic",
        zerocopy=bool(slot.flags & lib.VMH_RING_F_ZEROCOPY),
        queues=0,
        frames=0,
        frame_size=0,
        rx_size=0,
        tx_size=0,
        reason="none",
        stats={c.name: int(getattr(slot, c.name)) for c in RING},
        backend="verbs" if verbs else "xdp",
    )


def _pread(fd: int, size: int, offset: int) -> bytes:
    """All of ``size`` bytes, or what there is up to the end of the file."""
    parts: list[bytes] = []
    while size and (part := os.pread(fd, size, offset)):
        parts.append(part)
        size -= len(part)
        offset += len(part)
    return b"".join(parts)


def _text(field: Any) -> str:
    raw: bytes = ffi.string(field)
    return clean(raw.decode("utf-8", "replace"))


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def _state(number: int) -> str:
    return TCP_STATES[number] if number < len(TCP_STATES) else str(number)


def _address(field: Any) -> str:
    raw = bytes(field)
    if raw[:12] == _MAPPED:
        return str(ipaddress.IPv4Address(raw[12:]))
    return str(ipaddress.IPv6Address(raw))


def _endpoint(field: Any, port: int, family: int) -> str:
    """As ss(8) and /proc have it: of an AF_INET6 socket with IPv4 addresses ``[::ffff:10.0.0.1]:80``."""
    raw = bytes(field)
    text = "::" if family == 6 else "0.0.0.0"
    if any(raw):
        text = socket.inet_ntop(socket.AF_INET6, raw) if family == 6 else _address(field)
    shown = str(socket.ntohs(port)) if port else "*"
    return f"[{text}]:{shown}" if ":" in text else f"{text}:{shown}"
