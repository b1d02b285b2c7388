"""Ends of peers' streams, for connections that came home: a peer does not say it again, so the kernel is given it until
it has it. It takes none while the interface is down, or the address away; and a raw packet QP takes even frames that
were made here, as long as its rule is there. Programs tell the next service of those that are missing still.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vmahybrid.errors import VmahybridError
from vmahybrid.net.sockdiag import Found, connections
from vmahybrid.net.tcpask import Names
from vmahybrid.net.tcpfin import fin_frame
from vmahybrid.net.tcpstate import TcpPhase, TcpState, seq

if TYPE_CHECKING:
    from vmahybrid.service.backend import Backend
    from vmahybrid.service.namespaces import LinkRow, Namespace

log = logging.getLogger("vmahybrid.service")

AT_FIRST = (0.02, 0.1)  # seconds
PAUSE = 0.25
PAUSE_PER_FIN = 0.001
LAST_PAUSE = 0.02       # before a service ends

_OPEN = (TcpPhase.ESTABLISHED, TcpPhase.FIN_WAIT1, TcpPhase.FIN_WAIT2)


@dataclass(frozen=True, slots=True)
class Fin:
    """``state``: of the connection that came home, with snd_una as it is now. ``inode``: of its socket. ``ifindex``: it
    went by this interface."""

    state: TcpState
    inode: int
    ifindex: int

    @property
    def names(self) -> Names:
        return Names(self.state.laddr, self.state.lport, self.state.raddr, self.state.rport)


class Fins:
    """On the event loop."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._waiting: dict[Namespace, dict[int, Fin]] = {}     # by inode
        self._new: dict[Namespace, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, namespace: Namespace, state: TcpState, inode: int, ifindex: int) -> None:
        """The kernel has the connection in this state, and was given the FIN once."""
        fin = Fin(replace(state, send=b"", receive=b"", snd_nxt=state.snd_una), inode, ifindex)
        self._waiting.setdefault(namespace, {})[inode] = fin
        if namespace in self._new:
            self._new[namespace].set()
            return
        self._new[namespace] = asyncio.Event()
        task = asyncio.create_task(self._attend(namespace))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def awaits(self, namespace: Namespace, inode: int) -> bool:
        """Is the kernel to be given one for this socket?"""
        return inode in self._waiting.get(namespace, ())

    async def close(self) -> None:
        """After the programs have left their rings: the last attempt."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if any(self._waiting.values()):
            await asyncio.sleep(LAST_PAUSE)
        for namespace in list(self._waiting):
            await self._round(namespace)

    async def _attend(self, namespace: Namespace) -> None:
        new = self._new[namespace]
        namespace.users += 1    # it is not left meanwhile
        try:
            while self._waiting[namespace]:
                new.clear()
                await self._until_more(namespace, new)
        finally:
            namespace.users -= 1
            del self._new[namespace]

    async def _until_more(self, namespace: Namespace, new: asyncio.Event) -> None:
        """Rounds until there are none, or new ones."""
        for pause in itertools.chain(AT_FIRST, itertools.repeat(PAUSE)):
            waiting = self._waiting[namespace]
            if not waiting or new.is_set():
                return
            await asyncio.sleep(pause + PAUSE_PER_FIN * len(waiting))
            await self._round(namespace)

    async def _round(self, namespace: Namespace) -> None:
        waiting = self._waiting[namespace]
        fins = list(waiting.values())
        try:
            found = await namespace.quick.call_async(connections, [(fin.names, fin.ifindex) for fin in fins])
            missing = dict(_without_end(fins, found))
            for fin in fins:
                if fin.inode not in missing and waiting.get(fin.inode) is fin:
                    del waiting[fin.inode]
            await self._give(namespace, missing.values())
        except (VmahybridError, OSError) as error:
            log.warning("TCP: the ends of %d connections are not given to the kernel yet: %s", len(fins), error)
        except RuntimeError as error:   # the namespace is gone
            log.warning("TCP: the ends of %d connections are lost: %s", len(fins), error)
            waiting.clear()

    async def _give(self, namespace: Namespace, fins: Iterable[Fin]) -> None:
        frames: dict[int, list[bytes]] = {}
        for fin in fins:
            if (link := _way(namespace, fin)) is not None:
                frames.setdefault(link.ifindex, []).append(fin_frame(fin.state, link.mac))
        for ifindex, all_of_it in frames.items():
            await namespace.quick.call_async(self._backend.inject, ifindex, all_of_it)


def _without_end(fins: Iterable[Fin], found: Iterable[Found | None]) -> Iterable[tuple[int, Fin]]:
    for fin, now in zip(fins, found, strict=True):
        if now is not None and now.inode == fin.inode and now.state in _OPEN:
            yield fin.inode, replace(fin, state=replace(fin.state, snd_una=seq(fin.state.snd_una + now.acked),
                                                        snd_nxt=seq(fin.state.snd_nxt + now.acked)))


def _way(namespace: Namespace, fin: Fin) -> LinkRow | None:
    """The interface by which the connection went; if that is not up, another one that has the address."""
    was = namespace.watcher.device(fin.ifindex)
    if was is not None and was.up:
        return was
    others = (link for link in namespace.watcher.links() if link.up)
    return next((link for link in others if fin.state.laddr in namespace.addresses(link.ifindex)), was)
