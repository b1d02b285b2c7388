"""vma_stats: the counters of programs under the shim, as the VMA monitoring manual 9.8.80 shows them."""

import json
import os
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from vmahybrid.cli.output import any_name_prints, lost_stdout
from vmahybrid.errors import NotFound, ServiceUnreachable, VmahybridError
from vmahybrid.printable import clean
from vmahybrid.stats import orders
from vmahybrid.vma_stats import directory, full, lists, passthrough, tables, unconnected
from vmahybrid.vma_stats.delta import Reading, delta
from vmahybrid.vma_stats.options import DEFAULT_DIRECTORY, USAGE, OptionError, Options, level_name, parse

SCHEMA = 1
CLEAR = "\x1b[H\x1b[2J\x1b[3J"


class Failed(Exception):
    """Already printed; the exit code is 1."""


def out(line: str) -> None:
    sys.stdout.write(line + "\n")


def say(text: str) -> None:
    """A message of the tool itself; with --json stdout is for objects only."""
    print(f"vmastat: {clean(text)}", flush=True)


def error(text: str) -> None:
    sys.stdout.flush()
    print(f"vmastat: {clean(text)}", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Exit code 0; 1 on any error, 2 where the command line itself is wrong."""
    any_name_prints()
    try:
        code = answer(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except OSError as why:
        return lost_stdout("vmastat", why)


def answer(argv: list[str]) -> int:
    """The exit code; what is written may still be in a buffer."""
    try:
        options = parse(argv)
        if options.wish != "show":
            print(USAGE, end="") if options.wish == "help" else print_version()
            return 0
        return run(options)
    except OptionError as why:
        error(str(why))
        print(USAGE, end="")
        return 2
    except Failed:
        return 1
    except VmahybridError as why:
        error(str(why))
        return 1
    except KeyboardInterrupt:
        say("Got Ctrl-C (interrupted by user)")
        return 0


def print_version() -> None:
    from vmahybrid.cli.version import build_date, version

    say(f"Linked with VMA version: vmahybrid {version()}")
    say(f"Build Date: {build_date()}")


def run(options: Options) -> int:
    from vmahybrid.cli.client import Client

    allowed = look_into_directory(options)
    with Client() as service:
        client, processes = connect(service, options)
        if options.directory is not None:
            processes = of_directory(processes, allowed, options)
        if options.top:
            return show_top(client, processes, options)
        if options.view == 5:
            return show_netstat(client, processes, options)
        process = choose(processes, options)
        if not options.json:
            say(f"stats for application: {process['comm']} with pid: {process['pid']}")
        act(client, process, options)
        if options.dump_fd is None:
            watch(client, process["pid"], options)
    return 0


def connect(service: Any, options: Options) -> tuple[Any, list[dict[str, Any]]]:
    """The service and its processes; where none answers us, the files of the directory."""
    try:
        found = service.get("v1", "processes")
        return (service, found) if options.directory is None else with_pages(service, found, options.directory)
    except ServiceUnreachable as why:
        return only_pages(why, options)


def pages_directory(options: Options) -> str:
    """The one that was asked for, also if its name is empty."""
    return DEFAULT_DIRECTORY if options.directory is None else options.directory


def only_pages(why: ServiceUnreachable, options: Options) -> tuple[Any, list[dict[str, Any]]]:
    from vmahybrid.vma_stats.pages import Pages

    path = pages_directory(options)
    pages = Pages(path, why)
    try:
        found = pages.get("v1", "processes")
    except OSError:
        raise why from None
    if options.directory is None and not found:
        raise why
    if isinstance(why.__cause__, PermissionError):  # there is one, for others
        error(f"{why.what}: {why.why}: what is in {path} is shown. {why.remedy}")
    else:
        error(f"no service answers: what is in {path} is shown")
    if pages.refused and options.directory is not None:
        pids = ", ".join(map(str, sorted(pages.refused)))
        error(f"the files of other users' processes there may not be read: {pids}")
    return pages, found


def with_pages(service: Any, known: list[dict[str, Any]], path: str) -> tuple[Any, list[dict[str, Any]]]:
    """The service, and beside it the files in the directory of programs that have no session with it."""
    from vmahybrid.vma_stats.pages import Beside, Pages

    pids = {process["pid"] for process in known}
    pages = Pages(path, ServiceUnreachable("process", "it has no session with the service", "its log says why"))
    others = [process for process in pages.get("v1", "processes") if process["pid"] not in pids]
    return (Beside(service, pages, {process["pid"] for process in others}) if others else service), known + others


def look_into_directory(options: Options) -> set[int]:
    """Removes stale files, and gives the pids that have one. A directory that was asked for must exist."""
    path = pages_directory(options)
    try:
        if not options.forbid_clean:
            directory.remove_stale(path)
        return directory.pids_in(path)
    except OSError as why:
        if options.directory is None:
            return set()
        error(f"opendir {path} failed (errno={why.errno} {why.strerror})")
        raise Failed from why


def of_directory(processes: list[dict[str, Any]], allowed: set[int], options: Options) -> list[dict[str, Any]]:
    if options.pid not in allowed and any(process["pid"] == options.pid for process in processes):
        error(f"VMA statistics data for process id {options.pid} not found in {options.directory}: the program's "
              "VMA_STATS_SHMEM_DIR is another directory")
        raise Failed
    return [process for process in processes if process["pid"] in allowed]


def choose(processes: list[dict[str, Any]], options: Options) -> dict[str, Any]:
    found = [process for process in processes if asked_for(process, options)]
    if found:
        return found[0]
    if options.pid is not None:
        error(f"VMA statistics data for process id {options.pid} not found")
        if any(program["pid"] == options.pid for program in unconnected.programs(set())):
            error("it has no session: its sockets came from another process, or it could not open one with the service "
                  f"(its log says why). The kernel alone serves them: vma_stats -v 5 -p {options.pid} lists them")
    else:
        error("Failed to identify process...")
        if not options.json:
            print(USAGE, end="")
    raise Failed


def asked_for(process: dict[str, Any], options: Options) -> bool:
    if not process["pid"]:
        return False  # of another PID namespace: it has no number here by which one could ask for it
    if options.pid is not None:
        return bool(process["pid"] == options.pid)
    return options.name is None or goes_by(process, options.name)


def goes_by(process: dict[str, Any], name: str) -> bool:
    """By the name of the executable, of the process, or the first word of its command line."""
    names = {process["comm"], os.path.basename(process["cmdline"].split(" ")[0])}
    with suppress(OSError):  # another user's process; the other names must do
        names.add(os.path.basename(os.readlink(f"/proc/{process['pid']}/exe")))
    return name in names


def act(client: Any, process: dict[str, Any], options: Options) -> None:
    """-z, -l, -D and -S."""
    pid = process["pid"]
    if options.zero:
        tell(options, "Zero counters...")
        client.post("v1", "processes", pid, "zero")
    if options.log_level is not None or options.log_details is not None:
        body = {"level": options.log_level, "details": options.log_details}
        client.post("v1", "processes", pid, "log", body=body)
    if options.dump_fd is not None:
        what = f"Fd {options.dump_fd}" if options.dump_fd else "all Fd's"
        tell(options, f"Dumping {what} to VMA using log level = {level_name(options.dump_level)}...")
        client.post("v1", "processes", pid, "dump-fd", body={"fd": options.dump_fd, "level": options.dump_level})
        tell_where(client, pid, options)
        now = process["log_level"] if options.log_level is None else options.log_level
        if now < options.dump_level:
            error(f"nothing will be seen: process {pid} logs up to {level_name(now)} only. "
                  f"Give a lower level, or -l {level_name(options.dump_level).lower()}")
    if options.orders and not orders.taken_soon(client, pid):
        error(f"process {pid} has not taken it yet: {orders.WAITS}")


def tell_where(client: Any, pid: int, options: Options) -> None:
    """Of the one socket that is dumped: its program may write its lines later, with its next call."""
    reading = client.get("v1", "stats", pid)
    wheres = {sock["fd"]: (sock, "on a ring" if sock["offloaded"] else f"on the kernel: {sock['reason_text']}")
              for sock in reading["sockets"]}
    for sock in uncounted(client, reading):
        wheres[sock["fd"]] = sock, ("on a ring, but its program's statistics page had no slot for it: nothing is "
                                    "counted (raise VMA_STATS_FD_NUM)" if sock["offloaded"] else
                                    "on the kernel alone, nothing is counted (vma_stats -v 5 lists it)")
    if options.dump_fd in wheres:
        sock, where = wheres[options.dump_fd]
        tell(options, f"Fd {sock['fd']}, {sock['proto']} {sock['local']}: {where}")
    elif options.dump_fd and passthrough.lacks(pid, options.dump_fd):
        error(f"process {pid} has no Fd {options.dump_fd}: vma_stats -v 5 -p {pid} lists its sockets")
        raise Failed


def tell_uncounted(client: Any, reading: Reading, options: Options) -> None:
    """Beside the report, for programs read that as libvma's."""
    others = [sock for sock in uncounted(client, reading) if options.shows(sock["fd"])]
    on_rings = sum(sock["offloaded"] for sock in others)
    if len(others) > on_rings:
        error(f"{len(others) - on_rings} sockets that the kernel alone serves are not counted: "
              "vma_stats -v 5 lists them")
    if on_rings:
        error(f"{on_rings} sockets on rings are not counted, the program's statistics page had no slot for them: raise "
              "VMA_STATS_FD_NUM")


def uncounted(client: Any, reading: Reading) -> list[dict[str, Any]]:
    return with_rings(client, reading["process"], passthrough.uncounted(reading))


def with_rings(client: Any, process: dict[str, Any], others: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those over VMA_STATS_FD_NUM may be on a ring: the service knows."""
    if not process["sockets_over"] or not others:
        return others
    flows = {flow["fd"] for flow in client.get("v1", "flows")
             if flow["pid"] == process["pid"] and flow["action"] == "ring"}
    return [sock | {"offloaded": sock["fd"] in flows} for sock in others]


def tell(options: Options, text: str) -> None:
    if not options.json:
        say(text)


def watch(client: Any, pid: int, options: Options) -> None:
    """One report per interval; with -d 2 the first comes after one interval."""
    screen = Screen(options)
    cycle = 0
    try:
        before = client.get("v1", "stats", pid) if options.deltas and options.view != 4 else None
        due = time.monotonic() + (options.interval if before else 0)
        while True:
            time.sleep(max(0.0, due - time.monotonic()))
            now = client.get("v1", "stats", pid)
            if not cycle and not options.json:
                tell_uncounted(client, now, options)
            screen.show(delta(before, now, options.interval) if before else now)
            before = now if before else None
            cycle += 1
            if cycle == options.cycles or options.view == 4:
                return
            due = max(due + options.interval, time.monotonic())
    except NotFound:
        tell(options, f"Proccess {pid} ended - exiting")


class Screen:
    """Prints reports, and the header again when a screen has been filled since the last one."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._lines = tables.SCREEN_LINES

    def show(self, reading: Reading) -> None:
        sockets = [sock for sock in reading["sockets"] if self._options.shows(sock["fd"])]
        if self._options.json:
            print_json(reading | {"sockets": sockets}, self._options.deltas)
            return
        for line in self._report(reading, sockets):
            out(line)
        sys.stdout.flush()

    def _report(self, reading: Reading, sockets: list[dict[str, Any]]) -> Iterable[str]:
        deltas, view = self._options.deltas, self._options.view
        if view == 4:
            return lists.groups_view(sockets)
        if view == 3:
            clear = [CLEAR] if sys.stdout.isatty() else []
            return [*clear, *full.full_view(reading, sockets, deltas), *([tables.SEPARATOR] if sockets else [])]
        return self._table(reading, sockets, deltas, extra=view == 2)

    def _table(self, reading: Reading, sockets: list[dict[str, Any]], deltas: bool, *, extra: bool) -> list[str]:
        lines: list[str] = []
        if self._lines >= tables.SCREEN_LINES:
            lines += tables.extra_header(deltas) if extra else tables.basic_header(deltas)
            self._lines = 0
        for sock in sockets:
            lines += tables.extra_rows(sock) if extra else tables.basic_rows(sock)
        lines += [tables.iomux_row(i, deltas) for i in reading["iomux"] if tables.iomux_active(i["counters"])]
        if sockets:
            lines.append(tables.SEPARATOR)
        self._lines += len(lines)
        return lines


def show_netstat(client: Any, processes: list[dict[str, Any]], options: Options) -> int:
    """Every process once, or the one of -p or -n; also sockets that only the kernel serves."""
    others = [] if options.directory is not None else without_session(processes, options)
    if options.pid is not None or options.name is not None:
        others = [reading for reading in others if asked_for(reading["process"], options)]
        if not others or any(asked_for(process, options) for process in processes):
            processes, others = [choose(processes, options)], []
        else:
            processes, others = [], others[:1]
    wanted = {process["pid"] for process in processes}
    readings = [reading for reading in client.get("v1", "stats") if reading["process"]["pid"] in wanted]
    shown = [*(with_passthrough(client, reading, options) for reading in readings), *others]
    if options.json:
        for reading in shown:
            print_json(reading, deltas=False)
        return 0
    for line in lists.netstat_view(shown):
        out(line)
    return 0


def without_session(processes: list[dict[str, Any]], options: Options) -> list[Reading]:
    """Of the programs that the service does not know: all their sockets are the kernel's."""
    return [{"process": {"pid": program["pid"], "comm": program["comm"], "cmdline": program["cmdline"]},
             "sockets": [], "iomux": [], "rings": [],
             "passthrough": [sock for sock in program["sockets"] if options.shows(sock["fd"])]}
            for program in unconnected.programs({process["pid"] for process in processes})]


def show_top(client: Any, processes: list[dict[str, Any]], options: Options) -> int:
    """All programs as they come and go; with -p or -n that one, with -k those that have a file there now."""
    from vmahybrid.vma_stats import top

    wanted: set[int] | None = None
    if options.pid is not None or options.name is not None:
        process = choose(processes, options)
        act(client, process, options)
        wanted = {process["pid"]}
    elif options.directory is not None:
        wanted = {process["pid"] for process in processes}

    def fetch() -> list[Reading]:
        return [reading | {"sockets": [sock for sock in reading["sockets"] if options.shows(sock["fd"])],
                           "passthrough": [sock for sock in uncounted(client, reading) if options.shows(sock["fd"])]}
                for reading in client.get("v1", "stats") if wanted is None or reading["process"]["pid"] in wanted]

    top.run(fetch, options.interval, options.cycles)
    return 0


def with_passthrough(client: Any, reading: Reading, options: Options) -> Reading:
    """Only the sockets of -s, and those that have no slot in the program's page."""
    process = reading["process"]
    try:
        known = {sock["inode"] for sock in reading["sockets"] if sock["offloaded"] or sock["proto"] != "tcp"}
        others = passthrough.sockets_of(process["pid"], known)
    except PermissionError:
        error(f"passthrough sockets of process {process['pid']} are not shown: permission denied, ask as its user")
        others = []
    others = with_rings(client, process, others)
    return reading | {
        "sockets": [sock for sock in reading["sockets"] if options.shows(sock["fd"])],
        "passthrough": [sock for sock in others if options.shows(sock["fd"])],
    }


def print_json(reading: Reading, deltas: bool) -> None:
    """One line per report; with deltas counters are per second and gauges are as they are."""
    print(json.dumps({"schema": SCHEMA, "details": "deltas" if deltas else "totals", **reading}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
