"""Rings: the memory and the sockets that one process gets on one interface.

*Direct*: the process has the interface's receive queues, one AF_XDP socket on each, all on one UMEM. The first process
on an interface gets it. *Veth*: a ring veth of its own with one queue; every further process, or one that must not
send what it likes. Both are handed over as file descriptors and a geometry.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

from vmahybrid.contracts import action, lib, pack
from vmahybrid.errors import Refused
from vmahybrid.net.netns import NetnsWorker
from vmahybrid.steering.reasons import Reason
from vmahybrid.xdp.latebind import LateXsk
from vmahybrid.xdp.port import ETH_HEADER, XdpPort
from vmahybrid.xdp.probe import probe
from vmahybrid.xdp.ringveth import RingVeth
from vmahybrid.xdp.umem import MAX_FRAMES, Pages, Umem
from vmahybrid.xdp.xsk import Xsk, XskSocket

MAX_QUEUES = 16  # of a direct ring: fds that one control message carries
_HEADROOM = 256  # XDP_PACKET_HEADROOM: of each frame, on receive
_VLAN_TAGS = 8  # max_frame is counted without tags
_SMALL, _LARGE = 2048, 4096
_TAKEN_SECONDS = 2.0  # for the program that was refused the queues to ask again


def frame_size_for(mtu: int) -> int:
    """2048 where a frame of this MTU fits with its tags, else 4096 (the largest, and enough for an MTU of 3818)."""
    return _SMALL if mtu + ETH_HEADER + _VLAN_TAGS <= _SMALL - _HEADROOM else _LARGE


def _power_of_two_from(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def _grant_key(addr: bytes, port_be: int, proto: int, family: int) -> bytes:
    return pack("struct vmh_grant_key", src=addr, sport=port_be, proto=proto, family=family)


class Ring(ABC):
    """A granted ring, until close(). ``kind`` is "direct" or "veth"; ``reason`` says why not better: VETH_SECOND,
    VETH_QUEUES, VETH_POLICY, or COPY_NO_ZEROCOPY for a direct one whose driver refused (``detail`` has the kernel's
    words).

    ``umem_fd`` and ``xsk_fds`` (one per queue, and one more if ``far``: its far end, for receiving) are to be passed
    on; they stay open here, and the service never touches the rings behind them. All frames belong to the receiver of
    the fds. ``mtu``: bytes of IP packet that the buffers and the interface can carry; ``max_frame``: bytes from the
    Ethernet header on, without VLAN tags.
    A ring made with ``bind_after`` carries nothing before :meth:`bind`, and only then ``zerocopy``, ``reason`` and
    ``detail`` are known.
    """

    kind: Literal["direct", "veth"]

    def __init__(self, port: XdpPort, umem: Umem, xsks: Sequence[XskSocket], reason: Reason) -> None:
        self.port, self.reason = port, reason
        self._umem, self._xsks = umem, xsks
        self.far = False
        self.near_ifindex = 0  # of the near end by which tcx reaches it, 0: not at all
        self.max_frame = umem.frame_size - _HEADROOM - _VLAN_TAGS
        self.mtu = min(port.mtu, self.max_frame - ETH_HEADER)
        self.zerocopy = all(xsk.zerocopy for xsk in xsks)
        self.huge_pages = umem.huge
        self.detail = ""
        self._lock = threading.Lock()
        self._closed = False
        self.bind_after = isinstance(xsks[0], LateXsk)

    @property
    def umem_fd(self) -> int:
        return self._umem.fd

    @property
    def xsk_fds(self) -> list[int]:
        return [xsk.fd for xsk in self._xsks]

    @property
    def chains(self) -> bool:
        """Does a frame that is longer than ``max_frame`` come in several buffers? The sockets share what the first
        one was bound with. Not from a physical wire, where the checksum of what the kernel has put together (GRO) is
        not right."""
        return self._xsks[0].chains and not self.port.info.physical

    @property
    def geometry(self) -> dict[str, int]:
        """What a user of the fds must know, as RingView takes it: frames, sizes in bytes and descriptors per queue."""
        xsk = self._xsks[0]
        return {"frames": self._umem.frames, "frame_size": self._umem.frame_size, "rx_size": xsk.rx_size,
                "tx_size": xsk.tx_size, "fill_size": xsk.fill_size, "comp_size": xsk.comp_size}

    def reply_fields(self) -> dict[str, Any]:
        """Fields of struct vmh_msg_ring_reply except ``hdr`` and ``ring_id``, for contracts.pack."""
        flags = lib.VMH_RING_F_ZEROCOPY if self.zerocopy else 0
        if self.port.info.physical:
            flags |= lib.VMH_RING_F_VERIFY_CSUM
        if self.bind_after:
            flags |= lib.VMH_RING_F_BIND_AFTER
        if self.far:
            flags |= lib.VMH_RING_F_FAR
        if self.huge_pages:
            flags |= lib.VMH_RING_F_HUGE
        if self.chains:
            flags |= lib.VMH_RING_F_CHAINS
        if self.port.unstamped is None:
            flags |= lib.VMH_RING_F_STAMP
        return {
            "ifindex": self.port.ifindex, "nqueues": len(self._xsks), "flags": flags, "mtu": self.mtu,
            "kind": lib.VMH_RING_DIRECT if self.kind == "direct" else lib.VMH_RING_VETH,
            "xdp_mode": lib.VMH_XDP_NATIVE if self.port.mode == "native" else lib.VMH_XDP_GENERIC,
            "mac": self.port.info.mac, **self.geometry,
        }

    def bind(self) -> None:
        """Of a ring made with ``bind_after``, when its receiver has mapped everything: it carries packets from now on.

        On failure the caller closes it. Raises Refused (IF_GONE) when closed, OSError (EBUSY: the queues are taken).
        """
        self.port.worker.call(self._bind)

    @property
    def _bind_worker(self) -> NetnsWorker:
        return self.port.worker

    def _bind(self) -> None:
        if self._closed:  # by this thread
            raise Refused(f"ring on {self.port.ifname}", "it is closed", "", Reason.IF_GONE)
        for xsk in self._xsks:
            if isinstance(xsk, LateXsk):
                self._bind_worker.call(xsk.bind)
        self.zerocopy = all(xsk.zerocopy for xsk in self._xsks)
        self._deliver()
        self.bind_after = False
        self.port.ring_bound()

    @abstractmethod
    def _deliver(self) -> None:
        """Bound sockets into the map of the program that feeds them."""

    def stats(self) -> dict[str, int]:
        """The kernel's counters of the sockets (struct xdp_statistics), summed; empty when closed."""
        with self._lock:
            if self._closed:
                return {}
            each = [xsk.statistics() for xsk in self._xsks]
        return {name: sum(one[name] for one in each) for name in each[0]}

    @abstractmethod
    def action(self, rule_id: int) -> bytes:
        """struct vmh_action that steers to this ring and counts in ``rule_id``."""

    @abstractmethod
    def grant_source(self, addr: bytes, port_be: int, proto: int, family: int, flow_id: int) -> None:
        """Let frames from ``addr`` (16 bytes, all zero: any) and ``port_be`` (network order) out.

        Raises BpfError (E2BIG: too many), Refused (RING_FAILED) when closed.
        """

    @abstractmethod
    def revoke_source(self, addr: bytes, port_be: int, proto: int, family: int) -> None:
        """Undo grant_source(); no error if it is not there, or the ring is closed."""

    def guard_outs(self) -> dict[str, int]:
        """Frames sent by the process per way out of the guard; empty for direct rings."""
        return {}

    def set_mtu(self, mtu: int) -> None:
        """The interface's MTU is now ``mtu`` bytes."""
        self.mtu = min(mtu, self.max_frame - ETH_HEADER)

    def close(self) -> None:
        """Out of the maps first, then sockets, veth and memory. The queue stays taken until the process that has the
        fds unmaps them or ends. Idempotent."""
        if not self._closed:
            self.port.worker.call(self._close)

    def _close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        with contextlib.ExitStack() as stack:
            stack.callback(self.port.drop_ring, self)
            stack.callback(self._umem.close)
            stack.callback(self._teardown)

    @abstractmethod
    def _teardown(self) -> None: ...

    def _close_sockets(self) -> None:
        # the first one owns the registration of the UMEM
        for xsk in reversed(self._xsks):
            xsk.close()


