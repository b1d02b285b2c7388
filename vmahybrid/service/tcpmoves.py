"""TCP connections that programs have on their rings (VMA_HYBRID_TCP): out of the kernel, and home again.

A parked socket is the program's; the service keeps a duplicate, so that the peer of a program that was killed is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import itertools
import logging
import os
import socket
import struct
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from vmahybrid.contracts import addr_to_bytes, lib
from vmahybrid.errors import Refused
from vmahybrid.net import conntrack, tcpask, tcprepair, tcpsock
from vmahybrid.net.tcpfin import fin_frame, stale_frame
from vmahybrid.net.tcpmove import Homing, Mover
from vmahybrid.net.tcprepair import Kept, MoveFailed
from vmahybrid.net.tcpstate import HEADER_LEN, TcpFlag, TcpPhase, TcpState
from vmahybrid.service import proof
from vmahybrid.service.reaper import RESET_ON_CLOSE, fulfil, in_thread
from vmahybrid.service.reinject import packets_in, segment_frame
from vmahybrid.service.tcpafter import Afterwards
from vmahybrid.service.tcpshow import BUSY_SHARE, SHOWN_SHARE, Wanted, placehold
from vmahybrid.steering.flow import Flow, FlowAction, Kind, Source, endpoint
from vmahybrid.steering.reasons import Reason
from vmahybrid.steering.table import refuse
from vmahybrid.xdp.bpf import LIVE_FRAME_MAX

if TYPE_CHECKING:
    from vmahybrid.service.core import Core
    from vmahybrid.service.namespaces import LinkRow, Namespace

log = logging.getLogger("vmahybrid.service")

_P = ParamSpec("_P")
_T = TypeVar("_T")

ASK_PEERS = (0.1, 0.6)  # seconds
LOT_SECONDS = 0.1       # in which those that were said to follow come
LOOP_SECONDS = 3.0      # that a move waits for the event loop
MOVES_AT_ONCE = 32      # threads: one program's that takes long holds no other's up
CAME_SECONDS = 60.0     # in which a program that heard no answer may bring the same connection home again
DOUBT_SECONDS = 10.0    # in which a program may say that the answer came too late for it
LIGHT_BYTES = 1 << 20   # of a state that goes home with others: all of them are in memory then
MAGIC_LEN = 4           # bytes with which a state begins
GIVEN_AT_ONCE = 64      # frames; others wait for the namespace's thread meanwhile
F_GET_SEALS = 1034      # linux/fcntl.h; only memory files answer


@dataclass(slots=True)
class Parked:
    """``fd`` is ours; -1: the program has the socket alone (it is shown only). ``tracked``: where the kernel's
    connection tracking has it. ``state``: as it was taken, while the program may say that it does not know of it."""

    fd: int
    inode: int
    flow: Flow
    session: int
    tracked: Namespace | None = None
    state: TcpState | None = None


@dataclass(frozen=True, slots=True)
class Room:
    """For a state: a memory file of the program, from ``at`` on."""

    file: int
    at: int

    def is_light(self) -> bool:
        """As far as it is a state at all."""
        try:
            _check_memory(self.file)
            return TcpState.length_of(os.pread(self.file, HEADER_LEN, self.at)) <= LIGHT_BYTES
        except (Refused, OSError, OverflowError, ValueError, struct.error):
            return True

    def is_blank(self) -> bool:
        """No state: nobody has it."""
        try:
            _check_memory(self.file)
            return os.pread(self.file, HEADER_LEN, self.at) == bytes(HEADER_LEN)
        except (Refused, OSError, OverflowError):
            return False

    def read(self, light: bool) -> TcpState:
        """``light``: it was. Raises Refused."""
        _check_memory(self.file)
        try:
            length = TcpState.length_of(os.pread(self.file, HEADER_LEN, self.at))
            if light and length > LIGHT_BYTES:
                raise ValueError("it has become longer")
            return TcpState.unpack(os.pread(self.file, length, self.at))
        except (OSError, OverflowError, ValueError, struct.error) as error:
            log.info("TCP: the state is none: %s", error)
            raise Refused("TCP connection", f"its state is none: {error}", "", int(Reason.TCP_STATE)) from None

    def given_up(self) -> bool:
        """The program waits no longer: it has written there."""
        try:
            return os.pread(self.file, 1, self.at) not in (b"", b"\0")
        except (OSError, OverflowError):
            return True

    def write(self, data: bytes) -> int:
        """The bytes of it. The magic number comes last: where it is, the rest is. If the file is sealed the program has
        lost its connection: raises Refused."""
        try:
            done = MAGIC_LEN
            while done < len(data):
                done += os.pwrite(self.file, data[done:], self.at + done)
            os.pwrite(self.file, data[:MAGIC_LEN], self.at)
        except (OSError, OverflowError) as error:
            log.warning("TCP: a program's memory file does not take a state: %s", error)
            raise Refused("TCP connection", f"its memory file: {error}", "", int(Reason.TCP_STATE)) from None
        return len(data)


@dataclass(slots=True)
class _Wanted(Generic[_T]):
    """One of a lot. ``done``: what is told of it."""

    done: asyncio.Future[_T] = field(default_factory=lambda: asyncio.get_running_loop().create_future(), kw_only=True)

    def tell(self, end: _T | BaseException) -> None:
        if self.done.done():
            return
        if isinstance(end, BaseException):
            self.done.set_exception(end)
        else:
            self.done.set_result(end)


@dataclass(slots=True)
class _Taken(_Wanted[tuple[TcpState, int]]):
    """Told are the state, and its bytes. ``tracked``: the kernel's connection tracking has it."""

    flow: Flow
    fd: int
    room: Room
    steering: _Steering
    tracked: bool = False


