"""The sandbox that all network tests, the bench and `make run` stand on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from vmahybrid.bench.latency import bench_program
from vmahybrid.bench.sandbox import Program, Sandbox, sweep


@pytest.mark.root
def test_the_ends_of_a_sandbox_reach_each_other(netns_pair: Sandbox) -> None:
    for side, other in (netns_pair.sides, netns_pair.sides[::-1]):
        receiver = netns_pair.start(other, [bench_program("udp_mmsg"), "recv", other.address, "5000"])
        receiver.wait_for("ready")
        netns_pair.start(side, [bench_program("udp_mmsg"), "send", other.address, "5000", "0.1", "1", "64"]).result(5)
        receiver.stop(signal.SIGTERM)
        assert json.loads(receiver.output.splitlines()[-1])["messages"] > 0
        assert side.ip("-6", "address") == ""


@pytest.mark.root
def test_a_sandbox_takes_its_programs_and_namespaces_away() -> None:
    started: list[Program] = []
    strays: list[subprocess.Popen[bytes]] = []

    def fail_inside(sandbox: Sandbox) -> None:
        with sandbox:
            started.append(sandbox.start(sandbox.a, ["sleep", "60"]))
            # one that the sandbox did not start itself
            strays.append(subprocess.Popen(sandbox.b.command(["sleep", "60"])))
            time.sleep(0.2)
            raise RuntimeError("on purpose")

    sandbox = Sandbox("test")
    with pytest.raises(RuntimeError, match="on purpose"):
        fail_inside(sandbox)
    assert started[0].process.returncode == -signal.SIGKILL
    assert strays[0].wait(5) == -signal.SIGKILL
    assert not any(Path("/run/netns", side.netns).exists() for side in sandbox.sides)


@pytest.mark.root
def test_sweep_removes_namespaces_of_dead_makers_only() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    dead = f"vmh-test-{child.pid}-0a"
    living = f"vmh-test-{os.getpid()}-999a"
    for name in (dead, living):
        subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        assert dead in sweep()
        assert not Path("/run/netns", dead).exists()
        assert Path("/run/netns", living).exists()
    finally:
        subprocess.run(["ip", "netns", "del", living], check=True)
