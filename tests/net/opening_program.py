"""Connections whose SYN nobody answers, and what calls say of them before, while and after there is no route. Prints a
line of JSON at the beginning and after each line of its standard input: ``argv`` is the peer's address and port."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import select
import socket
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any

ADDRESS, PORT = sys.argv[1], int(sys.argv[2])
FAMILY = socket.AF_INET6 if ":" in ADDRESS else socket.AF_INET
WAIT = 12.0     # the kernel's SYN goes again after 1, 2 and 4 seconds


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))


def begun(syns: int = 0) -> socket.socket:
    sock = socket.socket(FAMILY)
    sock.setblocking(False)
    if syns:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, syns)
    assert sock.connect_ex((ADDRESS, PORT)) == errno.EINPROGRESS
    return sock


class Waiting(threading.Thread):
    """In a connect() that blocks."""

    def __init__(self, again: socket.socket | None = None, seconds: int = 0) -> None:
        super().__init__(daemon=True)
        self.sock = again or socket.socket(FAMILY)
        self.seconds = seconds
        self.end: Any = None
        self.start()

    def run(self) -> None:
        self.sock.setblocking(True)
        if self.seconds:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", self.seconds, 0))
        self.end = outcome(lambda: self.sock.connect((ADDRESS, PORT)))


def asked(sock: socket.socket) -> dict[str, Any]:
    return {
        "error": sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR),
        "again": errno.errorcode.get(sock.connect_ex((ADDRESS, PORT)), ""),
        "ready": bool(select.select([sock], [sock], [], 0.05)[1]),
        "peer": outcome(sock.getpeername),
        "send": outcome(lambda: sock.send(b"x")),
        "recv": outcome(lambda: sock.recv(1)),
    }


def undo(sock: socket.socket) -> int:
    """connect() to AF_UNSPEC, which Python's can't."""
    return int(ctypes.CDLL(None).connect(sock.fileno(), bytes(16), 16))


def tell(found: Any) -> None:
    print(json.dumps(found), flush=True)


def main() -> None:
    plain, shut, closed, forked, watched, later, undone = (begun() for _ in range(7))
    brief = [begun(syns=1) for _ in range(3)]
    poll = select.epoll()
    poll.register(watched, select.EPOLLOUT)
    waiting, limited = Waiting(), Waiting(seconds=2)
    tell(asked(plain))
    sys.stdin.readline()    # there is no route now
    found = asked(plain)
    found["shutdown"] = outcome(lambda: shut.shutdown(socket.SHUT_RDWR))
    closed.close()
    found["undone"] = undo(undone), outcome(undone.getpeername)
    found["events"] = poll.poll(0.05)
    again = Waiting(later)
    limited.join(3)
    found["limited"] = limited.end
    for sock in brief:
        select.select([], [sock], [], WAIT)
    found["ended"] = brief[0].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), outcome(lambda: brief[1].recv(1))
    tell(found)
    sys.stdin.readline()    # there is one again
    for thread in (waiting, again):
        thread.join(WAIT)
    found = {"waiting": waiting.end, "again": again.end, "shut": shut.connect_ex((ADDRESS, PORT)) == errno.EINPROGRESS}
    found["undone"] = outcome(undone.getpeername), undone.connect_ex((ADDRESS, PORT)) == errno.EINPROGRESS
    found["ended"] = [errno.errorcode.get(brief[2].connect_ex((ADDRESS, PORT))) for _ in range(2)]
    opened = {"plain": plain, "watched": watched, "forked": forked, "undone": undone, "ended": brief[2]}
    for name, sock in opened.items():
        ready = bool(select.select([], [sock], [], WAIT)[1])
        found[name] = ready, sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), outcome(lambda s=sock: s.send(b"x"))
    found["events"] = [events for _, events in poll.poll(0.05)]
    if not os.fork():
        os._exit(int(outcome(lambda: forked.send(b"x")) != 1))
    found["child"] = os.wait()[1]
    tell(found)


if __name__ == "__main__":
    main()
