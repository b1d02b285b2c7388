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
    """Directory with `calls`, `peer`, `tcp_calls`, `tcp_peer`; CalledProcessError, the compiler's message on stderr."""
    out = Path(tempfile.mkdtemp(prefix="vmh-compare-"))
    atexit.register(shutil.rmtree, out, ignore_errors=True)
    flags = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wno-missing-field-initializers",
             "-Wno-stringop-overflow", "-Wno-stringop-overread"]
    files = sorted(HERE.glob("*.c"))
    udp = [str(path) for path in files if path.name != "peer.c" and not path.name.startswith("tcp_")]
    tcp = [str(path) for path in files if path.name.startswith("tcp_") and path.name != "tcp_peer.c"]
    subprocess.run(["cc", *flags, "-o", str(out / "calls"), *udp, "-lpthread"], check=True)
    subprocess.run(["cc", *flags, "-DTCP_CALLS", "-o", str(out / "tcp_calls"), str(HERE / "calls.c"), *tcp,
                    "-lpthread"], check=True)
    for peer in ("peer", "tcp_peer"):
        subprocess.run(["cc", *flags, "-o", str(out / peer), str(HERE / f"{peer}.c"), "-lpthread"], check=True)
    return out


@functools.cache
def case_names(program: str = "calls") -> list[str]:
    listing = subprocess.run([build() / program, "--names"], check=True, capture_output=True, text=True)
    return listing.stdout.splitlines()
