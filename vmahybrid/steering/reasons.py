"""Why something is not (or not wholly) offloaded: contracts/reasons.def as an enumeration.

The file is the only place where a reason is written; C includes it, this module parses it. ``Reason.CONFLICT`` is an
int (the code on the wire) with ``slug``, ``text`` and ``remedy``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import EnumMeta, IntEnum
from importlib import resources
from typing import TYPE_CHECKING

_LINE = re.compile(r'^REASON\((\d+), ([A-Z0-9_]+), "([a-z0-9-]+)", "((?:[^"\\]|\\.)*)", "((?:[^"\\]|\\.)*)"\)$')


@dataclass(frozen=True, slots=True)
class ReasonRow:
    code: int
    name: str
    slug: str
    text: str
    remedy: str


def parse_reasons(source: str) -> list[ReasonRow]:
    """The rows of a reasons.def. Raises ValueError naming the line, a repeated code, name or slug."""
    rows: list[ReasonRow] = []
    seen: set[int | str] = set()
    for number, line in enumerate(source.splitlines(), 1):
        if not line.startswith("REASON("):
            continue
        match = _LINE.match(line.rstrip())
        if match is None:
            raise ValueError(f"reasons.def line {number}: not a REASON(code, NAME, slug, text, remedy)")
        text, remedy = (re.sub(r"\\(.)", r"\1", part) for part in match.group(4, 5))
        row = ReasonRow(int(match[1]), match[2], match[3], text, remedy)
        for token in (row.code, row.name, row.slug):
            if token in seen:
                raise ValueError(f"reasons.def line {number}: {token!r} is used twice")
            seen.add(token)
        rows.append(row)
    return rows


ROWS = parse_reasons(resources.files("vmahybrid.contracts").joinpath("reasons.def").read_text("ascii"))
_BY_CODE = {row.code: row for row in ROWS}
_BY_SLUG = {row.slug: row for row in ROWS}


class _ReasonMeta(EnumMeta):
    if TYPE_CHECKING:  # the members come from a file that mypy does not read

        def __getattr__(cls, name: str) -> Reason: ...


class _ReasonBase(IntEnum, metaclass=_ReasonMeta):
    @property
    def slug(self) -> str:
        return _BY_CODE[self.value].slug

    @property
    def text(self) -> str:
        return _BY_CODE[self.value].text

    @property
    def remedy(self) -> str:
        return _BY_CODE[self.value].remedy


if TYPE_CHECKING:

    class Reason(_ReasonBase):
        @classmethod
        def from_code(cls, code: int) -> Reason: ...
        @classmethod
        def from_slug(cls, slug: str) -> Reason: ...
else:

    class Reason(_ReasonBase):
        _ignore_ = ("_row",)
        for _row in ROWS:
            locals()[_row.name] = _row.code

        @classmethod
        def from_code(cls, code):
            """The reason with this code; PROTOCOL for a code that this version does not know (a newer shim)."""
            return cls(code) if code in _BY_CODE else cls.PROTOCOL

        @classmethod
        def from_slug(cls, slug):
            """Raises KeyError."""
            return cls(_BY_SLUG[slug].code)
