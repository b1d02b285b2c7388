"""Builds the comparison programs once a session."""

from __future__ import annotations

import atexit
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


@functools.cache
def build() -> Path:
    """Directory with `calls` and `peer`; CalledProcessError with the compiler's message on stderr."""
    out = Path(tempfile.mkdtemp(prefix="vmh-compare-"))
    atexit.register(shutil.rmtree, out, ignore_errors=True)
    flags = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wno-missing-field-initializers"]
    sources = [str(path) for path in sorted(HERE.glob("*.c")) if path.name != "peer.c"]
    subprocess.run(["cc", *flags, "-o", str(out / "calls"), *sources, "-lpthread"], check=True)
    subprocess.run(["cc", *flags, "-o", str(out / "peer"), str(HERE / "peer.c")], check=True)
    return out


@functools.cache
def case_names() -> list[str]:
    listing = subprocess.run([build() / "calls", "--names"], check=True, capture_output=True, text=True)
    return listing.stdout.splitlines()
