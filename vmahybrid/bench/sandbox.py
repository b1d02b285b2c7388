"""Two network namespaces joined by a veth, and programs that run in them: for `make run`, the bench and the tests.

Nothing outside the two namespaces is touched, so no NIC is needed and the machine's own network is never at risk.
Everything is removed when the context ends, by an exception as well; :func:`sweep` removes what a killed run left.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

PREFIX = "vmh-"
_NETNS_DIR = Path("/run/netns")
_NAME = re.compile(r"vmh-[a-z]+-(\d+)-\d+[abm]")
_numbers = itertools.count()


class SandboxError(Exception):
    """A namespace, a link or a program could not be made; the text carries the command and what it said."""


def run_command(*argv: str) -> str:
    """Runs a command of at most 30 s and returns its stdout; SandboxError with its stderr when it fails."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise SandboxError(f"{' '.join(argv)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


class Program:
    """A started program whose output goes to a file, so that it can never block on a full pipe."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str] | None = None, cwd: str | None = None) -> None:
        self.argv = list(argv)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the program
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            self.argv,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._errors,
            env=None if env is None else dict(env),
            cwd=cwd,
            start_new_session=True,
        )
        self.pid = self.process.pid

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def output(self) -> str:
        """Its stdout so far."""
        return _read_all(self._output.fileno())

    @property
    def errors(self) -> str:
        """Its stderr so far."""
        return _read_all(self._errors.fileno())

    def wait(self, timeout: float = 60.0) -> int:
        """Exit code (negative: the signal); SandboxError after timeout seconds, the program is killed then."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise SandboxError(f"{' '.join(self.argv)}: still running after {timeout:g} s. {self.errors}") from None

    def result(self, timeout: float = 60.0) -> str:
        """Its stdout when it has ended well; SandboxError with all it said otherwise."""
        code = self.wait(timeout)
        if code:
            said = f"{self.errors.strip()} {self.output.strip()}"[-2000:]
            raise SandboxError(f"{' '.join(self.argv)}: exit {code}: {said}")
        return self.output

    def stop(self, signum: int = signal.SIGINT, timeout: float = 5.0) -> int:
        """Sends a signal and waits; SIGKILL when it did not help. Returns the exit code."""
        if self.running:
            self.process.send_signal(signum)
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()

    def wait_for(self, pattern: str, timeout: float = 10.0) -> re.Match[str]:
        """Waits until its output or stderr matches; SandboxError when it ends or the time is over before."""
        deadline = time.monotonic() + timeout
        while True:
            alive = self.running  # before reading: what it said last is not missed
            # the shim's banner shows the command line, in which what the program will print may be written
            errors = re.sub(r"(?m)^.*VMA INFO: Cmd Line: .*$", "", self.errors)
            found = re.search(pattern, self.output) or re.search(pattern, errors)
            if found:
                return found
            if not alive or time.monotonic() > deadline:
                state = f"no {pattern!r} within {timeout:g} s" if alive else f"ended with {self.process.returncode}"
                raise SandboxError(f"{' '.join(self.argv)}: {state}. {self.errors.strip()} {self.output.strip()}")
            time.sleep(0.01)

    def close(self) -> None:
        """Kills it if it runs and forgets its output."""
        if self.running:
            self.process.kill()
        self.process.wait()
        self._output.close()
        self._errors.close()


def _read_all(fd: int) -> str:
    size = os.fstat(fd).st_size
    return os.pread(fd, size, 0).decode(errors="replace")


@dataclass(frozen=True)
class Side:
    """One end of the veth. ``interface`` is what the service's ``--interface`` takes: namespace, colon, device."""

    netns: str
    device: str
    address: str
    mac: str

    @property
    def interface(self) -> str:
        return f"{self.netns}:{self.device}"

    def command(self, argv: Sequence[str], cpu: int | None = None) -> list[str]:
        """The command line that runs argv in this namespace, on one CPU if given, with the pid of what is started."""
        # not `ip netns exec`: that one hides /sys/fs/bpf under a fresh /sys
        inside = ["nsenter", f"--net={_NETNS_DIR / self.netns}"]
        pinned = ["taskset", "-c", str(cpu)] if cpu is not None else []
        return [*inside, *pinned, *argv]

    def ip(self, *arguments: str) -> str:
        """`ip` in this namespace."""
        return run_command("ip", "-n", self.netns, *arguments)


class Sandbox:
    """Context manager: ``a`` (10.77.0.1, device va) and ``b`` (10.77.0.2, device vb), both up, IPv6 off.

    Programs started by :meth:`start` are ended with it, and every process that is still in the namespaces is killed.
    """

    def __init__(self, tag: str = "run", mtu: int = 1500) -> None:
        stem = f"{PREFIX}{tag}-{os.getpid()}-{next(_numbers)}"
        self.mtu = mtu
        self.a = Side(f"{stem}a", "va", "10.77.0.1", "02:76:6d:68:00:01")
        self.b = Side(f"{stem}b", "vb", "10.77.0.2", "02:76:6d:68:00:02")
        self._programs: list[Program] = []
        self._at_close: list[Callable[[], object]] = []

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.a, self.b

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make(self) -> None:
        a, b = self.sides
        for side in self.sides:
            run_command("ip", "netns", "add", side.netns)
            # before the links exist: no address autoconfiguration, no multicast chatter in the counters
            run_command(*side.command(["sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1"]))
            run_command(*side.command(["sysctl", "-qw", "net.ipv6.conf.default.disable_ipv6=1"]))
        a.ip(
            *["link", "add", a.device, "mtu", str(self.mtu), "address", a.mac, "type", "veth"],
            *["peer", "name", b.device, "mtu", str(self.mtu), "address", b.mac, "netns", b.netns],
        )
        for side in self.sides:
            side.ip("link", "set", "lo", "up")
            side.ip("address", "add", f"{side.address}/24", "dev", side.device)
            side.ip("link", "set", side.device, "up")
            # multicast works without a default route
            side.ip("route", "add", "224.0.0.0/4", "dev", side.device)

    def start(
        self, side: Side | None, argv: Sequence[str], cpu: int | None = None, env: Mapping[str, str] | None = None
    ) -> Program:
        """Starts argv on a side (None: in the namespace of the caller). env is added to the caller's."""
        command = list(argv) if side is None else side.command(argv, cpu)
        program = Program(command, {**os.environ, **(env or {})})
        self._programs.append(program)
        return program

    def at_close(self, action: Callable[[], object]) -> None:
        """Calls action before the namespaces are removed, last registered first."""
        self._at_close.append(action)

    def close(self) -> None:
        """Ends every program and removes the namespaces; may be called again."""
        while self._at_close:
            self._at_close.pop()()
        for program in reversed(self._programs):
            program.close()
        self._programs.clear()
        for side in self.sides:
            remove_netns(side.netns)


def remove_netns(netns: str) -> None:
    if not (_NETNS_DIR / netns).exists():
        return
    for pid in run_command("ip", "netns", "pids", netns).split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue
    run_command("ip", "netns", "del", netns)


def sweep() -> list[str]:
    """Removes the namespaces of sandboxes whose maker is no longer alive; returns their names."""
    gone = []
    for path in sorted(_NETNS_DIR.glob(f"{PREFIX}*")):
        named = _NAME.fullmatch(path.name)
        if named and not Path(f"/proc/{named[1]}").exists():
            remove_netns(path.name)
            gone.append(path.name)
    return gone
