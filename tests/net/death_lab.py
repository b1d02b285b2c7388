"""What the tests of death look at: programs under the shim, their progress, and what a service and the kernel hold."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import signal
import socket
import statistics
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from net.service_lab import Api, until, veths

from vmahybrid.bench.sandbox import Program, Sandbox, Side
from vmahybrid.bench.served import Service, _links, xdp_program
from vmahybrid.cli.run import library
from vmahybrid.verbs.library import softverbs_environment
from vmahybrid.xdp.bpf import BpfError, BpfMap, bpf_attr, bpf_call, object_info
from vmahybrid.xdp.image import MapSpec

PROGRAM = str(Path(__file__).with_name("death_program.py"))
RULES, XSKS = ("rules5", "rules3", "rulesmc", "granted"), ("xsks", "rin_xsks")
AF_XDP, BPF_NOEXIST, MAP_GET_FD_BY_ID = 44, 1, 14
PYTHON = [sys.executable, "-S", "-E", "-u"]


@dataclass
class Lab:
    """A sandbox and its service, and the programs that were started here."""

    sandbox: Sandbox
    service: Service
    started: list[Program] = field(default_factory=list)

    @property
    def api(self) -> Api:
        return Api(self.service)

    # ---- programs

    def shimmed(self, side: Side, argv: Sequence[str], /, prefix: Sequence[str] = (), **variables: str) -> Program:
        """argv under the shim, without the command `vmahybrid run`: it takes ten times longer than the program."""
        preload = ":".join(filter(None, [str(library()), os.environ.get("VMH_SANITIZER_RUNTIME")]))
        device = softverbs_environment() if self.service.softverbs else {}
        variables = {"VMA_HYBRID_SOCKET": self.service.env["VMA_HYBRID_SOCKET"], "LD_PRELOAD": preload, **device,
                     "ASAN_OPTIONS": "verify_asan_link_order=0:detect_leaks=0", **variables}
        settings = [f"{name}={value}" for name, value in variables.items()]
        return self._start(side, [*prefix, "env", *settings, *argv])

    def _start(self, side: Side, argv: Sequence[str]) -> Program:
        self.started.append(self.sandbox.start(side, argv))
        return self.started[-1]

    def end_programs(self) -> None:
        """Kills what was started here; returns when the service has forgotten it: the next test finds it fresh."""
        while self.started:
            self.started.pop().stop(signal.SIGKILL)
        until(lambda: not self.api.status()["processes"] and not self.ring_veths(), 3,
              "programs of a test are still known to the service")

    def role(self, side: Side, *arguments: object, **variables: str) -> Program:
        """death_program.py under the shim."""
        return self.shimmed(side, [*PYTHON, PROGRAM, *map(str, arguments)], **variables)

    def plain(self, side: Side, *arguments: object) -> Program:
        """death_program.py on the kernel."""
        return self._start(side, [*PYTHON, PROGRAM, *map(str, arguments)])

    def echo(self, side: Side, port: int) -> Program:
        """A server on the kernel, bound when this returns."""
        program = self.plain(side, "serve", side.address, port)
        program.wait_for('"n": 0')
        return program

    # ---- what the service says

    def flows(self, pid: int = 0) -> list[dict[str, Any]]:
        """Flows of sockets on rings, of one process or of all."""
        return [flow for flow in self.api.socket_flows() if self.service.leads_to_ring(flow)
                and pid in (0, flow["pid"]) and flow["rules"]]

    def on_ring(self, *programs: Program, timeout: float = 5.0) -> float:
        """Waits until every program has a rule that leads to its ring; seconds until then."""
        begun = time.monotonic()
        for program in programs:
            until(lambda p=program: self.flows(p.pid) or not p.running, timeout,
                  lambda p=program: f"{p.argv[-5:]} is not on a ring after {timeout} s: {self.why(p)}")
            assert program.running, f"{program.argv}: ended with {program.process.returncode}: {program.errors}"
        return time.monotonic() - begun

    def why(self, program: Program) -> str:
        code, answer = self.api.call("GET", f"/v1/sockets/{program.pid}/explain")
        return f"{code} {answer}"

    def ring_kinds(self, pid: int) -> list[str]:
        return [ring["kind"] for ring in self.api.call("GET", "/v1/rings")[1] if ring["pid"] == pid]

    def kinds(self, programs: int) -> list[str]:
        """What so many programs of one side have, sorted: an interface's own queue goes to one alone."""
        return ["verbs"] * programs if self.service.softverbs else ["direct"] + ["veth"] * (programs - 1)

    # ---- what the kernel says

    def maps(self) -> dict[str, int]:
        """Entries of the maps of the service, by name, all interfaces together: rules, XSKs, ring veths, grants.

        Only while the service is quiet: the slots of an XSKMAP can't be read, so they are tried out."""
        found: dict[str, int] = {}
        for identity in map_ids(self.service.program.pid):
            with open_map(identity) as opened:
                name = opened.spec.name
                if name in RULES:
                    found[name] = found.get(name, 0) + len(opened.keys())
                elif name in XSKS:
                    found[name] = found.get(name, 0) + xsks_in(opened)
                elif name == "devs":
                    used = [slot for slot in range(16) if opened.lookup(struct.pack("I", slot)) is not None]
                    found[name] = found.get(name, 0) + len(used)
        return found

    def memory_files(self) -> list[str]:
        """memfds that the service holds, by name."""
        links = descriptors(self.service.program.pid)
        return sorted(link for link in links if link.startswith("/memfd:"))

    def links(self) -> dict[str, set[str]]:
        return {side.netns: _links(side) for side in self.sandbox.sides}

    def ring_veths(self) -> list[str]:
        return [name for side in self.sandbox.sides for name in veths(side)]


