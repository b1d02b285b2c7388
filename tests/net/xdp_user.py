"""A process that drives a ring from passed fds with no privilege at all: echoes every UDP frame until it is killed.

Started by xdp_lab.User: ``xdp_user.py SOCKET_FD UID ORPHAN``. Capabilities are dropped before a ring is touched.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
import time
from pathlib import Path

from vmahybrid.xdp.ringview import RingView

PR_SET_NO_NEW_PRIVS = 38


def become_nobody(uid: int) -> dict[str, str]:
    """The capability lines of /proc/self/status afterwards."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return {line.split(":")[0]: line.split(":")[1].strip() for line in lines if line.startswith(("Cap", "NoNew"))}


def answer(frame: bytes) -> bytes:
    ip, udp = frame[14:34], frame[34:42]
    return (frame[6:12] + frame[:6] + frame[12:14] + ip[:12] + ip[16:20] + ip[12:16] + udp[2:4] + udp[:2] + udp[4:6]
            + b"\0\0" + frame[42:])


def main() -> None:
    parent, end = os.getppid(), time.monotonic() + 60
    control = socket.socket(fileno=int(sys.argv[1]))
    status = become_nobody(int(sys.argv[2]))
    message, fds, _, _ = socket.recv_fds(control, 4096, 32)
    with RingView(fds[0], fds[1:], **json.loads(message)) as ring:
        control.send(json.dumps({"uid": os.getuid(), **status}).encode())
        while True:
            if ring.wait(0.5):
                ring.send([answer(frame) for frame in ring.receive()])
            elif time.monotonic() > end or (os.getppid() != parent and sys.argv[3] == "0"):
                return


if __name__ == "__main__":
    main()
