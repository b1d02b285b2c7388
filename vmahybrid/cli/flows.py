"""vmahybrid flows: the steering table as mirrored; add and delete operator's rules."""

import argparse
from collections.abc import Iterator
from typing import Any

from vmahybrid.cli.output import Style, table
from vmahybrid.cli.status import FLOWS, flow_row
from vmahybrid.errors import UsageError

SCHEMA = 1


def run(args: argparse.Namespace, client: Any) -> tuple[dict[str, Any], int]:
    if args.verb == "add":
        flow = client.post("v1", "flows", body={
            "action": args.action, "proto": args.proto, "local": args.local, "remote": args.remote,
            "netns": args.netns, "interface": args.interface,
        })  # fmt: skip
        return {"schema": SCHEMA, "flows": [flow]}, 0
    if args.verb == "delete":
        client.delete("v1", "flows", _number(args.flow_id))
        return {"schema": SCHEMA, "deleted": int(args.flow_id)}, 0
    return {"schema": SCHEMA, "flows": client.get("v1", "flows")}, 0


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"flow {text!r}", "not a number", "vmahybrid flows shows the numbers in its first column")
    return int(text)


def lines(body: dict[str, Any], style: Style) -> Iterator[str]:
    if "deleted" in body:
        yield f"flow {body['deleted']} deleted"
        return
    found = table(FLOWS, map(flow_row, body["flows"]), style.width)
    if not found:
        yield "no flows"
        return
    yield style.paint(found[0], "bold")
    yield from found[1:]
