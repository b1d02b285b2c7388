"""One experiment with a TCP connection, its figures as JSON on stdout: `tcp_param_program.py EXPERIMENT ADDRESS`.
Run by test_tcp_params.py; `listen` is the other end, on the kernel: a connection's first byte says what it does."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import random
import select
import socket
import struct
import sys
import threading
import time
from pathlib import Path

from vmahybrid.net import tcpsock
from vmahybrid.stats.page import read_page

PORT = 7300
BULK = random.Random(1).randbytes(1 << 20) * 8


def wait_acknowledged(sock: socket.socket) -> float:
    """Milliseconds until the peer has acknowledged all."""
    begun = time.monotonic()
    while tcpsock.unacked(sock) and time.monotonic() < begun + 1:
        pass
    return (time.monotonic() - begun) * 1000


def serve(sock: socket.socket) -> None:
    what = sock.recv(1)
    if what == b"e":        # echo
        while data := sock.recv(65536):
            sock.sendall(data)
    elif what == b"a":      # how long acknowledgements of single bytes take, and the answer
        sock.sendall(b"?")  # the first data of a connection is acknowledged at once, until it was answered
        sock.recv(1)
        waits = []
        for _ in range(5):
            time.sleep(0.02)
            sock.sendall(b"x")
            waits.append(wait_acknowledged(sock))
        sock.sendall(json.dumps(waits).encode())
    elif what == b"b":      # bulk
        sock.sendall(BULK)
    elif what == b"s":      # sink
        while sock.recv(65536):
            pass
    sock.close()


def listen(address: str) -> None:
    with socket.create_server((address, PORT)) as listener:
        print("ready", flush=True)
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=serve, args=(sock,), daemon=True).start()


def connected(address: str, what: bytes) -> socket.socket:
    # the first one opens the session and finds the neighbour, so it may be the kernel's
    socket.create_connection((address, PORT)).close()
    time.sleep(0.2)
    sock = socket.create_connection((address, PORT))
    sock.sendall(what)
    return sock


def echo(address: str) -> object:
    """What the connection is after some rounds."""
    with connected(address, b"e") as sock:
        for n in range(1, 20):
            sock.sendall(b"y" * n)
            left = n
            while left:
                left -= len(sock.recv(left))
        now = tcpsock.info(sock)
        return {**now._asdict(), "nodelay": sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY),
                "maxseg": sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)}


def acks(address: str) -> object:
    """The peer's times until we acknowledge a byte."""
    with connected(address, b"a") as sock:
        sock.recv(1)
        sock.sendall(b"!")
        got = b""
        while data := sock.recv(4096):
            got += data
        return {"ms": json.loads(got.lstrip(b"x"))}


def small_writes(address: str) -> object:
    """Segments that leave for 40 writes of a byte each."""
    with connected(address, b"s") as sock:
        time.sleep(0.1)
        before = tcpsock.info(sock).segs_out
        for _ in range(40):
            sock.send(b"z")
        time.sleep(0.3)
        return {"segments": tcpsock.info(sock).segs_out - before}


def ring_counter(name: str) -> int:
    """Of all our rings, by the statistics page: nothing is polled for it."""
    with (Path(os.environ["VMA_STATS_SHMEM_DIR"]) / f"vmastat.{os.getpid()}").open("rb") as page:
        return sum(ring.stats[name] for ring in read_page(page.fileno()).rings)


def sends_only(address: str) -> object:
    """Acknowledgements that were found in some milliseconds in which the program only sent."""
    with connected(address, b"s") as sock:
        time.sleep(0.1)
        sock.send(b"z")
        time.sleep(0.05)
        before = ring_counter("rx_packets")
        for _ in range(100):
            until = time.perf_counter() + 0.0003
            sock.send(b"z" * 100)
            while time.perf_counter() < until:
                pass
        return {"acknowledgements": ring_counter("rx_packets") - before}


def bulk(address: str) -> object:
    """8 MB: frames that were merged with an earlier one, segments in and out, and whether all is right."""
    with connected(address, b"b") as sock:
        got = hashlib.sha256()
        size = 0
        while data := sock.recv(1 << 18):
            got.update(data)
            size += len(data)
            time.sleep(0.0002)  # so that several come together
        info = tcpsock.info(sock)
    return {"merged": ring_counter("rx_tcp_merged"), "frames": ring_counter("rx_packets"), "segments": info.segs_in,
            "answers": info.segs_out, "size": size, "right": got.digest() == hashlib.sha256(BULK).digest()}


