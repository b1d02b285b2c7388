"""A TCP connection between the two namespaces of a Lab, and what moves one end of it between kernel and "elsewhere".

The peer is on side ``a``, the socket that moves on side ``b``, whose interface has the steering program. While it
moves, its frames are held in a ring and given to the kernel afterwards (``Hold``), or dropped (``Drop``).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from net.xdp_lab import A, B, Lab, run, view

from vmahybrid.contracts import flow_key
from vmahybrid.net.netns import NetnsWorker
from vmahybrid.steering.keys import Act, Action
from vmahybrid.xdp.inject import Injector
from vmahybrid.xdp.ring import open_ring

WAIT = 20.0
RULE = 1


def tcp_lab(**options: int) -> Lab:
    """No offloads towards the ring: super-packets and unfinished checksums never come from a wire."""
    lab = Lab(**options)
    try:
        for worker, name in ((lab.a, "va"), (lab.b, "vb")):
            run(worker, "ethtool", "-K", name, "tso", "off", "gso", "off", "gro", "off", "tx", "off")
            run(worker, "sysctl", "-qw", "net.ipv4.tcp_rto_min_us=20000")
    except BaseException:
        lab.close()
        raise
    return lab


def connection(lab: Lab, accepted: bool = False, setup: Callable[[socket.socket], None] | None = None,
               ) -> tuple[socket.socket, socket.socket]:
    """(the peer's socket in a, the one in b). ``accepted``: the one in b is the server's. ``setup``: of the one in b
    before it connects, or listens. Both block."""
    server, client = (lab.b, lab.a) if accepted else (lab.a, lab.b)
    with server.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if accepted and setup:
            setup(listener)
        listener.bind((B if accepted else A, 0))
        listener.listen()
        listener.settimeout(WAIT)
        one = client.socket(socket.AF_INET, socket.SOCK_STREAM)
        if not accepted and setup:
            setup(one)
        one.connect(listener.getsockname())
        other = listener.accept()[0]
    return (one, other) if accepted else (other, one)


def tcp_key(sock: socket.socket) -> bytes:
    (local, port), (peer, peer_port) = sock.getsockname(), sock.getpeername()
    return flow_key(local, port, peer, peer_port, proto=socket.IPPROTO_TCP)


def counters(worker: NetnsWorker) -> dict[str, int]:
    """Of the namespace: /proc/net/snmp and netstat, "Tcp.OutRsts" and so on."""
    found: dict[str, int] = {}
    for name in ("snmp", "netstat"):
        lines = worker.call(Path(f"/proc/thread-self/net/{name}").read_text).splitlines()
        for names, values in zip(lines[::2], lines[1::2], strict=True):
            group, *titles = names.split()
            found |= {f"{group[:-1]}.{title}": int(v) for title, v in zip(titles, values.split()[1:], strict=True)}
    return found


@contextlib.contextmanager
def one_cpu() -> Iterator[None]:
    """All threads of this process. A veth keeps the order of what each CPU sends, not between them: a later segment
    may overtake an earlier one by milliseconds, and the peer's PAWS drops that, whoever sent it."""
    threads = {int(task.name): os.sched_getaffinity(int(task.name)) for task in Path("/proc/self/task").iterdir()}
    try:
        for thread, cpus in threads.items():
            os.sched_setaffinity(thread, {max(cpus)})
        yield
    finally:
        for thread, cpus in threads.items():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread, cpus)


class Drop:
    """Frames of a connection are lost while it is steered."""

    def __init__(self, lab: Lab) -> None:
        self._lab, self.port = lab, lab.port()
        self.key = b""

    def steer(self, sock: socket.socket) -> None:
        self.key = tcp_key(sock)
        self.port.install(self.key, Action(Act.DROP, 0, RULE).to_bytes())

    def unsteer(self) -> int:
        """How many frames came meanwhile."""
        if not self.key:
            return 0
        self.port.remove(self.key)
        count = self.port.hits(RULE)[0]
        self.port.zero_hits(RULE)
        return count

    def close(self) -> None:
        self.port.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()


