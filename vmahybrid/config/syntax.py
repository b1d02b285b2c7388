"""Grammars of texts among the parameters (``syntax`` in parameters.toml), where they are not paths or names.

Standard library only, as
catalogue.py.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

CPUS = 8192  # VMH_CPUS of vmahybrid/shim/vmh_affinity.h
_RANGE = "[0-9]+(?:-[0-9]+(?::[0-9]+)?)?"
_PARTS = re.compile("([0-9]+)(?:-([0-9]+)(?::([0-9]+))?)?")


@dataclass(frozen=True, slots=True)
class Syntax:
    """``pattern``: how a text looks, in ECMA 262 as well (JSON Schema); ``says``: does one that looks so say something?
    ``instead``: what programs use for another one, from the start; None: they keep it, and do what ``late`` says when
    they would use it."""

    expected: str
    instead: str | None
    pattern: str
    says: Callable[[str], bool]
    late: str = ""

    def takes(self, text: str) -> bool:
        return re.fullmatch(self.pattern, text) is not None and self.says(text)


def _cpus(text: str) -> bool:
    """As vmh_cpus_parse() of the shim: processors that there may be, and one at least."""
    if text == "-1":
        return True
    if text[1:2] in ("x", "X"):
        return 0 < int(text, 16) < 1 << CPUS
    return all(map(_range, text.split(",")))


def _range(text: str) -> bool:
    first, last, step = (int(number) for number in _PARTS.fullmatch(text).groups("1"))  # type: ignore[union-attr]
    if "-" not in text:
        return first < CPUS
    # The shim reads no number to its end that is ten times too large.
    found = range(first, last + 1, step) if step and max(last, step) < CPUS * 10 else range(0)
    return len(found) > 0 and found[-1] < CPUS


SYNTAXES: Mapping[str, Syntax] = {
    "cpus": Syntax(
        f"a hexadecimal mask of processors (0x3), or a list (0,2-5,8-15:2), all below {CPUS}; or -1",
        "0",
        rf"^(?:-1|0[xX][0-9a-fA-F]+|{_RANGE}(?:,{_RANGE})*)$",
        _cpus,
    ),
    "address": Syntax(
        "an address as %p of printf(3) has it (0x55d0c0de1000); or empty",
        None,
        r"^(?:(?:0[xX])?[0-9a-fA-F]{1,16})?$",
        lambda text: not text or int(text, 16) > 0,
        "logging as without it",
    ),
}
