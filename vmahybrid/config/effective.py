"""What the shim makes of an environment: every parameter with its value and where that came from.

The same steps as vmahybrid/shim/params.c, for people who look at it from outside; a test compares the two.
Precedence: default < profile < policy file < environment < ``run -e``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vmahybrid.config import paramfile
from vmahybrid.config.catalogue import FALSE_WORDS, INT_LIMIT, TRUE_WORDS, Bound, Catalogue, Parameter, load

RUN_E = "VMAHYBRID_RUN_E"  # names that `run -e` set, for those who ask where a value came from
DEFAULT, BUILTIN, PROFILE, POLICY, DERIVED, ENVIRONMENT = range(6)  # enum vmh_param_origin
_NUMBER = re.compile(r"\s*[+-]?[0-9]+[ \t]*", re.ASCII)


@dataclass(slots=True)
class Value:
    """``source`` is for people: ``profile latency``, ``/etc/policy.conf:3``, ``raised by VMA_MTU``, ``-e``."""

    parameter: Parameter
    value: int | str
    origin: int = DEFAULT
    source: str = "default"


@dataclass(slots=True)
class Effective:
    """``values`` by name, in the order of the catalogue."""

    values: dict[str, Value]
    warnings: list[str] = field(default_factory=list)
    files: list[tuple[Path, Path]] = field(default_factory=list)  # read: as named, and where from here

    def __getitem__(self, name: str) -> int | str:
        return self.values[name].value


class _Resolver:
    def __init__(self, environ: Mapping[str, str], program: str, pid: int, root: Path, catalogue: Catalogue) -> None:
        self.environ, self.program, self.pid, self.root, self.catalogue = environ, program, pid, root, catalogue
        self.names = {alias: p for p in catalogue.parameters for alias in (p.name, *p.aliases)}
        self.found = Effective({p.name: Value(p, self._expand(p, str(p.default)) if p.type == "string" else p.default)
                                for p in catalogue.parameters})

        self.here = Path()
        self.in_vain: set[str] = set()  # named in the environment, with what can't be used

    def _place(self, path: Path) -> Path:
        """Where a path of the program leads to."""
        return self.root / path.relative_to("/") if path.is_absolute() else self.here / path

    def _warn(self, text: str) -> None:
        self.found.warnings.append(text)

    def _expand(self, parameter: Parameter, text: str) -> str:
        return text.replace("%d", str(self.pid), 1) if parameter.pid else text

    def _set(self, parameter: Parameter, value: int | str, origin: int, source: str) -> None:
        self.found.values[parameter.name] = Value(parameter, value, origin, source if origin else "default")

    def take(self, parameter: Parameter, name: str, text: str, origin: int, source: str) -> bool:
        """A value as a user writes it. One that can't be used becomes the default; in a file it is left out, and what
        lower layers and earlier lines say stays. False: nothing was set."""
        in_file = origin in (PROFILE, POLICY)
        where = f"{source}: " if in_file else ""
        if parameter.type == "string":
            value = self._expand(parameter, text)
            fits = len(os.fsencode(value)) <= parameter.max_length
            syntax = parameter.syntax
            if fits and syntax is not None and syntax.instead is not None and not syntax.takes(value):
                used = "ignored" if in_file else f"using [{syntax.instead}]"
                self._warn(f"{where}{name} = {value} is not {syntax.expected}, {used}")
                if not in_file:
                    self._set(parameter, syntax.instead, origin, source)
                return not in_file
            if fits:
                self._set(parameter, value, origin, source)
            else:
                used = "ignored" if in_file else "using the default"
                self._warn(f"{where}{name} = {value} is longer than {parameter.max_length} bytes, {used}")
                if not in_file:
                    self._set(parameter, self._expand(parameter, str(parameter.default)), DEFAULT, source)
            return fits or not in_file
        if _is_blank(text):
            if in_file:
                self._warn(f"{where}{name} =  is not {parameter.expected()}, ignored")
            return False
        text = text.lstrip(" \t")
        number, kept = _number(parameter, text)
        left_out = in_file and kept is False
        if kept is not True:
            says = "ignored" if left_out else f"using [{parameter.show(number)}]"
            self._warn(f"{where}{name} = {text} is not {parameter.expected()}, {says}")
        if not left_out:
            self._set(parameter, number, DEFAULT if kept is False else origin, source)
            if kept is False:
                self.in_vain.add(parameter.name)
        return not left_out

    def take_alias(self, parameter: Parameter, name: str, text: str, origin: int, source: str) -> None:
        """By a name that was in use once: as take_alias() of the shim."""
        if self.take(parameter, name, text, origin, source):
            self._warn(f"The parameter {name} is no longer in use. Parameter {parameter.name} was set to "
                       f"{self.found[parameter.name]} instead")

    def _file(self, path: Path, origin: int, label: str) -> bool:
        place = self._place(path)
        try:
            text = paramfile.load_text(place)
        except OSError as error:
            asked = self.found.values["VMA_HYBRID_POLICY"].origin == ENVIRONMENT
            if not isinstance(error, FileNotFoundError) or origin == PROFILE or asked:
                self._warn(f"{path} can't be read ({error.strerror})")
            return False
        self.found.files.append((path, place))
        for line in paramfile.for_program(text, self.program):
            source = f"{label}{path}:{line.number}"
            if isinstance(line, paramfile.Problem):
                self._warn(f"{path}:{line}")
            elif line.name not in self.names:
                self._warn(f"{path}:{line.number}: {line.name} is not a parameter, ignored")
            elif line.name in paramfile.OF_ENVIRONMENT:
                self._warn(f"{path}:{line.number}: {line.name} {paramfile.TOO_LATE}, ignored")
            elif line.name != "VMA_SPEC":
                parameter = self.names[line.name]
                take = self.take if line.name == parameter.name else self.take_alias
                take(parameter, line.name, line.value, origin, source)
        return True

    def spec_of(self, path: Path) -> tuple[str, str]:
        """What the file says of VMA_SPEC, and where: ``/etc/vmahybrid/policy.conf:3``; empty texts: nothing."""
        try:
            text = paramfile.load_text(self._place(path))
        except OSError:
            return "", ""
        found = [(line.value, f"{path}:{line.number}") for line in paramfile.for_program(text, self.program)
                 if isinstance(line, paramfile.Line) and line.name == "VMA_SPEC"]
        return found[-1] if found else ("", "")

    def _builtin(self, name: str, source: str) -> bool:
        try:
            profile = self.catalogue.profile(name)
        except KeyError:
            return False
        for key, value in profile.values.items():
            parameter = self.catalogue[key]
            shown = self._expand(parameter, value) if isinstance(value, str) else value
            self._set(parameter, shown, BUILTIN, f"profile {profile.name}")
        spec = "" if profile is self.catalogue.profiles[0] else profile.name
        self._set(self.catalogue["VMA_SPEC"], spec, ENVIRONMENT, source)
        return True

    def profile(self, name: str, source: str) -> None:
        if self._builtin(name, source):
            return
        directory = str(self.found["VMA_HYBRID_PROFILE_DIR"])
        path = Path(name) if "/" in name else Path(directory) / f"{name}.conf"
        base, _ = self.spec_of(path)
        if base and not self._builtin(base, source):
            self._warn(f"{path}: VMA_SPEC = {base} is no built-in profile, starting from none")
        if self._file(path, PROFILE, "profile "):
            self._set(self.catalogue["VMA_SPEC"], name, ENVIRONMENT, source)
        else:
            self._set(self.catalogue["VMA_SPEC"], "", DEFAULT, "default")

    def who_set(self, name: str) -> str:
        """``-e``; ``run``, which says the profile twice; else ``environment``."""
        if name in self.environ.get(RUN_E, "").split(","):
            return "-e"
        spec, profile = self.environ.get("VMA_SPEC"), self.environ.get("VMA_HYBRID_PROFILE")
        by_run = spec and profile and profile in (spec, Path(spec).stem)
        return "run" if by_run and name in ("VMA_SPEC", "VMA_HYBRID_PROFILE") else "environment"

    def environment(self, parameter: Parameter) -> None:
        newer = self.environ.get(parameter.name)
        for name in parameter.aliases:
            text = self.environ.get(name)
            if text is not None and newer is not None and not _is_blank(newer):
                self._warn(f"The parameter {name} is no longer in use. Parameter {parameter.name} is set as well, and "
                           "wins")
            elif text is not None:
                self.take_alias(parameter, name, text, ENVIRONMENT, self.who_set(name))
        if newer is not None:
            self.take(parameter, parameter.name, newer, ENVIRONMENT, self.who_set(parameter.name))

    def _is_set(self, name: str) -> bool:
        """By a person: a built-in profile is ours, a profile that is a file its user's."""
        return self.found.values[name].origin in (PROFILE, POLICY, ENVIRONMENT)

    def _is_named(self, name: str) -> bool:
        """What was warned about is what is used, too."""
        return self._is_set(name) or name in self.in_vain

    def _derive(self, name: str, value: int, by: str) -> None:
        """What is so already stays where it was said."""
        if self.found.values[name].origin == DEFAULT or self.found[name] != value:
            self._set(self.catalogue[name], value, DERIVED, f"derived from {by}")

    def imply(self, name: str, value: int, by: str) -> None:
        """As imply() of the shim: unless that one was set as explicitly."""
        if self.found.values[name].origin < self.found.values[by].origin and not self._is_named(name):
            self._derive(name, value, by)

    def compel(self, name: str, value: int, by: str) -> None:
        """As compel() of the shim: whatever set it."""
        if self._is_named(name) and self.found[name] != value:
            self._warn_pair(name, by, "only", value)
        self._derive(name, value, by)

    def _warn_pair(self, name: str, other: str, least: str, used: int) -> None:
        cap = self.catalogue[name].cap
        acts = f", which acts as {cap}" if cap is not None and used > cap else ""
        self._warn(f"{name} = {self.found[name]} does not go with {other} = {self.found[other]} ({least} {used}), "
                   f"using [{used}]{acts}")

    def implied(self) -> None:
        found = self.found
        if found["VMA_SELECT_POLL_OS_FORCE"]:
            self.imply("VMA_SELECT_POLL_OS_RATIO", 1, "VMA_SELECT_POLL_OS_FORCE")
            self.imply("VMA_SELECT_SKIP_OS", 1, "VMA_SELECT_POLL_OS_FORCE")
        details = found.values["VMA_LOG_DETAILS"].origin == DEFAULT and not self._is_named("VMA_LOG_DETAILS")
        if details and int(found["VMA_TRACELEVEL"]) >= 5:
            self._set(self.catalogue["VMA_LOG_DETAILS"], 2, DERIVED, "derived from VMA_TRACELEVEL")
        for name in ("VMA_RX_POLL", "VMA_SELECT_POLL"):
            if int(found[name]) < 0:
                self.compel("VMA_CQ_MODERATION_ENABLE", 0, name)
                break
        if not found["VMA_CQ_MODERATION_ENABLE"]:
            self.compel("VMA_CQ_AIM_INTERVAL_MSEC", 0, "VMA_CQ_MODERATION_ENABLE")
        if found["VMA_SOCKETXTREME"]:
            self._warn("VMA_SOCKETXTREME: this version has no SocketXtreme API, programs use their sockets")
        if not found["VMA_PROGRESS_ENGINE_WCE_MAX"]:
            self.compel("VMA_PROGRESS_ENGINE_INTERVAL", 0, "VMA_PROGRESS_ENGINE_WCE_MAX")

    def _limit(self, bound: Bound) -> int:
        return int(self.found[bound.other]) * bound.times // bound.divisor

    def bounds(self) -> None:
        for name, held in self.found.values.items():
            floor, ceiling, said = held.parameter.floor, held.parameter.ceiling, False
            for bound, least in ((floor, "at least"), (ceiling, "at most")):
                limit = self._limit(bound) if bound else 0
                if bound and (int(held.value) < limit if bound is floor else int(held.value) > limit):
                    if self._is_named(name) or held.parameter.bound_warns:
                        self._warn_pair(name, bound.other, least, limit)
                        said = True
                    word = "raised" if bound is floor else "lowered"
                    by = f"{word} by {bound.other}"
                    held.source = by if held.origin == DEFAULT else f"{held.source}, {by}"
                    held.value = limit
            cap = held.parameter.cap
            if cap is not None and self._is_set(name) and int(held.value) > cap and not said:
                self._warn(f"{name} = {held.value} acts as {cap}: more makes no difference")

    def bound_mss(self) -> None:
        """As bound_mss() of the shim."""
        held, mtu = self.found.values["VMA_MSS"], int(self.found["VMA_MTU"])
        mss, least = int(held.value), held.parameter.minimum or 0
        v4, v6 = max(mtu - 40, least), max(mtu - 60, least)
        if not mtu or mss <= v6:
            return
        begin = f"VMA_MSS = {mss} does not go with VMA_MTU = {mtu}"
        if mss <= v4:
            self._warn(f"{begin} over IPv6 ({least} to {v6}), using [{v6}] there")
            return
        self._warn(f"{begin} ({least} to {v4}, over IPv6 to {v6}), using [{v4}]")
        held.value, held.source = v4, f"{held.source}, lowered by VMA_MTU"

    def syntaxes(self) -> None:
        """Of a text that the shim keeps: it says that when it would use it."""
        for name, held in self.found.values.items():
            syntax, value = held.parameter.syntax, str(held.value)
            if syntax is not None and syntax.instead is None and not syntax.takes(value):
                where = f"{held.source}: " if held.origin in (PROFILE, POLICY) else ""
                self._warn(f"{where}{name} = {value} is not {syntax.expected}, {syntax.late}")

    def small_mtu(self) -> None:
        """As warn_small_mtu() of the shim."""
        mtu, least = int(self.found["VMA_MTU"]), self.catalogue["VMA_MSS"].minimum or 0
        if not mtu or mtu >= least + 60 or not self._is_set("VMA_MTU"):
            return
        v4, v6 = least + 40, least + 60
        acts = f"{v4} for TCP (as {v6} over IPv6)" if mtu < v4 else f"{v6} for TCP over IPv6"
        self._warn(f"VMA_MTU = {mtu} acts as {acts}: a segment has room for {least} bytes at least")


