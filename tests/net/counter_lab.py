"""Exactly N events, then the counters: a program on a ring on side b, and the kernel as its peer on side a."""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Self

from net.service_lab import Api, until

from vmahybrid._contracts import ffi
from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service
from vmahybrid.net.netns import NetnsWorker
from vmahybrid.stats.counters import IOMUX, RING, SOCKET
from vmahybrid.stats.page import HEADER_SIZE, SOCKET_SIZE

PROGRAM = Path(__file__).with_name("counted_program.py")
Values = dict[str, int]
OPTIONS = {"SO_RCVBUFFORCE": 33}  # not in the socket module


# calls that fail whatever the socket is like, for refused() of counted_program.py; whether one sends
REFUSED = {
    "recvmsg": ("'recvmsg', {0}, None, 0", False),
    "sendmsg": ("'sendmsg', {0}, None, 0", True),
    "recvmmsg": ("'recvmmsg', {0}, None, 2, 0, None", False),
    "recvmmsg until": ("'recvmmsg', {0}, ctypes.byref(Message()), 1, 0, BAD", False),
    "sendmmsg": ("'sendmmsg', {0}, None, 2, 0", True),
    "readv": ("'readv', {0}, BAD, 1", False),
    "writev": ("'writev', {0}, BAD, 1", True),
    "writev of many": ("'writev', {0}, vector(2000), 2000", True),
    "readv of many": ("'readv', {0}, vector(2000), 2000", False),
    "readv of -1": ("'readv', {0}, vector(), -1", False),
    "preadv2": ("'preadv2', {0}, BAD, 1, ctypes.c_long(-1), 0", False),
    "send": ("'send', {0}, BAD, 9, 0x4000", True),
    "write": ("'write', {0}, BAD, 9", True),
    "write of -1": ("'write', {0}, bytes(1), ctypes.c_ssize_t(-1)", True),
}


class Program:
    """counted_program.py on side b under the shim, with VMA_* variables."""

    def __init__(self, sandbox: Sandbox, service: Service, **variables: str) -> None:
        self.api = Api(service)
        self.address = sandbox.b.address
        self.directory = Path(tempfile.mkdtemp(prefix="vmh-pages-"))
        self.log = self.directory / "log"
        settings = {"VMA_STATS_SHMEM_DIR": str(self.directory), "VMA_LOG_FILE": str(self.log)} | variables
        argv = service.run_argv([sys.executable, "-S", str(PROGRAM)], profile="none", **settings)
        self.process = subprocess.Popen(sandbox.b.command(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True, bufsize=1, env={**os.environ, **service.env})

    @property
    def pid(self) -> int:
        return self.process.pid

    def do(self, code: str, timeout: float = 10.0) -> Any:
        """The value of the last line of ``code``; AssertionError with what it raised."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(code), file=self.process.stdin, flush=True)
        return self.answer(timeout)

    def tell(self, code: str) -> None:
        """As :meth:`do`, without waiting for its end; :meth:`answer` does."""
        assert self.process.stdin is not None
        print(json.dumps(code), file=self.process.stdin, flush=True)

    def answer(self, timeout: float = 10.0) -> Any:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], timeout)[0], "no answer"
        answer = json.loads(self.process.stdout.readline() or '{"error": "it ended"}')
        assert "error" not in answer, answer["error"]
        return answer["ok"]

    def stats(self) -> Any:
        status, body = self.api.call("GET", f"/v1/stats/{self.pid}")
        assert status == 200, body
        return body

    def socket(self, name: str = "s") -> Any:
        """The row of the socket that the program has under this name."""
        fd = self.do(f"{name}.fileno()")
        return next(sock for sock in self.stats()["sockets"] if sock["fd"] == fd)

    def on_ring(self, name: str = "s", *options: str, port: int = 0, address: str = "") -> int:
        """Makes a UDP socket of that name, bound to the side's address and offloaded; its port."""
        where = address or self.address
        bound = int(self.do(f"{name} = udp({', '.join([repr(where), str(port), *options])})\n{name}.getsockname()[1]"))
        until(lambda: self.socket(name)["rx_offloaded"], 5, lambda: str(self.socket(name)))
        return bound

    def preset(self, name: str, value: int) -> None:
        """Writes ``value`` to every counter of the socket's slot, into the file that the program maps."""
        fd, inode = self.do(f"{name}.fileno()"), self.socket(name)["inode"]
        with (self.directory / f"vmastat.{self.pid}").open("r+b", buffering=0) as file:
            data = file.read()
            for at in range(HEADER_SIZE, len(data), SOCKET_SIZE):
                slot = ffi.from_buffer("struct vmh_sock_stats *", data[at : at + SOCKET_SIZE])
                if slot.used and (slot.fd, slot.inode) == (fd, inode):
                    for counter in SOCKET:
                        offset = ffi.offsetof("struct vmh_sock_stats", counter.name)
                        os.pwrite(file.fileno(), value.to_bytes(8, sys.byteorder), at + offset)
                    return
        raise AssertionError("the socket has no slot")

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


class Peer:
    """The kernel's sockets on side a."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.address = sandbox.a.address
        self._worker = NetnsWorker.open_path(sandbox.a.netns)
        self._made: list[socket.socket] = []

    def udp(self, port: int = 0, **options: int) -> socket.socket:
        made = self._worker.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._made.append(made)
        for name, value in options.items():
            made.setsockopt(socket.SOL_SOCKET, OPTIONS[name], value)
        made.bind((self.address, port))
        made.settimeout(3)
        return made

    def send(self, address: tuple[str, int], count: int, size: int) -> None:
        sock = self.udp()
        for _ in range(count):
            sock.sendto(b"x" * size, address)

    def raw(self, interface: str) -> socket.socket:
        made = self._worker.socket(socket.AF_PACKET, socket.SOCK_RAW)
        self._made.append(made)
        made.bind((interface, 0))
        return made

    def close(self) -> None:
        for sock in self._made:
            sock.close()
        self._worker.close()


def changes(before: Values, after: Values, kind: str) -> Values:
    """What differs, among counters or gauges; the growth of a counter, the new value of a gauge."""
    table = [c for c in (*SOCKET, *RING, *IOMUX) if c.kind == kind]
    names = {c.name for c in table} & before.keys()
    if kind == "counter":
        return {name: after[name] - before[name] for name in sorted(names) if after[name] != before[name]}
    return {name: after[name] for name in sorted(names) if after[name] != before[name]}