_W = TypeVar("_W", bound=_Wanted[Any])


class _Lots(Generic[_W]):
    """Of those that still gather: requests of a program that are to go together."""

    def __init__(self, go: Callable[[list[_W]], Coroutine[Any, Any, None]]) -> None:
        """``go`` does not raise, but tells each of its lot."""
        self._go = go
        self._gathering: dict[int, tuple[asyncio.TimerHandle, list[_W]]] = {}   # by session
        self.tasks: set[asyncio.Task[None]] = set()

    def add(self, session: int, wanted: _W) -> _W:
        """If those that are said to follow do not come, it goes without them."""
        if session not in self._gathering:
            timer = asyncio.get_running_loop().call_later(LOT_SECONDS, self.begin, session, 0)
            self._gathering[session] = timer, []
        self._gathering[session][1].append(wanted)
        return wanted

    def begin(self, session: int, follow: int) -> None:
        """Unless some are still to follow."""
        if not follow and session in self._gathering:
            timer, lot = self._gathering.pop(session)
            timer.cancel()
            task = asyncio.create_task(self._go(lot))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)


class TcpMoves:
    """On the event loop; the moves themselves run in threads."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.mover = Mover()
        self.afterwards = Afterwards(core.backend)
        self._threads = ThreadPoolExecutor(MOVES_AT_ONCE, "tcp-move")
        self.parked: dict[int, Parked] = {}     # by flow id
        self._taking: set[int] = set()          # flow ids
        self._adopting = _Lots(self._adopt)
        self._homing = _Lots(self._bring_home)
        self._let_go_at = 0                     # flows that had gone then
        self._kept: dict[int, int] = {}         # sockets that hold local ports for programs, by flow id
        self._ports: dict[int, Flow] = {}       # of programs, by flow id, until forget_port() or the program's end
        self._of_port: dict[tuple[int, int], set[int]] = {}     # their flow ids, by session and local port
        self._tasks: set[asyncio.Task[None]] = set()
        self._forgetting: dict[int, Future[None]] = {}  # what lost() has begun, by inode
        self._shown: dict[int, int] = {}        # flow ids of parked ones that began on a ring, by inode
        # Sessions, by the inode of what came home a moment ago, and what forgets it
        self._came: dict[int, tuple[int, asyncio.TimerHandle]] = {}

    def holds(self, flow_id: int) -> bool:
        return flow_id in self.parked

    def steered_to_the_end(self, flow: Flow) -> bool:
        """Must a service that stops leave the rule until the program has brought its connections home?"""
        return self.holds(flow.flow_id) or (flow.proto == socket.IPPROTO_TCP and flow.kind is Kind.THREE)

    def note_port(self, flow: Flow) -> None:
        """Connections that began on the ring at this port may go home later, also without it."""
        self._ports[flow.flow_id] = flow
        self._of_port.setdefault((flow.owner, flow.local_port), set()).add(flow.flow_id)

    def forget_port(self, flow_id: int, session: int) -> None:
        """The program has nothing on its rings that came by it; but what a listener has left names the listener's flow,
        and is under another one of the same port then. The last one of a port takes all with it."""
        port = self._ports.get(flow_id)
        if port is None or port.owner != session:
            return
        flow_ids = self._of_port[session, port.local_port]
        if flow_id == max(flow_ids) and self._core.table.flows.keys().isdisjoint(flow_ids):
            del self._of_port[session, port.local_port]
            for each in flow_ids:
                del self._ports[each]

    def keep(self, flow_id: int, fd: int) -> None:
        """Hold the socket of a port, and so the port, as long as the flow is there. ``fd`` is taken over."""
        if flow_id in self._core.table.flows:
            self._kept[flow_id] = fd
        else:   # evicted meanwhile
            proof.close_slowly(fd)

    def let_go(self) -> None:
        """Close the sockets of ports whose flow is gone. After each change of the table: thousands are looked through
        only where some flow has gone."""
        flows, removed = self._core.table.flows, self._core.table.removed
        if removed == self._let_go_at:
            return
        self._let_go_at = removed
        for flow_id in [flow_id for flow_id in self._kept if flow_id not in flows]:
            proof.close_slowly(self._kept.pop(flow_id))

    async def take(self, flow: Flow, fd: int, room: Room, follow: int, session: int, namespace: Namespace) -> int:
        """Park the socket of an attached flow; ``fd`` is taken over. The bytes of its state, which is in ``room`` then.
        On any error the flow is gone, and the connection is the kernel's as before. ``follow``: so many more calls of
        the session come at once, and go together."""
        if self.holds(flow.flow_id) or flow.flow_id in self._taking:
            proof.close_slowly(fd)
            self.missed(session, follow)
            raise refuse(f"flow {flow.local_text}", Reason.TCP_STATE)
        self._taking.add(flow.flow_id)
        try:
            try:
                _check_memory(room.file)
                found = proof.check(fd, flow, namespace.cookie)
                if found.inode != flow.inode:
                    raise proof.not_owner("another socket was attached")
                if room.given_up():
                    raise refuse(f"flow {flow.local_text}", Reason.NO_ANSWER)
                if self.afterwards.lacks_end(namespace, found.inode):
                    raise refuse(f"flow {flow.local_text}", Reason.TCP_STATE)
                wanted = self._adopting.add(session, _Taken(flow, fd, room, _Steering(self._core, flow, namespace)))
            finally:
                self._adopting.begin(session, follow)
            state, length = await wanted.done
        except BaseException as error:
            proof.close_slowly(fd)
            self._drop(flow)
            if isinstance(error, (MoveFailed, OSError, TimeoutError, RuntimeError, ValueError)):
                log.warning("TCP %s: %s", flow.local_text, error)
                raise refuse(f"flow {flow.local_text}", Reason.TCP_STATE) from error
            raise
        finally:
            self._taking.discard(flow.flow_id)
        parked = Parked(fd, found.inode, flow, session, namespace if wanted.tracked else None, state)
        self.parked[flow.flow_id] = parked
        asyncio.get_running_loop().call_later(DOUBT_SECONDS, self._no_doubt, flow.flow_id)
        return length

    def _no_doubt(self, flow_id: int) -> None:
        if (parked := self.parked.get(flow_id)) is not None:
            parked.state = None

    async def _move(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """In a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, functools.partial(work, *args, **kwargs))

    def missed(self, session: int, follow: int) -> None:
        """A take() that does not come, of some that go together."""
        self._adopting.begin(session, follow)

    async def _adopt(self, lot: list[_Taken]) -> None:
        going: list[_Taken] = []
        try:
            names = [_names_of(wanted.flow) for wanted in lot]
            tracked = await lot[0].steering.namespace.quick.call_async(_settle, names)
            for wanted, found in zip(lot, tracked, strict=True):
                wanted.tracked = found is False
                if isinstance(found, Exception):
                    wanted.tell(found)
                elif found:
                    wanted.tell(refuse(f"flow {wanted.flow.local_text}", Reason.NAT))
                else:
                    going.append(wanted)
            await self._move(self._adopt_all, going, asyncio.get_running_loop())
        except BaseException as error:
            _tell_all(lot, error)

    def _adopt_all(self, going: list[_Taken], loop: asyncio.AbstractEventLoop) -> None:
        """In a thread. Each is answered as soon as it is parked and its state is written. Parked it has lost what was
        in its queues, so that its program has that before, in case the service is killed."""
        def keep(at: int, state: TcpState) -> None:
            if state.send or state.receive:
                going[at].room.write(state.pack())

        def done(at: int, state: TcpState | BaseException) -> None:
            wanted = going[at]
            end = state if isinstance(state, BaseException) else self._hand_over(wanted, state)
            loop.call_soon_threadsafe(wanted.tell, end)

        self.mover.adopt_all([(wanted.fd, wanted.steering) for wanted in going], keep, done)

    def _hand_over(self, wanted: _Taken, state: TcpState) -> tuple[TcpState, int] | BaseException:
        """The state to the program, or the connection back to the kernel."""
        try:
            return state, wanted.room.write(state.pack())
        except Exception as error:  # whatever it is, a connection that was parked must not stay so
            with contextlib.suppress(Exception):
                self.mover.home(wanted.fd, state, wanted.steering)
            return error

    async def home(self, flow_id: int, ifindex: int, fd: int, room: Room, follow: int, session: int,
                   namespace: Namespace, reason: int) -> tuple[Flow, int] | None:
        """Rebuild a parked socket, or make a new one that of a connection which began on the ring. Borrows the
        descriptors. Returns its flow, whose ``fd`` is -1 where the service has not been told it, and what the service
        had of the parked socket (-1: nothing), which the caller is to close. None: it was home already. Raises Refused;
        the socket stays parked then. ``follow`` as of take()."""
        try:
            inode = os.fstat(fd).st_ino
            flow_id = self._shown.get(inode, flow_id)
            parked, port, came = self.parked.get(flow_id), self._ports.get(flow_id), self._came.get(inode)
            if port is not None and port.owner != session:
                port = None
            way = self._homing.add(session, _Way(self._core, fd, room, ifindex, session, namespace, parked, port,
                                                 came is not None and came[0] == session))
        finally:
            self._homing.begin(session, follow)
        flow, state, moved = await way.done
        self.afterwards.add(namespace, state, fd, inode, flow.ifindex, reason)
        if not moved:
            return None
        self._note_came(inode, session)
        if port is None:
            self._drop(flow)
        if parked is None:
            return flow, -1
        self._let_go_of(flow_id, parked, close=False)
        return flow, parked.fd

    def _note_came(self, inode: int, session: int) -> None:
        loop = asyncio.get_running_loop()
        if inode in self._came:
            self._came.pop(inode)[1].cancel()
        self._came[inode] = session, loop.call_later(CAME_SECONDS, self._came.pop, inode)

    async def _bring_home(self, lot: list[_Way]) -> None:
        try:
            await self._move(self._home_all, lot, asyncio.get_running_loop())
        except BaseException as error:
            _tell_all(lot, error)

    def _home_all(self, lot: list[_Way], loop: asyncio.AbstractEventLoop) -> None:
        """In a thread, as reading the states and asking the sockets is work, too."""
        heavy: list[_Way] = []
        light: list[_Way] = []
        for way in lot:
            (light if way.room.is_light() else heavy).append(way)
        self._home_together(light, True, loop)
        for way in heavy:
            self._home_together([way], False, loop)

    def _home_together(self, lot: list[_Way], light: bool, loop: asyncio.AbstractEventLoop) -> None:
        ends: list[tuple[Flow, TcpState, bool] | BaseException] = []
        going: list[tuple[int, Flow, Homing]] = []
        for at, way in enumerate(lot):
            try:
                flow, state, homing = way.begin(light, loop)
            except Exception as error:
                ends.append(error)
                continue
            ends.append((flow, state, False))
            if homing is not None:
                going.append((at, flow, homing))
        found = self.mover.home_all([homing for _, _, homing in going])
        for (at, flow, homing), failed in zip(going, found, strict=True):
            ends[at] = _end_of(flow, homing.state, failed)

        def tell() -> None:
            for way, end in zip(lot, ends, strict=True):
                way.tell(end)

        loop.call_soon_threadsafe(tell)

    async def give(self, flow: Flow, file: int, length: int, link: LinkRow, namespace: Namespace) -> None:
        """To the kernel what a ring got while the connection went home: ``length`` bytes of struct vmh_tcp_frame in a
        memory file of the program. Raises Refused."""
        packets = await self._move(_packets_of, file, length)
        frames = [segment_frame(packet, flow, link.mac) for packet in packets]
        for at in range(0, len(frames), GIVEN_AT_ONCE):
            await namespace.quick.call_async(self._core.backend.inject, link.ifindex, frames[at:at + GIVEN_AT_ONCE])

    def abandon(self, session: int, dead: bool) -> None:
        """A session ended. If its process did, nobody will bring the connections home: their peers are told."""
        self._ports = {flow_id: flow for flow_id, flow in self._ports.items() if flow.owner != session}
        self._of_port = {key: flow_ids for key, flow_ids in self._of_port.items() if key[0] != session}
        for flow_id, parked in list(self.parked.items()):
            if parked.session != session:
                continue
            self._let_go_of(flow_id, parked, close=not dead)
            if dead:
                self._untrack(parked)
            if dead and parked.fd >= 0:
                log.info("TCP %s: reset, its program is gone", parked.flow.local_text)
                in_thread(lambda fd=parked.fd, flow=parked.flow: _reset(fd, flow), "reset-tcp")  # type: ignore[misc]

    def tell_peers(self, names: Collection[tcpask.Names], namespace: Namespace) -> None:
        """Of connections whose program is gone, and whose rules are."""
        if names:
            namespace.users += 1
            self._begin(self._ask_peers(names, namespace))

    async def _ask_peers(self, names: Collection[tcpask.Names], namespace: Namespace) -> None:
        """Twice: a number by chance may be one that the peer waits for, and a peer answers such segments twice a second
        at most (tcp_invalid_ratelimit)."""
        try:
            for seconds in ASK_PEERS:
                await asyncio.sleep(seconds)
                await namespace.quick.call_async(tcpask.ask, names)
        except (OSError, RuntimeError) as error:
            log.warning("TCP: %d peers of a program that is gone are not told before they send: %s", len(names), error)
        finally:
            namespace.users -= 1

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _let_go_of(self, flow_id: int, parked: Parked, close: bool = True) -> None:
        self.parked.pop(flow_id, None)
        self._shown.pop(parked.inode, None)
        self.mover.forget(parked.inode)
        if close and parked.fd >= 0:
            proof.close_slowly(parked.fd)

    async def show(self, conns: list[Wanted], busy: bool, session: int, namespace: Namespace) -> list[int]:
        """Park sockets of connections that began on a ring, behind rules of their own. The flow of each, 0 where it is
        not to be; the sockets stay the caller's."""
        core = self._core
        most = core.config["limits.rules"] * (BUSY_SHARE if busy else SHOWN_SHARE)
        flows = {conn: flow for conn in conns
                 if len(core.table.flows) < most and (flow := self._shown_flow(conn, session, namespace)) is not None}
        core.converge()
        for flow in flows.values():
            core.prepare_counter(flow)
        inodes = await self._move(placehold, self.mover, list(flows))
        shown = {}
        for (conn, flow), inode in zip(flows.items(), inodes, strict=True):
            if inode == 0 or session not in core.sessions:
                core.table.remove(flow.flow_id)
                continue
            # even if the flow was evicted meanwhile: the program is told of that, too, and brings it home
            shown[conn] = flow.flow_id
            flow.inode = inode
            self.parked[flow.flow_id] = Parked(-1, inode, flow, session)
            self._shown[inode] = flow.flow_id
        core.converge()
        return [shown.get(conn, 0) for conn in conns]

    def _shown_flow(self, conn: Wanted, session: int, namespace: Namespace) -> Flow | None:
        """Attached; None where the connection is not one of a port of this program, or can't be."""
        core, port = self._core, self._ports.get(conn.port_flow)
        if port is None or port.owner != session or core.table.flows.get(conn.port_flow) is not port:
            return None
        if not conn.of(port):
            return None
        try:
            proof.check_new(conn.fd, namespace.cookie)
            return core.table.attach(conn.flow(port))
        except Refused as error:
            log.debug("TCP %s: not shown: %s", port.local_text, error)
            return None

    def hide(self, inodes: list[int], session: int) -> None:
        """The program has closed these, or the kernel has forgotten their connections."""
        for inode in inodes:
            flow_id = self._shown.get(inode, 0)
            parked = self.parked.get(flow_id)
            if parked is not None and parked.session == session:
                self._let_go_of(flow_id, parked)
                self._core.table.remove(flow_id)
        self._core.converge()

    async def unknown(self, flow_id: int, namespace: Namespace) -> bool:
        """Of a parked socket: the program does not know that it is, the answer came too late. It is the kernel's again,
        as it was; False if that can't be."""
        parked = self.parked.get(flow_id)
        if parked is None or parked.state is None or parked.fd < 0:
            return False
        state, parked.state = parked.state, None
        try:
            await self._move(self.mover.home, parked.fd, state, _Steering(self._core, parked.flow, namespace))
        except (Refused, MoveFailed, OSError, TimeoutError) as error:
            log.warning("TCP %s: %s", parked.flow.local_text, error)
            if not (isinstance(error, MoveFailed) and error.alive):
                return False
        self._let_go_of(flow_id, parked)
        return True

    def lost(self, flow_id: int) -> None:
        """The connection of a parked socket has ended on the ring: the kernel forgets it, so that its name is free."""
        parked = self.parked.get(flow_id)
        if parked is not None:
            self._let_go_of(flow_id, parked, close=False)
            self._untrack(parked)
            if parked.fd >= 0:
                self._forget_soon(parked)

    def _forget_soon(self, parked: Parked) -> None:
        loop = asyncio.get_running_loop()
        done = self._forgetting[parked.inode] = Future()

        def work() -> None:
            fulfil(done, lambda: _forget(parked.fd))
            with contextlib.suppress(RuntimeError):     # the loop is gone
                loop.call_soon_threadsafe(self._forgetting.pop, parked.inode, None)

        in_thread(work, "forget-tcp")

    async def renew(self, fd: int, session: int) -> None:
        """Of a connection that has ended on the ring: its socket may begin another one. ``fd`` is borrowed. One that is
        not in repair mode stays as it is. Raises Refused, OSError."""
        inode = os.fstat(fd).st_ino
        for flow_id, parked in list(self.parked.items()):
            if parked.inode != inode:
                continue
            if parked.session != session:
                raise proof.not_owner("another program has that connection")
            self.lost(flow_id)
            self._drop(parked.flow)
        if (forgetting := self._forgetting.get(inode)) is not None:
            await asyncio.shield(asyncio.wrap_future(forgetting))
        await self._move(_renew, fd)

    def _untrack(self, parked: Parked) -> None:
        if parked.tracked is not None:
            parked.tracked.users += 1
            self._begin(self._forget_track(parked.tracked, _names_of(parked.flow)))

    async def _forget_track(self, namespace: Namespace, names: tcpask.Names) -> None:
        try:
            await namespace.quick.call_async(conntrack.forget, names)
        except (OSError, RuntimeError) as error:
            log.warning("connection tracking keeps a connection that has ended: %s", error)
        finally:
            namespace.users -= 1

    def _drop(self, *flows: Flow) -> None:
        core = self._core
        there = [flow for flow in flows if core.table.flows.get(flow.flow_id) is flow]
        for flow in there:
            core.table.remove(flow.flow_id)
        if there:
            core.converge({flow.owner for flow in there})


