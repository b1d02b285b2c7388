"""A program with TCP connections that does what its standard input says, one JSON object per line; run under the shim
or without it. Everything goes by plain socket calls of Python."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import select
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from typing import Any

TCP_SAVE_SYN, TCP_SAVED_SYN = 27, 28     # linux/tcp.h


class Peer:
    def __init__(self) -> None:
        self.family = socket.AF_INET6 if sys.argv[1:] == ["6"] else socket.AF_INET
        self.listener = socket.socket(self.family)
        self.sock = socket.socket(self.family)
        self.thread: threading.Thread | None = None
        self.set: Any = None
        self.accepted: list[socket.socket] = []

    def run(self, command: dict[str, Any]) -> Any:
        return getattr(self, "do_" + command.pop("do"))(**command)

    def do_listen(self, address: str, backlog: int = 128, save_syn: bool = False, port: int = 0) -> int:
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if save_syn:
            self.listener.setsockopt(socket.IPPROTO_TCP, TCP_SAVE_SYN, 1)
        self.listener.bind((address, port))
        self.listener.listen(backlog)
        self.listener.settimeout(5)
        return int(self.listener.getsockname()[1])

    def do_listen_no_more(self) -> None:
        self.listener.close()

    def do_waits(self) -> bool:
        """Rings take connections from when the program has looked for them."""
        return bool(select.select([self.listener], [], [], 0)[0])

    def do_accept(self) -> int:
        self.sock = self.listener.accept()[0]
        self.sock.settimeout(None)
        return self.sock.fileno()

    def do_accept_all(self) -> None:
        """From now on, in a thread."""
        def run() -> None:
            with contextlib.suppress(TimeoutError):
                while True:
                    self.accepted.append(self.listener.accept()[0])

        self.listener.settimeout(15)
        threading.Thread(target=run, daemon=True).start()

    def do_connect(self, address: str, port: int, timeout: float = 0) -> int:
        self.sock = socket.socket(self.family)
        if timeout:
            self.sock.settimeout(timeout)   # non-blocking inside
        self.sock.connect((address, port))
        self.sock.settimeout(None)
        return self.sock.fileno()

    def do_saved_syn(self) -> str:
        """Of the connection that was accepted: the SYN."""
        return self.sock.getsockopt(socket.IPPROTO_TCP, TCP_SAVED_SYN, 200).hex()

    def do_connect_many(self, address: str, port: int, count: int) -> int:
        """One after another: how many are open then; they stay so."""
        for _ in range(count):
            sock = socket.socket(self.family)
            sock.setblocking(False)
            sock.connect_ex((address, port))
            self.accepted.append(sock)
            time.sleep(0.05)
        return len(select.select([], self.accepted, [], 0)[1])

    def do_keepalive(self) -> None:
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def do_nodelay(self) -> None:
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def do_user_timeout(self, ms: int) -> None:
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, ms)

    def do_echo(self, how: str = "block") -> None:
        """In a thread: everything comes back, until the end of the stream."""
        self.thread = threading.Thread(target=getattr(self, "_echo_" + how), daemon=True)
        self.thread.start()

    def _echo_block(self) -> None:
        while data := self.sock.recv(65536):
            self.sock.sendall(data)

    def _echo_select(self) -> None:
        self._echo_when(lambda: select.select([self.sock], [], [], 5)[0])

    def _echo_poll(self) -> None:
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        self._echo_when(lambda: poll.poll(5000))

    def _echo_epoll(self) -> None:
        with select.epoll() as poll:
            poll.register(self.sock, select.EPOLLIN | select.EPOLLET)
            self._echo_when(lambda: poll.poll(5), edge=True)

    def _echo_when(self, ready: Any, edge: bool = False) -> None:
        self.sock.setblocking(False)
        while ready():
            while True:
                try:
                    data = self.sock.recv(65536)
                except BlockingIOError:
                    break
                if not data:
                    self.sock.setblocking(True)
                    return
                self._send_all(data)
                if not edge:
                    break

    def _send_all(self, data: bytes) -> None:
        while data:
            try:
                data = data[self.sock.send(data):]
            except BlockingIOError:
                select.select([], [self.sock], [], 5)

    def do_echo_ended(self) -> bool:
        assert self.thread is not None
        self.thread.join(5)
        return not self.thread.is_alive()

    def do_ask(self, count: int, size: int) -> str:
        """Requests and their echoes; "" or what was wrong."""
        for number in range(count):
            data = hashlib.sha256(str(number).encode()).digest() * (size // 32 + 1)
            data = data[:size]
            self.sock.sendall(data)
            if self.do_read(size, raw=True) != data:
                return f"answer {number} differs"
        return ""

    def do_bulk(self, size: int) -> str:
        """Both directions at once; "" if what comes back is what was sent."""
        data, got = os.urandom(size), bytearray()
        sender = threading.Thread(target=self.sock.sendall, args=(data,))
        sender.start()
        while len(got) < size and (part := self.sock.recv(65536)):
            got += part
        sender.join(5)
        same = hashlib.sha256(got).digest() == hashlib.sha256(data).digest()
        return "" if same else f"{len(got)} of {size} bytes, or others"

    def do_pour(self, size: int) -> tuple[str, float]:
        """Random bytes at once: their hash, and when."""
        data = os.urandom(size)
        start = time.monotonic()
        self.sock.sendall(data)
        return hashlib.sha256(data).hexdigest(), start

    def do_fill(self) -> None:
        """Sends until the peer takes nothing for 0.7 s; goes_on() tells when it does again."""
        self.sock.setblocking(False)
        left, since = -1, time.monotonic()
        while time.monotonic() - since < 0.7:
            with contextlib.suppress(BlockingIOError):
                self.sock.send(bytes(65536))
            if (now := self._unacked()) != left:
                left, since = now, time.monotonic()
            time.sleep(0.001)

        def watch() -> None:
            deadline = time.monotonic() + 5
            while self._unacked() == left and time.monotonic() < deadline:
                time.sleep(0.001)
            self.went_on = time.monotonic()

        self.thread = threading.Thread(target=watch)
        self.thread.start()

    def do_cwnd(self) -> int:
        return int(struct.unpack_from("I", self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), 80)[0])

    def _unacked(self) -> int:
        return int(struct.unpack("i", fcntl.ioctl(self.sock, termios.TIOCOUTQ, bytes(4)))[0])

    def do_goes_on(self) -> float:
        assert self.thread is not None
        self.thread.join(6)
        return self.went_on

    def do_drain(self, size: int) -> None:
        """Reads, in a thread, what drained() tells of: the hash of so many bytes, and when the last one came."""
        def read() -> None:
            got, total = hashlib.sha256(), 0
            while total < size and (part := self.sock.recv(min(size - total, 1 << 20))):
                got.update(part)
                total += len(part)
            self.drained = got.hexdigest(), time.monotonic()

        self.thread = threading.Thread(target=read)
        self.thread.start()

    def do_drained(self) -> tuple[str, float]:
        assert self.thread is not None
        self.thread.join(10)
        return self.drained

    def do_send(self, data: str) -> None:
        self.sock.sendall(data.encode())

    def do_burst(self, count: int, size: int) -> None:
        for _ in range(count):
            self.sock.sendall(b"x" * size)

    def do_send_and_read(self) -> None:
        self.sock.settimeout(1)
        self.sock.send(b"x")
        self.sock.recv(1)

    def do_read(self, size: int, raw: bool = False, timeout: float = 0) -> Any:
        """``size`` bytes, or what there is before the end. ``timeout``: an error after it."""
        got = b""
        if timeout:
            self.sock.settimeout(timeout)
        try:
            while len(got) < size and (part := self.sock.recv(size - len(got))):
                got += part
        finally:
            if timeout:
                self.sock.settimeout(None)
        return got if raw else got.decode()

    def do_ended(self) -> tuple[str, float]:
        """The error of a recv() that waits for the end, and the seconds until then."""
        start = time.monotonic()
        try:
            self.sock.recv(1)
        except OSError as error:
            return errno.errorcode[error.errno or 0], time.monotonic() - start
        return "", time.monotonic() - start

    def do_peek(self, size: int) -> str:
        return self.sock.recv(size, socket.MSG_PEEK).decode()

    def do_nowait(self) -> str:
        try:
            return self.sock.recv(1, socket.MSG_DONTWAIT).decode()
        except OSError as error:
            return errno.errorcode[error.errno or 0]

    def do_writable(self) -> bool:
        return bool(select.select([], [self.sock], [], 1)[1])

    def do_dup(self) -> None:
        self.sock = self.sock.dup()

    def do_watch(self, flags: int = 0, change: bool = False) -> None:
        """In a new epoll set. ``change``: as a server does that has something to send, and has sent it."""
        self.set = select.epoll()
        self.set.register(self.sock, select.EPOLLIN | flags)
        if change:
            self.set.modify(self.sock, select.EPOLLIN | select.EPOLLOUT)
            self.set.modify(self.sock, select.EPOLLIN)

    def do_unwatch(self) -> None:
        self.set.close()

    def do_number(self) -> int:
        return self.sock.fileno()

    def do_change(self, events: int) -> str:
        try:
            self.set.modify(self.sock, events)
        except OSError as error:
            return errno.errorcode[error.errno or 0]
        return ""

    def do_seen(self, seconds: float = 3) -> list[int]:
        """The events of the set."""
        return [events for _, events in self.set.poll(seconds)]

    def do_shutdown(self) -> None:
        self.sock.shutdown(socket.SHUT_WR)

    def do_fork(self) -> None:
        """The child speaks, and ends."""
        pid = os.fork()
        if not pid:
            self.sock.sendall(b"child")
            os._exit(0)
        os.waitpid(pid, 0)

    def do_spawn(self) -> list[int]:
        """Children that get neither the socket nor its number."""
        actions = [(os.POSIX_SPAWN_DUP2, 2, 3)]
        spawned = [os.waitpid(os.posix_spawn("/bin/true", ["true"], os.environ, file_actions=a), 0)[1]
                   for a in ([], actions)]
        return [*spawned, os.system("true")]

    def do_run(self) -> int:
        return subprocess.run(["true"], check=False).returncode

    def do_close(self) -> None:
        self.sock.close()

    def do_exit(self) -> None:
        sys.exit(0)

    def do_half_rtt(self, count: int, size: int = 14) -> float:
        """Microseconds, median."""
        data, times = b"x" * size, []
        for _ in range(count):
            start = time.perf_counter_ns()
            self.sock.sendall(data)
            self.sock.recv(size)
            times.append(time.perf_counter_ns() - start)
        return sorted(times)[count // 2] / 2000


def main() -> None:
    peer = Peer()
    for line in sys.stdin:
        try:
            answer = {"ok": peer.run(json.loads(line))}
        except Exception as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
