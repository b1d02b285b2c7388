"""vmahybrid flows: the steering table as mirrored; TCP connections; add and delete operator's rules."""

import argparse
from collections.abc import Iterator
from typing import Any

from vmahybrid.cli.output import Column, Style, short, table
from vmahybrid.cli.status import FLOWS, flow_row, without_slot
from vmahybrid.errors import UsageError

SCHEMA = 1
CONNECTIONS = [
    Column("SOCKET", shrink=3), Column("LOCAL", shrink=1, floor=12), Column("REMOTE", shrink=1, floor=12),
    Column("STATE"), Column("LIVES"), Column("RX", right=True), Column("TX", right=True), Column("REASON", shrink=4),
]  # fmt: skip


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
    if args.tcp:
        sockets, processes = client.get("v1", "sockets"), client.get("v1", "processes")
        return {"schema": SCHEMA, "connections": [s for s in sockets if s["proto"] == "tcp" and _in_use(s)],
                "without_slot": [{"pid": p["pid"], "sockets": p["sockets_over"]}
                                 for p in processes if p["sockets_over"]]}, 0
    return {"schema": SCHEMA, "flows": client.get("v1", "flows")}, 0


def _in_use(socket: dict[str, Any]) -> bool:
    """Connected, or a listener of rings."""
    return not socket["remote"].endswith(":*") or bool(socket["offloaded"])


def connection_row(s: dict[str, Any]) -> list[object]:
    listens = s["proto"] == "tcp" and s["remote"].endswith(":*")
    lives = "kernel" if not s["offloaded"] else "kernel and rings" if listens else f"ring {s['ring_id']}"
    c = s["counters"]
    return [f"{s['socket_id']} {s['comm']}", s["local"], "*:*" if listens else s["remote"],
            "LISTEN" if listens else s["state"] if s["offloaded"] else "", lives,
            short(c["rx_bytes"] + c["rx_os_bytes"]), short(c["tx_bytes"] + c["tx_os_bytes"]),
            "" if s["reason"] == "none" else s["reason"]]  # fmt: skip


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"flow {text!r}", "not a number", "vmahybrid flows shows the numbers in its first column")
    return int(text)


def lines(body: dict[str, Any], style: Style) -> Iterator[str]:
    if "deleted" in body:
        yield f"flow {body['deleted']} deleted"
        return
    if "connections" in body:
        found = table(CONNECTIONS, map(connection_row, body["connections"]), style.width)
        yield from (style.paint(found[0], "bold"), *found[1:]) if found else ("no TCP connections",)
        yield from without_slot(((p["pid"], p["sockets"]) for p in body["without_slot"]), style)
        return
    found = table(FLOWS, map(flow_row, body["flows"]), style.width)
    if not found:
        yield "no flows"
        return
    yield style.paint(found[0], "bold")
    yield from found[1:]