class _Steering:
    """Of one flow, for Mover: the frames are in the ring before TAKE, and the kernel's as soon as the rule is gone.
    Those that are on their way to the ring are lost, which TCP mends."""

    def __init__(self, core: Core, flow: Flow, namespace: Namespace,
                 loop: asyncio.AbstractEventLoop | None = None) -> None:
        """``loop``: the running one, in a thread that has none."""
        self._core, self._flow, self.namespace = core, flow, namespace
        self._loop = loop or asyncio.get_running_loop()
        self._link: LinkRow | None = None

    def steer(self) -> None:
        """The program has attached the flow."""

    def unsteer(self, *others: _Steering) -> None:
        """``others``: of the same program. Raises TimeoutError."""
        wanted = [self, *others]

        def to_kernel() -> None:
            self._core.tcp._drop(*(one._flow for one in wanted))
            for one in wanted:
                one._look()

        done: Future[None] = Future()
        self._loop.call_soon_threadsafe(fulfil, done, to_kernel)
        done.result(LOOP_SECONDS)

    def give(self, frames: Sequence[tuple[_Steering, TcpState]]) -> None:
        """After unsteer(), which has asked for the interfaces. Raises Refused, OSError, TimeoutError."""
        bytes_of: dict[int, list[bytes]] = {}
        for one, state in frames:
            bytes_of.setdefault(one._flow.ifindex, []).append(one._frame(state))
        for ifindex, all_of_it in bytes_of.items():
            self.namespace.quick.call_within(LOOP_SECONDS, self._core.backend.inject, ifindex, all_of_it)

    def _look(self) -> None:
        """On the event loop."""
        self._link = self.namespace.watcher.device(self._flow.ifindex)

    def _frame(self, state: TcpState) -> bytes:
        if self._link is None:
            raise refuse(f"interface {self._flow.ifindex}", Reason.NO_INTERFACE)
        return (fin_frame if state.flags & TcpFlag.PEER_FIN else stale_frame)(state, self._link.mac)


