"""A program that makes the socket calls that its standard input names, one JSON object per line, and says what came of
each: a value, or the name of the errno. Run under the shim or without it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import select
import signal
import socket
import struct
import sys
import termios
import threading
import time
from typing import Any

POLL = {name: getattr(select, name) for name in ("POLLIN", "POLLOUT", "POLLERR", "POLLHUP", "POLLRDHUP")}
EPOLL = {name: getattr(select, name) for name in ("EPOLLIN", "EPOLLOUT", "EPOLLERR", "EPOLLHUP", "EPOLLRDHUP")}


def shown(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, tuple):
        return [shown(v) for v in value]
    return value


def outcome(call: Any, *arguments: Any) -> Any:
    try:
        return shown(call(*arguments))
    except OSError as error:
        return type(error).__name__ if error.errno is None else errno.errorcode.get(error.errno, str(error.errno))


def names(bits: int, table: dict[str, int]) -> list[str]:
    return [name for name, bit in table.items() if bits & bit]


FAMILY = socket.AF_INET6 if sys.argv[1:] == ["6"] else socket.AF_INET


class Calls:
    def __init__(self) -> None:
        self.sockets: dict[str, socket.socket] = {}
        self.threads: dict[str, tuple[threading.Thread, list[Any]]] = {}
        self.handled = 0

    def run(self, command: dict[str, Any]) -> Any:
        return getattr(self, "do_" + command.pop("do"))(**command)

    def do_new(self, name: str, blocking: bool = True) -> None:
        self.sockets[name] = socket.socket(FAMILY, socket.SOCK_STREAM)
        self.sockets[name].setblocking(blocking)

    def do_listen(self, name: str, address: str, port: int = 0, backlog: int = 16, reuse: bool = True,
                  only_v6: int = -1) -> Any:
        sock = self.sockets[name] = socket.socket(FAMILY, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        if only_v6 >= 0:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only_v6)
        result = outcome(sock.bind, (address, port))
        if result is None:
            result = outcome(sock.listen, backlog)
        return sock.getsockname()[1] if result is None else result

    def do_call(self, name: str, method: str, arguments: list[Any] | None = None) -> Any:
        """A list stands for an address."""
        given = [tuple(a) if isinstance(a, list) else a.encode() if isinstance(a, str) else a for a in arguments or []]
        return outcome(getattr(self.sockets[name], method), *given)

    def do_connect_unspec(self, name: str) -> Any:
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.connect(self.sockets[name].fileno(), struct.pack("=H14x", socket.AF_UNSPEC), 16) == 0:
            return None
        return errno.errorcode[ctypes.get_errno()]

    def do_accept(self, name: str, new: str) -> Any:
        def accept() -> Any:
            self.sockets[new], peer = self.sockets[name].accept()
            return peer[0]

        return outcome(accept)

    def do_linger(self, name: str, seconds: int) -> Any:
        value = struct.pack("ii", 1, seconds)
        return outcome(self.sockets[name].setsockopt, socket.SOL_SOCKET, socket.SO_LINGER, value)

    def do_timeout(self, name: str, which: str, seconds: float) -> Any:
        value = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        return outcome(self.sockets[name].setsockopt, socket.SOL_SOCKET, getattr(socket, which), value)

    def do_option(self, name: str, level: str, option: str, value: int | None = None, room: int | None = None) -> Any:
        names = getattr(socket, level), getattr(socket, option)
        sock = self.sockets[name]
        if room:
            return outcome(lambda: list(sock.getsockopt(*names, room)))
        return outcome(sock.getsockopt, *names) if value is None else outcome(sock.setsockopt, *names, value)

    def do_state(self, name: str) -> Any:
        """tcpi_state"""
        return self.sockets[name].getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]

    def do_segments_in(self, name: str) -> int:
        """tcpi_segs_in"""
        info = self.sockets[name].getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 144)
        return int(struct.unpack_from("I", info, 140)[0])

    def do_outq(self, name: str) -> int:
        """SIOCOUTQ"""
        return int(struct.unpack("i", fcntl.ioctl(self.sockets[name], termios.TIOCOUTQ, bytes(4)))[0])

    def do_poll(self, name: str, milliseconds: int = 0) -> Any:
        poll = select.poll()
        poll.register(self.sockets[name], POLL["POLLIN"] | POLL["POLLOUT"] | POLL["POLLRDHUP"])
        found = poll.poll(milliseconds)
        return names(found[0][1], POLL) if found else []

    def do_until(self, name: str, wanted: str, seconds: float = 3) -> Any:
        """The poll bits once ``wanted`` is among them."""
        end = time.monotonic() + seconds
        while wanted not in (bits := self.do_poll(name)) and time.monotonic() < end:
            time.sleep(0.005)
        return bits

    def do_select(self, name: str, seconds: float = 0) -> Any:
        sock = [self.sockets[name]]
        return [bool(found) for found in select.select(sock, sock, sock, seconds)]

    def do_ecn_seen(self, name: str) -> Any:
        """TCPI_OPT_ECN_SEEN: a packet of the peer had a bit of congestion notification."""
        return bool(self.sockets[name].getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[5] & 16)

    def do_except(self, name: str, seconds: float) -> Any:
        """What select() says of the third set alone, and whether it took its time."""
        began = time.monotonic()
        found = select.select([], [], [self.sockets[name]], seconds)[2]
        return [bool(found), time.monotonic() - began >= seconds]

    def do_epoll(self, name: str, milliseconds: int, flags: int = 0) -> Any:
        with select.epoll() as poll:
            poll.register(self.sockets[name], EPOLL["EPOLLIN"] | EPOLL["EPOLLOUT"] | EPOLL["EPOLLRDHUP"] | flags)
            found = poll.poll(milliseconds / 1000)
        return names(found[0][1], EPOLL) if found else []

    def do_start(self, thread: str, what: str, **command: Any) -> None:
        """A command in a thread."""
        result: list[Any] = []

        def work() -> None:
            begun = time.monotonic()
            result.append(self.run({"do": what, **command}))
            result.append(time.monotonic() - begun)

        self.threads[thread] = threading.Thread(target=work, daemon=True), result
        self.threads[thread][0].start()

    def do_end(self, thread: str, seconds: float = 3) -> Any:
        """What it returned; "still" if it has not."""
        worker, result = self.threads[thread]
        worker.join(seconds)
        return "still" if worker.is_alive() else result[0]

    def do_took(self, thread: str) -> float:
        return float(self.threads[thread][1][1])

    def do_interrupted(self, name: str, method: str, arguments: list[Any], restart: bool, after: float) -> Any:
        """The call in the main thread, and SIGALRM during it."""
        def handler(*_: Any) -> None:
            self.handled += 1
            raise InterruptedError(errno.EINTR, "by the handler")

        signal.signal(signal.SIGALRM, handler)
        signal.siginterrupt(signal.SIGALRM, not restart)
        signal.setitimer(signal.ITIMER_REAL, after)
        try:
            return self.do_call(name, method, arguments)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def do_bulk(self, name: str, size: int) -> Any:
        """Echoes itself: a sender thread, and a reader that compares."""
        data, got = os.urandom(size), bytearray()
        sock = self.sockets[name]
        sender = threading.Thread(target=sock.sendall, args=(data,))
        sender.start()
        while len(got) < size and (part := sock.recv(1 << 16)):
            got += part
        sender.join(5)
        return bytes(got) == data

    def do_echo(self, name: str) -> Any:
        sock = self.sockets[name]
        total = 0
        while data := sock.recv(1 << 16):
            sock.sendall(data)
            total += len(data)
        return total

    def do_serve(self, name: str, size: int = 80, answer: int = 64) -> None:
        """In a thread: each connection is read, answered and closed by whoever is first."""
        def serve() -> None:
            listener = self.sockets[name]
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError:
                    return
                with sock, contextlib.suppress(OSError):
                    have = 0
                    while have < size and (part := sock.recv(size - have)):
                        have += len(part)
                    if have == size:
                        sock.sendall(b"y" * answer)
                        sock.recv(1)

        threading.Thread(target=serve, daemon=True).start()

    def do_visits(self, address: str, port: int, count: int, size: int = 80, answer: int = 64) -> Any:
        """Connections one after another; how many were good."""
        good = 0
        for _ in range(count):
            with socket.create_connection((address, port), timeout=5) as sock:
                sock.settimeout(None)
                sock.sendall(b"x" * size)
                have = 0
                while have < answer and (part := sock.recv(answer - have)):
                    have += len(part)
                good += have == answer
        return good

    def do_many(self, address: str, port: int, count: int) -> Any:
        """As many open at a time."""
        for i in range(count):
            self.sockets[f"many{i}"] = socket.create_connection((address, port), timeout=5)
        return count

    def do_pour(self, name: str, most: int) -> Any:
        """As much as goes while nobody reads, and its hash."""
        sock, sent, sum_ = self.sockets[name], 0, hashlib.sha256()
        sock.settimeout(1)
        with contextlib.suppress(TimeoutError):
            while sent < most:
                data = os.urandom(5000)
                done = sock.send(data)
                sum_.update(data[:done])
                sent += done
        sock.settimeout(None)
        return sent, sum_.hexdigest()

    def do_drain(self, name: str, size: int) -> Any:
        sock, got, sum_ = self.sockets[name], 0, hashlib.sha256()
        while got < size and (part := sock.recv(min(1 << 16, size - got))):
            sum_.update(part)
            got += len(part)
        return got, sum_.hexdigest()

    def do_leave(self, name: str, data: str) -> None:
        time.sleep(0.2)     # the answer to this command comes before
        self.sockets[name].sendall(data.encode())
        os._exit(0)

    def do_dup(self, name: str, new: str) -> None:
        self.sockets[new] = self.sockets[name].dup()

    def do_fork(self, name: str, method: str, arguments: list[Any] | None = None) -> Any:
        """The call in a child."""
        r, w = os.pipe()
        pid = os.fork()
        if not pid:
            os.write(w, json.dumps(self.do_call(name, method, arguments)).encode())
            os._exit(0)
        os.close(w)
        answer = b""
        while part := os.read(r, 4096):
            answer += part
        os.close(r)
        os.waitpid(pid, 0)
        return json.loads(answer)

    def do_vanish(self, name: str) -> None:
        """As if its machine had lost its power: a socket in repair mode (TCP_REPAIR) is closed without a word."""
        sock = self.sockets.pop(name)
        sock.setsockopt(socket.IPPROTO_TCP, 19, 1)
        sock.close()

    def do_close(self, name: str) -> Any:
        return outcome(self.sockets.pop(name).close)

    def do_fds(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def do_rss(self) -> int:
        """KiB"""
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4

    def do_exit(self) -> None:
        sys.exit(0)


def main() -> None:
    calls = Calls()
    for line in sys.stdin:
        try:
            answer = {"ok": calls.run(json.loads(line))}
        except Exception as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