class DirectRing(Ring):
    kind = "direct"

    def __init__(self, port: XdpPort, umem: Umem, xsks: Sequence[XskSocket],
                 far: tuple[RingVeth, XskSocket] | None = None) -> None:
        super().__init__(port, umem, xsks if far is None else [*xsks, far[1]], Reason.NONE)
        self.far, self._queues = far is not None, len(xsks)
        if far is not None:
            self.near_ifindex = far[0].near_ifindex
            far[0].set_xsk(0, far[1].fd)
        self._base = port.take_ring_slot(self.near_ifindex)
        if self.bind_after:
            return
        try:
            self._deliver()
        except BaseException:
            port.free_ring_slot(self._base, len(xsks))
            raise

    def _deliver(self) -> None:
        own = self._xsks[:self._queues]
        self.detail = next((xsk.fallback for xsk in own if xsk.fallback), "")
        self.reason = Reason.COPY_NO_ZEROCOPY if self.detail else Reason.NONE
        for xsk in own:
            self.port.set_xsk(self._base, xsk.queue, xsk.fd)

    def _bind(self) -> None:
        try:
            super()._bind()
        except OSError as error:
            if error.errno == errno.EBUSY:  # the next ring is a veth: the program may ask for it at once
                self.port.queues_taken_until = time.monotonic() + _TAKEN_SECONDS
            raise

    def action(self, rule_id: int) -> bytes:
        return action(lib.VMH_ACT_RING, self._base, rule_id)

    def grant_source(self, addr: bytes, port_be: int, proto: int, family: int, flow_id: int) -> None:
        """Nothing: what a process sends by the queue itself passes no program."""

    def revoke_source(self, addr: bytes, port_be: int, proto: int, family: int) -> None:
        """Nothing, see grant_source()."""

    def _teardown(self) -> None:
        self.port.free_ring_slot(self._base, self._queues)
        self._close_sockets()


