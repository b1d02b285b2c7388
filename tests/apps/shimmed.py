"""Real programs on the two sides of a sandbox, each under the shim or on the plain kernel."""

from __future__ import annotations

import atexit
import functools
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from net.service_lab import Api

from vmahybrid.bench.sandbox import Program, Sandbox, Side
from vmahybrid.bench.served import Service

SIDES = ["both", "server", "client"]


@functools.cache
def nap() -> Path:
    """nap.c as a library to preload."""
    out = Path(tempfile.mkdtemp(prefix="vmh-nap-"))
    out.chmod(0o755)
    atexit.register(shutil.rmtree, out, ignore_errors=True)
    library = out / "nap.so"
    source = Path(__file__).with_name("nap.c")
    subprocess.run(["cc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    return library


@dataclass
class Stage:
    """Who runs under the shim: "both", "server" (side b), "client" (side a) or "none"."""

    sandbox: Sandbox
    service: Service
    shimmed: str = "both"
    profile: str = "none"
    env: dict[str, str] = field(default_factory=dict)

    def serve(self, *argv: str, **variables: str) -> Program:
        return self._start(self.sandbox.b, argv, self.shimmed in ("both", "server"), variables)

    def client(self, *argv: str, **variables: str) -> Program:
        return self._start(self.sandbox.a, argv, self.shimmed in ("both", "client"), variables)

    def _start(self, side: Side, argv: Sequence[str], shim: bool, variables: dict[str, str]) -> Program:
        if not shim:
            return self.sandbox.start(side, argv, env=self.env)
        command = self.service.run_argv(argv, profile=self.profile, **variables)
        return self.sandbox.start(side, command, env={**self.service.env, **self.env})

    def require_rings(self, server: Program | None, client: Program | None) -> None:
        """The programs that run under the shim are on rings, while they run."""
        for program, name in ((server, "server"), (client, "client")):
            if program is not None and self.shimmed in ("both", name):
                self._require_ring(program)

    def _require_ring(self, program: Program, timeout: float = 6.0) -> None:
        """A program that has only just started gets a moment to send its first datagram.

        By the API: the command takes longer to start than some of the programs run."""
        deadline = time.monotonic() + timeout
        while not self._on_ring(program.pid):
            if not program.running or time.monotonic() > deadline:
                self.service.require_ring(program)
                return
            time.sleep(0.02)

    def _on_ring(self, pid: int) -> bool:
        flows = Api(self.service).status()["flows"]
        return any(flow["pid"] == pid and self.service.leads_to_ring(flow) for flow in flows)

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
