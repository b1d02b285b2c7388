"""The network namespaces that are served: a worker thread, a watcher with its page, and the interfaces of each.

A namespace is entered when its first program connects (or at the start, where an interface was named) and left when
its last program is gone, because our thread would keep it alive.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Protocol

from vmahybrid.config.service import ServiceConfig
from vmahybrid.errors import Refused, VmahybridError
from vmahybrid.net.bond import stack
from vmahybrid.net.netns import Netns, NetnsWorker
from vmahybrid.service.backend import Backend
from vmahybrid.service.ports import LinkLike, Port, serving
from vmahybrid.service.proof import netns_cookie
from vmahybrid.service.rdma import RdmaDevices
from vmahybrid.steering.keys import PortId
from vmahybrid.steering.reasons import Reason
from vmahybrid.steering.table import refuse

log = logging.getLogger("vmahybrid.service")


class LinkRow(LinkLike, Protocol):
    """What the service reads of vmahybrid.net.page.LinkInfo."""

    @property
    def ifindex(self) -> int: ...
    @property
    def mtu(self) -> int: ...
    @property
    def mac(self) -> bytes: ...


class AddressRow(Protocol):
    @property
    def address(self) -> bytes: ...


class Watcher(Protocol):
    """vmahybrid.net.watcher.NetWatcher as it is used here."""

    @property
    def page_fd(self) -> int: ...
    @property
    def page_size(self) -> int: ...

    async def start(self) -> None: ...
    def links(self) -> Sequence[LinkRow]: ...
    def device(self, ifindex: int) -> LinkRow | None: ...
    def addresses(self, ifindex: int) -> Sequence[AddressRow]: ...
    def had(self, address: bytes) -> bool: ...
    def refresh_served(self) -> None: ...
    async def resolve_neighbour(self, ifindex: int, address: bytes, timeout: float) -> bool: ...  # noqa: ASYNC109
    async def close(self) -> None: ...


Changed = Callable[["Namespace", Collection[str]], None]
MakeWatcher = Callable[[NetnsWorker, Callable[[LinkRow], Reason], Callable[[Collection[str]], None]], Watcher]


class Namespace:
    """One namespace. ``users``: sessions in it; ``kept``: an interface of it was named in the configuration. ``quick``:
    a worker for what a program waits for while others' rings are opened, which takes ``worker`` 100 ms for each."""

    def __init__(self, worker: NetnsWorker, config: Callable[[], ServiceConfig], backend: Backend,
                 make_watcher: MakeWatcher, changed: Changed) -> None:
        self.worker, self.netns, self.name = worker, worker.netns, worker.netns.name
        self.quick = worker
        self.cookie = 0
        self.users = 0
        self.kept = False
        self.path: Path | None = None   # the name by which it was entered
        self.ports: dict[int, Port] = {}
        self.rdma = RdmaDevices(worker)
        self._config, self._backend = config, backend
        self.watcher = make_watcher(worker, self.served, lambda what: changed(self, what))

    async def start(self) -> None:
        """Raises OSError."""
        self.cookie = await self.worker.call_async(netns_cookie)
        self.quick = NetnsWorker.open_netns_of(self.worker)  # not in a thread: who is cancelled would not close it
        await self.watcher.start()
        self.watcher.refresh_served()  # the first reading asked before the addresses were known
        self.rdma.look()

    def link(self, ifindex: int) -> LinkRow | None:
        return next((link for link in self.watcher.links() if link.ifindex == ifindex), None)

    def addresses(self, ifindex: int) -> list[bytes]:
        """Of an interface, 16 bytes each, in the kernel's order."""
        return [row.address for row in self.watcher.addresses(ifindex)]

    def _serving(self, link: LinkRow) -> Reason:
        return serving(self._config(), self.name, link, bool(self.addresses(link.ifindex)),
                       stack(link, self.watcher.device))

    def served(self, link: LinkRow) -> Reason:
        """The policy, then what was found out when the interface was asked for."""
        reason = self._serving(link)
        port = self.ports.get(link.ifindex)
        if reason is Reason.NONE and port and port.handle is None and port.error and not port.asked_verbs:
            return port.reason
        return reason

    async def port_for(self, ifindex: int) -> Port:
        """The interface, if rings may be asked for there. Raises Refused; the reason is remembered for status."""
        link = self.link(ifindex)
        if link is None:
            raise refuse(f"interface {ifindex} of {self.name}", Reason.NO_INTERFACE)
        port = self._port(link)
        async with port.lock:
            self._check_served(port, link)
        return port

    def _port(self, link: LinkRow) -> Port:
        if link.ifindex not in self.ports:
            self.ports[link.ifindex] = Port(PortId(self.netns, link.ifindex), link.name, False, link.mtu, link.mac)
        return self.ports[link.ifindex]

    def _check_served(self, port: Port, link: LinkRow) -> None:
        reason = self._serving(link)
        if reason is not Reason.NONE:
            if port.handle is None:
                port.reason = reason
            raise refuse(f"interface {link.name}", reason)

    async def open_port(self, ifindex: int, explicit: bool = False) -> Port:
        """The interface with our program on it. Raises Refused; the reason is remembered for status and explain."""
        link = self.link(ifindex)
        if link is None:
            raise refuse(f"interface {ifindex} of {self.name}", Reason.NO_INTERFACE)
        port = self._port(link)
        async with port.lock:
            port.explicit = port.explicit or explicit
            if port.handle is None:
                self._check_served(port, link)
                await self._attach(port)
        return port

    async def _attach(self, port: Port) -> None:
        mode = self._config().mode_of(port.name)
        try:
            port.handle = await self.worker.call_async(self._backend.open_port, self.worker, port.id.ifindex,
                                                       port.name, mode)
        except VmahybridError as error:
            port.reason = Reason.from_code(getattr(error, "reason", 0) or Reason.ATTACH_FAILED)
            port.error = Refused(error.what, error.why, error.remedy, int(port.reason))
            raise port.error from error
        except OSError as error:
            port.reason = Reason.ATTACH_FAILED
            port.error = Refused(f"interface {port.name}", f"{port.reason.text}: {error}", port.reason.remedy,
                                 int(port.reason))
            raise port.error from error
        port.error, port.reason, port.switches, port.switch_failures = None, port.handle.reason, 0, 0
        log.info("interface %s:%s: attached in %s mode (%s)", self.name, port.name,
                 "native" if port.handle.native else "generic", port.reason.text if port.reason else "best")

    async def close_port(self, port: Port) -> None:
        """Detach. Idempotent."""
        async with port.lock:
            handle, port.handle = port.handle, None
            if handle is not None:
                port.reason = Reason.NOT_TRIED
                await self.worker.call_async(handle.close)
                log.info("interface %s:%s: detached", self.name, port.name)

    async def close(self) -> None:
        """Leave the namespace. Idempotent."""
        await self.rdma.close()
        for port in list(self.ports.values()):
            await self.close_port(port)
        self.ports.clear()
        await self.watcher.close()
        await self.leave()

    async def leave(self) -> None:
        """End the threads. Idempotent."""
        # both begin, whatever becomes of the caller meanwhile
        await asyncio.gather(*(asyncio.to_thread(worker.close) for worker in (self.quick, self.worker)))


