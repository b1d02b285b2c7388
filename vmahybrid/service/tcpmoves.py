"""TCP connections that programs have on their rings (a preview, VMA_HYBRID_TCP): out of the kernel, and home again.

A parked socket is the program's; the service keeps a duplicate, so that the peer of a program that was killed is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vmahybrid.contracts import addr_to_bytes
from vmahybrid.errors import Refused
from vmahybrid.net import tcpsock
from vmahybrid.net.tcpfin import fin_frame
from vmahybrid.net.tcpmove import Mover
from vmahybrid.net.tcprepair import MoveFailed
from vmahybrid.net.tcpstate import HEADER_LEN, MAX_QUEUE, TcpState
from vmahybrid.service import proof
from vmahybrid.service.reaper import in_thread
from vmahybrid.steering.flow import Flow, FlowAction, Kind, Source, endpoint
from vmahybrid.steering.reasons import Reason
from vmahybrid.steering.table import refuse

if TYPE_CHECKING:
    from vmahybrid.service.core import Core
    from vmahybrid.service.namespaces import Namespace

log = logging.getLogger("vmahybrid.service")

LOOP_SECONDS = 3.0      # that a move waits for the event loop
F_GET_SEALS = 1034      # linux/fcntl.h; only memory files answer
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass(slots=True)
class Parked:
    """``fd`` is ours."""

    fd: int
    inode: int
    flow: Flow
    session: int


class TcpMoves:
    """On the event loop; the moves themselves run in threads."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.mover = Mover()
        self.parked: dict[int, Parked] = {}     # by flow id
        self._kept: dict[int, int] = {}         # sockets that hold local ports for programs, by flow id
        self._ports: dict[int, Flow] = {}       # of programs, by flow id, until the program ends

    def holds(self, flow_id: int) -> bool:
        return flow_id in self.parked

    def steered_to_the_end(self, flow: Flow) -> bool:
        """Must a service that stops leave the rule until the program has brought its connections home?"""
        return self.holds(flow.flow_id) or (flow.proto == socket.IPPROTO_TCP and flow.kind is Kind.THREE)

    def note_port(self, flow: Flow) -> None:
        """Connections that began on the ring at this port may go home as long as the program lives, also without it."""
        self._ports[flow.flow_id] = flow

    def keep(self, flow_id: int, fd: int) -> None:
        """Hold the socket of a port, and so the port, as long as the flow is there. ``fd`` is taken over."""
        self._kept[flow_id] = fd

    def let_go(self) -> None:
        """Close the sockets of ports whose flow is gone."""
        flows = self._core.table.flows
        for flow_id in [flow_id for flow_id in self._kept if flow_id not in flows]:
            proof.close_slowly(self._kept.pop(flow_id))

    async def take(self, flow: Flow, fd: int, session: int, namespace: Namespace) -> int:
        """Park the socket of an attached flow; ``fd`` is taken over. The descriptor of a memory file with the state.
        On any error the flow is gone, and the connection is the kernel's as before."""
        if self.holds(flow.flow_id):
            proof.close_slowly(fd)
            raise refuse(f"flow {flow.local_text}", Reason.TCP_STATE)
        try:
            found = proof.check(fd, flow, namespace.cookie)
            if found.inode != flow.inode:
                raise proof.not_owner("another socket was attached")
            state = await asyncio.to_thread(self.mover.adopt, fd, _Steering(self._core, flow, namespace))
        except BaseException as error:
            proof.close_slowly(fd)
            await self._drop(flow)
            if isinstance(error, (MoveFailed, OSError, TimeoutError)):
                log.warning("TCP %s: %s", flow.local_text, error)
                raise refuse(f"flow {flow.local_text}", Reason.TCP_STATE) from error
            raise
        self.parked[flow.flow_id] = Parked(fd, found.inode, flow, session)
        return _memory_file(state.pack())

    async def home(self, flow_id: int, ifindex: int, fd: int, blob_fd: int, session: int, namespace: Namespace) -> None:
        """Rebuild a parked socket. Borrows both descriptors. Raises Refused; the socket stays parked then."""
        parked = self.parked.get(flow_id)
        state = await asyncio.to_thread(_state_of, blob_fd)
        port = self._ports.get(flow_id)
        if port is not None and port.owner == session:
            await self._raise(port, fd, state, ifindex, namespace)
            return
        if parked is not None and (parked.session != session or parked.inode != os.fstat(fd).st_ino):
            raise proof.not_owner("another socket is parked for this flow")
        flow = parked.flow if parked is not None else _flow_of(state, ifindex, namespace.name)
        proof.check(fd, flow, namespace.cookie)
        try:
            await asyncio.to_thread(self.mover.home, fd, state, _Steering(self._core, flow, namespace))
        except (MoveFailed, OSError, TimeoutError) as error:
            log.warning("TCP %s: %s", flow.local_text, error)
            if not (isinstance(error, MoveFailed) and error.alive):
                raise refuse(f"flow {flow.local_text}", Reason.TCP_STATE) from error
        await self._drop(flow)
        if parked is not None:
            del self.parked[flow_id]
            proof.close_slowly(parked.fd)

    async def _raise(self, port: Flow, fd: int, state: TcpState, ifindex: int, namespace: Namespace) -> None:
        """A connection that began on the ring, at a port of this program, becomes that of a new socket. As soon as the
        kernel has it, the rule of the port leaves its frames to the kernel."""
        if state.lport != port.local_port or (not port.wildcard and state.laddr != port.local):
            raise proof.not_owner(f"a connection of {endpoint(state.laddr, state.lport)}, not {port.local_text}")
        proof.check_new(fd, namespace.cookie)
        flow = _flow_of(state, ifindex, namespace.name)
        try:
            await asyncio.to_thread(self.mover.begin, fd, state, _Steering(self._core, flow, namespace))
        except (MoveFailed, OSError, TimeoutError) as error:
            log.warning("TCP %s: %s", flow.local_text, error)
            if not (isinstance(error, MoveFailed) and error.alive):
                raise refuse(f"flow {flow.local_text}", Reason.TCP_STATE) from error

    def abandon(self, session: int, dead: bool) -> None:
        """A session ended. If its process did, nobody will bring the connections home: their peers are told."""
        self._ports = {flow_id: flow for flow_id, flow in self._ports.items() if flow.owner != session}
        for flow_id, parked in list(self.parked.items()):
            if parked.session != session:
                continue
            del self.parked[flow_id]
            self.mover.forget(parked.inode)
            if dead:
                log.info("TCP %s: reset, its program is gone", parked.flow.local_text)
                in_thread(lambda fd=parked.fd: _reset(fd), "reset-tcp")  # type: ignore[misc]
            else:
                proof.close_slowly(parked.fd)

    async def _drop(self, flow: Flow) -> None:
        core = self._core
        if core.table.flows.get(flow.flow_id) is flow:
            core.table.remove(flow.flow_id)
            core.converge([flow.owner])


