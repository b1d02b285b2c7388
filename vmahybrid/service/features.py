"""What this kernel can do, as far as the service asks it: shown in /v1/status."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable

from vmahybrid.net.netns import SO_PEERPIDFD
from vmahybrid.service.grace import grace_by_membarrier
from vmahybrid.service.proof import netns_cookie


def features() -> dict[str, object]:
    """Probed, never guessed from the version. True: there."""
    return {"kernel": os.uname().release, "peer_pidfd": _peer_pidfd(), "netns_cookie": _works(netns_cookie),
            "membarrier": grace_by_membarrier()}


def _works(probe: Callable[[], object]) -> bool:
    try:
        probe()
    except OSError:
        return False
    return True


def _peer_pidfd() -> bool:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        try:
            os.close(int.from_bytes(left.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, 4), sys.byteorder))
        except OSError:
            return False
    return True
