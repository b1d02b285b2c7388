"""AF_XDP sockets, made with libxdp, for this process or for handing over."""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal, Self, TypeVar

from vmahybrid._xsk import ffi, lib
from vmahybrid.xdp.umem import Umem, check_power_of_two

AF_XDP = 44  # socket.AF_XDP comes with Python 3.13
SOL_XDP: int = lib.SOL_XDP
XDP_MAX_TX_SKB_BUDGET = 9  # linux/if_xdp.h, kernel 6.17: descriptors per wake-up in copy mode
BUSY_SECONDS = 0.150  # an old owner's queue is released 17-45 ms after its last close
NO_CHAINS = "VMAHYBRID_TEST_NO_CHAINS"  # environment of the service, for tests: as before Linux 6.6
XDP_USE_SG = 16  # linux/if_xdp.h, kernel 6.6: a frame may take several buffers
MAX_RING_SIZE = 1 << 20  # the kernel would try to allocate any size
STATISTICS = ("rx_dropped", "rx_invalid_descs", "tx_invalid_descs", "rx_ring_full", "rx_fill_ring_empty_descs",
              "tx_ring_empty_descs")


_T = TypeVar("_T")


def retry_busy(bind: Callable[[], _T]) -> _T:
    """What ``bind`` returns; OSError EBUSY of it is tried again for BUSY_SECONDS."""
    until = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            return bind()
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() >= until:
                raise
        time.sleep(0.002)


def bind_copy(bind: Callable[[int], _T]) -> tuple[_T, bool]:
    """What ``bind`` returns for flags of copy mode, and whether a long frame comes in several buffers then: not before
    Linux 6.6. Raises what ``bind`` raises without."""
    try:
        if os.environ.get(NO_CHAINS) != "1":
            return bind(lib.XDP_COPY | XDP_USE_SG), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return bind(lib.XDP_COPY), False


def check_sizes(rx_size: int, tx_size: int, fill_size: int, comp_size: int) -> tuple[int, int, int, int]:
    """The sizes of a socket's rings in descriptors. Raises ValueError naming the wrong one."""
    sizes = {"rx_size": rx_size, "tx_size": tx_size, "fill_size": fill_size, "comp_size": comp_size}
    for name, size in sizes.items():
        check_power_of_two(name, size)
        if size > MAX_RING_SIZE:
            raise ValueError(f"{name} is at most {MAX_RING_SIZE} descriptors, got {size}")
    return rx_size, tx_size, fill_size, comp_size


