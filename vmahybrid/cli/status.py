"""vmahybrid status: the service, what it serves, for whom, and what is wrong."""

import argparse
from collections.abc import Iterable, Iterator
from typing import Any

from vmahybrid.cli.output import Column, Style, short, since, table, wrap
from vmahybrid.vma_stats import unconnected

SCHEMA = 1
FLOWS_SHOWN = 20

INTERFACES = [
    Column("INTERFACE"), Column("NETNS", shrink=1), Column("BACKEND"), Column("MODE"), Column("MTU", right=True),
    Column("QUEUES", right=True), Column("RINGS", right=True), Column("RULES", right=True),
    Column("WHY NOT BETTER", shrink=2),
]  # fmt: skip
PROCESSES = [
    Column("PID", right=True), Column("COMMAND", shrink=2), Column("PROFILE", shrink=1), Column("NETNS", shrink=1),
    Column("SOCKETS", right=True), Column("ON RINGS", right=True), Column("RINGS", right=True),
    Column("HOME", right=True), Column("SINCE"), Column("REASON", shrink=3),
]  # fmt: skip
FLOWS = [
    Column("FLOW", right=True), Column("PROTO"), Column("LOCAL", shrink=1, floor=12),
    Column("REMOTE", shrink=1, floor=12), Column("ACTION"), Column("BACKEND"), Column("IF", shrink=2, floor=6),
    Column("OWNER", shrink=3), Column("PACKETS", right=True), Column("REASON", shrink=4),
]  # fmt: skip


def run(args: argparse.Namespace, client: Any) -> tuple[dict[str, Any], int]:
    """Exit code 1 if the service is not ready or something is wrong."""
    status = client.get("v1", "status")
    status["without_session"] = list(unconnected.programs({p["pid"] for p in status["processes"]}))
    return {"schema": SCHEMA, **status}, 0 if status["ready"] and not status["health"] else 1


def lines(status: dict[str, Any], style: Style) -> Iterator[str]:
    ready = style.paint("ready", "green") if status["ready"] else style.paint("not ready", "red")
    yield f"vmahybrid {status['version']}: {ready}, pid {status['pid']}, up {since(status['started'])}"
    yield f"control {status['control_socket']}, api {', '.join(status['api'])}"
    yield ""
    interfaces = [i for i in status["interfaces"] if i["reason"] != "loopback"]
    yield from _section("interfaces", INTERFACES, map(interface_row, interfaces), style)
    yield from _why(interfaces, style)
    yield from _ladders(interfaces, style)
    yield ""
    rows = [*map(process_row, status["processes"]), *map(without_session_row, status["without_session"])]
    yield from _section("processes", PROCESSES, rows, style)
    yield from without_slot(((p["pid"], p["sockets_over"]) for p in status["processes"]), style)
    yield ""
    flows = status["flows"]
    yield from _section("flows", FLOWS, map(flow_row, flows[:FLOWS_SHOWN]), style)
    if len(flows) > FLOWS_SHOWN:
        yield f"and {len(flows) - FLOWS_SHOWN} more: vmahybrid flows"
    yield ""
    for sentence in status["health"]:
        first, *more = wrap(sentence, style.width - 2, "")
        yield f"{style.paint('!', 'yellow')} {first}"
        yield from (f"  {line}" for line in more)
    if not status["health"]:
        yield style.paint("all is well", "green") if status["ready"] else "starting"


def without_slot(processes: Iterable[tuple[int, int]], style: Style) -> Iterator[str]:
    """What says that sockets are missing; of each process, how many have found no slot since it began."""
    for pid, sockets in processes:
        if sockets:
            note = (f"{pid}: {sockets} socket(s) more found no slot in its statistics page: raise "
                    "VMA_STATS_FD_NUM to see them")
            yield from (f"  {line}" for line in wrap(note, style.width - 2, "  "))


def _why(interfaces: list[dict[str, Any]], style: Style) -> Iterator[str]:
    """The reasons as sentences with their remedies, once for the interfaces that share them."""
    notes: dict[str, list[str]] = {}
    for i in interfaces:
        if i["reason"] != "none" or not _served(i):
            note = i["reason_text"] + (f". To change it: {i['remedy']}" if i["remedy"] else "")
            notes.setdefault(note, []).append(i["name"])
        if "tcx" in i["hook"] or "off: no rule" in i["hook"] or "time stamps" in i["hook"]:
            notes.setdefault(i["hook"], []).append(i["name"])
    for note, names in notes.items():
        yield from (f"  {line}" for line in wrap(f"{', '.join(names)}: {note}", style.width - 2, "  "))


def _ladders(interfaces: list[dict[str, Any]], style: Style) -> Iterator[str]:
    """Which backends were tried, once for the interfaces where the same came of it."""
    notes: dict[str, list[str]] = {}
    for i in interfaces:
        if i["ladder"]:
            notes.setdefault("; ".join(rung["text"] for rung in i["ladder"]), []).append(i["name"])
    for note, names in notes.items():
        yield from (f"  {line}" for line in wrap(f"{', '.join(names)}: {note}", style.width - 2, "  "))


def _section(name: str, columns: list[Column], rows: Any, style: Style) -> Iterator[str]:
    found = table(columns, rows, style.width)
    if not found:
        yield f"no {name}"
        return
    yield style.paint(found[0], "bold")
    yield from found[1:]


def _served(i: dict[str, Any]) -> bool:
    """Our program is there, or would be if there were a rule."""
    return bool(i["attached"] or i["hook"])


def interface_row(i: dict[str, Any]) -> list[object]:
    mode = i["mode"] + (", zero-copy" if i["zerocopy"] else "") if _served(i) else "none"
    if mode != "none":
        mode += ", now tcx" if "now tcx" in i["hook"] else ", off" if "off: no rule" in i["hook"] else ""
    if i["backend"] == "verbs":  # a raw packet QP has no mode; AF_XDP rings of other programs beside it have one
        mode = ", ".join([i["device"] or "raw QP", *([mode] if mode != "none" else [])])
    why = "" if i["reason"] == "none" else i["reason"]
    return [i["name"], i["netns"], i["backend"], mode, i["mtu"], i["queues"] or "-", i["rings"], i["rules"], why]


def process_row(p: dict[str, Any]) -> list[object]:
    name = f"{p['comm']} ({p['application_id']})" if p["application_id"] else p["comm"]
    return [
        p["pid"], name, p["profile"] or "-", p["netns"], p["sockets"], p["offloaded_sockets"], len(p["rings"]),
        p["homecomings"], since(p["started"]), "" if p["reason"] == "none" else p["reason"],
    ]  # fmt: skip


def without_session_row(p: dict[str, Any]) -> list[object]:
    return [p["pid"], p["comm"], "-", "-", len(p["sockets"]), 0, 0, 0, "-", "no session: the kernel's alone"]


def flow_row(f: dict[str, Any]) -> list[object]:
    action = f"ring {f['ring_id']}" if f["action"] == "ring" else f["action"]
    fd = f":{f['fd']}" if f["fd"] >= 0 else ""     # the port of connections of the ring is no one socket's
    owner = "operator" if f["source"] == "operator" else f"{f['pid']}{fd} {f['comm']}"
    reason = "" if f["reason"] == "none" else f["reason"]
    backend = f["backend"] if f["action"] == "ring" else ""
    return [
        f["flow_id"], f["proto"], f["local"], f["remote"], action, backend, f["interface"], owner, short(f["packets"]),
        reason,
    ]  # fmt: skip
