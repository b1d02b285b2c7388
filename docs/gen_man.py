"""Writes the man pages made from catalogues: vmahybrid.conf(5), libvmahybrid(7); profiles and options in vmahybrid(1),
what is a parameter's in vma_stats(8).

    .venv/bin/python docs/gen_man.py

Parameters and profiles are those of parameters.toml, keys those of config/service.py, reasons those of reasons.def,
options those of the command's parser.
"""

import argparse
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from vmahybrid.cli.main import build_parser
from vmahybrid.config import gen_params
from vmahybrid.config.catalogue import ACTS, Catalogue, Parameter, load
from vmahybrid.config.rule import FIELDS
from vmahybrid.config.service import BACKENDS, KEYS, MODES, Key, default_values
from vmahybrid.steering.reasons import ROWS

MAN = Path(__file__).resolve().parent / "man"
DATE = "2026-11-22"
MARKS = ('.\\" {}: made by gen_man.py\n', '.\\" end of {}\n')


def roff(text: str) -> str:
    """As plain text; `code` is bold, and no line begins with a command."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    text = re.sub(r"`([^`]*)`", r"\\fB\1\\fR", text)
    return re.sub(r"^([.'])", r"\\&\1", text, flags=re.MULTILINE)


def head(name: str, section: int, kind: str, title: str) -> list[str]:
    return [f'.TH {name.upper()} {section} {DATE} "vmahybrid 0.1" "{kind}"', ".nh", ".SH NAME",
            f"{name} \\- {roff(title)}"]


def entry(tag: str, text: str) -> list[str]:
    return [".TP", f".B {roff(tag)}", roff(text)]


def example(lines: str) -> list[str]:
    return [".PP", ".nf", ".RS", roff(lines.strip("\n")), ".RE", ".fi"]


def paragraph(text: str) -> list[str]:
    return [".PP", roff(text)]


def parameter_text(parameter: Parameter) -> str:
    notes = [parameter.text]
    if parameter.aliases:
        notes.append("Older names: " + ", ".join(parameter.aliases) + ".")
    unit = f" {parameter.unit}" if parameter.unit else ""
    default = gen_params.describe_default(parameter).strip("`")
    notes.append(f"Default: {default}{unit}. Values: {gen_params.allowed(parameter).replace('`', '')}.")
    if parameter.acts == "now" and len(parameter.backends) == 1:
        notes.append(f"Acts on {parameter.backends[0]} rings only.")
    if label := gen_params.labels(parameter):
        notes.append(f"In the banner: {label}.")
    if parameter.live:
        notes.append("Can be changed while the program runs.")
    return " ".join(notes)


def profiles(catalogue: Catalogue) -> Iterator[str]:
    for profile in catalogue.profiles:
        values = ", ".join(f"{name.removeprefix('VMA_')} {catalogue[name].show(value)}"
                           for name, value in profile.values.items())  # fmt: skip
        alias = f" (or {profile.alias})" if profile.alias is not None else ""
        yield from entry(profile.name + alias, f"{profile.text}." + (f" Sets {values}." if values else ""))


def library(catalogue: Catalogue) -> list[str]:
    """libvmahybrid.7"""
    title = "library that takes a program's sockets off the kernel's network stack"
    lines = head("libvmahybrid", 7, "Miscellaneous", title)
    lines += [".SH SYNOPSIS", ".B LD_PRELOAD=libvmahybrid.so", ".RI [ VMA_X = VALUE ]...", ".I PROGRAM",
              ".SH DESCRIPTION"]  # fmt: skip
    lines.append(roff(
        "Preloaded, it passes UDP datagrams and TCP connections of the program over rings that the service "
        "(`vmahybrid start`) grants, TCP as `VMA_HYBRID_TCP` says; what has no ring stays on the kernel, with a reason "
        "that `vmahybrid explain` shows. Without a service the program runs as without the library. It is set up at "
        "the program's first socket. Values are taken in this order, later ones win: default, profile (`VMA_SPEC`), "
        "policy file, environment, `vmahybrid run -e`; `vmahybrid config show` says which won. A value that can't be "
        "used is warned about by name and replaced, or, in a file, left out; it never ends the program."))
    lines += paragraph("A number is a decimal number; a switch is 0 or 1, or true, yes, on, false, no, off. The first "
                       "%d in names of files and directories and in the application id becomes the process id. "
                       "A relative path begins in the directory that the program is in at its first socket or "
                       "epoll instance.")
    lines += [".SH PROFILES", *profiles(catalogue)]
    for acts, meaning in ACTS.items():
        if all(parameter.acts != acts for parameter in catalogue.parameters):
            continue
        lines += [f".SH PARAMETERS: {meaning.upper()}"]
        for parameter in catalogue.parameters:
            if parameter.acts == acts:
                lines += entry(parameter.name, parameter_text(parameter))
    lines += [".SH NO LONGER READ"]
    for obsolete in catalogue.obsolete:
        lines += entry(obsolete.name, " ".join(obsolete.lines) + ".")
    lines += [".SH LOG", roff(
        "Lines ` VMA LEVEL: text` on the standard error, or in `VMA_LOG_FILE`; never on the standard output. At level "
        "info it begins with the version, the command line and the parameters that are not the default, at details "
        "with all."),
        ".SH REASONS"]  # fmt: skip
    for row in ROWS:
        lines += entry(row.slug, f"{row.text}. {row.remedy}".rstrip(". ") + ".")
    lines += [".SH FILES"]
    for name in ("VMA_HYBRID_SOCKET", "VMA_CONFIG_FILE", "VMA_HYBRID_POLICY", "VMA_HYBRID_PROFILE_DIR"):
        lines += entry(str(catalogue[name].default), f"{catalogue[name].label} ({name})")
    others = [".BR vmahybrid (1),", ".BR vmahybrid.conf (5),", ".BR vma_stats (8),", ".BR ld.so (8)"]
    return [*lines, ".SH SEE ALSO", *others]


PARAMETER_FILE = """
# Values of the operator for programs
VMA_STATS_FD_NUM = 200
[program sockperf*]
VMA_SPEC = latency      # the profile, where the environment names none
VMA_RX_POLL = 100000
"""
RULES = """
application-id sockperf* feed
use os  udp_receiver 10.0.0.0/8:5000-5009
use vma udp_receiver *:*
use os  udp_connect  *:53
"""


def default_of(key: Key) -> str:
    default = default_values()[key.name]
    if default != key.default:
        return f"{Path(default).name} in the run directory"
    if isinstance(default, bool):
        return str(default).lower()
    if key.name.endswith(".mode"):
        return f"{default:04o}"
    return ", ".join(default) if isinstance(default, tuple) and default else str(default or "empty")


def files() -> list[str]:
    """vmahybrid.conf.5"""
    lines = head("vmahybrid.conf", 5, "File formats", "configuration of the service, of programs, and libvma.conf")
    lines += [".SH DESCRIPTION", roff("`vmahybrid config check FILE` checks each of these files and names line and "
                                      "token.")]
    lines += [".SH SERVICE: /etc/vmahybrid.toml", roff(
        "TOML; `vmahybrid start --config FILE` names another one. Keys are written as section and name, so "
        "`ring.frames` is `frames` below `[ring]`. Those marked live can be changed by `vmahybrid config set`.")]
    for key in KEYS:
        unit = f" {key.unit}" if key.unit else ""
        text = f"{key.description}. Default: {default_of(key)}{unit}."
        lines += entry(key.name, text + (" Live." if key.live else ""))
    modes, backends = ", ".join(MODES), ", ".join(BACKENDS)
    lines += entry('[interface."NAME"]', f"`mode` is one of {modes}; `backend` one of {backends}.")
    fields = ", ".join(FIELDS)
    lines += entry("[[rule]]", f"A rule of the operator: {fields}. `vmahybrid flows add` does the same at run time.")
    lines += [".SH PROGRAMS: POLICY AND PROFILES", roff(
        "`/etc/vmahybrid/policy.conf` (`VMA_HYBRID_POLICY`) holds the operator's values of libvmahybrid(7); "
        "`/etc/vmahybrid/profiles/NAME.conf` (`VMA_HYBRID_PROFILE_DIR`) is the profile NAME. Both have lines NAME = "
        "VALUE; # begins a comment at the start of a line or behind a blank; a value that has one, or is empty, stands "
        "in double quotes. What follows `[program GLOB]` is for programs of that name only; it belongs into the "
        "policy. `VMA_SPEC = NAME` in a profile starts from a built-in one. Comments and texts may have any byte but "
        "zero; a file with a zero byte, or of more than 32767 bytes, is not read. A line that is wrong is warned about "
        "and left out: what earlier lines and the profile say stays. A number out of range is no such line where "
        "libvmahybrid(7) says `else the nearest limit`: that limit is taken, and warned about. A `VMA_SPEC` that names "
        "no profile stands for none.")]
    lines += example(PARAMETER_FILE)
    lines += [".SH RULES OF A PROGRAM: /etc/libvma.conf", roff(
        "Which sockets and destinations stay on the kernel (`VMA_CONFIG_FILE`). A file with an error changes nothing. "
        "It is read again when it has changed and a socket is bound, connected, joins a group or is about to be moved "
        "to a ring.")]  # fmt: skip
    lines += example(RULES)
    lines += entry("application-id PROGRAM ID", "begins a group of rules. The first group whose PROGRAM (a shell "
                   "pattern) matches the program's name and whose ID is its VMA_APPLICATION_ID, or *, decides alone. "
                   "Rules before the first group are for all programs.")
    lines += entry("use TRANSPORT ROLE ADDR:PORTS[:ADDR:PORTS]", "within the group the first rule that matches "
                   "decides; without one there is a ring. TRANSPORT is os (the kernel), vma or * (a ring), sdp or sa "
                   "(never matches); for tcp_server and tcp_client also offload and adaptive, a policy of their own "
                   "whatever VMA_HYBRID_TCP is. ROLE is udp_receiver (local address or group), udp_sender (remote), "
                   "udp_connect (remote, then local), tcp_server (local) or tcp_client (remote, then local). ADDR is "
                   "a.b.c.d, a.b.c.d/bits or *; PORTS n, n-m or *.")
    lines += entry("log [destination stderr|syslog|file NAME] [min-level N]", "is accepted; VMA_TRACELEVEL and "
                   "VMA_LOG_FILE act instead.")
    return [*lines, ".SH SEE ALSO", ".BR vmahybrid (1),", ".BR libvmahybrid (7)"]


def options(parser: argparse.ArgumentParser, command: str = "") -> Iterator[tuple[str, argparse.Action]]:
    """Every option with its command (``config set``), but --help, which all have."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from options(inner, f"{command} {name}".lstrip())
        elif action.option_strings and not isinstance(action, argparse._HelpAction):
            yield command, action