@dataclass(slots=True)
class _Way(_Wanted[tuple[Flow, TcpState, bool]]):
    """Of a connection back to the kernel, with what the event loop knew of it. ``parked``: its socket is. ``port``: it
    began on the ring, at this one of the program. Told are the flow, the state that the kernel has got, and whether it
    was by this: it may have had the connection already."""

    core: Core
    fd: int
    room: Room
    ifindex: int
    session: int
    namespace: Namespace
    parked: Parked | None
    port: Flow | None
    came: bool      # home before: the connection may have ended since

    def begin(self, light: bool, loop: asyncio.AbstractEventLoop) -> tuple[Flow, TcpState, Homing | None]:
        """In a thread. None: it is home. Raises Refused."""
        if self.parked is None and self.port is None and self.room.is_blank():
            return *self._thawed(), None
        state = self.room.read(light)
        if self.parked is None and _is_home(self.fd, state, self.came):
            return self._flow_of(state), state, None
        flow = self._checked(state)
        steering = _Steering(self.core, flow, self.namespace, loop)
        # an address that the host has lost a moment ago was the program's to use when the connection began
        return flow, state, Homing(self.fd, state, steering, begins=self.port is not None,
                                   anywhere=self.namespace.watcher.had(state.laddr))

    def _thawed(self) -> tuple[Flow, TcpState]:
        """An earlier service ended while it parked the socket. Raises Refused."""
        sock = socket.socket(fileno=self.fd)
        try:
            state = tcprepair.unfreeze(sock, self._checked)
        except OSError as error:
            raise Refused("TCP connection", f"it stays frozen: {error}", "", int(Reason.TCP_STATE)) from None
        finally:
            sock.detach()
        flow = self._flow_of(state)
        log.info("TCP %s: frozen by an earlier service, and free again", flow.local_text)
        return flow, state

    def _checked(self, state: TcpState) -> Flow:
        """Is it this program's?"""
        port, parked, cookie = self.port, self.parked, self.namespace.cookie
        if port is not None:    # as soon as the kernel has it, the rule of the port leaves its frames to the kernel
            if state.lport != port.local_port or (not port.wildcard and state.laddr != port.local):
                raise proof.not_owner(f"a connection of {endpoint(state.laddr, state.lport)}, not {port.local_text}")
            proof.check_new(self.fd, cookie)
            return self._flow_of(state)
        if parked is None:
            proof.check(self.fd, flow := self._flow_of(state), cookie)
            return flow
        if parked.session != self.session or parked.inode != os.fstat(self.fd).st_ino:
            raise proof.not_owner("another socket is parked for this flow")
        flow = parked.flow  # the socket has no peer any more, if the kernel had no route when it should go home before
        if (state.laddr, state.lport, state.raddr, state.rport) != _names_of(flow):
            raise refuse(f"flow {flow.local_text}", Reason.TCP_STATE)
        return flow

    def _flow_of(self, state: TcpState) -> Flow:
        return _flow_of(state, self.ifindex, self.namespace.name, proof.family_of(self.fd))


