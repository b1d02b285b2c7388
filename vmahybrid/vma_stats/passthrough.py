"""Sockets of a process that have no slot in its statistics page, from /proc as netstat(8) reads them.

The shim counts UDP sockets, and TCP sockets that may come to a ring. The others are plain sockets of the kernel, and so
are those that are over VMA_STATS_FD_NUM, unless a flow of theirs is on a ring.
"""

import os
import re
import socket
import sys
from collections.abc import Iterator
from typing import Any

# include/net/tcp_states.h, in the words of the monitoring manual
_TCP_STATES = (
    "", "ESTABLISHED", "SYN_SENT", "SYN_RCVD", "FIN_WAIT_1", "FIN_WAIT_2", "TIME_WAIT", "CLOSED", "CLOSE_WAIT",
    "LAST_ACK", "LISTEN", "CLOSING", "SYN_RCVD",
)  # fmt: skip
_TABLES = ("tcp", "tcp6", "udp", "udp6", "raw", "raw6")
_SOCKET = re.compile(r"socket:\[(\d+)\]")
_UNCONNECTED = {"0.0.0.0:0", "[::]:0"}


def sockets_of(pid: int, known: set[int]) -> list[dict[str, Any]]:
    """One row per IP socket whose inode is not ``known``, in the order of the descriptors.

    Raises PermissionError where the descriptors are another user's; a process that ended has none.
    """
    try:
        fds = {inode: fd for fd, inode in _descriptors(pid) if inode not in known}
    except FileNotFoundError:
        return []
    if not fds:
        return []
    rows = [row | {"fd": fds[row["inode"]]} for table in _TABLES for row in _table(pid, table) if row["inode"] in fds]
    return sorted(rows, key=lambda row: int(row["fd"]))


def uncounted(reading: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of a reading of /v1/stats that the kernel alone serves, so that nothing counts their traffic. None where
    the descriptors are another user's."""
    shown = {sock["fd"] for sock in reading["sockets"]}
    try:
        others = sockets_of(reading["process"]["pid"], {sock["inode"] for sock in reading["sockets"]})
    except PermissionError:
        return []
    return [sock for sock in others if sock["fd"] not in shown]


def lacks(pid: int, fd: int) -> bool:
    """Whether the process has no such descriptor; False where the user may not look."""
    try:
        return str(fd) not in os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False


def _descriptors(pid: int) -> Iterator[tuple[int, int]]:
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            match = _SOCKET.fullmatch(os.readlink(f"/proc/{pid}/fd/{name}"))
        except FileNotFoundError:
            continue
        if match:
            yield int(name), int(match[1])


def _table(pid: int, table: str) -> Iterator[dict[str, Any]]:
    try:
        with open(f"/proc/{pid}/net/{table}") as lines:
            next(lines, "")
            for line in lines:
                yield _row(table.rstrip("6"), line.split())
    except OSError:  # no IPv6, or the process has ended
        return


def _row(proto: str, words: list[str]) -> dict[str, Any]:
    """``sl local remote state tx:rx timer retransmits uid timeout inode``."""
    remote = _endpoint(words[2])
    sent, received = (int(part, 16) for part in words[4].split(":"))
    number = int(words[3], 16)
    state = _TCP_STATES[number] if proto == "tcp" and number < len(_TCP_STATES) else ""
    return {
        "proto": proto, "offloaded": False, "inode": int(words[9]), "state": state, "local": _endpoint(words[1]),
        "remote": remote.removesuffix("0") + "*" if remote in _UNCONNECTED else remote,
        "recv_q": received, "send_q": sent,
    }  # fmt: skip


def _endpoint(text: str) -> str:
    """``0100007F:1F90`` is 127.0.0.1:8080: 32-bit words in the machine's order, the port as a number."""
    address, port = text.split(":")
    raw = b"".join(int(address[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(address), 8))
    host = socket.inet_ntop(socket.AF_INET, raw) if len(raw) == 4 else f"[{socket.inet_ntop(socket.AF_INET6, raw)}]"
    return f"{host}:{int(port, 16)}"
