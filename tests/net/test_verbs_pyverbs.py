"""vmahybrid.verbs on pyverbs and our software device, each in a child process, on real frames of a veth pair."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from net.service_lab import udp_from

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import tool
from vmahybrid.steering.reasons import Reason
from vmahybrid.verbs.caps import INLINE

pytestmark = pytest.mark.root
PROGRAM = str(Path(__file__).with_name("verbs_peer.py"))
UNPRIVILEGED = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--inh-caps=-all",
                "--bounding-set=-all")


@pytest.fixture(scope="module")
def netns_pair() -> Iterator[Sandbox]:
    with Sandbox("test") as sandbox:
        yield sandbox


def softverbs(sandbox: Sandbox, *argv: str, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """A program on side a with the software device; its output is text."""
    command = sandbox.a.command([*prefix, tool("vmahybrid"), "softverbs", "--", *argv])
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            bufsize=1, env={**os.environ, "PYTHONPATH": str(Path(PROGRAM).parents[1])})


def answer(process: subprocess.Popen[str]) -> Any:
    out, errors = process.communicate("\n", timeout=30)
    assert process.returncode == 0, errors
    return json.loads(out.splitlines()[-1])


def check(sandbox: Sandbox, *argv: str, prefix: tuple[str, ...] = ()) -> Any:
    return answer(softverbs(sandbox, sys.executable, PROGRAM, *argv, prefix=prefix))


def ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == "ready\n", process.communicate()[1]


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    print(file=process.stdin, flush=True)


def test_devices_and_capabilities(netns_pair: Sandbox) -> None:
    found = check(netns_pair, "listed")
    assert "sv_va" in found["devices"]
    able = found["able"]
    assert (able["reason"], able["link_layer"], "ip-csum" in able["raw_caps"]) == ("none", "Ethernet", True)
    assert able["max_qp_wr"] >= 2048
    assert able["max_inline"] == INLINE  # what a ring gets there


def test_a_device_that_is_not_there(netns_pair: Sandbox) -> None:
    assert check(netns_pair, "unknown").startswith("device sv_none: ")


def test_rules_follow_the_difference(netns_pair: Sandbox) -> None:
    """Three rounds: both ports steered; the first passes; none. Each frame comes once, to the QP or to the kernel."""
    process = softverbs(netns_pair, sys.executable, PROGRAM, "steer", "5000", "5001")
    for number in range(3):
        ready(process)
        for port in (5000, 5001, 7000):
            udp_from(netns_pair, netns_pair.b, f"{number} to {port}", "10.77.0.1", port, 4000)
        if number < 2:
            go_on(process)
    first, second, third = answer(process)
    steered = [["10.77.0.2", 4000, port, f"0 to {port}"] for port in (5000, 5001)]
    assert first == {"qp": steered, "kernel": ["0 to 7000"]}
    assert second == {"qp": [["10.77.0.2", 4000, 5001, "1 to 5001"]], "kernel": ["1 to 5000", "1 to 7000"]}
    assert third == {"qp": [], "kernel": ["2 to 5000", "2 to 5001", "2 to 7000"]}


def test_a_connected_socket_wins_across_queue_pairs(netns_pair: Sandbox) -> None:
    process = softverbs(netns_pair, sys.executable, PROGRAM, "connected")
    ready(process)
    for port in (4242, 4243):
        udp_from(netns_pair, netns_pair.b, "x", "10.77.0.1", 5000, port)
    assert answer(process) == {"broad": [4243], "narrow": [4242]}


def test_a_frame_to_the_kernel_of_the_other_side(netns_pair: Sandbox) -> None:
    mac = json.loads(netns_pair.b.ip("-j", "link", "show", "vb"))[0]["address"].replace(":", "")
    code = ("import socket;s=socket.socket(socket.AF_INET,socket.SOCK_DGRAM);s.settimeout(10);"
            "s.bind(('10.77.0.2',6000));print('bound',flush=True);print(*s.recvfrom(99))")
    receiver = netns_pair.start(netns_pair.b, [sys.executable, "-S", "-c", code])
    receiver.wait_for("bound")
    assert check(netns_pair, "send", mac, "6000") == "sent"
    assert "b'from a queue pair' ('10.77.0.1', 1234)" in receiver.result(15)


def doctor(sandbox: Sandbox, *argv: str, prefix: tuple[str, ...] = ()) -> tuple[int, list[dict[str, Any]]]:
    process = softverbs(sandbox, tool("vmahybrid"), "doctor", "--json", *argv, prefix=prefix)
    out, errors = process.communicate(timeout=100)
    assert not errors, errors
    return process.returncode, json.loads(out)["checks"]


def test_the_selftest_passes(netns_pair: Sandbox) -> None:
    code, checks = doctor(netns_pair, "--verbs-selftest", "va")
    assert (code, {step["verdict"] for step in checks}) == (0, {"ok"}), checks
    assert [step["name"] for step in checks] == [
        "library", "device of the interface", "raw packet QPs", "device", "port", "memory", "completion queues",
        "raw packet QP", "ready to send", "receive requests", "flow rule", "send", "loopback", "close"]


@pytest.mark.parametrize("side", ["a", "b"])
def test_the_selftest_of_a_link_that_is_down(netns_pair: Sandbox, side: str) -> None:
    """The interface itself, or the other end of its cable."""
    at, device = (netns_pair.a, "va") if side == "a" else (netns_pair.b, "vb")
    at.ip("link", "set", device, "down")
    try:
        code, checks = doctor(netns_pair, "--verbs-selftest", "va")
    finally:
        at.ip("link", "set", device, "up")
    assert code == 1 and not {"send", "ready to send"} & {step["name"] for step in checks}
    failed = next(step for step in checks if step["verdict"] == "fail")
    assert failed["name"] == "port" and "ip link set va up" in failed["remedy"]


def test_the_selftest_without_the_capability(netns_pair: Sandbox) -> None:
    code, checks = doctor(netns_pair, "--verbs-selftest", "va", prefix=UNPRIVILEGED)
    assert code == 1
    assert (checks[-1]["name"], checks[-1]["verdict"]) == ("raw packet QPs", "fail")
    assert Reason.NO_CAP_NET_RAW.text in checks[-1]["text"]
    assert checks[-1]["remedy"]


def test_the_selftest_without_a_device(netns_pair: Sandbox) -> None:
    argv = netns_pair.a.command([tool("vmahybrid"), "doctor", "--json", "--verbs-selftest", "va"])
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    checks = json.loads(done.stdout)["checks"]
    assert (done.returncode, checks[-1]["name"], checks[-1]["verdict"]) == (1, "device of the interface", "fail")
    assert Reason.NO_VERBS_DEVICE.text in checks[-1]["text"]


def test_the_lines_of_doctor(netns_pair: Sandbox) -> None:
    _, checks = doctor(netns_pair, "va")
    lines = {line["name"]: line for line in checks if line["topic"] == "verbs"}
    assert lines["sv_va"]["data"]["raw_packet"] is True
    assert "(the software device)" in lines["libibverbs"]["text"]
    assert lines["softverbs"]["verdict"] == "ok"
    speed = lines["speed"]  # measured, whatever it is
    soft, kernel = speed["data"]["softverbs"], speed["data"]["kernel"]
    assert 0.5 < soft["half_rtt_us"] < 1000 and soft["rate"] > 1000 and kernel["rate"] > 1000
    loses = soft["half_rtt_us"] > kernel["half_rtt_us"] or soft["rate"] < kernel["rate"]
    assert ("slower than the kernel's UDP" in speed["text"], speed["verdict"]) == (loses, "warn" if loses else "ok")
