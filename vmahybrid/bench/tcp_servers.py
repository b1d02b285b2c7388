"""Servers that everybody runs, with their own load generators: Redis, memcached, nginx; unmodified, from Debian."""

from __future__ import annotations

import csv
import io
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from vmahybrid.bench import sockperf, turns
from vmahybrid.bench.figures import Part, interleave, median_figure
from vmahybrid.bench.sandbox import SandboxError
from vmahybrid.bench.ways import ADAPTIVE, KERNEL, OFFLOAD, WAYS, Place, Started, places

PORT = 12400
LIMIT = 60.0            # seconds of one run of a load generator
REDIS_REQUESTS = 20000      # of one client, for a run to last as long as it should on the kernel
REDIS_REQUESTS_MANY = 80000
MEMCACHED_REQUESTS = 60000
NO_CROWDS = {"VMA_HYBRID_TCP_TOGETHER": "0"}    # 50 clients are moved after five seconds, turns go on for longer
NGINX_CONF = """
daemon off; worker_processes 1; pid {where}/pid; error_log stderr crit;
events {{ worker_connections 1024; }}
http {{
	access_log off; keepalive_requests {requests};
	client_body_temp_path {where}/b; proxy_temp_path {where}/p; fastcgi_temp_path {where}/f;
	uwsgi_temp_path {where}/u; scgi_temp_path {where}/s;
	server {{ listen {address}:{port}; location / {{ return 200 "{body}"; }} }}
}}
"""


@dataclass(frozen=True)
class Load:
    """What a load generator said. ``p50`` in microseconds, 0 where it does not say."""

    rate: float
    p50: float = 0.0


@dataclass(frozen=True)
class Server:
    """On side b, listening on PORT, and its load generator. ``server`` takes a directory for its files; ``client`` the
    seconds for which it is to go on; ``parse`` what it has printed, and those seconds; ``variables`` are for both."""

    server: Callable[[Place, Path], list[str]]
    client: Callable[[Place, float], list[str]]
    parse: Callable[[str, float], Load]
    stop: int = signal.SIGTERM
    variables: Mapping[str, str] = field(default_factory=dict)

    @contextmanager
    def running(self, place: Place) -> Iterator[Started]:
        where = Path(tempfile.mkdtemp(prefix="vmh-bench-server-"))
        try:
            server = place.start(place.sandbox.b, self.server(place, where), sockperf.SERVER_CPU, count=False,
                                 **self.variables)
            try:
                sockperf.wait_bound(place.sandbox.b, PORT, "tcp", 15)
                yield server
            finally:
                server.program.stop(self.stop, 10)
        finally:
            shutil.rmtree(where)

    def generate(self, place: Place, seconds: float) -> Started:
        return place.start(place.sandbox.a, self.client(place, seconds), sockperf.CLIENT_CPU, count=False,
                           **self.variables)

    def begin(self, place: Place, stack: ExitStack, seconds: float) -> turns.Pair:
        """A load that goes on, for :mod:`turns`. A generator that ends by a count of requests has enough for all turns
        of three ways, since it is stopped for two thirds of ``seconds``."""
        server = stack.enter_context(self.running(place))
        client = self.generate(place, seconds)
        stack.callback(client.program.stop, signal.SIGKILL)
        return turns.Pair(client, server, place.sandbox.a)

    def run(self, place: Place, seconds: float) -> Load:
        with self.running(place):
            return self.parse(self.generate(place, seconds).program.result(LIMIT), seconds)


def redis(command: str, clients: int) -> Server:
    each = REDIS_REQUESTS if clients == 1 else REDIS_REQUESTS_MANY
    return Server(
        lambda place, _: ["redis-server", "--port", str(PORT), "--bind", place.sandbox.b.address,
                          "--protected-mode", "no", "--save", "", "--appendonly", "no"],
        lambda place, seconds: ["redis-benchmark", "-h", place.sandbox.b.address, "-p", str(PORT), "-t", command,
                                "-c", str(clients), "-n", str(int(each * seconds)), "--csv"],
        lambda text, _: parse_redis(text))  # fmt: skip


def parse_redis(text: str) -> Load:
    """Of `redis-benchmark --csv`, whose latencies are milliseconds."""
    rows = list(csv.DictReader(io.StringIO(text)))
    if not rows:
        raise SandboxError(f"redis-benchmark measured nothing: {text[-500:]}")
    return Load(float(rows[0]["rps"]), float(rows[0]["p50_latency_ms"]) * 1000)


def _memcached(place: Place, _: Path) -> list[str]:
    return ["memcached", "-u", "root", "-l", place.sandbox.b.address, "-p", str(PORT), "-U", "0", "-t", "1"]


def memcached_threads(clients: int) -> Server:
    """A thread for each connection, and a poll() for each answer."""
    def each(seconds: float) -> int:
        return max(int(MEMCACHED_REQUESTS * seconds / clients), 1)

    return Server(
        _memcached,
        lambda place, seconds: ["memcslap", f"--servers={place.sandbox.b.address}:{PORT}", "--test=get",
                                f"--concurrency={clients}", "--initial-load=100", f"--execute-number={each(seconds)}",
                                "--tcp-nodelay"],
        lambda text, seconds: parse_memcslap(text, clients * each(seconds)))  # fmt: skip


def parse_memcslap(text: str, requests: int) -> Load:
    took = re.search(r"Time to get .*?([0-9.]+) seconds", text)
    if not took or not float(took[1]):
        raise SandboxError(f"memcslap measured nothing: {text[-500:]}")
    return Load(requests / float(took[1]))