def _end_of(flow: Flow, state: TcpState, error: BaseException | None) -> tuple[Flow, TcpState, bool] | BaseException:
    """What is told of a homecoming that ended so."""
    if error is None or isinstance(error, Refused):
        return error or (flow, state, True)
    log.warning("TCP %s: %s", flow.local_text, error)
    if isinstance(error, MoveFailed) and error.alive:
        return flow, state, True
    no_route = isinstance(error, MoveFailed) and error.errno in tcpsock.NO_ROUTE
    return refuse(f"flow {flow.local_text}", Reason.NO_ROUTE if no_route else Reason.TCP_STATE)


def _tell_all(lot: Iterable[_Wanted[Any]], error: BaseException) -> None:
    """Those that have not been told anything."""
    for wanted in lot:
        wanted.tell(error)
    if not isinstance(error, Exception):
        raise error


def _settle(names: list[tcpask.Names]) -> list[bool | Exception | None]:
    """conntrack.settle() of each, or what it raised. In a thread of the namespace."""
    def one(name: tcpask.Names) -> bool | Exception | None:
        try:
            return conntrack.settle(name)
        except Exception as error:
            return error

    return [one(name) for name in names]


def _names_of(flow: Flow) -> tcpask.Names:
    return tcpask.Names(flow.local, flow.local_port, flow.remote, flow.remote_port)


