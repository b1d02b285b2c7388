"""1,000 TCP connections that are all active, between two epoll programs; and a few beside 10,000 that are idle."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from vmahybrid.bench import sockperf, turns
from vmahybrid.bench.figures import Part, interleave, median_figure
from vmahybrid.bench.latency import bench_program
from vmahybrid.bench.sandbox import SandboxError
from vmahybrid.bench.ways import ADAPTIVE, KERNEL, OFFLOAD, WAYS, Place, places

PART = "tcp-conns"
CONNECTIONS = 1000
FEW = 10
IDLE = 10_000
PORT = 12346
SETUP_SECONDS = 40.0    # until every connection had its first answer
IDLE_SECONDS = 120.0    # until all idle ones are there
SETTLE_SECONDS = 90     # then until the service has given the kernel those that `ss` shows


def _start(place: Place, seconds: float, connections: int, *idle: str) -> turns.Pair:
    a, b = place.sandbox.sides
    program, target = bench_program("tcp_many"), [b.address, str(PORT)]
    server = place.start(b, [program, "server", *target], sockperf.SERVER_CPU)
    try:
        server.program.wait_for("ready", 15)
    except SandboxError:
        server.program.stop(signal.SIGINT)
        raise
    argv = [program, "client", *target, str(connections), f"{seconds:g}", *idle]
    return turns.Pair(place.start(a, argv, sockperf.CLIENT_CPU), server, a)


def begin(place: Place, stack: ExitStack, seconds: float) -> turns.Pair:
    pair = _start(place, seconds, CONNECTIONS)
    stack.callback(pair.server.program.stop, signal.SIGINT, 20)
    stack.callback(pair.client.program.stop, signal.SIGKILL)
    return pair


def run_pair(place: Place, seconds: float, connections: int, patience: float, *idle: str) -> list[float]:
    """Messages per second, there and back being one, of each line that the client says; SandboxError if the
    connections were not on rings under policy offload."""
    pair = _start(place, seconds, connections, *idle)
    try:
        text = pair.client.program.result(seconds * (2 if idle else 1) + patience)
        said = [json.loads(line) for line in text.splitlines()]
    finally:
        pair.server.program.stop(signal.SIGINT, 20)
    if any(line["connections"] < connections for line in said):
        raise SandboxError(f"not all of {connections} connections were answered: {said}")
    if place.way.policy == "offload":
        pair.client.require_ring()
        pair.server.require_ring()
    return [float(line["rate"]) for line in said]


def exchange(place: Place, seconds: float) -> float:
    return run_pair(place, seconds, CONNECTIONS, SETUP_SECONDS)[0]


def beside_idle(place: Place, seconds: float) -> tuple[float, float]:
    """The rate of a few connections, alone and beside the idle ones, in one process."""
    patience = SETUP_SECONDS + IDLE_SECONDS + SETTLE_SECONDS
    alone, beside = run_pair(place, seconds, FEW, patience, str(IDLE), str(SETTLE_SECONDS))
    return alone, beside


def measure(repeats: int, seconds: float, say: Callable[[str], None]) -> Part:
    with places() as found:
        variants = {way.name: partial(exchange, found[way.name], seconds) for way in WAYS}
        runs = interleave(variants, repeats, say)
    with places((KERNEL, OFFLOAD)) as found:
        # once: a kernel client's 10,000 names stay in TIME_WAIT for a minute
        idle = interleave({name: partial(beside_idle, place, seconds) for name, place in found.items()}, 1,
                          lambda text: say(f"beside {IDLE} idle connections, {text}"))
    rates = {name: runs.of(name, float) for name in variants}
    figures = [median_figure(PART, f"{CONNECTIONS} active, {name}", rate, "msg/s")
               for name, rate in rates.items() if rate]
    part = Part(figures, runs.failures)
    part.failures.update({f"beside idle ones, {name}": text for name, text in idle.failures.items()})
    part.ratio("offload / kernel", rates[OFFLOAD.name], rates[KERNEL.name], at_least=1.8)
    part.ratio("adaptive / kernel", rates[ADAPTIVE.name], rates[KERNEL.name])
    turns.add_adaptive(part, PART, f"{CONNECTIONS} active", begin, repeats, say)
    for name in found:
        alone, beside = (idle.of(name, lambda run, at=at: run[at]) for at in (0, 1))  # type: ignore[misc]
        if alone:
            part.figures.append(median_figure(PART, f"{FEW} active, {name}", alone, "msg/s"))
            part.ratio(f"beside {IDLE} idle / alone, {name}", beside, alone)
    return part
