"""The VMA_* parameters of TCP: each makes a difference that the program, its peer or strace can see."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vmahybrid.bench.sandbox import Sandbox, run_command
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

PROGRAM = [sys.executable, str(Path(__file__).with_name("tcp_param_program.py"))]


@pytest.fixture(scope="module", name="served")
def served_pair() -> Iterator[tuple[Sandbox, Service]]:
    with Sandbox("test") as sandbox, Service(sandbox) as service:
        for side in sandbox.sides:
            run_command(*side.command(["ethtool", "-K", side.device, "tso", "off", "gso", "off", "tx", "off"]))
        sandbox.start(sandbox.b, [*PROGRAM, "listen", sandbox.b.address]).wait_for("ready")
        yield sandbox, service


def experiment(served: tuple[Sandbox, Service], what: str, *before: str, **variables: str) -> Any:
    """Its figures under the shim, with the connection on a ring from the SYN."""
    sandbox, service = served
    settings = {"VMA_HYBRID_TCP": "offload", "VMA_RX_POLL": "0", "VMA_TRACELEVEL": "warn", **variables}
    argv = service.run_argv([*before, *PROGRAM, what, sandbox.b.address], profile="none", **settings)
    return json.loads(sandbox.start(sandbox.a, argv, env=service.env).result(20).splitlines()[-1])


def test_timestamps(served: tuple[Sandbox, Service]) -> None:
    """And without them a segment has 12 bytes more."""
    got = {value: experiment(served, "echo", VMA_TCP_TIMESTAMP_OPTION=value) for value in "012"}
    assert [got[value]["options"] & 1 for value in "012"] == [0, 1, 1]
    assert [got[value]["snd_mss"] for value in "012"] == [1460, 1448, 1448]


def test_timestamps_as_the_kernel(served: tuple[Sandbox, Service]) -> None:
    side = served[0].a
    run_command(*side.command(["sysctl", "-qw", "net.ipv4.tcp_timestamps=0"]))
    try:
        assert experiment(served, "echo", VMA_TCP_TIMESTAMP_OPTION="2")["options"] & 1 == 0
    finally:
        run_command(*side.command(["sysctl", "-qw", "net.ipv4.tcp_timestamps=1"]))


def test_mss(served: tuple[Sandbox, Service]) -> None:
    assert experiment(served, "echo", VMA_MSS="0")["maxseg"] == 1460
    assert experiment(served, "echo", VMA_MSS="700")["maxseg"] == 700


@pytest.mark.parametrize("policy", ["offload", "adaptive", "kernel"])
def test_mtu(served: tuple[Sandbox, Service], policy: str) -> None:
    """TCP of the manual: 40 bytes less; and a smaller VMA_MSS holds."""
    assert experiment(served, "echo", VMA_MTU="1000", VMA_HYBRID_TCP=policy)["snd_mss"] in (960, 948)
    assert experiment(served, "echo", VMA_MTU="1000", VMA_MSS="700", VMA_HYBRID_TCP=policy)["snd_mss"] in (700, 688)


def test_defaults_of_the_kernels_sockets(served: tuple[Sandbox, Service]) -> None:
    got = experiment(served, "echo", VMA_MSS="700", VMA_TCP_NODELAY="1", VMA_HYBRID_TCP="kernel")
    assert got["nodelay"] == 1
    assert got["snd_mss"] in (700, 688)


@pytest.mark.parametrize(("asked", "warned"), [("1460", False), ("5000", True), ("0", False)])
def test_mss_beyond_the_mtu(served: tuple[Sandbox, Service], asked: str, warned: bool) -> None:
    sandbox, service = served
    argv = service.run_argv([*PROGRAM, "echo", sandbox.b.address], profile="none", VMA_HYBRID_TCP="offload",
                            VMA_TRACELEVEL="warn", VMA_MSS=asked)
    program = sandbox.start(sandbox.a, argv, env=service.env)
    assert json.loads(program.result(20).splitlines()[-1])["maxseg"] == 1460
    text = f"VMA_MSS = {asked} is not a number from 88 to 1460, which is what {sandbox.a.device} can have, using [1460]"
    assert (text in program.errors) is warned and ("is not a number" in program.errors) is warned


@pytest.mark.parametrize("policy", ["offload", "kernel"])
def test_mss_beyond_vma_mtu(served: tuple[Sandbox, Service], policy: str) -> None:
    sandbox, service = served
    argv = service.run_argv([*PROGRAM, "echo", sandbox.b.address], profile="none", VMA_HYBRID_TCP=policy,
                            VMA_TRACELEVEL="info", VMA_MTU="1000", VMA_MSS="1200")  # fmt: skip
    program = sandbox.start(sandbox.a, argv, env=service.env)
    assert json.loads(program.result(20).splitlines()[-1])["snd_mss"] in (960, 948)
    said = "VMA_MSS = 1200 does not go with VMA_MTU = 1000 (88 to 960, over IPv6 to 940), using [960]"
    assert said in program.errors
    assert re.search(r"MSS +960 +\[VMA_MSS\]", program.errors)


def test_nodelay(served: tuple[Sandbox, Service]) -> None:
    """Nagle's algorithm joins small writes."""
    assert experiment(served, "echo", VMA_TCP_NODELAY="0")["nodelay"] == 0
    assert experiment(served, "echo", VMA_TCP_NODELAY="1")["nodelay"] == 1
    assert experiment(served, "small_writes", VMA_TCP_NODELAY="0")["segments"] < 30
    assert experiment(served, "small_writes", VMA_TCP_NODELAY="1")["segments"] >= 40


