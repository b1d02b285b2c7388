"""View 4, multicast memberships, and view 5, all sockets of all processes like netstat."""

from collections.abc import Iterator
from typing import Any

from vmahybrid.vma_stats.delta import Reading
from vmahybrid.vma_stats.tables import SEPARATOR

NETSTAT_HEADER = (
    f"{'Proto':<5} {'Offloaded':<9} {'Recv-Q':<20} {'Send-Q':<20} {'Local Address':<22} {'Foreign Address':<21} "
    f"{'State':<11} {'Inode':<10} PID/Program name"
)


def groups_view(sockets: list[dict[str, Any]]) -> Iterator[str]:
    members: dict[str, list[int]] = {}
    for sock in sockets:
        for group in sock["groups"]:
            members.setdefault(group, []).append(sock["fd"])
    if members:
        yield ""
        yield "VMA Group Membership Information"
        yield "Group                fd number"
        yield "------------------------------"
    for group, fds in members.items():
        yield f"{f'[{group}]':<22}" + "".join(f"{fd} " for fd in fds)
    yield SEPARATOR


def offloaded(sock: dict[str, Any]) -> str:
    """Yes, No or Rx only."""
    c = sock["counters"]
    if sock["offloaded"] and c["tx_os_packets"] and not c["tx_packets"]:
        return "Rx only"  # a flow is on a ring, and yet each datagram was sent by the kernel
    return "Yes" if sock["offloaded"] else "No"


def _row(sock: dict[str, Any], on_ring: str, recv_q: int, send_q: int, process: str) -> str:
    return (
        f"{sock['proto']:<5} {on_ring:<9} {recv_q:<20} {send_q:<20} {sock['local']:<22} {sock['remote']:<21} "
        f"{sock['state']:<11} {sock['inode']:<10} {process}"
    )


def netstat_row(sock: dict[str, Any]) -> str:
    c = sock["counters"]
    process = f"{sock['pid']}/{sock['comm'] or '-'}"
    return _row(sock, offloaded(sock), c["rx_ready_bytes"], c["tx_ready_bytes"], process)


def passthrough_row(sock: dict[str, Any], process: dict[str, Any]) -> str:
    """A socket of the kernel that has no slot: see passthrough.py."""
    who = f"{process['pid']}/{process['comm'] or '-'}"
    return _row(sock, "Yes" if sock["offloaded"] else "No", sock["recv_q"], sock["send_q"], who)


def netstat_view(readings: list[Reading]) -> Iterator[str]:
    """A socket without an inode is one whose slot is just being filled."""
    yield NETSTAT_HEADER
    for reading in readings:
        kernel = {sock["inode"] for sock in reading.get("passthrough", ())}  # it knows their states
        for sock in reading["sockets"]:
            if sock["inode"] and sock["inode"] not in kernel:
                yield netstat_row(sock)
        for sock in reading.get("passthrough", ()):
            yield passthrough_row(sock, reading["process"])
