"""Who else is bound to the port of a flow.

The kernel copies multicast to every socket on the port, and gives unicast of a port shared by SO_REUSEADDR to the
newest socket. A ring can do neither for sockets that are not its own, so such flows go home.
"""

from __future__ import annotations

from vmahybrid.contracts import addr_to_text
from vmahybrid.net.sockdiag import Bound
from vmahybrid.steering.flow import Flow, Kind
from vmahybrid.steering.keys import ANY_ADDR


def competitors(flow: Flow, bound: list[Bound], own: set[int]) -> list[Bound]:
    """Sockets other than ``own`` (inodes) that the kernel would serve beside or before this flow's."""
    others = [b for b in bound if b.inode not in own]
    if flow.kind is Kind.MULTICAST:
        return [b for b in others if b.local in (ANY_ADDR, flow.local) and b.remote == ANY_ADDR]
    if flow.kind is Kind.FIVE:  # only a socket connected to the very same peer scores as high
        return [b for b in others if b.remote == flow.remote and b.local == flow.local]
    if flow.wildcard:
        return others
    return [b for b in others if b.local == flow.local or b.remote != ANY_ADDR]


def describe(bound: list[Bound]) -> str:
    return ", ".join(f"inode {b.inode} of uid {b.uid} at {addr_to_text(b.local)}" for b in bound)
