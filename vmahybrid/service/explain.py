"""Why a socket is or is not offloaded: the questions in the order in which the shim and the service ask them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from socket import IPPROTO_TCP

from vmahybrid.config.rule import parse_endpoint
from vmahybrid.contracts import addr_to_text
from vmahybrid.errors import NotFound, Refused, UsageError
from vmahybrid.service import fds, views
from vmahybrid.service.backend import PortHandle
from vmahybrid.service.backend_verbs import VerbsRingHandle
from vmahybrid.service.core import Core
from vmahybrid.service.ladder import KERNEL, VERBS_REASONS, Ladder, forced_home
from vmahybrid.service.namespaces import LinkRow, Namespace
from vmahybrid.service.ports import OWN_VETHS
from vmahybrid.service.session import Session
from vmahybrid.service.view import ExplainStep, SocketView
from vmahybrid.stats.page import StatsPage
from vmahybrid.steering.flow import PROTO_NAMES, Flow, Kind
from vmahybrid.steering.keys import ANY_ADDR
from vmahybrid.steering.reasons import Reason

FAMILY_REASONS = ("family", "type", "disabled")
UNBOUND_REASONS = ("not-tried",)
PLACES_SHOWN = 4    # sockets at one address, if not more of them have flows
RULE_GONE = "a rule of the operator, which is gone by now, sent this flow home"
RULE_GONE_REMEDY = "it comes back with the socket's next connect, or the next start of the service"


def explain(core: Core, socket_id: str) -> list[ExplainStep]:
    """``socket_id``: "PID:FD", "PID" or "ADDR:PORT". Raises NotFound, UsageError."""
    first, colon, second = socket_id.rpartition(":")
    if not colon and second.isascii() and second.isdigit():
        return list(_process(core, int(second)))
    if first.isascii() and first.isdigit() and second.isascii() and second.isdigit():
        return list(_socket(core, int(first), int(second)))
    try:
        address, port = parse_endpoint("socket", socket_id)
    except UsageError:
        raise UsageError(f"socket {socket_id!r}", "it is neither PID:FD, PID nor ADDR:PORT",
                         "vmahybrid status shows the processes, vmahybrid explain PID the sockets of one") from None
    return list(_address(core, address, port))


def _ok(step: str, text: str) -> ExplainStep:
    return ExplainStep(step, True, text)


def _no(step: str, reason: Reason, text: str = "") -> ExplainStep:
    return ExplainStep(step, False, text or reason.text, reason.remedy, _slug(reason))


def _refused(step: str, text: str, refused: Refused) -> ExplainStep:
    return ExplainStep(step, False, text, refused.remedy, _slug(Reason.from_code(refused.reason)))


def _slug(reason: Reason) -> str:
    return "" if reason is Reason.NONE else reason.slug


def _find(core: Core, pid: int) -> Session | None:
    found = [session for session in core.sessions.values() if session.pid == pid]
    return max(found, key=lambda session: session.id) if found else None


def _session(core: Core, pid: int) -> tuple[Session | None, ExplainStep]:
    session = _find(core, pid)
    if session is not None:
        netns = session.namespace.name if session.namespace else "?"
        return session, _ok("session", f"{session} is connected (session {session.id}, namespace {netns})")
    if not os.path.isdir(f"/proc/{pid}"):
        raise NotFound(f"process {pid}", "there is no such process")
    return None, ExplainStep("session", False, f"process {pid} has no session: the kernel serves it",
                             "start it with: vmahybrid run -- COMMAND; a program opens its session with its first "
                             "socket that could be offloaded")


def _process(core: Core, pid: int) -> Iterator[ExplainStep]:
    session, step = _session(core, pid)
    yield step
    if session is None:
        return
    for link, ladder in _ladders(core, session):
        yield from _ladder(core, link, ladder)
    page = views.read_stats(session)
    if page is None:
        yield ExplainStep("family", False, "the program handed over no statistics page: its sockets can't be listed",
                          "see VMA_STATS_SHMEM_DIR")
        return
    if not page.sockets:
        yield ExplainStep("family", False, "the program has no socket that could be offloaded", "")
    for socket in page.sockets:
        yield _summary(core, session, socket)
    yield from fds.explain_others(pid, list(_own_protocols(core, session, page)),
                                  {socket.inode for socket in page.sockets}, page.sockets_over > 0)


def _summary(core: Core, session: Session, socket: SocketView) -> ExplainStep:
    """A socket in one line. One whose flow is on a ring while all that it did was to send by the kernel is at fault."""
    name = f"{socket.socket_id} {socket.proto} {socket.local}"
    if not socket.offloaded:
        reason, why, remedy = _why(core, session, socket)
        return ExplainStep("flow", False, f"{name}: on the kernel: {why}", remedy, _slug(reason))
    flow = core.table.flows.get(socket.flow_id)
    if flow is not None and (refused := core.unattached(flow)) is not None:
        return _refused("flow", f"{name}: on the kernel: {refused.why}", refused)
    if not _sends_by_kernel(socket):
        return _ok("flow", f"{name}: offloaded")
    reason = Reason.from_slug(socket.tx_os_reason)
    way = "receives by a ring" if socket.counters.get("rx_packets", 0) else "would receive by a ring"
    why = f": {reason.text}" if reason is not Reason.NONE else ""
    return _no("flow", reason, f"{name}: {way}, but sends by the kernel{why}")


def _now(core: Core, session: Session, reason: Reason) -> tuple[Reason, str]:
    """The reason with its remedy for this host: no interface is there because the one that was named is down, and the
    configuration keeps a backend off by a key that has a name."""
    links = [] if session.namespace is None else [
        link for link in session.namespace.watcher.links() if not link.name.startswith(OWN_VETHS)]
    served = {link.name: session.namespace.served(link) for link in links} if session.namespace is not None else {}
    if reason is Reason.NO_INTERFACE and Reason.NONE not in served.values():
        reason = next((why for why in (Reason.IF_DOWN, Reason.BACKEND_CONFIG) if why in served.values()), reason)
    names = [name for name, why in served.items() if why is reason]
    return reason, _remedy(core, reason, names[0] if len(names) == 1 else "IF")


def _why(core: Core, session: Session, socket: SocketView) -> tuple[Reason, str, str]:
    """Why a socket is on the kernel: the reason with its text and remedy, as things are now."""
    reason, remedy = _now(core, session, Reason.from_slug(socket.reason))
    if reason is Reason.RULE and _rule_is_gone(core, session, socket):
        return reason, RULE_GONE, RULE_GONE_REMEDY
    return reason, reason.text, remedy


def _rule_is_gone(core: Core, session: Session, socket: SocketView) -> bool:
    """Of a socket that is on the kernel for a rule: is there none now that has to do with it?"""
    if session.namespace is not None and any(session.namespace.served(link) is Reason.RULE
                                             for link in session.namespace.watcher.links()):
        return False    # [interface."NAME"] mode = "kernel"
    local, remote = parse_endpoint("socket", socket.local), parse_endpoint("socket", socket.remote)
    return not any(_may_rule(rule, local, remote) for rule in views.operator_flows(core))


def _may_rule(rule: Flow, local: tuple[bytes, int], remote: tuple[bytes, int]) -> bool:
    """A rule for remote ends alone, as that for name servers, is none for a socket that is not connected to one."""
    if (rule.local, rule.local_port) == (ANY_ADDR, 0):
        return rule.remote in (ANY_ADDR, remote[0]) and rule.remote_port in (0, remote[1])
    return _overlap((rule.local, rule.local_port), local) and _overlap((rule.remote, rule.remote_port), remote)


def _overlap(one: tuple[bytes, int], other: tuple[bytes, int]) -> bool:
    """Two ends, of which either may be for any address or port."""
    return (ANY_ADDR in (one[0], other[0]) or one[0] == other[0]) and (0 in (one[1], other[1]) or one[1] == other[1])


def _remedy(core: Core, reason: Reason, interface: str) -> str:
    if reason is Reason.BACKEND_CONFIG:
        return core.config.backend_remedy(interface)
    if reason is Reason.IF_DOWN:
        return reason.remedy.replace("IF", interface)
    return reason.remedy


def _own_protocols(core: Core, session: Session, page: StatsPage) -> Iterator[str]:
    """Of sockets that the shim has under numbers of its own: the software device's, and those that it keeps of ended
    connections for the next ones; if the page is full there may be the program's among them."""
    if any(isinstance(grant.handle, VerbsRingHandle) and grant.handle.software
           for grant in core.grants.of_session(session.id)):
        yield "PACKET"
    if not page.sockets_over:
        yield from fds.TCP


