"""Compile the programs of bpf/ with bcc, in a child process.

bcc rewrites map accesses in the main file only, so the sources and their own headers are pasted into one text, with
#line directives that keep the compiler's messages true.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import vmahybrid
from vmahybrid.errors import NotPossibleHere, VmahybridError
from vmahybrid.xdp import headers
from vmahybrid.xdp.bcc_child import EXIT_NO_BCC
from vmahybrid.xdp.image import Image

SOURCES = ("vmh_steer.c", "vmh_steer_tc.c", "vmh_guard.c", "vmh_ring_in.c")

_PACKAGE = Path(vmahybrid.__file__).resolve().parent
_LOCAL_INCLUDE = re.compile(r'^#include "([a-z0-9_]+\.h)"$')
_MESSAGE_TAIL = 2000  # characters of the compiler's output that an error carries


class CompileError(VmahybridError):
    """The compiler refused our own sources, or did not end: its message is in ``why``."""


def source_directory() -> Path:
    """Where the sources are: beside the package in the source tree, or inside the installed one."""
    for directory in (_PACKAGE.parent / "bpf", _PACKAGE / "bpf"):
        if (directory / SOURCES[0]).is_file():
            return directory
    raise NotPossibleHere("XDP programs", f"{SOURCES[0]} is neither in {_PACKAGE}/bpf nor in {_PACKAGE.parent}/bpf",
                          "install vmahybrid again")


def _paste(path: Path, seen: set[Path]) -> list[str]:
    if path in seen:
        return []
    seen.add(path)
    lines = [f'#line 1 "{path.name}"']
    for number, line in enumerate(path.read_text("ascii").splitlines(), 1):
        match = _LOCAL_INCLUDE.match(line)
        if match is None:
            lines.append(line)
        else:
            lines += _paste(path.parent / match[1], seen)
            lines.append(f'#line {number + 1} "{path.name}"')
    return lines


def source_text(directory: Path | None = None) -> str:
    """All programs and their headers as the one text that bcc compiles."""
    directory = directory or source_directory()
    seen: set[Path] = set()
    lines = ["#include <uapi/linux/bpf.h>"]
    for name in SOURCES:
        lines += _paste(directory / name, seen)
    return "\n".join(lines) + "\n"


def _environment(tree: Path) -> dict[str, str]:
    """Nothing of the caller's environment steers the compiler (CPATH, BCC_*) or the child's Python."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH") if name in os.environ}
    path = kept.get("PYTHONPATH")
    kept["PYTHONPATH"] = f"{path}{os.pathsep}{_PACKAGE.parent}" if path else str(_PACKAGE.parent)
    return {**kept, "LC_ALL": "C", "BCC_KERNEL_SOURCE": str(tree)}


def _run_child(text: str, tree: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
    try:
        # -P and the private directory: a file named bcc.py where root started the service is not ours to run
        return subprocess.run([sys.executable, "-P", "-m", "vmahybrid.xdp.bcc_child"], input=text, text=True,
                              capture_output=True, timeout=timeout_s, env=_environment(tree), cwd=tree, check=False)
    except subprocess.TimeoutExpired as error:
        raise CompileError("XDP programs", f"the compiler did not end in {timeout_s:g} s",
                           "see whether the machine is overloaded, then start again") from error


def compile_text(text: str, *, timeout_s: float = 60) -> Image:
    """Compile C text whose programs are named ``xdp_*`` or ``tc_*``. About 0.8 s, 145 MiB in a child.

    Raises NotPossibleHere when bcc or the kernel headers are missing or bpf(2) is not permitted, CompileError with the
    compiler's message when it refuses the text.
    """
    with tempfile.TemporaryDirectory(prefix="vmahybrid-headers-") as directory:
        tree = Path(directory)
        headers.make_tree(tree)
        child = _run_child(text, tree, timeout_s)
    message = child.stderr.strip()[-_MESSAGE_TAIL:]
    if child.returncode == EXIT_NO_BCC:
        raise NotPossibleHere("XDP programs", f"{message} (python: {sys.executable})",
                              "apt install python3-bpfcc linux-libc-dev, and use a venv of /usr/bin/python3 made with "
                              "--system-site-packages")
    if child.returncode != 0:
        if "Operation not permitted" in message:
            raise NotPossibleHere("XDP programs", f"bpf(2) is not permitted: {message}",
                                  "start the service as root, or with CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON")
        how = f"exit {child.returncode}" if child.returncode > 0 else f"signal {-child.returncode}"
        raise CompileError("XDP programs", f"the compiler failed ({how}): {message}",
                           "apt install --reinstall python3-bpfcc linux-libc-dev, and report this message")
    try:
        return Image.from_json(child.stdout)
    except ValueError as error:
        raise CompileError("XDP programs", f"the compiler's process answered nonsense: {error}",
                           "report this with the version of python3-bpfcc") from error


def compile_image(timeout_s: float = 60) -> Image:
    """All programs of SOURCES with their maps. Errors: see :func:`compile_text`."""
    return compile_text(source_text(), timeout_s=timeout_s)
