"""From a ring that was made to one that carries packets: at once, or when its program has mapped it (RING_MAPPED)."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from vmahybrid.errors import Refused, VmahybridError
from vmahybrid.service.control import ConnectionLost
from vmahybrid.service.grants import Grant
from vmahybrid.steering.reasons import Reason
from vmahybrid.steering.table import refuse

if TYPE_CHECKING:
    from vmahybrid.service.namespaces import Namespace
    from vmahybrid.service.session import Session

log = logging.getLogger("vmahybrid.service")

MAP_SECONDS = 5.0  # a shim does it at once; an unbound socket is not left with a program that does not


def use(session: Session, grant: Grant, namespace: Namespace) -> None:
    """Flows may be steered to it from now on."""
    core, name = session.core, grant.port.name
    core.table.add_ring(grant.ref)
    core.converge([session.id])
    core.counters["grants_total"] += 1
    core.events.add("ring-granted", f"ring {grant.ring_id} on {name} for {session}", ring_id=grant.ring_id,
                    pid=session.pid, interface=name, backend=grant.ladder[-1].backend)
    log.info("%s: ring %d on %s:%s; %s", session, grant.ring_id, namespace.name, name,
             "; ".join(rung.sentence for rung in grant.ladder))


def expect(session: Session, grant: Grant, namespace: Namespace) -> None:
    """Give a program MAP_SECONDS to map a ring; nothing is steered to it meanwhile."""

    def too_late() -> None:
        if session.core.drop_ring(grant, namespace) is not None:
            log.warning("%s: ring %d on %s was not mapped within %.0f s: released", session, grant.ring_id,
                        grant.port.name, MAP_SECONDS)

    grant.unmapped = session.loop.call_later(MAP_SECONDS, too_late)


async def bind(session: Session, ring_id: int, namespace: Namespace) -> Grant:
    """The program has mapped it. A ring that can't be bound is released before the error is raised.

    Raises Refused (NOT_OWNER, RING_FAILED, IF_GONE), OSError of bind(2), ConnectionLost."""
    core = session.core
    grant = core.grants.all.get(ring_id)
    if grant is None or grant.session != session.id:
        if ring_id in session.released:
            raise Refused("ring", f"ring {ring_id} was released before it was mapped", "", int(Reason.RING_FAILED))
        raise Refused("ring", f"ring {ring_id} is not this program's", "", int(Reason.NOT_OWNER))
    if grant.unmapped is None:
        raise Refused("ring", f"ring {ring_id} is bound", "", int(Reason.RING_FAILED))
    grant.unmapped.cancel()
    grant.unmapped = None
    try:
        await namespace.worker.call_async(grant.handle.bind)
    except (OSError, VmahybridError):
        closing = core.drop_ring(grant, namespace)
        if closing is not None:
            await asyncio.wait([closing])
        raise
    if core.grants.all.get(ring_id) is not grant:  # interface or program went meanwhile
        raise refuse(f"interface {grant.port.name}", Reason.IF_GONE)
    if session.connection.lost:
        core.drop_ring(grant, namespace)
        raise ConnectionLost
    return grant