def _sends_by_kernel(socket: SocketView) -> bool:
    """It has sent, and nothing of that by a ring; a connection sends where it lives, and may have moved since."""
    moved = socket.proto == "tcp" and socket.offloaded
    return not moved and socket.counters.get("tx_os_packets", 0) > 0 and not socket.counters.get("tx_packets", 0)


def _socket(core: Core, pid: int, fd: int) -> Iterator[ExplainStep]:
    session, step = _session(core, pid)
    yield step
    if session is None:
        return
    page = views.read_stats(session)
    socket = next((s for s in page.sockets if s.fd == fd), None) if page is not None else None
    flows = sorted((f for f in core.table.of_owner(session.id) if f.fd == fd), key=lambda f: f.kind is Kind.MULTICAST)
    flow = next(iter(flows), None)
    if socket is None and flow is None:
        yield fds.explain_one(pid, fd, bool(page and page.sockets_over))
        return
    if socket is not None:
        yield from _of_page(socket)
        if flow is None and socket.flow_id:
            flow = core.table.flows.get(socket.flow_id)
    if flow is not None:
        yield from _of_flow(core, session, flow)
        yield from (_rules(core, other, session) for other in flows[1:])
    elif socket is not None:
        yield from _without_flow(core, session, socket)
    for text, reason in session.refused_groups(fd):
        yield _no("flow", reason, f"group {text}: {reason.text}")
    if socket is not None:
        yield from _sending(core, session, socket)
        yield _traffic(socket)