def first_ack(figures: Any) -> float:
    """Later bytes are acknowledged at once: no answer to an earlier one was there to carry it."""
    return float(figures["ms"][0])


def test_quickack(served: tuple[Sandbox, Service]) -> None:
    assert first_ack(experiment(served, "acks", VMA_TCP_QUICKACK="0")) > 30
    assert first_ack(experiment(served, "acks", VMA_TCP_QUICKACK="1")) < 15


def test_timer_resolution_of_tcp(served: tuple[Sandbox, Service]) -> None:
    """Delayed acknowledgements wait for so long, 40 ms at most."""
    fine = {"VMA_TIMER_RESOLUTION_MSEC": "1"}
    assert first_ack(experiment(served, "acks", VMA_TCP_TIMER_RESOLUTION_MSEC="100", **fine)) > 30
    assert first_ack(experiment(served, "acks", VMA_TCP_TIMER_RESOLUTION_MSEC="5", **fine)) < 25


def test_timer_resolution(served: tuple[Sandbox, Service]) -> None:
    """The internal thread looks at a ring with connections so often."""
    alone = {"VMA_PROGRESS_ENGINE_INTERVAL": "0"}  # it has reasons of its own
    often = experiment(served, "idle", VMA_TIMER_RESOLUTION_MSEC="10", **alone)["wakeups"]
    rarely = experiment(served, "idle", VMA_TIMER_RESOLUTION_MSEC="200", **alone)["wakeups"]
    assert often > 3 * rarely


def test_congestion_control(served: tuple[Sandbox, Service]) -> None:
    """The window that a connection begins with, and grows: none knows no window."""
    windows = {name: experiment(served, "echo", VMA_TCP_CC_ALGO=value)["cwnd"] for name, value in
               (("lwip", "0"), ("cubic", "1"), ("none", "2"))}
    assert windows["none"] > 1000
    assert windows["lwip"] < 100 and windows["cubic"] < 100


