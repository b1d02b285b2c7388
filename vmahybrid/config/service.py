"""The configuration of the service: one typed object, built once from defaults < file < command line.

Each value remembers its origin: "default", the file's path, "command line", or "api" for a live change. The file is
TOML, /etc/vmahybrid.toml if it is there; the sections are those of the key names below, plus ``[interface."NAME"]``
with ``mode`` and ``backend``, and ``[[rule]]`` for rules of the operator.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vmahybrid.config.interface_glob import TEXT, InterfaceGlob
from vmahybrid.config.rule import DEFAULT_RULES, OperatorRule, parse_rules
from vmahybrid.config.toml_file import TomlError, TomlFile
from vmahybrid.contracts import lib
from vmahybrid.errors import UsageError

DEFAULT_FILE = Path("/etc/vmahybrid.toml")
RUNDIR_VARIABLE = "VMAHYBRID_RUNDIR"
MODES = ("auto", "native", "generic", "kernel")
BACKENDS = ("auto", "verbs", "xdp", "kernel")
INTERFACE_KEYS = {"mode": MODES, "backend": BACKENDS}  # of [interface."NAME"]


def run_directory() -> Path:
    """/run/vmahybrid, or $VMAHYBRID_RUNDIR: several services may run side by side."""
    return Path(os.environ.get(RUNDIR_VARIABLE) or "/run/vmahybrid")


@dataclass(frozen=True, slots=True)
class Accepts:
    """What a setting takes: called, the typed value of an outside one, or ValueError with what is wanted.

    ``schema`` says the same in JSON Schema (draft 2020-12), for clients of the API; ``words`` to people.
    """

    words: str
    take: Callable[[Any], Any]              # raises ValueError, of any text
    schema: Mapping[str, Any]

    def __call__(self, value: Any) -> Any:
        try:
            return self.take(value)
        except ValueError:
            raise ValueError(self.words) from None


@dataclass(frozen=True, slots=True)
class Key:
    """One setting."""

    name: str
    default: Any
    parse: Accepts
    description: str
    unit: str = ""
    live: bool = False


def _checked(value: Any, ok: bool) -> Any:
    if not ok:
        raise ValueError
    return value


def _integer(least: int, most: int, power: bool = False) -> Accepts:
    words = f"{'a power of two' if power else 'an integer'} from {least} to {most}"
    schema: dict[str, Any] = {"type": "integer", "minimum": least, "maximum": most}
    if power:
        schema["enum"] = [1 << n for n in range(most.bit_length()) if least <= 1 << n <= most]
    return Accepts(words, lambda value: _checked(value, type(value) is int and least <= value <= most
                                                 and not (power and value & (value - 1))), schema)


def _choice(*words: str) -> Accepts:
    return Accepts("one of " + ", ".join(words), lambda value: _checked(value, value in words),
                   {"type": "string", "enum": list(words)})


def _text(value: Any) -> str:
    return str(_checked(value, isinstance(value, str) and "\0" not in value))


def _take_path(value: Any) -> str:
    text = _text(value)
    return str(_checked(text, text.startswith("/") and len(text.encode()) <= SUN_PATH))


def _take_file(value: Any) -> str:
    """Absolute: the service reads it when it has left the caller's directory."""
    text = _text(value)
    return os.path.abspath(text) if text else ""


def _take_mode(value: Any) -> int:
    mode = int(value, 8) if isinstance(value, str) else value
    return int(_checked(mode, type(mode) is int and 0 <= mode <= 0o777))


def _take_address(value: Any) -> str:
    text = _text(value)
    host, _, port = text.rpartition(":")
    return str(_checked(text, not text or bool(host and port.isascii() and port.isdigit() and 0 < int(port) < 65536)))


def _take_globs(value: Any) -> tuple[str, ...]:
    _checked(value, isinstance(value, list | tuple) and all(isinstance(text, str) for text in value))
    for text in value:
        InterfaceGlob.parse(text)
    return tuple(value)


