"""The catalogue of VMA_* parameters (parameters.toml) as typed Python: for the CLI, the API and the documents.

Standard library only, because the build runs it (gen_params.py) before anything is installed.
"""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from vmahybrid.config.syntax import SYNTAXES, Syntax

PATH = Path(__file__).with_name("parameters.toml")
SCHEMA = 1
STRING_SIZE = 256  # of the C field, with the terminator
INT_LIMIT = 2**31 - 1

Kind = Literal["int", "bool", "string", "enum"]
Acts = Literal["now", "tcp", "verbs", "later", "never"]
BACKENDS = ("verbs", "xdp")
KINDS: tuple[Kind, ...] = ("int", "bool", "string", "enum")
ACTS: Mapping[str, str] = {
    "now": "acts in this version",
    "tcp": "will act with offloaded TCP",
    "verbs": "needs a ring on RDMA hardware",
    "later": "acts in a later version",
    "never": "accepted; what it governed does not exist here",
}
TRUE_WORDS = ("true", "yes", "on", "enable", "enabled")
FALSE_WORDS = ("false", "no", "off", "disable", "disabled")
_KEYS = {
    "name", "label", "type", "default", "unit", "text", "min", "max", "outside", "warning", "zero", "also", "choices",
    "max_length", "pid", "aliases", "floor", "ceiling", "acts", "since", "banner", "backends", "live", "warning_for",
    "bound_warns", "cap", "syntax",
}  # fmt: skip


class CatalogueError(ValueError):
    """The catalogue contradicts itself; names the entry. A defect of ours, not of a user."""


@dataclass(frozen=True, slots=True)
class Choice:
    value: int
    text: str
    words: tuple[str, ...]  # accepted, without regard to case; the first is the canonical one


@dataclass(frozen=True, slots=True)
class Bound:
    """This parameter is bound by ``other * times / divisor``."""

    other: str
    times: int
    divisor: int


@dataclass(frozen=True, slots=True)
class Banner:
    """How the start-up banner shows a parameter; empty texts: as its type."""

    zero: str = ""  # instead of 0
    zero_note: str = ""  # behind 0
    note: str = ""  # behind another number
    zero_label: str = ""
    label: str = ""  # where it is not 0
    number: bool = False  # a switch as 0 or 1


