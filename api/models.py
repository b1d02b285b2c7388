"""What the API says, as pydantic models: the dataclasses of vmahybrid/service/view.py with every field described.

A quantity carries its unit as ``x-unit`` in the schema; a number that is no quantity (a pid, a port, a handle) carries
``x-identifier``. tests/unit/test_api_openapi.py fails where either is missing, and where a field of a dataclass is.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from vmahybrid.stats.counters import IOMUX, RING, SOCKET, Counter


def quantity(description: str, unit: str, **more: Any) -> Any:
    return Field(description=description, json_schema_extra={"x-unit": unit}, **more)


def identifier(description: str, **more: Any) -> Any:
    return Field(description=description, json_schema_extra={"x-identifier": True}, **more)


def note(description: str, **more: Any) -> Any:
    return Field(description=description, **more)


class View(BaseModel):
    """Read from the service's dataclasses; what a newer service adds is left out."""

    model_config = ConfigDict(from_attributes=True)


class Body(BaseModel):
    """Sent by a client: an unknown field is an error, not a typo that does nothing."""

    model_config = ConfigDict(extra="forbid")


def counters_model(name: str, doc: str, table: tuple[Counter, ...]) -> type[BaseModel]:
    fields: dict[str, Any] = {c.name: (int, quantity(f"{c.kind}: {c.text}", c.unit, default=0)) for c in table}
    model: type[BaseModel] = create_model(name, __base__=View, __doc__=doc, **fields)
    return model


SocketCounters = counters_model("SocketCounters", "Counters and gauges of a socket.", SOCKET)
RingCounters = counters_model("RingCounters", "Counters and gauges that the program keeps of a ring.", RING)
IomuxCounters = counters_model("IomuxCounters", "Counters of select(), poll() or of one epoll set.", IOMUX)

REASON = "slug of the reason why it is not better, or not at all, offloaded; `none` where nothing is wrong"
NETNS = "network namespace: `host`, a name under /run/netns, or `net:[inode]`"


class Rung(View):
    """A backend that was tried for a ring, best first."""

    backend: str = note("`verbs`, `xdp` or `kernel`")
    taken: bool = note("it carries the ring")
    reason: str = note("slug of the reason why it does not; `none` if it does")
    text: str = note("the whole as a sentence")
    remedy: str = note("what to do about it; empty if nothing")


class Interface(View):
    """A network interface that the service serves, or was asked to."""

    name: str = note("name of the interface")
    ifindex: int = identifier("kernel's index of the interface in its namespace")
    netns: str = note(NETNS)
    backend: str = note("the best that carries rings here: `verbs`, `xdp`, or `kernel` for none")
    mode: str = note("XDP mode obtained: `native`, `generic` or `none`")
    zerocopy: bool = note("the driver moves frames into the rings without a copy")
    driver: str = note("kernel driver")
    mtu: int = quantity("largest packet without the link header", "bytes")
    queues: int = quantity("receive queues", "queues")
    up: bool = note("administratively up, with carrier")
    attached: bool = note("our XDP program is attached just now; not while the interface has no rule, see `hook`")
    reason: str = note(REASON)
    reason_text: str = note("the reason as a sentence")
    remedy: str = note("what to do about it; empty if nothing")
    addresses: list[str] = note("addresses of the interface")
    outs: dict[str, int] = quantity("packets by way out of the XDP program since it was first attached", "packets")
    rings: int = quantity("rings granted here", "rings")
    rules: int = quantity("steering rules mirrored into the XDP maps", "rules")
    wanted: str = note("the configuration's `backend` for it: `auto`, `verbs`, `xdp` or `kernel`")
    device: str = note("its RDMA device, as the kernel or a program says; empty without one")
    ladder: list[Rung] = note("the backends of the ring that was asked for last, or what is known before; may be empty")
    hook: str = note("what steers now: `native XDP`, `generic XDP`, `generic, now tcx (bulk traffic)`, or `generic "
                     "XDP, off: no rule`, and why nothing better; empty when not served")
    switches: int = quantity("times that it went from generic XDP to tcx, off, or back", "times")
    switch_failures: int = quantity("steps of such a switch that failed", "steps")


