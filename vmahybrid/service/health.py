"""Health as sentences: empty if all is well."""

from __future__ import annotations

from vmahybrid.service.core import Core
from vmahybrid.steering.reasons import Reason


def sentences(core: Core) -> list[str]:
    """What is wrong now, each with what to do where something can be done."""
    found = list(core.health.values())
    if not core.ready:
        found.append("The service is stopping." if core.closing else "The service is not ready yet.")
    for namespace in core.namespaces.all.values():
        for port in namespace.ports.values():
            link = namespace.link(port.id.ifindex)
            if link is not None and not link.up and (port.handle is not None or port.explicit):
                found.append(f"Interface {namespace.name}:{port.name} is down or has no carrier, the kernel serves its "
                             f"flows: {Reason.IF_DOWN.remedy.replace('IF', port.name)}.")
                continue
            if port.handle is None and port.error is not None:
                found.append(f"Interface {namespace.name}:{port.name} can't be served: {port.error}.")
            elif port.handle is None and port.explicit:
                found.append(f"Interface {namespace.name}:{port.name} is named but not served: {port.reason.text}.")
    limits = core.config
    if len(core.grants.all) >= limits["limits.rings"]:
        found.append(f"All {limits['limits.rings']} rings are granted: {Reason.RING_LIMIT.remedy}.")
    if core.counters["internal_errors_total"]:
        found.append(f"{core.counters['internal_errors_total']} internal error(s) since the start: see the log.")
    return found
