"""The service's life: startup, run, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import grp
import importlib
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

from vmahybrid.config.interface_glob import InterfaceGlob
from vmahybrid.config.service import ServiceConfig
from vmahybrid.contracts import lib
from vmahybrid.errors import UsageError, VmahybridError
from vmahybrid.net.netns import NAMED
from vmahybrid.service import health
from vmahybrid.service.apiserver import ApiServer
from vmahybrid.service.backend import Backend
from vmahybrid.service.bulk import BulkWatcher
from vmahybrid.service.control import ControlServer
from vmahybrid.service.core import Core
from vmahybrid.service.facade import Facade
from vmahybrid.service.features import features
from vmahybrid.service.housekeeping import Housekeeper
from vmahybrid.service.instance import Instance, remove_stale_veths
from vmahybrid.service.messages import event
from vmahybrid.service.namespaces import MakeWatcher
from vmahybrid.service.notify import notify
from vmahybrid.service.ports import named
from vmahybrid.service.session import Session
from vmahybrid.service.statsfile import remove_stale_files
from vmahybrid.steering.reasons import Reason

log = logging.getLogger("vmahybrid.service")

SHUTDOWN_SECONDS = 1.8
FAREWELL_SECONDS = 0.5  # of them, for programs to leave their rings; from the last TCP connection that came home
FAREWELL_LOOK_SECONDS = 0.05
FAREWELLS_SECONDS = 60.0    # at most, of all: 12,000 connections took 6
SPARE_CONNECTIONS = 64  # beyond limits.sessions, so that one more program is refused with a reason


class Service:
    """``await run()`` is the whole life; ``on_ready`` is called once programs may be offloaded."""

    def __init__(self, config: ServiceConfig, backend: Backend, make_watcher: MakeWatcher,
                 on_ready: Callable[[], None] = lambda: None) -> None:
        self.core = Core(config, backend, make_watcher)
        self._on_ready = on_ready
        self._instance = Instance(Path(config["control.path"]))
        self._control = ControlServer(config["control.path"], config["control.mode"], _group(config["control.group"]),
                                      self._accept)
        self._api = ApiServer(config, Facade(self.core), self.core.version, self._instance.make_directory)
        self._stop = asyncio.Event()
        self._stops = 0
        self._closed = False
        self._housekeeping: asyncio.Task[None] | None = None
        self._bulk = BulkWatcher(self.core)
        self._next_session = 1

    # ---- the three functions

    async def startup(self) -> None:
        """Returns when programs may be offloaded. Raises VmahybridError, OSError; then call ``shutdown``."""
        begun = time.monotonic()
        self._instance.acquire()
        _raise_limits()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop, signal.Signals(number).name)
        # The compiler works in a process of its own; our imports meanwhile.
        await asyncio.gather(asyncio.to_thread(self.core.backend.prepare), asyncio.to_thread(remove_stale_veths),
                             asyncio.to_thread(remove_stale_files),
                             asyncio.to_thread(importlib.import_module, "api.app"))
        for rule in self.core.config.rules:
            self.core.table.add_rule(rule.flow())
        await self._attach_named()
        self.core.features.update(features(), live_frames=self.core.backend.live_frames,
                                  map_bound_xsk=self.core.backend.maps_bound)
        self._housekeeping = self.core.spawn(Housekeeper(self.core).run(), "housekeeping")
        if self.core.config["bulk.switch"] or self.core.config["bulk.detach"]:
            self._bulk.start()
        await self._api.open()
        self.core.api = self._api.addresses
        self._control.open()
        self.core.ready = True
        log.info("vmahybrid: ready: control socket %s, api %s, %d interface(s) attached, after %.1f s",
                 self._control.path, " ".join(self._api.addresses),
                 sum(p.handle is not None for n in self.core.namespaces.all.values() for p in n.ports.values()),
                 time.monotonic() - begun)
        notify(f"READY=1\nMAINPID={os.getpid()}")
        self._on_ready()

    async def run(self) -> None:
        """Startup, then serve until ``stop``, then shutdown, also after a failed startup."""
        try:
            await self.startup()
            await self._stop.wait()
        finally:
            await self.shutdown()

    async def shutdown(self) -> None:
        """Send every flow home and leave nothing behind. Idempotent; at most 1.8 s, and as long as TCP connections come
        home."""
        if self._closed:
            return
        self._closed = self.core.closing = True
        was_ready, self.core.ready = self.core.ready, False
        notify("STOPPING=1")
        try:
            async with asyncio.timeout(SHUTDOWN_SECONDS) as limit:
                await self._wind_down(limit)
        except TimeoutError:
            log.error("the shutdown did not end in %.1f s; the kernel takes the programs back now", SHUTDOWN_SECONDS)
        finally:
            self._control.close()
            self._instance.release()
        if was_ready:
            log.info("vmahybrid: stopped")

    async def _wind_down(self, limit: asyncio.Timeout) -> None:
        core = self.core
        self._control.close()
        for silent in core.connections.difference(core.sessions.values()):
            silent.connection.close()  # nothing to say goodbye for
        for session in list(core.sessions.values()):
            for flow in core.table.of_owner(session.id):
                if not core.tcp.steered_to_the_end(flow):
                    core.table.remove(flow.flow_id)
        core.converge()
        # Then every frame is in a ring or goes to the kernel, and the programs have only to empty their rings.
        await core.grace.wait()
        for session in list(core.sessions.values()):
            session.notify(event(lib.VMH_EV_BYE, reason=Reason.SERVICE_STOP))
        self._bulk.stop()
        if self._housekeeping is not None:
            self._housekeeping.cancel()
        core.tickets.close()
        await self._programs_gone(limit)
        core.events.close()     # who follows them has heard how each program left
        await self._api.close()
        for session in list(core.connections):
            session.connection.close()
        await core.settle()
        await core.tcp.afterwards.close()
        await core.namespaces.close()

    # ---- parts

    async def _programs_gone(self, limit: asyncio.Timeout) -> None:
        """Wait until the programs have left their rings, which we take away next; one that hangs is not waited for. As
        long as connections come home the shutdown has more time."""
        serving = {task for task in asyncio.all_tasks() if task.get_name().startswith("session ")}
        now, homed = asyncio.get_running_loop().time, self.core.counters["tcp_homed_total"]
        since, last = now(), now() + FAREWELLS_SECONDS
        while serving and now() < min(since + FAREWELL_SECONDS, last):
            _, serving = await asyncio.wait(serving, timeout=FAREWELL_LOOK_SECONDS)
            if homed != self.core.counters["tcp_homed_total"]:
                homed, since = self.core.counters["tcp_homed_total"], now()
                limit.reschedule(since + SHUTDOWN_SECONDS)

    def stop(self, why: str = "") -> None:
        """Ask for the shutdown; the second time end at once (the kernel detaches what we hold)."""
        self._stops += 1
        if self._stops > 1:
            log.error("%s again: ending at once", why)
            for path in (self._control.path, self.core.config["api.unix"], str(self._instance.lock_path)):
                with contextlib.suppress(OSError):
                    os.unlink(path)
            os._exit(1)
        log.info("%s: stopping", why or "stop")
        self._stop.set()

    def _accept(self, sock: socket.socket) -> None:
        if len(self.core.connections) >= self.core.config["limits.sessions"] + SPARE_CONNECTIONS:
            self.core.counters["refused_total"] += 1
            sock.close()
            return
        try:
            session = Session(self.core, sock, self._next_session)
        except OSError as error:
            log.debug("a connection that was gone at once: %s", error)
            sock.close()
            return
        self._next_session += 1
        self.core.counters["connections_total"] += 1
        self.core.spawn(session.run(), f"session {session.id}")

    async def _attach_named(self) -> None:
        """Attach the interfaces that were named and exist; the rest is attached when it appears or is asked for."""
        globs = [InterfaceGlob.parse(text) for text in self.core.config["interfaces"]]
        if not globs:
            return
        paths = [Path("/proc/self/ns/net")]
        if NAMED.is_dir():
            paths += sorted(NAMED.iterdir())
        for path in paths:
            name = "host" if path.parent != NAMED else path.name
            if not any(glob.enters(name) for glob in globs):
                continue
            try:
                namespace = await self.core.namespaces.keep(path)
            except OSError as error:
                log.warning("network namespace %s: %s", path, error)
                continue
            for link in list(namespace.watcher.links()):
                if named(self.core.config, namespace.name, link):
                    await self.core.open_explicit(namespace, link.ifindex)
        for sentence in health.absent(self.core):
            log.warning("%s", sentence)


def _raise_limits() -> None:
    """As many descriptors as we may have (a program takes about ten); the UMEM is locked memory."""
    for what in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK):
        soft, hard = resource.getrlimit(what)
        if what == resource.RLIMIT_MEMLOCK:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(what, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                continue
        if soft != hard:
            resource.setrlimit(what, (hard, hard))


def _group(name: str) -> int | None:
    if not name:
        return None
    try:
        return int(name) if name.isdigit() else grp.getgrnam(name).gr_gid
    except KeyError:
        raise UsageError("control.group", f"there is no group {name!r}", "getent group shows them") from None


__all__ = ["Service", "VmahybridError"]
