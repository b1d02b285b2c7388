"""1,000 TCP connections that are all active, between two epoll programs; and a few beside 10,000 that are idle."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from vmahybrid.bench import sockperf, turns
from vmahybrid.bench.figures import Part, interleave, median_figure
from vmahybrid.bench.latency import bench_program
from vmahybrid.bench.sandbox import SandboxError
from vmahybrid.bench.ways import ADAPTIVE, KERNEL, OFFLOAD, WAYS, Place, Way, places

PART = "tcp-conns"
CONNECTIONS = 1000
FEW = 10
IDLE = 10_000
PORT = 12346
SETUP_SECONDS = 40.0    # until every connection had its first answer
IDLE_SECONDS = 120.0    # until all idle ones are there
ADAPTIVE_SECONDS = 30.0 # the moves, from 16 s on and for about four, within them
SETTLE_SECONDS = 60     # then until the service has given the kernel those that `ss` shows
BESIDE = {way.name: replace(way, name=f"{way.name} beside {IDLE} idle") for way in (KERNEL, OFFLOAD)}


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


def _require_rings(place: Place, pair: turns.Pair) -> None:
    if place.way.policy == "offload":
        pair.client.require_ring()
        pair.server.require_ring()


def begin_few(place: Place, stack: ExitStack, seconds: float) -> turns.Pair:
    """Whose way says so, beside the idle ones. SandboxError at the end of the stack if they were not on rings."""
    beside = place.way in BESIDE.values()
    pair = _start(place, seconds, FEW, *((str(IDLE), str(SETTLE_SECONDS)) if beside else ()))

    def end() -> None:
        pair.client.program.stop(signal.SIGINT, 60)
        pair.server.program.stop(signal.SIGINT, 60)
        _require_rings(place, pair)

    stack.callback(end)
    pair.client.program.wait_for("begun", SETUP_SECONDS + (IDLE_SECONDS + SETTLE_SECONDS if beside else 0))
    return pair


def exchange(place: Place, seconds: float) -> tuple[float, float]:
    """Messages per second, there and back being one, of all the time and of its last tenth; SandboxError if the
    connections were not on rings under policy offload."""
    pair = _start(place, seconds, CONNECTIONS)
    try:
        said = json.loads(pair.client.program.result(seconds + SETUP_SECONDS))
    finally:
        pair.server.program.stop(signal.SIGINT, 20)
    if said["connections"] < CONNECTIONS:
        raise SandboxError(f"not all of {CONNECTIONS} connections were answered: {said}")
    _require_rings(place, pair)
    return float(said["rate"]), float(said["end_rate"])


def add_idle(part: Part, way: Way, repeats: int, say: Callable[[str], None]) -> None:
    """A few connections beside idle ones and without, by turns. Such small messages suit a ring's turns, too: what was
    on its way when both ends stopped is still there when they go on."""
    beside, again = BESIDE[way.name], replace(way, name=f"{way.name} again")
    say(f"{FEW} active beside {IDLE} idle, {way.name}")
    try:
        found = turns.rates(begin_few, (beside, way, again), repeats * turns.TURNS)
    except SandboxError as error:
        part.failures[beside.name] = str(error)
        return
    part.figures.append(median_figure(PART, f"{FEW} active, {way.name}", found[way.name], "packet/s"))
    for other, target in ((again, None), (beside, 0.97)):
        turns.add_ratio(part, PART, f"{FEW} active, {other.name}", found, other, way, target)


def measure(repeats: int, seconds: float, say: Callable[[str], None]) -> Part:
    with places() as found:
        variants = {way.name: partial(exchange, found[way.name], ADAPTIVE_SECONDS if way is ADAPTIVE else seconds)
                    for way in WAYS}
        runs = interleave(variants, repeats, say)
    rates = {name: runs.of(name, lambda run: run[0]) for name in variants}
    moved = runs.of(ADAPTIVE.name, lambda run: run[1])
    figures = [median_figure(PART, f"{CONNECTIONS} active, {name}", rate, "msg/s")
               for name, rate in rates.items() if rate]
    last = f"adaptive, its last {ADAPTIVE_SECONDS / 10:g} s"
    if moved:
        figures.append(median_figure(PART, f"{CONNECTIONS} active, {last}", moved, "msg/s"))
    part = Part(figures, runs.failures)
    part.ratio("offload / kernel", rates[OFFLOAD.name], rates[KERNEL.name], at_least=1.8)
    part.ratio("adaptive / kernel", rates[ADAPTIVE.name], rates[KERNEL.name], at_least=0.97)
    part.ratio(f"{last} / kernel", moved, rates[KERNEL.name])
    for way in (KERNEL, OFFLOAD):
        add_idle(part, way, repeats, say)
    return part
