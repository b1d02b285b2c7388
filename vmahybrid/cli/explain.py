"""vmahybrid explain: why a socket is or is not on a ring, step by step."""

import argparse
import re
from collections.abc import Iterator
from typing import Any

from vmahybrid.cli.output import Style, wrap
from vmahybrid.errors import UsageError
from vmahybrid.printable import clean

SCHEMA = 1
SINGLY = 4   # sockets of which the same is to be said; more are summed up
NAMED = 3    # of those
SOCKET = re.compile(r"(\d+:\d+) (\w+) \S+: (.*)", re.DOTALL)  # a step for a socket of a process


def run(args: argparse.Namespace, client: Any) -> tuple[dict[str, Any], int]:
    if not args.socket:
        raise UsageError("socket ''", "it is neither PID:FD, PID nor ADDR:PORT", "vmahybrid status shows the processes")
    body = client.get("v1", "sockets", args.socket, "explain")
    if not args.json and not args.all:
        body["steps"] = list(summed(body["steps"]))
    return {"schema": SCHEMA, **body}, 0


def summed(steps: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One step for many sockets of a process of which the same is said, where the first of them was."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for number, step in enumerate(steps):
        found = SOCKET.fullmatch(step["text"])
        about = (step["step"], step["ok"], step["remedy"], step.get("reason"))
        groups.setdefault((*about, *found.group(2, 3)) if found else (number,), []).append(step)
    for (*_, said), group in groups.items():
        if len(group) <= SINGLY:
            yield from group
            continue
        names = [step["text"].split(" ", 2)[:2] for step in group]
        first = ", ".join(name for name, _ in names[:NAMED])
        yield {**group[0], "text": f"{first} and {len(group) - NAMED} more {names[0][1]}: each {said}"}


def lines(body: dict[str, Any], style: Style) -> Iterator[str]:
    yield f"socket {clean(body['socket'])}"
    for step in body["steps"]:
        mark = style.paint("ok", "green") if step["ok"] else style.paint("no", "red")
        reason = f" ({step['reason']})" if step.get("reason") else ""
        text = wrap(f"{step['step']:<10} {step['text']}{reason}", style.width - 6, " " * 11)
        yield f"  {mark}  {text[0]}"
        yield from (f"      {more}" for more in text[1:])
        if step["remedy"]:
            yield from (f"      {line}" for line in wrap(f"{'':<10} -> {step['remedy']}", style.width - 6, " " * 14))
