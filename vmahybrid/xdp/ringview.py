"""Receiving and sending through AF_XDP sockets from Python: what a holder of the file descriptors does.

For tools, tests and small programs; a packet costs some microseconds of Python. Needs no privilege.
"""

from __future__ import annotations

import errno
import mmap
import os
import select
from collections.abc import Iterable
from typing import Self

from vmahybrid._xsk import ffi, lib

_BATCH = 64
_KICKS = 64  # wake-ups that may end in EAGAIN before send() gives up on the driver


class _Queue:
    """The rings of one socket and its own transmit frames."""

    def __init__(self, fd: int, sizes: tuple[int, int, int, int]) -> None:
        self.view = ffi.new("struct vmh_view *")
        result = lib.vmh_view_open(self.view, fd, *sizes)
        if result < 0:
            raise OSError(-result, f"mapping the rings of fd {fd}: {os.strerror(-result)}")
        self.fd = fd
        self.free: list[int] = []


class RingView:
    """The rings of one UMEM: ``receive``, ``send``, ``wait``. Frames are whole Ethernet frames without checksum.

    Half of the UMEM is posted for receiving, half is kept for sending, each shared evenly by the sockets. There must
    be one RingView per UMEM, as it takes all of its frames. The file descriptors stay the caller's.
    """

    def __init__(self, umem_fd: int, xsk_fds: Iterable[int], *, frames: int, frame_size: int, rx_size: int,
                 tx_size: int, fill_size: int, comp_size: int) -> None:
        """Geometry as the sockets were made with (bytes, descriptors per socket). Raises OSError, ValueError."""
        self._frame_size = frame_size
        self._queues: list[_Queue] = []
        self._area = mmap.mmap(umem_fd, frames * frame_size)
        self._descs = ffi.new(f"struct xdp_desc[{_BATCH}]")
        self._addrs = ffi.new(f"uint64_t[{_BATCH}]")
        self._poll = select.poll()
        try:
            for fd in xsk_fds:
                self._queues.append(_Queue(fd, (rx_size, tx_size, fill_size, comp_size)))
                self._poll.register(fd, select.POLLIN)
            if not self._queues:
                raise ValueError("a RingView needs at least one socket")
            self._share_frames(frames, fill_size)
        except BaseException:
            self.close()
            raise

    def _share_frames(self, frames: int, fill_size: int) -> None:
        share = frames // len(self._queues)
        for number, queue in enumerate(self._queues):
            addrs = [(number * share + i) * self._frame_size for i in range(share)]
            posted = min(share // 2, fill_size)
            self._post(queue, addrs[:posted])
            queue.free = addrs[posted:]

    def _post(self, queue: _Queue, addrs: list[int]) -> None:
        for at in range(0, len(addrs), _BATCH):
            part = addrs[at:at + _BATCH]
            if lib.vmh_view_fill(queue.view, part, len(part)) != len(part):
                raise OSError(errno.ENOSPC, "the fill ring is full")

    def receive(self, limit: int = _BATCH, queue: int | None = None) -> list[bytes]:
        """Up to ``limit`` (at most 64) frames per socket that have arrived, or of socket number ``queue`` only, oldest
        first per socket; never waits."""
        out: list[bytes] = []
        for q in self._queues if queue is None else [self._queues[queue]]:
            count = lib.vmh_view_receive(q.view, self._descs, min(limit, _BATCH))
            if count == 0:
                continue
            descs = [(int(d.addr), int(d.len)) for d in self._descs[0:count]]
            out += [self._area[addr:addr + length] for addr, length in descs]
            self._post(q, [addr - addr % self._frame_size for addr, _ in descs])
        return out

    def send(self, frames: Iterable[bytes], queue: int = 0) -> int:
        """Send frames by socket number ``queue``; how many were taken (fewer when no frame of the UMEM is free).

        Raises ValueError for a frame longer than ``frame_size``, OSError when the interface is gone (ENETDOWN, ENXIO).
        """
        q, sent = self._queues[queue], 0
        self._reap(q)
        for frame in frames:
            if len(frame) > self._frame_size:
                raise ValueError(f"a frame has at most {self._frame_size} bytes, got {len(frame)}")
            if not q.free:
                self._kick(q)
                self._reap(q)
            if not q.free:
                break
            addr = q.free[-1]
            self._area[addr:addr + len(frame)] = frame
            self._descs[0] = {"addr": addr, "len": len(frame), "options": 0}
            if lib.vmh_view_send(q.view, self._descs, 1) == 0:
                break
            q.free.pop()
            sent += 1
        self._kick(q)
        return sent

    def _reap(self, queue: _Queue) -> None:
        while count := lib.vmh_view_completed(queue.view, self._addrs, _BATCH):
            queue.free += [int(a) for a in self._addrs[0:count]]

    def _kick(self, queue: _Queue) -> None:
        for _ in range(_KICKS):
            result = lib.vmh_view_kick(queue.view)
            if result == 0:
                return
            if result not in (-errno.EAGAIN, -errno.EBUSY, -errno.ENOBUFS):
                raise OSError(-result, f"sending by AF_XDP: {os.strerror(-result)}")

    def wait(self, timeout: float) -> bool:
        """Sleep until a frame has arrived, at most ``timeout`` seconds. False if none came."""
        return bool(self._poll.poll(timeout * 1000))

    def close(self) -> None:
        """Unmap; idempotent. Frames in flight are lost to this UMEM's next user until the sockets are closed."""
        while self._queues:
            lib.vmh_view_close(self._queues.pop().view)
        self._area.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()
