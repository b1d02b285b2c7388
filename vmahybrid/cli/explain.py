"""vmahybrid explain: why a socket is or is not on a ring, step by step."""

import argparse
from collections.abc import Iterator
from typing import Any

from vmahybrid.cli.output import Style, clean, wrap
from vmahybrid.errors import UsageError

SCHEMA = 1


def run(args: argparse.Namespace, client: Any) -> tuple[dict[str, Any], int]:
    if not args.socket:
        raise UsageError("socket ''", "it is neither PID:FD, PID nor ADDR:PORT", "vmahybrid status shows the processes")
    return {"schema": SCHEMA, **client.get("v1", "sockets", args.socket, "explain")}, 0


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
