"""The peers of a program's TCP connections on rings, which are told when it was killed."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterable

from vmahybrid.errors import VmahybridError
from vmahybrid.net.tcpask import Names
from vmahybrid.service.statsfile import StatsFile
from vmahybrid.stats.page import open_connections
from vmahybrid.steering.flow import Flow, Kind

log = logging.getLogger("vmahybrid.service")


def peers_of(flows: Iterable[Flow], stats: StatsFile | None, pid: int) -> set[Names]:
    """``flows``: that the program had to the end. Connections have a flow of their own when they were adopted or `ss`
    shows them; of younger ones the statistics page says which there were at the program's ports."""
    tcp = [flow for flow in flows if flow.proto == socket.IPPROTO_TCP]
    ports = {flow.local_port for flow in tcp if flow.kind is Kind.THREE}
    peers = {Names(f.local, f.local_port, f.remote, f.remote_port) for f in tcp if f.kind is Kind.FIVE}
    if ports and stats is not None and stats.fd >= 0:
        peers |= {names for names in _untold(stats, pid) if names.lport in ports}
    return peers


def _untold(stats: StatsFile, pid: int) -> list[Names]:
    try:
        return open_connections(stats.fd)
    except (OSError, VmahybridError) as error:  # the program could write what it liked
        log.debug("process %d: statistics page: %s", pid, error)
        return []