def option_entries(parser: argparse.ArgumentParser) -> Iterator[str]:
    """What several commands have alike comes once, and first."""
    commands: dict[tuple[str, str, str], list[str]] = {}
    for command, action in options(parser):
        value = action.metavar or "|".join(action.choices or [action.dest.upper()]) if action.nargs != 0 else ""
        commands.setdefault((", ".join(action.option_strings), str(value), str(action.help)), []).append(command)
    for (words, value, text), users in sorted(commands.items(), key=lambda item: len(item[1]) < 2):
        tag = words if len(users) > 1 else f"{users[0]} {words}".lstrip()
        yield ".TP"
        yield f"\\fB{roff(tag)}\\fR" + (f" \\fI{roff(value)}\\fR" if value else "")
        of = f" Of {', '.join(f'`{user}`' for user in users)}." if len(users) > 1 else ""
        yield roff(f"{text[0].upper()}{text[1:]}.{of}")


def control_entries(catalogue: Catalogue) -> Iterator[str]:
    """What vma_stats sets in a program are values of its parameters."""
    level, details = catalogue["VMA_TRACELEVEL"], catalogue["VMA_LOG_DETAILS"]
    words = ", ".join(choice.words[0] for choice in level.choices)
    low, high = details.minimum, details.maximum
    yield from ('.TP', '.BR \\-l ", " \\-\\-log_level " \\fILEVEL\\fR"', roff(
        f"Set the log level of the program (`{level.name}`): {words}, or a number from 1 to 7 (all)."))
    yield from ('.TP', f'.BR \\-D ", " \\-\\-details_level " \\fI{low}\\fR...\\fI{high}\\fR"', roff(
        f"Set the log details of the program (`{details.name}`). {details.text}"))


