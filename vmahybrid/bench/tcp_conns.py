"""1,000 TCP connections that are all active, between two epoll programs."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from functools import partial

from vmahybrid.bench import sockperf
from vmahybrid.bench.figures import Part, interleave, median_figure
from vmahybrid.bench.latency import bench_program
from vmahybrid.bench.sandbox import SandboxError
from vmahybrid.bench.ways import ADAPTIVE, KERNEL, OFFLOAD, WAYS, Place, places

PART = "tcp-conns"
CONNECTIONS = 1000
PORT = 12346
SETUP_SECONDS = 40.0    # until every connection had its first answer


def exchange(place: Place, seconds: float) -> float:
    """Messages per second, there and back being one; SandboxError if they were not on rings under policy offload."""
    a, b = place.sandbox.sides
    program, target = bench_program("tcp_many"), [b.address, str(PORT)]
    server = place.start(b, [program, "server", *target], sockperf.SERVER_CPU)
    try:
        server.program.wait_for("ready", 15)
        client = place.start(a, [program, "client", *target, str(CONNECTIONS), f"{seconds:g}"], sockperf.CLIENT_CPU)
        said = json.loads(client.program.result(seconds + SETUP_SECONDS))
    finally:
        server.program.stop(signal.SIGINT, 10)
    if said["connections"] < CONNECTIONS:
        raise SandboxError(f"only {said['connections']} of {CONNECTIONS} connections were answered")
    if place.way.policy == "offload":
        client.require_ring()
        server.require_ring()
    return float(said["rate"])


def measure(repeats: int, seconds: float, say: Callable[[str], None]) -> Part:
    with places() as found:
        variants = {way.name: partial(exchange, found[way.name], seconds) for way in WAYS}
        runs = interleave(variants, repeats, say)
    rates = {name: runs.of(name, float) for name in variants}
    figures = [median_figure(PART, f"{CONNECTIONS} active, {name}", rate, "msg/s")
               for name, rate in rates.items() if rate]
    part = Part(figures, runs.failures)
    part.ratio("offload / kernel", rates[OFFLOAD.name], rates[KERNEL.name], at_least=1.8)
    part.ratio("adaptive / kernel", rates[ADAPTIVE.name], rates[KERNEL.name])
    return part
