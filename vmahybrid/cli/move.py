"""vmahybrid home and adopt: sockets to the kernel, TCP connections onto a ring, and what came of it."""

import argparse
import time
from collections.abc import Iterator
from typing import Any

from vmahybrid.cli.flows import CONNECTIONS, connection_row
from vmahybrid.cli.output import Style, table
from vmahybrid.errors import UsageError
from vmahybrid.steering.reasons import Reason

SCHEMA = 1
PATIENCE = 5.0  # seconds; a move takes some 10 to 40 ms
LOOK = 0.05
WHERE = {"home": "kernel", "adopt": "ring"}


def run(args: argparse.Namespace, client: Any) -> tuple[dict[str, Any], int]:
    """Exit code 1 if some are not where they should be after PATIENCE. One that was named and is gone is among them; of
    all of a process those that were closed are not. One without a slot is only ``asked``."""
    pid, fd = _target(args.process)
    to = WHERE[args.command_name]
    before = _sockets(client, pid, fd, to)
    asked = args.process if fd is not None and not before else ""
    client.post("v1", "processes", pid, "move", body={"to": to, "fd": fd})
    end = time.monotonic() + PATIENCE
    found = _now(client, before)
    while any(_lives(s) != to for s in found) and time.monotonic() < end:
        time.sleep(LOOK)
        found = _now(client, before)
    moved = [s for s in found if _lives(s) == to]
    left = [s for s in found if _lives(s) != to]
    if fd is not None and not found:
        left = [_gone(s) for s in before]
    return {"schema": SCHEMA, "to": to, "moved": moved, "left": left, "asked": asked}, \
        int(bool(left) or (fd is not None and not moved and not asked))


def _target(text: str) -> tuple[int, int | None]:
    pid, colon, fd = text.partition(":")
    numbers = [pid, fd] if colon else [pid]
    if not all(part.isascii() and part.isdigit() and len(part) < 11 for part in numbers) or not int(pid):
        raise UsageError(f"process {text!r}", "it is neither PID nor PID:FD", "vmahybrid status shows the processes")
    return int(pid), int(fd) if colon else None


def _sockets(client: Any, pid: int, fd: int | None, to: str) -> list[dict[str, Any]]:
    """Those that the move is about: the one that was named, else all TCP connections, and UDP that is to leave a ring.
    """
    mine = [s for s in client.get("v1", "sockets") if s["pid"] == pid]
    if fd is not None:
        return [s for s in mine if s["fd"] == fd]
    return [s for s in mine if (not s["remote"].endswith(":*") if s["proto"] == "tcp" else
                                s["offloaded"] and to == "kernel")]


def _now(client: Any, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same sockets as they are now, without those that were closed: their numbers may be others' by now."""
    known = {(s["socket_id"], s["inode"]) for s in before}
    return [s for s in client.get("v1", "sockets") if (s["socket_id"], s["inode"]) in known]


def _gone(s: dict[str, Any]) -> dict[str, Any]:
    why = Reason.CLOSED
    return {**s, "offloaded": False, "reason": why.slug, "reason_text": why.text, "remedy": why.remedy}


def _lives(s: dict[str, Any]) -> str:
    return "ring" if s["offloaded"] else "kernel"


def lines(body: dict[str, Any], style: Style) -> Iterator[str]:
    place = {"ring": "on a ring", "kernel": "on the kernel"}
    if body["asked"]:
        yield f"{body['asked']} is asked to go there; it has no slot in the full statistics page (VMA_STATS_FD_NUM), "\
              "so whether it has is not known"
        return
    if not body["moved"] and not body["left"]:
        yield "no such connection; with VMA_HYBRID_TCP=kernel, as in the profile safe, there is none to adopt"
    for what, text in (("moved", place[body["to"]]), ("left", f"not {place[body['to']]}")):
        if body[what]:
            yield f"{text}:"
            found = table(CONNECTIONS, map(connection_row, body[what]), style.width)
            yield from (f"  {line}" for line in found)