class XskSocket(ABC):
    """An AF_XDP socket for one queue of one interface, with its own four rings.

    The service never touches the rings: whoever gets ``fd`` maps them by XDP_MMAP_OFFSETS and fills them. Their sizes
    in descriptors are ``rx_size``, ``tx_size``, ``fill_size`` and ``comp_size``. ``zerocopy`` is what the kernel
    granted; ``fallback`` says why it is not more ("" if it is, or was not asked for). ``chains``, of the first socket
    of a UMEM: a frame longer than a buffer comes in several.
    """

    def __init__(self, fd: int, where: tuple[str, int], sizes: tuple[int, int, int, int], fallback: str) -> None:
        """Use ``open`` of a subclass."""
        self.fd = fd
        self.ifname, self.queue = where
        self.rx_size, self.tx_size, self.fill_size, self.comp_size = sizes
        self.fallback = fallback
        self.zerocopy = self.chains = False

    def _read_zerocopy(self) -> None:
        raw = self._getsockopt(lib.XDP_OPTIONS, ffi.sizeof("struct xdp_options"))
        self.zerocopy = bool(struct.unpack("I", raw)[0] & lib.XDP_OPTIONS_ZEROCOPY)

    def _getsockopt(self, name: int, size: int) -> bytes:
        with self._as_socket() as sock:
            return sock.getsockopt(SOL_XDP, name, size)

    def _as_socket(self) -> socket.socket:
        # All three given, since Python would else ask getsockname(), which AF_XDP does not have.
        return socket.socket(AF_XDP, socket.SOCK_RAW, 0, fileno=os.dup(self.fd))

    def _set_tx_budget(self, budget: int) -> None:
        with self._as_socket() as sock:
            try:
                sock.setsockopt(SOL_XDP, XDP_MAX_TX_SKB_BUDGET, budget)
                self.tx_budget = budget
            except OSError:  # older kernel, or a TX ring smaller than the budget: the default does
                self.tx_budget = 32

    def statistics(self) -> dict[str, int]:
        """Counters of the socket since it was made (struct xdp_statistics of linux/if_xdp.h). Raises OSError."""
        raw = self._getsockopt(lib.XDP_STATISTICS, ffi.sizeof("struct xdp_statistics"))
        counters = ffi.from_buffer("struct xdp_statistics *", raw)
        return {name: int(getattr(counters, name)) for name in STATISTICS}

    @abstractmethod
    def close(self) -> None:
        """Close the socket. The queue is free when no other process has or maps it. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


class Xsk(XskSocket):
    """A socket that is bound as it is made, by libxdp, which maps the rings meanwhile."""

    def __init__(self, umem: Umem, handle: Any, keep: tuple[Any, ...], where: tuple[str, int],
                 sizes: tuple[int, int, int, int], fallback: str) -> None:
        """Use :meth:`open`."""
        super().__init__(lib.xsk_socket__fd(handle), where, sizes, fallback)
        self._umem, self._handle, self._keep = umem, handle, keep
        self._read_zerocopy()

    @classmethod
    def open(cls, umem: Umem, ifname: str, queue: int = 0, *, rx_size: int = 1024, tx_size: int = 1024,
             fill_size: int = 2048, comp_size: int = 1024, zerocopy: Literal["auto"] | bool = "auto",
             tx_budget: int = 64) -> Self:
        """Bind to a queue in the calling thread's namespace. No XDP program is attached.

        The first socket of a UMEM registers it; further ones (other queues, same namespace) share it with rings of
        their own. ``zerocopy``: "auto" tries zero-copy, then copy; True insists; False is copy at once. EBUSY is
        retried for 150 ms, since the kernel releases a dead owner's queue late. ``tx_budget`` descriptors are sent per
        wake-up where the kernel lets us say so (32 otherwise).

        Raises OSError: EBUSY (queue taken), EINVAL (no such queue), ENODEV (no such interface), EOPNOTSUPP
        (zero-copy insisted on), EPERM (no CAP_NET_RAW), ENOBUFS (RLIMIT_MEMLOCK); ValueError for ring sizes.
        """
        sizes = check_sizes(rx_size, tx_size, fill_size, comp_size)
        xsk, fallback = None, ""
        if umem.registered:  # the mode of a shared UMEM is that of its first socket
            xsk = cls._retry_busy(umem, ifname, queue, sizes, 0, "")
        elif zerocopy != False:  # noqa: E712 - "auto" and True
            try:
                xsk = cls._retry_busy(umem, ifname, queue, sizes, lib.XDP_ZEROCOPY, "")
            except OSError as error:
                if zerocopy is True or error.errno in (errno.EBUSY, errno.ENODEV, errno.EPERM, errno.ENOBUFS):
                    raise
                fallback = f"zero-copy refused: {os.strerror(error.errno or 0)}"
        if xsk is None:
            bound, chains = bind_copy(lambda mode: cls._retry_busy(umem, ifname, queue, sizes, mode, fallback))
            bound.chains, xsk = chains, bound
        xsk._set_tx_budget(tx_budget)
        return xsk

    @classmethod
    def _retry_busy(cls, umem: Umem, ifname: str, queue: int, sizes: tuple[int, int, int, int], mode: int,
                    fallback: str) -> Self:
        return retry_busy(lambda: cls._bind(umem, ifname, queue, sizes, mode, fallback))

    @classmethod
    def _bind(cls, umem: Umem, ifname: str, queue: int, sizes: tuple[int, int, int, int], mode: int,
              fallback: str) -> Self:
        # A failed bind leaves libxdp's first socket half configured: each attempt registers anew.
        first = not umem.registered
        if first:
            fill, comp = umem.register(sizes[2], sizes[3])
        else:
            fill, comp = ffi.new("struct xsk_ring_prod *"), ffi.new("struct xsk_ring_cons *")
        rx, tx = ffi.new("struct xsk_ring_cons *"), ffi.new("struct xsk_ring_prod *")
        config = ffi.new("struct xsk_socket_config *", {
            "rx_size": sizes[0], "tx_size": sizes[1], "libxdp_flags": lib.XSK_LIBXDP_FLAGS__INHIBIT_PROG_LOAD,
            "bind_flags": mode | lib.XDP_USE_NEED_WAKEUP})
        out = ffi.new("struct xsk_socket **")
        handle = umem.acquire()
        try:
            result = lib.xsk_socket__create_shared(out, ifname.encode(), queue, handle, rx, tx, fill, comp, config)
            if result < 0:
                raise OSError(-result, f"binding an AF_XDP socket to {ifname} queue {queue}: {os.strerror(-result)}")
        except BaseException:
            umem.release()
            raise
        return cls(umem, out[0], (rx, tx, fill, comp), (ifname, queue), sizes, fallback)

    def close(self) -> None:
        """Unmap the rings and close the socket. The queue is free when no other process maps them. Idempotent."""
        if self.fd < 0:
            return
        self.fd = -1
        lib.xsk_socket__delete(self._handle)
        self._handle, self._keep = None, ()
        self._umem.release()