SUN_PATH = 107  # bytes of a path in unix(7)
_boolean = Accepts("true or false", lambda value: _checked(value, type(value) is bool), {"type": "boolean"})
_string = Accepts("a string", _text, {"type": "string"})
_path = Accepts(f"an absolute path of at most {SUN_PATH} bytes", _take_path,
                {"type": "string", "pattern": "^/", "maxLength": SUN_PATH})
_file = Accepts("a string", _take_file, {"type": "string"})
_file_mode = Accepts('a file mode such as "0660"', _take_mode,
                     {"type": ["string", "integer"], "pattern": "^(0o?)?[0-7]{1,3}$", "minimum": 0, "maximum": 0o777})
_address = Accepts('ADDR:PORT, or "" for none', _take_address, {"type": "string", "pattern": "^$|^.+:[0-9]+$"})
_globs = Accepts("a list of [NETNS:]INTERFACE, shell patterns allowed", _take_globs,
                 {"type": "array", "items": {"type": "string", "minLength": 1, "pattern": f"^{TEXT.pattern}$"}})


KEYS = (
    Key("interfaces", (), _globs, "interfaces to serve, [NETNS:]NAME with shell patterns; without NETNS in every "
        "namespace (\"host\" is that of process 1). Empty: every Ethernet interface that has an address, on demand"),
    Key("backend", "auto", _choice(*BACKENDS), "what carries rings: auto is verbs where interface and program have raw "
        "packet QPs, then xdp, then kernel; a named one is tried alone, before the kernel", live=True),
    Key("control.path", "", _path, "the control socket that programs connect to"),
    Key("control.mode", 0o666, _file_mode, "file mode of the control socket: who may offload", "octal"),
    Key("control.group", "", _string, "group of the control socket"),
    Key("api.unix", "", _path, "the Unix socket of the REST API"),
    Key("api.mode", 0o660, _file_mode, "file mode of the API's socket", "octal"),
    Key("api.tcp", "", _address, "ADDR:PORT of the REST API over TCP; empty: none. Needs api.token_file"),
    Key("api.token_file", "", _file, "file with the bearer token of the REST API over TCP"),
    Key("ring.frames", 8192, _integer(64, lib.VMH_FRAMES_MAX, power=True), "packet buffers of a ring", "frames",
        live=True),
    Key("ring.rx_size", 2048, _integer(16, 1 << 16, power=True), "receive descriptors per queue", "descriptors",
        live=True),
    Key("ring.tx_size", 1024, _integer(16, 1 << 16, power=True), "transmit descriptors per queue", "descriptors",
        live=True),
    Key("ring.direct", "first", _choice("first", "never"), "may the first process on an interface have its queue "
        "directly? It is faster, but what it sends can't be filtered", live=True),
    Key("ring.down_seconds", 10, _integer(0, 3600), "how long an interface may be down before its rings are closed and "
        "its TCP connections go home: the kernel could not send either, and would measure the way anew", "seconds",
        live=True),
    Key("bulk.switch", True, _boolean, "while bulk traffic of the kernel crosses an interface in generic XDP mode, "
        "steer at tcx, which keeps its rate"),
    Key("bulk.detach", True, _boolean, "while an interface in generic XDP mode has no rule, attach nothing to it: the "
        "kernel keeps its rate, but another XDP program can take the place, and no ways out are counted"),
    Key("limits.rings", 256, _integer(0, 4096), "rings of all processes", "rings", live=True),
    Key("limits.rules", 16384, _integer(0, 16384), "rules in the steering table", "rules", live=True),
    Key("limits.sessions", 1024, _integer(1, 65536), "programs connected at a time", "sessions", live=True),
    Key("limits.memory", 4 << 30, _integer(0, 1 << 50), "packet memory of all rings", "bytes", live=True),
    Key("log.level", "info", _choice("debug", "info", "warning", "error"), "messages of the service from this level on",
        live=True),
)
BY_NAME = {key.name: key for key in KEYS}


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """``config["ring.frames"]`` is a value, ``config.origin("ring.frames")`` where it came from."""

    values: Mapping[str, Any]
    origins: Mapping[str, str]
    interface_settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    rules: tuple[OperatorRule, ...] = DEFAULT_RULES

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def origin(self, name: str) -> str:
        return self.origins.get(name, "default")

    def mode_of(self, interface: str) -> str:
        """"auto", "native", "generic" or "kernel" for an interface's name."""
        return self.interface_settings.get(interface, {}).get("mode", "auto")

    def backend_of(self, interface: str) -> str:
        """"auto", "verbs", "xdp" or "kernel" for an interface's name."""
        return str(self.interface_settings.get(interface, {}).get("backend", self["backend"]))

    def backend_remedy(self, interface: str) -> str:
        """What allows every backend on an interface that the configuration keeps off one: names the key that is set."""
        if "backend" in self.interface_settings.get(interface, {}):
            return f'backend = "auto" under [interface."{interface}"] in the configuration allows each'
        return f"vmahybrid config set backend=auto (now {self['backend']}, by {self.origin('backend')})"

    def changed(self, changes: Mapping[str, Any], origin: str = "api") -> ServiceConfig:
        """With live changes, all or none. Raises UsageError naming the key."""
        values, origins = dict(self.values), dict(self.origins)
        for name, value in changes.items():
            values[name] = parse_value(name, value, origin)
            if not BY_NAME[name].live:
                raise UsageError(f"configuration key {name}", "it does not change while the service runs",
                                 "change it in the file and start the service again")
            origins[name] = origin
        _check_together(values)
        return replace(self, values=values, origins=origins)

    def describe(self) -> dict[str, dict[str, Any]]:
        """What the API shows of every key."""
        defaults = default_values()
        return {key.name: {"value": _shown(key, self.values[key.name]), "default": _shown(key, defaults[key.name]),
                           "origin": self.origin(key.name), "live": key.live, "description": key.description,
                           "unit": key.unit, "accepts": dict(key.parse.schema), "expected": key.parse.words}
                for key in KEYS}


