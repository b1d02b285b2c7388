"""Orders to a program by its statistics page, as libvma's vma_stats gives them: whoever may write the file may.

Counters are zeroed here, so that those of a program that sleeps are, too. For the rest the program looks into its page:
its internal thread within a second, else its next call on a socket that the kernel serves (shim/worker.c).

Functions take a descriptor that may be written, and raise PageError where it is no page of this version, or OSError;
:func:`taken_soon` asks a client.
"""

import os
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from vmahybrid._contracts import ffi, lib
from vmahybrid.errors import NotFound
from vmahybrid.stats.page import HEADER_SIZE, SOCKET_SIZE, header, slots

SOON = 1.5  # an internal thread looks once a second
WAITS = "it computes, or waits in a call that no ring may end, and takes this with the next one"
_PAGE = "struct vmh_stats_page"
_SOCK = "struct vmh_sock_stats"
_COUNTERS = {  # of each struct: the first counter of a range, and what stands behind the last one
    _SOCK: [("rx_packets", "rx_ready_packets")],
    "struct vmh_ring_stats": [("rx_packets", "pool_rx_free"), ("pool_rx_empty", "queue_len")],
    "struct vmh_iomux_stats": [("rx_ready", "polling_percent")],
}


def zero(fd: int) -> None:
    """Counters, not gauges; a high-water mark is the present value then."""
    page = header(fd)
    _clear(fd, "struct vmh_iomux_stats", _iomux())
    rings = ffi.sizeof("struct vmh_ring_stats")
    _clear(fd, "struct vmh_ring_stats", (ffi.offsetof(_PAGE, "rings") + i * rings
                                         for i, ring in enumerate(page.rings) if ring.used))  # fmt: skip
    for i, slot in enumerate(slots(fd, page.nsocks)):
        if slot.used:
            at = HEADER_SIZE + i * SOCKET_SIZE
            _clear(fd, _SOCK, [at])
            now = struct.pack("=QQ", slot.rx_ready_packets, slot.rx_ready_bytes)
            os.pwrite(fd, now, at + ffi.offsetof(_SOCK, "rx_ready_packets_max"))


def set_log(fd: int, level: int | None, details: int | None) -> None:
    """``level`` -1 to 8, ``details`` 0 to 3; None: as it is."""
    header(fd)
    if level is not None:
        _put(fd, "log_level", level)
    if details is not None:
        _put(fd, "log_details", details)
    ask(fd)


def dump(fd: int, sock: int, level: int) -> None:
    """``sock`` 0: all."""
    header(fd)
    _put(fd, "dump_fd", sock)
    _put(fd, "dump_level", level)
    _put(fd, "dump_wanted", 1)
    ask(fd)


def ask(fd: int) -> None:
    """The program is to look: the page has something for it, or the service has."""
    _put(fd, "asked", header(fd).asked + 1)


def listens(fd: int) -> bool:
    """Has the program a thread that hears the service?"""
    return bool(header(fd).listens)


def taken_soon(client: Any, pid: int) -> bool:
    """Of the last order, by a service's or a directory's client: has the program looked, in :data:`SOON` seconds?"""
    end = time.monotonic() + SOON
    with suppress(NotFound):    # it has ended
        while client.get("v1", "stats", pid)["process"].get("orders_waiting"):
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
    return True


def _iomux() -> Iterator[int]:
    yield from (ffi.offsetof(_PAGE, name) for name in ("select", "poll"))
    size, first = ffi.sizeof("struct vmh_iomux_stats"), ffi.offsetof(_PAGE, "epoll")
    yield from (first + i * size for i in range(lib.VMH_STATS_EPOLLS))


def _clear(fd: int, kind: str, places: Iterable[int]) -> None:
    for at in places:
        for first, behind in _COUNTERS[kind]:
            begin, end = (ffi.offsetof(kind, name) for name in (first, behind))
            os.pwrite(fd, bytes(end - begin), at + begin)


def _put(fd: int, field: str, value: int) -> None:
    os.pwrite(fd, struct.pack("=I", value & 0xFFFFFFFF), ffi.offsetof(_PAGE, field))
