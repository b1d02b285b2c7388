"""Profiles by name: the built-in ones of the catalogue and the files of the profile directory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from vmahybrid.config import paramfile
from vmahybrid.config.catalogue import Catalogue, load
from vmahybrid.errors import UsageError

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,30}")


def directory() -> Path:
    return Path(os.environ.get("VMA_HYBRID_PROFILE_DIR") or str(load()["VMA_HYBRID_PROFILE_DIR"].default))


def files() -> dict[str, Path]:
    """Profiles of the directory, by name; one with a built-in name can't be reached."""
    return {path.stem: path for path in sorted(directory().glob("*.conf")) if not is_builtin(path.stem)}


def is_builtin(name: str, known: Catalogue | None = None) -> bool:
    try:
        (known or load()).profile(name)
    except KeyError:
        return False
    return True


def find(name: str) -> tuple[str, str]:
    """The VMA_SPEC and the name for people, of a profile's name or the path of its file. Raises UsageError."""
    if is_builtin(name):
        found = load().profile(name).name
        return found, found
    path = Path(name) if "/" in name or name.endswith(".conf") else files().get(name)
    if path is None:
        raise UsageError(f"profile {name!r}", "unknown", "the profiles are " + ", ".join(names()))
    problems = paramfile.check(paramfile.read(path))
    if problems:
        raise UsageError(f"{path}:{problems[0]}", "not a profile", f"vmahybrid config check {path} shows all")
    return (name if path == files().get(name) else str(path.absolute())), path.stem


def names() -> Iterator[str]:
    yield from (profile.name for profile in load().profiles)
    yield from files()


def text_of(name: str) -> str:
    """The file of a profile; of a built-in one as it would be. Raises UsageError."""
    if is_builtin(name):
        return paramfile.render(load().profile(name), load())
    spec, _ = find(name)
    return paramfile.read(Path(spec) if "/" in spec else files()[spec])


def import_file(source: Path, name: str, replace: bool = False) -> Path:
    """Copies a checked file into the profile directory. ``replace``: also where there is one of that name. Raises
    UsageError, VmahybridError."""
    if not NAME.fullmatch(name):
        raise UsageError(f"profile name {name!r}", "not letters, digits, _ . and -, at most 31", "give another name")
    if is_builtin(name):
        raise UsageError(f"profile name {name!r}", "a built-in profile has it", "config import FILE NAME")
    text = paramfile.read(source)
    problems = paramfile.check(text)
    if problems:
        raise UsageError(f"{source}:{problems[0]}", "not imported", f"vmahybrid config check {source} shows all")
    if any(isinstance(line, paramfile.Line) and line.glob is not None for line in paramfile.parse(text)):
        raise UsageError(str(source), "a profile has no [program GLOB]", "that belongs into the policy file")
    target = directory() / f"{name}.conf"
    with paramfile.changing(target) as place:
        if place.exists() and not replace:
            raise UsageError(f"profile name {name!r}", f"there is one, {target}",
                             "give another name (config import FILE NAME), or --force to replace it")
        paramfile.write(place, text)
    return target
