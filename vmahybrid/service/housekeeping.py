"""What the service looks at now and then: shared ports, namespaces that nobody uses, names that are gone."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from pathlib import Path

from vmahybrid.net import sockdiag
from vmahybrid.net.netns import NAMED, Netns
from vmahybrid.service import shared
from vmahybrid.service.core import Core
from vmahybrid.service.drops import Drops
from vmahybrid.service.namespaces import Namespace
from vmahybrid.service.ports import Port
from vmahybrid.steering.flow import Flow, Kind
from vmahybrid.steering.reasons import Reason
from vmahybrid.xdp.holder import attached

log = logging.getLogger("vmahybrid.service")

PERIOD = 1.0        # seconds between looks while there is something to look at
IDLE_PORT = 1.0     # seconds an interface that was attached on demand stays so without a ring


class Housekeeper:
    """One task, asleep unless a flow's port is shared or something is to be closed."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._suspects: set[tuple[int, int]] = set()    # (flow id, inode) seen once
        self._drops = Drops()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD)
            await self._look_for_sharers()
            await self._close_idle()
            await self._try_again()
            self._drops.look(self._core, asyncio.get_running_loop().time())
            for namespace in list(self._core.namespaces.all.values()):
                namespace.rdma.look()

    async def _look_for_sharers(self) -> None:
        """Send flows home that share their port with a socket which only the kernel can serve.

        One that is seen once may be a socket of the same program that is not attached yet; seen twice it is not."""
        by_place: defaultdict[tuple[Namespace, int, int], list[Flow]] = defaultdict(list)
        for flow in self._core.table.flows.values():
            session = self._core.sessions.get(flow.owner)
            if flow.shared_port and session is not None and session.namespace is not None:
                by_place[session.namespace, flow.local_port, flow.proto].append(flow)
        suspects: set[tuple[int, int]] = set()
        for (namespace, port, proto), flows in by_place.items():
            try:
                bound = await namespace.quick.call_async(sockdiag.bound_sockets, port, proto)
            except (OSError, RuntimeError) as error:
                log.debug("sock_diag in %s: %s", namespace.name, error)
                continue
            own = {flow.inode for flow in flows}
            for flow in flows:
                others = [b for b in shared.competitors(flow, bound, own) if b.inode not in flow.older]
                suspects |= {(flow.flow_id, b.inode) for b in others}
                self._judge(flow, [b for b in others if (flow.flow_id, b.inode) in self._suspects])
        self._suspects = suspects

    def _judge(self, flow: Flow, others: list[sockdiag.Bound]) -> None:
        if others and flow.flow_id in self._core.table.flows:
            reason = Reason.MULTICAST_SHARED if flow.kind is Kind.MULTICAST else Reason.CONFLICT
            log.info("flow %s goes home: also bound: %s", flow.local_text, shared.describe(others))
            self._core.table.evict(flow.flow_id, reason)
            self._core.converge([flow.owner])

    async def _close_idle(self) -> None:
        now = asyncio.get_running_loop().time()
        for namespace in list(self._core.namespaces.all.values()):
            if namespace.kept and namespace.path is not None and not _still_named(namespace.path, namespace.netns):
                log.info("namespace %s has lost its name: it is served only while programs are in it", namespace.name)
                namespace.kept = False
                for port in namespace.ports.values():
                    port.explicit = False
            for port in list(namespace.ports.values()):
                if port.handle is None and not port.ring_ids:
                    self._core.table.drop_port(port.id)
                elif port.handle is None or port.explicit or port.ring_ids:
                    port.idle_since = 0.0
                elif not port.idle_since:
                    port.idle_since = now
                elif now - port.idle_since >= IDLE_PORT and not port.lock.locked():
                    self._core.table.drop_port(port.id)
                    await namespace.close_port(port)
        await self._core.namespaces.leave_unused()


    async def _try_again(self) -> None:
        """Interfaces that another XDP program held: nobody tells when it goes."""
        for namespace in list(self._core.namespaces.all.values()):
            for port in list(namespace.ports.values()):
                if port.handle is None and port.reason is Reason.IF_BUSY and not port.lock.locked():
                    await self._if_free(namespace, port)

    async def _if_free(self, namespace: Namespace, port: Port) -> None:
        try:
            if await namespace.worker.call_async(attached, port.id.ifindex):
                return
        except (OSError, RuntimeError) as error:
            log.debug("interface %s:%s: %s", namespace.name, port.name, error)
            return
        log.info("interface %s:%s: the other XDP program is gone", namespace.name, port.name)
        port.error, port.reason = None, Reason.NOT_TRIED
        if port.explicit:
            await self._core.open_explicit(namespace, port.id.ifindex)


def _still_named(path: Path, netns: Netns) -> bool:
    try:
        return path.parent != NAMED or Netns.of_path(path) == netns
    except OSError:
        return False