def test_what_a_loss_does_to_the_window(served: tuple[Sandbox, Service]) -> None:
    """NewReno halves it, CUBIC takes 0.7 of it, none has no window."""
    sandbox, service = served
    left = {}
    for algorithm in "012":
        argv = service.run_argv([*PROGRAM, "one_loss", sandbox.b.address], profile="none", VMA_HYBRID_TCP="offload",
                                VMA_TCP_CC_ALGO=algorithm, VMA_TRACELEVEL="warn")  # fmt: skip
        with subprocess.Popen(sandbox.a.command(argv), env={**os.environ, **service.env}, text=True,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
            assert program.stdin and program.stdout
            assert program.stdout.readline() == "grown\n"
            silent = ("route", "add", "blackhole", f"{sandbox.a.address}/32")
            sandbox.b.ip(*silent)
            try:
                program.stdin.write("\n")
                program.stdin.flush()
                left[algorithm] = json.loads(program.stdout.readline())
            finally:
                sandbox.b.ip("route", "del", *silent[2:])
            program.communicate("\n", timeout=20)
    shares = {algorithm: found["ssthresh"] / found["cwnd"] for algorithm, found in left.items()}
    assert shares["0"] <= 0.51 and 0.65 < shares["1"] < 0.72, left
    assert left["2"]["cwnd"] > 1000 and shares["2"] >= 1, left


def test_polling_in_send(served: tuple[Sandbox, Service], tmp_path: Path) -> None:
    """A program that only sends sees acknowledgements when the internal thread looks, or in its own calls."""
    rare = {"VMA_TIMER_RESOLUTION_MSEC": "1000", "VMA_PROGRESS_ENGINE_INTERVAL": "0", "VMA_TCP_NODELAY": "1",
            "VMA_STATS_SHMEM_DIR": str(tmp_path)}
    assert experiment(served, "sends_only", VMA_RX_POLL_ON_TX_TCP="0", **rare)["acknowledgements"] <= 2
    assert experiment(served, "sends_only", VMA_RX_POLL_ON_TX_TCP="1", **rare)["acknowledgements"] >= 10


def test_merged_segments(served: tuple[Sandbox, Service], tmp_path: Path) -> None:
    """VMA_GRO_STREAMS_MAX: data that comes together is one segment for the stack, and answered by one ACK."""
    got = {}
    for value in ("0", "1", "32"):
        got[value] = experiment(served, "bulk", VMA_GRO_STREAMS_MAX=value, VMA_STATS_SHMEM_DIR=str(tmp_path))
        assert got[value]["right"] and got[value]["size"] == 8 << 20, got[value]
        assert (8 << 20) / 1460 < got[value]["segments"] <= got[value]["frames"], got[value]
    assert got["0"]["merged"] == 0, got
    for value in ("1", "32"):
        assert got[value]["merged"] > 1000, got
        assert got[value]["answers"] < got["0"]["answers"] * 3 / 4, got


def test_options_of_the_stack_alone(served: tuple[Sandbox, Service]) -> None:
    """VMA_AVOID_SYS_CALLS_ON_TCP_FD: the kernel's socket is told when it serves the connection."""
    variables = {"VMA_AVOID_SYS_CALLS_ON_TCP_FD": "1", "VMA_TCP_NODELAY": "1"}
    assert experiment(served, "own_options", **variables) == {
        "ring": [0, 0], "quick": [0, 1, 0], "home": [0, 0], "error": [111], "refused": [0, 1]}  # fmt: skip


def test_nodelay_of_an_accepted_one(served: tuple[Sandbox, Service]) -> None:
    sandbox, service = served
    settings = {"VMA_HYBRID_TCP": "offload", "VMA_AVOID_SYS_CALLS_ON_TCP_FD": "1", "VMA_TCP_NODELAY": "1"}
    argv = service.run_argv([*PROGRAM, "own_listener", sandbox.a.address], profile="none", **settings)
    program = sandbox.start(sandbox.a, argv, env=service.env)
    program.wait_for("ready")
    connect = f"import socket; socket.create_connection(('{sandbox.a.address}', 7302)).recv(1)"
    sandbox.start(sandbox.b, [sys.executable, "-c", connect]).wait(20)
    assert json.loads(program.result(20).splitlines()[-1]) == [1, 1]


@pytest.mark.parametrize("avoid", [0, 1])
def test_no_system_calls(served: tuple[Sandbox, Service], tmp_path: Path, avoid: int) -> None:
    """strace between the two marks of the experiment."""
    trace = tmp_path / "trace"
    sandbox, service = served
    settings = {"VMA_HYBRID_TCP": "offload", "VMA_RX_POLL": "0", "VMA_AVOID_SYS_CALLS_ON_TCP_FD": str(avoid)}
    argv = service.run_argv([*PROGRAM, "options", sandbox.b.address], profile="none", **settings)
    strace = ["strace", "-f", "-o", str(trace), "-e", "trace=close,getsockopt,setsockopt,fcntl,ioctl"]
    said = sandbox.start(sandbox.a, [*strace, *argv], env=service.env).result(20)
    assert json.loads(said.splitlines()[-1])["nodelay"] == 1
    inside = re.search(r"close\(991\)(.*)close\(992\)", trace.read_text(), re.S)
    assert inside
    calls = {name: len(re.findall(rf"{name}\(", inside[1])) for name in ("getsockopt", "setsockopt", "fcntl", "ioctl")}
    assert calls == dict.fromkeys(calls, 0) if avoid else calls["getsockopt"] >= 10 and calls["fcntl"] >= 10, calls
