"""Checks a libvma.conf with the parser of the shim (shim/conf_parse.c), which alone knows the grammar."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from vmahybrid._contracts import ffi, lib
from vmahybrid.config.paramfile import Problem, refused

LIMIT = 65535  # bytes that the shim reads
STATEMENTS = ("application-id", "use", "log")


@dataclass(frozen=True, slots=True)
class Rules:
    """``blocks`` are (program, id). ``notices``: what is not as written, the first 16. ``log_line``: of the first
    that says something of the log, which has no effect; 0: none."""

    blocks: tuple[tuple[str, str], ...]
    rules: int
    notices: tuple[Problem, ...] = ()
    log_line: int = 0


def looks_like_it(text: str) -> bool:
    """Does a line begin with a statement of libvma.conf, or the first one with something like that?"""
    lines = [line.partition("#")[0].split() for line in text.splitlines() if "=" not in line]
    firsts = [words[0].lower() for words in lines if words]
    return any(first in STATEMENTS for first in firsts) or any(
        difflib.get_close_matches(first, STATEMENTS) for first in firsts[:1])


def check(data: bytes) -> Rules | Problem:
    """In any encoding, as the shim reads it: a name of a program may have any byte, as may a comment."""
    if problem := refused(data, LIMIT):
        return problem
    found, error = ffi.new("struct vmh_conf *"), ffi.new("struct vmh_conf_error *")
    if lib.vmh_conf_parse(data, found, error):
        return _problem(error)
    blocks = [found.blocks[i] for i in range(found.nblocks)]
    names = [tuple(ffi.string(part).decode(errors="replace") for part in (b.program, b.id)) for b in blocks]
    notices = tuple(_problem(found.notices[i]) for i in range(found.nnotices))
    return Rules(tuple((program, identity) for program, identity in names), found.nrules, notices, found.log_line)


def _problem(error: Any) -> Problem:
    return Problem(error.line, ffi.string(error.what).decode(), ffi.string(error.token).decode(errors="replace"))