def _flow_of(state: TcpState, ifindex: int, netns: str, family: int) -> Flow:
    """Of a connection that an earlier service parked; ``family``: of its socket."""
    return Flow(action=FlowAction.RING, source=Source.SOCKET, kind=Kind.FIVE, proto=socket.IPPROTO_TCP,
                local=addr_to_bytes(state.laddr), local_port=state.lport, remote=addr_to_bytes(state.raddr),
                remote_port=state.rport, ifindex=ifindex, netns=netns, family=family)


def _is_home(fd: int, state: TcpState, came: bool) -> bool:
    """Is the socket the kernel's, with that connection? ``came``: it was a moment ago."""
    sock = socket.socket(fileno=fd)
    try:
        if tcpsock.repairing(sock):
            return False
        if came:
            return True
        if tcpsock.info(sock).state in (TcpPhase.CLOSE, TcpPhase.LISTEN):
            return False
        return Kept.of(sock).is_of(state)
    except OSError:
        return False
    finally:
        sock.detach()


def _packets_of(fd: int, length: int) -> list[bytes]:
    """Those that the kernel takes, of a memory file that a program has made. Raises Refused."""
    _check_memory(fd)
    if length > lib.VMH_TCP_FRAMES_MAX * LIVE_FRAME_MAX:
        raise refuse("segments", Reason.RING_LIMIT)
    return list(itertools.islice(packets_in(os.pread(fd, length, 0)), lib.VMH_TCP_FRAMES_MAX))


