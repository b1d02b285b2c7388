"""The service's objects as the plain data of view.py."""

from __future__ import annotations

import logging

from vmahybrid.config.catalogue import load
from vmahybrid.contracts import addr_to_text
from vmahybrid.errors import VmahybridError
from vmahybrid.service.backend_verbs import VerbsRingHandle
from vmahybrid.service.core import Core
from vmahybrid.service.grants import Grant
from vmahybrid.service.ladder import KERNEL, VERBS, XDP, Ladder, bottom, forced_home, xdp_forbidden
from vmahybrid.service.namespaces import LinkRow, Namespace
from vmahybrid.service.ports import Port
from vmahybrid.service.rdma import Device
from vmahybrid.service.session import Session
from vmahybrid.service.view import FlowView, InterfaceView, ProcessView, RingView, RungView
from vmahybrid.stats.page import StatsPage, read_page
from vmahybrid.steering.flow import PROTO_NAMES, Flow, FlowAction, Source
from vmahybrid.steering.reasons import Reason

log = logging.getLogger("vmahybrid.service")
NO_APPLICATION_ID = load()["VMA_APPLICATION_ID"].default  # what a program says that has none


def rung_views(ladder: Ladder) -> list[RungView]:
    return [RungView(backend=rung.backend, taken=rung.taken, reason=rung.reason.slug, text=rung.sentence,
                     remedy=rung.reason.remedy) for rung in ladder]


def _xdp_carries(grants: list[Grant], wanted: str) -> bool:
    """Or would: not beside raw packet QPs alone, nor where the configuration rules it out, though the program that
    counts is attached."""
    return any(not grant.verbs for grant in grants) if grants else xdp_forbidden(wanted) is None


def _not_better(port: Port, on_xdp: bool) -> Reason:
    """Of an interface that is up and attached. How a program is attached that only counts says nothing of rings."""
    if port.handle is not None and port.handle.refused is not None:
        return Reason.from_code(port.handle.refused.reason)
    if on_xdp and port.handle is not None:
        return port.handle.reason
    return bottom(port.ladder) if port.ladder and port.ladder[-1].backend == KERNEL else Reason.NONE


def _unasked(served: Reason, known: Device | None, wanted: str) -> Ladder:
    """What is known of the ladder before a program asked."""
    forbidden = xdp_forbidden(wanted) if served is Reason.NONE else None
    return (*(known.ladder if known else ()), *((forbidden,) if forbidden else ()))


def _asked(port: Port | None, grants: list[Grant]) -> Ladder:
    """Of the ring that was asked for last; if that is gone and others are left on another backend, of theirs."""
    ladder = port.ladder if port is not None else ()
    taken = [grant.ladder for grant in grants if grant.ladder]
    if not ladder or not taken or ladder[-1].backend in {KERNEL, *(other[-1].backend for other in taken)}:
        return ladder
    return taken[-1]


def interface_view(core: Core, namespace: Namespace, link: LinkRow, port: Port | None, rules: int) -> InterfaceView:
    grants = [core.grants.all[ring_id] for ring_id in sorted(port.ring_ids)] if port is not None else []
    devices = [grant.handle.device for grant in grants if isinstance(grant.handle, VerbsRingHandle)]
    known, wanted = namespace.rdma.of(link.ifindex), core.config.backend_of(link.name)
    handle = port.handle if port is not None else None
    refused = port.error if port is not None and handle is None else handle.refused if handle is not None else None
    on_xdp = handle is not None and refused is None and _xdp_carries(grants, wanted)
    reason = _not_better(port, on_xdp) if port and handle is not None and link.up else namespace.served(link)
    forced = forced_home(wanted) if not grants and namespace.served(link) is Reason.BACKEND_CONFIG else ()
    unasked = _unasked(namespace.served(link), known, wanted)
    view = InterfaceView(
        name=link.name, ifindex=link.ifindex, netns=namespace.name,
        backend=VERBS if devices else XDP if on_xdp else KERNEL,
        mode="none" if handle is None or not on_xdp else "native" if handle.native else "generic", zerocopy=False,
        driver=handle.driver if handle else "", mtu=link.mtu, queues=handle.queues if handle else 0, up=link.up,
        attached=handle is not None and handle.attached, reason=reason.slug,
        reason_text=refused.why if refused else reason.text, remedy=refused.remedy if refused else reason.remedy,
        addresses=[addr_to_text(address) for address in namespace.addresses(link.ifindex)],
        outs=handle.outs() if handle else {}, rings=len(grants), rules=rules, hook=handle.hook if handle else "",
        switches=handle.switches if handle else 0, switch_failures=handle.switch_failures if handle else 0,
        wanted=wanted,
        device=next(iter(devices), known.name if known is not None else ""),
        ladder=rung_views(forced or _asked(port, grants) or unasked))
    if handle is None and reason is Reason.NONE:
        view.reason_text, view.remedy = "nobody has asked for a ring here yet", ""
    return view


