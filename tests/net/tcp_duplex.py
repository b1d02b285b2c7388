"""Streams that have nothing to do with each other, both ways at once: `python tcp_duplex.py client|server ADDRESS PORT
CONNECTIONS SECONDS SEED`. Each ends with the SHA-256 of what came before, and a FIN; the side that is ready first
closes its half. Prints "fds N..." when all are open, and in the end "done BYTES", the bytes that came, if every one was
right; a stream that stands still for STILL seconds, or has another hash, is an error."""

from __future__ import annotations

import hashlib
import random
import select
import socket
import sys
import threading
import time

STILL = 15.0
SIZES = (1, 64, 1000, 5000, 40000)
NOISE = random.Random(99).randbytes(1 << 20)
DIGEST = hashlib.sha256().digest_size


class Stream:
    """One connection, served by a thread of its own."""

    def __init__(self, sock: socket.socket, chance: random.Random, until: float) -> None:
        self.sock, self.chance, self.until = sock, chance, until
        self.sent, self.got, self.tail, self.waits = hashlib.sha256(), hashlib.sha256(), b"", b""
        self.received, self.last, self.shut, self.end = 0, False, False, False

    def run(self) -> None:
        self.sock.setblocking(False)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while not (self.end and self.shut):
            if not self.waits and not self.last:
                self.next()
            poll = select.poll()
            poll.register(self.sock, (0 if self.end else select.POLLIN) | (select.POLLOUT if self.waits else 0))
            ready = poll.poll(STILL * 1000)
            if not ready:
                raise TimeoutError(f"still: {self.received} came, {len(self.waits)} wait, end {self.end}, {self.sock}")
            if ready[0][1] & ~select.POLLOUT and not self.end:
                self.read()
            if ready[0][1] & select.POLLOUT and self.waits:
                self.write()
        self.sock.close()

    def next(self) -> None:
        if time.monotonic() >= self.until:
            self.waits, self.last = self.sent.digest(), True
            return
        size = self.chance.choice(SIZES)
        at = self.chance.randrange(len(NOISE) - size)
        self.waits = NOISE[at:at + size]
        self.sent.update(self.waits)

    def read(self) -> None:
        try:
            data = self.sock.recv(65536)
        except BlockingIOError:
            return
        if not data:
            self.end = True
            assert self.tail == self.got.digest(), f"another hash after {self.received} bytes"
        self.received += len(data)
        self.tail += data
        self.got.update(self.tail[:-DIGEST])
        self.tail = self.tail[-DIGEST:]

    def write(self) -> None:
        try:
            self.waits = self.waits[self.sock.send(self.waits):]
        except BlockingIOError:
            return
        if self.last and not self.waits:
            self.sock.shutdown(socket.SHUT_WR)
            self.shut = True


def opened(role: str, address: str, port: int, count: int) -> list[socket.socket]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    if role == "server":
        with socket.create_server((address, port), family=family, backlog=64) as listener:
            print("ready", flush=True)
            listener.settimeout(30)
            return [listener.accept()[0] for _ in range(count)]
    socks = []
    for number in range(count):
        sock = socket.socket(family)
        if number % 2:      # opened by the kernel
            sock.bind(("", 0))
        sock.settimeout(30)
        sock.connect((address, port))
        socks.append(sock)
    return socks


def main(role: str, address: str, port: int, count: int, seconds: float, seed: int) -> None:
    socks = opened(role, address, port, count)
    print("fds", *[sock.fileno() for sock in socks], flush=True)
    chances = [random.Random(f"{role} {seed} {number}") for number in range(count)]
    streams = [Stream(sock, chance, time.monotonic() + seconds * (0.3 + 0.7 * chance.random()))
               for sock, chance in zip(socks, chances, strict=True)]
    failed: list[str] = []

    def guarded(stream: Stream) -> None:
        try:
            stream.run()
        except (OSError, AssertionError) as error:
            failed.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=guarded, args=(stream,)) for stream in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    print("done", sum(stream.received for stream in streams), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]), int(sys.argv[6]))
