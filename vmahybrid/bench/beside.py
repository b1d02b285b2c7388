"""The software verbs device beside the kernel's UDP, in a few seconds: what `vmahybrid doctor` says of this machine."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass

from vmahybrid.bench import sockperf
from vmahybrid.bench.latency import served
from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.sockperf import CLIENT_CPU, SERVER_CPU

SECONDS = 1.0  # of each of the four runs


@dataclass(frozen=True)
class Speed:
    """Of sockperf with small messages, both ends spinning."""

    half_rtt_us: float  # p50
    rate: float         # messages per second, one way, received

    def __str__(self) -> str:
        return f"{self.half_rtt_us:.1f} us and {self.rate:,.0f} messages/s"


@dataclass(frozen=True)
class Beside:
    softverbs: Speed
    kernel: Speed

    @property
    def slower(self) -> list[str]:
        """In what the software device loses to the kernel."""
        names = {"half round trip": self.softverbs.half_rtt_us > self.kernel.half_rtt_us,
                 "rate one way": self.softverbs.rate < self.kernel.rate}  # fmt: skip
        return [name for name, loses in names.items() if loses]


def obstacle() -> tuple[str, str]:
    """Why nothing can be measured here and what mends it; empty if it can."""
    if os.geteuid() != 0:
        return "namespaces are root's to make", "as root: vmahybrid softverbs -- vmahybrid doctor"
    if shutil.which("sockperf") is None:
        return "sockperf is not there", "apt-get install sockperf"
    if not os.sched_getaffinity(0) >= {SERVER_CPU, CLIENT_CPU}:
        return f"processors {SERVER_CPU} and {CLIENT_CPU} are needed", "a machine with two"
    return "", ""


def measure(seconds: float = SECONDS) -> Beside:
    """Between two namespaces of its own, on two processors. Raises SandboxError; also where the QP gets no flows."""
    with Sandbox("doctor") as plain, served(softverbs=True) as service:
        box, ring = service.sandbox, service.require_ring
        soft = Speed(sockperf.ping_pong(box, seconds, service, before=ring).p50,
                     sockperf.throughput(box, seconds, service, before=ring).received)  # fmt: skip
        kernel = Speed(sockperf.ping_pong(plain, seconds, nonblocked=True).p50,
                       sockperf.throughput(plain, seconds).received)  # fmt: skip
        return Beside(soft, kernel)