def _check_memory(fd: int) -> None:
    """Nothing else of a program's is read or written: it may take for ever. Raises Refused."""
    try:
        fcntl.fcntl(fd, F_GET_SEALS)
    except OSError as error:
        log.info("TCP: the state is none: %s", error)
        raise Refused("TCP connection", f"its state is no memory file: {error}", "", int(Reason.TCP_STATE)) from None


def _forget(fd: int) -> None:
    """Make a parked socket one without a connection, and close our duplicate."""
    with contextlib.suppress(OSError), socket.socket(fileno=fd) as sock:
        _clear(sock)


def _clear(sock: socket.socket) -> None:
    tcpsock.enter(sock)
    tcpsock.disconnect(sock)
    tcpsock.take_all(sock)
    sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)     # of disconnect()
    sock.setsockopt(socket.IPPROTO_TCP, tcpsock.TCP_REPAIR, tcpsock.REPAIR_OFF_NO_WP)


def _renew(fd: int) -> None:
    with proof.borrowed(fd) as sock:
        if tcpsock.repairing(sock):
            _clear(sock)


def _reset(fd: int, flow: Flow) -> None:
    """Close a parked socket so that the kernel has no such connection: then tell_peers() finds the way. Without a word
    where the program has given it the names of another's: in repair mode nothing forbids it."""
    with contextlib.suppress(OSError), socket.socket(fileno=fd) as sock:
        if tcpsock.repairing(sock):
            if Kept.of(sock).names() != _names_of(flow):
                tcpsock.disconnect(sock)
            sock.setsockopt(socket.IPPROTO_TCP, tcpsock.TCP_REPAIR, tcpsock.REPAIR_OFF_NO_WP)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