class _Steering:
    """Of one flow, for Mover: the frames are in the ring before TAKE, and the kernel's as soon as the rule is gone.
    Those that are on their way to the ring are lost, which TCP mends."""

    def __init__(self, core: Core, flow: Flow, namespace: Namespace) -> None:
        self._core, self._flow, self._namespace = core, flow, namespace
        self._loop = asyncio.get_running_loop()

    def steer(self) -> None:
        """The program has attached the flow."""

    def unsteer(self) -> None:
        asyncio.run_coroutine_threadsafe(self._core.tcp._drop(self._flow), self._loop).result(LOOP_SECONDS)

    def give_fin(self, state: TcpState) -> None:
        asyncio.run_coroutine_threadsafe(self._give(state), self._loop).result(LOOP_SECONDS)

    async def _give(self, state: TcpState) -> None:
        link = self._namespace.link(self._flow.ifindex)
        if link is None:
            raise refuse(f"interface {self._flow.ifindex}", Reason.NO_INTERFACE)
        await self._namespace.worker.call_async(self._core.backend.inject, link.ifindex, [fin_frame(state, link.mac)])


def _flow_of(state: TcpState, ifindex: int, netns: str) -> Flow:
    """Of a connection that an earlier service parked."""
    return Flow(action=FlowAction.RING, source=Source.SOCKET, kind=Kind.FIVE, proto=socket.IPPROTO_TCP,
                local=addr_to_bytes(state.laddr), local_port=state.lport, remote=addr_to_bytes(state.raddr),
                remote_port=state.rport, ifindex=ifindex, netns=netns)


def _state_of(fd: int) -> TcpState:
    """Of a memory file that a program has made. Raises Refused."""
    try:
        fcntl.fcntl(fd, F_GET_SEALS)
        return TcpState.unpack(os.pread(fd, HEADER_LEN + 2 * MAX_QUEUE + 1, 0))
    except (OSError, ValueError, struct.error) as error:
        log.info("TCP: the state is none: %s", error)
        raise Refused("TCP connection", f"its state is none: {error}", "", int(Reason.TCP_STATE)) from None


def _memory_file(data: bytes) -> int:
    fd = os.memfd_create("vmahybrid-tcp", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
        file.seek(0)
    return fd


def _reset(fd: int) -> None:
    """Close a parked socket so that the peer is told: at once if nothing was sent or received on the ring, else as soon
    as it sends something (the numbers of a reset must be those that the connection has now)."""
    with contextlib.suppress(OSError), socket.socket(fileno=fd) as sock:
        if tcpsock.repairing(sock):
            sock.setsockopt(socket.IPPROTO_TCP, tcpsock.TCP_REPAIR, tcpsock.REPAIR_OFF_NO_WP)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
