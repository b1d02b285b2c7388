"""SO_PRIORITY and IP_TOS on rings: the kernel gives a frame of an AF_XDP socket that socket's priority, of which a VLAN
interface makes the tag's PCP (this kernel has none: tests/vm has). Frames and kernel socket must agree."""

from __future__ import annotations

import ctypes
import os
import re
import socket
import sys
from pathlib import Path

import pytest
from net.service_lab import module_pair, module_service  # noqa: F401

from vmahybrid.bench.sandbox import Program, Sandbox
from vmahybrid.bench.served import Service

pytestmark = [pytest.mark.root, pytest.mark.timeout(60)]

SO_PRIORITY, SO_DOMAIN, PIDFD_GETFD, AF_XDP = 12, 39, 438, 44
PROGRAM = """
import socket, sys
there = (sys.argv[1], 7330)
def new():
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.bind((sys.argv[2], 0))
    s.sendto(b"x", there)
    return s
one, other = new(), new()
for line in sys.stdin:
    print("got", eval(line), flush=True)
"""


def xsk_priority(program: Program) -> int:
    """Of the AF_XDP socket by which the program sends; one that only receives has 0."""
    libc, found = ctypes.CDLL(None, use_errno=True), []
    pidfd = os.pidfd_open(program.pid)
    try:
        for entry in Path(f"/proc/{program.pid}/fd").iterdir():
            if not os.readlink(entry).startswith("socket:"):
                continue
            fd = libc.syscall(PIDFD_GETFD, pidfd, int(entry.name), 0)
            assert fd >= 0, os.strerror(ctypes.get_errno())
            with socket.socket(socket.AF_INET, socket.SOCK_RAW, 0, fd) as sock:  # Python does not know AF_XDP
                if sock.getsockopt(socket.SOL_SOCKET, SO_DOMAIN) == AF_XDP:
                    found.append(sock.getsockopt(socket.SOL_SOCKET, SO_PRIORITY))
    finally:
        os.close(pidfd)
    assert found, "no AF_XDP socket"
    return max(found)


def test_frames_have_the_sender_s_priority(netns_pair: Sandbox, service: Service, tmp_path: Path) -> None:
    argv = service.run_argv([sys.executable, "-uc", PROGRAM, netns_pair.b.address, netns_pair.a.address], "none")
    script = 'exec "$@" < "$0"'
    os.mkfifo(tmp_path / "in")
    program = netns_pair.start(netns_pair.a, ["sh", "-c", script, str(tmp_path / "in"), *argv], env=service.env)
    answered = 0
    with (tmp_path / "in").open("w") as lines:

        def do(line: str) -> int:
            nonlocal answered
            lines.write(line + "\n")
            lines.flush()
            answered += 1
            return int(program.wait_for(rf"(?:got \d+\n){{{answered - 1}}}got (\d+)\n")[1])

        def kernel(name: str) -> int:
            return do(f"{name}.getsockopt(socket.SOL_SOCKET, {SO_PRIORITY})")

        do("one.sendto(b'x', there)")
        assert xsk_priority(program) == 0
        do(f"[one.setsockopt(socket.SOL_SOCKET, {SO_PRIORITY}, 5), one.sendto(b'x', there)][1]")
        assert xsk_priority(program) == 5
        do("other.sendto(b'x', there)")
        assert xsk_priority(program) == 0
        for tos in (0x10, 0x08, 0x02, 0x18, 0xB8):  # rt_tos2priority(): the kernel's socket knows
            do(f"[other.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, {tos}), other.sendto(b'x', there)][1]")
            assert xsk_priority(program) == kernel("other"), hex(tos)
        assert len({kernel("one"), kernel("other"), 0}) == 3
        do("one.sendto(b'x', there)")
        assert xsk_priority(program) == 5
    assert program.wait(10) == 0
    assert not re.search("WARNING|ERROR", program.errors)
