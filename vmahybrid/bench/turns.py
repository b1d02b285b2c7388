"""Ways of running one load beside each other, by turns: a pair of client and server goes on for a fraction of a second
while those of the other ways are stopped. Two turns that follow each other see the same machine, whatever else its host
does, so that a difference of two per cent shows where runs of seconds, one after the other, differ by ten.

Counted is what the client sends: frames, for loads in which a request and its answer are one each, or bytes.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from vmahybrid.bench.figures import Figure, Part, neighbours
from vmahybrid.bench.sandbox import SandboxError, Side
from vmahybrid.bench.ways import ADAPTIVE, KERNEL, Place, Started, Way, places

BYTES, FRAMES = 9, 10   # columns of /proc/net/dev
TURN = 0.15             # seconds
PAUSE = 0.01            # until the softirqs of the last turn are done
SETTLE = 3.0            # seconds for a policy to decide
TURNS = 12              # per repeat
AGAIN = Way("kernel again")     # its ratio to KERNEL is what this method can't tell from 1


@dataclass(frozen=True)
class Pair:
    """Of a way, running: what the client sends leaves through ``side``. ``unit``: BYTES or FRAMES."""

    client: Started
    server: Started
    side: Side
    unit: int = FRAMES

    def signal(self, signum: int) -> None:
        for pid in [*family(self.server.program.pid), *family(self.client.program.pid)]:
            try:
                os.kill(pid, signum)
            except ProcessLookupError:
                continue

    def sent(self) -> int:
        """So far. SandboxError when the client has ended."""
        try:
            lines = Path(f"/proc/{self.client.program.pid}/net/dev").read_text().splitlines()
        except OSError as error:
            program = self.client.program
            raise SandboxError(f"{' '.join(program.argv)} has ended: {program.errors}") from error
        return next(int(line.split()[self.unit]) for line in lines if line.strip().startswith(f"{self.side.device}:"))


# With the seconds for which the load is to go on, stopped or not; the stack ends what it has started.
Begin = Callable[[Place, ExitStack, float], Pair]


def family(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:
            continue
        for child in children:
            yield from family(int(child))


@contextmanager
def _stopped(pairs: Mapping[str, Pair]) -> Iterator[None]:
    try:
        yield
    finally:
        for pair in pairs.values():
            pair.signal(signal.SIGCONT)     # a stopped program ends by no other signal than SIGKILL


def rates(begin: Begin, ways: Sequence[Way], turns: int) -> dict[str, list[float]]:
    """What was sent per second of each turn, by way; the n-th ones of two ways were neighbours."""
    pairs: dict[str, Pair] = {}
    found: dict[str, list[float]] = {way.name: [] for way in ways}
    seconds = 1.3 * len(ways) * (SETTLE + turns * (TURN + PAUSE))
    with places(ways) as where, ExitStack() as stack, _stopped(pairs):
        for name, place in where.items():
            pairs[name] = begin(place, stack, seconds)
            time.sleep(SETTLE)
            pairs[name].signal(signal.SIGSTOP)
        for turn in range(turns):
            for name in sorted(pairs, key=list(pairs).index, reverse=bool(turn % 2)):
                found[name].append(_turn(pairs[name]))
    return found


def _turn(pair: Pair) -> float:
    before, begun = pair.sent(), time.monotonic()
    pair.signal(signal.SIGCONT)
    time.sleep(TURN)
    rate = (pair.sent() - before) / (time.monotonic() - begun)
    pair.signal(signal.SIGSTOP)
    time.sleep(PAUSE)
    return rate


def add_adaptive(made: Part, part: str, what: str, begin: Begin, repeats: int, say: Callable[[str], None],
                 at_least: float = 0.97) -> None:  # fmt: skip
    """Adds the median ratio of policy `adaptive` to the kernel, and of the kernel to itself. Not for what is on rings:
    a stack that is stopped for so long sends everything again."""
    say(f"{what}, by turns")
    try:
        found = rates(begin, (KERNEL, AGAIN, ADAPTIVE), repeats * TURNS)
    except SandboxError as error:
        made.failures[f"{what}, by turns"] = str(error)
        return
    for way, target in ((AGAIN, None), (ADAPTIVE, at_least)):
        add_ratio(made, part, f"{what}, {way.name}", found, way, KERNEL, target)


def add_ratio(made: Part, part: str, what: str, found: Mapping[str, Sequence[float]], over: Way, under: Way,
              at_least: float | None) -> None:  # fmt: skip
    """Adds the median of the ratios of neighbours among what ``rates`` has found."""
    samples = neighbours(found[over.name], found[under.name])
    if not samples:
        made.failures[what] = f"the client of {under.name} sends nothing"
        return
    made.figures.append(Figure(part, f"{what} / {under.name}, by turns", statistics.median(samples), "x",
                               at_least=at_least, samples=samples))
