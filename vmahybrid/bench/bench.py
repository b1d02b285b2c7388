"""`make bench`: every figure that vmahybrid promises, beside its target, with all baselines of the same run.

Exit code 0 when every target was met, 1 when one was missed or could not be measured, 2 usage, 77 not possible here.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from vmahybrid.bench import costs, latency, rates, tcp_bulk, tcp_conns, tcp_latency, tcp_rate, tcp_servers
from vmahybrid.bench.figures import Figure, Part
from vmahybrid.bench.sandbox import SandboxError, sweep

SCHEMA = 1

Measure = Callable[[int, float, Callable[[str], None]], Part]
PARTS: dict[str, tuple[Measure, float]] = {  # and the seconds of one run
    "latency": (latency.measure, 1.2),
    "throughput": (rates.measure_throughput, 3.0),
    "mmsg": (rates.measure_mmsg, 3.0),
    "toll": (costs.measure_toll, 3.0),
    "overhead": (costs.measure_overhead, 0.0),
    "service": (costs.measure_service, 0.0),
    "tcp-latency": (tcp_latency.measure, 1.2),
    "tcp-rate": (tcp_rate.measure, 3.0),
    "tcp-conns": (tcp_conns.measure, 3.0),
    "tcp-bulk": (tcp_bulk.measure, 3.0),
    "tcp-loss": (tcp_bulk.measure_loss, 3.0),
    "tcp-redis": (tcp_servers.measure_redis, 2.0),
    "tcp-memcached": (tcp_servers.measure_memcached, 2.0),
    "tcp-nginx": (tcp_servers.measure_nginx, 2.0),
}
GROUPS = {"tcp": [name for name in PARTS if name.startswith("tcp-")]}


BUSY = 0.1  # share of all CPU time


@dataclass(frozen=True)
class Options:
    only: list[str]
    repeats: int
    json: bool


def parse_arguments(argv: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(prog="vmahybrid.bench", description="figures of vmahybrid beside their targets")
    parser.add_argument("--only", action="append", choices=[*PARTS, *GROUPS], metavar="PART",
                        help=f"{', '.join([*PARTS, *GROUPS])}; may be given several times")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="runs per variant (5); medians are shown")
    parser.add_argument("--json", action="store_true", help="JSON on stdout, progress on stderr")
    parsed = parser.parse_args(argv)
    if parsed.repeats < 1:
        parser.error(f"--repeats {parsed.repeats}: at least 1")
    only = [part for name in parsed.only or PARTS for part in GROUPS.get(name, [name])]
    return Options(list(dict.fromkeys(only)), parsed.repeats, parsed.json)


def measure(options: Options, say: Callable[[str], None]) -> Part:
    """All selected parts, one after the other; a part that fails as a whole does not end the others."""
    total = Part()
    for name in options.only:
        function, seconds = PARTS[name]
        try:
            part = function(options.repeats, seconds, partial(_say_of, say, name))
        except SandboxError as error:
            part = Part(failures={name: str(error)})
        total.figures += part.figures
        total.failures.update({f"{name}: {key}" if key != name else name: text for key, text in part.failures.items()})
    return total


def cpu_in_use(seconds: float = 1.0) -> float:
    """Share of the machine's CPU time that others use now, stolen time of a virtual machine included: 0 to 1."""

    def sample() -> tuple[int, int]:
        fields = [int(number) for number in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return sum(fields), fields[3] + fields[4]  # idle, iowait

    total, idle = sample()
    time.sleep(seconds)
    total_after, idle_after = sample()
    return 1 - (idle_after - idle) / max(total_after - total, 1)


def _say_of(say: Callable[[str], None], part: str, text: str) -> None:
    say(f"{part}: {text}")


def number(value: float) -> str:
    """Three or four significant digits, large numbers in full."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value < 10 else f"{value:.1f}"


def table(figures: list[Figure]) -> str:
    """For humans: one line per figure, its target and the verdict."""
    lines = [f"{'':44}{'median':>10} {'unit':8}{'target':>9}"]
    part = ""
    for figure in figures:
        if figure.part != part:
            part = figure.part
            lines.append(part)
        line = f"  {figure.name:42}{number(figure.value):>10} {figure.unit:8}{figure.target:>9}  {figure.verdict}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def show(options: Options, total: Part, seconds: float, in_use: float) -> None:
    if options.json:
        document = {
            "schema": SCHEMA,
            "kernel": platform.release(),
            "cpus": os.cpu_count(),
            "cpu_in_use_before": round(in_use, 3),
            "repeats": options.repeats,
            "seconds": round(seconds, 1),
            "figures": [figure.as_json() for figure in total.figures],
            "failures": total.failures,
        }
        print(json.dumps(document, indent=2))
        return
    print(table(total.figures))
    for name, text in total.failures.items():
        print(f"\nnot measured: {name}: {text}")
    if in_use > BUSY:
        print(f"\nOther programs used {in_use:.0%} of the CPUs when this began: the figures are not to be trusted")
    missed = sum(figure.passed is False for figure in total.figures)
    met = sum(figure.passed is True for figure in total.figures)
    print(f"\n{met} targets met, {missed} missed, {len(total.failures)} not measured, in {seconds:.0f} s")


def _terminate(signum: int, frame: object) -> NoReturn:
    raise SystemExit(128 + signum)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_arguments(sys.argv[1:] if argv is None else argv)
    if os.geteuid() != 0:
        print("vmahybrid: make bench: needs root for namespaces and AF_XDP. Run: sudo make bench", file=sys.stderr)
        return 77
    signal.signal(signal.SIGTERM, _terminate)
    begun = time.monotonic()
    sweep()
    in_use = cpu_in_use()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begun:5.0f} s] {text}", file=sys.stderr, flush=True)

    try:
        total = measure(options, say)
    except KeyboardInterrupt:
        print("interrupted; the sandboxes are removed", file=sys.stderr)
        return 130
    show(options, total, time.monotonic() - begun, in_use)
    return 1 if total.failures or any(figure.passed is False for figure in total.figures) else 0


if __name__ == "__main__":
    sys.exit(main())
