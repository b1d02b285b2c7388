"""Half round trips of 64-byte messages: raw AF_XDP, the kernel in both ways, the shim on both backends, in turns."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from vmahybrid.bench import sockperf
from vmahybrid.bench.figures import Part, Runs, beside, interleave, median_figure
from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service

T = TypeVar("T")

PART = "latency"
RUNS = 3  # short ones for each repeat: a run is fast or slow as a whole, by what the host gives the machine then
RAW, BLOCKING, NONBLOCKED, SHIM = "raw AF_XDP", "kernel blocking", "kernel --nonblocked", "shim -p latency"
SOFTVERBS = "shim --softverbs"  # and -p latency as well


def bench_program(name: str) -> str:
    """Path of one of the bench's C programs: installed beside this module."""
    return str(Path(__file__).parent / name)


def raw_ping_pong(sandbox: Sandbox, seconds: float) -> sockperf.Latency:
    """The limit: xsk_raw between the two ends, with nothing else on them."""
    program = bench_program("xsk_raw")
    a, b = sandbox.sides
    server = sandbox.start(b, [program, "server", b.device], sockperf.SERVER_CPU)
    server.wait_for("ready")
    client = sandbox.start(a, [program, "client", a.device, f"{seconds:g}"], sockperf.CLIENT_CPU)
    try:
        measured = json.loads(client.result(seconds + 20))
    finally:
        server.stop()
    return sockperf.Latency(measured["p50"], measured["p99"], measured["samples"])


def on_rings(sandbox: Sandbox, service: Service, run: Callable[[], T]) -> Callable[[], T]:
    """A run that is preceded, the first time, by the check that programs of this sandbox get rings at all."""
    check = iter([partial(sockperf.require_rings, sandbox, service)])

    def checked() -> T:
        for require in check:
            require()
        return run()

    return checked


@contextmanager
def served(softverbs: bool = False) -> Iterator[Service]:
    """A service in a sandbox of its own."""
    with Sandbox("bench") as sandbox, Service(sandbox, softverbs=softverbs) as service:
        yield service


Samples = dict[str, list[float]]


def percentiles(part_name: str, runs: Runs[sockperf.Latency]) -> tuple[Part, Samples, Samples]:
    """The part with both percentiles of each variant, and their samples by variant: p50, p99."""
    part = Part(failures=runs.failures)
    p50 = {name: runs.of(name, lambda run: run.p50) for name in runs.results}
    p99 = {name: runs.of(name, lambda run: run.p99) for name in runs.results}
    for name in runs.results:
        if p50[name]:
            part.figures.append(median_figure(part_name, f"{name}, p50", p50[name], "us"))
            part.figures.append(median_figure(part_name, f"{name}, p99", p99[name], "us"))
    return part, p50, p99


def measure(repeats: int, seconds: float, say: Callable[[str], None]) -> Part:
    """Kernel and raw limit in a sandbox without a service, the shim in one with it, for each backend."""

    def shim(service: Service) -> Callable[[], sockperf.Latency]:
        run = partial(sockperf.ping_pong, service.sandbox, seconds, service, before=service.require_ring)
        return on_rings(service.sandbox, service, run)

    with Sandbox("bench") as plain, served() as xdp, served(softverbs=True) as verbs:
        variants: dict[str, Callable[[], sockperf.Latency]] = {
            RAW: partial(raw_ping_pong, plain, seconds),
            BLOCKING: partial(sockperf.ping_pong, plain, seconds),
            NONBLOCKED: partial(sockperf.ping_pong, plain, seconds, nonblocked=True),
            SHIM: shim(xdp),
            SOFTVERBS: shim(verbs),
        }
        runs = interleave(variants, RUNS * repeats, say)
    part, p50, p99 = percentiles(PART, runs)
    for kernel, target in ((BLOCKING, 15.0), (NONBLOCKED, 1.8)):
        limit = beside(p50[kernel], p50[RAW])
        part.ratio(f"{kernel} p50 / shim p50", p50[kernel], p50[SHIM], at_least=target, limit=limit)
    part.ratio("shim p50 / raw AF_XDP p50", p50[SHIM], p50[RAW], at_most=1.3)
    part.ratio("shim p99 / shim p50", p99[SHIM], p50[SHIM], at_most=2)
    # no target: a software device says nothing of a NIC, and `vmahybrid doctor` says what this says
    part.ratio("kernel --nonblocked p50 / softverbs p50", p50[NONBLOCKED], p50[SOFTVERBS])
    return part
