"""The service is killed while it parks a socket: the connection is the kernel's, or goes on with the next service."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import struct
import termios
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from net.service_lab import until
from net.test_tcp_long_frames import why
from net.test_tcp_seen import service_of_tcp  # noqa: F401
from net.test_tcp_shim import ShimPeer, at_home, offloaded, on_ring

from vmahybrid.bench.served import Service
from vmahybrid.net.tcpsock import TCP, TCP_REPAIR

pytestmark = pytest.mark.root

SYS_PIDFD_GETFD = 438
SO_GET_FILTER = 26
SOON = 4.0  # seconds
UNREAD = 40_000     # bytes
ROUNDS = 3

libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def its_connection(program: ShimPeer, port: int) -> Iterator[socket.socket]:
    """The kernel socket of a program's connection to this port."""
    pidfd = os.pidfd_open(program.pid)
    try:
        for fd in map(int, os.listdir(f"/proc/{program.pid}/fd")):
            copy = libc.syscall(SYS_PIDFD_GETFD, pidfd, fd, 0)
            try:
                sock = socket.socket(fileno=copy)
            except OSError:
                os.close(copy)
                continue
            with sock:
                if sock.family == socket.AF_INET and sock.type == socket.SOCK_STREAM and _peer(sock) == port:
                    yield sock
                    return
    finally:
        os.close(pidfd)
    raise AssertionError("no such connection")


def _peer(sock: socket.socket) -> int:
    try:
        return int(sock.getpeername()[1])
    except OSError:
        return 0


def is_filtered(sock: socket.socket) -> bool:
    instructions = ctypes.c_uint(0)
    done = libc.getsockopt(sock.fileno(), socket.SOL_SOCKET, SO_GET_FILTER, None, ctypes.byref(instructions))
    return done == 0 and instructions.value > 0


def is_repaired(sock: socket.socket) -> bool:
    return sock.getsockopt(TCP, TCP_REPAIR) != 0


def unread(sock: socket.socket) -> int:
    return int(struct.unpack("i", fcntl.ioctl(sock, termios.FIONREAD, bytes(4)))[0])


def is_emptied(sock: socket.socket) -> bool:
    """And connected again, as it has to be for its owner to be known."""
    with contextlib.suppress(OSError):
        return is_repaired(sock) and not unread(sock) and bool(sock.getpeername())
    return False


def killed_when(service: Service, program: ShimPeer, sock: socket.socket, far: str) -> bool:
    """Once it has come so far. False: that was not seen."""
    has_come = {"filter": is_filtered, "repair": is_repaired, "empty": is_emptied}[far]
    asks = threading.Thread(target=lambda: _adopt(service, program), daemon=True)
    asks.start()
    end = time.monotonic() + SOON
    while not (seen := has_come(sock)) and time.monotonic() < end:
        pass
    os.kill(service.program.pid, signal.SIGKILL)
    service.program.process.wait()
    asks.join()
    return seen


def _adopt(service: Service, program: ShimPeer) -> None:
    with contextlib.suppress(Exception):    # it is killed
        service.ask("adopt", str(program.pid))


def come_home(service: Service, a: ShimPeer, b: ShimPeer) -> int:
    """A connection that was on a ring; the port of its peer."""
    port = b.do("listen", address=b.side.address)
    a.do("connect", address=b.side.address, port=port)
    b.do("accept")
    on_ring(service, a)
    service.ask("home", str(a.pid))
    at_home(service)
    return int(port)


@pytest.mark.parametrize("waits", [False, True], ids=["idle", "in a call"])
@pytest.mark.parametrize("far", ["filter", "repair"])
def test_the_connection_goes_on(service: Service, far: str, waits: bool) -> None:
    """A call that waits meanwhile ends by the peer's next bytes."""
    a_side, b_side = service.sandbox.sides
    midway = 0
    for _ in range(ROUNDS):
        with ThreadPoolExecutor(1) as pool, ShimPeer(service, b_side, "") as b, \
                ShimPeer(service, a_side, "offload", VMA_HYBRID_TCP_BUDGET="100") as a:
            with its_connection(a, come_home(service, a, b)) as sock:
                midway += killed_when(service, a, sock, far)
                answer = pool.submit(a.do, "read", size=4) if waits else None
                time.sleep(0.3)
                service.start()
                until(lambda sock=sock: not is_filtered(sock) and not is_repaired(sock), SOON)
            if answer:
                b.do("send", data="come")
                assert answer.result(SOON) == "come"
            b.do("echo")
            begin = time.monotonic()
            assert a.do("ask", count=20, size=3000) == ""
            assert time.monotonic() - begin < SOON
            until(lambda a=a: _adopt(service, a) or bool(offloaded(service)), 2 * SOON, lambda a=a: why(service, a))
            assert a.do("ask", count=20, size=3000) == ""
            a.do("close")
            assert b.do("echo_ended")
    assert midway, "the service was never killed in the midst of it"


def test_what_was_unread_is_still_there(service: Service) -> None:
    """The service is killed when it has emptied the socket's queues, and has perhaps not answered yet."""
    a_side, b_side = service.sandbox.sides
    data, emptied = "".join(f"{number:8}" for number in range(UNREAD // 8)), 0
    for _ in range(ROUNDS):
        with ShimPeer(service, b_side, "") as b, \
                ShimPeer(service, a_side, "offload", VMA_HYBRID_TCP_BUDGET="100") as a:
            with its_connection(a, come_home(service, a, b)) as sock:
                b.do("send", data=data)
                until(lambda sock=sock: unread(sock) == len(data), SOON)
                killed_when(service, a, sock, "empty")
                emptied += is_repaired(sock) and not unread(sock)
                service.start()
                until(lambda sock=sock: not is_repaired(sock), 2 * SOON)
            assert a.do("read", size=len(data), timeout=SOON) == data
            b.do("echo")
            assert a.do("ask", count=20, size=3000) == ""
            a.do("close")
            assert b.do("echo_ended")
    assert emptied, "the service was never killed in the midst of it"


def adopted(service: Service, a: ShimPeer, b: ShimPeer) -> None:
    """A connection that the kernel has opened, on a ring."""
    come_home(service, a, b)
    b.do("echo")
    until(lambda: _adopt(service, a) or bool(offloaded(service)), 2 * SOON)


def test_the_numbers_of_an_earlier_service(service: Service) -> None:
    """Programs come back to the next service one by one: what the first has got is not taken for the second's."""
    a_side, b_side = service.sandbox.sides
    with ShimPeer(service, b_side, "") as b, ShimPeer(service, a_side, "offload", VMA_HYBRID_TCP_BUDGET="100") as a:
        adopted(service, a, b)
        os.kill(service.program.pid, signal.SIGKILL)
        service.program.process.wait()
        time.sleep(0.5)  # it has no way home
        a.process.send_signal(signal.SIGSTOP)
        service.start()
        with ShimPeer(service, b_side, "") as d, ShimPeer(service, a_side, "offload", VMA_HYBRID_TCP_BUDGET="100") as c:
            adopted(service, c, d)
            a.process.send_signal(signal.SIGCONT)
            begin = time.monotonic()
            assert a.do("ask", count=20, size=3000) == ""
            assert time.monotonic() - begin < SOON
