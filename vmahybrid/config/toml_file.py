"""A TOML file whose every key has its line: tomllib tells only the values."""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_left
from contextlib import suppress
from pathlib import Path
from typing import Any

from vmahybrid.errors import UsageError

_PLACE = re.compile(r" \(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)$")


class TomlError(UsageError):
    """``FILE:LINE: WHAT IS WRONG. WHAT TO DO``, in one line."""

    def __init__(self, path: Path, line: int, why: str, remedy: str = "") -> None:
        super().__init__(f"{path}:{line}", why, remedy)
        self.line = line


class TomlFile:
    """``data`` as tomllib has it. Keys are named by their path: ``("rule", 0, "local")`` is that of the first rule."""

    def __init__(self, path: Path) -> None:
        """Raises UsageError for what can't be read or is no TOML."""
        self.path = path
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise UsageError(str(path), error.strerror or str(error)) from None
        try:
            self._lines = raw.decode().replace("\r\n", "\n").split("\n")
            self.data = tomllib.loads("\n".join(self._lines))
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start) + 1
            raise TomlError(path, line, f"not TOML: not UTF-8: byte 0x{raw[error.start]:02x}") from None
        except tomllib.TOMLDecodeError as error:
            raise self._no_toml(str(error)) from None
        except RecursionError:
            raise UsageError(str(path), "not TOML: nested too deeply") from None

    def error(self, keys: tuple[str | int, ...], why: str, remedy: str = "") -> TomlError:
        """Something is wrong with that key."""
        return TomlError(self.path, self.line(keys), why, remedy)

    def line(self, keys: tuple[str | int, ...]) -> int:
        """Where the statement begins that first says something of that key; 1 where none does."""
        ends = self._ends()
        first = bisect_left(ends[1:], True, key=lambda end: _has(tomllib.loads("\n".join(self._lines[:end])), keys))
        return ends[first] + 1 if first + 1 < len(ends) else 1

    def _ends(self) -> list[int]:
        """0, and the last line of each statement, empty lines being some too. What is cut within one (a text or an
        array over several lines) is no TOML."""
        ends = [0]
        for end in range(1, len(self._lines) + 1):
            with suppress(tomllib.TOMLDecodeError):
                tomllib.loads("\n".join(self._lines[ends[-1]:end]))
                ends.append(end)
        return ends

    def _no_toml(self, text: str) -> TomlError:
        place = _PLACE.search(text)
        what = text[:place.start()] if place else text
        if place is None or place["line"] is None:
            last = max((number for number, line in enumerate(self._lines, 1) if line.strip()), default=1)
            return TomlError(self.path, last, f"not TOML: {what} at its end")
        line, column = int(place["line"]), int(place["column"])
        token = self._lines[line - 1].strip() if line <= len(self._lines) else ""
        return TomlError(self.path, line, f'not TOML: {what}, column {column}: "{token}"')


def _has(data: Any, keys: tuple[str | int, ...]) -> bool:
    try:
        for key in keys:
            data = data[key]
    except (KeyError, IndexError, TypeError):
        return False
    return True
