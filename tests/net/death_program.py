"""Programs that die or see the service die: `python -S -E death_program.py ROLE ADDRESS PORT [WAITING] [PAUSE]`.

One JSON object per line on standard output: {"t": CLOCK_MONOTONIC, "n": datagrams so far, "gap": seconds since the last
one, ...}, at every gap of more than 20 ms and otherwise ten times a second, so that whoever reads it can find the
longest gap of any stretch of time. A datagram begins with its sequence number, eight bytes.
"""

import contextlib
import errno
import json
import select
import socket
import struct
import sys
import time
from collections import Counter

GAP = 0.02
REPORT = 0.1
TIMEOUT = 0.1  # of a request, seconds
SIZE = 64
_SEQ = struct.Struct("<Q")


class Progress:
    """Counts datagrams and reports as the module says."""

    def __init__(self) -> None:
        self.n = 0
        self.more: Counter[str] = Counter()
        self._last = self._reported = time.monotonic()
        self.report(self._last, 0.0)

    def tick(self) -> None:
        """Nothing came, but there is more to say."""
        if (now := time.monotonic()) - self._reported > REPORT:
            self.report(now, 0.0)

    def datagram(self) -> None:
        now = time.monotonic()
        self.n += 1
        gap = now - self._last
        self._last = now
        if gap > GAP or now - self._reported > REPORT:
            self.report(now, gap)

    def report(self, now: float, gap: float) -> None:
        self._reported = now
        print(json.dumps({"t": now, "n": self.n, "gap": round(gap, 6), **self.more}), flush=True)


def receiver(sock: socket.socket, waiting: str, timeout: float | None):
    """A function that returns (data, peer), or None after timeout seconds, by one of the ways to wait."""
    if waiting == "block":
        if timeout is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO,
                            struct.pack("ll", int(timeout), int(timeout % 1 * 1e6)))

        def receive():
            try:
                return sock.recvfrom(2048)
            except BlockingIOError:
                return None
        return receive
    sock.setblocking(False)
    milliseconds = None if timeout is None else int(timeout * 1000)
    if waiting == "poll":
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        wait = lambda: poll.poll(milliseconds)  # noqa: E731
    elif waiting == "select":
        wait = lambda: select.select([sock], [], [], timeout)[0]  # noqa: E731
    else:
        epoll = select.epoll()
        epoll.register(sock, select.EPOLLIN)
        wait = lambda: epoll.poll(timeout)  # noqa: E731

    def receive_when_ready():
        while True:
            try:
                return sock.recvfrom(2048)
            except BlockingIOError:
                if not wait():
                    return None
    return receive_when_ready


def serve(address: str, port: int, waiting: str) -> None:
    """Sends back what comes; "back": requests that came after a younger one, of the same peer."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind((address, port))
    receive, progress, newest = receiver(sock, waiting, None), Progress(), {}
    while True:
        try:
            data, peer = receive()
        except ConnectionRefusedError:
            progress.more["ECONNREFUSED"] += 1
            continue
        seq = _SEQ.unpack_from(data)[0]
        if seq <= newest.get(peer, 0):
            progress.more["back"] += 1
        newest[peer] = max(seq, newest.get(peer, 0))
        progress.datagram()
        try:
            sock.sendto(data, peer)
        except OSError as error:
            progress.more[errno.errorcode[error.errno]] += 1


def ask(address: str, port: int, waiting: str, pause: float) -> None:
    """One request at a time. "lost": no answer in time; errors by name; an answer from the future ends the program."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.connect((address, port))
    receive, progress, seq = receiver(sock, waiting, TIMEOUT), Progress(), 0
    while True:
        seq += 1
        try:
            sock.send(_SEQ.pack(seq) + bytes(SIZE - _SEQ.size))
            while (answer := receive()) is not None and (got := _SEQ.unpack_from(answer[0])[0]) < seq:
                progress.more["late"] += 1
            if answer is None:
                progress.more["lost"] += 1
                progress.tick()
                continue
            if got > seq or len(answer[0]) != SIZE:
                raise SystemExit(f"asked {seq}, answered {got} with {len(answer[0])} bytes")
            progress.datagram()
        except OSError as error:
            progress.more[errno.errorcode[error.errno]] += 1
            progress.tick()
            time.sleep(0.01)
        time.sleep(pause)


def sink(address: str, port: int, waiting: str) -> None:
    """Receives; "missing": sequence numbers that never came, or came late."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind((address, port))
    receive, progress, newest = receiver(sock, waiting, None), Progress(), None
    while True:
        seq = _SEQ.unpack_from(receive()[0])[0]
        if newest is not None and seq != newest + 1:
            progress.more["missing"] += seq - newest - 1
        newest = seq
        progress.datagram()


def send(address: str, port: int, pause: float) -> None:
    """Sends to somebody, without end, whether he lives or not."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    seq = 0
    print("sending", flush=True)
    while True:
        seq += 1
        sock.sendto(_SEQ.pack(seq) + bytes(SIZE - _SEQ.size), (address, port))
        time.sleep(pause)


def main() -> None:
    role, address, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
    waiting = sys.argv[4] if len(sys.argv) > 4 else "block"
    pause = float(sys.argv[5]) if len(sys.argv) > 5 else 0.0005
    if role == "serve":
        serve(address, port, waiting)
    elif role == "ask":
        ask(address, port, waiting, pause)
    elif role == "sink":
        sink(address, port, waiting)
    else:
        send(address, port, pause)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):  # a good end
        main()
