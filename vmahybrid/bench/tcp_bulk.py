"""TCP streams of iperf3 from side a to side b: with nothing lost, and with 1 % of all frames lost in each direction."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from vmahybrid.bench import sockperf, turns
from vmahybrid.bench.figures import Part, interleave, median_figure
from vmahybrid.bench.lossy import LossySandbox
from vmahybrid.bench.sandbox import Sandbox, SandboxError
from vmahybrid.bench.ways import ADAPTIVE, KERNEL, KERNEL_NO_GSO, OFFLOAD, MakeSandbox, Place, Way, places

LOSS = 0.01
BEGINNING = 0.1     # seconds that do not count
STREAMS = 8         # of which the losses, and the timers that some of them need, even out
RUNS = 3            # runs per repeat of what is held against 0.95: two of the kernel itself differ by 8 to 12 %
AGAIN = Way("kernel without GSO again", gso=False)


def stream(place: Place, seconds: float, options: Sequence[str] = ()) -> float:
    """Gbit/s that arrive after the first 100 ms; SandboxError unless, under policy offload, it was sent by a ring."""
    a, b = place.sandbox.sides
    server = place.start(b, ["iperf3", "-s", "-1", "-4"], sockperf.SERVER_CPU)
    try:
        sockperf.wait_bound(b, 5201, "tcp", 15)
        argv = ["iperf3", "-c", b.address, "-t", f"{seconds:g}", "-i", f"{BEGINNING:g}", "-J", *options]
        client = place.start(a, argv, sockperf.CLIENT_CPU)
        client.program.wait(seconds + 20)
        rate = parse_stream(client.program.output)
    finally:
        server.program.stop(signal.SIGINT)
    if place.way.policy == "offload":
        client.require_ring(0.8)
    return rate


def begin(place: Place, stack: ExitStack, seconds: float) -> turns.Pair:
    """A stream that goes on, for :mod:`turns`."""
    a, b = place.sandbox.sides
    server = place.start(b, ["iperf3", "-s", "-1", "-4"], sockperf.SERVER_CPU)
    stack.callback(server.program.stop, signal.SIGINT)
    sockperf.wait_bound(b, 5201, "tcp", 15)
    client = place.start(a, ["iperf3", "-c", b.address, "-t", f"{seconds:g}"], sockperf.CLIENT_CPU)
    stack.callback(client.program.stop, signal.SIGKILL)
    return turns.Pair(client, server, a, turns.BYTES)


def parse_stream(text: str) -> float:
    """Of the sender's intervals in iperf3's JSON, Gbit/s; SandboxError when there are none."""
    try:
        said = json.loads(text)
        intervals = [interval["sum"] for interval in said["intervals"]][1:]
        seconds = float(sum(interval["seconds"] for interval in intervals))
        return float(sum(interval["bytes"] for interval in intervals)) * 8e-9 / seconds
    except (ValueError, KeyError, ZeroDivisionError) as error:
        raise SandboxError(f"iperf3 measured nothing: {text[-1000:]}") from error


def _measure(part: str, ways: Sequence[Way], make: MakeSandbox, repeats: int, seconds: float,
             say: Callable[[str], None], streams: int = 1) -> tuple[Part, dict[str, list[float]]]:
    what, several = ("iperf3", []) if streams == 1 else (f"{streams} streams", ["-P", str(streams)])
    with places(ways, make) as found:
        options = ["-C", "cubic"] if part == "tcp-loss" else []
        variants = {way.name: partial(stream, found[way.name], seconds,
                                      [*several, *(options if way.policy != "offload" else [])]) for way in ways}
        runs = interleave(variants, repeats, say if streams == 1 else lambda text: say(f"{what}, {text}"))
    rates = {name: runs.of(name, float) for name in variants}
    figures = [median_figure(part, f"{what}, {name}", rate, "Gbit/s") for name, rate in rates.items() if rate]
    failures = runs.failures if streams == 1 else {f"{what}, {name}": text for name, text in runs.failures.items()}
    return Part(figures, failures), rates


def measure(repeats: int, seconds: float, say: Callable[[str], None]) -> Part:
    part, rates = _measure("tcp-bulk", (KERNEL, ADAPTIVE), lambda: Sandbox("bench"), RUNS * repeats, seconds, say)
    part.ratio("adaptive / kernel", rates[ADAPTIVE.name], rates[KERNEL.name], at_least=0.95)
    turns.add_adaptive(part, "tcp-bulk", "iperf3", begin, repeats, say, at_least=0.95)
    ways = (KERNEL, KERNEL_NO_GSO, OFFLOAD)
    beside, rates = _measure("tcp-bulk", ways, lambda: Sandbox("bench"), repeats, seconds, say)
    part.figures += [figure for figure in beside.figures if figure.name != f"iperf3, {KERNEL.name}"]
    part.failures.update(beside.failures)
    part.ratio("offload / kernel", rates[OFFLOAD.name], rates[KERNEL.name])
    part.ratio("offload / kernel without GSO", rates[OFFLOAD.name], rates[KERNEL_NO_GSO.name])
    return part


def measure_loss(repeats: int, seconds: float, say: Callable[[str], None]) -> Part:
    """The kernel's sender with CUBIC; the stack of rings has CUBIC, too."""
    ways = (KERNEL_NO_GSO, ADAPTIVE, OFFLOAD)
    part, rates = _measure("tcp-loss", ways, lambda: LossySandbox("bench", LOSS), repeats, seconds, say)
    part.ratio("offload / kernel", rates[OFFLOAD.name], rates[KERNEL_NO_GSO.name], at_least=0.5)
    part.ratio("adaptive / kernel", rates[ADAPTIVE.name], rates[KERNEL_NO_GSO.name])
    several, rates = _measure("tcp-loss", (KERNEL_NO_GSO, AGAIN, ADAPTIVE), lambda: LossySandbox("bench", LOSS),
                              RUNS * repeats, seconds, say, STREAMS)
    part.figures += several.figures
    part.failures.update(several.failures)
    part.ratio(f"{STREAMS} streams, kernel / kernel", rates[AGAIN.name], rates[KERNEL_NO_GSO.name])
    part.ratio(f"{STREAMS} streams, adaptive / kernel", rates[ADAPTIVE.name], rates[KERNEL_NO_GSO.name], at_least=0.95)
    return part
