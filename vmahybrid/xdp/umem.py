"""UMEM: the packet memory of one process, in a sealed memfd that the service can hand over."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterator
from typing import Any, Literal, Self

from vmahybrid._xsk import ffi, lib

MFD_NOEXEC_SEAL = 0x0008  # linux/memfd.h, kernel 6.3; without it newer kernels log a complaint
MAX_FRAMES = 1 << 20  # 2 or 4 GiB, all of it pinned
HUGE_PAGE = 2 << 20  # bytes, of those that are asked for
MFD_HUGE_2MB = 21 << 26  # linux/memfd.h
Pages = Literal["plain", "may-be-huge", "huge"]
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def check_power_of_two(name: str, value: int) -> None:
    """Raises ValueError naming ``name`` unless ``value`` is a positive power of two."""
    if value <= 0 or value & (value - 1):
        raise ValueError(f"{name} must be a power of two, got {value}")


class Umem:
    """``frames`` packet buffers of ``frame_size`` bytes (2048 or 4096) in one memfd, ``fd``.

    The memfd cannot change its size (an owner that truncated it would kill the other users by SIGBUS). The kernel pins
    the pages when the first socket is made, so this process maps them only for that moment: the frames belong to
    whoever gets the fd, and cost this process no resident memory. A frame holds ``frame_size - 256`` bytes of packet
    on receive (the kernel keeps 256 bytes of headroom for XDP). One Umem serves sockets of one namespace.
    ``pages``: "may-be-huge" leaves it to the kernel (transparent_hugepage/shmem_enabled); "huge" takes them from
    vm.nr_hugepages, and is as "may-be-huge" where there are too few or a part of one would be left over: see ``huge``.
    """

    def __init__(self, frames: int, frame_size: int = 2048, pages: Pages = "plain") -> None:
        """Raises ValueError for impossible sizes, OSError without memory."""
        check_power_of_two("frame_size", frame_size)
        if not 2048 <= frame_size <= mmap.PAGESIZE:
            raise ValueError(f"frame_size must be 2048..{mmap.PAGESIZE}, got {frame_size}")
        if frames <= 0 or frames * frame_size % mmap.PAGESIZE:
            raise ValueError(f"frames * frame_size must fill whole pages, got {frames} * {frame_size}")
        if frames > MAX_FRAMES:
            raise ValueError(f"frames are at most {MAX_FRAMES}, got {frames}")
        self.frames, self.frame_size, self.size = frames, frame_size, frames * frame_size
        self._may_be_huge = pages != "plain"
        huge_fd = _huge_memfd(self.size) if pages == "huge" and self.size % HUGE_PAGE == 0 else -1
        self.huge = huge_fd >= 0
        self.fd = huge_fd if self.huge else _sealed_memfd("vmahybrid-umem", self.size)
        self._handle: Any = None
        self._keep: tuple[Any, ...] = ()
        self._sockets = 0

    def populate(self) -> None:
        """Have the kernel allocate all of it now; else :meth:`register` does, for which a large one has other callers
        of that thread wait (256 MiB: some 0.3 s). What can't be done now is done then. From any thread."""
        lib.vmh_umem_populate(self.fd, self.size, self._may_be_huge and not self.huge)

    @property
    def registered(self) -> bool:
        return self._handle is not None

    def register(self, fill_size: int, comp_size: int) -> tuple[Any, Any]:
        """Pin the memory for AF_XDP in the calling thread's namespace; done by the first :class:`Xsk`.

        Returns libxdp's fill and completion ring for that first socket. Raises OSError (ENOBUFS: RLIMIT_MEMLOCK too
        small without CAP_IPC_LOCK; EPERM: no CAP_NET_RAW).
        """
        fill, comp = ffi.new("struct xsk_ring_prod *"), ffi.new("struct xsk_ring_cons *")
        config = ffi.new("struct xsk_umem_config *", {
            "fill_size": fill_size, "comp_size": comp_size, "frame_size": self.frame_size})
        out = ffi.new("struct xsk_umem **")
        with self.mapped() as start:
            result = lib.xsk_umem__create(out, start, self.size, fill, comp, config)
        if result < 0:
            raise OSError(-result, f"registering {self.size} bytes of UMEM: {os.strerror(-result)}")
        self._handle, self._keep = out[0], (fill, comp)
        return fill, comp

    @contextlib.contextmanager
    def mapped(self) -> Iterator[Any]:
        """Its address, for the kernel to pin it. Raises OSError."""
        with mmap.mmap(self.fd, self.size) as area:
            if self._may_be_huge and not self.huge:
                with contextlib.suppress(OSError):  # a kernel without
                    area.madvise(mmap.MADV_HUGEPAGE)
            with ffi.from_buffer(area, require_writable=True) as start:
                yield start

    def unregister(self) -> None:
        """Undo :meth:`register`; closes the first socket's fd, which libxdp shares with the registration."""
        if self._handle is None:
            return
        result = lib.xsk_umem__delete(self._handle)
        if result < 0:
            raise OSError(-result, f"releasing the UMEM: {os.strerror(-result)}")
        self._handle, self._keep = None, ()

    def acquire(self) -> Any:
        """libxdp's handle, counted: one :meth:`release` per call."""
        self._sockets += 1
        return self._handle

    def release(self) -> None:
        """A socket is gone; the last one takes the registration with it."""
        self._sockets -= 1
        if self._sockets == 0:
            self.unregister()

    def close(self) -> None:
        """Close the memfd; the sockets keep the memory as long as they live. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def _huge_memfd(size: int) -> int:
    """-1: the machine has not enough huge pages. They are taken at once: one that is missed later is a SIGBUS."""
    fd = -1
    try:
        fd = _sealed_memfd("vmahybrid-umem", size, os.MFD_HUGETLB | MFD_HUGE_2MB)
        os.posix_fallocate(fd, 0, size)
    except OSError:
        if fd >= 0:
            os.close(fd)
        return -1
    return fd


def _sealed_memfd(name: str, size: int, more: int = 0) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | more
    try:
        fd = os.memfd_create(name, flags | MFD_NOEXEC_SEAL)
    except OSError:
        fd = os.memfd_create(name, flags)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd
