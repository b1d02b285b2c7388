"""vmahybrid config show, diff, check, import, profiles, and set of VMA_*: parameters of programs."""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vmahybrid.cli.output import Column, Style, table, wrap
from vmahybrid.config import catalogue, effective, paramfile, profiles
from vmahybrid.config.catalogue import Parameter
from vmahybrid.errors import UsageError, VmahybridError

SCHEMA = 1
NEW_POLICY = "# Values of the operator for programs: see vmahybrid.conf(5).\n"
PROFILE = "profile:"  # before a name that would be taken for a PID
VERBS = ("show", "diff", "check", "import", "profiles")
LIVE = {"VMA_TRACELEVEL": "log_level", "VMA_LOG_DETAILS": "log_details"}
SHOW = [Column("PARAMETER"), Column("VALUE", shrink=1), Column("ORIGIN", shrink=2, floor=20, keep_end=True),
        Column("EFFECT")]
WHOLE = 100_000  # columns, where no terminal limits them
FROM = {"VMA_SPEC", "VMA_HYBRID_POLICY", "VMA_HYBRID_PROFILE_DIR", "VMA_HYBRID_PROFILE"}  # where values come from
EFFECTS = {"tcp": "with offloaded TCP", "later": "not yet", "never": "no effect"}


def is_local(args: argparse.Namespace) -> bool:
    """Answered without the service."""
    return args.verb in VERBS or (args.verb == "set" and any(text.startswith("VMA_") for text in args.changes))


