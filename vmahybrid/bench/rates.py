"""One-way rates of 64-byte messages: sockperf throughput and a sendmmsg sender, kernel and shim in turns."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from functools import partial

from vmahybrid.bench import sockperf
from vmahybrid.bench.figures import Part, Runs, beside, interleave, median_figure
from vmahybrid.bench.latency import SHIM, SOFTVERBS, bench_program, on_rings, served
from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service
from vmahybrid.bench.sockperf import Rate

BATCH = 64
PORT = 12345
KERNEL, RAW = "kernel", "raw AF_XDP"


def mmsg(sandbox: Sandbox, seconds: float, service: Service | None = None) -> Rate:
    """udp_mmsg with batches of 64; with a service under the shim, SandboxError unless on rings."""
    program = bench_program("udp_mmsg")
    size = str(sockperf.MESSAGE)
    target = [sandbox.b.address, str(PORT)]
    serve = [program, "recv", *target]
    send = [program, "send", *target, f"{seconds:g}", str(BATCH), size]
    env = None
    if service is not None:
        serve, send, env = service.run_argv(serve), service.run_argv(send), service.env
    receiver = sandbox.start(sandbox.b, serve, sockperf.SERVER_CPU, env)
    receiver.wait_for("ready")
    if service is not None:
        service.require_ring(receiver)
    sender = sandbox.start(sandbox.a, send, sockperf.CLIENT_CPU, env)
    sent = json.loads(sender.result(seconds + 20))
    time.sleep(0.2)
    receiver.stop(signal.SIGINT)
    received = json.loads(receiver.output.splitlines()[-1])
    return Rate(sent["rate"], received["messages"] / sent["seconds"])


def raw_one_way(sandbox: Sandbox, seconds: float) -> Rate:
    """The limit: frames from ring to ring, a kick for each batch of 64."""
    program = bench_program("xsk_raw")
    a, b = sandbox.sides
    sink = sandbox.start(b, [program, "sink", b.device], sockperf.SERVER_CPU)
    sink.wait_for("ready")
    sender = sandbox.start(a, [program, "send", a.device, f"{seconds:g}", str(BATCH)], sockperf.CLIENT_CPU)
    sent = json.loads(sender.result(seconds + 20))
    time.sleep(0.2)
    sink.stop(signal.SIGINT)
    received = json.loads(sink.output.splitlines()[-1])
    return Rate(sent["rate"], received["messages"] / sent["seconds"])


def _figures(name: str, runs: Runs[Rate], target: float, part: str) -> Part:
    made = Part(failures={f"{name}, {variant}": text for variant, text in runs.failures.items()})
    sent = {variant: runs.of(variant, lambda run: run.sent) for variant in runs.results}
    received = {variant: runs.of(variant, lambda run: run.received) for variant in runs.results}
    for variant in runs.results:
        if sent[variant]:
            made.figures.append(median_figure(part, f"{name}, {variant}, sent", sent[variant], "msg/s"))
            made.figures.append(median_figure(part, f"{name}, {variant}, received", received[variant], "msg/s"))
    for way, rates in (("sent", sent), ("received", received)):
        limit = beside(rates[RAW], rates[KERNEL]) if RAW in rates else None
        made.ratio(f"{name}, {way}, shim / kernel", rates[SHIM], rates[KERNEL], at_least=target, limit=limit)
    if SOFTVERBS in runs.results:
        made.ratio(f"{name}, received, softverbs / kernel", received[SOFTVERBS], received[KERNEL])
    return made


def measure_throughput(repeats: int, seconds: float, say: Callable[[str], None]) -> Part:
    """`sockperf tp`: one sendto per message."""

    def shim(service: Service) -> Callable[[], Rate]:
        run = partial(sockperf.throughput, service.sandbox, seconds, service, before=service.require_ring)
        return on_rings(service.sandbox, service, run)

    with Sandbox("bench") as plain, served() as xdp, served(softverbs=True) as verbs:
        variants: dict[str, Callable[[], Rate]] = {
            KERNEL: partial(sockperf.throughput, plain, seconds),
            SHIM: shim(xdp),
            SOFTVERBS: shim(verbs),
        }
        return _figures("sockperf tp", interleave(variants, repeats, say), 1.6, "throughput")


def measure_mmsg(repeats: int, seconds: float, say: Callable[[str], None]) -> Part:
    """sendmmsg of 64 messages, recvmmsg of up to 64."""
    with Sandbox("bench") as plain, served() as service:
        sandbox = service.sandbox
        variants: dict[str, Callable[[], Rate]] = {
            RAW: partial(raw_one_way, plain, seconds),
            KERNEL: partial(mmsg, plain, seconds),
            SHIM: on_rings(sandbox, service, partial(mmsg, sandbox, seconds, service)),
        }
        return _figures("sendmmsg 64", interleave(variants, repeats, say), 2.3, "mmsg")
