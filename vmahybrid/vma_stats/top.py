"""vma_stats --top: every socket of every program on a full screen, busiest first, as top(1) does for processes.

Where there is no terminal that can place a cursor, the same table comes as lines.
"""

import curses
import locale
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from vmahybrid.errors import VmahybridError
from vmahybrid.vma_stats.delta import Reading
from vmahybrid.vma_stats.top_model import Top
from vmahybrid.vma_stats.top_screen import Line, Look, screen

Fetch = Callable[[], list[Reading]]
FIRST = 0.3        # seconds to the second reading, which gives the first rates
LINES_WIDTH = 120  # where nobody knows how wide the paper is
_NAMES = {
    curses.KEY_UP: "up", curses.KEY_DOWN: "down", curses.KEY_LEFT: "left", curses.KEY_RIGHT: "right",
    curses.KEY_PPAGE: "pgup", curses.KEY_NPAGE: "pgdn", curses.KEY_HOME: "home", curses.KEY_END: "end",
    curses.KEY_ENTER: "enter", curses.KEY_BACKSPACE: "backspace",
}  # fmt: skip
_CHARACTERS = {"\n": "enter", "\r": "enter", "\x1b": "esc", "\x7f": "backspace", "\b": "backspace"}


def full_screen_works() -> bool:
    """A terminal on both sides, of a kind that terminfo knows and that can place its cursor."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    try:
        curses.setupterm()
    except curses.error:
        return False
    return bool(curses.tigetstr("cup") and curses.tigetstr("clear"))


def run(fetch: Fetch, interval: int, cycles: int) -> None:
    """Until the user quits, or after ``cycles`` readings (0: no end). Raises VmahybridError if the first one fails."""
    top = Top(interval=interval)
    top.refresh(fetch())
    if not full_screen_works():
        _as_lines(top, fetch, cycles)
        return
    locale.setlocale(locale.LC_ALL, "")
    os.environ.setdefault("ESCDELAY", "25")  # milliseconds that curses waits for the rest of a key
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        curses.wrapper(lambda window: _Screen(window, top, fetch).run(cycles))
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminated(_signum: int, _frame: FrameType | None) -> NoReturn:
    """As an exception: the terminal is put back."""
    raise SystemExit(128 + signal.SIGTERM)


def news(top: Top, fetch: Fetch) -> None:
    """A service that is away does not end the view: it says so, and goes on when it is back."""
    try:
        top.refresh(fetch())
    except VmahybridError as error:
        top.message = f"no news: {error.why}. {error.remedy}"


def _as_lines(top: Top, fetch: Fetch, cycles: int) -> None:
    done = 0
    width = shutil.get_terminal_size((LINES_WIDTH, 24)).columns if sys.stdout.isatty() else LINES_WIDTH
    while True:
        time.sleep(top.interval)
        news(top, fetch)
        rows = len(top.rows())
        for line in screen(top, width, rows + 5, time.strftime("%H:%M:%S"))[:-1]:
            if line.text.strip():
                print(line.text.rstrip())
        print("-" * 79, flush=True)
        done += 1
        if done == cycles:
            return


class _Screen:
    """The window, and the loop: a key, a new size, or the time for a new reading."""

    def __init__(self, window: curses.window, top: Top, fetch: Fetch) -> None:
        self._window, self._top, self._fetch = window, top, fetch
        self._looks: dict[Look, int] = {
            "plain": curses.A_NORMAL, "bold": curses.A_BOLD, "dim": curses.A_DIM, "reverse": curses.A_REVERSE,
            "warn": curses.A_BOLD,
        }  # fmt: skip
        if not os.environ.get("NO_COLOR") and curses.has_colors():
            curses.use_default_colors()
            curses.init_pair(1, curses.COLOR_YELLOW, -1)
            self._looks["warn"] = curses.color_pair(1)
        with suppress(curses.error):  # a terminal that can't hide its cursor
            curses.curs_set(0)

    def run(self, cycles: int) -> None:
        top, done = self._top, 0
        due = time.monotonic() + min(FIRST, top.interval)
        while not top.quit:
            self.draw()
            left = due - time.monotonic()
            if left > 0 or top.paused:
                self._window.timeout(-1 if top.paused else max(1, round(left * 1000)))
                self.read_key()
                due = min(due, time.monotonic() + top.interval)  # the interval may be shorter now
                continue
            news(top, self._fetch)
            due = time.monotonic() + top.interval
            done += 1
            if done == cycles:
                self.draw()
                return

    def draw(self) -> None:
        height, width = self._window.getmaxyx()
        self._window.erase()
        for row, line in enumerate(screen(self._top, width, height, time.strftime("%H:%M:%S"))):
            self._put(row, line, width, height)
        self._window.refresh()

    def _put(self, row: int, line: Line, width: int, height: int) -> None:
        # the last cell of the last line can't be written without scrolling
        text = line.text[: width - 1] if row == height - 1 else line.text
        text = text.encode(self._window.encoding, "replace").decode(self._window.encoding)
        with suppress(curses.error):  # the window became smaller a moment ago: KEY_RESIZE follows
            self._window.addstr(row, 0, text, self._looks[line.look])

    def read_key(self) -> None:
        try:
            key = self._window.get_wch()
        except curses.error:
            return  # the time is over
        if key == curses.KEY_RESIZE:
            curses.update_lines_cols()
        elif isinstance(key, str):
            self._top.key(_CHARACTERS.get(key, key))
        elif key in _NAMES:
            self._top.key(_NAMES[key])
