"""What the kernel knows about links, addresses, routes, rules and neighbours of one namespace, kept in a page.

Neighbours are followed event by event. Everything else is read anew when an event says that something changed: the
kernel takes IPv4 routes away without saying so when a link goes down or an address vanishes, and `ip route replace`
announces the new route only, so that a table kept by events alone goes wrong.
"""

import asyncio
import contextlib
import errno
import logging
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from vmahybrid.contracts import addr_to_bytes, addr_to_text
from vmahybrid.net import conntrack, ndisc, rtnl
from vmahybrid.net.netns import NetnsWorker
from vmahybrid.net.page import AddressInfo, LinkInfo, NeighbourInfo, NetPage, RouteInfo

__all__ = ["AddressInfo", "LinkInfo", "NetWatcher", "RouteInfo"]

log = logging.getLogger(__name__)

MANAGED_LIMIT = 512         # neighbours kept fresh; half of net.ipv4.neigh.default.gc_thresh3
REMEMBERED = 60.0           # seconds, of an address that is gone
# Between two readings: short ones may follow each other, long ones (thousands of routes) take a fifth of a core. By the
# time on the CPU: a reading that had to wait for a grant in the same thread costs nothing, and news are not to wait.
_PAUSE, _SHORT, _PAUSE_FACTOR, _PAUSE_MAX = 0.005, 0.025, 4, 5.0
_ADVERTISED = 0.0, 1.0      # seconds after a MAC has changed
_NAT_EVERY = 2.0            # seconds; the old iptables tells nobody of its rules, nftables does
_ALL = frozenset({"links", "addresses", "routes", "rules", "neighbours", "nat"})
_CAUSES = {
    rtnl.RTM_NEWLINK: {"links", "addresses", "routes"},
    rtnl.RTM_DELLINK: {"links", "addresses", "routes"},
    rtnl.RTM_NEWADDR: {"addresses", "routes"},
    rtnl.RTM_DELADDR: {"addresses", "routes"},
    rtnl.RTM_NEWROUTE: {"routes"},
    rtnl.RTM_DELROUTE: {"routes"},
    rtnl.RTM_NEWRULE: {"rules"},
    rtnl.RTM_DELRULE: {"rules"},
    rtnl.RTM_NEWNEXTHOP: {"routes"},
    rtnl.RTM_DELNEXTHOP: {"routes"},
}
_Key = tuple[int, bytes]
_T = TypeVar("_T")


