"""What the manual says of the log levels: debug has the calls of the socket API, fine what sends and receives."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vmahybrid.cli.run import library

PROGRAM = """
import os, select, socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("127.0.0.1", 0))
s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 9000)
try:
    s.bind(("127.0.0.1", 1))
except OSError:
    pass
t = socket.socket()
t.bind(("127.0.0.1", 0))
t.listen(5)
e = select.epoll()
e.register(s, select.EPOLLIN)
s.connect(s.getsockname())
s.send(b"hello")
e.poll(1)
s.recv(100)
u = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
u.connect(("::1", 9))
s.close()
print("out")
"""
DEBUG = [
    r"socket\(2, 0x\d+, 0\) = (?P<s>\d+)", r"bind\((?P=s), 127\.0\.0\.1:0\) = 0",
    r"setsockopt\((?P=s), 1, 8, 4 bytes\) = 0",
    r"bind\((?P=s), 127\.0\.0\.1:1\) = -1 EINVAL", r"socket\(2, 0x\d+, 0\) = (?P<t>\d+)", r"listen\((?P=t), 5\) = 0",
    r"epoll_create1\(0x80000\) = (?P<e>\d+)", r"epoll_ctl\((?P=e), 1, (?P=s)\) = 0", r"getsockname\((?P=s)\) = 0",
    r"connect\((?P=s), 127\.0\.0\.1:\d+\) = 0", r"connect\(\d+, \[::1\]:9\) = 0", r"close\((?P=s)\) = 0",
]  # fmt: skip
FINE = [r"send\(\d+\) = 5", r"recv\(\d+\) = 5"]
FINER = [r"epoll_wait\(\d+, -?\d+, \d+\) = 1"]


@pytest.mark.parametrize(("level", "calls", "data", "waits"), [
    ("details", False, False, False), ("debug", True, False, False), ("fine", True, True, False),
    ("finer", True, True, True), ("all", True, True, True)])  # fmt: skip
def test_calls_in_the_log(tmp_path: Path, level: str, calls: bool, data: bool, waits: bool) -> None:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("VMA_")}
    shim = {"LD_PRELOAD": str(library()), "VMA_HYBRID_SOCKET": str(tmp_path / "none"), "VMA_TRACELEVEL": level,
            "VMA_LOG_DETAILS": "0"}
    done = subprocess.run([sys.executable, "-S", "-E", "-c", PROGRAM], env=clean | shim, capture_output=True, text=True,
                          timeout=30, check=True)  # fmt: skip
    assert done.stdout == "out\n"
    said = "".join(re.findall(r"^ VMA DEBUG: (.*\n)", done.stderr, re.M))
    assert bool(re.search("[\\s\\S]*?".join(DEBUG), said)) is calls, done.stderr
    said = "".join(re.findall(r"^ VMA FINE: (.*\n)", done.stderr, re.M))
    assert bool(re.search("[\\s\\S]*".join(FINE), said)) is data, done.stderr
    said = "".join(re.findall(r"^ VMA FINER: (.*\n)", done.stderr, re.M))
    assert bool(re.search("[\\s\\S]*".join(FINER), said)) is waits, done.stderr


REST = """
import ctypes, fcntl, os, socket
libc = ctypes.CDLL(None)
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("127.0.0.1", 0))
s.connect(s.getsockname())
for of in libc.fcntl, libc.fcntl64:
    of(s.fileno(), fcntl.F_SETFL, os.O_NONBLOCK)
libc.ioctl(s.fileno(), 0x541b, bytes(4))        # FIONREAD
pair = (ctypes.c_int * 2)()
libc.socketpair(1, 2, 0, pair)
with open("/proc/self/exe", "rb") as file:
    libc.fcntl(file.fileno(), fcntl.F_GETFL)    # no socket
    for of in libc.sendfile, libc.sendfile64:
        of(s.fileno(), file.fileno(), None, 10)
