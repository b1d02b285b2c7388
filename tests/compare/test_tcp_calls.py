"""Every call on TCP sockets four times: on the kernel, under the shim with the kernel as peer, with both ends on rings,
and on a raw packet QP. What the program saw must be the same. The cases are in tcp_*_cases.c."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from compare.programs import build, case_names
from compare.test_calls import Transcript, read, settled

from vmahybrid.bench.sandbox import Sandbox, run_command
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.apps

PORT = "7100"


def prepared(sandbox: Sandbox) -> Sandbox:
    """Rings get what the kernel left for a NIC to do otherwise."""
    for side in sandbox.sides:
        run_command(*side.command(["ethtool", "-K", side.device, "tso", "off", "gso", "off", "tx", "off"]))
    run_command(*sandbox.b.command(["sysctl", "-qw", "net.ipv4.icmp_ratelimit=0"]))
    silent = f"{sandbox.b.address.rpartition('.')[0]}.99"  # as tcp_life_cases.c has it: a host that never answers
    where = ["dev", sandbox.a.device, "lladdr", sandbox.b.mac, "nud", "permanent"]
    run_command(*sandbox.a.command(["ip", "neigh", "replace", silent, *where]))
    return sandbox


def command(sandbox: Sandbox, cases: list[str]) -> list[str]:
    return [str(build() / "tcp_calls"), sandbox.b.address, sandbox.a.address, *cases]


def peer_command(sandbox: Sandbox, at: Path) -> list[str]:
    return [str(build() / "tcp_peer"), sandbox.b.address, PORT, str(at), "600", sandbox.a.address]


SHIM = {"VMA_TRACELEVEL": "warn", "VMA_HYBRID_TCP": "offload", "VMA_RX_POLL": "200", "VMA_TCP_TIMESTAMP_OPTION": "2",
        "VMA_HYBRID_TCP_BUDGET": "100", "VMA_HYBRID_TCP_PAYS": "0"}  # on a QP each accepted one is moved


@dataclass
class Rig:
    sandbox: Sandbox
    service: Service
    peer: Path
    shim: Transcript = field(default_factory=dict)
    counted: str = ""
    statistics: Path | None = None
    said: str = ""

    def run(self, cases: list[str], settle_ms: int = 15, **variables: str) -> Transcript:
        """What follows a case that hung, or killed the program, is run by another one."""
        names, told = cases or case_names("tcp_calls"), {}
        while names:
            new = self.run_once(names, settle_ms, **variables)
            told.update(new)
            names = names[names.index(list(new)[-1]) + 1:] if new else []
        return told

    def run_once(self, cases: list[str], settle_ms: int, **variables: str) -> Transcript:
        argv = self.service.run_argv(command(self.sandbox, cases), profile="none", **SHIM, **variables)
        mine = {name: os.environ[name] for name in ("VMAHYBRID_LIB", "LD_PRELOAD") if name in os.environ}
        env = {**settled(settle_ms), **self.service.env, **mine, "TCP_PEER": str(self.peer)}
        program = self.sandbox.start(self.sandbox.a, argv, env=env)
        told = read(program)
        if self.statistics:
            self.counted += self.statistics.read_text()
        self.said += program.errors
        return told


def on_kernel(cases: list[str], at: Path, settle_ms: int = 15) -> Transcript:
    with Sandbox("tcpk") as sandbox:
        prepared(sandbox)
        sandbox.start(sandbox.b, peer_command(sandbox, at)).wait_for("ready")
        env = {**settled(settle_ms), "TCP_PEER": str(at)}
        return read(sandbox.start(sandbox.a, command(sandbox, cases), env=env))


@functools.cache
def kernel_transcript() -> Transcript:
    return on_kernel([], build() / "kernel.sock")


IN_A_CHILD = ["tcp killed by SIGPIPE"]


def begun_in_the_kernel(counted: str) -> list[str]:
    """The cases with a connection that was in the kernel when the case had got it."""
    found, case = [], ""
    for kind, text in re.findall(r"^(case|where) (.*)$", counted, re.MULTILINE):
        if kind == "case":
            case = text
        elif text != "ring":
            found.append(case)
    return found


@pytest.fixture(scope="module", params=["kernel peer", "offloaded peer", "raw packet QP"])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    where = tmp_path_factory.mktemp("tcp")
    statistics = where / "statistics"
    with ThreadPoolExecutor(1) as meanwhile:  # both sleep most of the time
        kernel = meanwhile.submit(kernel_transcript)
        softverbs = request.param == "raw packet QP"
        with Sandbox("tcpc") as sandbox, Service(prepared(sandbox), softverbs=softverbs) as service:
            rig = Rig(sandbox, service, where / "peer.sock")
            argv = peer_command(sandbox, rig.peer)
            if request.param == "offloaded peer":
                argv = service.run_argv(argv, profile="none", **SHIM)
            sandbox.start(sandbox.b, argv, env=service.env).wait_for("ready")
            rig.statistics = statistics
            rig.shim = rig.run([], VMA_STATS_FILE=str(statistics))
            rig.statistics = None
            kernel.result()
            yield rig


def test_was_offloaded(rig: Rig) -> None:
    assert rig.counted.count("\nwhere ring\n") > 150, f"{rig.service.ask('status')}\n{rig.said}"
    assert begun_in_the_kernel(rig.counted) == IN_A_CHILD


@pytest.mark.parametrize("case", case_names("tcp_calls"))
def test_same_as_kernel(rig: Rig, case: str, tmp_path: Path) -> None:
    expected, got = kernel_transcript().get(case), rig.shim.get(case)
    for settle_ms in (100, 300):
        if expected is not None and expected == got:
            break
        # a busy machine may be late with an answer: once more, slowly, both
        expected = on_kernel([case], tmp_path / f"{settle_ms}.sock", settle_ms).get(case)
        got = rig.run([case], settle_ms).get(case)
    assert expected is not None
    assert got == expected, rig.said


@pytest.mark.parametrize("case", [case for case in case_names("tcp_calls") if " in the first " in case])
def test_first_call_of_a_program(rig: Rig, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call opens the session and its ring, and is no less interruptible for that."""
    monkeypatch.setenv("CALLS_COLD", "1")
    expected, got = kernel_transcript().get(case), rig.run([case]).get(case)
    assert expected is not None
    assert got == expected, rig.said