def _is_blank(text: str) -> bool:
    return not text.lstrip(" \t")


def _number(parameter: Parameter, text: str) -> tuple[int, bool | None]:
    """The number used, and True: as asked; None: the nearest limit; False: the default."""
    words = {word: choice.value for choice in parameter.choices for word in choice.words}
    if parameter.type == "bool":
        words |= dict.fromkeys(TRUE_WORDS, 1) | dict.fromkeys(FALSE_WORDS, 0)
    default = int(parameter.default)
    if text.lower() in words:
        return words[text.lower()], True
    number = int(text) if _NUMBER.fullmatch(text) and len(text) < 4000 else None
    if number is None or not -(2**63) <= number < 2**63 or parameter.type == "enum":
        return default, False
    if parameter.type == "bool":
        return int(number != 0), number in (0, 1) or None
    low = -INT_LIMIT - 1 if parameter.minimum is None else parameter.minimum
    high = INT_LIMIT if parameter.maximum is None else parameter.maximum
    if not low <= number <= high and number not in parameter.also:
        return (max(low, min(number, high)), None) if parameter.clamps else (default, False)
    return (parameter.zero if number == 0 and parameter.zero is not None else number), True


def resolve(environ: Mapping[str, str], program: str = "", pid: int = 0, root: Path = Path("/"),
            catalogue: Catalogue | None = None, here: Path = Path()) -> Effective:  # fmt: skip
    """``program`` is the base name that the policy file's sections match; ``root`` where absolute paths begin, ``here``
    where others do."""
    made = _Resolver(environ, program, pid, root, catalogue or load())
    made.here = here
    for name in paramfile.OF_ENVIRONMENT:
        made.environment(made.catalogue[name])
    policy = Path(str(made.found["VMA_HYBRID_POLICY"]) or "/")
    has_policy = policy != Path("/")
    if spec := environ.get("VMA_SPEC"):
        made.profile(spec, made.who_set("VMA_SPEC"))
    elif has_policy:
        spec, where = made.spec_of(policy)
        if spec:
            made.profile(spec, where)
    if has_policy:
        made._file(policy, POLICY, "")
    for parameter in made.catalogue.parameters:
        if parameter.name not in (*paramfile.OF_ENVIRONMENT, "VMA_SPEC"):
            made.environment(parameter)
    made.implied()
    made.bounds()
    made.bound_mss()
    made.small_mtu()
    made.syntaxes()
    known = made.names.keys() | {obsolete.name for obsolete in made.catalogue.obsolete}
    for name in environ:
        if name.startswith("VMA_") and name not in known:
            made._warn(f"{name} is not a parameter, ignored")
    for obsolete in made.catalogue.obsolete:
        if obsolete.name in environ:
            made.found.warnings += obsolete.lines
    return made.found


def policy_profile(environ: Mapping[str, str], program: str = "") -> str:
    """The profile that the policy file chooses for the program; "": none."""
    made = _Resolver(environ, program, 0, Path("/"), load())
    made.environment(made.catalogue["VMA_HYBRID_POLICY"])
    policy = str(made.found["VMA_HYBRID_POLICY"])
    return made.spec_of(Path(policy))[0] if policy else ""


def of_process(pid: int) -> Effective:
    """Of a running program, from the environment it was started with. Raises OSError."""
    place = Path(f"/proc/{pid}")
    entries = os.fsdecode((place / "environ").read_bytes()).split("\0")
    environ = {name: value for name, equals, value in (entry.partition("=") for entry in entries) if equals}
    arguments = os.fsdecode((place / "cmdline").read_bytes()).split("\0")
    return resolve(environ, os.path.basename(arguments[0]), pid, place / "root", here=place / "cwd")
