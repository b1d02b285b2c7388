"""Waiting until no packet is steered by a rule that was deleted.

bpf_map_delete_elem returns at once; an XDP program that looked the rule up just before may still be on its way to the
ring on another CPU. It runs under rcu_read_lock from the lookup to the ring (generic mode: do_xdp_generic; native mode:
up to xdp_do_flush at the end of the poll), so one RCU grace period later nothing is on its way. MEMBARRIER_CMD_GLOBAL
is synchronize_rcu() (kernel/sched/membarrier.c), 8 to 30 ms here; callers that come meanwhile share the next one.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time

SYS_MEMBARRIER = {"x86_64": 324, "aarch64": 283}
MEMBARRIER_CMD_GLOBAL = 1
FALLBACK_SECONDS = 0.05  # where membarrier is missing (nohz_full): longer than any grace period seen

_libc = ctypes.CDLL(None, use_errno=True)


class Grace:
    """``await wait()``: every packet that could have seen the state before the call has been delivered."""

    def __init__(self) -> None:
        self._running: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    async def wait(self) -> None:
        # A period that began before this call proves nothing: join the one that starts after it.
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._period(self._running))
        await asyncio.shield(self._next)

    async def _period(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await before
        self._running, self._next = self._next, None
        await asyncio.to_thread(_synchronize)
        if self._running is asyncio.current_task():
            self._running = None


def grace_by_membarrier() -> bool:
    """Does this kernel have MEMBARRIER_CMD_GLOBAL?"""
    number = SYS_MEMBARRIER.get(os.uname().machine)
    return number is not None and _libc.syscall(number, 0, 0, 0) & MEMBARRIER_CMD_GLOBAL == MEMBARRIER_CMD_GLOBAL


def _synchronize() -> None:
    number = SYS_MEMBARRIER.get(os.uname().machine)
    if number is None or _libc.syscall(number, MEMBARRIER_CMD_GLOBAL, 0, 0) != 0:
        time.sleep(FALLBACK_SECONDS)