def _of_page(socket: SocketView) -> Iterator[ExplainStep]:
    """What the shim says of a socket."""
    reason = Reason.from_slug(socket.reason)
    if socket.reason in FAMILY_REASONS:
        yield _no("family", reason)
        return
    version = 6 if socket.local.startswith("[") and not socket.local.startswith("[::ffff:") else 4
    yield _ok("family", f"{socket.proto} over IPv{version}: a socket that may be offloaded")
    if socket.reason in UNBOUND_REASONS:
        yield _no("bind", reason)
    else:
        none = socket.remote.startswith(("0.0.0.0", "*")) or socket.remote == "[::]:*"
        remote = "" if none else f", connected to {socket.remote}"
        yield _ok("bind", f"bound to {socket.local}{remote}")


def _of_flow(core: Core, session: Session, flow: Flow) -> Iterator[ExplainStep]:
    """What the service knows of a flow."""
    yield _ok("rule", "no rule of the operator keeps it on the kernel")
    places = core.table.rules_of(flow.flow_id)
    if places:
        names = ", ".join(sorted({addr_to_text(key.dst) for _, key in places}))
        yield _ok("address", f"served address(es): {names}")
    else:
        reason, remedy = _now(core, session, flow.reason)
        yield ExplainStep("address", False, reason.text, remedy, _slug(reason))
    ports = {port for port, _ in places}
    found = [found[1] for port in sorted(ports) if (found := core.port(port)) is not None]
    for port in found:
        if port.handle is not None and (refused := port.handle.refused) is not None:
            yield _refused("interface", f"{port.name}: {refused.why}", refused)
        elif port.handle is not None:
            yield _ok("interface", f"{port.name} is served, {_xdp_there(core, flow, port.handle)}")
    rings = {ring.ring_id for ring in core.table.rings_of(flow)}
    for grant in core.grants.of_session(session.id):
        if grant.ring_id in rings:
            yield from _carried(core, grant.port.name, grant.ladder)
            kind = "direct" if grant.handle.direct else f"ring veth ({grant.handle.reason.text})"
            if isinstance(grant.handle, VerbsRingHandle):
                kind = f"a raw packet QP of the program on {grant.handle.device or 'its RDMA device'}"
            yield _ok("ring", f"ring {grant.ring_id} on {grant.port.name}, {kind}")
    yield _rules(core, flow, session)