def directory_entry(catalogue: Catalogue) -> Iterator[str]:
    found = catalogue["VMA_STATS_SHMEM_DIR"]
    yield from ('.TP', '.BR \\-F ", " \\-\\-forbid_clean', roff(
        f"Do not remove the statistics files of dead processes from the directory (`{found.name}`, {found.default})."))


def between_marks(page: str, name: str, lines: Iterable[str]) -> str:
    """The page with these lines between its two marks of that name."""
    begin, end = (mark.format(name) for mark in MARKS)
    before, rest = page.split(begin)
    return before + begin + text(lines) + end + rest.split(end, 1)[1]


def text(lines: Iterable[str]) -> str:
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """By name of the file."""
    catalogue = load()
    first, stats = ((MAN / name).read_text("ascii") for name in ("vmahybrid.1", "vma_stats.8"))
    stats = between_marks(stats, "directory", directory_entry(catalogue))
    return {"vma_stats.8": between_marks(stats, "control", control_entries(catalogue)),
            "libvmahybrid.7": text(library(catalogue)), "vmahybrid.conf.5": text(files()),
            "vmahybrid.1": between_marks(between_marks(first, "profiles", profiles(catalogue)), "options",
                                         option_entries(build_parser()))}  # fmt: skip


if __name__ == "__main__":
    for name, page in pages().items():
        (MAN / name).write_text(page, "ascii")
