"""Bulk traffic on the served interfaces: looked for often, because it is slow until the interface has switched."""

from __future__ import annotations

import asyncio
import logging

from vmahybrid.service.backend import PortHandle
from vmahybrid.service.core import Core
from vmahybrid.service.namespaces import Namespace
from vmahybrid.service.ports import Port
from vmahybrid.xdp.switch import TICK

log = logging.getLogger("vmahybrid.service")


class BulkWatcher:
    """One task; a look at an interface is one read of a counter."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            for namespace in list(self._core.namespaces.all.values()):
                for port in list(namespace.ports.values()):
                    if port.handle is not None:
                        await self._look(namespace, port, port.handle)

    async def _look(self, namespace: Namespace, port: Port, handle: PortHandle) -> None:
        if handle.watch():
            try:
                turned = await namespace.worker.call_async(handle.turn)
            except RuntimeError:  # the namespace was left meanwhile
                return
            if turned:
                self._core.counters["switches_total"] += 1
                log.info("interface %s:%s: %s", namespace.name, port.name, handle.hook)
        if handle.switch_failures > port.switch_failures:
            self._core.counters["switch_failures_total"] += handle.switch_failures - port.switch_failures
            port.switch_failures = handle.switch_failures
            log.warning("interface %s:%s: %s", namespace.name, port.name, handle.hook)