def _xdp_there(core: Core, flow: Flow, handle: PortHandle) -> str:
    """What XDP does for a flow on its interface, and in which mode, which says nothing of raw packet QPs."""
    rings = core.table.rings_of(flow)
    if rings and all(ring.in_nic for ring in rings):
        return "by raw packet QPs; XDP counts and passes what reaches the kernel"
    mode = "native" if handle.native else "generic"
    return f"XDP in {mode} mode" + (f": {handle.reason.text}" if handle.reason else "")


def _ladders(core: Core, session: Session) -> Iterator[tuple[LinkRow, Ladder]]:
    """Of the rings that the program asked for, and of the interfaces where it need not ask."""
    for link in session.namespace.watcher.links() if session.namespace is not None else ():
        ladder = session.ladders.get(link.ifindex, ())
        if not ladder and session.namespace is not None and session.namespace.served(link) is Reason.BACKEND_CONFIG:
            ladder = forced_home(core.config.backend_of(link.name))
        if ladder:
            yield link, ladder


def _ladder(core: Core, link: LinkRow, ladder: Ladder) -> Iterator[ExplainStep]:
    """As it was climbed last, unless nothing can carry a ring now."""
    if link.up:
        yield from _carried(core, link.name, ladder)
    else:
        yield ExplainStep("ladder", False, f"{link.name}: {Reason.IF_DOWN.text}",
                          _remedy(core, Reason.IF_DOWN, link.name), Reason.IF_DOWN.slug)


def _carried(core: Core, interface: str, ladder: Ladder) -> Iterator[ExplainStep]:
    """Every backend that was tried; that a better one was passed is no fault while another carries the ring."""
    carried = bool(ladder) and ladder[-1].taken and ladder[-1].backend != KERNEL
    for rung in ladder:
        ok = carried or (rung.taken and rung.backend != KERNEL)
        yield ExplainStep("ladder", ok, f"{interface}: {rung.sentence}", _remedy(core, rung.reason, interface),
                          _slug(rung.reason))


def _rules(core: Core, flow: Flow, session: Session) -> ExplainStep:
    name = f"flow {flow.flow_id}" + (f", group {flow.local_text}," if flow.kind is Kind.MULTICAST else "")
    count = core.table.rule_count(flow)
    if not count:
        reason, remedy = _now(core, session, flow.reason)
        return ExplainStep("flow", False, f"{name} has no rule now: {reason.text}", remedy, _slug(reason))
    if (refused := core.unattached(flow)) is not None:
        return _refused("flow", f"{name} has {count} rule(s) that steer nothing: {refused.why}", refused)
    packets, size = core.hits(flow)
    rings = core.table.rings_of(flow)
    if rings and all(ring.in_nic for ring in rings):
        return _ok("flow", f"{name} has {count} rule(s), made in its device by the program. {_past_xdp(core, flow)}: "
                   f"{packets} packets, {size} bytes")
    return _ok("flow", f"{name} has {count} rule(s) in the XDP program: {packets} packets, {size} bytes steered")


def _past_xdp(core: Core, flow: Flow) -> str:
    """What XDP counted of a flow that is steered by a device: a NIC comes before XDP, the software device after it."""
    handles = [grant.handle for grant in core.grants.of_session(flow.owner)]
    if any(isinstance(handle, VerbsRingHandle) and handle.software for handle in handles):
        return "XDP comes before the software device, and passed to it or to the kernel socket"
    return "XDP passed to the kernel socket what the NIC did not take"


