"""Closing what strangers sent: close(2) of a foreign file may block the caller (SO_LINGER, a FUSE server that does not
answer), so it never happens on the event loop."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable


def close_foreign(fds: Iterable[int]) -> None:
    """Close descriptors that came over the control socket, in a thread of their own. One that blocks harms nobody."""
    wanted = list(fds)
    if wanted:
        in_thread(lambda: _close_all(wanted), "close-foreign")


def in_thread(work: Callable[[], object], name: str) -> None:
    """Run ``work`` in a daemon thread: it may hang without keeping the service from ending."""
    threading.Thread(target=work, name=name, daemon=True).start()


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        try:
            os.close(fd)
        except OSError:  # close reports a failed write-back; the descriptor is gone all the same
            continue
