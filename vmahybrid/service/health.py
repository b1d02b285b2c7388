"""Health as sentences: empty if all is well."""

from __future__ import annotations

from vmahybrid.config.interface_glob import InterfaceGlob
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
                by = "its rings wait for it" if port.waiting is not None else "the kernel serves its flows"
                found.append(f"Interface {namespace.name}:{port.name} is down or has no carrier, {by}: "
                             f"{Reason.IF_DOWN.remedy.replace('IF', port.name)}.")
                continue
            if port.handle is None and port.error is not None and port.asked_verbs:
                found.append(f"Interface {namespace.name}:{port.name} has no AF_XDP rings, only raw packet QPs: "
                             f"{port.error}.")
            elif port.handle is None and port.error is not None:
                found.append(f"Interface {namespace.name}:{port.name} can't be served: {port.error}.")
            elif port.handle is not None and (refused := port.handle.refused) is not None:
                found.append(f"Interface {namespace.name}:{port.name} can't be served now, the kernel has its flows: "
                             f"{refused}.")
            elif port.handle is None and port.explicit:
                found.append(f"Interface {namespace.name}:{port.name} is named but not served: {port.reason.text}.")
    found += absent(core)
    limits = core.config
    if len(core.grants.all) >= limits["limits.rings"]:
        found.append(f"All {limits['limits.rings']} rings are granted: {Reason.RING_LIMIT.remedy}.")
    if core.counters["internal_errors_total"]:
        found.append(f"{core.counters['internal_errors_total']} internal error(s) since the start: see the log.")
    return found


def absent(core: Core) -> list[str]:
    """Interfaces that were named (not by a pattern) and are in no namespace where they were to be."""
    found: list[str] = []
    for text in core.config["interfaces"]:
        glob = InterfaceGlob.parse(text)
        there = any(glob.matches(namespace.name, link.name)
                    for namespace in core.namespaces.all.values() for link in namespace.watcher.links())
        # One that was attached and went has a sentence of its own.
        told = any(key.startswith("interface ") and glob.matches(*key.removeprefix("interface ").rsplit(":", 1))
                   for key in core.health)
        if glob.literal and not there and not told:
            found.append(f"Interface {text} was named, but does not exist: it is attached when it appears; ip link "
                         "shows the interfaces, [NETNS:]IF names one of another namespace.")
    return found
