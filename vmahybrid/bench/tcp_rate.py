"""TCP connections per second: opened, 80 bytes, 64 bytes back, closed; one at a time."""

from __future__ import annotations

import signal
import statistics
from collections.abc import Callable
from functools import partial

from vmahybrid.bench import sockperf
from vmahybrid.bench.figures import Part, interleave, median_figure
from vmahybrid.bench.latency import bench_program
from vmahybrid.bench.sandbox import SandboxError, Side, run_command
from vmahybrid.bench.ways import KERNEL, OFFLOAD, Place, places

PART = "tcp-rate"
PORT = 12347
# Without them the kernel's client has no port left after a second.
SYSCTLS = ("net.ipv4.tcp_tw_reuse=1", "net.ipv4.tcp_max_tw_buckets=256")


def kernel_opened(side: Side) -> int:
    """Connections that the kernel of this namespace has opened so far (RFC 4022: tcpActiveOpens)."""
    names, values = (line.split() for line in run_command(*side.command(["cat", "/proc/net/snmp"])).splitlines()
                     if line.startswith("Tcp:"))
    return int(values[names.index("ActiveOpens")])


def open_and_close(place: Place, seconds: float, calls: str) -> float:
    """Connections per second; ``calls``: spin or block. SandboxError if some failed or were not on a ring: the kernel
    counts those that it opens."""
    a, b = place.sandbox.sides
    program, target = bench_program("tcp_rate"), [b.address, str(PORT), calls]
    for side in (a, b):
        run_command(*side.command(["sysctl", "-q", "-w", *SYSCTLS]))
    before = kernel_opened(a)
    server = place.start(b, [program, "server", *target], sockperf.SERVER_CPU, count=False)
    try:
        server.program.wait_for("ready", 15)
        client = place.start(a, [program, "client", *target, f"{seconds:g}"], sockperf.CLIENT_CPU, count=False)
        rate, failed = client.program.result(seconds + 30).split()
    finally:
        server.program.stop(signal.SIGKILL, 10)
    if int(failed):
        raise SandboxError(f"{failed} connections failed")
    by_kernel = kernel_opened(a) - before
    if place.way.policy and by_kernel > 0.1 * float(rate) * seconds:
        raise SandboxError(f"the kernel opened {by_kernel} connections: they were not on a ring")
    return float(rate)


def measure(repeats: int, seconds: float, say: Callable[[str], None]) -> Part:
    """The kernel's best of two ways of calling it beside the ring's best."""
    with places((KERNEL, OFFLOAD)) as found:
        variants = {f"{way.name}, {calls}": partial(open_and_close, found[way.name], seconds, calls)
                    for way in (KERNEL, OFFLOAD) for calls in ("spin", "block")}  # fmt: skip
        runs = interleave(variants, repeats, say)
    rates = {name: runs.of(name, float) for name in variants}
    part = Part([median_figure(PART, name, rate, "1/s") for name, rate in rates.items() if rate], runs.failures)

    def best(way: str) -> list[float]:
        measured = [rate for name, rate in rates.items() if name.startswith(way) and rate]
        return max(measured, key=statistics.median, default=[])

    part.ratio("offload / kernel, the best of each", best(OFFLOAD.name), best(KERNEL.name), at_least=1.3)
    return part
