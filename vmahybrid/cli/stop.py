"""vmahybrid stop: end the service; its programs go on with the kernel."""

import argparse
import os
import select
import signal
import socket
import struct
from collections.abc import Iterator
from typing import Any

from vmahybrid.cli.output import Style
from vmahybrid.errors import NotPossibleHere, VmahybridError

SCHEMA = 1
PATIENCE = 70.0  # seconds; every connection on a ring goes home, which may take a minute


def run(_args: argparse.Namespace, client: Any) -> tuple[dict[str, Any], int]:
    """Returns when the process has ended. Raises VmahybridError."""
    client.get("v1", "status")
    pid = _listener(client.path)
    try:
        process = os.pidfd_open(pid)
    except OSError as error:
        raise VmahybridError(f"service, pid {pid}", (error.strerror or str(error)).lower(), "") from error
    try:
        signal.pidfd_send_signal(process, signal.SIGTERM)
        if not select.select([process], [], [], PATIENCE)[0]:
            raise VmahybridError(f"service, pid {pid}", f"it is still there after {PATIENCE:g} s", "look at its log")
    except PermissionError as error:
        raise NotPossibleHere(f"service, pid {pid}", "permission denied", "stop it as root") from error
    finally:
        os.close(process)
    return {"schema": SCHEMA, "pid": pid}, 0


def _listener(path: Any) -> int:
    """Who listens on a Unix socket (SO_PEERCRED), as a pid of this namespace."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(str(path))
        pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if pid <= 0:
        raise NotPossibleHere("service", "it runs in another pid namespace", "stop it there")
    return int(pid)


def lines(body: dict[str, Any], _style: Style) -> Iterator[str]:
    yield f"the service, pid {body['pid']}, has ended"