@dataclass(frozen=True, slots=True)
class Parameter:
    """One VMA_* parameter. Numbers are in ``unit``; ``default`` of an enum is the number of its choice."""

    name: str
    label: str
    type: Kind
    default: int | str
    text: str
    acts: Acts
    unit: str = ""
    minimum: int | None = None
    maximum: int | None = None
    clamps: bool = False  # out of range: the limit; else the default
    warning: str = ""
    warns_above: bool = False  # `warning` is for too much only
    zero: int | None = None
    also: tuple[int, ...] = ()  # values allowed outside the range
    choices: tuple[Choice, ...] = ()
    max_length: int = STRING_SIZE - 1
    syntax: Syntax | None = None  # of a string that is no free text
    pid: bool = False
    aliases: tuple[str, ...] = ()
    floor: Bound | None = None
    ceiling: Bound | None = None
    bound_warns: bool = False  # also where nobody has set it
    cap: int | None = None  # more acts as this
    since: str = ""
    banner: Banner = Banner()
    backends: tuple[str, ...] = BACKENDS
    live: bool = False

    @property
    def field(self) -> str:
        """Name of the field of struct vmh_params."""
        return self.name.removeprefix("VMA_").lower()

    def has(self, value: int) -> bool:
        """Whether it can come to have this value."""
        low, high = self.minimum, self.maximum
        return value in {choice.value for choice in self.choices} or (
            low is not None and high is not None and low <= value <= high)

    def parse(self, text: str) -> int | str:
        """The value of ``text`` as the shim would take it; raises ValueError that names parameter, text and range."""
        if self.type == "string":
            if len(os.fsencode(text)) > self.max_length:
                raise ValueError(f"{self.name}: {text!r} is longer than {self.max_length} bytes")
            if self.syntax is not None and not self.syntax.takes(text):
                raise ValueError(f"{self.name}: {text!r} is not {self.expected()}")
            return text
        word = text.strip().lower()
        for choice in self.choices:
            if word in choice.words:
                return choice.value
        if self.type == "bool" and word in TRUE_WORDS + FALSE_WORDS:
            return int(word in TRUE_WORDS)
        if self.type == "enum" or not self.is_number(word):
            raise ValueError(f"{self.name}: {text!r} is not {self.expected()}")
        return self._checked(int(word), text)

    def is_number(self, text: str) -> bool:
        """A number where one is expected, in range or not: the shim knows what to use instead, and says so."""
        word = text.strip()
        return self.type != "string" and word.removeprefix("-").isdecimal() and word.isascii()

    def _checked(self, value: int, text: str) -> int:
        low = -INT_LIMIT - 1 if self.minimum is None else self.minimum
        high = INT_LIMIT if self.maximum is None else self.maximum
        if self.type == "bool":
            low, high = 0, 1
        if not low <= value <= high and value not in self.also:
            raise ValueError(f"{self.name}: {text!r} is out of range, expected {self.expected()}")
        return self.zero if value == 0 and self.zero is not None else value

    def expected(self) -> str:
        """What may be given, for messages: ``a number from -1 to 100000000``."""
        if self.syntax is not None:
            return self.syntax.expected
        if self.type == "string":
            return f"a text of at most {self.max_length} bytes"
        if self.type == "bool":
            return "0 or 1"
        if self.choices:
            return "one of " + ", ".join(choice.words[0] for choice in self.choices)
        rest = "".join(f" or {value}" for value in self.also)
        return f"a number from {self.minimum} to {self.maximum}{rest}"

    def show(self, value: int | str) -> str:
        """``value`` as a user would write it."""
        return next((choice.words[0] for choice in self.choices if choice.value == value), str(value))


    def banner_value(self, value: int | str) -> tuple[str, str]:
        """Label and value of its line in the start-up banner, the value as in the manual."""
        look = self.banner
        label = (look.label if value else look.zero_label) or self.label
        if isinstance(value, str):
            return label, value
        if self.type == "bool" and not look.number:
            return label, "Enabled" if value else "Disabled"
        note = look.note if value else look.zero_note
        for choice in self.choices:
            if choice.value == value:
                if not choice.text.startswith("("):
                    return label, choice.text
                note = choice.text
        if not value and look.zero:
            return label, look.zero
        if self.cap is not None and value > self.cap and value != self.default:
            return label, f"{value} (acts as {self.cap})"
        return label, f"{value:<2d}{note}" if note else str(value)


@dataclass(frozen=True, slots=True)
class Profile:
    """A value of VMA_SPEC: ``values`` are those it changes, numbers for bool and enum, inherited ones included."""

    name: str
    title: str
    text: str
    alias: int | None
    values: Mapping[str, int | str]


@dataclass(frozen=True, slots=True)
class Obsolete:
    name: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Catalogue:
    parameters: tuple[Parameter, ...]
    profiles: tuple[Profile, ...]
    obsolete: tuple[Obsolete, ...] = field(default=())

    def __getitem__(self, name: str) -> Parameter:
        """Raises KeyError."""
        for parameter in self.parameters:
            if parameter.name == name:
                return parameter
        raise KeyError(name)

    def profile(self, name: str) -> Profile:
        """By name without regard to case, or by numeric alias; raises KeyError."""
        for profile in self.profiles:
            if profile.name.lower() == name.lower() or str(profile.alias) == name:
                return profile
        raise KeyError(name)


def _bound(raw: Any) -> Bound | None:
    return None if raw is None else Bound(str(raw[0]), int(raw[1]), int(raw[2]))


