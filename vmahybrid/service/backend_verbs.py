"""A raw packet QP behind the service's interface for rings: the program makes and owns it, the service gives leave.

Memory, queues and NIC rules are the program's. The service keeps the table: its rules for such a ring say "pass" in the
XDP program, so that a frame which reaches the kernel's path is counted and goes to the kernel socket.
"""

from __future__ import annotations

from typing import Any

from vmahybrid.contracts import lib
from vmahybrid.steering.keys import Act, GrantKey
from vmahybrid.steering.mirror import MirrorTarget
from vmahybrid.steering.reasons import Reason

SOFTWARE_PREFIX = "sv_"  # device names of softverbs


class VerbsRingHandle:
    """See backend.RingHandle. Without descriptors; geometry is zero."""

    def __init__(self, ifindex: int, mtu: int, mac: bytes, device: str) -> None:
        self.device = device
        self.direct, self.reason = True, Reason.NONE
        self.act, self.target = Act.PASS, 0
        self.umem_fd = -1
        self.xsk_fds: list[int] = []
        self.bind_after, self.queues = False, 0
        self.software = device.startswith(SOFTWARE_PREFIX)
        self.zerocopy, self.huge_pages = not self.software, False
        self.geometry = dict.fromkeys(("frames", "frame_size", "rx_size", "tx_size", "fill_size", "comp_size"), 0)
        self.grants: MirrorTarget[GrantKey, int] | None = None
        self._reply = {"ifindex": ifindex, "mtu": mtu, "mac": mac, "kind": lib.VMH_RING_VERBS, "nqueues": 0}

    def reply_fields(self) -> dict[str, Any]:
        return {**self._reply, **self.geometry}

    def bind(self) -> None:
        """Nothing: there are no sockets."""

    def kernel_stats(self) -> dict[str, int]:
        return {}

    def guard_outs(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        """Nothing: the kernel takes QP and rules back with the program's device file."""
