"""Packets that the kernel dropped because a ring had no room: who lost how many in the last minute."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping

from vmahybrid.service.core import Core

WINDOW = 60.0  # seconds
FULL, NO_FRAME = "rx_ring_full", "rx_fill_ring_empty_descs"
_Sample = tuple[float, Mapping[str, int]]


def dropped(kernel: Mapping[str, int]) -> int:
    """Of XDP_STATISTICS: rx_dropped has those for which the program had posted no frame, rx_ring_full is apart."""
    return kernel.get("rx_dropped", 0) + kernel.get(FULL, 0)


class Drops:
    """Looks at the rings once a second and keeps what changed within the window."""

    def __init__(self) -> None:
        self._seen: dict[int, deque[_Sample]] = {}

    def look(self, core: Core, now: float) -> None:
        """Sets and clears the sentences in ``core.health``."""
        for ring_id in self._seen.keys() - core.grants.all.keys():
            del self._seen[ring_id]
            core.health.pop(f"drops {ring_id}", None)
        for ring_id, grant in core.grants.all.items():
            kernel: dict[str, int] = {}
            with contextlib.suppress(OSError):
                kernel = grant.handle.kernel_stats()
            before, after = self.note(ring_id, kernel, now)
            if dropped(after) <= dropped(before):
                core.health.pop(f"drops {ring_id}", None)
                continue
            session = core.sessions.get(grant.session)
            who = str(session) if session is not None else f"process {grant.pid}"
            core.health[f"drops {ring_id}"] = sentence(who, grant.port.name, ring_id, before, after)

    def note(self, ring_id: int, kernel: Mapping[str, int], now: float) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """The counters of a minute ago, and those of now. A ring begins at zero when it is made."""
        samples = self._seen.setdefault(ring_id, deque([(now, {})]))
        if kernel and dropped(kernel) != dropped(samples[-1][1]):
            samples.append((now, dict(kernel)))
        while len(samples) > 1 and samples[1][0] <= now - WINDOW:
            samples.popleft()
        return samples[0][1], samples[-1][1]


def sentence(who: str, interface: str, ring_id: int, before: Mapping[str, int], after: Mapping[str, int]) -> str:
    def rose(name: str) -> int:
        return after.get(name, 0) - before.get(name, 0)

    causes, remedies = [], ["Let it poll more often"]
    if rose(NO_FRAME):
        causes.append("no free frame was posted")
        remedies.append("raise VMA_RX_WRE and ring.frames")
    if rose(FULL):
        causes.append("the receive ring was full")
        remedies.append("raise ring.rx_size")
    why = f" ({' and '.join(causes)})" if causes else ""
    lost = dropped(after) - dropped(before)
    return (f"{who[0].upper()}{who[1:]} lost {lost} packets at {interface} in the last minute: its ring {ring_id} had "
            f"no room for them{why}, as more came than it read. {'; '.join(remedies)}.")