class VethRing(Ring):
    kind = "veth"

    def __init__(self, port: XdpPort, umem: Umem, xsk: XskSocket, veth: RingVeth, reason: Reason) -> None:
        super().__init__(port, umem, [xsk], reason)
        self._veth = veth
        if not self.bind_after:
            self._deliver()
        self._slot = port.take_dev_slot(veth.near_ifindex)
        self.near_ifindex = veth.near_ifindex if port.switch.ready and not self.bind_after else 0

    @property
    def _bind_worker(self) -> NetnsWorker:
        return self._veth.far_worker

    def _deliver(self) -> None:
        self._veth.set_xsk(0, self._xsks[0].fd)

    def action(self, rule_id: int) -> bytes:
        return action(lib.VMH_ACT_DEV, self._slot, rule_id)

    @property
    def chains(self) -> bool:
        return self._veth.long and super().chains

    def grant_source(self, addr: bytes, port_be: int, proto: int, family: int, flow_id: int) -> None:
        with self._lock:
            if self._closed:
                raise Refused(f"ring on {self.port.ifname}", "it is closed", "", Reason.RING_FAILED)
            self._veth.grant(_grant_key(addr, port_be, proto, family), flow_id)

    def revoke_source(self, addr: bytes, port_be: int, proto: int, family: int) -> None:
        with self._lock:
            if not self._closed:
                self._veth.revoke(_grant_key(addr, port_be, proto, family))

    def guard_outs(self) -> dict[str, int]:
        with self._lock:
            return {} if self._closed else self._veth.guard_outs()

    def set_mtu(self, mtu: int) -> None:
        super().set_mtu(mtu)
        self._veth.set_mtu(mtu)

    def _teardown(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._veth.close)
            stack.callback(self._close_sockets)
            stack.callback(self.port.free_dev_slot, self._slot)


def open_ring(port: XdpPort, *, frames: int = 4096, rx_size: int = 1024, tx_size: int = 1024,
              direct_allowed: bool = True, bind_after: bool = False, pages: Pages = "plain") -> Ring:
    """A ring on ``port``: direct if ``direct_allowed`` and nobody has the queues, else by a ring veth.

    ``frames`` of the UMEM; ``rx_size`` and ``tx_size`` descriptors per queue (powers of two). The fill ring holds
    every frame of the UMEM at once, so that posting never fails; the completion ring is as large as TX. ``bind_after``:
    the sockets are bound by :meth:`Ring.bind` only (see :mod:`vmahybrid.xdp.latebind`). ``pages``: of the UMEM. From
    any thread.
    Raises Refused (RING_FAILED, RING_LIMIT, MEMLOCK, IF_GONE; IF_BUSY, ATTACH_FAILED), ValueError.
    """
    if not 0 < frames <= MAX_FRAMES:  # before the fill ring's size is made of it
        raise ValueError(f"frames must be 1..{MAX_FRAMES}, got {frames}")
    sizes = {"rx_size": rx_size, "tx_size": tx_size, "fill_size": _power_of_two_from(frames), "comp_size": tx_size}
    try:
        memory = [Umem(frames, frame_size_for(port.mtu), pages)]
    except OSError as error:
        raise _refusal(port, error) from error
    memory[0].populate()

    def umem() -> Umem:
        return memory.pop() if memory else Umem(frames, frame_size_for(port.mtu), pages)

    try:
        # In the worker as a whole: two callers can't both find the queues free.
        return port.worker.call(_open_ring, port, umem, sizes, direct_allowed, bind_after)
    finally:
        for unused in memory:
            unused.close()


