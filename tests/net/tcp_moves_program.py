"""Connections that move amid bytes both ways: `python tcp_moves_program.py ADDRESS PORT COUNT SEED`, to a server that
echoes. Two of five begin on the ring, by their SYN; the others are opened by the kernel, for they are bound, and
adopted in the first call. Each goes home at a random moment, by dup(). Prints "moved N bytes M" when every byte was
right, or ends with an error."""

from __future__ import annotations

import hashlib
import random
import select
import socket
import sys
import threading

WORKERS = 6


def once(address: tuple[str, int], chance: random.Random) -> int:
    """Returns the bytes that went there and back."""
    sock = socket.socket()
    if chance.random() < 0.6:
        sock.bind(("", 0))
    sock.settimeout(30)
    sock.connect(address)
    sock.setblocking(False)
    data = chance.randbytes(chance.randrange(10_000, 75_000))
    leaves, sent, got = chance.randrange(len(data)), 0, hashlib.sha256()
    received, copy = 0, None
    while received < len(data):
        if copy is None and received >= leaves:
            copy = sock.dup()
            sock.close()
            sock = copy
        wanted = select.POLLIN | (select.POLLOUT if sent < len(data) else 0)
        poll = select.poll()
        poll.register(sock, wanted)
        bits = dict(poll.poll(20_000)).get(sock.fileno(), 0)
        if not bits:
            raise TimeoutError(f"{sent} sent, {received} received of {len(data)}, home from {leaves} on")
        if bits & select.POLLOUT:
            sent += sock.send(data[sent:sent + chance.randrange(1, 20_000)])
        if bits & select.POLLIN:
            part = sock.recv(65536)
            if not part:
                raise EOFError(f"after {received} of {len(data)}")
            got.update(part)
            received += len(part)
    if got.digest() != hashlib.sha256(data).digest():
        raise ValueError("other bytes")
    sock.setblocking(True)
    sock.settimeout(20)
    sock.shutdown(socket.SHUT_WR)
    if sock.recv(1):
        raise ValueError("more bytes")
    sock.close()
    return received


def main(address: str, port: int, count: int, seed: int) -> None:
    totals: list[int] = []
    errors: list[BaseException] = []
    left = iter(range(count))
    lock = threading.Lock()

    def work(number: int) -> None:
        chance = random.Random(seed * WORKERS + number)
        try:
            while not errors:
                with lock:
                    if next(left, None) is None:
                        return
                totals.append(once((address, port), chance))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    print(f"moved {len(totals)} bytes {sum(totals)}")


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
