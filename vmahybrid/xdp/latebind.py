"""AF_XDP sockets that are bound only when whoever got them has mapped their rings.

Before Linux 6.4 mmap(2) of a bound AF_XDP socket is EBUSY (net/xdp/xsk.c, xsk_mmap): there a ring is handed over
unbound, and bound in a second step. libxdp binds what it makes, hence the system calls here.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from typing import Literal, Self

from vmahybrid._xsk import lib
from vmahybrid.net.netns import NetnsWorker
from vmahybrid.xdp.umem import Umem
from vmahybrid.xdp.xsk import AF_XDP, SOL_XDP, XskSocket, bind_copy, check_sizes, retry_busy

FORCE = "VMAHYBRID_TEST_BIND_AFTER"  # environment of the service, for tests: two steps on any kernel


class LateXsk(XskSocket):
    """A socket with memory and rings. ``zerocopy`` and ``fallback`` are known after :meth:`bind`."""

    def __init__(self, sock: socket.socket, where: tuple[str, int], sizes: tuple[int, int, int, int],
                 first: LateXsk | None, wanted: Literal["auto"] | bool) -> None:
        """Use :meth:`open`."""
        super().__init__(sock.fileno(), where, sizes, "")
        self._sock, self._first, self._wanted = sock, first, wanted
        self.bound = False

    @classmethod
    def open(cls, umem: Umem, ifname: str, queue: int = 0, *, first: LateXsk | None = None, rx_size: int = 1024,
             tx_size: int = 1024, fill_size: int = 2048, comp_size: int = 1024,
             zerocopy: Literal["auto"] | bool = "auto", tx_budget: int = 64) -> Self:
        """In the calling thread's namespace. ``first`` is the socket that registered the same UMEM, None for itself.

        The rest as for :meth:`vmahybrid.xdp.xsk.Xsk.open`. Raises OSError (EPERM: no CAP_NET_RAW, ENOBUFS:
        RLIMIT_MEMLOCK), ValueError for ring sizes.
        """
        sizes = check_sizes(rx_size, tx_size, fill_size, comp_size)
        with contextlib.ExitStack() as stack:
            sock = stack.enter_context(socket.socket(AF_XDP, socket.SOCK_RAW, 0))
            if first is None:
                _register(sock.fileno(), umem)
            for option, size in zip((lib.XDP_RX_RING, lib.XDP_TX_RING, lib.XDP_UMEM_FILL_RING,
                                     lib.XDP_UMEM_COMPLETION_RING), sizes, strict=True):
                sock.setsockopt(SOL_XDP, option, size)
            self = cls(sock, (ifname, queue), sizes, first, zerocopy)
            self._set_tx_budget(tx_budget)
            stack.pop_all()
            return self

    def bind(self) -> None:
        """Bind to the queue, ``first`` having been bound; in a thread of the socket's namespace. EBUSY is retried.

        Raises OSError: EBUSY (queue taken, or whoever has the socket bound it elsewhere), EINVAL (no such queue, or the
        socket was meddled with), ENODEV (no such interface), EOPNOTSUPP (zero-copy insisted on).
        """
        try:
            ifindex = socket.if_nametoindex(self.ifname)
        except OSError as error:
            raise OSError(errno.ENODEV, f"no interface {self.ifname}") from error
        if self._first is not None:
            self._bind(ifindex, 0)
        elif self._wanted == False:  # noqa: E712 - not "auto" or True
            self._bind_copy(ifindex)
        else:
            self._bind_zerocopy(ifindex)
        self.bound = True
        self._read_zerocopy()

    def _bind_zerocopy(self, ifindex: int) -> None:
        try:
            self._bind(ifindex, lib.XDP_ZEROCOPY)
        except OSError as error:
            if self._wanted is True or error.errno in (errno.EBUSY, errno.ENODEV, errno.EPERM, errno.ENOBUFS):
                raise
            self.fallback = f"zero-copy refused: {os.strerror(error.errno or 0)}"
            self._bind_copy(ifindex)

    def _bind_copy(self, ifindex: int) -> None:
        _, self.chains = bind_copy(lambda mode: self._bind(ifindex, mode))

    def _bind(self, ifindex: int, mode: int) -> None:
        shared = -1 if self._first is None else self._first.fd

        def attempt() -> None:
            result = lib.vmh_xsk_bind(self.fd, ifindex, self.queue, mode | lib.XDP_USE_NEED_WAKEUP, shared)
            if result < 0:
                raise OSError(-result, f"binding an AF_XDP socket to {self.ifname} queue {self.queue}: "
                                       f"{os.strerror(-result)}")

        retry_busy(attempt)

    def close(self) -> None:
        """Close the socket. The queue is free when no other process has or maps it. Idempotent."""
        self.fd = -1
        self._sock.close()


def _register(fd: int, umem: Umem) -> None:
    with umem.mapped() as start:
        result = lib.vmh_umem_register(fd, start, umem.size, umem.frame_size)
    if result < 0:
        raise OSError(-result, f"registering {umem.size} bytes of UMEM: {os.strerror(-result)}")


def bound_can_be_mapped() -> bool:
    """Can the rings of a bound AF_XDP socket be mapped on this kernel? Tried on the loopback of a namespace that
    nobody else sees. Raises OSError when that can't be tried."""
    worker = NetnsWorker.open_private()
    try:
        return worker.call(_try_to_map)
    finally:
        worker.close()


def _try_to_map() -> bool:
    with (Umem(2) as umem,
          LateXsk.open(umem, "lo", rx_size=2, tx_size=2, fill_size=2, comp_size=2, zerocopy=False) as xsk):
        result = lib.vmh_xsk_map(xsk.fd, xsk.rx_size)
        if result < 0:
            raise OSError(-result, f"mapping an AF_XDP socket: {os.strerror(-result)}")
        xsk.bind()
        result = lib.vmh_xsk_map(xsk.fd, xsk.rx_size)
    if result not in (0, -errno.EBUSY):
        raise OSError(-result, f"mapping a bound AF_XDP socket: {os.strerror(-result)}")
    return bool(result == 0)


def two_steps() -> bool:
    """Must rings be granted in two steps? Raises OSError when that can't be found out."""
    return os.environ.get(FORCE) == "1" or not bound_can_be_mapped()
