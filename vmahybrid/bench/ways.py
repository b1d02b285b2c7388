"""How a TCP program is run: on the kernel, or under the shim with a policy; and whether it really was on a ring."""

from __future__ import annotations

import itertools
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from vmahybrid.bench.sandbox import Program, Sandbox, SandboxError, Side, run_command
from vmahybrid.bench.served import Service

MakeSandbox = Callable[[], Sandbox]


@dataclass(frozen=True)
class Way:
    """``policy`` of VMA_HYBRID_TCP; empty: no shim. ``gso``: the kernel's segmentation offload on both sides, whose
    long frames never reach a ring between virtual interfaces."""

    name: str
    policy: str = ""
    profile: str = ""
    gso: bool = True


KERNEL = Way("kernel")
KERNEL_NO_GSO = Way("kernel without GSO", gso=False)
ADAPTIVE = Way("adaptive", "adaptive", "adaptive")
OFFLOAD = Way("offload, -p latency", "offload", "latency", gso=False)
WAYS = (KERNEL, ADAPTIVE, OFFLOAD)


@dataclass
class Place:
    """A sandbox for runs of one way, with a service if the way needs one."""

    way: Way
    sandbox: Sandbox
    service: Service | None
    _files: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="vmh-bench-")))
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def start(self, side: Side, argv: Sequence[str], cpu: int, count: bool = True, **variables: str) -> Started:
        """argv on one CPU of a side, in this place's way. ``count``: with VMA_STATS_FILE, into which the shim writes
        each socket that is closed, which takes longer than a short connection."""
        if self.service is None:
            return Started(self.sandbox.start(side, argv, cpu), None)
        file = self._files / f"{next(self._numbers)}.stats" if count else None
        counted = {"VMA_STATS_FILE": str(file)} if file else {}
        command = self.service.run_argv(argv, self.way.profile, VMA_HYBRID_TCP=self.way.policy, **counted, **variables)
        return Started(self.sandbox.start(side, command, cpu, self.service.env), file)

    def remove(self) -> None:
        for file in self._files.glob("*"):
            file.unlink()
        self._files.rmdir()


@dataclass(frozen=True)
class Started:
    """A program, and the file into which the shim writes the counters of each socket when it is closed."""

    program: Program
    file: Path | None

    def share_on_ring(self) -> float:
        """Of the sends and receives that its closed sockets made: 0 to 1."""
        return ring_share(self.file.read_text()) if self.file is not None and self.file.exists() else 0.0

    def require_ring(self, least: float = 0.9) -> None:
        """SandboxError unless that share of its calls was on a ring. What is offloaded only in the tables, or for a
        while, must not pass for a figure of a ring."""
        share = self.share_on_ring()
        if self.file is not None and share < least:
            raise SandboxError(f"{' '.join(self.program.argv[-8:])}: only {share:.0%} of its calls were on a ring")


def ring_share(text: str) -> float:
    """Of a VMA_STATS_FILE."""
    def total(kind: str) -> int:
        return sum(int(found) for found in re.findall(rf"[TR]x {kind}: \d+ / (\d+) ", text))

    ring, kernel = total("Offload"), total("OS info")
    return ring / (ring + kernel) if ring + kernel else 0.0


@contextmanager
def places(ways: Sequence[Way] = WAYS, make: MakeSandbox = lambda: Sandbox("bench")) -> Iterator[dict[str, Place]]:
    """A sandbox for each way, by name."""
    with ExitStack() as stack:
        found = {}
        for way in ways:
            sandbox = stack.enter_context(make())
            if not way.gso:
                for side in sandbox.sides:
                    run_command(*side.command(["ethtool", "-K", side.device, "tso", "off", "gso", "off"]))
            service = stack.enter_context(Service(sandbox)) if way.policy else None
            found[way.name] = place = Place(way, sandbox, service)
            stack.callback(place.remove)
        yield found
