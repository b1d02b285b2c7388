"""Telling the init system: sd_notify(3)'s protocol, one datagram to $NOTIFY_SOCKET."""

from __future__ import annotations

import os
import socket


def notify(state: str) -> None:
    """``READY=1``, ``STOPPING=1``, ``STATUS=...``; does nothing where nobody asked to be told."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        try:
            sock.sendto(state.encode(), address.replace("@", "\0", 1) if address[0] == "@" else address)
        except OSError:  # whoever asked is gone; that is no reason to stop
            return
