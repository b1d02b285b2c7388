"""Real programs on the two sides of a sandbox, each under the shim or on the plain kernel."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from vmahybrid.bench.sandbox import Program, Sandbox, Side
from vmahybrid.bench.served import Service

SIDES = ["both", "server", "client"]


@dataclass
class Stage:
    """Who runs under the shim: "both", "server" (side b), "client" (side a) or "none"."""

    sandbox: Sandbox
    service: Service
    shimmed: str = "both"
    profile: str = "none"

    def serve(self, *argv: str, **variables: str) -> Program:
        return self._start(self.sandbox.b, argv, self.shimmed in ("both", "server"), variables)

    def client(self, *argv: str, **variables: str) -> Program:
        return self._start(self.sandbox.a, argv, self.shimmed in ("both", "client"), variables)

    def _start(self, side: Side, argv: Sequence[str], shim: bool, variables: dict[str, str]) -> Program:
        if not shim:
            return self.sandbox.start(side, argv)
        command = self.service.run_argv(argv, profile=self.profile, **variables)
        return self.sandbox.start(side, command, env=self.service.env)

    def require_rings(self, server: Program | None, client: Program | None) -> None:
        """The programs that run under the shim are on rings, while they run."""
        for program, name in ((server, "server"), (client, "client")):
            if program is not None and self.shimmed in ("both", name):
                self._require_ring(program)

    def _require_ring(self, program: Program, timeout: float = 6.0) -> None:
        """A program that has only just started gets a moment to send its first datagram; the first ring of a program on
        the software device takes two seconds, for its 200,000 buffers."""
        deadline = time.monotonic() + timeout
        while not self.service.ring_flows(program.pid) and program.running and time.monotonic() < deadline:
            time.sleep(0.05)
        self.service.require_ring(program)

    def wait_bound(self, side: Side, port: int, timeout: float = 5.0) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            listing = self.sandbox.start(side, ["cat", "/proc/net/udp"]).result(5)
            if f":{port:04X} " in listing:
                return
            time.sleep(0.05)
        raise AssertionError(f"nothing is bound to UDP port {port} in {side.netns}")


def stop(program: Program) -> int:
    return program.stop(signal.SIGINT, 5.0)