class NetWatcher:
    """Mirror of one namespace. Lives on one event loop; ``worker`` does what blocks.

    ``served(link)`` says with which reason (reasons.def, 0: none) rings are refused on a link; it is asked whenever
    links change and by :meth:`refresh_served`. ``on_change(kinds)`` is called on the loop after the page was written,
    with some of "links", "addresses", "routes", "rules", "neighbours", "nat".
    """

    def __init__(
        self,
        worker: NetnsWorker,
        loop: asyncio.AbstractEventLoop,
        served: Callable[[LinkInfo], int],
        on_change: Callable[[set[str]], None],
    ) -> None:
        self._worker, self._loop, self._served, self._on_change = worker, loop, served, on_change
        self._page = NetPage()
        self._raw_links: list[LinkInfo] = []
        self._addresses: list[AddressInfo] = []
        self._gone: dict[bytes, float] = {}     # addresses, and when (of time.monotonic)
        self._policy = self._ambiguous = False
        self._permanent: set[_Key] = set()
        self._valid: set[_Key] = set()
        self._managed: set[_Key] = set()
        self._waiters: dict[_Key, set[asyncio.Future[None]]] = {}
        self._dirty: set[str] = set()
        self._wake = asyncio.Event()
        self._spent = 0.0           # seconds on the CPU for the reading under way
        self._events: rtnl.EventSocket | None = None
        self._requests: rtnl.RequestSocket | None = None
        self._nat_events: socket.socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._macs: dict[int, bytes] = {}       # of links, when they were last up
        self._advertising: set[asyncio.Task[None]] = set()

    @property
    def page_fd(self) -> int:
        """Read-only fd of the page, for passing to shims; stays ours."""
        return self._page.fd

    @property
    def page_size(self) -> int:
        return self._page.size

    @property
    def generation(self) -> int:
        return self._page.generation

    def links(self) -> list[LinkInfo]:
        """By ifindex, with the reason that ``served`` gave."""
        return [replace(link, reason=self._served(link)) for link in self._raw_links]

    def device(self, ifindex: int) -> LinkInfo | None:
        """A link as the kernel has it, without a reason: for ``served``, which may ask for the device under another."""
        return next((link for link in self._raw_links if link.ifindex == ifindex), None)

    def addresses(self, ifindex: int = 0) -> list[AddressInfo]:
        """Of one link, or of all (0); in the kernel's order."""
        return [address for address in self._addresses if ifindex in (0, address.ifindex)]

    def had(self, address: bytes) -> bool:
        """Is it one of the namespace, or was it a moment ago? From any thread."""
        return (time.monotonic() < self._gone.get(address, 0.0) + REMEMBERED
                or any(address == row.address for row in self._addresses))

    async def start(self) -> None:
        """Returns when the page is filled. Raises OSError; then nothing is left open."""
        try:
            self._events = await self._worker.call_async(rtnl.EventSocket)
            self._requests = await self._worker.call_async(rtnl.RequestSocket)
            self._nat_events = await self._worker.call_async(conntrack.events)
            await self._read(set(_ALL))     # events that come meanwhile wait in the socket
        except BaseException:
            await self.close()
            raise
        self._loop.add_reader(self._events.fileno(), self._on_readable)
        if self._nat_events:
            self._loop.add_reader(self._nat_events.fileno(), self._on_rules)
        self._tasks = [self._loop.create_task(self._follow(), name="net-watcher"),
                       self._loop.create_task(self._look_for_nat(), name="net-watcher-nat")]

    async def close(self) -> None:
        """Undo what was changed on the host, mark the page as closed and let everything go. Idempotent."""
        if self._events:
            self._loop.remove_reader(self._events.fileno())
        if self._nat_events:
            self._loop.remove_reader(self._nat_events.fileno())
        tasks = [*self._tasks, *self._advertising]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks = []
        for key in list(self._managed):
            await self._unmanage(key)
        for endpoint in (self._events, self._requests, self._nat_events):
            if endpoint:
                endpoint.close()
        self._events = self._requests = self._nat_events = None
        for waiters in self._waiters.values():
            for waiter in waiters:
                waiter.cancel()
        self._page.close()

    def refresh_served(self) -> None:
        """Ask ``served`` again for every link: call it when the answer changed."""
        if self._page.set_links(self.links()):
            self._on_change({"links"})

    # ---- events

    def _on_readable(self) -> None:
        assert self._events
        try:
            messages = self._events.read()
        except OSError as error:
            if error.errno != errno.ENOBUFS:
                log.error("netlink events of namespace %s: %s", self._worker.netns, error)
            self._mark(set(_ALL))   # events were lost
            return
        changed: list[rtnl.NeighbourEvent] = []
        for kind, message in messages:
            if kind in (rtnl.RTM_NEWNEIGH, rtnl.RTM_DELNEIGH):
                entry = rtnl.neighbour_event(rtnl.decode(message))
                changed += [entry] if entry else []
            elif not _is_foreign_route(kind, message):
                self._mark(_CAUSES.get(kind, set()))
        if changed and self._apply_neighbours(changed):
            self._on_change({"neighbours"})

    def _mark(self, kinds: set[str]) -> None:
        if kinds:
            self._dirty |= kinds
            self._wake.set()

    async def _follow(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            kinds, self._dirty = self._dirty, set()
            self._spent = 0.0
            try:
                changed = await self._read(kinds)
            except OSError as error:
                log.error("reading %s of namespace %s: %s", ", ".join(sorted(kinds)), self._worker.netns, error)
                await asyncio.sleep(1)
                self._mark(kinds)
                continue
            if changed:
                self._paid(self._on_change, changed)
            await asyncio.sleep(_PAUSE if self._spent < _SHORT else min(self._spent * _PAUSE_FACTOR, _PAUSE_MAX))

    async def _translates(self) -> bool:
        try:
            return await self._worker.call_async(self._paid, conntrack.translates)
        except OSError as error:
            log.warning("NAT rules of namespace %s: %s", self._worker.netns, error)
            return False

    def _on_rules(self) -> None:
        """What it says does not matter: the rules are read."""
        assert self._nat_events
        with contextlib.suppress(OSError):
            while self._nat_events.recv(65536):
                pass
        self._mark({"nat"})

    async def _look_for_nat(self) -> None:
        while True:
            await asyncio.sleep(_NAT_EVERY)
            if await self._worker.call_async(conntrack.exists):
                self._mark({"nat"})

    def _paid(self, fn: Callable[..., _T], *args: Any) -> _T:
        """Call it and count its time on the CPU, in whichever thread: a reading uses one after the other."""
        begin = time.thread_time()
        try:
            return fn(*args)
        finally:
            self._spent += time.thread_time() - begin

    def _note_addresses(self, rows: list[AddressInfo]) -> None:
        now = time.monotonic()
        gone = {row.address for row in self._addresses} - {row.address for row in rows}
        self._gone = {address: since for address, since in self._gone.items() if now < since + REMEMBERED}
        self._gone |= dict.fromkeys(gone, now)
        self._addresses = rows

    async def _read(self, kinds: set[str]) -> set[str]:
        """Read these kinds and write them into the page; those that changed."""
        requests = self._requests
        assert requests
        changed = set()
        if "links" in kinds:
            self._raw_links = await self._worker.call_async(self._paid, requests.links)
            self._note_macs()
            changed |= {"links"} if self._paid(self._page.set_links, self.links()) else set()
        if "addresses" in kinds:
            self._note_addresses(await self._worker.call_async(self._paid, requests.addresses))
            changed |= {"addresses"} if self._paid(self._page.set_addresses, self._addresses) else set()
        if "rules" in kinds:
            self._policy = await self._worker.call_async(self._paid, requests.has_policy)
        if "routes" in kinds:
            routes, self._ambiguous = await self._worker.call_async(self._paid, requests.routes)
            routes = rtnl.without_source(routes, self._addresses)
            changed |= {"routes"} if self._paid(self._page.set_routes, routes) else set()
        changed |= {"rules"} if self._page.set_policy(self._policy or self._ambiguous) else set()
        if "nat" in kinds:
            changed |= {"nat"} if self._page.set_translates(await self._translates()) else set()
        if "neighbours" in kinds:
            entries = await self._worker.call_async(self._paid, requests.neighbours)
            known = {(entry.info.ifindex, entry.info.address) for entry in entries}
            lost = self._valid - known
            changed |= {"neighbours"} if self._apply_neighbours(entries, lost) else set()
        return changed

    def _apply_neighbours(self, entries: list[rtnl.NeighbourEvent], lost: Iterable[_Key] = ()) -> bool:
        """One that may not be used is left out of the page: to a reader that is the same, and a resolution that
        begins moves no generation."""
        usable: dict[_Key, NeighbourInfo] = {}
        gone = set(lost)
        for entry in entries:
            key = (entry.info.ifindex, entry.info.address)
            (self._permanent.add if entry.permanent and not entry.gone else self._permanent.discard)(key)
            if entry.gone:
                self._managed.discard(key)
            if entry.gone or not entry.info.valid:
                usable.pop(key, None)
                gone.add(key)
            else:
                gone.discard(key)
                usable[key] = entry.info
        self._valid = (self._valid - gone) | usable.keys()
        wrote = self._page.update_neighbours(list(usable.values()), list(gone))
        for key in usable.keys() & self._waiters.keys():
            for waiter in self._waiters[key]:
                if not waiter.done():
                    waiter.set_result(None)
        return wrote

    # ---- neighbours on request

    async def resolve_neighbour(self, ifindex: int, address: bytes | str, timeout: float = 1.0) -> bool:  # noqa: ASYNC109
        """Have the kernel resolve a neighbour and keep it fresh. True when its MAC is in the page; False when that
        took longer than ``timeout`` seconds, or the kernel refused (the link is gone)."""
        key = (ifindex, addr_to_bytes(address))
        if key in self._permanent or (key in self._valid and key in self._managed):
            return True     # NTF_USE would take the permanence from an entry that somebody configured
        try:
            if key not in self._waiters:    # else it is being asked for
                await self._manage(key)
        except OSError as error:
            log.info("neighbour %s: %s", self._named(key), error)
            return False
        if key in self._valid:
            return True
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.setdefault(key, set()).add(waiter)
        try:
            await asyncio.wait_for(waiter, timeout)
        except TimeoutError:
            if len(self._waiters[key]) == 1:    # the last: the kernel would ask for it for ever
                await self._unmanage(key)
            return False
        finally:
            self._waiters[key].discard(waiter)
            if not self._waiters[key]:
                del self._waiters[key]
        return True

    def _named(self, key: _Key) -> str:
        name = next((link.name for link in self.links() if link.ifindex == key[0]), f"with index {key[0]}")
        return f"{addr_to_text(key[1])} on interface {name}"

    async def _manage(self, key: _Key) -> None:
        requests = self._requests
        if requests is None:
            raise OSError(errno.ESHUTDOWN, "the watcher is closed")
        managed = len(self._managed) < MANAGED_LIMIT
        if managed:
            self._managed.add(key)
        try:
            await self._worker.call_async(requests.use_neighbour, *key, managed)
        except OSError as error:
            self._managed.discard(key)
            if not managed or error.errno != errno.EINVAL:
                raise
            await self._worker.call_async(requests.use_neighbour, *key, False)  # kernel before 5.16
            return
        if managed:
            log.info("neighbour entry %s is kept fresh (managed)", self._named(key))

    def _note_macs(self) -> None:
        """Another one than when the link was up before, as many are changed only while it is down, is advertised."""
        before = self._macs
        self._macs = {link.ifindex: link.mac if link.up else before.get(link.ifindex, link.mac)
                      for link in self._raw_links}  # fmt: skip
        for link in self._raw_links:
            if link.up and link.mac != before.get(link.ifindex, link.mac) and not self._served(link):
                task = self._loop.create_task(self._advertise(link), name="net-watcher-mac")
                self._advertising.add(task)
                task.add_done_callback(self._advertising.discard)

    async def _advertise(self, link: LinkInfo) -> None:
        with contextlib.suppress(RuntimeError):     # the namespace is gone
            for pause in _ADVERTISED:
                await asyncio.sleep(pause)
                own = [row.address for row in self.addresses(link.ifindex) if row.family == 6]
                await self._worker.call_async(ndisc.advertise, link, own)

    async def _unmanage(self, key: _Key) -> None:
        """The entry stays, as one that ages like any other: the kernel's own traffic may be using it."""
        if key not in self._managed or not self._requests:
            return
        self._managed.discard(key)
        try:
            await self._worker.call_async(self._requests.use_neighbour, *key, False)
            log.info("neighbour entry %s is no longer kept fresh", self._named(key))
        except OSError:
            pass    # the link is gone, and the entry with it


def _is_foreign_route(kind: int, message: bytes) -> bool:
    """A route of another table, or a cached one: no news for the page. rtm_table is the fifth byte of struct rtmsg."""
    return kind in (rtnl.RTM_NEWROUTE, rtnl.RTM_DELROUTE) and message[20] not in rtnl.TABLES
