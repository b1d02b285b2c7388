"""ServiceView on the running service: what the API sees and may do."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from vmahybrid.config.rule import OperatorRule
from vmahybrid.config.service import ServiceConfig
from vmahybrid.contracts import lib
from vmahybrid.errors import NotFound, Refused, UsageError, VmahybridError
from vmahybrid.service import explain, fds, health, views
from vmahybrid.service.core import Core
from vmahybrid.service.messages import event
from vmahybrid.service.ports import OWN_VETHS
from vmahybrid.service.session import Session
from vmahybrid.service.statsfile import StatsFile
from vmahybrid.service.view import (
    EventView,
    ExplainStep,
    FlowView,
    InterfaceView,
    ProcessStats,
    ProcessView,
    RingView,
    SocketView,
    StatusView,
)
from vmahybrid.stats import orders
from vmahybrid.stats.page import StatsPage
from vmahybrid.steering.flow import Flow, Source
from vmahybrid.steering.reasons import Reason

PORT_SECONDS = 1.0  # that connections of a TCP port whose flow is deleted have to come home


class Facade:
    """Implements vmahybrid.service.view.ServiceView."""

    def __init__(self, core: Core) -> None:
        self._core = core

    # ---- what there is

    def status(self) -> StatusView:
        core = self._core
        return StatusView(
            version=core.version, pid=os.getpid(), started=core.started, ready=core.ready,
            control_socket=core.config["control.path"], api=list(core.api), health=health.sentences(core),
            interfaces=self.interfaces(), processes=self.processes(), flows=self.flows(), counters=dict(core.counters),
            reasons=dict(core.reasons), features=dict(core.features))

    def interfaces(self) -> list[InterfaceView]:
        found: list[InterfaceView] = []
        for namespace in self._core.namespaces.all.values():
            for link in namespace.watcher.links():
                port = namespace.ports.get(link.ifindex)
                rules = 0
                if port is not None and port.id in self._core.table.ports:
                    rules = len(self._core.table.wanted(port.id))
                if not link.name.startswith(OWN_VETHS):
                    found.append(views.interface_view(self._core, namespace, link, port, rules))
        return sorted(found, key=lambda view: (view.netns != "host", view.netns, view.ifindex))

    def rings(self) -> list[RingView]:
        pages = {session.id: views.read_stats(session) for session in self._core.sessions.values()}
        return [self._ring(grant.ring_id, pages.get(grant.session)) for grant in self._core.grants.all.values()]

    def _ring(self, ring_id: int, page: StatsPage | None) -> RingView:
        grant = self._core.grants.all[ring_id]
        namespace = self._core.namespaces.all.get(grant.port.id.netns)
        return views.ring_view(grant, namespace.name if namespace else "", page)

    def flows(self) -> list[FlowView]:
        return [views.flow_view(self._core, flow) for flow in self._core.table.flows.values()]

    def flow(self, flow_id: int) -> FlowView:
        flow = self._core.table.flows.get(flow_id)
        if flow is None:
            raise NotFound(f"flow {flow_id}", "there is no such flow", "vmahybrid flows shows them")
        return views.flow_view(self._core, flow)

    def _session(self, pid: int) -> Session:
        # A program that ran exec has a new session under the same pid while the old one ends.
        found = [session for session in self._core.sessions.values() if session.pid == pid]
        if not found:
            raise NotFound(f"process {pid}", "it has no session with this service",
                           "start it with: vmahybrid run -- COMMAND")
        return max(found, key=lambda session: session.id)

    def processes(self) -> list[ProcessView]:
        return [views.process_view(self._core, session, views.read_stats(session))
                for session in self._core.sessions.values()]

    def process(self, pid: int) -> ProcessView:
        session = self._session(pid)
        return views.process_view(self._core, session, views.read_stats(session))

    def stats(self, pid: int) -> ProcessStats:
        session = self._session(pid)
        page = views.read_stats(session)
        if page is None:
            raise NotFound(f"statistics of process {pid}", "the program handed over no page that can be read",
                           "see VMA_STATS_SHMEM_DIR and VMA_STATS_FD_NUM")
        return ProcessStats(
            process=views.process_view(self._core, session, page), read_at=time.monotonic(), sockets=page.sockets,
            iomux=page.iomux, rings=[self._ring(g.ring_id, page) for g in self._core.grants.of_session(session.id)])

    def sockets(self, pid: int | None = None) -> list[SocketView]:
        sessions = [self._session(pid)] if pid is not None else list(self._core.sessions.values())
        pages = [views.read_stats(session) for session in sessions]
        return [socket for page in pages if page is not None for socket in page.sockets]

    def explain(self, socket_id: str) -> list[ExplainStep]:
        return explain.explain(self._core, socket_id)

    # ---- what may be done

    async def add_flow(self, *, action: str, proto: str, local: str, remote: str, netns: str,
                       interface: str) -> FlowView:
        rule = OperatorRule(action, proto, local, remote, netns or "*", interface or "*").flow()
        core = self._core
        same = next((f for f in views.operator_flows(core) if f.same_rule(rule)), None)
        if same is not None:
            raise Refused(f"rule {action} {proto} {rule.local_text} {rule.remote_text}",
                          f"flow {same.flow_id} is this rule already", f"DELETE /v1/flows/{same.flow_id} removes it",
                          int(Reason.RULE))
        core.table.max_rules = core.config["limits.rules"]
        core.table.add_rule(rule)
        core.prepare_counter(rule)
        core.converge()
        core.events.add("flow-added", f"{action} {proto} {rule.local_text} {rule.remote_text}", flow_id=rule.flow_id)
        return views.flow_view(core, rule)

    async def delete_flow(self, flow_id: int) -> None:
        core = self._core
        flow = core.table.flows.get(flow_id)
        if flow is None:
            raise NotFound(f"flow {flow_id}", "there is no such flow", "vmahybrid flows shows them")
        if flow.source is Source.OPERATOR:
            core.table.remove(flow_id)
            core.events.add("flow-removed", f"rule {flow.local_text} {flow.remote_text}", flow_id=flow_id)
        elif flow.is_tcp_port:
            core.spawn(self._port_goes(flow), f"flow {flow_id} goes home")
        else:
            core.table.evict(flow_id, Reason.FLOW_DELETED)
        core.converge([flow.owner])

    async def _port_goes(self, flow: Flow) -> None:
        """What only the ring has of connections comes home first: of the others the kernel answers with resets."""
        core, session = self._core, self._core.sessions.get(flow.owner)
        core.table.listens_no_more(flow)
        core.converge()
        if session is not None:
            session.notify(event(lib.VMH_EV_FLOW_HOME, flow.flow_id, reason=Reason.FLOW_DELETED))
            await asyncio.sleep(PORT_SECONDS)
        if core.table.flows.get(flow.flow_id) is flow:
            core.table.evict(flow.flow_id, Reason.FLOW_DELETED)
            core.converge([flow.owner])

    async def zero(self, pid: int) -> None:
        session = self._session(pid)
        await _page_of(session).order(orders.zero)
        for grant in self._core.grants.of_session(session.id):
            with contextlib.suppress(OSError):
                grant.zeroed = grant.handle.kernel_stats()

    async def set_log(self, pid: int, level: int | None, details: int | None) -> None:
        session = self._session(pid)
        if details is not None and not 0 <= details <= 3:
            raise UsageError("log details", f"{details} is not 0 to 3")
        await _page_of(session).order(lambda fd: orders.set_log(fd, level, details))
        _wake(session)

    async def dump_fd(self, pid: int, fd: int, level: int) -> None:
        session = self._session(pid)
        await _page_of(session).order(lambda page: orders.dump(page, fd, level))
        _wake(session)

    async def move(self, pid: int, fd: int | None, to: str) -> None:
        session, core = self._session(pid), self._core
        found = [s for s in self.sockets(pid) if fd is None or s.fd == fd]
        one = found[0] if fd is not None and found else None
        if fd is not None and one is None and not _without_slot(session, fd):
            raise NotFound(f"socket {pid}:{fd}", "the program has no such UDP or TCP socket",
                           f"vmahybrid explain {pid} lists them")
        if one is not None and one.proto == "tcp" and one.remote.endswith(":*"):
            raise UsageError(f"socket {pid}:{fd}", "no TCP connection",
                             f"vmahybrid explain {pid}:{fd} says what it is")
        if to == "ring" and one is not None and one.proto != "tcp":
            raise UsageError(f"socket {pid}:{fd}", "only TCP connections are adopted",
                             f"vmahybrid explain {pid}:{fd} says what keeps this one from a ring")
        if to == "kernel":
            inodes = {s.inode for s in found if s.proto == "udp"}
            flows = [f for f in core.table.flows.values() if f.owner == session.id and f.inode in inodes
                     and f.proto == socket.IPPROTO_UDP]
            for flow in flows:
                core.table.evict(flow.flow_id, Reason.FLOW_DELETED)
            if flows:
                core.converge([session.id])
        session.notify(event(lib.VMH_EV_TCP_MOVE, lib.VMH_EV_ALL if fd is None else fd, to == "ring",
                             int(Reason.FLOW_DELETED)))
        with contextlib.suppress(VmahybridError):  # one without a page hears of it with its first ring
            await _page_of(session).order(orders.ask)
        core.events.add("move-asked", f"{pid}{'' if fd is None else f':{fd}'} to the {to}", pid=pid)

    def config(self) -> Mapping[str, Any]:
        return self._core.config.describe()

    async def patch_config(self, changes: Mapping[str, Any]) -> Mapping[str, Any]:
        self._core.config = self._core.config.changed(changes)
        apply_live(self._core.config)
        for namespace in self._core.namespaces.all.values():
            namespace.watcher.refresh_served()  # `backend` says what is served at all
        self._core.events.add("config-changed", ", ".join(sorted(changes)), **dict(changes))
        return self._core.config.describe()

    def events(self, since: int = 0) -> AsyncIterator[EventView]:
        return self._core.events.follow(since)


def _without_slot(session: Session, fd: int) -> bool:
    """Is it a TCP socket for which there is none in the full page? The program knows it all the same."""
    page = views.read_stats(session)
    with contextlib.suppress(OSError, NotFound):
        return page is not None and page.sockets_over > 0 and fds.look(session.pid, fd).protocol in fds.TCP
    return False


def _page_of(session: Session) -> StatsFile:
    """Raises NotFound."""
    if session.stats is None or session.stats.fd < 0:
        raise NotFound(f"statistics of process {session.pid}",
                       "the program handed over no page by which it takes orders",
                       "see VMA_STATS_SHMEM_DIR: it must be a directory of a local file system")
    return session.stats


def _wake(session: Session) -> None:
    """Its internal thread, if it has one; a message that nobody reads would have the program begin one."""
    with contextlib.suppress(VmahybridError, OSError):
        if orders.listens(_page_of(session).fd):
            session.notify(event(lib.VMH_EV_ASKED))


def apply_live(config: ServiceConfig) -> None:
    """Settings that act at once; the others are looked up when they are needed."""
    logging.getLogger("vmahybrid").setLevel(config["log.level"].upper())


