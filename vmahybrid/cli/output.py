"""Text for people: colours on a terminal only, tables that fit, and no control character of a foreign string."""

import errno
import io
import os
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TextIO

from vmahybrid.printable import clean

WIDTH = 100  # columns, unless the terminal says otherwise
GAP = "  "
_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}
Colour = Literal["bold", "dim", "red", "green", "yellow"]


def any_name_prints() -> None:
    """Where the locale has no such character, ``?`` stands for it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def lost_stdout(program: str, error: OSError) -> int:
    """Exit code of a program that could not write: 0 where nobody reads any more, 1 with a message on a full device.
    Raises any other error again."""
    closed = isinstance(error, BrokenPipeError)
    if not closed and error.errno != errno.ENOSPC:
        raise error
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at the end
    if not closed:
        print(f"{program}: stdout: {error.strerror}", file=sys.stderr)
    return 0 if closed else 1


@dataclass(frozen=True, slots=True)
class Style:
    """How to write to one stream."""

    colour: bool
    width: int
    terminal: bool = True  # else nothing needs to be cut

    @classmethod
    def of(cls, stream: TextIO) -> "Style":
        """Colour on a terminal only, and not with NO_COLOR (no-color.org) or TERM=dumb."""
        terminal = stream.isatty()
        colour = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        width = max(60, shutil.get_terminal_size((WIDTH, 24)).columns) if terminal else WIDTH
        return cls(colour, width, terminal)

    def paint(self, text: str, colour: Colour) -> str:
        return f"\x1b[{_CODES[colour]}m{text}\x1b[0m" if self.colour else text


@dataclass(frozen=True, slots=True)
class Column:
    """``right`` for numbers. Columns with ``shrink`` give way, the highest number first, down to ``floor`` characters;
    with ``keep_end`` the beginning of a text goes."""

    title: str
    right: bool = False
    shrink: int = 0
    floor: int = 8
    keep_end: bool = False


def table(columns: Sequence[Column], rows: Iterable[Sequence[object]], width: int = WIDTH) -> list[str]:
    """Lines with a header, none without rows. A column without text is left out; what is cut ends in …, or begins so"""
    cells = [[clean(value) for value in row] for row in rows]
    if not cells:
        return []
    used = [n for n in range(len(columns)) if any(row[n] for row in cells)]
    columns, cells = [columns[n] for n in used], [[row[n] for n in used] for row in cells]
    widths = [max(len(c.title), *(len(row[n]) for row in cells)) for n, c in enumerate(columns)]
    over = sum(widths) + len(GAP) * (len(columns) - 1) - width
    for number in sorted(range(len(columns)), key=lambda n: -columns[n].shrink):
        if over > 0 and columns[number].shrink:
            spare = min(over, max(0, widths[number] - max(columns[number].floor, len(columns[number].title))))
            widths[number] -= spare
            over -= spare
    lines = [[c.title for c in columns], *cells]
    return [_line(columns, widths, row) for row in lines]


def _line(columns: Sequence[Column], widths: Sequence[int], row: Sequence[str]) -> str:
    parts = []
    for column, width, text in zip(columns, widths, row, strict=True):
        short = text
        if len(text) > width:
            short = "…" + text[len(text) - width + 1 :] if column.keep_end else text[: width - 1] + "…"
        parts.append(short.rjust(width) if column.right else short.ljust(width))
    return GAP.join(parts).rstrip()


def wrap(text: str, width: int, indent: str) -> list[str]:
    """``text`` in lines of at most ``width``, the second and further ones indented."""
    import textwrap

    return textwrap.wrap(clean(text), width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def short(count: int) -> str:
    """``999999``, ``1.23M``, ``45.6G``: at most six characters up to 10^18."""
    if count < 1_000_000:
        return str(count)
    unit = next((n for n in range(2, 6) if count < 999.5 * 1000**n), 6)
    return f"{count / 1000**unit:.3g}{'_kMGTPE'[unit]}"


def duration(seconds: float) -> str:
    """``3 d 4 h``, ``12 min``, ``5 s``."""
    left = max(0, int(seconds))
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    for number, (unit, size) in enumerate(units):
        if left >= size or unit == "s":
            text = f"{left // size} {unit}"
            rest = left % size
            if number < 2 and rest >= units[number + 1][1]:
                text += f" {rest // units[number + 1][1]} {units[number + 1][0]}"
            return text
    raise AssertionError  # the last unit returns


def since(moment: float) -> str:
    return duration(time.time() - moment)


def emit(lines: Iterable[str], stream: TextIO | None = None) -> None:
    for line in lines:
        print(line, file=stream or sys.stdout)
