"""The service and a UDP server under the shim, inside the guest; the peer is this process, in another namespace."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from boot import RESULTS

PEER = "peer"
PORT = 7000
CONFIG = Path("/run/vmahybrid.toml")
API = "/run/vmahybrid/api.sock"
VMAHYBRID = str(Path(sys.executable).with_name("vmahybrid"))
ECHO = Path(__file__).with_name("udp_echo.py")
DATAGRAMS = 40
_CLONE_NEWNET = 0x40000000
_READY_S = 120  # bcc compiles the XDP programs in about 15 s here; on a busy host in more
_ANSWER_S = 5.0


@dataclass(frozen=True)
class Link:
    device: str
    address: str
    peer_device: str
    peer_address: str
    rdma: str       # its RDMA device, "" for none
    backend: str    # in the service's configuration


LINKS = (
    Link("nic0", "10.77.1.1", "peer0", "10.77.1.2", "rxe0", "auto"),
    Link("nic1", "10.77.2.1", "peer1", "10.77.2.2", "", "auto"),
    Link("nic2", "10.77.3.1", "peer2", "10.77.3.2", "rxe2", "verbs"),
)
# over a link of its own, with the priorities 3, 5, 6 and 2 as 1, 7, 4 and 2 in the tag
VLAN = Link("nic1.5", "10.77.4.1", "peer1.5", "10.77.4.2", "", "auto")
VLAN_LOWER, VLAN_ID, PCP_OF = LINKS[1], 5, {3: 1, 5: 7, 6: 4, 2: 2}
PRIO = Path(__file__).with_name("udp_prio.py")
_SOL_PACKET, _PACKET_AUXDATA = 263, 8


@contextlib.contextmanager
def recording() -> Iterator[Callable[..., None]]:
    """`step(function, name)` writes what the function answers as one JSON line to the second serial port, by its own
    name or that one; a function that raises is a record with its traceback, and the next one runs."""
    # unbuffered: what was done before a crash of the guest is seen
    with open(RESULTS, "w", buffering=1, encoding="ascii") as port:

        def step(function: Callable[[], dict[str, Any]], name: str = "") -> None:
            try:
                record = function()
            except Exception:
                record = {"error": traceback.format_exc()}
            print(json.dumps({"name": name or getattr(function, "__name__", ""), **record}), file=port, flush=True)

        yield step


class Service:
    """`vmahybrid start --foreground` on the links; a context, in which it runs. Raises RuntimeError with its log."""

    def __init__(self, links: Sequence[Link] = (*LINKS, VLAN)) -> None:
        self._links = links
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # lives as long as the service
        self._process: subprocess.Popen[str] | None = None
        self._begun = time.monotonic()
        self._ready_s = -1.0
        self._code: int | None = None

    def __enter__(self) -> Self:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notify:
            notify.bind("\0vmh-ready")
            notify.settimeout(0.2)
            interfaces = [word for link in self._links for word in ("--interface", link.device)]
            CONFIG.write_text("".join(f'[interface."{link.device}"]\nbackend = "{link.backend}"\n'
                                      for link in self._links))
            self._process = subprocess.Popen(
                [VMAHYBRID, "start", "--foreground", "--config", str(CONFIG), *interfaces],
                stdout=self._log, stderr=subprocess.STDOUT, text=True,
                env={**os.environ, "NOTIFY_SOCKET": "@vmh-ready"})
            while time.monotonic() < self._begun + _READY_S and self._process.poll() is None:
                with contextlib.suppress(TimeoutError):
                    if b"READY=1" in notify.recv(4096).split(b"\n"):
                        self._ready_s = time.monotonic() - self._begun
                        break
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            self._code = self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def started(self) -> dict[str, Any]:
        if self._ready_s < 0:
            raise RuntimeError(f"the service did not get ready: {self.log}")
        return {"ready_s": self._ready_s, "features": ask("/v1/status")["features"]}

    def stopped(self) -> dict[str, Any]:
        """How it ended, its log, and what it left: links of ours, XDP programs."""
        links = json.loads(subprocess.run(["ip", "-j", "-d", "link"], capture_output=True, text=True).stdout)
        return {"code": self._code, "log": self.log, "links": [link["ifname"] for link in links],
                "xdp": [link["ifname"] for link in links if link.get("xdp")]}


def ask(path: str) -> Any:
    """An answer of the service's API. The commands would take seconds each here, most of it Python's start."""
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.closing(connection):
        connection.sock.settimeout(60)
        connection.sock.connect(API)
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read().decode()
    if answer.status != http.client.OK:
        raise RuntimeError(f"GET {path}: {answer.status}: {text}")
    return json.loads(text)


@contextlib.contextmanager
def _peer_socket(family: int = socket.AF_INET, kind: int = socket.SOCK_DGRAM, proto: int = 0,
                 ) -> Iterator[socket.socket]:
    """A socket of the peer namespace (UDP by default): it stays in the namespace in which it was made."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(path: str) -> None:
        with open(path) as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns {path}")

    enter(f"/run/netns/{PEER}")
    try:
        made = socket.socket(family, kind, proto)
    finally:
        enter("/proc/1/ns/net")
    with made:
        made.settimeout(_ANSWER_S)
        yield made