class Hold(Drop):
    """They wait in a ring, and the kernel gets them afterwards."""

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        self._ring = open_ring(self.port)
        self._view = view(self._ring)
        injector = Injector.open()
        assert injector is not None
        self._injector = injector

    def steer(self, sock: socket.socket) -> None:
        self.key = tcp_key(sock)
        self.port.install(self.key, self._ring.action(RULE))

    def unsteer(self) -> int:
        super().unsteer()
        count = 0
        while frames := self._view.receive():
            self.give(frames)
            count += len(frames)
        return count

    def give(self, frames: list[bytes]) -> None:
        """To the kernel, as if the wire had brought them."""
        self._lab.b.call(self._injector.inject, self.port.ifindex, frames)

    def close(self) -> None:
        self._view.close()
        super().close()


class Stream:
    """Random bytes both ways between a peer that blocks and a program that only uses the moving socket under ``lock``,
    as the shim keeps a program off a socket that moves. ``errors`` must stay empty, the hashes be equal."""

    def __init__(self, peer: socket.socket, moving: socket.socket, seed: int) -> None:
        self.peer, self.moving = peer, moving
        self.lock = threading.Lock()
        self.errors: list[BaseException] = []
        self.sent = [0, 0]      # by the peer, by the moving end
        self.received = [0, 0]
        self._sums = {name: hashlib.blake2b() for name in ("peer out", "peer in", "out", "in")}
        self._stop = threading.Event()
        self._block = random.Random(seed).randbytes(1 << 20)
        self._random = random.Random(seed)
        self._threads = [threading.Thread(target=self._guarded, args=(work,), daemon=True)
                         for work in (self._peer_sends, self._peer_receives, self._program)]

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.errors.append(error)

    def _piece(self, at: int, size: int) -> bytes:
        start = at * 7919 % (len(self._block) - size)
        return self._block[start:start + size]

    def _peer_sends(self) -> None:
        self.peer.settimeout(WAIT)
        while not self._stop.is_set():
            data = self._piece(self.sent[0], 1 + self.sent[0] % 30000)
            self.peer.sendall(data)
            self._sums["peer out"].update(data)
            self.sent[0] += len(data)
        self.peer.shutdown(socket.SHUT_WR)

    def _peer_receives(self) -> None:
        """With pauses, so that the moving end has data that is not acknowledged, and some that it could not send."""
        while data := self.peer.recv(1 << 16):
            self._sums["peer in"].update(data)
            self.received[0] += len(data)
            if not self._stop.is_set() and self._random.random() < 0.1:
                time.sleep(self._random.random() * 0.04)

    def _program(self) -> None:
        deadline, rest, ended = time.monotonic() + 100, b"", False
        while time.monotonic() < deadline and not (ended and self._stop.is_set() and not rest):
            if not rest and not self._stop.is_set():
                rest = self._piece(self.sent[1], 1 + self.sent[1] % 50000)
            moved = 0
            with self.lock:
                with contextlib.suppress(BlockingIOError):
                    if rest:
                        count = self.moving.send(rest, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                        self._sums["out"].update(rest[:count])
                        self.sent[1] += count
                        rest, moved = rest[count:], count
                with contextlib.suppress(BlockingIOError):
                    if not ended:
                        data = self.moving.recv(1 << 16, socket.MSG_DONTWAIT)
                        self._sums["in"].update(data)
                        self.received[1] += len(data)
                        ended, moved = not data, moved + len(data)
            if not moved:
                time.sleep(0.0005)
        self.moving.shutdown(socket.SHUT_WR)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """End of both streams; AssertionError unless every byte arrived, in order."""
        self._stop.set()
        for thread in self._threads:
            thread.join(WAIT)
        assert self.errors == []
        assert not any(thread.is_alive() for thread in self._threads), f"sent {self.sent}, received {self.received}"
        assert self.sent == self.received[::-1]
        assert self._sums["peer out"].digest() == self._sums["in"].digest()
        assert self._sums["out"].digest() == self._sums["peer in"].digest()

    def close(self) -> None:
        self._stop.set()
        for end in (self.peer, self.moving):
            end.close()


@contextlib.contextmanager
def streaming(peer: socket.socket, moving: socket.socket, seed: int = 1) -> Iterator[Stream]:
    stream = Stream(peer, moving, seed)
    try:
        stream.start()
        yield stream
    finally:
        stream.close()