class Ring(View):
    """A ring granted to a process: AF_XDP, or leave to make a raw packet QP."""

    ring_id: int = identifier("the service's number of the ring")
    pid: int = identifier("process that holds the ring")
    interface: str = note("interface whose packets it carries")
    ifindex: int = identifier("kernel's index of that interface")
    netns: str = note(NETNS)
    kind: str = note("`direct`: on the interface's own queue; `veth`: behind a ring veth; `verbs`: a QP")
    mode: str = note("XDP mode: `native` or `generic`; `none` for verbs")
    zerocopy: bool = note("frames are moved without a copy")
    queues: int = quantity("AF_XDP sockets of the ring", "queues")
    frames: int = quantity("frames in the packet memory (UMEM)", "frames")
    frame_size: int = quantity("size of a frame", "bytes")
    rx_size: int = quantity("receive descriptors per queue", "descriptors")
    tx_size: int = quantity("transmit descriptors per queue", "descriptors")
    reason: str = note("slug of the reason why the ring is not direct or not better; `none` if it is")
    stats: RingCounters = note("what the program counts")  # type: ignore[valid-type]
    kernel: dict[str, int] = quantity("XDP_STATISTICS of the kernel, summed over the queues", "packets")
    guard: dict[str, int] = quantity("packets by way out of the guard program of a ring veth", "packets")
    backend: str = note("`verbs` or `xdp`")
    device: str = note("RDMA device of a verbs ring, as its program says; else empty")
    ladder: list[Rung] = note("the backends that were tried for it, the last one carries it")
    lane: int = identifier("which of its process's rings on the interface (VMA_RING_ALLOCATION_LOGIC_*), from 0")


class Flow(View):
    """A row of the steering table, as mirrored."""

    flow_id: int = identifier("the service's number of the flow")
    kind: str = note("`5-tuple`, `3-tuple` or `multicast`")
    action: str = note("where its packets go: `ring`, `kernel` or `drop`")
    source: str = note("who asked for it: a `socket`, or the `operator`")
    proto: str = note("`udp` or `tcp`")
    local: str = note("local address and port; the group for multicast")
    remote: str = note("remote address and port, `*:*` for any")
    interface: str = note("interface, `*` for several")
    netns: str = note(NETNS)
    pid: int = identifier("owning process, 0 for an operator's rule")
    comm: str = note("name of the owning process")
    fd: int = identifier("file descriptor of the socket in its process")
    ring_id: int = identifier("ring that its packets go to, 0 for none")
    reason: str = note(REASON)
    rules: int = quantity("rules in the XDP maps; a wildcard address has one per address", "rules")
    packets: int = quantity("packets that hit the flow's rules in XDP; of a verbs flow what its NIC did not take, on "
                            "the software device all", "packets")
    bytes: int = quantity("bytes of these packets, headers included", "bytes")
    created: float = quantity("when it was made, since the epoch", "seconds")
    backend: str = note("what carries it: `verbs`, `xdp`, `kernel`, or `verbs, xdp` for a wildcard on rings of both")


class NewFlow(Body):
    """An operator's rule. It evicts the sockets' flows that it covers: they go home to the kernel."""

    action: Literal["kernel", "drop"] = note("`kernel`: never offload; `drop`: drop in XDP")
    proto: Literal["udp", "tcp"] = note("protocol", default="udp")
    local: str = note("local ADDR:PORT with * for any", examples=["10.0.0.1:11111", "*:53"], max_length=64)
    remote: str = note("remote ADDR:PORT with * for any", default="*:*", max_length=64)
    netns: str = note(f"{NETNS}; `*` for all", default="*", max_length=255)
    interface: str = note("interface, `*` for every served one", default="*", max_length=15)


class Socket(View):
    """A socket of a process under the shim."""

    socket_id: str = note("PID:FD, as the explain route takes it")
    pid: int = identifier("process")
    comm: str = note("name of the process")
    fd: int = identifier("file descriptor in its process")
    inode: int = identifier("inode of the kernel socket")
    proto: str = note("`udp` or `tcp`")
    offloaded: bool = note("a flow of this socket is on a ring")
    rx_offloaded: bool = note("it receives from a ring")
    tx_offloaded: bool = note("it sends through a ring")
    blocking: bool = note("the descriptor is in blocking mode")
    mc_loop: bool = note("IP_MULTICAST_LOOP is on")
    state: str = note("TCP state; empty for UDP")
    local: str = note("local address and port")
    remote: str = note("remote address and port; 0.0.0.0:* if not connected")
    mc_if: str = note("address of IP_MULTICAST_IF; empty if not set")
    groups: list[str] = note("multicast groups joined, the first ones")
    reason: str = note(REASON)
    reason_text: str = note("the reason as a sentence")
    remedy: str = note("what to do about it; empty if nothing")
    reason_detail: str = note("the socket option behind the reason, as SOL_SOCKET/SO_MARK; else empty")
    flow_id: int = identifier("its flow in the steering table, 0 for none")
    ring_id: int = identifier("its ring, 0 for none")
    thread_rx: int = identifier("thread that received last, 0 for none")
    thread_tx: int = identifier("thread that sent last, 0 for none")
    tx_os_reason: str = note("why the kernel sent the last datagram that it sent (slug); `none`: it sent none")
    counters: SocketCounters = note("counters and gauges")  # type: ignore[valid-type]


