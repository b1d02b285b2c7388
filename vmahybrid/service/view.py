"""What the API may ask of the service: plain data, no packets, no netlink, no BPF.

``api/`` depends on :class:`ServiceView` only; the service implements it, tests use a fake one. All methods run on
the event loop of the service. Addresses are text (``10.0.0.1``), ports are int in host order, times are seconds
since the epoch, sizes are bytes, counters are totals since the object began. ``reason`` is a slug of
contracts/reasons.def, ``"none"`` where nothing is wrong.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(slots=True)
class RungView:
    """A backend that was tried for a ring, best first."""

    backend: str                    # "verbs" | "xdp" | "kernel"
    taken: bool
    reason: str                     # why not
    text: str                       # the whole as a sentence
    remedy: str


@dataclass(slots=True)
class InterfaceView:
    name: str
    ifindex: int
    netns: str                      # "host", a name under /run/netns, or "net:[inode]"
    backend: str                    # "verbs" | "xdp" | "kernel": the best that carries a ring, or would
    mode: str                       # "native" | "generic" of its AF_XDP rings; "none" where it has or would have none
    zerocopy: bool
    driver: str
    mtu: int
    queues: int
    up: bool
    attached: bool                  # just now: not while it is off
    reason: str                     # why not better (or not at all)
    reason_text: str
    remedy: str
    addresses: list[str] = field(default_factory=list)
    outs: dict[str, int] = field(default_factory=dict)   # packets per way out of the XDP program
    rings: int = 0
    rules: int = 0
    wanted: str = "auto"            # the configuration's backend
    device: str = ""                # RDMA device, as the kernel or a program says
    ladder: list[RungView] = field(default_factory=list)    # of the ring asked for last, or what is known before
    hook: str = ""                  # what steers now: "generic XDP", "generic, now tcx (bulk traffic)", ...
    switches: int = 0               # between these
    switch_failures: int = 0


@dataclass(slots=True)
class RingView:
    ring_id: int
    pid: int
    interface: str
    ifindex: int
    netns: str
    kind: str                       # "direct" | "veth" | "verbs"
    mode: str                       # "none" for verbs
    zerocopy: bool
    queues: int
    frames: int
    frame_size: int
    rx_size: int
    tx_size: int
    reason: str                     # why not direct
    stats: dict[str, int] = field(default_factory=dict)     # struct vmh_ring_stats
    kernel: dict[str, int] = field(default_factory=dict)    # XDP_STATISTICS of the sockets, summed
    guard: dict[str, int] = field(default_factory=dict)     # ways out of the guard program (veth rings)
    backend: str = "xdp"            # "verbs" | "xdp"
    device: str = ""                # RDMA device of a verbs ring, as its program says
    ladder: list[RungView] = field(default_factory=list)
    lane: int = 0                   # which of its program's rings on the interface


@dataclass(slots=True)
class FlowView:
    flow_id: int
    kind: str                       # "5-tuple" | "3-tuple" | "multicast"
    action: str                     # "ring" | "kernel" | "drop"
    source: str                     # "socket" | "operator"
    proto: str
    local: str                      # "10.0.0.1:11111"
    remote: str                     # "*:*" or "10.0.0.2:4242"
    interface: str                  # "*" for wildcards over several
    netns: str
    pid: int                        # 0 for operator rules
    comm: str
    fd: int
    ring_id: int                    # 0 if none
    reason: str
    rules: int                      # mirrored rules (a wildcard has one per address)
    packets: int
    bytes: int
    created: float
    backend: str = "kernel"         # "verbs" | "xdp" | "kernel"; of a wildcard the backends of its rings: "verbs, xdp"


@dataclass(slots=True)
class SocketView:
    socket_id: str                  # "PID:FD"
    pid: int
    comm: str
    fd: int
    inode: int
    proto: str                      # "udp" | "tcp"
    offloaded: bool
    rx_offloaded: bool
    tx_offloaded: bool
    blocking: bool
    mc_loop: bool
    state: str                      # TCP state name, "" for UDP
    local: str
    remote: str                     # "0.0.0.0:*" if not connected
    mc_if: str                      # "" if not set
    groups: list[str]
    reason: str
    reason_text: str
    remedy: str
    reason_detail: str              # "SOL_SOCKET/SO_MARK", or ""
    flow_id: int
    ring_id: int
    thread_rx: int
    thread_tx: int
    tx_os_reason: str               # why the kernel sent the last datagram that it sent; "none": it sent none
    counters: dict[str, int]        # every counter and gauge of struct vmh_sock_stats by its C name


@dataclass(slots=True)
class IomuxView:
    kind: str                       # "select" | "poll" | "epoll"
    epfd: int                       # -1 unless epoll
    thread: int
    counters: dict[str, int]


@dataclass(slots=True)
class ProcessView:
    pid: int
    uid: int
    comm: str
    cmdline: str
    profile: str
    application_id: str             # empty where the program has set none
    netns: str
    session: int
    started: float
    offloaded_sockets: int
    sockets: int
    rings: list[int]
    flows: list[int]
    reason: str
    log_level: int
    log_details: int
    sockets_over: int               # sockets that found no slot in the statistics page
    homecomings: int
    pid_ns: int = 0                 # inode of its PID namespace, and its pid there; 0: not known
    ns_pid: int = 0
    orders_waiting: bool = False    # a log level or a dump that it has not taken yet


@dataclass(slots=True)
class ProcessStats:
    """One reading of a process's statistics page: what vma_stats prints."""

    process: ProcessView
    read_at: float                  # CLOCK_MONOTONIC seconds of the reading
    sockets: list[SocketView]
    iomux: list[IomuxView]
    rings: list[RingView]