def _open_ring(port: XdpPort, new_umem: Callable[[], Umem], sizes: dict[str, int], direct_allowed: bool,
               bind_after: bool) -> Ring:
    port.wake()  # its rules come soon, and a program whose interface is held by now has no ring
    port.follow_name()
    try:
        ring, reason = (_open_direct(port, new_umem, sizes, bind_after) if direct_allowed
                        else (None, Reason.VETH_POLICY))
        if ring is None:
            ring = _open_veth(port, new_umem, sizes, reason, bind_after)
    except OSError as error:
        raise _refusal(port, error) from error
    port.add_ring(ring)
    return ring


def _open_direct(port: XdpPort, new_umem: Callable[[], Umem], sizes: dict[str, int],
                 bind_after: bool) -> tuple[Ring | None, Reason]:
    if any(ring.kind == "direct" for ring in port.rings) or time.monotonic() < port.queues_taken_until:
        return None, Reason.VETH_SECOND
    queues = port.worker.call(probe, port.ifname).queues  # `ethtool -L` may have changed it
    if queues > MAX_QUEUES:
        return None, Reason.VETH_QUEUES
    # Zero-copy delivers to the driver's own program only.
    zerocopy: Literal["auto"] | bool = "auto" if port.mode == "native" else False
    with contextlib.ExitStack() as stack:
        umem = stack.enter_context(new_umem())
        try:
            xsks = _open_sockets(port.worker, umem, port.ifname, queues, sizes, zerocopy, bind_after)
        except OSError as error:
            if error.errno == errno.EBUSY:  # a foreign AF_XDP program, or a dead ring that is still mapped
                return None, Reason.VETH_SECOND
            raise
        for xsk in xsks:
            stack.push(xsk)
        far = _open_far(port, umem, sizes) if queues < MAX_QUEUES and not bind_after else None
        if far is not None:
            stack.push(far[1])
        ring = DirectRing(port, umem, xsks, far)
        stack.pop_all()
        return ring, Reason.NONE


def _open_far(port: XdpPort, umem: Umem, sizes: dict[str, int]) -> tuple[RingVeth, XskSocket] | None:
    """One more socket on the port's far end; None where there is none: the ring then has its queues only."""
    far = port.far_end()
    if far is None:
        return None
    try:
        return far, _open_sockets(far.far_worker, umem, far.far, 1, sizes, False, False)[0]
    except OSError as error:
        port.switch.failed(f"no second way into a direct ring: {error}")
        return None


def _open_sockets(worker: NetnsWorker, umem: Umem, ifname: str, queues: int, sizes: dict[str, int],
                  zerocopy: Literal["auto"] | bool, bind_after: bool) -> Sequence[XskSocket]:
    xsks: list[XskSocket] = []
    try:
        for queue in range(queues):
            if bind_after:
                first = xsks[0] if xsks else None
                xsks.append(worker.call(LateXsk.open, umem, ifname, queue, first=first, zerocopy=zerocopy, **sizes))
            else:
                xsks.append(worker.call(Xsk.open, umem, ifname, queue, zerocopy=zerocopy, **sizes))
    except BaseException:
        for xsk in reversed(xsks):
            xsk.close()
        raise
    return xsks


def _open_veth(port: XdpPort, new_umem: Callable[[], Umem], sizes: dict[str, int], reason: Reason,
               bind_after: bool) -> Ring:
    if not bind_after:
        port.switch.prepare()
    with contextlib.ExitStack() as stack:
        umem = stack.enter_context(new_umem())
        veth = RingVeth.open(port.worker, port.image, out_ifindex=port.ifindex, mac=port.info.mac, mtu=port.mtu,
                             native=port.mode == "native", alone=bind_after)
        stack.callback(veth.close)
        xsk = _open_sockets(veth.far_worker, umem, veth.far, 1, sizes, False, bind_after)[0]
        stack.push(xsk)
        ring = VethRing(port, umem, xsk, veth, reason)
        stack.pop_all()
        return ring


def _refusal(port: XdpPort, error: OSError) -> Refused:
    reason = {errno.ENOBUFS: Reason.MEMLOCK, errno.ENODEV: Reason.IF_GONE}.get(error.errno or 0, Reason.RING_FAILED)
    return Refused(f"ring on {port.ifname}", error.strerror or str(error), reason.remedy, reason)
