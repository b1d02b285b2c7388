"""The command line of vma_stats: options, defaults and error texts of the manual.

getopt rather than argparse: scripts rely on its abbreviations, on `-S FD [LEVEL]`, and on the error texts.
"""

import getopt
from dataclasses import dataclass, field
from typing import Literal

from vmahybrid.config import catalogue
from vmahybrid.printable import clean

SHORT = "i:c:v:d:p:k:s:Vzl:S:D:n:fFh?"
LONG = [
    "interval=", "cycles=", "view=", "details=", "pid=", "directory=", "sockets=", "version", "zero", "log_level=",
    "fd_dump=", "details_level=", "name=", "find_pid", "forbid_clean", "help", "json", "once", "top",
]  # fmt: skip
DEFAULT_DIRECTORY = "/tmp/"  # VMA_STATS_SHMEM_DIR
MAX_LIST = 100
MAX_FD = 1 << 20
SECONDS_MAX = 1_000_000

USAGE = """
VMA Statistics
Usage:
\tvma_stats [-p pid] [-k directory] [-v view] [-d details] [-i interval]

Defaults:
\tfind_pid=enabled, directory="/tmp/", view=1, details=1, interval=1,

Options:
  -p, --pid=<pid>               Show VMA statistics for process with pid: <pid>
  -k, --directory=<directory>   Set shared memory directory path to <directory>
  -n, --name=<application>      Show VMA statistics for application: <application>
  -f, --find_pid                Find and show statistics for VMA instance running (default)
  -F, --forbid_clean            Do not remove the statistics files of dead processes
  -i, --interval=<n>            Print report every <n> seconds
  -c, --cycles=<n>              Do <n> report print cycles and exit, use 0 value for infinite (default)
  -v, --view=<1|2|3|4|5>        Set view type:1- basic info,2- extra info,3- full info,4- mc groups,5- similar to \
'netstat -tunaep'
  -d, --details=<1|2>           Set details mode:1- to see totals,2- to see deltas
  -z, --zero                    Zero counters
  -l, --log_level=<level>       Set VMA log level to <level>(1 <= level <= 7, or one of: \
none/panic/error/warn/info/details/debug/fine/finer/all)
  -S, --fd_dump=<fd> [<level>]  Dump statistics for fd number <fd> using log level <level>. use 0 value for all \
open fds.
  -D, --details_level=<level>   Set VMA log detail level to <level>(0 <= level <= 3)
  -s, --sockets=<list|range>    Log only sockets that match <list> or <range>, format: 4-16 or 1,9 (or combination)
  -V, --version                 Print version
  -h, --help                    Print this help message
      --json                    Print one JSON object per cycle
      --once                    Print one report and exit, as -c 1
      --top                     Full screen: the sockets of all programs, sorted; ? shows the keys. Lines where there \
is no terminal
"""


LETTERS = {
    "interval": "i", "cycles": "c", "view": "v", "details": "d", "pid": "p", "directory": "k", "sockets": "s",
    "version": "V", "zero": "z", "log_level": "l", "fd_dump": "S", "details_level": "D", "name": "n", "find_pid": "f",
    "forbid_clean": "F", "help": "h", "json": "json", "once": "once",
    "top": "top",
}  # fmt: skip
_INT_MAX = 0x7FFFFFFF
NUMBERS = {
    "i": ("interval", "interval", 1, SECONDS_MAX),
    "c": ("cycles", "cycles", 0, _INT_MAX),
    "v": ("view", "view", 1, 5),
    "d": ("details", "details", 1, 2),
    "p": ("pid", "pid", 1, _INT_MAX),
    "D": ("log_details", "details level", 0, 3),
    "S": ("dump_fd", "fd", 0, _INT_MAX),
}
_FLAGS: dict[str, tuple[str, bool | int | str]] = {
    "F": ("forbid_clean", True),
    "z": ("zero", True),
    "json": ("json", True),
    "once": ("cycles", 1),
    "top": ("top", True),
    "V": ("wish", "version"),
    "h": ("wish", "help"),
    "?": ("wish", "help"),
}
_CHOICE_OF_PROCESS = "pnf"