@dataclass(slots=True)
class ExplainStep:
    step: str                       # "session", "socket", "bind", "rule", "address", "interface", "ring", "flow"...
    ok: bool
    text: str
    remedy: str = ""
    reason: str = ""                # slug of docs/reasons.md


@dataclass(slots=True)
class StatusView:
    version: str
    pid: int
    started: float
    ready: bool
    control_socket: str
    api: list[str]                  # "unix:/run/vmahybrid/api.sock", "http://127.0.0.1:8080"
    health: list[str]               # sentences; empty if all is well
    interfaces: list[InterfaceView]
    processes: list[ProcessView]
    flows: list[FlowView]
    counters: dict[str, int]        # of the service: sessions_total, refused_total, grants_total ...
    reasons: dict[str, int]         # refusals and homecomings by reason slug
    features: dict[str, Any]        # probes made at start


@dataclass(slots=True)
class EventView:
    serial: int
    time: float
    kind: str                       # "process-started", "process-ended", "flow-added", "flow-removed"...
    text: str
    data: dict[str, Any]


class ServiceView(Protocol):
    def status(self) -> StatusView: ...
    def interfaces(self) -> list[InterfaceView]: ...
    def rings(self) -> list[RingView]: ...
    def flows(self) -> list[FlowView]: ...
    def flow(self, flow_id: int) -> FlowView:
        """Raises NotFound."""
        ...

    async def add_flow(
        self, *, action: str, proto: str, local: str, remote: str, netns: str, interface: str
    ) -> FlowView:
        """An operator's rule: action "kernel" or "drop"; addresses as ADDR:PORT with * for any. Evicts what it covers.
        Raises UsageError, Refused."""
        ...

    async def delete_flow(self, flow_id: int) -> None:
        """Operator rules vanish; a socket's flow goes home to the kernel. Raises NotFound."""
        ...

    def processes(self) -> list[ProcessView]: ...
    def process(self, pid: int) -> ProcessView:
        """Raises NotFound."""
        ...

    def stats(self, pid: int) -> ProcessStats:
        """Raises NotFound."""
        ...

    def sockets(self, pid: int | None = None) -> list[SocketView]: ...
    def explain(self, socket_id: str) -> list[ExplainStep]:
        """socket_id: "PID:FD", "PID" or "ADDR:PORT". Raises NotFound, UsageError."""
        ...

    async def zero(self, pid: int) -> None: ...
    async def set_log(self, pid: int, level: int | None, details: int | None) -> None: ...
    async def dump_fd(self, pid: int, fd: int, level: int) -> None: ...
    async def move(self, pid: int, fd: int | None, to: str) -> None:
        """Ask the program to move its sockets, or one, to "kernel" or, TCP connections only, to "ring".

        Raises NotFound, UsageError."""
        ...

    def config(self) -> Mapping[str, Any]:
        """{"section.key": {"value", "default", "origin", "live", "description", "unit", "accepts", "expected"}}"""
        ...

    async def patch_config(self, changes: Mapping[str, Any]) -> Mapping[str, Any]:
        """All or nothing. Raises UsageError naming the key (unknown, wrong type, or not changeable live)."""
        ...

    def events(self, since: int = 0) -> AsyncIterator[EventView]:
        """Events after serial `since` (a bounded backlog is kept), then live ones."""
        ...