def _shown(key: Key, value: Any) -> Any:
    if key.parse is _file_mode:
        return f"{value:04o}"
    return list(value) if isinstance(value, tuple) else value


def default_values() -> dict[str, Any]:
    directory = run_directory().absolute()
    values = {key.name: key.default for key in KEYS}
    values["control.path"] = str(directory / "control.sock")
    values["api.unix"] = str(directory / "api.sock")
    return values


def parse_value(name: str, value: Any, origin: str) -> Any:
    """The typed value of one key. Raises UsageError naming the key and ``origin``."""
    if name not in BY_NAME:
        close = difflib.get_close_matches(name, BY_NAME, 1)
        raise UsageError("configuration" if origin == "api" else origin, f'unknown key "{name}"',
                         f"did you mean {close[0]}?" if close else "vmahybrid config lists the keys")
    try:
        return BY_NAME[name].parse(value)
    except ValueError as error:
        if origin == "api":
            raise UsageError(f"configuration key {name}", f"{value!r} is not {error}", f"give {error}") from None
        raise UsageError(origin, f"{name} = {value!r} is not {error}") from None


@dataclass(slots=True)
class _Said:
    """What a file says; ``keys``: of each value, as TomlFile names them."""

    file: TomlFile | None = None
    values: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, tuple[str, ...]] = field(default_factory=dict)
    interfaces: dict[str, dict[str, str]] = field(default_factory=dict)
    rules: tuple[OperatorRule, ...] = DEFAULT_RULES
    problems: list[TomlError] = field(default_factory=list)

    def together(self, more: Mapping[str, Any]) -> dict[str, Any]:
        """All values, with defaults and with ``more``. Raises UsageError where they contradict each other."""
        values = default_values() | self.values | dict(more)
        try:
            _check_together(values)
        except UsageError as error:
            section = error.what.partition(".")[0]
            said = [keys for name, keys in self.keys.items() if name.partition(".")[0] == section and name not in more]
            if self.file is None or not said:
                raise
            keys = self.keys.get(error.what, said[-1])
            raise self.file.error(keys, f"{error.what}: {error.why}", error.remedy) from None
        return values


