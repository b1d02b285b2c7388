"""A service without a service: ServiceView over plain lists, for tests of the API, the CLI and vma_stats."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from api import create_app
from vmahybrid.errors import NotFound, Refused, UsageError
from vmahybrid.service.view import (
    EventView,
    ExplainStep,
    FlowView,
    InterfaceView,
    IomuxView,
    ProcessStats,
    ProcessView,
    RingView,
    SocketView,
    StatusView,
)
from vmahybrid.stats.counters import IOMUX, RING, SOCKET


def interface(**changes: Any) -> InterfaceView:
    values: dict[str, Any] = {
        "name": "veth0", "ifindex": 6, "netns": "host", "backend": "xdp", "mode": "generic", "zerocopy": False,
        "driver": "veth", "mtu": 1500, "queues": 1, "up": True, "attached": True, "reason": "generic-virtual",
        "reason_text": "generic XDP on a virtual driver", "remedy": 'set interface.mode = "native"',
        "addresses": ["10.0.0.1/24"], "outs": {"redirect": 10, "pass-miss": 5}, "rings": 1, "rules": 2,
    }  # fmt: skip
    return InterfaceView(**values | changes)


def process(pid: int = 4711, **changes: Any) -> ProcessView:
    values: dict[str, Any] = {
        "pid": pid, "uid": 1000, "comm": "sockperf", "cmdline": "sockperf server -i 10.0.0.1", "profile": "latency",
        "application_id": "", "netns": "host", "session": 7, "started": 1_795_000_000.0, "offloaded_sockets": 1,
        "sockets": 2, "rings": [2], "flows": [9], "reason": "none", "log_level": 3,
        "log_details": 0, "sockets_over": 0, "homecomings": 1,
    }  # fmt: skip
    return ProcessView(**values | changes)


def sock(fd: int = 14, pid: int = 4711, counters: Mapping[str, int] | None = None, **changes: Any) -> SocketView:
    values: dict[str, Any] = {
        "socket_id": f"{pid}:{fd}", "pid": pid, "comm": "sockperf", "fd": fd, "inode": 733679757 + fd, "proto": "udp",
        "offloaded": True, "rx_offloaded": True, "tx_offloaded": True, "blocking": True, "mc_loop": True, "state": "",
        "local": "10.0.0.1:11111", "remote": "0.0.0.0:*", "mc_if": "", "groups": [], "reason": "none",
        "reason_text": "offloaded", "remedy": "", "reason_detail": "", "flow_id": 9, "ring_id": 2,
        "thread_rx": 0, "thread_tx": 0, "tx_os_reason": "none",
        "counters": {c.name: 0 for c in SOCKET} | dict(counters or {}),
    }  # fmt: skip
    return SocketView(**values | changes)


def ring(ring_id: int = 2, pid: int = 4711, stats: Mapping[str, int] | None = None, **changes: Any) -> RingView:
    values: dict[str, Any] = {
        "ring_id": ring_id, "pid": pid, "interface": "veth0", "ifindex": 6, "netns": "host", "kind": "direct",
        "mode": "generic", "zerocopy": False, "queues": 1, "frames": 4096, "frame_size": 2048, "rx_size": 1024,
        "tx_size": 1024, "reason": "none", "stats": {c.name: 0 for c in RING} | dict(stats or {}),
        "kernel": {"rx_dropped": 0}, "guard": {},
    }  # fmt: skip
    return RingView(**values | changes)


def iomux(kind: str = "select", epfd: int = -1, thread: int = 0, **counters: int) -> IomuxView:
    return IomuxView(kind=kind, epfd=epfd, thread=thread, counters={c.name: 0 for c in IOMUX} | counters)


def flow(flow_id: int = 9, **changes: Any) -> FlowView:
    values: dict[str, Any] = {
        "flow_id": flow_id, "kind": "3-tuple", "action": "ring", "source": "socket", "proto": "udp",
        "local": "10.0.0.1:11111", "remote": "*:*", "interface": "veth0", "netns": "host", "pid": 4711,
        "comm": "sockperf", "fd": 14, "ring_id": 2, "reason": "none", "rules": 1, "packets": 100, "bytes": 10600,
        "created": 1_795_000_001.0,
    }  # fmt: skip
    return FlowView(**values | changes)


class FakeView:
    """Keeps what it is told; ``calls`` records what was asked of it. ``readings`` are given one after the other."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.ready, self.health = True, list[str]()
        self.interface_list = [interface()]
        self.flow_list = [flow()]
        self.readings: dict[int, list[ProcessStats]] = {
            4711: [ProcessStats(process(), 100.0, [sock(counters={"rx_packets": 5})], [iomux()], [ring()])]
        }
        self.settings: dict[str, dict[str, Any]] = {
            "limits.rules": {"value": 1024, "default": 1024, "origin": "default", "live": True,
                             "description": "rules in all", "unit": "rules", "expected": "an integer from 0 to 16384",
                             "accepts": {"type": "integer", "minimum": 0, "maximum": 16384}},
            "control.mode": {"value": "0666", "default": "0666", "origin": "file", "live": False,
                             "description": "mode of the control socket", "unit": "", "expected": "a file mode",
                             "accepts": {"type": ["string", "integer"]}},
        }  # fmt: skip
        self.event_list = [EventView(n, 1.0, "flow-added", f"flow {n}\nadded", {"flow_id": n}) for n in (1, 2, 3)]
        self.explain_steps = [ExplainStep("session", True, "connected"), ExplainStep("ring", False, "none", "doctor")]

    def status(self) -> StatusView:
        return StatusView(
            version="0.1.0", pid=42, started=1_795_000_000.0, ready=self.ready, control_socket="/run/x/control.sock",
            api=["unix:/run/x/api.sock"], health=self.health, interfaces=self.interface_list,
            processes=self.processes(), flows=self.flow_list, counters={"sessions_total": 3, "grants_total": 2},
            reasons={"fork": 1}, features={
                "kernel": "6.18.0", "peer_pidfd": True, "netns_cookie": True, "membarrier": True, "live_frames": True,
                "map_bound_xsk": False},
        )  # fmt: skip

    def interfaces(self) -> list[InterfaceView]:
        return self.interface_list

    def rings(self) -> list[RingView]:
        return [ring for readings in self.readings.values() for ring in readings[0].rings]

    def flows(self) -> list[FlowView]:
        return self.flow_list

    def flow(self, flow_id: int) -> FlowView:
        for known in self.flow_list:
            if known.flow_id == flow_id:
                return known
        raise NotFound(f"flow {flow_id}", "no such flow", "GET /v1/flows lists them")

    async def add_flow(
        self, *, action: str, proto: str, local: str, remote: str, netns: str, interface: str
    ) -> FlowView:
        self.calls.append(("add_flow", action, proto, local, remote, netns, interface))
        if local == "bad":
            raise UsageError("local", "'bad' is not ADDR:PORT", "write 10.0.0.1:53 or *:53")
        if local == "*:1":
            raise Refused("flow *:1", "the table is full", "raise limits.rules", reason=18)
        if local == "*:2":
            raise RuntimeError("secret detail")
        made = flow(10, action=action, source="operator", local=local, remote=remote, pid=0, comm="", fd=-1)
        self.flow_list.append(made)
        return made

    async def delete_flow(self, flow_id: int) -> None:
        self.flow_list.remove(self.flow(flow_id))

    def processes(self) -> list[ProcessView]:
        return [readings[0].process for readings in self.readings.values()]

    def process(self, pid: int) -> ProcessView:
        return self._readings(pid)[0].process

    def _readings(self, pid: int) -> list[ProcessStats]:
        if pid not in self.readings:
            raise NotFound(f"process {pid}", "it is not under the shim", "vmahybrid status lists the processes")
        return self.readings[pid]

    def stats(self, pid: int) -> ProcessStats:
        """The last reading stays; one before the end is used up. Two equal readings in a row mean that it ended."""
        readings = self._readings(pid)
        if len(readings) > 1:
            return readings.pop(0)
        return readings[0]

    def sockets(self, pid: int | None = None) -> list[SocketView]:
        known = self.readings if pid is None else {pid: self._readings(pid)}
        return [sock for readings in known.values() for sock in readings[0].sockets]

    def explain(self, socket_id: str) -> list[ExplainStep]:
        self.calls.append(("explain", socket_id))
        if socket_id == "x":
            raise UsageError("socket id", "'x' is none of PID:FD, PID, ADDR:PORT", "take one from vmahybrid status")
        if socket_id == "1:1":
            raise NotFound("socket 1:1", "no such socket", "vmahybrid status lists the processes")
        return self.explain_steps

    async def zero(self, pid: int) -> None:
        self._readings(pid)
        self.calls.append(("zero", pid))

    async def set_log(self, pid: int, level: int | None, details: int | None) -> None:
        self._readings(pid)
        self.calls.append(("set_log", pid, level, details))

    async def move(self, pid: int, fd: int | None, to: str) -> None:
        self.process(pid)
        self.calls.append(("move", pid, fd, to))

    async def dump_fd(self, pid: int, fd: int, level: int) -> None:
        self._readings(pid)
        self.calls.append(("dump_fd", pid, fd, level))

    def config(self) -> Mapping[str, Any]:
        return self.settings

    async def patch_config(self, changes: Mapping[str, Any]) -> Mapping[str, Any]:
        for key in changes:
            if key not in self.settings:
                raise UsageError(key, "no such configuration key", "vmahybrid config lists them")
        for key, value in changes.items():
            self.settings[key] |= {"value": value, "origin": "api"}
        return self.settings

    async def events(self, since: int = 0) -> AsyncIterator[EventView]:
        for event in self.event_list:
            if event.serial > since:
                yield event
        await asyncio.sleep(0)


@contextmanager
def serve(view: FakeView, path: Path, version: str = "0.1.0") -> Iterator[Path]:
    """The real application on a Unix socket at ``path``, in a thread."""
    config = uvicorn.Config(create_app(view, version=version), uds=str(path), log_level="critical", lifespan="off",
                            ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        if time.monotonic() > deadline or not thread.is_alive():
            raise RuntimeError("the API did not start")
        time.sleep(0.01)
    try:
        yield path
    finally:
        server.should_exit = True
        thread.join(20)
