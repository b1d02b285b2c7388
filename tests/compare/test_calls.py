"""Every socket call twice, on the kernel and under the shim: return values, errno and data must be the same.

The cases are in the C files beside this one. The shim's run must be on rings, or the comparison would say nothing:
:func:`test_was_offloaded` looks at what the shim counted, where the service refuses every other path.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from compare.programs import build, case_names

from vmahybrid.bench.sandbox import Sandbox, Side, run_command
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
    """Both transcripts of all cases, and what is needed to run one again."""

    sandbox: Sandbox
    service: Service
    profile: str
    kernel: Transcript = field(default_factory=dict)
    shim: Transcript = field(default_factory=dict)
    counted: str = ""
    said: str = ""

    def run(self, shimmed: bool, cases: list[str], settle_ms: int = 30, **variables: str) -> Transcript:
        side: Side = self.sandbox.a
        argv = [str(build() / "calls"), self.sandbox.b.address, side.address, *cases]
        env = {"CALLS_SETTLE_MS": str(settle_ms)}
        if shimmed:
            argv = self.service.run_argv(argv, profile=self.profile, **variables)
            env |= self.service.env
            # the sanitizer build of the shim runs the same suite
            env |= {name: os.environ[name] for name in ("VMAHYBRID_LIB", "LD_PRELOAD") if name in os.environ}
        program = self.sandbox.start(side, argv, env=env)
        code = program.wait(240)
        if shimmed:
            self.said += program.errors
        out = program.output
        if code:
            out += f"  ended with {code}\n{program.errors}"
        return parse(out)


@pytest.fixture(scope="module", params=["none", "latency", "softverbs"])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Two profiles on AF_XDP rings, one on raw packet QPs."""
    softverbs = request.param == "softverbs"
    statistics = tmp_path_factory.mktemp("calls") / "statistics"
    # rings belong to the first process on a queue: the peer runs on the plain kernel
    with Sandbox("calls") as sandbox, Service(sandbox, softverbs=softverbs) as service:
        service.ask("config", "set", f"backend={service.backend}")
        rig = Rig(sandbox, service, "none" if softverbs else request.param)
        # the peer's kernel would ration its port-unreachable messages (icmp(7)): the second run would see fewer
        run_command(*sandbox.b.command(["sysctl", "-qw", "net.ipv4.icmp_ratelimit=0"]))
        peer = sandbox.start(sandbox.b, [str(build() / "peer"), sandbox.b.address, "600"])
        peer.wait_for("ready")
        rig.kernel = rig.run(False, [])
        rig.shim = rig.run(True, [], VMA_STATS_FILE=str(statistics))
        rig.counted = statistics.read_text()
        yield rig


def test_was_offloaded(rig: Rig) -> None:
    """By the sums of all sockets that were closed, received and sent."""
    for direction in ("Rx", "Tx"):
        packets = re.findall(rf"{direction} Offload: \d+ / (\d+) ", rig.counted)
        assert sum(map(int, packets)) > 300, f"{direction}: {rig.service.ask('status')}"


@pytest.mark.parametrize("case", case_names())
def test_same_as_kernel(rig: Rig, case: str) -> None:
    expected, got = rig.kernel.get(case), rig.shim.get(case)
    for settle_ms in (100, 300):
        if expected is not None and expected == got:
            break
        # a busy machine may be late with an answer: once more, slowly, both
        expected = rig.run(False, [case], settle_ms).get(case)
        got = rig.run(True, [case], settle_ms).get(case)
    assert expected is not None
    assert got == expected, rig.said