def _without_flow(core: Core, session: Session, socket: SocketView) -> Iterator[ExplainStep]:
    """The socket is not steered: the reason belongs to one of the steps."""
    reason, why, remedy = _why(core, session, socket)
    if socket.reason in FAMILY_REASONS + UNBOUND_REASONS or (reason is Reason.NONE and not socket.tx_offloaded):
        return
    steps = {Reason.RULE: "rule", Reason.LOOPBACK: "address", Reason.NOT_OFFLOADABLE_ADDR: "address",
             Reason.NO_ROUTE: "address", Reason.BROADCAST: "address", Reason.NO_INTERFACE: "interface",
             Reason.IF_DOWN: "interface", Reason.IF_GONE: "interface", Reason.IF_BUSY: "interface",
             Reason.IF_UNSUPPORTED: "interface", Reason.ATTACH_FAILED: "interface", Reason.RING_FAILED: "ring",
             Reason.RING_LIMIT: "ring", Reason.MEMLOCK: "ring", Reason.BACKEND_CONFIG: "interface"}
    steps |= dict.fromkeys(VERBS_REASONS, "ring")
    step = steps.get(reason, "flow")
    detail = f" ({socket.reason_detail})" if socket.reason_detail else ""
    if reason is not Reason.NONE:
        yield ExplainStep(step, False, why + detail, remedy, _slug(reason))
    for link, ladder in _ladders(core, session):
        if link.up and ladder[-1].backend == KERNEL:
            yield from _ladder(core, link, ladder)
    if step == "interface" and session.namespace is not None:
        yield from _interfaces(core, session.namespace)


def _interfaces(core: Core, namespace: Namespace) -> Iterator[ExplainStep]:
    for link in namespace.watcher.links():
        if link.name.startswith(OWN_VETHS):
            continue
        reason = namespace.served(link)
        port = namespace.ports.get(link.ifindex)
        if reason is Reason.NONE and port and port.handle and (refused := port.handle.refused) is not None:
            yield _refused("interface", f"{link.name}: {refused.why}", refused)
        elif reason is Reason.NONE:
            yield _ok("interface", f"{link.name} may be served")
        else:
            error = port.error if port is not None else None
            yield ExplainStep("interface", False, f"{link.name}: {error.why if error else reason.text}",
                              error.remedy if error else _remedy(core, reason, link.name))


def _traffic(socket: SocketView) -> ExplainStep:
    count = socket.counters
    ring, kernel = count.get("rx_packets", 0), count.get("rx_os_packets", 0)
    sent, sent_kernel = count.get("tx_packets", 0), count.get("tx_os_packets", 0)
    text = f"received {ring} by the ring and {kernel} by the kernel; sent {sent} and {sent_kernel}"
    if socket.proto == "tcp":   # a stream has no messages that one could count
        text = f"received in {ring} calls by the ring and {kernel} by the kernel; sent in {sent} and {sent_kernel}"
    used = ring + sent > 0
    if not socket.offloaded:
        return ExplainStep("traffic", False, text)
    if not used and kernel:
        return ExplainStep("traffic", False, text + ": the flow is on a ring, but nothing came by it yet",
                           "vmahybrid status shows the ways out of the XDP program")
    return _ok("traffic", text)


def _sending(core: Core, session: Session, socket: SocketView) -> Iterator[ExplainStep]:
    """What is sent is decided per datagram, whatever the receiving flow does; of TCP it is who took each call."""
    ring, kernel = socket.counters.get("tx_packets", 0), socket.counters.get("tx_os_packets", 0)
    if not ring + kernel:
        return
    unit = "calls" if socket.proto == "tcp" else "datagrams"
    text, remedy, slug = f"{ring} {unit} by the ring, {kernel} by the kernel", "", ""
    reason = Reason.from_slug(socket.tx_os_reason)
    if kernel and reason is not Reason.NONE:
        text, remedy, slug = f"{text}, the last because {reason.text}", _now(core, session, reason)[1], reason.slug
    yield ExplainStep("sending", not _sends_by_kernel(socket), text, remedy, slug)