def ring_view(grant: Grant, namespace_name: str, page: StatsPage | None) -> RingView:
    handle, port = grant.handle, grant.port
    geometry = handle.geometry
    verbs = isinstance(handle, VerbsRingHandle)
    native = port.handle is not None and port.handle.native
    own = next((ring for ring in page.rings if ring.ring_id == grant.ring_id), None) if page else None
    try:
        kernel = grant.kernel_stats()
    except OSError:
        kernel = {}
    return RingView(
        ring_id=grant.ring_id, pid=grant.pid, interface=port.name, ifindex=port.id.ifindex, netns=namespace_name,
        kind=VERBS if verbs else "direct" if handle.direct else "veth",
        mode="none" if verbs else "native" if native else "generic", zerocopy=handle.zerocopy,
        queues=handle.queues, frames=geometry["frames"], frame_size=geometry["frame_size"],
        rx_size=geometry["rx_size"], tx_size=geometry["tx_size"], reason=handle.reason.slug,
        stats=own.stats if own else {}, kernel=kernel, guard=handle.guard_outs(), backend=VERBS if verbs else XDP,
        device=handle.device if isinstance(handle, VerbsRingHandle) else "", ladder=rung_views(grant.ladder),
        lane=grant.lane)


def flow_view(core: Core, flow: Flow) -> FlowView:
    session = core.sessions.get(flow.owner)
    places = {port for port, _ in core.table.rules_of(flow.flow_id)}
    names = {found[1].name for port in places if (found := core.port(port)) is not None}
    at = core.table.rings_of(flow)
    backends = sorted({VERBS if ring.in_nic else XDP for ring in at})
    action, reason = _action(core, flow), flow.reason
    rings = [ring.ring_id for ring in at]
    if (refused := core.unattached(flow)) is not None:
        action, reason, rings = FlowAction.KERNEL.value, Reason.from_code(refused.reason), []
    packets, size = core.hits(flow)
    return FlowView(
        flow_id=flow.flow_id, kind=flow.kind.value, action=action, source=flow.source.value,
        proto=PROTO_NAMES[flow.proto], local=flow.local_text, remote=flow.remote_text,
        interface=next(iter(names)) if len(names) == 1 else flow.interface, netns=flow.netns,
        pid=session.pid if session else 0, comm=session.comm if session else "", fd=flow.fd,
        ring_id=rings[0] if len(rings) == 1 else 0, reason=reason.slug, rules=core.table.rule_count(flow),
        packets=packets, bytes=size, created=flow.created,
        backend=", ".join(backends) if action == FlowAction.RING.value else XDP if action == "drop" else KERNEL)


def _action(core: Core, flow: Flow) -> str:
    if flow.action is FlowAction.RING and not core.table.rule_count(flow):
        return FlowAction.KERNEL.value  # asked for a ring, has none now: the reason says why
    return flow.action.value


def process_view(core: Core, session: Session, page: StatsPage | None) -> ProcessView:
    flows = [flow.flow_id for flow in core.table.of_owner(session.id)]
    rings = [grant.ring_id for grant in core.grants.of_session(session.id)]
    return ProcessView(
        pid=session.pid, uid=session.uid, comm=session.comm, cmdline=session.cmdline, profile=session.profile,
        application_id="" if session.app_id == NO_APPLICATION_ID else session.app_id,
        netns=session.namespace.name if session.namespace else "", session=session.id, started=session.started,
        offloaded_sockets=sum(socket.offloaded for socket in page.sockets) if page else len(flows),
        sockets=len(page.sockets) if page else len(flows), rings=rings, flows=flows,
        reason=page.reason if page else Reason.NONE.slug, log_level=page.log_level if page else 0,
        log_details=page.log_details if page else 0, sockets_over=page.sockets_over if page else 0,
        homecomings=page.homecomings if page else 0, pid_ns=session.pid_ns, ns_pid=session.ns_pid,
        orders_waiting=page.orders_waiting if page else False)


def read_stats(session: Session) -> StatsPage | None:
    """The program's statistics page, None if it gave none or it can't be read."""
    if session.stats is None or session.stats.fd < 0:
        return None
    try:
        return read_page(session.stats.fd, session.pid)
    except (OSError, VmahybridError) as error:
        log.debug("%s: statistics page: %s", session, error)
        return None


def operator_flows(core: Core) -> list[Flow]:
    return [flow for flow in core.table.flows.values() if flow.source is Source.OPERATOR]