class Iomux(View):
    """select(), poll(), or one epoll set of a process."""

    kind: str = note("`select`, `poll` or `epoll`")
    epfd: int = identifier("descriptor of the epoll set; -1 for select and poll")
    thread: int = identifier("thread that called last, 0 for none")
    counters: IomuxCounters = note("counters and gauges")  # type: ignore[valid-type]


class Process(View):
    """A process under the shim that said hello to the service."""

    pid: int = identifier("process id in the service's namespace")
    uid: int = identifier("user id")
    comm: str = note("name of the process")
    cmdline: str = note("command line, shortened")
    profile: str = note("VMA_SPEC profile; empty if none")
    application_id: str = note("VMA_APPLICATION_ID; empty if not set")
    netns: str = note(NETNS)
    session: int = identifier("the service's number of the connection")
    started: float = quantity("when it connected, since the epoch", "seconds")
    offloaded_sockets: int = quantity("sockets with a flow on a ring", "sockets")
    sockets: int = quantity("sockets in its statistics page", "sockets")
    rings: list[int] = identifier("numbers of its rings")
    flows: list[int] = identifier("numbers of its flows")
    reason: str = note(REASON)
    log_level: int = identifier("log level of the shim: -1 none, 0 panic, 1 error, 2 warning, 3 info, ... 8 all")
    log_details: int = identifier("log details of the shim, 0 to 3")
    sockets_over: int = quantity("sockets that found no slot in the page (VMA_STATS_FD_NUM)", "sockets")
    homecomings: int = quantity("flows that went back to the kernel", "flows")
    pid_ns: int = identifier("inode of its PID namespace (/proc/PID/ns/pid); 0 if not known", default=0)
    ns_pid: int = identifier("its process id in that namespace; 0 if not known", default=0)
    orders_waiting: bool = note("it has been given a log level or a dump and has not taken it yet", default=False)


class ProcessStats(View):
    """One reading of a process's statistics page: what vma_stats prints."""

    process: Process = note("the process")
    read_at: float = quantity("CLOCK_MONOTONIC at the reading; divide deltas by the difference", "seconds")
    sockets: list[Socket] = note("its sockets")
    iomux: list[Iomux] = note("its select, poll and epoll use")
    rings: list[Ring] = note("its rings")


class ExplainStep(View):
    """One step on the way to a ring."""

    step: str = note("what was looked at: session, family, bind, rule, address, interface, ladder, ring, flow or "
                     "traffic")
    ok: bool = note("the step is passed")
    text: str = note("what was found")
    remedy: str = note("what to do if it is not passed")
    reason: str = note("slug of the reason, see docs/reasons.md; empty if none", default="")


class Explanation(View):
    """Why a socket is, or is not, offloaded: every step in order."""

    socket: str = note("the id that was asked for")
    steps: list[ExplainStep] = note("the steps; the first that is not ok says where it ends")


class Features(View):
    """What was found by probing the kernel at the start."""

    kernel: str = note("release of the kernel", default="")
    peer_pidfd: bool = note("a program's death is told by its pidfd (SO_PEERPIDFD)", default=False)
    netns_cookie: bool = note("a socket tells its network namespace (SO_NETNS_COOKIE)", default=False)
    membarrier: bool = note("grace periods of RCU by membarrier(2)", default=False)
    live_frames: bool = note("frames of rings can be given back to the kernel", default=False)
    map_bound_xsk: bool = note("a process can map the rings of an AF_XDP socket that is bound", default=False)


class EventData(View):
    """What an event is about; what does not apply is left out. `config-changed` has the new values by key instead."""

    model_config = ConfigDict(from_attributes=True, extra="allow")

    pid: int = identifier("process", default=0)
    session: int = identifier("session of the process", default=0)
    flow_id: int = identifier("flow", default=0)
    ring_id: int = identifier("ring", default=0)
    interface: str = note("name of the interface", default="")
    reason: str = note("slug of the reason, see docs/reasons.md", default="")


class Event(View):
    """Something that happened: the `data` of a server-sent event."""

    serial: int = identifier("counts events since the service started; the `id` of the server-sent event")
    time: float = quantity("when it happened, since the epoch", "seconds")
    kind: str = note("`process-started`, `process-ended`, `ring-granted`, `ring-closed`, `flow-added`, `flow-removed`, "
                     "`tcp-adopted`, `tcp-home`, `move-asked`, `connection-relayed`, `interface-lost` or "
                     "`config-changed`; the `event` of the server-sent event")
    text: str = note("the whole as a sentence")
    data: EventData = note("what it is about")


