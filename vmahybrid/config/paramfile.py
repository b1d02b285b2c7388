"""Files of parameter values (profiles and the policy file): ``VMA_X = VALUE``, ``# comment``, ``[program GLOB]``.

The shim reads them itself (vmahybrid/shim/paramfile.c); a test compares the two readers.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vmahybrid.config import regular_file
from vmahybrid.config.catalogue import Catalogue, Profile, load
from vmahybrid.errors import UsageError, VmahybridError

LIMIT = 32767  # bytes that the shim reads
PATIENCE = 10.0  # seconds for another who changes the file
_ACL = "system.posix_acl_access"
OF_ENVIRONMENT = ("VMA_HYBRID_POLICY", "VMA_HYBRID_PROFILE_DIR")  # in a file that is read by then they come too late
TOO_LATE = "says where files are, so it is for the environment"
_BLANKS = " \t\n\v\f\r"  # isspace() of the shim; Python knows more
_SECTION = re.compile(r"\[program\s(?P<glob>.*)\]", re.ASCII)


@dataclass(frozen=True, slots=True)
class Line:
    """One value; ``glob`` names the programs it is for, None all."""

    number: int
    name: str
    value: str
    glob: str | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    number: int
    what: str
    token: str

    def __str__(self) -> str:
        return f'{self.number}: {self.what}: "{self.token}"'


def _trim(text: str) -> str:
    """As trim() of the shim."""
    return text.rstrip(_BLANKS).lstrip(" \t")


def _without_comment(line: str) -> str:
    quoted = False
    for place, letter in enumerate(line):
        if letter == '"':
            quoted = not quoted
        elif letter == "#" and not quoted and (not place or line[place - 1] in _BLANKS):
            return line[:place]
    return line


def parse(text: str) -> Iterator[Line | Problem]:
    """Lines with values in their order, and what is none."""
    glob: str | None = None
    ignored = False
    for number, raw in enumerate(text.split("\n"), 1):
        line = _trim(_without_comment(raw))
        if not line:
            continue
        if line.startswith("["):
            section = _SECTION.fullmatch(line)
            ignored = section is None
            if section is None:
                yield Problem(number, "not [program GLOB], what follows is ignored", line)
            else:
                glob = _trim(section["glob"])
        elif "=" not in line:
            yield Problem(number, "not NAME = VALUE, ignored", line)
        elif not ignored:
            name, _, value = map(_trim, line.partition("="))
            if len(value) > 1 and value[0] == value[-1] == '"':
                value = value[1:-1]
            yield Line(number, name, value, glob)


_libc = ctypes.CDLL(None)


def matches(program: str, glob: str) -> bool:
    """As fnmatch(3), which the shim calls: that of Python knows no [[:alpha:]] and no backslash."""
    return bool(_libc.fnmatch(os.fsencode(glob), os.fsencode(program), 0) == 0)


def for_program(text: str, program: str) -> Iterator[Line | Problem]:
    """What the program of that name takes of the file."""
    for found in parse(text):
        if isinstance(found, Problem) or found.glob is None or matches(program, found.glob):
            yield found


def check(text: str, profiles: Collection[str] = ()) -> list[Problem]:
    """What is wrong: syntax, unknown names, values out of range. ``profiles``: what VMA_SPEC may name, besides built-in
    ones; in a profile, nothing."""
    catalogue = load()
    names = {alias: p for p in catalogue.parameters for alias in (p.name, *p.aliases)}
    if nothing := refused(os.fsencode(text)):
        return [nothing]
    problems: list[Problem] = []
    for found in parse(text):
        if isinstance(found, Problem):
            problems.append(found)
        elif found.name not in names:
            problems.append(Problem(found.number, "no such parameter", found.name))
        elif found.name in OF_ENVIRONMENT:
            problems.append(Problem(found.number, f"{found.name} {TOO_LATE}", found.value))
        elif found.name == "VMA_SPEC":
            if not _builtin(catalogue, found.value) and found.value not in profiles:
                what = "no such profile" if profiles else "VMA_SPEC is no built-in profile"
                problems.append(Problem(found.number, what, found.value))
        else:
            try:
                names[found.name].parse(found.value)
            except ValueError as error:
                problems.append(Problem(found.number, str(error), found.value))
    return problems


def _builtin(catalogue: Catalogue, name: str) -> bool:
    try:
        catalogue.profile(name)
    except KeyError:
        return False
    return True


def render(profile: Profile, catalogue: Catalogue) -> str:
    """A built-in profile as such a file: every line with what it means."""
    lines = [f"# Profile {profile.name}: {profile.text}.",
             "# Use it with `vmahybrid run -p`, or VMA_SPEC; what is set in the environment wins over it.", ""]
    for name, value in profile.values.items():
        parameter = catalogue[name]
        default = f"Default {parameter.show(parameter.default)}." if parameter.default != "" else "Default: empty."
        lines += [f"# {parameter.text} {default}", f"{name} = {parameter.show(value)}", ""]
    return "\n".join(lines)


def read_bytes(path: Path) -> bytes:
    """Raises UsageError."""
    try:
        return regular_file.read(path)
    except OSError as error:
        raise UsageError(str(path), error.strerror or str(error), "name a file that can be read") from None


def refused(data: bytes, limit: int = LIMIT) -> Problem | None:
    """Why the shim takes nothing of a file with that in it, as vmh_file_load() has it. Any other byte may be there."""
    if len(data) > limit:
        return Problem(1, f"longer than {limit} bytes", "")
    if b"\0" in data:
        return Problem(data[: data.index(b"\0")].count(b"\n") + 1, "a zero byte", "\\0")
    return None


def load_text(path: Path) -> str:
    """As the shim reads it; a byte that is no letter stays what it is (PEP 383). Raises OSError."""
    data = regular_file.read(path)
    if problem := refused(data):
        raise OSError(errno.EFBIG if len(data) > LIMIT else errno.EILSEQ, problem.what, str(path))
    return os.fsdecode(data)


def read(path: Path) -> str:
    """Raises UsageError where programs take nothing of it."""
    if problem := refused(data := read_bytes(path)):
        raise UsageError(f"{path}:{problem.number}", problem.what, "programs do not read such a file")
    return os.fsdecode(data)


def replace_values(text: str, changes: Sequence[tuple[str, str]], glob: str | None) -> str:
    """With the values set in the part for ``glob``; comments and the rest stay. A line with an older name becomes one
    with the present name. Raises UsageError where the shim would not read the values back as they are."""
    for what, word in (("--program", glob or ""), *changes):
        if word.encode(errors="replace").decode() != word:
            raise UsageError(f"{what} {word!r}", "not a text in UTF-8", "the policy file is one")
    present = {alias: p.name for p in load().parameters for alias in p.aliases}
    lines = text.split("\n")
    section: str | None = None
    ignored = False
    places: dict[str, int] = {}
    end = None  # behind the last line of the part
    for number, raw in enumerate(lines):
        line = _trim(_without_comment(raw))
        if line.startswith("["):
            match = _SECTION.fullmatch(line)
            section, ignored = (_trim(match["glob"]), False) if match else (None, True)
        if section == glob and not ignored:
            end = number + 1 if line or end is None else end
            name = _trim(line.partition("=")[0])
            places[present.get(name, name)] = number
    if end is None and glob is None:
        end = 0  # the file begins with a section
    elif end is None:
        lines += [_heading(str(glob))]
        end = len(lines)
    for name, value in changes:
        if name in places:
            old = lines[places[name]]
            lines[places[name]] = _setting(name, value, old[len(_without_comment(old)):])
        else:
            lines.insert(end, _setting(name, value))
            places[name], end = end, end + 1
    return "\n".join(lines).rstrip("\n") + "\n"


def _heading(glob: str) -> str:
    line = f"[program {glob}]"
    if [found.glob for found in parse(f"{line}\nVMA_BF = 0") if isinstance(found, Line)] != [glob]:
        raise UsageError(f"--program {glob!r}", "a line [program GLOB] can't hold it",
                         "leave out line breaks, blanks around it, and # behind a blank")
    return line


def _setting(name: str, value: str, comment: str = "") -> str:
    """The line that is read back as that, with the comment behind it if it can be there, else above it."""
    plain, quoted = f"{name} = {value}", f'{name} = "{value}"'
    if not value or re.search(r"[#\"]|^\s|\s$", value):
        plain, quoted = quoted, plain
    for line in (plain, quoted):
        for text in (f"{line}  {comment}", f"{comment}\n{line}") if comment else (line,):
            if [(found.name, found.value) for found in parse(text) if isinstance(found, Line)] == [(name, value)]:
                return text
    raise UsageError(name, f"a line of the policy file can't hold {value!r}",
                     "leave out line breaks, and # behind a blank where there are quotes as well")


@contextlib.contextmanager
def changing(path: Path) -> Iterator[Path]:
    """The file to read and to write(), with nobody else between the two; of a symlink its target. The lock is the
    directory's: the file itself is replaced. Raises VmahybridError."""
    target = Path(os.path.realpath(path))
    try:
        if target.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        target.parent.mkdir(parents=True, exist_ok=True)
        directory = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise _may_not(path, error) from None
    try:
        _lock(directory, target)
        yield target
    finally:
        os.close(directory)


