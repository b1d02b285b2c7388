"""A service of its own for a sandbox: private run directory, ready by sd_notify, stopped by SIGTERM, nothing left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from vmahybrid.bench.sandbox import Program, Sandbox, SandboxError, Side

READY_TIMEOUT = 20.0


def tool(name: str) -> str:
    """Path of one of our commands: beside the running Python, so that a venv need not be active."""
    beside = Path(sys.executable).parent / name
    if beside.exists():
        return str(beside)
    found = shutil.which(name)
    if found is None:
        raise SandboxError(f"{name} is not installed beside {sys.executable} nor in PATH. Run: make build")
    return found


class Service:
    """`vmahybrid start --foreground` on the given sides of a sandbox (both by default).

    ``env`` is what programs and tools need to meet this service and no other. ``ready_seconds`` is the time from the
    start of the process to READY=1. ``softverbs``: programs get the software verbs device, and a ring that is
    required is a raw packet QP; otherwise it is an AF_XDP ring. Leaving the context stops the service and raises
    SandboxError when it did not exit with 0 or left something.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        sides: Sequence[Side] | None = None,
        arguments: Sequence[str] = (),
        softverbs: bool = False,
    ) -> None:
        self.sandbox = sandbox
        self.softverbs = softverbs
        self.sides = tuple(sandbox.sides if sides is None else sides)
        self._arguments = list(arguments)
        self.rundir = Path(tempfile.mkdtemp(prefix=f"vmh-run-{os.getpid()}-"))
        # programs of any user connect to it; the service sets the mode of what it makes there
        self.rundir.chmod(0o755)
        self.env: dict[str, str] = {
            "VMAHYBRID_RUNDIR": str(self.rundir),
            "VMA_HYBRID_SOCKET": str(self.rundir / "control.sock"),
            "CACHE_DIRECTORY": os.environ.get("CACHE_DIRECTORY") or os.devnull,  # nothing is to be left on the machine
        }
        self.ready_seconds = 0.0
        self._program: Program | None = None
        self._links_before: dict[str, set[str]] = {}

    @property
    def program(self) -> Program:
        if self._program is None:
            raise SandboxError("the service was not started")
        return self._program

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.kill()
            return
        self.stop()

    def start(self, env: Mapping[str, str] | None = None) -> None:
        """Starts it and returns when it is ready; SandboxError with its log when it is not within 20 s."""
        for side in self.sides:
            self._links_before[side.netns] = _links(side)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notify:
            path = self.rundir / "notify"
            notify.bind(str(path))
            notify.settimeout(0.1)
            interfaces = [word for side in self.sides for word in ("--interface", side.interface)]
            command = [tool("vmahybrid"), "start", "--foreground", *interfaces, *self._arguments]
            begun = time.monotonic()
            wanted = {**self.env, "NOTIFY_SOCKET": str(path), **(env or {})}
            self._program = self.sandbox.start(None, command, env=wanted)
            try:
                self._await_ready(notify, begun)
            finally:
                path.unlink()

    def _await_ready(self, notify: socket.socket, begun: float) -> None:
        while time.monotonic() < begun + READY_TIMEOUT:
            alive = self.program.running
            try:
                if b"READY=1" in notify.recv(4096).split(b"\n"):
                    self.ready_seconds = time.monotonic() - begun
                    return
            except TimeoutError:
                if not alive:
                    break
        state = "is not ready" if self.program.running else f"ended with {self.program.process.returncode}"
        raise SandboxError(f"the service {state}: {self.log[-3000:]}")

    @property
    def log(self) -> str:
        return self.program.errors + self.program.output

    def ask(self, *arguments: str, timeout: float = 20.0) -> str:
        """stdout of `vmahybrid ARGUMENTS` against this service; SandboxError when it fails."""
        return self.sandbox.start(None, [tool("vmahybrid"), *arguments], env=self.env).result(timeout)

    def ring_flows(self, pid: int) -> list[dict[str, object]]:
        """Rows of `vmahybrid flows` of a process that lead to a ring; empty when it runs on the kernel."""
        answer = json.loads(self.ask("flows", "--json"))
        return [flow for flow in answer["flows"] if flow["pid"] == pid and self.leads_to_ring(flow)]

    @property
    def backend(self) -> str:
        """Of the rings that programs get, as `vmahybrid flows` names it."""
        return "verbs" if self.softverbs else "xdp"

    def leads_to_ring(self, flow: Mapping[str, Any]) -> bool:
        """Whether this row of `vmahybrid flows` leads to a ring of :attr:`backend`."""
        return bool(flow["action"] == "ring" and flow["backend"] == self.backend)

    def require_ring(self, program: Program) -> None:
        """SandboxError with what `vmahybrid explain` says unless the program has a flow on a ring."""
        if not self.ring_flows(program.pid):
            why = self.ask("explain", str(program.pid))
            raise SandboxError(f"{' '.join(program.argv)} has no flow on a ring of {self.backend}. {why}")

    def run_argv(self, argv: Sequence[str], profile: str = "latency", **variables: str) -> list[str]:
        """The command that runs argv under the shim, with the given VMA_* variables; it needs :attr:`env` as well."""
        settings = [word for name, value in variables.items() for word in ("-e", f"{name}={value}")]
        device = ["--softverbs"] if self.softverbs else []
        return [*_sanitizer(), tool("vmahybrid"), "run", "-p", profile, *device, *settings, "--", *argv]

    def stop(self, timeout: float = 10.0) -> None:
        """SIGTERM; SandboxError unless it exits with 0 within timeout seconds and nothing of it is left."""
        code = self.program.stop(signal.SIGTERM, timeout)
        log = self.log[-3000:]
        left = self.leftovers()
        shutil.rmtree(self.rundir, ignore_errors=True)
        if code:
            raise SandboxError(f"the service ended with {code} after SIGTERM: {log}")
        if left:
            raise SandboxError(f"the service left {'; '.join(left)}: {log}")

    def kill(self) -> None:
        """Ends it at once, without a check: after a failure."""
        if self._program is not None and self._program.running:
            self._program.stop(signal.SIGTERM, 3.0)
        shutil.rmtree(self.rundir, ignore_errors=True)

    def leftovers(self, patience: float = 1.0) -> list[str]:
        """What is still there and should not be, after up to `patience` seconds: the kernel frees in the background."""
        deadline = time.monotonic() + patience
        while (left := self._leftovers()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def _leftovers(self) -> list[str]:
        left = [f"file {path}" for path in sorted(self.rundir.rglob("*")) if not path.is_dir()]
        for side in self.sides:
            left += [f"link {name}" for name in sorted(_links(side) - self._links_before[side.netns])]
            if xdp_program(side) is not None:
                left.append(f"an XDP program on {side.interface}")
        return left


def _sanitizer() -> list[str]:
    """What goes before a command when VMAHYBRID_LIB is a sanitizer's build: `make test-asan` names its runtime."""
    runtime = os.environ.get("VMH_SANITIZER_RUNTIME")
    if not runtime:
        return []
    # programs are not ours: their leaks and their SIGSEGV handlers are their own
    options = os.environ.get("ASAN_OPTIONS", "detect_leaks=0:handle_segv=0")
    return ["env", f"LD_PRELOAD={runtime}", f"ASAN_OPTIONS={options}"]


def run_words(*options: str) -> list[str]:
    """`vmahybrid run OPTIONS`, of a sanitizer's build where that is tested."""
    return [*_sanitizer(), tool("vmahybrid"), "run", *options]


def _links(side: Side) -> set[str]:
    return {link["ifname"] for link in json.loads(side.ip("-j", "link"))}


def xdp_program(side: Side) -> int | None:
    """Id of the XDP program attached to the device of a side, in whatever mode; None also when the device is gone."""
    listed = json.loads(side.ip("-j", "-d", "link", "show"))
    described: dict[str, Any] = next((link for link in listed if link["ifname"] == side.device), {})
    program = described.get("xdp", {}).get("prog", {}).get("id")
    return None if program is None else int(program)
