"""Closing what strangers sent: close(2) of a foreign file may block the caller (SO_LINGER, a FUSE server that does not
answer), so it never happens on the event loop."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

_T = TypeVar("_T")

IDLE_THREADS = 4
RESET_ON_CLOSE = struct.pack("ii", 1, 0)   # SO_LINGER

_lock = threading.Lock()
_idle = 0       # threads that wait, or are about to
_waiting: SimpleQueue[tuple[Callable[[], object], str]] = SimpleQueue()


def fulfil(future: Future[_T], work: Callable[[], _T]) -> None:
    """With what the work returns or raises: for another thread that waits for it."""
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


def close_foreign(fds: Iterable[int]) -> None:
    """Close descriptors that came over the control socket, in a thread of their own. One that blocks harms nobody."""
    wanted = list(fds)
    if wanted:
        in_thread(lambda: _close_all(wanted), "close-foreign")


def closing(fds: Iterable[int]) -> Future[None]:
    """The same, and when it is done."""
    wanted = list(fds)
    future: Future[None] = Future()
    in_thread(lambda: fulfil(future, lambda: _close_all(wanted)), "close-foreign")
    return future


def in_thread(work: Callable[[], object], name: str, ends: bool = False) -> None:
    """Run ``work`` in a daemon thread, which nobody else uses meanwhile: it may hang without keeping the service from
    ending. One that has nothing to do is taken: to start one takes until it runs, on a busy machine milliseconds.
    ``ends``: it is a new one, and ends with the work, which changes what the thread may do."""
    global _idle
    if ends:
        threading.Thread(target=work, name=name, daemon=True).start()
        return
    with _lock:
        found = _idle > 0
        _idle -= found
    if not found:
        try:
            threading.Thread(target=_go_on, args=(work, name), daemon=True).start()
            return
        except RuntimeError:    # the limit of threads: the next that has nothing to do takes it
            with _lock:
                _idle -= 1
    _waiting.put((work, name))


def _go_on(work: Callable[[], object], name: str) -> None:
    global _idle
    while True:
        threading.current_thread().name = name
        work()
        del work    # and what it holds
        with _lock:
            if _idle == IDLE_THREADS:
                return
            _idle += 1
        work, name = _waiting.get()


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        try:
            os.close(fd)
        except OSError:  # close reports a failed write-back; the descriptor is gone all the same
            continue