def load(file: Path | None = None, command_line: Mapping[str, Any] | None = None) -> ServiceConfig:
    """Build the configuration. ``file``: None reads DEFAULT_FILE if it exists; a named one must exist.

    ``command_line`` has values by key name. Raises UsageError (one line that names the token, and of a file the
    line)."""
    path = file or DEFAULT_FILE
    said = _read(path) if file is not None or path.exists() else _Said()
    if said.problems:
        raise said.problems[0]
    ours = {name: parse_value(name, value, "command line") for name, value in (command_line or {}).items()}
    origins = dict.fromkeys(said.values, str(path)) | dict.fromkeys(ours, "command line")
    return ServiceConfig(said.together(ours), origins, said.interfaces, said.rules)


def problems(path: Path) -> list[UsageError]:
    """Everything that is wrong with a file, by line."""
    try:
        said = _read(path)
        if not said.problems:
            said.together({})
    except UsageError as error:
        return [error]
    return list(said.problems)


def _check_together(values: Mapping[str, Any]) -> None:
    if values["api.tcp"] and not values["api.token_file"]:
        raise UsageError("api.tcp", "the API over TCP needs a token", "set api.token_file to a file with the token")
    if values["ring.frames"] < values["ring.rx_size"] + values["ring.tx_size"]:
        raise UsageError("ring.frames", f"{values['ring.frames']} frames can't fill a receive ring of "
                         f"{values['ring.rx_size']} and a transmit ring of {values['ring.tx_size']}",
                         "raise ring.frames or lower the ring sizes")


def _read(path: Path) -> _Said:
    """Raises UsageError for what can't be read at all."""
    file = TomlFile(path)
    said = _Said(file)
    for section, value in file.data.items():
        if section == "rule":
            rules = list(parse_rules(file))
            said.rules = tuple(rule for rule in rules if isinstance(rule, OperatorRule))
            said.problems += [rule for rule in rules if isinstance(rule, TomlError)]
        elif section == "interface":
            said.problems += _interface_problems(file)
            said.interfaces = value
        elif isinstance(value, dict):
            for key, inner in value.items():
                _take(said, file, (section, key), inner)
        else:
            _take(said, file, (section,), value)
    said.problems.sort(key=lambda problem: problem.line)
    return said


def _take(said: _Said, file: TomlFile, keys: tuple[str, ...], value: Any) -> None:
    name = ".".join(keys)
    try:
        said.values[name], said.keys[name] = parse_value(name, value, str(file.path)), keys
    except UsageError as error:
        said.problems.append(file.error(keys, error.why, error.remedy))


def _interface_problems(file: TomlFile) -> Iterator[TomlError]:
    """Of ``[interface."NAME"]``."""
    table = file.data["interface"]
    if not isinstance(table, dict):
        yield file.error(("interface",), f"interface = {table!r} is no table", 'write [interface."NAME"] mode = ...')
        return
    for name, settings in table.items():
        at = ("interface", name)
        if not isinstance(settings, dict):
            known = INTERFACE_KEYS.get(name)  # then the name was left out, else the key
            yield file.error(at, f"interface.{name} = {settings!r} names no {'interface' if known else 'setting'}",
                             f'write [interface."{"NAME" if known else name}"] {name if known else "mode"} = '
                             + (f'"{settings}"' if settings in (known or MODES) else "..."))
            continue
        wrong = [file.error((*at, key), *why) for key, value in settings.items() if (why := _wrong(name, key, value))]
        yield from wrong
        if not wrong and settings.get("mode") == "kernel" and settings.get("backend", "kernel") != "kernel":
            yield file.error((*at, "backend"), f'interface."{name}": mode = "kernel" contradicts backend = '
                             f'"{settings["backend"]}"', "leave one of the two out")


def _wrong(name: str, key: str, value: Any) -> tuple[str, ...]:
    """What is wrong with a setting of an interface, and what to do; empty: nothing."""
    if key not in INTERFACE_KEYS:
        return f'unknown key interface."{name}".{key}', "the keys there are " + " and ".join(INTERFACE_KEYS)
    if value not in INTERFACE_KEYS[key]:
        return (f'interface."{name}".{key} = {value!r} is not one of ' + ", ".join(INTERFACE_KEYS[key]),)
    return ()
