"""vma_stats --top: the rows, their columns and order, and what the keys do. Nothing here knows a terminal."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from vmahybrid.cli.output import short
from vmahybrid.printable import clean
from vmahybrid.stats.counters import SOCKET
from vmahybrid.vma_stats.delta import Reading, delta
from vmahybrid.vma_stats.lists import sent_by
from vmahybrid.vma_stats.tables import poll_percent

Sock = dict[str, Any]
Value = int | float | str
NOTHING = {counter.name: 0 for counter in SOCKET}
INTERVALS = (1, 2, 3, 5, 10, 15, 30, 60)  # seconds


def _sum(*names: str) -> Callable[[Sock], int]:
    return lambda sock: sum(sock["counters"][name] for name in names)


def _field(name: str) -> Callable[[Sock], Value]:
    return lambda sock: clean(sock[name]) if isinstance(sock[name], str) else sock[name]


def _poll(sock: Sock) -> float:
    return round(poll_percent(sock["counters"]["rx_poll_hit"], sock["counters"]["rx_poll_miss"]), 1)


def _offloaded(sock: Sock) -> str:
    if sock["offloaded"] and sent_by(sock) == "kernel":
        return "Rx"
    return "Yes" if sock["offloaded"] else "No"


def _why(sock: Sock) -> str:
    return "" if sock["reason"] == "none" else clean(sock["reason"])


def is_counted(sock: Sock) -> bool:
    """Else its calls go to libc without a detour: see passthrough.py."""
    return sock["counters"] is not NOTHING


def _uncounted(reading: Reading) -> Iterator[Sock]:
    process = reading["process"]
    for sock in reading.get("passthrough", ()):
        yield {"offloaded": False, **sock, "pid": process["pid"], "comm": process["comm"], "reason": "none",
               "counters": NOTHING}


@dataclass(frozen=True, slots=True)
class Column:
    """``rate``: per second, or a total. Columns with the lowest ``rank`` stay when there is no room for all."""

    title: str
    width: int
    value: Callable[[Sock], Value]
    rank: int
    text: str
    number: bool = True
    rate: bool = False

    @property
    def counted(self) -> bool:
        """Is it of what the shim counts?"""
        return self.number and self.title not in ("PID", "FD")

    def heading(self, totals: bool) -> str:
        return self.title if totals or not self.rate else f"{self.title}/s"

    def show(self, sock: Sock) -> str:
        if self.counted and not is_counted(sock):
            return "-"
        value = self.value(sock)
        return short(value) if isinstance(value, int) and self.rate else str(value)


COLUMNS = (
    Column("PID", 7, _field("pid"), 1, "process"),
    Column("PROGRAM", 9, _field("comm"), 2, "its name", number=False),
    Column("FD", 4, _field("fd"), 0, "descriptor"),
    Column("PROT", 5, _field("proto"), 10, "protocol", number=False),
    Column("OFFL", 5, _offloaded, 0, "on a ring: Yes, No, or Rx: it sends by the kernel", number=False),
    Column("LOCAL", 21, _field("local"), 3, "local address", number=False),
    Column("RX", 7, _sum("rx_packets"), 4, "datagrams received from a ring (TCP: calls)", rate=True),
    Column("TX", 7, _sum("tx_packets"), 4, "datagrams sent through a ring (TCP: calls)", rate=True),
    Column("OS", 6, _sum("rx_os_packets", "tx_os_packets"), 5, "both ways through the kernel", rate=True),
    Column("ERR", 6, _sum("rx_errors", "tx_errors", "rx_os_errors", "tx_os_errors"), 6, "calls that failed", rate=True),
    Column("DROP", 7, _sum("rx_drop_packets", "tx_drops"), 7, "dropped: no room", rate=True),
    Column("POLL%", 6, _poll, 8, "receive calls that found data by polling"),
    Column("RXB", 7, _sum("rx_bytes"), 9, "bytes received from a ring", rate=True),
    Column("TXB", 7, _sum("tx_bytes"), 9, "bytes sent through a ring", rate=True),
    Column("QUEUE", 6, _sum("rx_ready_packets"), 11, "datagrams that wait to be read (TCP: 1 if bytes do)"),
    Column("REMOTE", 21, _field("remote"), 12, "peer", number=False),
    Column("REASON", 20, _why, 13, "why it is not on a ring", number=False),
)
RX = next(number for number, column in enumerate(COLUMNS) if column.title == "RX")
TX = RX + 1
BUSIEST = -1  # the order before a column is chosen: by RX and TX together


_busy = _sum("rx_packets", "tx_packets")


def columns_for(width: int) -> list[int]:
    """Indexes of the columns that fit, in their order."""
    chosen: list[int] = []
    left = width
    for number in sorted(range(len(COLUMNS)), key=lambda n: (COLUMNS[n].rank, n)):
        needed = COLUMNS[number].width + (1 if chosen else 0)
        if needed > left:
            break
        chosen.append(number)
        left -= needed
    return sorted(chosen)


def identity(sock: Sock) -> tuple[int, int, int]:
    return sock["pid"], sock["fd"], sock["inode"]


@dataclass(slots=True)
class Top:
    """What is shown. ``refresh`` brings news, ``key`` what the user typed, ``rows`` is the table of now."""

    interval: int = 1
    sort: int = BUSIEST
    ascending: bool = False
    totals: bool = False
    detail: bool = False
    help: bool = False
    paused: bool = False
    filter: str = ""
    typing: str | None = None                        # the filter while it is typed
    message: str = ""                                # what is wrong now
    chosen: tuple[int, int, int] | None = None       # identity of the selected socket
    page: int = 10                                   # rows on the screen, of the last drawing
    quit: bool = False
    readings: list[Reading] = field(default_factory=list)
    rates: list[Reading] = field(default_factory=list)

    def refresh(self, readings: list[Reading]) -> None:
        """A process that is new has no rates yet: they begin with its second reading."""
        before = {reading["process"]["pid"]: reading for reading in self.readings}
        self.rates = [delta(before.get(now["process"]["pid"], now), now, self.interval) for now in readings]
        self.readings = readings
        self.message = ""

    def shown(self) -> list[Reading]:
        return self.readings if self.totals else self.rates

    def uncounted(self) -> int:
        """Sockets that the kernel alone serves."""
        return sum(len(reading.get("passthrough", ())) for reading in self.readings)

    def rows(self) -> list[Sock]:
        """Filtered and sorted; equal ones by process and descriptor."""
        socks = [sock for reading in self.shown() for sock in (*reading["sockets"], *_uncounted(reading))]
        if self.filter:
            socks = [sock for sock in socks if self.filter in _text(sock)]
        socks.sort(key=lambda sock: (sock["pid"], sock["fd"]))
        socks.sort(key=_busy if self.sort == BUSIEST else COLUMNS[self.sort].value, reverse=not self.ascending)
        return socks

    def sorted_by(self) -> tuple[int, ...]:
        return (RX, TX) if self.sort == BUSIEST else (self.sort,)

    def selected(self, rows: list[Sock]) -> int:
        """Where the chosen socket is now. The first row, whichever it is, until one is chosen, or if it has gone."""
        for number, sock in enumerate(rows):
            if identity(sock) == self.chosen:
                return number
        self.chosen = None
        return 0

    def key(self, key: str) -> None:
        """``key`` is a character, or the name of one: up, pgdn, enter, esc, backspace, ..."""
        if self.typing is not None:
            self._type(key)
        elif self.help:
            self.help = False
            self.quit = key == "q"
        elif key in _MOVES:
            self._move(_MOVES[key](self.page))
        elif key in _KEYS:
            _KEYS[key](self)

    def _type(self, key: str) -> None:
        text = self.typing or ""
        if key == "enter":
            self.filter, self.typing = text, None
        elif key == "esc":
            self.typing = None
        elif key == "backspace":
            self.typing = text[:-1]
        elif len(key) == 1 and key.isprintable():
            self.typing = text + key

    def _move(self, by: int) -> None:
        rows = self.rows()
        if rows:
            at = min(max(self.selected(rows) + by, 0), len(rows) - 1)
            self.chosen = identity(rows[at])

    def _sort_by(self, step: int) -> None:
        self.sort = ((RX if self.sort == BUSIEST else self.sort) + step) % len(COLUMNS)
        self.ascending = not COLUMNS[self.sort].number

    def _open(self) -> None:
        self._move(0)
        self.detail = not self.detail

    def _toggle(self, name: str) -> None:
        setattr(self, name, not getattr(self, name))

    def _escape(self) -> None:
        if self.detail:
            self.detail = False
        else:
            self.filter = ""

    def _slower(self, step: int) -> None:
        at = min(range(len(INTERVALS)), key=lambda n: abs(INTERVALS[n] - self.interval)) + step
        self.interval = INTERVALS[min(max(at, 0), len(INTERVALS) - 1)]

    def _filter(self) -> None:
        self.typing = self.filter

    def _quit(self) -> None:
        self.quit = True


def _text(sock: Sock) -> str:
    words = [*(str(sock[name]) for name in ("pid", "comm", "local", "remote", "reason")), _offloaded(sock)]
    return " ".join(words)


_MOVES: dict[str, Callable[[int], int]] = {
    "up": lambda _: -1, "k": lambda _: -1, "down": lambda _: 1, "j": lambda _: 1, "pgup": lambda page: -page,
    "pgdn": lambda page: page, "home": lambda _: -(1 << 30), "end": lambda _: 1 << 30,
}  # fmt: skip
_KEYS: dict[str, Callable[[Top], None]] = {
    "q": Top._quit, "?": lambda top: top._toggle("help"), "h": lambda top: top._toggle("help"),
    "left": lambda top: top._sort_by(-1), "<": lambda top: top._sort_by(-1),
    "right": lambda top: top._sort_by(1), ">": lambda top: top._sort_by(1),
    "r": lambda top: top._toggle("ascending"), "d": lambda top: top._toggle("totals"),
    "enter": Top._open, " ": Top._open, "esc": Top._escape,
    "p": lambda top: top._toggle("paused"), "/": Top._filter,
    "+": lambda top: top._slower(1), "-": lambda top: top._slower(-1),
}  # fmt: skip
HELP = (
    ("up, down, k, j", "choose a socket; PgUp, PgDn, Home, End"),
    ("Enter, space", "open or close the pane with its details"),
    ("<, >, left, right", "sort by the next column to that side"),
    ("r", "reverse the order"),
    ("d", "rates per second, or totals"),
    ("/", "show rows with this text; Enter takes it, Esc not"),
    ("+, -", "longer or shorter interval"),
    ("p", "pause, go on"),
    ("Esc", "close the pane, then forget the text of /"),
    ("?, h", "this page; any key closes it"),
    ("q", "quit"),
)
