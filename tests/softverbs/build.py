"""Where softverbs is, plain and sanitized, and the C program of the cases."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

from sanitize.build import ROOT, variables

import vmahybrid

HERE = Path(__file__).resolve().parent
SOURCES = ("rig.c", "frames.c", "queue_cases.c", "poll_cases.c", "flow_cases.c", "life_cases.c")
FLAGS = ("-std=gnu11", "-D_GNU_SOURCE", "-g", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-missing-field-initializers")
CASES = (
    *("inline-limit", "signalled", "checksums", "receive-faults", "send-faults", "memory-regions", "overrun", "states"),
    *("memory-addresses", "memory-gone", "full-queue", "drain", "all-default", "device-recreated", "device-moved"),
    *("other-context", "other-namespace", "closed-with-flows"),
    *("built-requests", "steal", "priorities", "tags", "sniffer", "vlan", "vlan-loop", "ipv6", "multicast"),
    *("super-frames", "refusals", "no-tcx", "events", "threads", "cycles", "link-state", "device-removed", "killed"),
    *("forked", "odd-frames", "padding", "poll-posts", "poll-destroys", "poll-threads"),
)


def library() -> Path:
    """The libibverbs.so.1 of the installed package."""
    path = Path(vmahybrid.__file__).resolve().parent / "verbs" / "softverbs" / "lib" / "libibverbs.so.1"
    assert path.exists(), f"{path} is missing: make build"
    return path


@functools.cache
def sanitized_library() -> Path:
    """The one of scripts/asan, made or brought up to date here."""
    variables()
    return ROOT / "build-asan" / "vmahybrid" / "verbs" / "softverbs" / "libibverbs.so.1"


def build_own(target: Path, against: Path, *flags: str) -> Path:
    """The program of all cases, linked against a library, so that a missing symbol shows here."""
    sources = [str(HERE / name) for name in SOURCES]
    command = ["gcc", *FLAGS, *flags, *sources, "-o", str(target), str(against), "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return target