def open_map(identity: int) -> BpfMap:
    """A map of another process, with its name and sizes from the kernel (struct bpf_map_info)."""
    fd = bpf_call(MAP_GET_FD_BY_ID, bpf_attr("III", identity, 0, 0))
    if fd < 0:
        raise OSError(-fd, os.strerror(-fd))
    kind, _, key, value, entries, flags, name = struct.unpack("6I16s", object_info(fd, 40))
    return BpfMap(fd, MapSpec(name.rstrip(b"\0").decode(), kind, key, value, entries, flags))


def xsks_in(opened: BpfMap) -> int:
    """Occupied ones of the first 64 slots of an XSKMAP: a slot that is free takes a socket of ours, and loses it again.

    xsk_map_update_elem() with BPF_NOEXIST answers EEXIST where there is a socket."""
    used = 0
    with socket.socket(AF_XDP, socket.SOCK_RAW) as mine:
        for slot in range(min(64, opened.spec.max_entries)):
            try:
                opened.update(struct.pack("I", slot), struct.pack("I", mine.fileno()), BPF_NOEXIST)
            except BpfError as error:
                if error.errno != errno.EEXIST:
                    raise
                used += 1
            else:
                opened.delete(struct.pack("I", slot))
    return used


def map_ids(pid: int) -> set[int]:
    """BPF maps that a process has open."""
    found = set()
    for path in Path(f"/proc/{pid}/fdinfo").iterdir():
        try:
            if named := re.search(r"^map_id:\s*(\d+)$", path.read_text(), re.MULTILINE):
                found.add(int(named[1]))
        except FileNotFoundError:
            continue
    return found


def descriptors(pid: int) -> list[str]:
    """What the descriptors of a process point to, with numbers."""
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(os.readlink(path))
        except FileNotFoundError:
            continue
    return found


def stats_page(pid: int) -> Path:
    return Path(os.environ.get("VMA_STATS_SHMEM_DIR", "/tmp")) / f"vmastat.{pid}"


# ---- progress

def newest_first(program: Program) -> Iterator[dict[str, Any]]:
    """What death_program.py has said so far. From the end: it says much, and little of it is wanted."""
    for line in reversed(program.output.splitlines()):
        if line.startswith("{") and line.endswith("}"):
            yield json.loads(line)


def reports(program: Program, since: float = 0.0) -> list[dict[str, Any]]:
    """In the order in which they came, from a moment (CLOCK_MONOTONIC) on."""
    return list(itertools.takewhile(lambda said: said["t"] >= since, newest_first(program)))[::-1]


def longest_gap(program: Program, since: float, until_: float | None = None) -> float:
    """Of the stretch of time (CLOCK_MONOTONIC), with the one that is still open at its end."""
    end = time.monotonic() if until_ is None else until_
    gaps = [0.0]
    last = since
    for said in reports(program, since):
        if said["t"] <= end and said["gap"]:
            gaps.append(said["gap"])
            last = said["t"]
    # between two reports no gap is longer than 20 ms, unless it is the open one
    return max(*gaps, end - last - 0.12)


def count(program: Program, what: str = "n") -> int:
    return int(next(newest_first(program), {}).get(what, 0))


def progresses(program: Program, timeout: float = 2.0, datagrams: int = 20) -> None:
    """Waits until the program has done so many datagrams more."""
    all_progress([program], timeout, datagrams)


def all_progress(programs: Sequence[Program], timeout: float = 2.0, datagrams: int = 20) -> None:
    """Waits until each of the programs has done so many datagrams more, all of them within the same time."""
    deadline = time.monotonic() + timeout
    for program, before in [(program, count(program)) for program in programs]:
        left = max(0.0, deadline - time.monotonic())
        until(lambda p=program, n=before: count(p) >= n + datagrams or not p.running, left,
              f"{program.argv[-5:]} did not go on from {before} within {timeout} s: {program.errors[-500:]}")
        ended = program.process.returncode
        assert program.running, f"{program.argv[-5:]} ended with {ended}: {program.errors[-1500:]}"


def gone_within(seconds: float, since: float, still: Callable[[], Any], what: str) -> float:
    """Seconds from ``since`` until ``still()`` is empty; AssertionError with what is still there after that long.

    A look takes its time, so an empty answer counts at the moment when it was asked for."""
    while True:
        asked = time.monotonic()
        left = still()
        if not left:
            return max(0.0, asked - since)
        assert asked - since < seconds, f"{what} still there {asked - since:.2f} s later: {left}"
        time.sleep(0.01)


def summary(name: str, values: Sequence[float], unit: str = "ms") -> None:
    scale = 1000 if unit == "ms" else 1
    print(f"{name}: min {min(values) * scale:.1f} median {statistics.median(values) * scale:.1f} "
          f"max {max(values) * scale:.1f} {unit} of {len(values)}")


def restarted(service: Service) -> None:
    """`vmahybrid start` in the run directory of a service that was killed, which leaves its socket there."""
    service.start()


def kill9(program: Program) -> float:
    """SIGKILL; the moment, in CLOCK_MONOTONIC."""
    moment = time.monotonic()
    program.process.send_signal(signal.SIGKILL)
    program.process.wait()
    return moment


__all__ = ["Api", "Lab", "until", "veths", "xdp_program"]
