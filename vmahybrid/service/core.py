"""The heart of the service: sessions, flows and rings, and bringing the maps to what the table says.

Everything here runs on the event loop; what may block goes through the workers of the namespaces.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING

from vmahybrid.cli.version import version
from vmahybrid.config.service import ServiceConfig
from vmahybrid.contracts import lib
from vmahybrid.errors import Refused, VmahybridError
from vmahybrid.service.backend import Backend, PortHandle
from vmahybrid.service.events import EventLog
from vmahybrid.service.grace import Grace
from vmahybrid.service.grants import Grant, Grants
from vmahybrid.service.messages import event
from vmahybrid.service.namespaces import MakeWatcher, Namespace, Namespaces
from vmahybrid.service.ports import Port, named
from vmahybrid.service.tcpmoves import TcpMoves
from vmahybrid.service.tickets import Tickets
from vmahybrid.steering.flow import Flow
from vmahybrid.steering.keys import GrantKey, PortId
from vmahybrid.steering.mirror import mirror
from vmahybrid.steering.reasons import Reason
from vmahybrid.steering.table import SteeringTable

if TYPE_CHECKING:
    from vmahybrid.service.session import Session

log = logging.getLogger("vmahybrid.service")

PARTING = 0.25  # seconds in which a program that is told that a flow went home may still send for it by its rings


class Core:
    """Shared by all sessions, the API's facade and the life cycle in app.py."""

    def __init__(self, config: ServiceConfig, backend: Backend, make_watcher: MakeWatcher) -> None:
        self.config = config
        self.backend = backend
        self.table = SteeringTable(config["limits.rules"])
        self.grants = Grants()
        self.grace = Grace()
        self.events = EventLog()
        self.sessions: dict[int, Session] = {}
        self.counters: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.features: dict[str, object] = {}
        self.health: dict[str, str] = {}  # sentences by what they are about
        self.api: list[str] = []
        self.started = time.time()
        self.version = version()
        self.ready = False
        self.closing = False
        self.connections: set[Session] = set()  # also those that have not said HELLO
        self.namespaces = Namespaces(lambda: self.config, backend, make_watcher, self.namespace_changed)
        self.tcp = TcpMoves(self)
        self.tickets = Tickets(self._relayed)
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- small services

    def _relayed(self, names: str) -> None:
        self.counters["tcp_relayed_total"] += 1
        self.events.add("connection-relayed", f"accepted by a program without the shim: {names}")

    def count_reason(self, reason: int) -> None:
        if reason:
            self.reasons[Reason.from_code(reason).slug] += 1

    def spawn(self, work: asyncio._CoroutineLike[None], name: str) -> asyncio.Task[None]:
        """A task that is kept alive; an exception is logged, never lost."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.counters["internal_errors_total"] += 1
            log.error("%s: %r", task.get_name(), error, exc_info=error)

    def port(self, port: PortId) -> tuple[Namespace, Port] | None:
        namespace = self.namespaces.all.get(port.netns)
        found = namespace.ports.get(port.ifindex) if namespace else None
        return (namespace, found) if namespace and found else None

    # ---- converging

    def converge(self, owners: Collection[int] = ()) -> None:
        """Carry out what the table decided; guards of ``owners``' rings too. Tells owners of evicted flows."""
        self.table.settle_nic()
        for port_id, keys in self.table.take_dirty().items():
            found = self.port(port_id)
            if found is None or found[1].handle is None:
                continue
            changes = mirror(found[1].handle.rules, self.table.wanted(port_id), keys)
            self.counters["mirror_puts_total"] += changes.put
            self.counters["mirror_deletes_total"] += changes.deleted
            for key, error in changes.failed:
                log.error("interface %s: rule %s: %s", found[1].name, key, error)
                self.counters["mirror_failures_total"] += 1
                if found[1].handle.refused is not None:
                    continue  # a sentence of its own, as long as it is so
                self.health[f"mirror {found[1].name}"] = f"Interface {found[1].name}: a rule could not be set: {error}."
        for owner in owners:
            self._mirror_guards(owner)
        self.tcp.let_go()
        self._tell_evicted()

    def _mirror_guards(self, owner: int) -> None:
        """Of hundreds of rings of one process on an interface: all may send from the same sources, and share what they
        have been told, so that what differs is found once."""
        wanted: dict[PortId, dict[GrantKey, int]] = {}
        differs: dict[tuple[int, PortId], set[GrantKey]] = {}   # by what was told
        for grant in self.grants.of_session(owner):
            if grant.handle.grants is None:
                continue
            port, told = grant.port.id, grant.allowed
            if port not in wanted:
                wanted[port] = self.table.grants(owner, port)
            if (id(told), port) not in differs:
                differs[id(told), port] = {key for key, _ in wanted[port].items() ^ told.items()}
            if keys := differs[id(told), port]:
                self._mirror_guard(grant, wanted[port], keys)

    def _mirror_guard(self, grant: Grant, wanted: dict[GrantKey, int], keys: set[GrantKey]) -> None:
        assert grant.handle.grants is not None
        changes = mirror(grant.handle.grants, wanted, keys)
        told, failed = grant.allowed, {key for key, _ in changes.failed}
        grant.allowed = wanted if not failed else {
            **{key: value for key, value in wanted.items() if key not in failed},
            **{key: told[key] for key in failed if key in told}}
        for key, error in changes.failed:
            log.error("ring %d: source %s: %s", grant.ring_id, key, error)
            self.counters["mirror_failures_total"] += 1

    def _tell_evicted(self) -> None:
        evicted = self.table.take_evicted()
        for flow, reason in evicted:
            self.count_reason(reason)
            self.events.add("flow-removed", f"{flow.local_text} went home: {reason.text}", flow_id=flow.flow_id,
                            reason=reason.slug)
            session = self.sessions.get(flow.owner)
            if session is not None:
                session.note_group(flow, reason)
                session.notify(event(lib.VMH_EV_FLOW_HOME, flow.flow_id, reason=reason))
            asyncio.get_running_loop().call_later(PARTING, self.parted, flow)
        if evicted:
            self.converge({flow.owner for flow, _ in evicted})

    def parted(self, flow: Flow) -> None:
        """What was sent for a flow that went home has left its rings."""
        self.table.parted(flow)
        if not self.closing:    # then the programs send yet, and their rings go with what they may
            self.converge([flow.owner])

    def prepare_counter(self, flow: Flow) -> None:
        """A flow got a rule index that another may have had."""
        for namespace in self.namespaces.all.values():
            for port in namespace.ports.values():
                if port.handle is not None:
                    port.handle.zero_hits(flow.index)

    def hits(self, flow: Flow) -> tuple[int, int]:
        """(packets, bytes) that the rules of a flow matched, over all interfaces."""
        handles = [port.handle for namespace in self.namespaces.all.values() for port in namespace.ports.values()
                   if port.handle is not None]
        pairs = [handle.hits(flow.index) for handle in handles]
        return sum(p for p, _ in pairs), sum(b for _, b in pairs)

    def unattached(self, flow: Flow) -> Refused | None:
        """Why the rules of a flow steer nothing for now, though they are set: on each of its interfaces no program
        could be attached. None where they do, where it has none, and where its rules are in its program's device."""
        found = [self.port(port) for port in {port for port, _ in self.table.rules_of(flow.flow_id)}]
        refused = [one[1].handle.refused if one and one[1].handle else None for one in found]
        if not refused or None in refused:
            return None
        rings = self.table.rings_of(flow)
        return None if rings and all(ring.in_nic for ring in rings) else refused[0]

    # ---- interfaces

    def port_attached(self, namespace: Namespace, port: Port) -> None:
        """The table learns of an interface; rules of the operator appear on it."""
        addresses = namespace.addresses(port.id.ifindex)
        if port.waiting:    # those of IPv6 went with the link, and may come back; their rules have to be there then
            addresses += [address for address in self.table.addresses_of(port.id) if address not in addresses]
        self.table.set_port(port.id, addresses, netns=namespace.name, interface=port.name)
        if port.handle is not None and port.mirrored is not port.handle:
            self.table.refresh(port.id)  # flows of raw packet QPs may have been there before it
            port.mirrored = port.handle
        self.converge()

    def namespace_changed(self, namespace: Namespace, what: Collection[str]) -> None:
        """Netlink said something: interfaces that went take their rings along, addresses move rules."""
        if self.closing or namespace.netns not in self.namespaces.all:
            return
        if "links" in what:
            self._links_changed(namespace)
        if "addresses" in what:
            namespace.watcher.refresh_served()  # an interface without an address is not served by default
            for port in namespace.ports.values():
                if port.id in self.table.ports:
                    self.port_attached(namespace, port)
            self.converge({grant.session for grant in self.grants.all.values()
                           if grant.port.id.netns == namespace.netns})

    def _links_changed(self, namespace: Namespace) -> None:
        links = {link.ifindex: link for link in namespace.watcher.links()}
        for port in list(namespace.ports.values()):
            link = links.get(port.id.ifindex)
            if link is None:
                self.port_lost(namespace, port, Reason.IF_GONE)
                continue
            port.name = link.name
            address_changed, port.mac = link.mac != port.mac, link.mac
            if address_changed and port.handle is not None:
                port.handle.set_mac(link.mac)
            goes_down, port.is_up = port.is_up and not link.up, link.up
            if address_changed and port.ring_ids:
                self.port_lost(namespace, port, Reason.IF_MAC)
            elif not link.up and _is_used(port):
                if goes_down or port.waiting is None:
                    self._await_up(namespace, port)
            elif port.mtu != link.mtu:
                port.mtu = link.mtu
                if port.handle is not None:
                    self.spawn(self._set_mtu(namespace, port.handle, link.mtu), f"MTU of {port.name}")
            port.error = None  # worth another attempt
        for link in links.values():
            known = namespace.ports.get(link.ifindex)
            if (link.up and namespace.kept and (known is None or known.handle is None)
                    and named(self.config, namespace.name, link)):
                self.spawn(self.open_explicit(namespace, link.ifindex), f"attach {link.name}")

    def _await_up(self, namespace: Namespace, port: Port) -> None:
        """Before it is lost."""
        if port.waiting is not None:
            port.waiting.cancel()
        seconds = self.config["ring.down_seconds"]
        port.waiting = asyncio.get_running_loop().call_later(seconds, self._still_down, namespace, port)

    def _still_down(self, namespace: Namespace, port: Port) -> None:
        port.waiting = None
        if self.closing or namespace.ports.get(port.id.ifindex) is not port:
            return
        link = namespace.watcher.device(port.id.ifindex)
        if (link is None or not link.up) and _is_used(port):
            self.port_lost(namespace, port, Reason.IF_DOWN)
        elif port.id in self.table.ports:
            self.port_attached(namespace, port)

    async def _set_mtu(self, namespace: Namespace, handle: PortHandle, mtu: int) -> None:
        await namespace.worker.call_async(handle.set_mtu, mtu)

    def port_lost(self, namespace: Namespace, port: Port, reason: Reason) -> None:
        """An interface is gone or down, or no longer what its rings know: its flows go home, its rings are closed."""
        log.warning("interface %s:%s: %s", namespace.name, port.name, reason.text)
        self.events.add("interface-lost", f"{port.name}: {reason.text}", interface=port.name, reason=reason.slug)
        grants = [self.grants.all[ring_id] for ring_id in sorted(port.ring_ids)]
        affected = self.table.of_interface(port.id)
        if reason is Reason.IF_GONE:
            self.table.drop_port(port.id)
            namespace.ports.pop(port.id.ifindex, None)
            if port.explicit:
                name = f"{namespace.name}:{port.name}"
                self.health[f"interface {name}"] = (
                    f"Interface {name} disappeared, the kernel serves its flows: it is attached when it is back.")
        for grant in grants:
            session = self.sessions.get(grant.session)
            if session is not None:
                session.notify(event(lib.VMH_EV_RING_GONE, grant.ring_id, reason=reason))
            self.drop_ring(grant, namespace)
        for flow in affected:
            if flow.flow_id in self.table.flows and not self.table.rules_of(flow.flow_id):
                self.table.evict(flow.flow_id, reason)
        self.converge()
        if port.handle is None:
            self.table.drop_port(port.id)
        elif reason is Reason.IF_GONE or (reason is Reason.IF_DOWN and not port.explicit):
            if reason is not Reason.IF_GONE:
                self.table.drop_port(port.id)
            self.spawn(namespace.close_port(port), f"detach {port.name}")

    async def open_explicit(self, namespace: Namespace, ifindex: int) -> None:
        """Attach an interface that was named. A refusal is logged and shown, not raised."""
        try:
            port = await namespace.open_port(ifindex, explicit=True)
        except VmahybridError as error:
            log.warning("%s", error)
            return
        self.health.pop(f"interface {namespace.name}:{port.name}", None)
        self.port_attached(namespace, port)

    # ---- rings

    def drop_ring(self, grant: Grant, namespace: Namespace) -> asyncio.Task[None] | None:
        """Rules first, now; the ring itself in the worker. Idempotent."""
        if self.grants.pop(grant.ring_id) is None:
            return None
        self.table.drop_ring(grant.ring_id)
        self.converge()
        self.events.add("ring-closed", f"ring {grant.ring_id} of process {grant.pid} on {grant.port.name}",
                        ring_id=grant.ring_id, pid=grant.pid)
        return self.spawn(self._close_ring(grant, namespace), f"close ring {grant.ring_id}")

    async def _close_ring(self, grant: Grant, namespace: Namespace) -> None:
        try:
            await namespace.worker.call_async(grant.handle.close)
        except (OSError, VmahybridError) as error:
            if getattr(error, "errno", 0) != errno.ENODEV:
                raise

    async def settle(self) -> None:
        """Wait for what was spawned."""
        while pending := [task for task in self._tasks if task is not asyncio.current_task()]:
            await asyncio.wait(pending)


def _is_used(port: Port) -> bool:
    return bool(port.ring_ids or (port.handle and not port.explicit))
