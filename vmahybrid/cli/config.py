"""vmahybrid config: every setting with its origin; set changes those that are live."""

import argparse
import json
from collections.abc import Iterator
from typing import Any

from vmahybrid.cli.output import Column, Style, table
from vmahybrid.errors import UsageError

SCHEMA = 1
COLUMNS = [Column("KEY"), Column("VALUE", shrink=2), Column("ORIGIN", shrink=1), Column("LIVE"),
           Column("DESCRIPTION", shrink=3)]  # fmt: skip


def run(args: argparse.Namespace, client: Any) -> tuple[dict[str, Any], int]:
    if args.verb == "set":
        changes = dict(map(assignment, args.changes))
        settings = client.patch("v1", "config", body=changes)
        return {"schema": SCHEMA, "config": {key: settings[key] for key in changes}}, 0
    return {"schema": SCHEMA, "config": client.get("v1", "config")}, 0


def assignment(text: str) -> tuple[str, Any]:
    """``limits.rules=2048``: a JSON value if it is one (numbers, true, [..]), else text. Raises UsageError."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise UsageError(f"{text!r}", "not KEY=VALUE", "for example limits.rules=2048")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def lines(body: dict[str, Any], style: Style) -> Iterator[str]:
    rows = []
    for key, setting in sorted(body["config"].items()):
        value = setting["value"] if isinstance(setting["value"], str) else json.dumps(setting["value"])
        unit = f" {setting['unit']}" if setting["unit"] else ""
        live = "yes" if setting["live"] else "no"
        rows.append([key, value + unit, setting["origin"], live, setting["description"]])
    found = table(COLUMNS, rows, style.width)
    if found:
        yield style.paint(found[0], "bold")
        yield from found[1:]
