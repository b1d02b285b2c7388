"""Programs that talk to the service from the namespaces of a sandbox, and a look at what the host holds."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from vmahybrid.bench.sandbox import Sandbox, Side
from vmahybrid.bench.served import Service
from vmahybrid.cli.probes.kernel import PASS_INSNS
from vmahybrid.net.netns import NetnsWorker
from vmahybrid.xdp.attach import Attachment, attach
from vmahybrid.xdp.bpf import BpfProgram
from vmahybrid.xdp.image import ProgramImage

CLIENT = Path(__file__).with_name("control_client.py")


def compiled(factory: pytest.TempPathFactory, source: str, *flags: str) -> Path:
    """A program of one C file of this directory."""
    target = factory.mktemp("compiled") / source.removesuffix(".c")
    command = ["cc", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", *flags]
    subprocess.run([*command, "-o", target, Path(__file__).with_name(source)], check=True, timeout=60)
    return target


@pytest.fixture(scope="module", name="netns_pair")
def module_pair() -> Iterator[Sandbox]:
    """One sandbox for the file that imports this; with module_service, what a test leaves the next one would see."""
    with Sandbox("test") as sandbox:
        yield sandbox


@pytest.fixture(scope="module", name="service")
def module_service(netns_pair: Sandbox) -> Iterator[Service]:
    """One service for the file."""
    with Service(netns_pair) as running:
        yield running


@pytest.fixture(scope="module", name="service")
def module_services(netns_pair: Sandbox, softverbs: bool) -> Iterator[Service]:
    """One service for the file and each kind of ring."""
    with Service(netns_pair, softverbs=softverbs) as running:
        yield running


def xdp_only(_why: str) -> pytest.MarkDecorator:
    """A test of a file that runs on both kinds of rings, with a reason why it has no meaning on raw packet QPs, or why
    once is enough."""
    return pytest.mark.parametrize("softverbs", ["xdp"], indirect=True, scope="module")


def on_both(names: Sequence[str], values: Sequence[tuple[object, ...]], few: int) -> pytest.MarkDecorator:
    """A slow test: with every row of ``values`` on AF_XDP rings, with the first ``few`` on raw packet QPs as well."""
    rows = [("xdp", *row) for row in values] + [("softverbs", *row) for row in values[:few]]
    return pytest.mark.parametrize(("softverbs", *names), rows, indirect=["softverbs"], scope="module")


def under_shim(service: Service, argv: Sequence[str], **variables: str) -> list[str]:
    """As service.run_argv(), without the command itself, which takes longer than a small program: what it sets is asked
    once."""
    return ["env", *_set_by_run(tuple(service.run_argv(["env", "-0"], **variables)), *service.env.items()), *argv]


@functools.cache
def _set_by_run(argv: tuple[str, ...], *env: tuple[str, str]) -> list[str]:
    before = {**os.environ, **dict(env)}
    told = subprocess.run(argv, env=before, stdout=subprocess.PIPE, text=True, check=True, timeout=20).stdout
    settings = [entry.split("=", 1) for entry in told.split("\0") if entry]
    return [f"{name}={value}" for name, value in settings if before.get(name) != value]


class Refusal(Exception):
    """What the peer's command raised: the name of the exception and its text."""


class Peer:
    """control_client.py in a namespace; ``do(...)`` is one command and its answer."""

    def __init__(self, service: Service, side: Side, hello: bool = True, prefix: tuple[str, ...] = ()) -> None:
        argv = side.command([*prefix, sys.executable, str(CLIENT), service.env["VMA_HYBRID_SOCKET"]])
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.side, self.softverbs = side, service.softverbs
        if hello:
            self.do("hello")

    @property
    def pid(self) -> int:
        return self.process.pid  # nsenter and the like exec

    def do(self, what: str, timeout: float = 10.0, /, **arguments: Any) -> Any:
        assert self.process.stdout is not None
        self.tell(what, **arguments)
        if not select.select([self.process.stdout], [], [], timeout)[0]:
            raise TimeoutError(f"{what} was not answered")
        answer = json.loads(self.process.stdout.readline() or '{"error": "ended", "text": ""}')
        if "error" in answer:
            raise Refusal(f"{answer['error']}: {answer['text']}")
        return answer["ok"]

    def tell(self, what: str, /, **arguments: Any) -> None:
        """The command alone; do() would read its answer as its own."""
        assert self.process.stdin is not None
        print(json.dumps({"do": what, **arguments}), file=self.process.stdin, flush=True)

    def bound(self, name: str, port: int = 0, address: str = "", **more: Any) -> int:
        """A UDP socket bound to the side's address; its port."""
        return int(self.do("socket", name=name, bind=[address or self.side.address, port], **more))

    def ring(self, ifname: str = "va", **sizes: int) -> Any:
        """Asks for a ring; one on a raw packet QP where programs of the service have the software device."""
        device = f"sv_{ifname}" if self.softverbs else None
        return self.do("ring", ifname=ifname, device=device, **sizes)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self.process.wait(3)
        except subprocess.TimeoutExpired:
            self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


