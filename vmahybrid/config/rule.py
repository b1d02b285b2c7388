"""Rules of the operator as they are written: in the configuration's ``[[rule]]`` and in the API."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vmahybrid.config.toml_file import TomlError, TomlFile
from vmahybrid.contracts import ANY_ADDR, addr_to_bytes
from vmahybrid.errors import UsageError
from vmahybrid.steering.flow import PROTO_NUMBERS, Flow, FlowAction, Source, operator_kind

_ENDPOINT = re.compile(r"(?:\[(?P<six>[^\[\]]+)\]|(?P<four>[^\[\]:]+)):(?P<port>\*|[0-9]{1,5})")
_PATTERNS = {"netns": re.compile(r"[^\s/\x00-\x1f]+"), "interface": re.compile(r"[^\s/:\x00-\x1f]+")}

FIELDS = ("action", "proto", "local", "remote", "netns", "interface")


@dataclass(frozen=True, slots=True)
class OperatorRule:
    """``local`` and ``remote`` are ADDR:PORT with * for any; ``netns`` and ``interface`` shell patterns over names."""

    action: str                 # "kernel" | "drop"
    proto: str = "udp"
    local: str = "*:*"
    remote: str = "*:*"
    netns: str = "*"
    interface: str = "*"

    def flow(self) -> Flow:
        """As the steering table takes it. Raises UsageError naming the token."""
        if self.action not in ("kernel", "drop"):
            raise UsageError("rule", f"action {self.action!r} is neither kernel nor drop")
        if self.proto not in PROTO_NUMBERS:
            raise UsageError("rule", f"proto {self.proto!r} is neither udp nor tcp")
        for name, pattern in (("netns", self.netns), ("interface", self.interface)):
            if pattern and not _PATTERNS[name].fullmatch(pattern):
                raise UsageError("rule", f"{name} = {pattern!r} matches no name", "write a name, or a shell pattern")
        local, local_port = parse_endpoint("local", self.local)
        remote, remote_port = parse_endpoint("remote", self.remote)
        flow = Flow(action=FlowAction(self.action), source=Source.OPERATOR, family=0,
                    kind=operator_kind(local, remote, remote_port), proto=PROTO_NUMBERS[self.proto], local=local,
                    local_port=local_port, remote=remote, remote_port=remote_port, netns=self.netns or "*",
                    interface=self.interface or "*")
        if flow.action is FlowAction.DROP and not flow.concrete:
            raise UsageError("rule", f"drop {self.local} {self.remote}: the interface matches exactly",
                             "name a local port, and the remote address and port both or neither")
        return flow


# What libvma.conf ships: name resolution stays on the kernel.
DEFAULT_RULES = (OperatorRule("kernel", "udp", "*:*", "*:53"),)


def parse_endpoint(name: str, text: str) -> tuple[bytes, int]:
    """(16 bytes, port) of "10.0.0.1:53", "*:53", "[fe80::1]:*"; zeros for any. Raises UsageError naming ``name``."""
    parts = _ENDPOINT.fullmatch(text)
    try:
        if parts is None or (parts["six"] is not None and ":" not in parts["six"]):
            raise ValueError
        packed = addr_to_bytes(parts["six"] or parts["four"])
        number = 0 if parts["port"] == "*" else int(parts["port"])
        if number > 65535:
            raise ValueError
    except ValueError:
        raise UsageError("rule", f"{name} = {text!r} is not ADDR:PORT",
                         "write * for any, and IPv6 addresses in [ ]") from None
    if number == 0 and parts["port"] != "*":    # it would mean any
        raise UsageError("rule", f"{name} = {text!r}: there is no port 0", "write * for any")
    return (ANY_ADDR if packed == addr_to_bytes("0.0.0.0") else packed), number


def parse_rules(file: TomlFile) -> Iterator[OperatorRule | TomlError]:
    """Of the configuration file; in place of one that is wrong, everything that is wrong with it."""
    tables = file.data["rule"]
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        yield file.error(("rule",), "rule is an array of tables: [[rule]]")
        return
    for number, table in enumerate(tables):
        at = ("rule", number)
        wrong = list(_wrong_keys(file, at, table))
        if "action" not in table:
            wrong.append(file.error(at, "a rule without action", 'action = "kernel" or "drop"'))
        if wrong:
            yield from wrong
        else:
            yield _rule(file, at, table)


def _wrong_keys(file: TomlFile, at: tuple[str, int], table: dict[str, Any]) -> Iterator[TomlError]:
    for key, value in table.items():
        if key not in FIELDS:
            yield file.error((*at, key), f"unknown key rule.{key}", "known are " + ", ".join(FIELDS))
        elif not isinstance(value, str):
            yield file.error((*at, key), f"rule.{key} = {value!r} is not a string")


def _rule(file: TomlFile, at: tuple[str, int], table: dict[str, str]) -> OperatorRule | TomlError:
    rule = OperatorRule(**table)
    try:
        rule.flow()
    except UsageError as error:
        field = error.why.split()[0]  # its own line, where it is one field that is wrong
        return file.error((*at, field) if field in table else at, str(error))
    return rule