def _address(core: Core, address: bytes, port: int) -> Iterator[ExplainStep]:
    pages = {session.pid: page for session in core.sessions.values() if (page := views.read_stats(session))}
    places = _places(core, address, port, pages)
    others = fds.at(core, address, port, {socket.inode for page in pages.values() for socket in page.sockets})
    rules = list(_operator_rules(core, address, port))
    for pid, fd in places:
        for step in _socket(core, pid, fd):
            if step.step == "rule" and not step.ok and rules:
                yield from rules  # with number and packets, which the socket's own step has not
                rules = []
            else:
                yield step
    for pid, fd in others:
        yield _session(core, pid)[1]
        yield fds.explain_one(pid, fd, pid in pages and pages[pid].sockets_over > 0)
    yield from rules
    if places or others:
        return
    text = f"{addr_to_text(address)}:{port or '*'}"
    yield ExplainStep("session", False, f"no program under the shim has a socket at {text}",
                      "start the program with: vmahybrid run -- COMMAND")
    for namespace in core.namespaces.all.values():
        for link in namespace.watcher.links():
            if address in namespace.addresses(link.ifindex):
                reason = namespace.served(link)
                what = f"{namespace.name}:{link.name} has the address"
                yield _ok("interface", what) if reason is Reason.NONE else _no("interface", reason,
                                                                               f"{what}: {reason.text}")


def _operator_rules(core: Core, address: bytes, port: int) -> Iterator[ExplainStep]:
    """Those that keep packets of ADDR:PORT off rings; none where a flow of a socket has it."""
    if any(flow.owner and _at(flow, address, port) for flow in core.table.flows.values()):
        return
    for rule in views.operator_flows(core):
        if _meets(rule.local, rule.local_port, address, port) or (
                not _is_here(core, address) and _meets(rule.remote, rule.remote_port, address, port)):
            packets, _ = core.hits(rule)
            what = f"{rule.action.value} {PROTO_NAMES[rule.proto]} {rule.local_text} {rule.remote_text}"
            yield _no("rule", Reason.RULE, f"rule {rule.flow_id} of the operator: {what}: {packets} packets")


def _is_here(core: Core, address: bytes) -> bool:
    """An address of this host, which is the remote end of nothing that a ring carries."""
    text = addr_to_text(address)
    return text == "::1" or text.startswith("127.") or any(
        address in namespace.addresses(link.ifindex)
        for namespace in core.namespaces.all.values() for link in namespace.watcher.links())


def _at(flow: Flow, address: bytes, port: int) -> bool:
    return flow.local_port == port and (ANY_ADDR in (address, flow.local) or flow.local == address)


def _places(core: Core, address: bytes, port: int, pages: Mapping[int, StatsPage]) -> list[tuple[int, int]]:
    """(pid, fd) of the sockets there: of those with flows, and of the others that the programs' pages have, a few."""
    flows = [f for f in core.table.flows.values() if f.owner in core.sessions and _at(f, address, port)]
    # a TCP port has a flow without a descriptor
    found = dict.fromkeys((core.sessions[f.owner].pid, f.fd) for f in flows if f.fd > 0 or f.proto != IPPROTO_TCP)
    most = max(len(found), PLACES_SHOWN)
    ends = {(address, port), (ANY_ADDR, port)} if port else {(address, 0)} - {(ANY_ADDR, 0)}
    for pid, page in pages.items():
        found.update(((pid, socket.fd), None) for socket in page.sockets
                     if parse_endpoint("socket", socket.local) in ends)
    return list(found)[:most]


def _meets(end: bytes, end_port: int, address: bytes, port: int) -> bool:
    """Does one end of a rule name this endpoint? An end that is any:any names nothing."""
    return (end, end_port) != (ANY_ADDR, 0) and _overlap((end, end_port), (address, port))
