"""What connections that came home need later.

The end of a peer's stream, which it does not say again: the kernel is given it until it has it. It takes none while the
interface is down, or the address away; and a raw packet QP takes even frames that were made here, as long as its rule
is there. Programs tell the next service of those that are missing still.

What was under way when an interface went down: the kernel has measured no round trip, and sends again after 1, 3 or
more seconds, each timeout twice the one before, also while it can't send at all. Once it can, an ICMP message that the
way was closed makes it send at once (RFC 6069).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vmahybrid.errors import VmahybridError
from vmahybrid.net.sockdiag import Found, connections
from vmahybrid.net.tcpask import Names
from vmahybrid.net.tcpfin import fin_frame, unreachable_frame
from vmahybrid.net.tcpstate import TcpFlag, TcpPhase, TcpState, seq
from vmahybrid.steering.reasons import Reason

if TYPE_CHECKING:
    from vmahybrid.service.backend import Backend
    from vmahybrid.service.namespaces import LinkRow, Namespace

log = logging.getLogger("vmahybrid.service")

AT_FIRST = (0.02, 0.1)  # seconds
PAUSE = 0.25
PAUSE_OF_EACH = 0.001
LAST_PAUSE = 0.02       # before a service ends
HURRY_SECONDS = 10.0    # from when the interface is up
WAIT_SECONDS = 600.0    # for that
DOUBLINGS = 3           # of the timeout, that are taken back at a time

_OPEN = (TcpPhase.ESTABLISHED, TcpPhase.FIN_WAIT1, TcpPhase.FIN_WAIT2)
_NO_WAY = {Reason.IF_DOWN, Reason.IF_GONE, Reason.NO_ROUTE, Reason.TCP_ROUTE, Reason.VERBS_FAILED}
_IP_RECVERR, _IPV6_RECVERR = 11, 25     # linux/in.h, linux/in6.h


@dataclass(slots=True)
class Home:
    """A connection that came home: ``state`` with snd_una as it is now. ``inode``: of its socket. ``ifindex``: it went
    by this interface. ``hurry``: until this time (0: not), of time.monotonic()."""

    state: TcpState
    inode: int
    ifindex: int
    hurry: float = 0.0

    @property
    def names(self) -> Names:
        return Names(self.state.laddr, self.state.lport, self.state.raddr, self.state.rport)

    @property
    def lacks_end(self) -> bool:
        return bool(self.state.flags & TcpFlag.PEER_FIN)

    def wants(self, now: Found | None) -> bool:
        """Does it need something still, so found?"""
        if now is None or now.inode != self.inode:
            return False
        if self.lacks_end and now.state in _OPEN:
            return True
        return time.monotonic() < self.hurry and now.queued != 0


class Afterwards:
    """On the event loop."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._homes: dict[Namespace, dict[int, Home]] = {}      # by inode
        self._new: dict[Namespace, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, namespace: Namespace, state: TcpState, fd: int, inode: int, ifindex: int, reason: int) -> None:
        """The kernel has the connection in this state, and was given the FIN once. Borrows ``fd``."""
        home = Home(replace(state, send=b"", receive=b"", snd_nxt=state.snd_una), inode, ifindex)
        if state.snd_nxt != state.snd_una and reason in _NO_WAY and not _hears_errors(fd):
            home.hurry = time.monotonic() + WAIT_SECONDS
        if not home.lacks_end and not home.hurry:
            return
        self._homes.setdefault(namespace, {})[inode] = home
        if namespace in self._new:
            self._new[namespace].set()
            return
        self._new[namespace] = asyncio.Event()
        task = asyncio.create_task(self._attend(namespace))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def lacks_end(self, namespace: Namespace, inode: int) -> bool:
        """Is the kernel to be given one for this socket?"""
        home = self._homes.get(namespace, {}).get(inode)
        return home is not None and home.lacks_end

    async def close(self) -> None:
        """After the programs have left their rings: the last attempt."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._homes:
            await asyncio.sleep(LAST_PAUSE)
        for namespace in list(self._homes):
            await self._round(namespace)

    async def _attend(self, namespace: Namespace) -> None:
        new = self._new[namespace]
        namespace.users += 1    # it is not left meanwhile
        try:
            while self._homes[namespace]:
                new.clear()
                await self._until_more(namespace, new)
        finally:
            namespace.users -= 1
            del self._new[namespace]
            if not self._homes[namespace]:
                del self._homes[namespace]

    async def _until_more(self, namespace: Namespace, new: asyncio.Event) -> None:
        """Rounds until there are none, or new ones."""
        for pause in itertools.chain(AT_FIRST, itertools.repeat(PAUSE)):
            homes = self._homes[namespace]
            if not homes or new.is_set():
                return
            await asyncio.sleep(pause + PAUSE_OF_EACH * len(homes))
            await self._round(namespace)

    async def _round(self, namespace: Namespace) -> None:
        homes = self._homes[namespace]
        asked = list(homes.values())
        try:
            found = await namespace.quick.call_async(connections, [(home.names, home.ifindex) for home in asked])
            frames: dict[int, list[bytes]] = defaultdict(list)
            for home, now in zip(asked, found, strict=True):
                if now is not None and home.wants(now):
                    for link, frame in _frames(namespace, home, now):
                        frames[link].append(frame)
                elif homes.get(home.inode) is home:
                    del homes[home.inode]
            for link, all_of_it in frames.items():
                await namespace.quick.call_async(self._backend.inject, link, all_of_it)
        except (VmahybridError, OSError) as error:
            log.warning("TCP: %d connections that came home lack something still: %s", len(asked), error)
        except RuntimeError as error:   # the namespace is gone
            log.warning("TCP: %d connections that came home lack something: %s", len(asked), error)
            homes.clear()


def _frames(namespace: Namespace, home: Home, now: Found) -> Iterator[tuple[int, bytes]]:
    """For it, and by which interface."""
    link = _way(namespace, home)
    if link is None:
        return
    una = seq(home.state.snd_una + now.acked)
    state = replace(home.state, snd_una=una, snd_nxt=una)
    if home.lacks_end and now.state in _OPEN:
        yield link.ifindex, fin_frame(state, link.mac)
    if home.hurry and link.up:
        home.hurry = min(home.hurry, time.monotonic() + HURRY_SECONDS)
        if now.retransmits:
            yield from [(link.ifindex, unreachable_frame(state, link.mac))] * DOUBLINGS


def _way(namespace: Namespace, home: Home) -> LinkRow | None:
    """The interface by which the connection went; if that is not up, another one that has the address."""
    was = namespace.watcher.device(home.ifindex)
    if was is not None and was.up:
        return was
    others = (link for link in namespace.watcher.links() if link.up)
    return next((link for link in others if home.state.laddr in namespace.addresses(link.ifindex)), was)


def _hears_errors(fd: int) -> bool:
    """Is the program told of each ICMP message?"""
    sock = socket.socket(fileno=fd)
    try:
        return bool(sock.getsockopt(socket.IPPROTO_IP, _IP_RECVERR) or
                    (sock.family == socket.AF_INET6 and sock.getsockopt(socket.IPPROTO_IPV6, _IPV6_RECVERR)))
    except OSError:
        return True
    finally:
        sock.detach()