def run(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    return {"show": _show, "diff": _diff, "check": _check, "import": _import, "profiles": _profiles,
            "set": _set}[args.verb](args)  # fmt: skip


def effect(parameter: Parameter, value: int | str = 0) -> str:
    """"" where it acts on every backend, else what limits it."""
    if parameter.acts in EFFECTS:
        return EFFECTS[parameter.acts]
    if parameter.cap is not None and int(value) > parameter.cap:
        return f"acts as {parameter.cap}"
    missing = [name for name in catalogue.BACKENDS if name not in parameter.backends]
    return f"no effect on {', '.join(missing)}" if missing else ""


def has_shim(pid: int) -> bool:
    """Also where nobody can tell."""
    try:
        return b"libvmahybrid" in Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:
        return True


def of_pid(pid: int) -> effective.Effective:
    """What a running program's shim uses; log level and details as they are now. Raises VmahybridError."""
    try:
        found = effective.of_process(pid)
    except FileNotFoundError:
        raise UsageError(f"process {pid}", "no such process", "vmahybrid status lists those with the shim") from None
    except ProcessLookupError:
        raise UsageError(f"process {pid}", "it has no environment: it has ended, or is the kernel's",
                         "vmahybrid status lists those with the shim") from None
    except OSError as error:
        raise VmahybridError(f"process {pid}", str(error.strerror).lower(), "ask as its user, or as root") from None
    if not has_shim(pid):
        found.warnings.append(f"process {pid} runs without the shim: these values would be used with it")
    _live(found, pid)
    return found


def _changed_since(found: effective.Effective, pid: int, began: float) -> None:
    """The program has read its files once, when it ``began`` or, if the first socket came late, later: what stands
    there now is not what it has."""
    for path, place in found.files:
        try:
            now = place.stat()
        except OSError:
            continue
        if max(now.st_mtime, now.st_ctime) <= began:
            continue
        found.warnings.append(f"{path} was changed after process {pid} had read it: its values are shown as they are "
                              "now, the program has the former ones until it is started again")
        for held in found.values.values():
            if f"{path}:" in held.source:
                held.source += " (changed since)"


def _live(found: effective.Effective, pid: int) -> None:
    from vmahybrid.stats.page import PageError, decode_bytes
    from vmahybrid.vma_stats.directory import began

    directory = str(found["VMA_STATS_SHMEM_DIR"])
    path = Path(f"/proc/{pid}/root", directory.lstrip("/"), f"vmastat.{pid}")
    try:
        page = decode_bytes(path.read_bytes(), pid) if directory else None
    except (OSError, PageError):
        page = None
    with contextlib.suppress(OSError):
        _changed_since(found, pid, page.started if page else began(pid) + 0.02)
    if page is None:
        found.warnings.append(f"no statistics file of process {pid}: what was changed while it runs is not known")
        return
    for name, attribute in LIVE.items():
        held, now = found.values[name], getattr(page, attribute)
        # others are an order that the program does not take: the page is its user's
        if held.value != now and catalogue.load()[name].has(now):
            held.value = now
            held.source = "asked for, not taken yet" if page.orders_waiting else "changed while it runs"


def is_pid(text: str) -> bool:
    return text.isdecimal() and text.isascii()


def _process(text: str) -> effective.Effective:
    """A number is a process, also where a profile goes by it: that is said where it may have been meant."""
    known = profiles.is_builtin(text) or text in profiles.files()
    hint = f"the profile {profiles.find(text)[1]} is written {PROFILE}{text}" if known else ""
    try:
        found = of_pid(int(text))
    except UsageError as error:
        remedy = hint or f"{error.remedy}, vmahybrid config profiles the profiles"
        raise UsageError(error.what, f"{error.why}; a number is a PID here", remedy) from None
    if hint and not has_shim(int(text)):
        found.warnings.append(f"a number is a PID here: {hint}")
    return found


def _source(text: str) -> tuple[str, effective.Effective]:
    """Of a word of `config diff`: a process, ``env``, ``default``, a profile, a file."""
    if is_pid(text):
        return f"process {text}", _process(text)
    if text == "env":
        return "the environment", effective.resolve(os.environ, pid=os.getpid())
    none = {"VMA_HYBRID_POLICY": "", "VMA_HYBRID_PROFILE_DIR": str(profiles.directory())}
    if text == "default":
        return "the defaults", effective.resolve(none)
    spec, name = profiles.find(text.removeprefix(PROFILE))
    return f"profile {name}", effective.resolve(none | {"VMA_SPEC": spec})


def _show(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    what = args.what
    pid = int(what[0]) if what and is_pid(what[0]) else None
    wanted = [name.upper() for name in what[pid is not None:]]
    known = catalogue.load()
    names = {alias: p.name for p in known.parameters for alias in (p.name, *p.aliases)}
    chosen = []
    for name in wanted:
        full = name if name.startswith("VMA_") else f"VMA_{name}"
        if full not in names:
            raise UsageError(name, "no such parameter", "docs/parameters.md lists them")
        chosen.append(names[full])
    found = effective.resolve(os.environ, args.program, os.getpid()) if pid is None else of_pid(pid)
    rows = {name: _described(held) for name, held in found.values.items()
            if (name in chosen or not chosen) and (not args.changed or held.source != "default")}  # fmt: skip
    return {"schema": SCHEMA, "pid": pid, "parameters": rows, "warnings": found.warnings}, 0


def _described(held: effective.Value) -> dict[str, Any]:
    parameter = held.parameter
    return {"value": parameter.show(held.value), "default": parameter.show(parameter.default), "origin": held.source,
            "unit": parameter.unit, "effect": effect(parameter, held.value), "live": parameter.live,
            "acts": parameter.acts}


def _diff(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    if len(args.sources) > 2:
        raise UsageError(args.sources[2], "a difference is between two", "vmahybrid config diff [A [B]]")
    words = (["default", *args.sources] if len(args.sources) == 1 else args.sources) or ["default", "env"]
    (left, a), (right, b) = map(_source, words)
    differing = {name: {"left": a.values[name].parameter.show(a[name]), "right": b.values[name].parameter.show(b[name]),
                        "left_origin": a.values[name].source, "right_origin": b.values[name].source}
                 for name in a.values if a[name] != b[name] and name not in FROM}  # fmt: skip
    warnings = [f"{title}: {warning}" for title, found in ((left, a), (right, b)) for warning in found.warnings]
    return {"schema": SCHEMA, "left": left, "right": right, "differences": differing, "warnings": warnings}, 0


def _check(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    files = []
    for name in args.files:
        try:
            kind, problems = check_file(Path(name))
        except UsageError as error:
            if len(args.files) == 1:
                raise
            kind, problems = "not read", [f" {error.why}"]  # of the others it is said what they are
        files.append({"file": name, "kind": kind, "problems": problems})
    return {"schema": SCHEMA, "files": files}, int(any(entry["problems"] for entry in files))


def check_file(path: Path) -> tuple[str, list[str]]:
    """What the file is, and what is wrong, each as ``LINE: WHAT: "TOKEN"``. Raises UsageError."""
    from vmahybrid.config import libvma_conf

    data = paramfile.read_bytes(path)
    if path.suffix == ".toml":
        from vmahybrid.config import service

        return "configuration of the service", [str(error).removeprefix(f"{path}:") for error in service.problems(path)]
    if path.name.startswith("libvma") or libvma_conf.looks_like_it(data.decode("utf-8", "replace")):
        rules = libvma_conf.check(data)
        if isinstance(rules, paramfile.Problem):
            return "libvma.conf", [str(rules)]
        found = f"libvma.conf: {rules.rules} rules in {len(rules.blocks)} application ids"
        if rules.log_line:
            found += f"; log in line {rules.log_line} has no effect: VMA_TRACELEVEL and VMA_LOG_FILE have"
        return found, [str(notice) for notice in rules.notices]
    text = os.fsdecode(data)
    in_directory = path.parent.absolute() == profiles.directory().absolute()
    known = () if in_directory else tuple(profiles.files())
    return "values of parameters", [str(problem) for problem in paramfile.check(text, known)]


def _import(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    source = Path(args.file)
    target = profiles.import_file(source, args.name or source.stem, args.force)
    return {"schema": SCHEMA, "profile": target.stem, "file": str(target)}, 0


def _profiles(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    if args.name:
        return {"schema": SCHEMA, "profile": args.name, "text": profiles.text_of(args.name)}, 0
    known = catalogue.load()
    rows: list[dict[str, Any]] = [{"profile": p.name, "text": p.text, "file": None} for p in known.profiles]
    for name, path in profiles.files().items():
        first = paramfile.read(path).partition("\n")[0]
        rows.append({"profile": name, "text": first.removeprefix("#").strip() if first[:1] == "#" else "",
                     "file": str(path)})  # fmt: skip
    return {"schema": SCHEMA, "directory": str(profiles.directory()), "profiles": rows}, 0


def _set(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    from vmahybrid.cli.run import assignment

    changes = [assignment(text, "") for text in args.changes]
    if args.pid is not None:
        return _set_live(args.pid, changes), 0
    for name, value in changes:
        if name in paramfile.OF_ENVIRONMENT:
            raise UsageError(name, paramfile.TOO_LATE, f"export {name}={value}, or vmahybrid run -e {name}={value}")
    path = Path(os.environ.get("VMA_HYBRID_POLICY") or str(catalogue.load()["VMA_HYBRID_POLICY"].default))
    with paramfile.changing(path) as target:
        text = paramfile.read(path) if path.exists() else NEW_POLICY
        text = paramfile.replace_values(text, changes, args.program)
        if len(os.fsencode(text)) > paramfile.LIMIT:
            raise UsageError(str(path), f"it would be longer than the {paramfile.LIMIT} bytes that programs read",
                             "take lines out of it first")
        paramfile.write(target, text)
    wrong = [f"{path}:{problem}" for problem in paramfile.check(text, profiles.files())]
    return {"schema": SCHEMA, "file": str(path), "program": args.program, "set": dict(changes), "warnings": wrong}, 0


def _set_live(pid: int, changes: Sequence[tuple[str, str]]) -> dict[str, Any]:
    from vmahybrid.cli.client import Client
    from vmahybrid.stats import orders

    known = catalogue.load()
    body: dict[str, Any] = {}
    for name, value in changes:
        if not known[name].live:
            raise UsageError(name, "it does not change while a program runs", "leave --pid out and start it again")
        body[{"VMA_TRACELEVEL": "level", "VMA_LOG_DETAILS": "details"}[name]] = known[name].parse(value)
    with Client() as client:
        client.post("v1", "processes", pid, "log", body=body)
        taken = orders.taken_soon(client, pid)
    return {"schema": SCHEMA, "pid": pid, "set": dict(changes), "taken": taken, "warnings": []}


def lines(body: dict[str, Any], style: Style) -> Iterator[str]:
    if "parameters" in body:
        rows = [[name, row["value"] + (f" {row['unit']}" if row["unit"] else ""), row["origin"], row["effect"]]
                for name, row in body["parameters"].items()]  # fmt: skip
        yield from _table(SHOW, rows, style)
        yield from _warnings(body, style)
    elif "differences" in body:
        columns = [Column("PARAMETER"), Column(body["left"], shrink=1), Column(body["right"], shrink=1)]
        rows = [[name, *(row[side] or "(empty)" for side in ("left", "right"))]
                for name, row in body["differences"].items()]  # fmt: skip
        yield from _table(columns, rows, style) if rows else [f"{body['left']} and {body['right']}: no difference"]
        yield from _warnings(body, style)
    elif "files" in body:
        for entry in body["files"]:
            for problem in entry["problems"]:
                print(f"{entry['file']}:{problem}", file=sys.stderr)
            if not entry["problems"]:
                yield f"{entry['file']}: ok ({entry['kind']})"
    elif "profiles" in body:
        rows = [[row["profile"], row["file"] or "built in", row["text"]] for row in body["profiles"]]
        yield from _table([Column("PROFILE"), Column("FILE"), Column("MEANING", shrink=1)], rows, style)
    elif "text" in body:
        yield from body["text"].rstrip("\n").split("\n")
    elif "profile" in body:
        yield f"imported as profile {body['profile']}: {body['file']}"
    else:
        where = f"process {body['pid']}" if "pid" in body else body["file"]
        yield f"{where}: " + ", ".join(f"{name} = {value}" for name, value in body["set"].items())
        yield from _warnings(body, style)
        if not body.get("taken", True):
            from vmahybrid.stats import orders

            yield f"not taken yet: {orders.WAITS}"


def _warnings(body: dict[str, Any], style: Style) -> Iterator[str]:
    for warning in body["warnings"]:
        yield from wrap(style.paint("warning: ", "yellow") + warning, style.width, "  ")


def _table(columns: list[Column], rows: list[list[Any]], style: Style) -> Iterator[str]:
    found = table(columns, rows, style.width if style.terminal else WHOLE)
    if found:
        yield style.paint(found[0], "bold")
        yield from found[1:]