class Api:
    """The service's REST API on its Unix socket."""

    def __init__(self, service: Service) -> None:
        self.path = str(service.rundir / "api.sock")

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("localhost", timeout=5)
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.settimeout(5)
        connection.sock.connect(self.path)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            return answer.status, json.loads(text) if text.startswith((b"{", b"[")) else text.decode()
        finally:
            connection.close()

    def status(self) -> Any:
        return self.call("GET", "/v1/status")[1]

    def socket_flows(self) -> list[Any]:
        return [flow for flow in self.status()["flows"] if flow["source"] == "socket"]


def lost_at_once(service: Service) -> Service:
    """An interface that goes down is, not after ring.down_seconds."""
    service.ask("config", "set", "ring.down_seconds=0")
    return service


def until(condition: Callable[[], Any], timeout: float = 3.0, what: str | Callable[[], str] = "") -> Any:
    """The first true value of ``condition``; AssertionError after ``timeout`` seconds, with ``what`` as it is then."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() >= deadline:
            raise AssertionError((what() if callable(what) else what) or f"not within {timeout} s")
        time.sleep(0.01)
    return value


def counter(service: Service, name: str) -> int:
    """One of the service's, of its status."""
    return int(Api(service).status()["counters"].get(name, 0))


def homed(service: Service) -> int:
    """TCP connections that have come home."""
    return counter(service, "tcp_homed_total")


def tcp_echo(port: int) -> str:
    """A program that says "ready", and what each connection says back to it."""
    return f"""
import socket, threading
def serve(s):
    while data := s.recv(100):
        s.sendall(data)
listener = socket.create_server(("", {port}))
print("ready", flush=True)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""


def udp_echo(port: int) -> str:
    """A program that says "ready", and what each datagram to ADDRESS says back to who sent it."""
    return f"""
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.SOL_SOCKET, 33, 4 << 20)  # SO_RCVBUFFORCE
s.bind((sys.argv[1], {port}))
print("ready", flush=True)
while True:
    data, who = s.recvfrom(2048)
    s.sendto(data, who)
"""


@contextlib.contextmanager
def foreign_program(side: Side) -> Iterator[None]:
    """Somebody else's XDP program on the side's interface, which passes everything."""
    def put() -> Attachment:
        return attach(program, socket.if_nametoindex(side.device), "generic")

    image = ProgramImage("foreign", PASS_INSNS, ())
    with BpfProgram.load(image, {}) as program, NetnsWorker.open_path(side.netns) as worker:
        attachment = worker.call(put)
        try:
            yield
        finally:
            attachment.close()


def veths(side: Side) -> list[str]:
    """Ring veths in a namespace."""
    return [link["ifname"] for link in json.loads(side.ip("-j", "link")) if link["ifname"].startswith("vmhr")]


def open_files(pid: int) -> list[str]:
    """What the descriptors of a process point to, sorted, without those that come and go by themselves."""
    found: list[str] = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}").split(":")[0])
        except FileNotFoundError:
            continue
    return sorted(found)


def assert_same_files(pid: int, before: list[str], timeout: float = 3.0) -> None:
    """The process has no more descriptors of any kind than before, within ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while more := Counter(open_files(pid)) - Counter(before):
        assert time.monotonic() < deadline, f"more than before: {more}"
        time.sleep(0.02)


def udp_from(sandbox: Sandbox, side: Side, data: str, address: str, port: int, source_port: int = 0,
             device: str = "") -> None:
    """Send one datagram from a namespace; by ``device``, if the routes do not say (multicast)."""
    code = ("import socket,sys;s=socket.socket(socket.AF_INET,socket.SOCK_DGRAM);"
            "sys.argv[5] and s.setsockopt(socket.SOL_SOCKET,socket.SO_BINDTODEVICE,sys.argv[5].encode());"
            "s.bind(('0.0.0.0',int(sys.argv[4])));s.sendto(sys.argv[1].encode(),(sys.argv[2],int(sys.argv[3])))")
    argv = [sys.executable, "-S", "-c", code, data, address, str(port), str(source_port), device]
    sandbox.start(side, argv).result(10)


def idle_cpu(pid: int, seconds: float) -> float:
    """Share of one core that the threads of a process use."""
    def ran() -> int:
        return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))

    before = ran()
    time.sleep(seconds)
    return (ran() - before) / 1e9 / seconds


def resident_mib(pid: int) -> float:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024