class Namespaces:
    """All namespaces that are entered, by identity."""

    def __init__(self, config: Callable[[], ServiceConfig], backend: Backend, make_watcher: MakeWatcher,
                 changed: Changed) -> None:
        self.all: dict[Netns, Namespace] = {}
        self._config, self._backend, self._make_watcher, self._changed = config, backend, make_watcher, changed
        self._lock = asyncio.Lock()

    async def enter(self, fd: int) -> Namespace:
        """The namespace of an open namespace file (borrowed), entered if it is new. Raises OSError."""
        key = Netns.of_fd(fd)
        async with self._lock:
            if key not in self.all:
                worker = await asyncio.to_thread(NetnsWorker.open_fd, fd)
                found = Namespace(worker, self._config, self._backend, self._make_watcher, self._changed)
                try:
                    await found.start()
                except BaseException:
                    await found.leave()
                    raise
                self.all[key] = found
            # Counted before anybody else runs, so that `leave_unused` does not take it away again.
            self.all[key].users += 1
            return self.all[key]

    async def keep(self, path: Path) -> Namespace:
        """Enter a namespace by its name and stay, for interfaces that were named. Raises OSError."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            namespace = await self.enter(fd)
        finally:
            os.close(fd)
        namespace.users -= 1
        namespace.kept, namespace.path = True, path
        return namespace

    async def leave_unused(self) -> None:
        """Close the namespaces that nobody uses."""
        async with self._lock:
            for key, namespace in list(self.all.items()):
                if not namespace.users and not namespace.kept and not any(p.ring_ids for p in namespace.ports.values()):
                    del self.all[key]
                    await namespace.close()

    async def close(self) -> None:
        """Leave all. Idempotent."""
        async with self._lock:
            while self.all:
                _, namespace = self.all.popitem()
                await namespace.close()
