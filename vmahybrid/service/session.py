"""One program that is connected: who it is, what it has, and how its requests are answered."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import select
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from vmahybrid.contracts import c_text, family_of, htons, lib, ntohs
from vmahybrid.errors import Refused, VmahybridError
from vmahybrid.net import sockdiag
from vmahybrid.net.netns import netns_fd_of_pidfd, peer_pidfd
from vmahybrid.net.pidns import own_pid
from vmahybrid.service import binding, proof, reinject, shared, tcpmoves, tcpshow
from vmahybrid.service.bereaved import peers_of
from vmahybrid.service.control import Connection, ConnectionLost, ReceivedFds
from vmahybrid.service.core import Core
from vmahybrid.service.granting import grant_ring
from vmahybrid.service.holders import held_elsewhere
from vmahybrid.service.ladder import Ladder
from vmahybrid.service.messages import ProtocolError, Request
from vmahybrid.service.namespaces import LinkRow, Namespace
from vmahybrid.service.reaper import close_foreign
from vmahybrid.service.statsfile import StatsFile
from vmahybrid.steering.flow import Flow, FlowAction, Kind, Source
from vmahybrid.steering.keys import ANY_ADDR, is_multicast
from vmahybrid.steering.reasons import Reason
from vmahybrid.steering.table import refuse

log = logging.getLogger("vmahybrid.service")

HELLO_SECONDS = 10.0  # a connection that says nothing is closed after this
NEIGHBOUR_SECONDS = 1.0
NEIGHBOURS_ASKED = 64       # at a time, per program
MOVES_AT_ONCE = 64
LAST_RING_SECONDS = 5.0  # to close what is left of a dead program
DYING_SECONDS = 0.2     # in which a process whose connection ended may turn out to be dead
GROUPS_NOTED = 256          # per program
ALONE_SECONDS = 0.1         # a queue of datagrams comes at once: the kernel's sockets are read once for many
Handler = Callable[[Request, ReceivedFds], Awaitable[bytes | None]]


class Session:
    """A connection and its process. ``pid`` and ``uid`` are the kernel's word (SO_PEERCRED)."""

    def __init__(self, core: Core, sock: socket.socket, session_id: int) -> None:
        """Raises OSError when the process is already gone."""
        self.core, self.id = core, session_id
        self.loop = asyncio.get_running_loop()
        self.pid, self.uid, self.gid = struct.unpack("=iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        self.comm = self.cmdline = self.profile = self.app_id = ""
        self.started = time.time()
        self.pid_ns = self.ns_pid = 0
        self.namespace: Namespace | None = None
        self.stats: StatsFile | None = None
        self.released: set[int] = set()     # ring ids that were this session's
        self.ladders: dict[int, Ladder] = {}    # of the rings it asked for, by ifindex
        self._alone = (0, 0.0)              # a socket that nobody else shares the port of, and until when
        self._asking: set[asyncio.Task[None]] = set()  # for neighbours; they end by themselves
        self._moving: set[asyncio.Task[None]] = set()  # flows, by one kind of request
        self._moving_by = 0
        self._groups: dict[tuple[int, str], tuple[int, Reason]] = {}  # without a flow, by inode and group
        self._last_flows: list[Flow] = []   # those that it had to the end
        self._frames = 0                    # of all its rings, at the most so far: what may be unread
        self._pidfd = peer_pidfd(sock)
        self.connection = Connection(sock, self.loop)
        core.connections.add(self)
        self.loop.add_reader(self._pidfd, self._died)
        self._handlers: dict[int, Handler] = {
            lib.VMH_MSG_RING: self._ring, lib.VMH_MSG_RING_MAPPED: self._ring_mapped, lib.VMH_MSG_ATTACH: self._attach,
            lib.VMH_MSG_DETACH: self._detach, lib.VMH_MSG_NEIGH: self._neigh, lib.VMH_MSG_RELEASE: self._release,
            lib.VMH_MSG_REINJECT: self._reinject, lib.VMH_MSG_TCP_TAKE: self._tcp_take,
            lib.VMH_MSG_TCP_HOME: self._tcp_home, lib.VMH_MSG_TCP_SHOW: self._tcp_show,
            lib.VMH_MSG_TCP_HIDE: self._tcp_hide, lib.VMH_MSG_TCP_FRAMES: self._tcp_frames,
            lib.VMH_MSG_TCP_KEEP: self._tcp_keep, lib.VMH_MSG_TCP_FETCH: self._tcp_fetch,
            lib.VMH_MSG_TCP_RENEW: self._tcp_renew}

    def __str__(self) -> str:
        return f"process {self.pid}{f' ({self.comm})' if self.comm else ''}"

    # ---- life

    async def run(self) -> None:
        """Serve the connection until it ends; then take everything back."""
        try:
            await self._serve()
        except ConnectionLost:
            pass
        except ProtocolError as error:
            self.core.counters["protocol_errors_total"] += 1
            self.core.count_reason(error.reason)
            log.warning("%s: refused and closed: %s", self, error)
            self._try_send(error.reply)
        finally:
            await self._end()

    async def _serve(self) -> None:
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                request, fds = await self.connection.receive()
        except TimeoutError:
            raise ConnectionLost from None
        with fds:
            if request.type != lib.VMH_MSG_HELLO:
                raise ProtocolError("the first message is not HELLO", Reason.PROTOCOL, request.type, request.seq)
            if not await self._hello(request, fds):
                return
        while True:
            request, fds = await self.connection.receive()
            with fds:
                await self._answer(request, fds)

    async def _answer(self, request: Request, fds: ReceivedFds) -> None:
        handler = self._handlers.get(request.type)
        if handler is None:
            raise ProtocolError("a second HELLO", Reason.PROTOCOL, request.type, request.seq)
        if self._moving and request.type != self._moving_by:
            await asyncio.wait(self._moving)
        reply = await self._result(request, handler(request, fds))
        if reply is not None:
            self.connection.send(reply)

    async def _result(self, request: Request, work: Awaitable[bytes | None]) -> bytes | None:
        """The reply; None: it was sent already, or is sent later."""
        try:
            return await work
        except Refused as error:
            self.core.counters["refused_total"] += 1
            self.core.count_reason(error.reason)
            log.info("%s: %s", self, error)
            return request.refusal(_errno_of(error.reason), error.reason)
        except (OSError, VmahybridError) as error:
            number = getattr(error, "errno", None) or errno.EIO
            reason = Reason.MEMLOCK if number == errno.ENOBUFS else Reason.RING_FAILED
            self.core.counters["refused_total"] += 1
            self.core.count_reason(reason)
            log.warning("%s: %s", self, error)
            return request.refusal(number, reason)

    def _died(self) -> None:
        """The process ended (its pidfd is readable), though a child may still hold the connection."""
        self.loop.remove_reader(self._pidfd)
        self._take_back()
        self.connection.lose()

    def _take_back(self) -> None:
        """The rules, at once: nothing is steered to a program that is gone."""
        gone = self.core.table.remove_owner(self.id)
        if gone:
            self.core.converge()
        self._last_flows += gone

    async def _has_died(self) -> bool:
        """A process that is killed lets go of its descriptors a moment before it is gone."""
        if _ended(self._pidfd) or not any(flow.proto == socket.IPPROTO_TCP for flow in self._last_flows):
            return _ended(self._pidfd)
        died = asyncio.Event()
        self.loop.add_reader(self._pidfd, died.set)
        try:
            async with asyncio.timeout(DYING_SECONDS):
                await died.wait()
        except TimeoutError:
            return False
        finally:
            self.loop.remove_reader(self._pidfd)
        return True

    async def _end(self) -> None:
        core = self.core
        self.connection.close()
        core.connections.discard(self)
        self.loop.remove_reader(self._pidfd)
        self._take_back()
        dead = await self._has_died()
        if self._moving:
            await asyncio.wait(self._moving)
        pidfd, self._pidfd = self._pidfd, -1
        core.tcp.abandon(self.id, dead)
        if dead and self.namespace is not None:
            core.tcp.tell_peers(peers_of(self._last_flows, self.stats, self.pid), self.namespace)
        if self.stats is not None:
            self.stats.remove_for(pidfd, self.pid, self.uid, self.gid)
        else:
            os.close(pidfd)
        core.converge()
        core.sessions.pop(self.id, None)
        if self.namespace is not None:
            closing = [task for grant in core.grants.of_session(self.id)
                       if (task := core.drop_ring(grant, self.namespace)) is not None]
            if closing:
                await asyncio.wait(closing, timeout=LAST_RING_SECONDS)
            self.namespace.users -= 1
            core.events.add("process-ended", str(self), pid=self.pid, session=self.id)
            log.info("%s: session %d ended", self, self.id)

    def note_group(self, flow: Flow, reason: Reason) -> None:
        """Remember why a group of a socket has no flow, for explain; NONE: it has one."""
        if flow.kind is not Kind.MULTICAST:
            return
        self._groups.pop((flow.inode, flow.local_text), None)
        if reason is not Reason.NONE:
            self._groups[flow.inode, flow.local_text] = flow.fd, reason
            if len(self._groups) > GROUPS_NOTED:
                self._groups.pop(next(iter(self._groups)))

    def refused_groups(self, fd: int) -> list[tuple[str, Reason]]:
        """(group, why) of the socket that the program has as ``fd`` now."""
        try:
            inode = os.stat(f"/proc/{self.pid}/fd/{fd}").st_ino
        except OSError:
            return []
        return [(text, reason) for (known, text), (at, reason) in self._groups.items() if (known, at) == (inode, fd)]

    def notify(self, message: bytes) -> None:
        """Send an event; a program that does not read is taken for lost."""
        self._try_send(message)

    def _try_send(self, message: bytes) -> None:
        try:
            self.connection.send(message)
        except ConnectionLost:
            log.info("%s: does not read its control connection, or is gone", self)

    # ---- requests

    async def _hello(self, request: Request, fds: ReceivedFds) -> bool:
        core, body = self.core, request.body
        self.comm, self.cmdline = c_text(body.comm), c_text(body.cmdline)
        self.profile, self.app_id = c_text(body.profile), c_text(body.app_id)
        if len(core.sessions) >= core.config["limits.sessions"] or core.closing:
            reason = Reason.SERVICE_STOP if core.closing else Reason.RING_LIMIT
            core.counters["refused_total"] += 1
            core.count_reason(reason)
            self.connection.send(request.refusal(errno.EUSERS, reason))
            return False
        if len(fds):
            self.stats = await StatsFile.accept(fds.take())
        try:
            fd = netns_fd_of_pidfd(self._pidfd)
        except OSError:
            return False  # it died
        self.pid_ns, self.ns_pid = own_pid(self.pid)
        try:
            self.namespace = await core.namespaces.enter(fd)
        finally:
            os.close(fd)
        core.sessions[self.id] = self
        core.counters["sessions_total"] += 1
        watcher = self.namespace.watcher
        reply = request.reply(session=self.id, net_page_size=watcher.page_size,
                              service_version=core.version.encode()[:31])
        self.connection.send(reply, [watcher.page_fd])
        core.events.add("process-started", f"{self} in {self.namespace.name}", pid=self.pid, session=self.id)
        log.info("%s: session %d, uid %d, namespace %s", self, self.id, self.uid, self.namespace.name)
        return True

    async def _ring(self, request: Request, fds: ReceivedFds) -> bytes | None:
        core, namespace = self.core, self._namespace()
        grant = await grant_ring(self, request.body, namespace)
        port, handle = grant.port, grant.handle
        if self.connection.lost or namespace.ports.get(request.body.ifindex) is not port:
            core.drop_ring(grant, namespace)
            if self.connection.lost:
                log.info("%s: ended, or waited no longer for its ring on %s", self, port.name)
                raise ConnectionLost
            raise refuse(f"interface {port.name}", Reason.IF_GONE)
        self._frames = max(self._frames, sum(g.frames for g in core.grants.of_session(self.id)))
        self.released.add(grant.ring_id)
        if handle.bind_after:
            binding.expect(self, grant, namespace)
        else:
            binding.use(self, grant, namespace)
        reply = request.reply(ring_id=grant.ring_id, lane=grant.lane, **handle.reply_fields())
        self.connection.send(reply, [] if grant.verbs else [handle.umem_fd, *handle.xsk_fds])
        return None

    async def _ring_mapped(self, request: Request, fds: ReceivedFds) -> bytes:
        namespace, ring_id = self._namespace(), request.body.ring_id
        grant = await binding.bind(self, ring_id, namespace)
        binding.use(self, grant, namespace)
        return request.reply(ring_id=ring_id, flags=grant.handle.reply_fields()["flags"])

    async def _attach(self, request: Request, fds: ReceivedFds) -> bytes:
        if request.body.flags & lib.VMH_ATTACH_F_PORT:
            return await self._attach_port(request)
        if not len(fds):
            raise ProtocolError("no socket came with ATTACH", Reason.PROTOCOL, request.type, request.seq)
        flow, found, fd = self._proved(request, fds, self._namespace())
        flow.fd = request.body.fd
        async with proof.closed(fd):  # kept, it would hold the port beyond the program's end
            return await self._attach_proved(request, flow, found)

    async def _attach_port(self, request: Request) -> bytes:
        """A local port for the program's own connections: nobody else gets it as long as the socket stays."""
        namespace, flow = self._namespace(), self._flow_of(request)
        if flow.proto != socket.IPPROTO_TCP or flow.kind is not Kind.THREE:
            raise refuse("flow", Reason.TYPE)
        fd = await namespace.quick.call_async(proof.own_port, flow)
        try:
            reply = await self._attach_proved(request, flow, proof.check(fd, flow, namespace.cookie))
            self.core.tcp.keep(flow.flow_id, fd)
        except BaseException:
            os.close(fd)
            raise
        return reply

    async def _attach_proved(self, request: Request, flow: Flow, found: proof.Proof) -> bytes:
        core, namespace = self.core, self._namespace()
        if request.body.flags & lib.VMH_ATTACH_F_WAS_SHARED and await asyncio.to_thread(
            held_elsewhere, found.inode, self.pid
        ):
            raise refuse(f"flow {flow.local_text}", Reason.FORK)
        flow.ifindex = flow.ifindex or found.device  # on another interface the port is not its own
        flow.inode = found.inode
        if flow.proto == socket.IPPROTO_TCP and flow.wildcard and flow.family == 6 and not found.only_v6:
            flow.family = 0
        # a TCP connection is one of a kind, whatever its listener's options
        flow.shared_port = flow.proto == socket.IPPROTO_UDP and (found.reuse_addr or flow.kind is Kind.MULTICAST)
        try:
            if flow.shared_port:
                await self._refuse_shared(flow, namespace)
            if self.connection.lost:
                raise ConnectionLost
            core.table.max_rules = core.config["limits.rules"]
            try:
                core.table.attach(flow)
            finally:
                core.converge([self.id])  # also tells those whom a refused group sent home
            self._refuse_unattached(flow)
        except Refused as error:
            self.note_group(flow, Reason.from_code(error.reason))
            raise
        self.note_group(flow, Reason.NONE)
        if flow.proto == socket.IPPROTO_TCP and flow.kind is Kind.THREE:
            core.tcp.note_port(flow)
        core.prepare_counter(flow)
        core.counters["flows_total"] += 1
        core.events.add("flow-added", f"{flow.local_text} of {self}", flow_id=flow.flow_id, pid=self.pid)
        return request.reply(flow_id=flow.flow_id, rules=core.table.rule_count(flow), local_port=htons(flow.local_port))

    def _refuse_unattached(self, flow: Flow) -> None:
        """All frames are the kernel's where nothing could be attached again, and the program should know: for a TCP
        connection that only the ring has, the kernel would answer with resets."""
        refused = self.core.unattached(flow)
        if refused is not None:
            self.core.table.remove(flow.flow_id)
            self.core.converge([self.id])
            raise Refused(f"flow {flow.local_text}", refused.why, refused.remedy, refused.reason)

    def _proved(self, request: Request, fds: ReceivedFds, namespace: Namespace) -> tuple[Flow, proof.Proof, int]:
        """The flow that a request describes, what the socket that came with it says, and the socket: the caller's to
        close, which does not block."""
        fd = fds.take()
        try:
            flow = self._flow_of(request)
            return flow, proof.check(fd, flow, namespace.cookie), fd
        except BaseException:
            proof.close(fd)
            raise

    def _flow_of(self, request: Request) -> Flow:
        body = request.body
        try:
            kind = Kind.from_wire(body.kind)
        except KeyError:
            raise ProtocolError(f"flow kind {body.kind}", Reason.PROTOCOL, request.type, request.seq) from None
        if body.family not in proof.FAMILIES or body.proto not in proof.TYPES:
            raise ProtocolError(f"flow of family {body.family}, protocol {body.proto}", Reason.PROTOCOL, request.type,
                                request.seq)
        five = kind is Kind.FIVE
        moved = five and body.proto == socket.IPPROTO_TCP and request.type == lib.VMH_MSG_TCP_FRAMES
        if body.proto != socket.IPPROTO_UDP and not moved and not (kind is not Kind.MULTICAST
                                                                   and request.type == lib.VMH_MSG_ATTACH):
            raise refuse("flow", Reason.TYPE)
        listens = bool(body.proto == socket.IPPROTO_TCP and kind is Kind.THREE
                       and body.flags & lib.VMH_ATTACH_F_LISTEN)
        return Flow(action=FlowAction.RING, source=Source.SOCKET, kind=kind, owner=self.id, proto=body.proto,
                    local=bytes(body.local_addr), local_port=ntohs(body.local_port), family=body.family,
                    remote=bytes(body.remote_addr) if five else ANY_ADDR,
                    remote_port=ntohs(body.remote_port) if five else 0, ifindex=body.ifindex,
                    peer=(bytes(body.remote_addr), ntohs(body.remote_port)) if kind is Kind.THREE else (ANY_ADDR, 0),
                    netns=self._namespace().name, listens=listens,
                    stamps=request.type == lib.VMH_MSG_ATTACH and bool(body.flags & lib.VMH_ATTACH_F_STAMP),
                    lane=getattr(body, "lane", 0))  # only ATTACH has one

    async def _refuse_shared(self, flow: Flow, namespace: Namespace) -> None:
        bound = await namespace.quick.call_async(sockdiag.bound_sockets, flow.local_port, flow.proto)
        # Sockets of other sessions are the table's matter: it knows who is newer.
        known = {other.inode for other in self.core.table.flows.values() if other.local_port == flow.local_port}
        others = shared.competitors(flow, bound, known | {flow.inode})
        if flow.kind is not Kind.MULTICAST:
            flow.older = frozenset(b.inode for b in others)  # this socket was bound later: it wins, as in the kernel
            others = [b for b in others if b.remote != ANY_ADDR]
        if others:
            log.info("%s: %s: also bound: %s", self, flow.local_text, shared.describe(others))
            raise refuse(f"flow {flow.local_text}",
                         Reason.MULTICAST_SHARED if flow.kind is Kind.MULTICAST else Reason.PORT_SHARED)

    async def _detach(self, request: Request, fds: ReceivedFds) -> bytes | None:
        core, body = self.core, request.body
        flow, cause = core.table.flows.get(body.flow_id), Reason.from_code(body.cause)
        if flow is None or flow.owner != self.id or flow.source is not Source.SOCKET:
            if cause is Reason.NONE:
                core.tcp.forget_port(body.flow_id, self.id)
            return request.reply()  # it went home already: the event may have crossed this request
        if cause is not Reason.NO_ANSWER or not await core.tcp.unknown(body.flow_id, self._namespace()):
            (core.table.remove if cause is Reason.NONE else core.table.part)(body.flow_id)
            core.converge([self.id])
            core.tcp.lost(body.flow_id)
        if cause is Reason.NONE:
            core.tcp.forget_port(body.flow_id, self.id)
        core.count_reason(cause)
        core.events.add("flow-removed", f"{flow.local_text} of {self}: {cause.slug}", flow_id=flow.flow_id,
                        pid=self.pid, reason=cause.slug)
        if cause is Reason.NONE:
            return request.reply()  # a socket that is closed should not wait milliseconds
        await self._beside(request, [], self._left(request, flow))
        return None

    async def _left(self, request: Request, flow: Flow) -> bytes:
        """The socket lives on: no frame may come to the ring after the shim's last look at it."""
        try:
            await self.core.grace.wait()
        finally:
            self.core.parted(flow)
        return request.reply()

    async def _neigh(self, request: Request, fds: ReceivedFds) -> bytes | None:
        """Answered when it is known, up to a second later; the program's other requests do not wait for that."""
        body = request.body
        if body.family not in proof.FAMILIES:
            raise ProtocolError(f"address family {body.family}", Reason.PROTOCOL, request.type, request.seq)
        namespace, address = self._namespace(), bytes(body.addr)
        link = namespace.link(body.ifindex)
        if link is None:
            raise refuse(f"interface {body.ifindex}", Reason.NO_INTERFACE)
        if (reason := namespace.served(link)) is not Reason.NONE:
            raise refuse(f"interface {link.name}", reason)
        known = family_of(address) == body.family and address != ANY_ADDR and not is_multicast(address)
        if not known or len(self._asking) >= NEIGHBOURS_ASKED:
            raise refuse("neighbour", Reason.NO_NEIGHBOUR)
        task = self.loop.create_task(self._ask(request, namespace, address))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        return None

    async def _ask(self, request: Request, namespace: Namespace, address: bytes) -> None:
        reply = await self._result(request, self._resolve(request, namespace, address))
        if reply is not None and not self.connection.lost:
            self._try_send(reply)

    @staticmethod
    async def _resolve(request: Request, namespace: Namespace, address: bytes) -> bytes:
        if not await namespace.watcher.resolve_neighbour(request.body.ifindex, address, NEIGHBOUR_SECONDS):
            raise refuse("neighbour", Reason.NO_NEIGHBOUR)
        return request.reply()

    async def _release(self, request: Request, fds: ReceivedFds) -> bytes:
        ring_id = request.body.ring_id
        grant = self.core.grants.all.get(ring_id)
        if grant is None or grant.session != self.id:
            if ring_id in self.released:
                return request.reply()  # closed by the service before (RING_GONE)
            raise Refused("ring", f"ring {ring_id} is not this program's", "", int(Reason.NOT_OWNER))
        closing = self.core.drop_ring(grant, self._namespace())
        if closing is not None:
            await asyncio.wait([closing])
        return request.reply()

    async def _reinject(self, request: Request, fds: ReceivedFds) -> bytes:
        core, body, namespace = self.core, request.body, self._namespace()
        flow, found, fd = self._proved(request, fds, namespace)
        with socket.socket(fileno=fd) as sock:
            link = _link_of(namespace, body.ifindex)
            datagram = reinject.Datagram.of(body)
            reinject.check(datagram, flow, link, namespace.addresses(link.ifindex))
            await self._refuse_foreign(flow, found, namespace)
            frames = reinject.frames(datagram, link.mac)
            with reinject.room_for(sock, len(frames), self._frames):
                await namespace.quick.call_async(core.backend.inject, link.ifindex, frames)
        core.counters["reinjected_total"] += 1
        return request.reply()

    async def _tcp_frames(self, request: Request, fds: ReceivedFds) -> bytes:
        body, namespace = request.body, self._namespace()
        flow, _, fd = self._proved(request, fds, namespace)
        file = fds.take()
        try:
            await self.core.tcp.give(flow, file, body.len, _link_of(namespace, body.ifindex), namespace)
        finally:
            close_foreign([fd, file])
        return request.reply()

    async def _tcp_keep(self, request: Request, fds: ReceivedFds) -> bytes:
        worker = self._namespace().quick
        self.core.tickets.keep(fds.take(), fds.take(), worker)
        self.core.counters["tcp_kept_total"] += 1
        return request.reply()

    async def _tcp_fetch(self, request: Request, fds: ReceivedFds) -> bytes | None:
        if len(fds):
            return request.reply(id=self.core.tickets.fetch(fds.take(), self.id))
        fetched = self.core.tickets.hand(request.body.id, self.id)
        self.connection.send(request.reply(id=request.body.id), [fetched.fileno()])
        close_foreign([fetched.detach()])
        return None

    async def _tcp_take(self, request: Request, fds: ReceivedFds) -> None:
        fd, file = fds.take(), fds.take()
        await self._beside(request, [file], self._park(request, fd, file))

    async def _tcp_home(self, request: Request, fds: ReceivedFds) -> None:
        found = [fds.take(), fds.take()]
        await self._beside(request, found, self._unpark(request, found))

    async def _beside(self, request: Request, fds: list[int], work: Coroutine[Any, Any, bytes]) -> None:
        """A request that is answered when it is done; others of the kind go on beside it, and further ones wait.
        ``fds`` are closed before the answer: a program that closes its own then, or lays another file over it, has
        closed the socket."""
        try:
            if len(self._moving) >= MOVES_AT_ONCE:
                await asyncio.wait(self._moving, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            work.close()
            close_foreign(fds)
            raise
        task = self.loop.create_task(self._answered(request, fds, work))
        self._moving_by = request.type
        self._moving.add(task)
        task.add_done_callback(self._moving.discard)

    async def _answered(self, request: Request, fds: list[int], work: Coroutine[Any, Any, bytes]) -> None:
        try:
            reply = await self._result(request, work)
        finally:
            await proof.closed_in_time(fds)
        if reply is not None and not self.connection.lost:
            self._try_send(reply)

    async def _park(self, request: Request, fd: int, file: int) -> bytes:
        """``fd`` is taken over."""
        core = self.core
        flow = core.table.flows.get(request.body.flow_id)
        if flow is None or flow.owner != self.id or flow.source is not Source.SOCKET or not flow.ifindex or (
                flow.proto != socket.IPPROTO_TCP):
            proof.close_slowly(fd)
            core.tcp.missed(self.id, request.body.follow)
            raise proof.not_owner(f"flow {request.body.flow_id} is no TCP connection of this program")
        length = await core.tcp.take(flow, fd, tcpmoves.Room(file, request.body.at), request.body.follow, self.id,
                                     self._namespace())
        core.counters["tcp_taken_total"] += 1
        self._moved("tcp-adopted", flow, flow.flow_id, request.body.hdr.reason)
        return request.reply(len=length)

    async def _unpark(self, request: Request, fds: list[int]) -> bytes:
        """``fds``: the socket and its state. What is to be closed as well comes to them."""
        fd, file = fds
        core, body = self.core, request.body
        came = await core.tcp.home(body.flow_id, body.ifindex, fd, tcpmoves.Room(file, body.at), body.follow, self.id,
                                   self._namespace(), body.hdr.reason)
        if came is not None:
            flow, ours = came
            fds.extend([ours] if ours >= 0 else [])
            core.counters["tcp_homed_total"] += 1
            self._moved("tcp-home", flow, body.flow_id, body.hdr.reason)
        return request.reply()

    def _moved(self, kind: str, flow: Flow, flow_id: int, code: int) -> None:
        """The event of a connection's move. TCP_HOME names no descriptor: it is known of those that were attached."""
        reason = Reason.from_code(code)
        who = f"{self}, fd {flow.fd}" if flow.fd >= 0 else str(self)
        self.core.events.add(kind, f"{flow.local_text} {flow.remote_text} of {who}: {reason.slug}", flow_id=flow_id,
                             pid=self.pid, fd=flow.fd, local=flow.local_text, remote=flow.remote_text,
                             reason=reason.slug)

    async def _tcp_show(self, request: Request, fds: ReceivedFds) -> bytes:
        body = request.body
        if len(fds) != body.n:
            raise ProtocolError(f"{len(fds)} sockets for {body.n} connections", Reason.PROTOCOL, request.type,
                                request.seq)
        conns = [tcpshow.Wanted.of_wire(body.conn[i], fds.take()) for i in range(body.n)]
        try:
            busy = bool(body.flags & lib.VMH_TCP_SHOW_BUSY)
            shown = await self.core.tcp.show(conns, busy, self.id, self._namespace())
        finally:
            close_foreign([conn.fd for conn in conns])
        self.core.counters["tcp_shown_total"] += sum(map(bool, shown))
        return request.reply(flow_id=shown)

    async def _tcp_hide(self, request: Request, fds: ReceivedFds) -> bytes:
        body = request.body
        self.core.tcp.hide([int(body.inode[i]) for i in range(min(body.n, lib.VMH_TCP_HIDE_MAX))], self.id)
        return request.reply()

    async def _tcp_renew(self, request: Request, fds: ReceivedFds) -> bytes:
        fd = fds.take()
        try:
            await self.core.tcp.renew(fd, self.id)
        finally:
            close_foreign([fd])
        return request.reply()

    async def _refuse_foreign(self, flow: Flow, found: proof.Proof, namespace: Namespace) -> None:
        """A datagram has the source that the program names: it must not reach another user's socket on the port. The
        socket's SO_REUSEADDR does not say whether there is one: it may have been cleared after bind()."""
        if self._alone[0] == found.inode and time.monotonic() < self._alone[1]:
            return
        bound = await namespace.quick.call_async(sockdiag.bound_sockets, flow.local_port, flow.proto)
        others = [b for b in bound if b.inode != found.inode and b.uid != self.uid]
        if others:
            log.info("%s: %s: also bound: %s", self, flow.local_text, shared.describe(others))
            raise refuse(f"datagram to {flow.local_text}", Reason.PORT_SHARED)
        self._alone = found.inode, time.monotonic() + ALONE_SECONDS

    def _namespace(self) -> Namespace:
        assert self.namespace is not None, "requests come after HELLO"
        return self.namespace


def _link_of(namespace: Namespace, ifindex: int) -> LinkRow:
    """By which frames come to the kernel. Raises Refused."""
    link = namespace.link(ifindex)
    if link is None:
        raise refuse(f"interface {ifindex}", Reason.NO_INTERFACE)
    reinject.check_link(link)
    return link


def _ended(pidfd: int) -> bool:
    ask = select.poll()
    ask.register(pidfd, select.POLLIN)
    return bool(ask.poll(0))


def _errno_of(reason: int) -> int:
    """The errno that a refusal carries beside its reason."""
    return {Reason.NOT_OWNER: errno.EPERM, Reason.RING_LIMIT: errno.ENOSPC, Reason.RULE_LIMIT: errno.ENOSPC,
            Reason.NO_NEIGHBOUR: errno.EHOSTUNREACH, Reason.NO_ROUTE: errno.ENETUNREACH, Reason.IF_GONE: errno.ENODEV,
            Reason.NO_INTERFACE: errno.ENODEV, Reason.IF_DOWN: errno.ENETDOWN, Reason.IF_BUSY: errno.EBUSY,
            Reason.PORT_SHARED: errno.EADDRINUSE, Reason.MULTICAST_SHARED: errno.EADDRINUSE,
            Reason.NOT_OFFLOADABLE_ADDR: errno.EADDRNOTAVAIL, Reason.RULE: errno.EACCES,
            }.get(Reason.from_code(reason), errno.EOPNOTSUPP)