def _parameter(raw: dict[str, Any]) -> Parameter:
    name = raw["name"]
    if unknown := raw.keys() - _KEYS:
        raise CatalogueError(f"{name}: unknown keys {sorted(unknown)}")
    if raw["type"] not in KINDS or raw["acts"] not in ACTS:
        raise CatalogueError(f"{name}: type {raw['type']!r}, acts {raw['acts']!r}")
    if "syntax" in raw and (raw["type"] != "string" or raw["syntax"] not in SYNTAXES):
        raise CatalogueError(f"{name}: syntax {raw['syntax']!r}, type {raw['type']!r}")
    if (raw["acts"] == "now") != bool(raw.get("since")):
        raise CatalogueError(f"{name}: acts {raw['acts']!r} does not go with since {raw.get('since')!r}")
    parameter = Parameter(
        name=name,
        label=raw["label"],
        type=raw["type"],
        default=raw["default"],
        text=raw["text"],
        acts=raw["acts"],
        unit=raw.get("unit", ""),
        minimum=raw.get("min"),
        maximum=raw.get("max"),
        clamps=raw.get("outside") == "clamp",
        warning=raw.get("warning", ""),
        warns_above=raw.get("warning_for") == "above",
        zero=raw.get("zero"),
        also=tuple(raw.get("also", ())),
        choices=tuple(Choice(value, text, tuple(words)) for value, text, words in raw.get("choices", ())),
        max_length=raw.get("max_length", STRING_SIZE - 1),
        syntax=SYNTAXES[raw["syntax"]] if "syntax" in raw else None,
        pid=raw.get("pid", False),
        aliases=tuple(raw.get("aliases", ())),
        floor=_bound(raw.get("floor")),
        ceiling=_bound(raw.get("ceiling")),
        bound_warns=raw.get("bound_warns", False),
        cap=raw.get("cap"),
        since=raw.get("since", ""),
        banner=Banner(**raw.get("banner", {})),
        backends=() if raw.get("acts") == "never" else tuple(raw.get("backends", BACKENDS)),
        live=raw.get("live", False),
    )
    if parameter.type == "int" and (parameter.minimum is None or parameter.maximum is None or "outside" not in raw):
        raise CatalogueError(f"{name}: an int needs min, max and outside")
    if (parameter.type == "enum") != bool(parameter.choices):
        raise CatalogueError(f"{name}: an enum has choices, nothing else has")
    if isinstance(parameter.default, str) != (parameter.type == "string"):
        raise CatalogueError(f"{name}: default {parameter.default!r} is not of type {parameter.type}")
    if parameter.type in ("int", "string"):
        try:
            parameter.parse(str(parameter.default))
        except ValueError as error:
            raise CatalogueError(f"{name}: default: {error}") from error
    return parameter


def _profile(name: str, raw: dict[str, Any], all_raw: dict[str, Any], known: Mapping[str, Parameter]) -> Profile:
    values: dict[str, int | str] = {}
    if base := raw.get("extends"):
        values |= _profile(base, all_raw[base], all_raw, known).values
    for key, value in raw.get("values", {}).items():
        if key not in known:
            raise CatalogueError(f"profile {name}: unknown parameter {key}")
        values[key] = known[key].parse(str(value))
    return Profile(name, raw["title"], raw["text"], raw.get("alias"), values)


def parse(text: str) -> Catalogue:
    """The catalogue of a TOML text. Raises CatalogueError, KeyError (a missing key), tomllib.TOMLDecodeError."""
    raw = tomllib.loads(text)
    if raw["schema"] != SCHEMA:
        raise CatalogueError(f"schema {raw['schema']}, expected {SCHEMA}")
    parameters = tuple(_parameter(entry) for entry in raw["parameter"])
    known = {parameter.name: parameter for parameter in parameters}
    if len(known) != len(parameters):
        raise CatalogueError("a parameter is listed twice")
    for parameter in parameters:
        for bound in (parameter.floor, parameter.ceiling):
            if bound and bound.other not in known:
                raise CatalogueError(f"{parameter.name}: bound by the unknown {bound.other}")
    profiles = tuple(_profile(name, entry, raw["profile"], known) for name, entry in raw["profile"].items())
    obsolete = tuple(Obsolete(entry["name"], tuple(entry["lines"])) for entry in raw["obsolete"])
    return Catalogue(parameters, profiles, obsolete)


@cache
def load() -> Catalogue:
    """The catalogue of this installation."""
    return parse(PATH.read_text(encoding="utf-8"))