r, w = os.pipe()
libc.splice(s.fileno(), None, w, None, 10, 0)
fds, now = (ctypes.c_ulong * 16)(1 << s.fileno()), (ctypes.c_long * 2)(0, 0)
libc.pselect(s.fileno() + 1, fds, None, None, now, None)
events = ctypes.create_string_buffer(64)
libc.epoll_pwait2(libc.epoll_create1(0), events, 4, now, None)
t, u, iov = socket.socket(), socket.socket(), (ctypes.c_void_p * 2)(ctypes.cast(b"abc", ctypes.c_void_p), 3)
t.bind(("127.0.0.1", 0))
t.listen()
u.connect(t.getsockname())
v = libc.accept(t.fileno(), None, None)
u.setblocking(False)
at = ctypes.c_long(-1)
for of in libc.preadv2, libc.preadv64v2, libc.pwritev2, libc.pwritev64v2:
    of(s.fileno(), iov, 1, at, 0)
for of in libc.pwritev2, libc.pwritev64v2:
    of(u.fileno(), iov, 1, at, 0)
libc.writev(s.fileno(), iov, 1)
libc.readv(s.fileno(), iov, 1)
print(s.fileno(), t.fileno(), u.fileno(), file.name)
"""


def test_calls_of_every_kind_in_the_log(tmp_path: Path) -> None:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("VMA_")}
    shim = {"LD_PRELOAD": str(library()), "VMA_HYBRID_SOCKET": str(tmp_path / "none"), "VMA_TRACELEVEL": "finer",
            "VMA_LOG_DETAILS": "0"}
    done = subprocess.run([sys.executable, "-S", "-E", "-c", REST], env=clean | shim, capture_output=True, text=True,
                          timeout=30, check=True)  # fmt: skip
    fd, listener, connection = done.stdout.split()[:3]
    for level, call in (
        ("DEBUG", rf"fcntl\({fd}, 0x4\) = 0"), ("DEBUG", rf"fcntl64\({fd}, 0x4\) = 0"),
        ("DEBUG", rf"ioctl\({fd}, 0x541b\) = 0"), ("DEBUG", r"socketpair\(1, 0x2, 0\) = 0"),
        ("FINE", rf"sendfile\({fd}, \d+\) = 10"), ("FINE", rf"sendfile64\({fd}, \d+\) = 10"),
        ("FINE", rf"splice\({fd}, \d+\) = 10"), ("FINER", rf"pselect\({int(fd) + 1}\) = 1"),
        ("FINER", r"epoll_pwait2\(\d+, 4\) = 0"), ("DEBUG", rf"accept\({listener}\) = \d+"),
        ("FINE", rf"preadv2\({fd}\) = 3"), ("FINE", rf"preadv64v2\({fd}\) = -1 EAGAIN"),
        ("FINE", rf"pwritev2\({fd}\) = 3"), ("FINE", rf"pwritev64v2\({fd}\) = 3"),
        ("FINE", rf"pwritev2\({connection}\) = 3"), ("FINE", rf"pwritev64v2\({connection}\) = 3"),
        ("FINE", rf"writev\({fd}\) = 3"), ("FINE", rf"readv\({fd}\) = 3"),
    ):  # fmt: skip
        assert re.search(rf"^ VMA {level}: {call}$", done.stderr, re.M), (call, done.stderr)
    assert len(re.findall(r": fcntl\(", done.stderr)) == 1, "a file is no socket"
    for call in ("accept4", "readv", "writev"):
        assert len(re.findall(rf": {call}\(", done.stderr)) == (call != "accept4"), "only what the program called"


def test_time_is_from_the_start_of_the_program(tmp_path: Path) -> None:
    """VMA_LOG_DETAILS=3, in milliseconds: not from the first socket, with which the log begins."""
    shim = {"LD_PRELOAD": str(library()), "VMA_HYBRID_SOCKET": str(tmp_path / "none"), "VMA_LOG_DETAILS": "3"}
    program = "import time; time.sleep(0.3)\nimport socket\n"
    program += "socket.socket(type=socket.SOCK_DGRAM).bind(('127.0.0.1', 0))"
    done = subprocess.run([sys.executable, "-c", program], env=os.environ | shim, capture_output=True, text=True,
                          timeout=30, check=True)  # fmt: skip
    first = re.match(r" Time: +(\d+)\.\d{3} Pid: ", done.stderr)
    assert first and 300 <= int(first[1]) < 20000, done.stderr