class OptionError(Exception):
    """The text that vma_stats prints behind ``vmastat: ``, in one line whatever the token is."""

    def __init__(self, text: str) -> None:
        super().__init__(clean(text))


@dataclass(slots=True)
class Options:
    pid: int | None = None
    name: str | None = None
    directory: str | None = None            # None: the default, not asked for
    forbid_clean: bool = False
    interval: int = 1                       # seconds
    cycles: int = 0                         # 0: for ever
    view: int = 1
    details: int = 1
    zero: bool = False
    log_level: int | None = None            # enum vmh_log_level, -1 to 8
    log_details: int | None = None
    dump_fd: int | None = None
    dump_level: int = 3
    sockets: list[range] = field(default_factory=list)     # empty: all
    json: bool = False
    top: bool = False
    wish: Literal["show", "help", "version"] = "show"

    @property
    def deltas(self) -> bool:
        return self.details == 2

    @property
    def orders(self) -> bool:
        """Something that the program has to take; -z needs nobody."""
        return self.log_level is not None or self.log_details is not None or self.dump_fd is not None

    def shows(self, fd: int) -> bool:
        return not self.sockets or any(fd in numbers for numbers in self.sockets)


def parse(argv: list[str]) -> Options:
    """Raises OptionError."""
    try:
        pairs, rest = getopt.gnu_getopt(argv, SHORT, LONG)
    except getopt.GetoptError as error:
        raise OptionError(str(error)) from None
    options = Options()
    for name, value in pairs:
        _take(options, name.lstrip("-"), value)
    if rest and options.dump_fd is not None:
        options.dump_level = level_value("S", rest.pop(0))
    if rest:
        raise OptionError(f"unexpected argument {rest[0]!r}")
    if options.top and options.json:
        raise OptionError("--top is for people: leave --json away, or --top")
    return options


def _take(options: Options, name: str, value: str) -> None:
    letter = name if len(name) == 1 else LETTERS[name]
    if letter in NUMBERS:
        attribute, what, low, high = NUMBERS[letter]
        setattr(options, attribute, _number(letter, what, value, low, high))
    elif letter in _FLAGS:
        attribute, flag = _FLAGS[letter]
        setattr(options, attribute, flag)
    elif letter == "k":
        options.directory = value
    elif letter == "l":
        options.log_level = level_value("l", value)
    elif letter == "s":
        options.sockets = _sockets(value)
    if letter in _CHOICE_OF_PROCESS:  # the last one wins
        options.pid = options.pid if letter == "p" else None
        options.name = value if letter == "n" else None


def _number(letter: str, what: str, value: str, low: int, high: int) -> int:
    if not (value.isascii() and value.isdigit()) or not low <= int(value) <= high:
        raise OptionError(f"'-{letter}' Invalid {what} val: {value}")
    return int(value)


def level_value(letter: str, value: str) -> int:
    """Names of VMA_TRACELEVEL, and the manual's numbers 1 to 7: those of VMA_TRACELEVEL, where 7 is everything."""
    try:
        if value.strip().isdecimal() and int(value) not in range(1, 8):
            raise ValueError(value)
        number = catalogue.load()["VMA_TRACELEVEL"].parse("all" if value == "7" else value)
    except ValueError:
        raise OptionError(f"'-{letter}' Invalid log level val: {value}") from None
    return int(number)


def level_name(value: int) -> str:
    return next(choice.text for choice in catalogue.load()["VMA_TRACELEVEL"].choices if choice.value == value)


def _sockets(value: str) -> list[range]:
    if len(value) > MAX_LIST:
        raise OptionError(f"Invalid fd val size : {len(value)}, cannot exceed {MAX_LIST}")
    ranges = [_range(part) for part in value.split(",") if part]
    if not ranges:
        raise OptionError(f"Invalid fd val: {value}")
    return ranges


def _range(text: str) -> range:
    ends = []
    for part in text.split("-", 1):
        if not (part.isascii() and part.isdigit()) or int(part) > MAX_FD:
            raise OptionError(f"Invalid fd val: {part or text}")
        ends.append(int(part))
    return range(min(ends), max(ends) + 1)
