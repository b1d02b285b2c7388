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