def memcached_events(clients: int) -> Server:
    """One thread with epoll; one set for nine gets, of 1024 bytes."""
    return Server(
        _memcached,
        lambda place, seconds: ["memcaslap", f"--servers={place.sandbox.b.address}:{PORT}", "--threads=1",
                                f"--concurrency={clients}", f"--time={max(round(seconds), 1)}s", "--stat_freq=1s"],
        lambda text, _: parse_memcaslap(text))  # fmt: skip


def parse_memcaslap(text: str) -> Load:
    """Its latencies are counts by powers of two, of microseconds; p50 is interpolated between two of them."""
    rate = re.search(r"^Run time: .* TPS: (\d+)", text, re.MULTILINE)
    total = re.search(r"^Total Statistics \(\d+ events\)\n(?:.*\n)*?\s*Log2 Dist:((?:\n\s*\d+:[ \d]*)+)", text,
                      re.MULTILINE)
    if not (rate and total):
        raise SandboxError(f"memcaslap measured nothing: {text[-500:]}")
    rows = (line.partition(":") for line in total[1].split("\n") if line)
    return Load(float(rate[1]), _median_of_powers(
        {int(first) + i: int(count) for first, _, counts in rows for i, count in enumerate(counts.split())}))


def _median_of_powers(counts: dict[int, int]) -> float:
    """Of counts by the number of bits of the value."""
    half, below = sum(counts.values()) / 2, 0
    for bits, count in sorted(counts.items()):
        if count and below + count >= half:
            return float(2 ** (bits - 1 + (half - below) / count))
        below += count
    return 0.0


def nginx(clients: int, requests: int = 1_000_000_000) -> Server:
    """``requests``: after so many nginx closes a connection; its own default is 1000."""
    def server(place: Place, where: Path) -> list[str]:
        address = place.sandbox.b.address
        (where / "conf").write_text(NGINX_CONF.format(
            where=where, address=address, port=PORT, body="x" * 600, requests=requests))
        return ["nginx", "-p", str(where), "-c", str(where / "conf")]

    return Server(
        server,
        lambda place, seconds: ["wrk", "-t", "1", "-c", str(clients), "-d", f"{max(round(seconds), 1)}", "--latency",
                                f"http://{place.sandbox.b.address}:{PORT}/"],
        lambda text, _: parse_wrk(text), signal.SIGQUIT)


def parse_wrk(text: str) -> Load:
    rate, p50 = re.search(r"Requests/sec:\s+([0-9.]+)", text), re.search(r"50%\s+([0-9.]+)(us|ms|s)\b", text)
    if not (rate and p50):
        raise SandboxError(f"wrk measured nothing: {text[-500:]}")
    return Load(float(rate[1]), float(p50[1]) * {"us": 1, "ms": 1e3, "s": 1e6}[p50[2]])


def _measure(part: str, servers: dict[str, Server], repeats: int, seconds: float, say: Callable[[str], None],
             stay: Mapping[str, Server] = MappingProxyType({})) -> Part:
    """The moves of `adaptive` are within its time. ``stay``: those whose connections are the kernel's for all that
    time; what it costs is less than two runs of the kernel differ by, so it is measured by turns."""
    made = Part()
    with places() as found:
        for what, server in servers.items():
            variants = {way.name: partial(server.run, found[way.name], seconds) for way in WAYS}
            runs = interleave(variants, repeats, lambda text, what=what: say(f"{what}, {text}"))  # type: ignore[misc]
            made.failures.update({f"{what}, {name}": text for name, text in runs.failures.items()})
            rates = {name: runs.of(name, lambda load: load.rate) for name in variants}
            for name in variants:
                p50 = [value for value in runs.of(name, lambda load: load.p50) if value]
                if rates[name]:
                    made.figures.append(median_figure(part, f"{what}, {name}", rates[name], "1/s"))
                if p50:
                    made.figures.append(median_figure(part, f"{what}, {name}, p50", p50, "us"))
            stays = what in stay
            made.ratio(f"{what}, adaptive / kernel", rates[ADAPTIVE.name], rates[KERNEL.name],
                       at_least=None if stays else 0.97)
            if stays:
                turns.add_adaptive(made, part, f"{what}, in the kernel", stay[what].begin, repeats, say)
            made.ratio(f"{what}, offload / kernel", rates[OFFLOAD.name], rates[KERNEL.name])
    return made


def measure_redis(repeats: int, seconds: float, say: Callable[[str], None]) -> Part:
    _require("redis-server", "redis-benchmark")
    servers = {f"{command.upper()}, {clients} {'clients' if clients > 1 else 'client'}": redis(command, clients)
                for clients in (1, 50) for command in ("get", "set")}
    stay = {what: replace(server, variables=NO_CROWDS) for what, server in servers.items() if "50 clients" in what}
    return _measure("tcp-redis", servers, repeats, seconds, say, stay)


def measure_memcached(repeats: int, seconds: float, say: Callable[[str], None]) -> Part:
    _require("memcached", "memcslap", "memcaslap")
    threads = "get, 8 threads"
    servers = {
        threads: memcached_threads(8),
        "get and set, 1 connection": memcached_events(1),
        "get and set, 8 connections": memcached_events(8),
    }
    return _measure("tcp-memcached", servers, repeats, seconds, say, stay={threads: servers[threads]})


def measure_nginx(repeats: int, seconds: float, say: Callable[[str], None]) -> Part:
    _require("nginx", "wrk")
    lasting = {f"600 bytes, {clients} connections": nginx(clients) for clients in (1, 50)}
    short = {f"600 bytes, 50 connections of {requests} requests": nginx(50, requests) for requests in (100, 1000)}
    return _measure("tcp-nginx", lasting | short, repeats, seconds, say, stay=short)


def _require(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None and not Path("/usr/sbin", program).exists():
            raise SandboxError(f"{program} is not installed. Run: make deps")
