"""Every socket call twice, on the kernel and under the shim: return values, errno and data must be the same.

The cases are in the C files beside this one. The shim's run must be on rings, or the comparison would say nothing:
:func:`test_was_offloaded` looks at what the shim counted, where the service refuses every other path.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from compare.programs import build, case_names

from vmahybrid.bench.sandbox import Program, Sandbox, run_command
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.apps

Transcript = dict[str, list[str]]


def parse(text: str) -> Transcript:
    cases: Transcript = {}
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(" "):
            lines.append(line)
        else:
            lines = cases.setdefault(line, [])
    return cases


@dataclass
class Rig:
    """What is needed to run cases, and the shim's transcript of all."""

    sandbox: Sandbox
    service: Service
    profile: str
    shim: Transcript = field(default_factory=dict)
    counted: str = ""
    said: str = ""

    def run(self, cases: list[str], settle_ms: int = 15, **variables: str) -> Transcript:
        # no banner, no box about huge pages: what a program says before it dies is compared, too
        quiet = {"VMA_TRACELEVEL": "warn", "VMA_MEM_ALLOC_TYPE": "1"}
        argv = self.service.run_argv(command(self.sandbox, cases), profile=self.profile, **quiet, **variables)
        # the sanitizer build of the shim runs the same suite
        mine = {name: os.environ[name] for name in ("VMAHYBRID_LIB", "LD_PRELOAD") if name in os.environ}
        env = {**settled(settle_ms), **self.service.env, **mine}
        program = self.sandbox.start(self.sandbox.a, argv, env=env)
        told = read(program)
        self.said += program.errors
        return told


def command(sandbox: Sandbox, cases: list[str]) -> list[str]:
    return [str(build() / "calls"), sandbox.b.address, sandbox.a.address, *cases]


def settled(settle_ms: int) -> dict[str, str]:
    return {"CALLS_SETTLE_MS": str(settle_ms)}


def read(program: Program) -> Transcript:
    code = program.wait(240)
    out = program.output
    if code:
        out += f"  ended with {code}\n{program.errors}"
    return parse(out)


def transcript(sandbox: Sandbox, cases: list[str], settle_ms: int = 15) -> Transcript:
    """On the kernel, without the shim."""
    return read(sandbox.start(sandbox.a, command(sandbox, cases), env=settled(settle_ms)))


def start_peer(sandbox: Sandbox) -> None:
    """On the plain kernel: rings belong to the first process on a queue."""
    # its kernel would ration its port-unreachable messages (icmp(7)): a second run would see fewer
    run_command(*sandbox.b.command(["sysctl", "-qw", "net.ipv4.icmp_ratelimit=0"]))
    peer = sandbox.start(sandbox.b, [str(build() / "peer"), sandbox.b.address, "600"])
    peer.wait_for("ready")


@functools.cache
def kernel_transcript() -> Transcript:
    """Of all cases, for every profile: the kernel knows none, and here is no service."""
    with Sandbox("calls") as sandbox:
        start_peer(sandbox)
        return transcript(sandbox, [])


@pytest.fixture(scope="module", params=["none", "latency", "softverbs"])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Two profiles on AF_XDP rings, one on raw packet QPs."""
    softverbs = request.param == "softverbs"
    statistics = tmp_path_factory.mktemp("calls") / "statistics"
    with Sandbox("calls") as sandbox, Service(sandbox, softverbs=softverbs) as service:
        service.ask("config", "set", f"backend={service.backend}")
        rig = Rig(sandbox, service, "none" if softverbs else request.param)
        start_peer(sandbox)
        with ThreadPoolExecutor(1) as meanwhile:  # both sleep most of the time
            kernel = meanwhile.submit(kernel_transcript)
            rig.shim = rig.run([], VMA_STATS_FILE=str(statistics))
            kernel.result()
        rig.counted = statistics.read_text()
        yield rig


def test_was_offloaded(rig: Rig) -> None:
    """By the sums of all sockets that were closed, received and sent."""
    for direction in ("Rx", "Tx"):
        packets = re.findall(rf"{direction} Offload: \d+ / (\d+) ", rig.counted)
        assert sum(map(int, packets)) > 300, f"{direction}: {rig.service.ask('status')}"


@pytest.mark.parametrize("case", case_names())
def test_same_as_kernel(rig: Rig, case: str) -> None:
    expected, got = kernel_transcript().get(case), rig.shim.get(case)
    for settle_ms in (100, 300):
        if expected is not None and expected == got:
            break
        # a busy machine may be late with an answer: once more, slowly, both
        expected = transcript(rig.sandbox, [case], settle_ms).get(case)
        got = rig.run([case], settle_ms).get(case)
    assert expected is not None
    assert got == expected, rig.said