def _tagged(wire: socket.socket, wanted: int) -> dict[str, int]:
    """TCI of each datagram of udp_prio.py, by its text; the kernel keeps it beside the frame."""
    found: dict[str, int] = {}
    with contextlib.suppress(TimeoutError):
        while len(found) < wanted:
            frame, controls, _, _ = wire.recvmsg(2048, 256)
            text = frame[42:]
            if frame[12:14] != b"\x08\x00" or frame[23] != socket.IPPROTO_UDP or text.startswith(b"warm"):
                continue
            found[text.decode()] = next(int.from_bytes(data[16:18], "little") for level, kind, data in controls
                                        if (level, kind) == (_SOL_PACKET, _PACKET_AUXDATA))
    return found


def priorities(offload: bool = True, second: bool = False) -> dict[str, Any]:
    """Tags of what a program sends over the VLAN interface; second: by a ring veth."""
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile("w+"))
        if second:
            stack.enter_context(server(VLAN, PORT + 1, log))
        wire = stack.enter_context(_peer_socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)))
        wire.bind((VLAN_LOWER.peer_device, 0))
        wire.setsockopt(_SOL_PACKET, _PACKET_AUXDATA, 1)
        wire.settimeout(30)
        argv = [VMAHYBRID, "run", "-e", f"VMA_OFFLOADED_SOCKETS={int(offload)}", "--", "/usr/bin/python3", str(PRIO),
                VLAN.address, VLAN.peer_address, str(PORT)]
        program = stack.enter_context(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                                                       text=True))
        assert program.stdout is not None
        program.stdout.readline()
        tags = _tagged(wire, 6)
        sockets = [row for row in ask("/v1/sockets") if row["pid"] == program.pid]
        rings = ask("/v1/rings")
        program.communicate()
        log.seek(0)
        return {"tags": tags, "sockets": sockets, "rings": rings, "log": log.read()}


def exchange(link: Link) -> int:
    """How many of DATAGRAMS came back, each unchanged and once; at most one is on its way at a time."""
    answered = 0
    with _peer_socket() as client:
        client.connect((link.address, PORT))
        for number in range(DATAGRAMS):
            data = f"{link.device} {number}".encode()
            client.send(data)
            try:
                answered += client.recv(2048) == data
            except TimeoutError:
                continue
        client.settimeout(0.3)
        with contextlib.suppress(TimeoutError):
            raise RuntimeError(f"a datagram came back twice: {client.recv(2048)!r}")
    return answered


@contextlib.contextmanager
def server(link: Link, port: int, log: IO[str], prefix: Sequence[str] = (),
            options: Sequence[str] = ()) -> Iterator[int]:
    """The server under the shim, while it is ready; its pid. Raises RuntimeError with what it said."""
    program = ["/usr/bin/python3", str(ECHO), link.address, str(port)]
    run = [VMAHYBRID, "run", "-e", "VMA_TRACELEVEL=debug", *options, "--"]
    server = subprocess.Popen([*prefix, *run, *program], stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert server.stdout is not None
        if server.stdout.readline() != "ready\n":
            log.seek(0)
            raise RuntimeError(f"the server did not start: {log.read()}")
        yield server.pid
    finally:
        server.kill()
        server.wait()


def echo(link: Link, prefix: Sequence[str] = (), options: Sequence[str] = (), second: bool = False) -> dict[str, Any]:
    """The server under the shim on the address of one link, its peer on the kernel; what the service says of it.

    prefix goes before the command: who runs it. options are those of `vmahybrid run`. second: after another program,
    which has the interface's queue."""
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile("w+"))
        if second:
            stack.enter_context(server(link, PORT + 1, log))
        with server(link, PORT, log, prefix, options) as pid:
            before = _outs(link)
            answered = exchange(link)
            status, rings = ask("/v1/status"), ask("/v1/rings")
            explained = ask(f"/v1/sockets/{link.address}:{PORT}/explain")["steps"]
        log.seek(0)
        return {
            "answered": answered,
            "flows": [flow for flow in status["flows"] if flow["pid"] == pid],
            "rings": rings,
            "interface": next(row for row in status["interfaces"] if row["name"] == link.device),
            "outs": {way: count - before.get(way, 0) for way, count in _outs(link).items()},
            "explain": explained,
            "log": log.read(),
        }


def _outs(link: Link) -> dict[str, int]:
    """Packets per way out of the interface's XDP program; empty without one."""
    rows = ask("/v1/status")["interfaces"]
    return {str(way): int(count) for row in rows if row["name"] == link.device for way, count in row["outs"].items()}
