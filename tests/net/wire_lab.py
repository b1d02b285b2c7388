"""A sandbox whose two sides are joined by wire.c, which loses, doubles, delays and corrupts TCP frames as told."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vmahybrid.bench.lossy import LossySandbox
from vmahybrid.bench.sandbox import Program, Side, run_command


@dataclass(frozen=True)
class Faults:
    """Shares of the TCP frames. ``corrupt_a``: of those that a sends."""

    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    corrupt_a: float = 0.0
    corrupt_b: float = 0.0
    length: float = 0.0     # seconds that each frame takes

    def words(self) -> list[str]:
        rates = (self.loss, self.duplicate, self.reorder, self.corrupt_a, self.corrupt_b)
        return [str(int(rate * 1e6)) for rate in (*rates, self.length)]


class WireSandbox(LossySandbox):
    """Perfect until :meth:`bad`."""

    def __init__(self, tag: str) -> None:
        super().__init__(tag, 0.0)
        self._where = tempfile.TemporaryDirectory(prefix=f"vmh-run-{os.getpid()}-")
        self._ports: list[Side] = []
        self._wire: Program | None = None

    def _make(self) -> None:
        target = f"{self._where.name}/wire"
        command = ["cc", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-o", target]
        subprocess.run([*command, str(Path(__file__).with_name("wire.c"))], check=True, timeout=60)
        super()._make()
        for side in self.sides:
            run_command(*side.command(["ethtool", "-K", side.device, "tx", "off", "gro", "off"]))
            # the kernel's timers as short as those of the rings' stack: a test of losses must not wait for them
            run_command(*side.command(["sysctl", "-qw", "net.ipv4.tcp_rto_min_us=20000"]))
        self._start(Faults())

    def _attach(self, port: Side, other: Side) -> None:
        """By a program for both directions instead."""
        run_command(*port.command(["sysctl", "-qw", f"net.ipv6.conf.{port.device}.disable_ipv6=1"]))
        run_command(*port.command(["ethtool", "-K", port.device, "gro", "off", "tso", "off", "gso", "off"]))
        self._ports.append(port)

    def _start(self, faults: Faults, seed: int = 1) -> None:
        names = [port.device for port in self._ports]
        self._wire = self.start(self._ports[0], [f"{self._where.name}/wire", *names, str(seed), *faults.words()])
        self._wire.wait_for("ready")

    def _stop(self) -> dict[str, int]:
        assert self._wire is not None
        self._wire.stop(signal.SIGTERM)
        return {name: int(count) for name, count in re.findall(r"(\w+) (\d+)", self._wire.output)}

    @contextmanager
    def bad(self, faults: Faults, seed: int = 1) -> Iterator[dict[str, int]]:
        """The wire has these faults inside; what it did is in the dictionary afterwards."""
        counts: dict[str, int] = {}
        self._stop()
        self._start(faults, seed)
        yield counts
        counts |= self._stop()
        self._start(Faults())

    def close(self) -> None:
        super().close()
        self._where.cleanup()
