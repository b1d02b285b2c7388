"""A program's ring: the ladder of backends is climbed down for it, and what was found on each rung is kept."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from vmahybrid.contracts import lib
from vmahybrid.errors import Refused, VmahybridError
from vmahybrid.service.backend import RingHandle, RingSizes
from vmahybrid.service.backend_verbs import VerbsRingHandle
from vmahybrid.service.grants import Grant
from vmahybrid.service.ladder import (
    VERBS,
    XDP,
    Asked,
    Ladder,
    Rung,
    bottom,
    on_kernel,
    verbs_rung,
    xdp_forbidden,
    xdp_refused,
)
from vmahybrid.service.messages import event
from vmahybrid.service.ports import Port
from vmahybrid.steering.reasons import Reason
from vmahybrid.steering.table import refuse

if TYPE_CHECKING:
    from vmahybrid.service.namespaces import Namespace
    from vmahybrid.service.session import Session

log = logging.getLogger("vmahybrid.service")

MAKING_SECONDS = 1.0


async def grant_ring(session: Session, body: Any, namespace: Namespace) -> Grant:
    """The ring that a RING request gets. Raises Refused with the reason of the rung that decided, OSError."""
    core = session.core
    sizes = core.grants.sizes(core.config, body.frames, body.rx_size, body.tx_size, body.memory)
    port = await namespace.port_for(body.ifindex)
    if body.lane >= lib.VMH_LANES:
        raise Refused("ring", f"lane {body.lane}: there are {lib.VMH_LANES}", "", int(Reason.RING_LIMIT))
    if any(grant.port is port and grant.lane == body.lane for grant in core.grants.of_session(session.id)):
        raise Refused("ring", f"this program has a ring on {port.name} already", "", int(Reason.RING_FAILED))
    backend, asked = core.config.backend_of(port.name), Asked.of(body)
    port.asked_verbs |= asked.usable
    core.grants.admit(core.config, sizes)
    try:
        handle, ladder = await _climb(session, namespace, port, sizes, backend, asked)
    finally:
        core.grants.settle()
    _remember(session, port, ladder)
    if handle is None:
        raise _refusal(port, backend, ladder)
    return core.grants.add(session.id, session.pid, port, handle, ladder, sizes.frames, body.lane)


async def _climb(session: Session, namespace: Namespace, port: Port, sizes: RingSizes, backend: str,
                 asked: Asked) -> tuple[RingHandle | None, Ladder]:
    """A handle, or None and a ladder that ends at the kernel. Of the xdp rung, errors other than of the interface are
    raised as they are: they are about this ring and not about the backend."""
    core, first = session.core, verbs_rung(backend, asked)
    if first.taken:
        await _attach_beside(namespace, port)
        core.port_attached(namespace, port)
        link = namespace.link(port.id.ifindex)
        if link is None:
            raise refuse(f"interface {port.name}", Reason.IF_GONE)
        return VerbsRingHandle(link.ifindex, link.mtu, link.mac, asked.device), (first,)
    if (forbidden := xdp_forbidden(backend)) is not None:
        return None, on_kernel((first, forbidden))
    try:
        await namespace.open_port(port.id.ifindex)
        core.port_attached(namespace, port)
        making = asyncio.to_thread(port.attached().grant, sizes, core.config["ring.direct"] == "first")
        handle = await _made(session, making)
    except RuntimeError as error:  # the namespace was left meanwhile
        raise refuse(f"interface {port.name}", Reason.IF_GONE) from error
    except VmahybridError as error:
        if isinstance(error, Refused):
            _remember(session, port, on_kernel((first, xdp_refused(error))))
        raise
    native = port.handle is not None and port.handle.native
    text = ("native" if native else "generic") + " mode" + ("" if handle.direct else ", by a ring veth")
    text += ", huge pages" if handle.huge_pages else ""
    return handle, (first, Rung(XDP, Reason.NONE, text))


async def _made(session: Session, making: Coroutine[Any, Any, RingHandle]) -> RingHandle:
    """Packet memory takes a while where there is much of it and little processor. The program hears that it is being
    made: it waits for three seconds only for one of whom it hears nothing."""
    task = asyncio.ensure_future(making)
    try:
        while not (await asyncio.wait({task}, timeout=MAKING_SECONDS))[0]:
            session.notify(event(lib.VMH_EV_MAKING))
    finally:
        task.cancel()  # nothing to one that is done
    return task.result()


async def _attach_beside(namespace: Namespace, port: Port) -> None:
    """The program that counts and passes what reaches the kernel's path. A raw packet QP works without it."""
    try:
        await namespace.open_port(port.id.ifindex)
    except Refused as error:
        if port.handle is None and port.error is None:
            raise  # the interface is not served, whatever the backend
        log.warning("interface %s:%s: the flows of its raw packet QPs have no rules in XDP: %s", namespace.name,
                    port.name, error)


def _remember(session: Session, port: Port, ladder: Ladder) -> None:
    port.ladder = session.ladders[port.id.ifindex] = ladder


def _refusal(port: Port, backend: str, ladder: Ladder) -> Refused:
    reason = bottom(ladder)
    why = "; ".join(rung.sentence for rung in ladder if not rung.taken)
    remedy = reason.remedy.replace('"IF"', f'"{port.name}"')
    if backend == VERBS:
        remedy = f'{remedy}; backend = "auto" allows AF_XDP'.removeprefix("; ")
    return Refused(f"ring on {port.name}", why, remedy, int(reason))
