"""vmahybrid run and softverbs: start a program with the shim preloaded, or with the software verbs device alone."""

import argparse
import contextlib
import difflib
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

import vmahybrid
from vmahybrid.cli.elf import SHIM, SOFTVERBS, Fit, fit
from vmahybrid.cli.paths import DEFAULT_RUNDIR, control_socket, rundir
from vmahybrid.config import catalogue, effective, profiles
from vmahybrid.errors import NotPossibleHere, UsageError
from vmahybrid.verbs.library import softverbs_environment
from vmahybrid.vma_stats import directory

LIBRARY = "libvmahybrid.so"
DEFAULT_PROFILE = "safe"
NEAR = 0.7  # of 1: how alike a name must be to be suggested
NOT_FOUND, NOT_RUNNABLE = 127, 126  # as env(1)


def run(args: argparse.Namespace) -> int:
    """Does not return when the program could be started. Raises UsageError, NotPossibleHere."""
    command = _command(args, "run", "vmahybrid run [-p PROFILE] [-e VMA_X=Y] [--softverbs] -- COMMAND ARG...")
    changes = environment(args.profile, args.env, library(), os.path.basename(command[0]))
    if args.softverbs:
        changes |= softverbs_environment()
    _sweep(changes)
    if _warn(command[0], SHIM) is Fit.MUSL:
        del changes["LD_PRELOAD"]
    return _execute(command, changes)


def softverbs(args: argparse.Namespace) -> int:
    """Any verbs program on the software device. As run(), without the shim."""
    command = _command(args, "softverbs", "vmahybrid softverbs -- COMMAND ARG...")
    changes = softverbs_environment()
    _warn(command[0], SOFTVERBS)
    return _execute(command, changes)


def _sweep(changes: dict[str, str]) -> None:
    """Of programs that were killed when no service was there to do it."""
    with contextlib.suppress(OSError):
        directory.remove_stale(directory.of_programs(os.environ | changes))


def _warn(program: str, what: tuple[str, str, str]) -> Fit:
    found = fit(shutil.which(program) or "")
    if problem := found.problem(what):
        _say(f"vmahybrid: {program}: {problem}")
    return found


def _say(text: str) -> None:
    """print() takes a stderr that was closed for stdout."""
    if sys.stderr is not None:
        print(text, file=sys.stderr)


def _command(args: argparse.Namespace, name: str, usage: str) -> list[str]:
    command: list[str] = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise UsageError(name, "no command is given", usage)
    return command


def _execute(command: list[str], changes: dict[str, str]) -> int:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed by who called us: the program gets it so
            stream.flush()
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, and an exec would hand that down
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, _own_environment() | changes)
    except OSError as error:
        code = NOT_FOUND if isinstance(error, FileNotFoundError | NotADirectoryError) else NOT_RUNNABLE
        _say(f"vmahybrid: {command[0]}: {error.strerror}. Give a program in PATH, or its path")
        return code


def _own_environment() -> dict[str, str]:
    """What we were called with: in the C locale Python sets LC_CTYPE (PEP 538)."""
    found = dict(os.environ)
    try:
        block = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return found
    ctype = next((os.fsdecode(entry[9:]) for entry in block if entry.startswith(b"LC_CTYPE=")), None)
    found.pop("LC_CTYPE", None)
    return found if ctype is None else found | {"LC_CTYPE": ctype}


def environment(profile: str | None, assignments: list[str], shim: Path, program: str = "") -> dict[str, str]:
    """What is set for the program. Raises UsageError."""
    changes = {"LD_PRELOAD": _preload(shim)}
    if rundir() != DEFAULT_RUNDIR and "VMA_HYBRID_SOCKET" not in os.environ:
        changes["VMA_HYBRID_SOCKET"] = str(control_socket())
    set_here = dict(map(assignment, assignments))
    if profile is not None:
        changes["VMA_SPEC"], changes["VMA_HYBRID_PROFILE"] = profiles.find(profile)
    elif not os.environ.get("VMA_SPEC") and not effective.policy_profile(os.environ, program):
        changes["VMA_SPEC"] = changes["VMA_HYBRID_PROFILE"] = DEFAULT_PROFILE
    if (spec := set_here.get("VMA_SPEC")) is not None:
        changes["VMA_HYBRID_PROFILE"] = profiles.find(spec)[1] if spec else ""
    if set_here:
        before = [name for name in os.environ.get(effective.RUN_E, "").split(",") if name and name not in set_here]
        changes[effective.RUN_E] = ",".join([*before, *set_here])
    return changes | set_here


def _preload(shim: Path) -> str:
    """First, so that other preloaded libraries call the shim, but behind the runtime of a sanitizer, which demands to
    be first; once, for a `run` inside a `run`."""
    others = [name for name in os.environ.get("LD_PRELOAD", "").replace(":", " ").split() if name != str(shim)]
    runtimes = [name for name in others if re.fullmatch(r"lib[a-z]+san\.so[.0-9]*", Path(name).name)]
    return ":".join([*runtimes, str(shim), *(name for name in others if name not in runtimes)])


def library() -> Path:
    """VMAHYBRID_LIB, or beside the package, or in a source tree that was built. Raises NotPossibleHere."""
    package = Path(vmahybrid.__file__).resolve().parent
    asked = os.environ.get("VMAHYBRID_LIB")
    candidates = [Path(asked).absolute()] if asked else [package / LIBRARY, package.parent / LIBRARY]
    for path in candidates:
        if path.is_file():
            # ld.so splits LD_PRELOAD at blanks and colons and knows no quoting.
            if set(str(path)) & {" ", ":", "\t"}:
                raise NotPossibleHere(str(path), "LD_PRELOAD can't hold a path with a blank or colon", "move it")
            return path
    where = " or ".join(map(str, candidates))
    raise NotPossibleHere(LIBRARY, f"not found as {where}", "make build, or set VMAHYBRID_LIB to its path")


def assignment(text: str, option: str = "-e ") -> tuple[str, str]:
    """``VMA_RX_POLL=-1``, checked against the catalogue of parameters; an older name becomes the present one, and that
    is said. A number out of range is for the shim with ``-e``: it uses another, and warns. Raises UsageError."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"{option}{text!r}", "not VMA_NAME=VALUE", f"for example {option}VMA_RX_POLL=-1")
    known = {alias: p for p in catalogue.load().parameters for alias in (p.name, *p.aliases)}
    if name == "VMA_SPEC" and value:
        return name, profiles.find(value)[0]
    for obsolete in catalogue.load().obsolete:
        if name == obsolete.name:
            raise UsageError(f"{option}{name}", "no parameter any more", " ".join(obsolete.lines))
    if name not in known:
        raise UsageError(f"{option}{name}", "no such parameter", f"{_near(name, known)}docs/parameters.md lists them")
    try:
        known[name].parse(value)
    except ValueError as error:
        if not option or not known[name].is_number(value):
            why = str(error).removeprefix(f"{known[name].name}: ")
            raise UsageError(f"{option}{name}", why, "docs/parameters.md describes it") from None
    present = known[name].name
    if name != present:
        # Under the older name the environment's value, or another line of the policy, would win over this one.
        _say(f"vmahybrid: {option}{name}: no longer in use. {present} is set to {value} instead")
    return present, value


def _near(name: str, known: Iterable[str]) -> str:
    """The prefix that all have makes no name near."""
    names = [each.removeprefix("VMA_") for each in known]
    close = difflib.get_close_matches(name.removeprefix("VMA_"), names, n=1, cutoff=NEAR)
    return f"did you mean VMA_{close[0]}? " if close else ""