def _lock(directory: int, path: Path) -> None:
    """Not for ever: everybody who may read the directory can hold it."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                raise VmahybridError(str(path), f"another process holds the lock of {path.parent}",
                                     "lslocks says which") from None
            time.sleep(0.01)
        except OSError:  # NFS has none for directories
            return


def _may_not(path: Path, error: OSError) -> VmahybridError:
    return VmahybridError(str(path), error.strerror or str(error), "do it as a user who may write there")


def write(path: Path, text: str) -> None:
    """Whole or not at all; owner and permissions stay. ``path`` is from changing(). Raises VmahybridError."""
    name = None
    try:
        fd, name = tempfile.mkstemp(dir=path.parent)
        with open(fd, "wb") as new:
            new.write(os.fsencode(text))
            _make_like(fd, path)
        os.replace(name, path)
    except OSError as error:
        if name is not None:
            Path(name).unlink(missing_ok=True)
        raise _may_not(path, error) from None


def _make_like(fd: int, path: Path) -> None:
    try:
        old = path.stat()
    except FileNotFoundError:
        os.fchmod(fd, 0o644)
        return
    with contextlib.suppress(PermissionError):  # another's file in a directory of ours
        os.fchown(fd, old.st_uid, old.st_gid)
    os.fchmod(fd, old.st_mode & 0o777)
    with contextlib.suppress(OSError):  # most have none
        os.setxattr(fd, _ACL, os.getxattr(path, _ACL))
