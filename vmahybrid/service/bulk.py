"""Bulk traffic on the served interfaces: looked for often, because it is slow until the interface has switched; and
interfaces without a rule, where nothing need be attached."""

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
    """A look at an interface is one read of a counter; between looks there is a timer and no task, which is cheaper."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._timer: asyncio.TimerHandle | None = None
        self._turning: set[PortHandle] = set()

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TICK, self._tick)

    def stop(self) -> None:
        """Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self.start()
        for namespace in self._core.namespaces.all.values():
            for port in namespace.ports.values():
                handle = port.handle
                if handle is None or handle in self._turning:
                    continue
                if handle.watch():
                    self._turning.add(handle)
                    self._core.spawn(self._turn(namespace, port, handle), f"switch {port.name}")
                else:
                    self._count(namespace, port, handle)  # a rule or a ring has had it switched

    async def _turn(self, namespace: Namespace, port: Port, handle: PortHandle) -> None:
        try:
            await namespace.worker.call_async(handle.turn)
        except RuntimeError as error:  # the namespace was left meanwhile
            log.debug("interface %s:%s: %s", namespace.name, port.name, error)
        finally:
            self._turning.discard(handle)
        self._count(namespace, port, handle)

    def _count(self, namespace: Namespace, port: Port, handle: PortHandle) -> None:
        if handle is not port.handle:
            return
        if handle.switches > port.switches:
            self._core.counters["switches_total"] += handle.switches - port.switches
            port.switches = handle.switches
            log.info("interface %s:%s: %s", namespace.name, port.name, handle.hook)
        if handle.switch_failures > port.switch_failures:
            self._core.counters["switch_failures_total"] += handle.switch_failures - port.switch_failures
            port.switch_failures = handle.switch_failures
            log.warning("interface %s:%s: %s", namespace.name, port.name, handle.hook)
