"""What the machine holds that a test run could leave behind, seen before and after it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from vmahybrid.contracts import unpack
from vmahybrid.stats.page import HEADER_SIZE

SESSION_VARIABLE = "VMH_TEST_SESSION"
# statistics pages of this session's programs have a directory of their own: /tmp has those of other runs as well
STATS_VARIABLE = "VMA_STATS_SHMEM_DIR"
# networking's own words for a broken kernel; lines of other subsystems are of no interest
_KERNEL_COMPLAINT = re.compile(
    r"\bBUG:|\bWARNING:|\bOops\b|general protection fault|KASAN|refcount_t|unregister_netdevice"
)


def _json(*argv: str) -> list[dict[str, object]]:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    loaded: list[dict[str, object]] = json.loads(done.stdout) if done.stdout.strip() else []
    return loaded


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def session_processes(session: str) -> dict[int, str]:
    """Processes (not zombies, not this one) whose environment says that this test session started them."""
    wanted = f"{SESSION_VARIABLE}={session}".encode()
    found = {}
    for proc in Path("/proc").iterdir():
        if not proc.name.isdigit() or int(proc.name) == os.getpid():
            continue
        try:
            if wanted in (proc / "environ").read_bytes().split(b"\0"):
                found[int(proc.name)] = (proc / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
    return found


_FDINFO = {"programs": "prog_id", "maps": "map_id", "links": "link_id"}


@dataclass
class Snapshot:
    """Ids of XDP programs and XSK maps, BPF links, namespaces, links and files of ours, and the length of dmesg."""

    programs: dict[int, str] = field(default_factory=dict)
    maps: dict[int, str] = field(default_factory=dict)
    links: dict[int, str] = field(default_factory=dict)
    pins: set[str] = field(default_factory=set)
    namespaces: set[str] = field(default_factory=set)
    devices: set[str] = field(default_factory=set)
    files: set[str] = field(default_factory=set)
    complaints: list[str] = field(default_factory=list)


def take() -> Snapshot:
    """The present state. Needs root; what bpftool cannot list is absent."""
    return Snapshot(
        programs=_bpf("prog", "xdp") | _ours_at_tcx(),
        maps=_bpf("map", "xskmap"),
        links=_bpf("link", "xdp") | _bpf("link", "tcx"),
        pins={str(path) for path in Path("/sys/fs/bpf").rglob("*vmh*")},
        namespaces={path.name for path in Path("/run/netns").glob("vmh*")},
        devices={path.name for path in Path("/sys/class/net").glob("vmh*")},
        files={str(path) for top in ("/tmp", "/dev/shm") for path in Path(top).glob("vmh-run-*")} | _stats_pages(),
        complaints=[line for line in _dmesg() if _KERNEL_COMPLAINT.search(line)],
    )


def _bpf(kind: str, wanted: str) -> dict[int, str]:
    """id -> description of the BPF objects of a type."""
    held: dict[int, str] = {}
    for item in _json("bpftool", "-j", kind, "show"):
        identity = item.get("id")
        if item.get("type") == wanted and isinstance(identity, int):
            held[identity] = f"{kind} {identity} {item.get('name', '')}"
    return held


def _ours_at_tcx() -> dict[int, str]:
    return {identity: text for identity, text in _bpf("prog", "sched_cls").items() if text.endswith(" tc_steer")}


def _stats_pages() -> set[str]:
    """Statistics pages of this session whose process is gone, and had a service that should have removed them."""
    return {
        str(path)
        for path in Path(os.environ.get(STATS_VARIABLE, "/tmp")).glob("vmastat.*")
        if path.suffix[1:].isdigit() and not _alive(int(path.suffix[1:])) and _had_service(path)
    }


def _had_service(page: Path) -> bool:
    try:
        data = page.read_bytes()
    except FileNotFoundError:
        return False
    return len(data) >= HEADER_SIZE and unpack("struct vmh_stats_page", data).session != 0


def _dmesg() -> list[str]:
    return subprocess.run(["dmesg"], capture_output=True, text=True, timeout=30).stdout.splitlines()


def compare(before: Snapshot, session: str, patience: float = 10.0) -> list[str]:
    """What is there now, was not before, and is ours. Waits up to `patience` seconds: the kernel frees in the
    background, and what belongs to a namespace of another session can't be told from ours."""
    deadline = time.monotonic() + patience
    while (left := _compare_once(before, session)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _compare_once(before: Snapshot, session: str) -> list[str]:
    now = take()
    left = [f"process {pid}: {command}" for pid, command in session_processes(session).items()]
    for kind in ("programs", "maps", "links"):
        old, new = getattr(before, kind), getattr(now, kind)
        left += [text for identity, text in new.items() if identity not in old and not _held(kind, identity)]
    left += [f"namespace {name}" for name in sorted(now.namespaces - before.namespaces) if _ours(name)]
    left += [f"network device {name}" for name in sorted(now.devices - before.devices)]
    left += [f"pin {path}" for path in sorted(now.pins - before.pins)]
    left += [f"file {path}" for path in sorted(now.files - before.files) if _ours(path)]
    left += [f"dmesg: {line}" for line in now.complaints if line not in before.complaints]
    return left


def _held(kind: str, identity: int) -> bool:
    """Does a living process have the object open? Were it one of ours, it would be reported as a process.

    By fdinfo, because bpftool does not always know."""
    wanted = re.compile(rf"^{_FDINFO[kind]}:\s*{identity}$", re.MULTILINE)
    for file in Path("/proc").glob("[0-9]*/fdinfo/*"):
        try:
            if wanted.search(file.read_text("utf-8", "replace")):
                return True
        except OSError:  # gone meanwhile
            continue
    return False


def _ours(name: str) -> bool:
    """A namespace or file of this process, or of one that is gone; another test run's are left alone."""
    maker = re.search(r"-(\d+)-", name)
    return maker is None or int(maker[1]) == os.getpid() or not _alive(int(maker[1]))