class Status(View):
    """The service, its interfaces, processes, flows, and what is wrong."""

    version: str = note("version of the service")
    pid: int = identifier("process id of the service")
    started: float = quantity("when the service started, since the epoch", "seconds")
    ready: bool = note("programs may be offloaded")
    control_socket: str = note("path of the control socket")
    api: list[str] = note("where the API listens")
    health: list[str] = note("what is wrong, as sentences; empty if all is well")
    interfaces: list[Interface] = note("interfaces")
    processes: list[Process] = note("processes under the shim")
    flows: list[Flow] = note("the steering table")
    counters: dict[str, int] = quantity("events counted by the service since it started", "events")
    reasons: dict[str, int] = quantity("refusals and homecomings by reason", "events")
    features: Features = note("what was found by probing the kernel at the start")


class Setting(View):
    """A configuration value and where it came from."""

    value: Any = note("present value")
    default: Any = note("value if nothing is said")
    origin: str = note("what set it: default, profile, file, environment, command line or api")
    live: bool = note("PATCH /v1/config can change it while the service runs")
    description: str = note("what it does")
    unit: str = note("unit of the value; empty if it has none")
    accepts: dict[str, Any] = note("JSON Schema of the value: its type, range or choices")
    expected: str = note("the same in words")


class ConfigSchema(View):
    """JSON Schema (draft 2020-12) of the configuration, of which a body of PATCH /v1/config has some live keys, or of
    the parameters of programs."""

    schema_uri: str = note("dialect of the schema", alias="$schema")
    title: str = note("what it describes")
    type: Literal["object"] = note("a configuration is an object")
    additional_properties: bool = note("false: an unknown key is an error", alias="additionalProperties")
    properties: dict[str, dict[str, Any]] = note(
        "schema by key, with default, description, x-unit, and readOnly for what only a restart changes")


class LogSettings(Body):
    """New log settings of a running program; what is left out stays."""

    level: int | None = identifier("-1 none, 0 panic, 1 error, 2 warning, 3 info, 4 details, 5 debug, 6 fine, 7 finer,"
                                   " 8 all", default=None, ge=-1, le=8)  # fmt: skip
    details: int | None = identifier("0 text, 1 thread, 2 process and thread, 3 time too", default=None, ge=0, le=3)


class DumpFd(Body):
    """Asks the program to log the statistics of a descriptor."""

    fd: int = identifier("file descriptor, 0 for every socket", ge=0, le=0x7FFFFFFF)
    level: int = identifier("log level of the lines, as for /log", default=3, ge=0, le=8)


class Move(Body):
    """Asks the program to move its sockets to the kernel, or its TCP connections to a ring."""

    to: Literal["kernel", "ring"] = note("where to")
    fd: int | None = identifier("file descriptor, none for every socket", default=None, ge=0, le=0x7FFFFFFF)


class Choice(View):
    """A value of a parameter that takes words."""

    value: int = identifier("its number")
    text: str = note("as the start-up banner shows it")
    words: list[str] = note("accepted, without regard to case; the first is the usual one")


class Parameter(View):
    """A VMA_* environment parameter of the shim."""

    name: str = note("environment variable")
    label: str = note("label in the start-up banner; empty if it has no line there")
    type: str = note("`int`, `bool`, `string` or `enum`")
    default: str = note("value if the variable is not set, as one would write it")
    unit: str = note("unit of the value; empty if it has none")
    expected: str = note("what may be given, in words")
    minimum: int | None = quantity("least number; null if there is no limit, or no number is taken", "see unit")
    maximum: int | None = quantity("highest number; null as for minimum", "see unit")
    also: list[int] = quantity("numbers outside of the range that are taken as well", "see unit")
    choices: list[Choice] = note("values that have words; empty if it takes numbers or text alone")
    max_length: int | None = quantity("of a text; null for the other types", "bytes")
    acts: str = note("`now` if it changes what this version does; else `tcp`, `verbs`, `later` or `never`")
    backends: list[str] = note("kinds of rings on which it has an effect: `verbs`, `xdp`")
    live: bool = note("can be changed while the program runs: POST /v1/processes/{pid}/log")
    text: str = note("what it does")


class Profile(View):
    """A profile: a value of VMA_SPEC."""

    name: str = note("name, as VMA_SPEC and `vmahybrid run -p` take it")
    title: str = note("text of the start-up banner")
    text: str = note("what it is for")
    values: dict[str, str] = note("parameters that it changes, with their values")


class Parameters(View):
    """The catalogue of the shim's parameters and profiles."""

    parameters: list[Parameter] = note("every parameter, in the order of the banner")
    profiles: list[Profile] = note("every profile")


class Health(View):
    """Answer of the probes."""

    status: str = note("`ok`, or `unavailable`")
    health: list[str] = note("what is wrong, as sentences")


class Problem(BaseModel):
    """An error (RFC 9457, application/problem+json)."""

    type: str = note("kind of problem, a URN that does not change")
    title: str = note("the kind in words")
    status: int = identifier("HTTP status")
    detail: str = note("what failed and why, naming the wrong value")
    remedy: str = note("what to do")
    reason: str | None = note("slug of the reason of a refusal", default=None)
