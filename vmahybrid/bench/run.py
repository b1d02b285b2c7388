"""`make run`: the main job before one's eyes. An unmodified sockperf on the kernel, then on AF_XDP rings.

Exit code 0 when both programs ran on rings, 1 when they did not or something failed, 77 when it is not possible here.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import NoReturn

from vmahybrid.bench import sockperf
from vmahybrid.bench.sandbox import Sandbox, SandboxError, sweep
from vmahybrid.bench.served import Service, tool

SECONDS = 6.0  # of each run of sockperf; another number may be the only argument

GO_ON = """How to go on
  vmahybrid start --interface eth0        the service, on an interface of this machine; root
  vmahybrid run -p latency -- PROGRAM     a program on rings; any user
  vmahybrid                               what is offloaded and what is not
  vmahybrid explain PID                   why, and what to do about it
  vma_stats -p PID                        counters of its sockets
  make bench                              all figures beside their targets, more than half an hour"""


@dataclass
class Seen:
    """What was read while the programs ran under the shim."""

    statistics: list[tuple[str, str]] = field(default_factory=list)  # (whose, vma_stats output)
    explanations: list[str] = field(default_factory=list)
    not_offloaded: list[str] = field(default_factory=list)


def say(text: str) -> None:
    print(text, flush=True)


class Progress:
    """Prints a step when it begins and its result when it is there."""

    def __init__(self) -> None:
        self._begun = time.monotonic()

    def begin(self, text: str) -> None:
        print(f"[{time.monotonic() - self._begun:5.1f} s] {text} ... ", end="", flush=True)

    def end(self, text: str = "done") -> None:
        say(text)


def look(service: Service, pair: sockperf.Pair) -> Seen:
    """Statistics and flows of the two running programs; for one without a flow on a ring, the explanation why."""
    seen = Seen()
    for name, program in (("server", pair.server), ("client", pair.client)):
        if not service.ring_flows(program.pid):
            seen.not_offloaded.append(name)
            seen.explanations.append(service.ask("explain", str(program.pid)))
        command = [tool("vma_stats"), "-p", str(program.pid), "-v", "3", "-c", "1"]
        reader = service.sandbox.start(None, command, env=service.env)
        seen.statistics.append((f"sockperf {name}, pid {program.pid}", reader.result(15)))
    return seen


def measure_kernel(sandbox: Sandbox, seconds: float, progress: Progress) -> tuple[sockperf.Latency, sockperf.Latency]:
    """Blocking and non-blocked sockperf without us."""
    results = []
    for nonblocked in (False, True):
        how = "--nonblocked" if nonblocked else "blocking (its default)"
        progress.begin(f"sockperf ping-pong on the kernel, {how}")
        results.append(sockperf.ping_pong(sandbox, seconds, nonblocked=nonblocked))
        progress.end(f"{results[-1].p50:.2f} us")
    return results[0], results[1]


def measure_shim(sandbox: Sandbox, seconds: float, progress: Progress) -> tuple[sockperf.Latency, Seen]:
    """The same sockperf under `vmahybrid run -p latency` on both sides, and what one can see meanwhile."""
    progress.begin("vmahybrid start on both ends")
    seen: list[Seen] = []
    with Service(sandbox) as service:
        progress.end(f"ready after {service.ready_seconds:.1f} s")
        progress.begin("sockperf under vmahybrid run -p latency, looking at it with vma_stats")
        sockperf.ping_pong(sandbox, seconds, service, meanwhile=lambda pair: seen.append(look(service, pair)))
        progress.end()
        progress.begin("the same, left alone to be measured")
        latency = sockperf.ping_pong(sandbox, seconds, service)
        progress.end(f"{latency.p50:.2f} us")
        progress.begin("vmahybrid stop (SIGTERM)")
    progress.end("clean: nothing left")
    return latency, seen[0]


def report(blocking: sockperf.Latency, nonblocked: sockperf.Latency, shim: sockperf.Latency, seen: Seen) -> None:
    """The table, vma_stats of both processes, and how to go on."""
    for whose, text in seen.statistics:
        say(f"\nvma_stats of the {whose}, while it ran\n{text.rstrip()}")
    say(f"\nHalf round trip of {sockperf.MESSAGE}-byte UDP messages, microseconds, two pinned cores over veth")
    say(f"  {'':32}{'p50':>8}{'p99':>9}   {'beside the shim'}")
    rows = [
        ("kernel, blocking (the default)", blocking),
        ("kernel, --nonblocked", nonblocked),
        ("vmahybrid run -p latency", shim),
    ]
    for name, row in rows:
        ratio = f"{row.p50 / shim.p50:.1f} x" if row is not shim else ""
        say(f"  {name:32}{row.p50:8.2f}{row.p99:9.2f}   {ratio}")
    if seen.not_offloaded:
        say(f"\nThe {' and the '.join(seen.not_offloaded)} ran on the kernel, not on a ring. vmahybrid explain says:")
        for text in seen.explanations:
            say(text.rstrip())
    say(f"\n{GO_ON}")


def _terminate(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def main() -> int:
    """Runs it; the sandbox is removed whatever happens, SIGTERM and Ctrl-C included."""
    if os.geteuid() != 0:
        print("vmahybrid: make run: needs root for namespaces and AF_XDP. Run: sudo make run", file=sys.stderr)
        return 77
    signal.signal(signal.SIGTERM, _terminate)
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS
    progress = Progress()
    try:
        sweep()
        progress.begin("making a sandbox: two network namespaces joined by a veth")
        with Sandbox("run") as sandbox:
            progress.end()
            blocking, nonblocked = measure_kernel(sandbox, seconds, progress)
            shim, seen = measure_shim(sandbox, seconds, progress)
    except SandboxError as error:
        say("failed")
        print(f"vmahybrid: make run: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        say("interrupted; the sandbox is removed")
        return 130
    report(blocking, nonblocked, shim, seen)
    return 1 if seen.not_offloaded else 0


if __name__ == "__main__":
    sys.exit(main())
