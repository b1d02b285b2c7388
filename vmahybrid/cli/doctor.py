"""vmahybrid doctor: one line per thing looked at: ok, warn or fail, and the command that mends it."""

import argparse
import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

from vmahybrid.cli.output import Colour, Style, wrap
from vmahybrid.cli.probes import Check, guarded, host, kernel, nic, service, verbs
from vmahybrid.errors import UsageError

SCHEMA = 1
_COLOURS: dict[str, Colour] = {"ok": "green", "warn": "yellow", "fail": "red"}


def run(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Exit code 1 if anything fails. Raises UsageError for an interface that is not there."""
    chosen = args.verbs_selftest
    for name in [*args.interfaces, *([chosen] if chosen is not None else [])]:
        if not nic.exists(name):
            raise UsageError(f"interface {name!r}", "no such interface in this network namespace", "ip link shows them")
    if chosen is not None and args.interfaces:
        raise UsageError("--verbs-selftest", f"it takes one interface, {args.interfaces[0]!r} is too many",
                         f"vmahybrid doctor --verbs-selftest {chosen}")
    checks = list(verbs.selftest(chosen) if chosen is not None else examine(args.interfaces or nic.names()))
    failed = any(check.verdict == "fail" for check in checks)
    return {"schema": SCHEMA, "failed": failed, "checks": [dataclasses.asdict(check) for check in checks]}, int(failed)


def examine(interfaces: list[str]) -> Iterator[Check]:
    for module in (kernel, host, verbs):
        for probe in module.PROBES:
            yield from guarded(module.TOPIC, probe.__name__, probe)
    for name in interfaces:
        yield from guarded(nic.TOPIC, name, partial(nic.interface, name))
    for probe in service.PROBES:
        yield from guarded(service.TOPIC, probe.__name__, probe)


def lines(body: dict[str, Any], style: Style) -> Iterator[str]:
    topic = ""
    for check in body["checks"]:
        if check["topic"] != topic:
            topic = check["topic"]
            yield style.paint(topic, "bold")
        verdict = style.paint(f"{check['verdict']:<4}", _COLOURS[check["verdict"]])
        first, *more = wrap(f"{check['name']}: {check['text']}", style.width - 8, "  ")
        yield f"  {verdict}  {first}"
        yield from (f"        {line}" for line in more)
        if check["remedy"] and check["verdict"] != "ok":
            yield from (f"        {line}" for line in wrap(f"-> {check['remedy']}", style.width - 8, "   "))
    verdicts = [check["verdict"] for check in body["checks"]]
    yield ""
    yield f"{verdicts.count('ok')} ok, {verdicts.count('warn')} to look at, {verdicts.count('fail')} failed"
