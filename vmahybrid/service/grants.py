"""Rings that were granted: one per session, interface and lane, within the limits of the configuration."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from vmahybrid.config.service import ServiceConfig
from vmahybrid.contracts import lib
from vmahybrid.errors import Refused
from vmahybrid.service.backend import RingHandle, RingSizes
from vmahybrid.service.backend_verbs import VerbsRingHandle
from vmahybrid.service.ladder import Ladder
from vmahybrid.service.ports import Port
from vmahybrid.steering.keys import GrantKey
from vmahybrid.steering.reasons import Reason
from vmahybrid.steering.table import RingRef, refuse
from vmahybrid.xdp.umem import HUGE_PAGE

MEMORIES = range(lib.VMH_MEMORY_HUGE + 1)
FRAME_SIZE = 2048  # bytes, for the limit before the backend has decided
SIZE_MAX = 1 << 16


@dataclass(slots=True)
class Grant:
    ring_id: int
    session: int
    pid: int
    port: Port
    handle: RingHandle
    allowed: Mapping[GrantKey, int]     # what the guard has been told
    ladder: Ladder                  # how it came to this backend
    frames: int                     # that its program may hold unread at the most
    lane: int = 0                   # of control.h
    zeroed: dict[str, int] = field(default_factory=dict)  # the kernel's counters at the last zero request
    unmapped: asyncio.TimerHandle | None = None  # until its program has mapped it, if it is bound only then

    @property
    def ref(self) -> RingRef:
        software = isinstance(self.handle, VerbsRingHandle) and self.handle.software
        return RingRef(self.ring_id, self.session, self.port.id, self.handle.act, self.handle.target, software,
                       self.lane)

    @property
    def verbs(self) -> bool:
        """Is it a raw packet QP?"""
        return not self.handle.xsk_fds

    def kernel_stats(self) -> dict[str, int]:
        """XDP_STATISTICS, summed, since the last zero request. Raises OSError."""
        return {name: max(0, value - self.zeroed.get(name, 0)) for name, value in self.handle.kernel_stats().items()}

    @property
    def memory(self) -> int:
        return self.handle.geometry["frames"] * self.handle.geometry["frame_size"]


class Grants:
    """All rings of the service, by id."""

    def __init__(self) -> None:
        self.all: dict[int, Grant] = {}
        self._next = 1
        self._pending = 0

    def sizes(self, config: ServiceConfig, frames: int, rx: int, tx: int, memory: int = 0) -> RingSizes:
        """What a program asks for, 0 for the default. Raises Refused (RING_FAILED)."""
        least = HUGE_PAGE // FRAME_SIZE if memory == lib.VMH_MEMORY_HUGE else 0
        sizes = RingSizes(max(frames or config["ring.frames"], least), rx or config["ring.rx_size"],
                          tx or config["ring.tx_size"], memory)
        if memory not in MEMORIES:
            raise Refused("ring", f"memory {memory} is none of {', '.join(map(str, MEMORIES))}", "",
                          int(Reason.RING_FAILED))
        for name, value, most in (("frames", sizes.frames, lib.VMH_FRAMES_MAX), ("rx_size", sizes.rx, SIZE_MAX),
                                  ("tx_size", sizes.tx, SIZE_MAX)):
            if value < 16 or value > most or value & (value - 1):
                raise Refused("ring", f"{name} {value} is not a power of two from 16 to {most}", "",
                              int(Reason.RING_FAILED))
        return sizes

    def admit(self, config: ServiceConfig, sizes: RingSizes) -> None:
        """Count a ring that is being made; ``settle`` ends that. Raises Refused (RING_LIMIT)."""
        memory = sum(grant.memory for grant in self.all.values())
        if (len(self.all) + self._pending >= config["limits.rings"]
                or memory + (1 + self._pending) * sizes.frames * FRAME_SIZE > config["limits.memory"]):
            raise refuse("ring", Reason.RING_LIMIT)
        self._pending += 1

    def settle(self) -> None:
        self._pending -= 1

    def add(self, session: int, pid: int, port: Port, handle: RingHandle, ladder: Ladder, frames: int,
            lane: int) -> Grant:
        grant = Grant(self._next, session, pid, port, handle, {}, ladder, handle.geometry["frames"] or frames,
                      lane)
        self._next += 1
        self.all[grant.ring_id] = grant
        port.ring_ids.add(grant.ring_id)
        return grant

    def pop(self, ring_id: int) -> Grant | None:
        grant = self.all.pop(ring_id, None)
        if grant is not None:
            grant.port.ring_ids.discard(ring_id)
        return grant

    def of_session(self, session: int) -> list[Grant]:
        return [grant for grant in self.all.values() if grant.session == session]
