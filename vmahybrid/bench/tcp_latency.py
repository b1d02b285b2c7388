"""TCP half round trips of 64-byte messages: raw AF_XDP, the kernel in both ways, the shim, in turns."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial

from vmahybrid.bench import sockperf
from vmahybrid.bench.figures import Part, beside, interleave
from vmahybrid.bench.latency import BLOCKING, NONBLOCKED, RAW, RUNS, percentiles, raw_ping_pong
from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.ways import ADAPTIVE, KERNEL, OFFLOAD, Place, places

PART = "tcp-latency"


def ping_pong(place: Place, seconds: float, nonblocked: bool = False) -> sockperf.Latency:
    """`sockperf ping-pong --tcp`; SandboxError when it fails or was not on rings under policy offload."""
    a, b = place.sandbox.sides
    target = ["--tcp", "-i", b.address, "-p", str(sockperf.PORT), *(["--nonblocked"] if nonblocked else [])]
    server = place.start(b, ["sockperf", "server", *target], sockperf.SERVER_CPU)
    try:
        server.program.wait_for(r"\[SERVER\] listen on", 15)
        sockperf.wait_bound(b, sockperf.PORT, "tcp")
        argv = ["sockperf", "ping-pong", *target, "-m", str(sockperf.MESSAGE), "-t", f"{seconds:g}"]
        client = place.start(a, argv, sockperf.CLIENT_CPU)
        latency = sockperf.parse_latency(client.program.result(seconds + 20))
    finally:
        server.program.stop(signal.SIGINT)
    for program in (server, client):
        program.require_ring(0.9 if place.way.policy == "offload" else 0.5)
    return latency


def measure(repeats: int, seconds: float, say: Callable[[str], None]) -> Part:
    with Sandbox("bench") as plain, places() as found:
        variants: dict[str, Callable[[], sockperf.Latency]] = {
            RAW: partial(raw_ping_pong, plain, seconds),
            OFFLOAD.name: partial(ping_pong, found[OFFLOAD.name], seconds),
            NONBLOCKED: partial(ping_pong, found[KERNEL.name], seconds, nonblocked=True),
            BLOCKING: partial(ping_pong, found[KERNEL.name], seconds),
            ADAPTIVE.name: partial(ping_pong, found[ADAPTIVE.name], seconds),
        }
        runs = interleave(variants, RUNS * repeats, say)
    part, p50, _p99 = percentiles(PART, runs)
    for kernel, target in ((BLOCKING, 12.0), (NONBLOCKED, 1.7)):
        limit = beside(p50[kernel], p50[RAW])
        part.ratio(f"{kernel} p50 / offload p50", p50[kernel], p50[OFFLOAD.name], at_least=target, limit=limit)
    part.ratio("offload p50 / raw AF_XDP p50", p50[OFFLOAD.name], p50[RAW], at_most=1.8)
    part.ratio("kernel blocking p50 / adaptive p50", p50[BLOCKING], p50[ADAPTIVE.name])
    return part
