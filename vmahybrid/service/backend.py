"""What the service asks of a backend: interfaces that steer, and rings. AF_XDP is one; tests have a fake one.

Everything here may block for milliseconds and runs in the namespace's worker thread, except where it says "quick".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vmahybrid.contracts import lib
from vmahybrid.errors import Refused
from vmahybrid.net.netns import NetnsWorker
from vmahybrid.steering.keys import Act, Action, FlowKey, GrantKey
from vmahybrid.steering.mirror import MirrorTarget
from vmahybrid.steering.reasons import Reason


@dataclass(frozen=True, slots=True)
class RingSizes:
    """Descriptors per queue and frames of the UMEM, powers of two; ``memory``: VMH_MEMORY_* of control.h."""

    frames: int
    rx: int
    tx: int
    memory: int = lib.VMH_MEMORY_PLAIN


class RingHandle(Protocol):
    """One process's ring on one interface."""

    direct: bool
    reason: Reason              # why not direct
    act: Act                    # how the interface's program reaches it
    target: int
    umem_fd: int
    xsk_fds: list[int]          # one per queue, perhaps one more of a far end
    bind_after: bool            # the sockets are not bound yet: ``bind`` when the process has mapped them
    queues: int                 # of the interface that it has, 1 for a ring veth
    zerocopy: bool
    huge_pages: bool
    geometry: dict[str, int]    # frames, frame_size (bytes), rx_size, tx_size, ... (descriptors per queue)
    grants: MirrorTarget[GrantKey, int] | None  # quick; None: a direct ring can't be filtered

    def reply_fields(self) -> dict[str, Any]:
        """The fields of struct vmh_msg_ring_reply except ``hdr`` and ``ring_id``; quick."""
        ...

    def bind(self) -> None:
        """The second step of a ring with ``bind_after``. Raises OSError, VmahybridError; then ``close`` it."""
        ...

    def kernel_stats(self) -> dict[str, int]:
        """XDP_STATISTICS of the sockets, summed; quick. Raises OSError."""
        ...

    def guard_outs(self) -> dict[str, int]:
        """Packets per way out of the guard program; quick; empty for a direct ring."""
        ...

    def close(self) -> None:
        """Take the ring from the maps and give everything back. Idempotent."""
        ...


class PortHandle(Protocol):
    """An interface with our program on it, or loaded for it while there is nothing to steer."""

    native: bool
    reason: Reason              # why not native
    driver: str
    queues: int
    rules: MirrorTarget[FlowKey, Action]        # quick

    @property
    def hook(self) -> str:
        """What steers now, for people: "generic, now tcx (bulk traffic)"; quick."""
        ...

    @property
    def attached(self) -> bool:
        """Is a program on the interface just now? Quick."""
        ...

    @property
    def refused(self) -> Refused | None:
        """Why no program can be on the interface, for rules that are there or were; None where all is well. Quick."""
        ...

    @property
    def switches(self) -> int:
        """Times that it went to tcx, off or back."""
        ...

    @property
    def switch_failures(self) -> int:
        """Steps on the way to tcx or back that failed."""
        ...

    def watch(self) -> bool:
        """Look for bulk traffic and rules, once per tick: is ``turn`` due? Quick."""
        ...

    def turn(self) -> bool:
        """To tcx, off or back. False: not done, ``hook`` says why."""
        ...

    def hits(self, index: int) -> tuple[int, int]:
        """(packets, bytes) of a rule index; quick."""
        ...

    def zero_hits(self, index: int) -> None:
        """Before an index is used again; quick."""
        ...

    def outs(self) -> dict[str, int]:
        """Packets per way out of the program; quick."""
        ...

    def grant(self, sizes: RingSizes, direct: bool) -> RingHandle:
        """A ring for one more process, direct if that is free and ``direct``. From any thread, which may take its time
        for the memory. Raises OSError, VmahybridError."""
        ...

    def set_mtu(self, mtu: int) -> None:
        """The interface's MTU changed."""
        ...

    def set_mac(self, mac: bytes) -> None:
        """The interface's MAC address changed: rings from now on have it. Quick."""
        ...

    def close(self) -> None:
        """Detach the program. Idempotent; the interface may be gone."""
        ...


class Backend(Protocol):
    @property
    def live_frames(self) -> bool:
        """Can it ``inject``? Known after ``prepare``."""
        ...

    @property
    def maps_bound(self) -> bool:
        """Can a process map the rings of a bound socket? Else rings have ``bind_after``. Known after ``prepare``."""
        ...

    def prepare(self) -> None:
        """Compile what there is to compile; seconds, in any thread. Raises VmahybridError."""
        ...

    def open_port(self, worker: NetnsWorker, ifindex: int, name: str, mode: str) -> PortHandle:
        """Attach to an interface of the worker's namespace. ``mode``: "auto", "native" or "generic".

        Raises Refused (IF_BUSY naming the holder, ATTACH_FAILED, IF_UNSUPPORTED), OSError."""
        ...

    def inject(self, ifindex: int, frames: Sequence[bytes]) -> None:
        """Put Ethernet frames into the kernel's receive path of an interface, in order. Raises VmahybridError."""
        ...
