"""View 4, multicast memberships, and view 5, all sockets of all processes like netstat."""

from collections.abc import Iterator
from typing import Any

from vmahybrid.printable import clean
from vmahybrid.vma_stats.delta import Reading
from vmahybrid.vma_stats.tables import SEPARATOR

NETSTAT_HEADER = (
    f"{'Proto':<5} {'Offloaded':<9} {'Recv-Q':<20} {'Send-Q':<20} {'Local Address':<22} {'Foreign Address':<21} "
    f"{'State':<11} {'Inode':<10} {'PID/Program name':<24} Sent by"
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


def sent_by(sock: dict[str, Any]) -> str:
    """Who sent what it has sent: a flow may be on a ring, and yet each datagram sent by the kernel."""
    ring, kernel = sock["counters"]["tx_packets"], sock["counters"]["tx_os_packets"]
    return "both" if ring and kernel else "ring" if ring else "kernel" if kernel else "-"


def _row(sock: dict[str, Any], recv_q: int, send_q: int, process: str, sender: str) -> str:
    on_ring = "Yes" if sock["offloaded"] else "No"
    return (
        f"{sock['proto']:<5} {on_ring:<9} {recv_q:<20} {send_q:<20} {sock['local']:<22} {sock['remote']:<21} "
        f"{sock['state']:<11} {sock['inode']:<10} {process:<24} {sender}"
    )


def _program(of: dict[str, Any]) -> str:
    return f"{of['pid']}/{clean(of['comm']) or '-'}"


def netstat_row(sock: dict[str, Any]) -> str:
    c = sock["counters"]
    return _row(sock, c["rx_ready_bytes"], c["tx_ready_bytes"], _program(sock), sent_by(sock))


def passthrough_row(sock: dict[str, Any], process: dict[str, Any], sender: str) -> str:
    """A socket of the kernel: see passthrough.py."""
    return _row(sock, sock["recv_q"], sock["send_q"], _program(process), sender)


def netstat_view(readings: list[Reading]) -> Iterator[str]:
    """A socket without an inode is one whose slot is just being filled."""
    yield NETSTAT_HEADER
    for reading in readings:
        kernel = {sock["inode"] for sock in reading.get("passthrough", ())}  # it knows their states
        senders = {sock["inode"]: sent_by(sock) for sock in reading["sockets"]}
        for sock in reading["sockets"]:
            if sock["inode"] and sock["inode"] not in kernel:
                yield netstat_row(sock)
        for sock in reading.get("passthrough", ()):
            yield passthrough_row(sock, reading["process"], senders.get(sock["inode"], "-"))
