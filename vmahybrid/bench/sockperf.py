"""sockperf between the two sides of a sandbox, on the kernel or under the shim, and what it prints."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from vmahybrid.bench.sandbox import Program, Sandbox, SandboxError, Side
from vmahybrid.bench.served import Service

SERVER_CPU, CLIENT_CPU = 0, 1
PORT = 11111
MESSAGE = 64  # bytes


@dataclass(frozen=True)
class Latency:
    """Half round trip times in microseconds, as sockperf prints them by default."""

    p50: float
    p99: float
    samples: int


@dataclass(frozen=True)
class Rate:
    """Messages per second: what the sender says it sent, and what the receiver counted over the same time."""

    sent: float
    received: float


@dataclass(frozen=True)
class Pair:
    """A running server and client."""

    server: Program
    client: Program


# Called with the server before the client starts: what it does disturbs no figure.
Before = Callable[[Program], None]
# Called while the programs exchange messages; it takes CPU time from them, so the figures of that run mean nothing.
Meanwhile = Callable[[Pair], None]


@contextmanager
def server(
    sandbox: Sandbox, service: Service | None = None, nonblocked: bool = False, extra: Sequence[str] = ()
) -> Iterator[Program]:
    """A sockperf server on side b. On leaving it ends by SIGINT, at which it prints its totals."""
    options = ["--nonblocked"] if nonblocked else []
    argv = ["sockperf", "server", "-i", sandbox.b.address, "-p", str(PORT), *options, *extra]
    program = _start(sandbox, sandbox.b, argv, SERVER_CPU, service)
    try:
        program.wait_for(r"\[SERVER\] listen on", 15)
        wait_bound(sandbox.b, PORT)
        yield program
    finally:
        program.stop(signal.SIGINT)


def ping_pong(
    sandbox: Sandbox,
    seconds: float,
    service: Service | None = None,
    nonblocked: bool = False,
    before: Before | None = None,
    meanwhile: Meanwhile | None = None,
) -> Latency:
    """`sockperf ping-pong` with 64-byte messages for some seconds; SandboxError when it fails or loses messages."""
    options = ["--nonblocked"] if nonblocked else []
    with server(sandbox, service, nonblocked) as serving:
        if before is not None:
            before(serving)
        client = _client(sandbox, "ping-pong", seconds, service, options)
        if meanwhile is not None:
            client.wait_for("Starting test", 15)
            meanwhile(Pair(serving, client))
        return parse_latency(client.result(seconds + 20))


def throughput(
    sandbox: Sandbox, seconds: float, service: Service | None = None, before: Before | None = None
) -> Rate:
    """`sockperf throughput`: one way, 64-byte messages, as fast as the sender can."""
    with server(sandbox, service) as serving:
        if before is not None:
            before(serving)
        client = _client(sandbox, "throughput", seconds, service, [])
        said = client.result(seconds + 20)
        time.sleep(0.2)
        serving.stop(signal.SIGINT)
        return parse_rate(said, serving.output + serving.errors)


def require_rings(sandbox: Sandbox, service: Service) -> None:
    """A short ping-pong under the shim; SandboxError with the explanation unless both ends are on rings."""

    def check(pair: Pair) -> None:
        service.require_ring(pair.server)
        service.require_ring(pair.client)

    ping_pong(sandbox, 3.0, service, meanwhile=check)


def _client(sandbox: Sandbox, mode: str, seconds: float, service: Service | None, options: list[str]) -> Program:
    target = ["-i", sandbox.b.address, "-p", str(PORT), "-m", str(MESSAGE), "-t", f"{seconds:g}"]
    return _start(sandbox, sandbox.a, ["sockperf", mode, *target, *options], CLIENT_CPU, service)


def _start(sandbox: Sandbox, side: Side, argv: list[str], cpu: int, service: Service | None) -> Program:
    if service is None:
        return sandbox.start(side, argv, cpu)
    return sandbox.start(side, service.run_argv(argv), cpu, env=service.env)


def wait_bound(side: Side, port: int, protocol: str = "udp", timeout: float = 5.0) -> None:
    """Waits until a socket is bound to the port, of TCP one that listens: the kernel socket of an offloaded one is as
    well."""
    wanted = re.compile(rf"^ *\d+: [0-9A-F]+:{port:04X} [0-9A-F:]+ {'0A' if protocol == 'tcp' else ''}", re.M)
    deadline = time.monotonic() + timeout
    listing = side.command(["cat", f"/proc/net/{protocol}"])
    while not wanted.search(subprocess.run(listing, capture_output=True, text=True, check=True).stdout):
        if time.monotonic() > deadline:
            raise SandboxError(f"nothing is bound to {protocol} port {port} in {side.netns} after {timeout:g} s")
        time.sleep(0.02)


def parse_latency(text: str) -> Latency:
    """Percentiles and count of a ping-pong client; SandboxError when they are not there or messages were dropped."""
    p50 = re.search(r"percentile 50\.0+ =\s*([0-9.]+)", text)
    p99 = re.search(r"percentile 99\.0+ =\s*([0-9.]+)", text)
    count = re.search(r"\[Valid Duration\].*?ReceivedMessages=(\d+)", text)
    if not (p50 and p99 and count):
        raise SandboxError(f"sockperf printed no percentiles: {text[-1500:]}")
    dropped = re.search(r"# dropped messages = ([1-9]\d*)", text)
    if dropped:
        raise SandboxError(f"sockperf lost {dropped[1]} messages of {count[1]}: {text[-1500:]}")
    return Latency(float(p50[1]), float(p99[1]), int(count[1]))


def parse_rate(client: str, serving: str) -> Rate:
    """Message rate of a throughput client, and that of the server over the client's duration."""
    total = re.search(r"Total of (\d+) messages sent in ([0-9.]+) sec", client)
    received = re.search(r"Total (\d+) messages received", serving)
    if not (total and received):
        raise SandboxError(f"sockperf printed no message rate: {client[-1500:]} {serving[-1500:]}")
    seconds = float(total[2])
    return Rate(int(total[1]) / seconds, int(received[1]) / seconds)