def options(address: str) -> object:
    """Calls that the stack can answer, between two marks that strace shows."""
    with connected(address, b"e") as sock:
        sock.sendall(b"1")
        sock.recv(1)
        with contextlib.suppress(OSError):
            os.close(991)
        for _ in range(10):
            sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            fcntl.fcntl(sock, fcntl.F_GETFL)
            fcntl.ioctl(sock, 0x541B, struct.pack("i", 0))
        with contextlib.suppress(OSError):
            os.close(992)
        return {"nodelay": sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)}


def both(sock: socket.socket) -> list[int]:
    return [sock.getsockopt(socket.IPPROTO_TCP, name) for name in (socket.TCP_NODELAY, socket.TCP_CORK)]


def own_options(address: str) -> object:
    """TCP_NODELAY and TCP_CORK where the stack alone is told: on the ring, and when the kernel has the connection."""
    told = {}
    with connected(address, b"e") as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)
        told["ring"] = both(sock)
        for value in (0, 1, 0):     # what the kernel's own say of it
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, value)
            told.setdefault("quick", []).append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK))
        os.close(os.dup(sock.fileno()))
        told["home"] = both(sock)
    with socket.socket() as sock:       # the peer refuses it, and the kernel would connect it again
        sock.setblocking(False)
        sock.connect_ex((address, PORT + 1))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
        select.select([], [sock], [], 2)
        told["error"] = [sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)]
        sock.connect_ex((address, 0))
        told["refused"] = both(sock)
    return told


def own_listener(address: str) -> object:
    """TCP_NODELAY of a connection that a listener's ring accepted, there and when the kernel has it."""
    with socket.create_server((address, PORT + 2)) as listener:
        print("ready", flush=True)
        sock, _ = listener.accept()
        with sock:
            ring = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            os.close(os.dup(sock.fileno()))
            return [ring, sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)]


def switches() -> dict[str, int]:
    """Voluntary context switches of each thread."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        for line in (task / "status").read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                found[task.name] = int(line.split()[1])
    return found


def idle(address: str) -> object:
    """How often threads other than this one woke up in a second with an idle connection."""
    with connected(address, b"e") as sock:
        sock.sendall(b"1")
        sock.recv(1)
        time.sleep(0.3)
        before = switches()
        time.sleep(1)
        after = switches()
    mine = str(threading.get_native_id())
    return {"wakeups": sum(after[task] - before.get(task, 0) for task in after if task != mine)}


def window(sock: socket.socket) -> tuple[int, int]:
    """tcpi_snd_ssthresh and tcpi_snd_cwnd."""
    threshold, cwnd = struct.unpack_from("=2I", sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), 76)
    return threshold, cwnd


def one_loss(address: str) -> object:
    """The window before the peer falls silent, which the test sees to, and its threshold when the timer has run out."""
    with connected(address, b"s") as sock:
        for _ in range(100):
            sock.sendall(bytes(3000))
            wait_acknowledged(sock)
        before, cwnd = window(sock)
        print("grown", flush=True)
        sys.stdin.readline()
        sock.sendall(b"z")
        end = time.monotonic() + 3
        while (now := window(sock)[0]) == before and time.monotonic() < end:
            time.sleep(0.001)
        print(json.dumps({"cwnd": cwnd, "ssthresh": now}), flush=True)
        sys.stdin.readline()
        return {}


def hold(address: str) -> object:
    """An established connection that stays for a while."""
    with connected(address, b"e") as sock:
        for _ in range(20):
            sock.sendall(b"14 bytes each.")
            assert sock.recv(100) == b"14 bytes each."
        print(json.dumps({"fd": sock.fileno(), "local": sock.getsockname(), "peer": sock.getpeername()}), flush=True)
        time.sleep(15)
        return {}


def main() -> None:
    what, address = sys.argv[1:3]
    if what == "listen":
        listen(address)
    print(json.dumps(globals()[what](address)), flush=True)


main()
