"""What `vmahybrid explain` says of senders by the kernel and of kinds that are never offloaded; losses of a ring."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from net.service_lab import Api, until

from vmahybrid.bench.sandbox import Program, Sandbox
from vmahybrid.bench.served import Service, run_words, tool
from vmahybrid.steering.reasons import Reason

pytestmark = pytest.mark.root

PROGRAM = """
import json, select, socket, sys, time
here, there, wide = sys.argv[1:]
def udp():
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.bind((here, 0))
    return s
def listener(family, address, port):
    s = socket.socket(family, socket.SOCK_STREAM)
    s.bind((address, port))
    s.listen()
    return s
local = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
local.bind(("127.0.0.1", 0))
group, broadcast, big, flags, idle, mixed = (udp() for _ in range(6))
broadcast.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
tcp, tcp6 = listener(socket.AF_INET, here, 5006), listener(socket.AF_INET6, "::", 5007)
udp6 = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
udp6.bind(("::", 5008))
lite = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, 136)
raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)
unix = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
epoll = select.epoll()
plain = open("/dev/null")
for _ in range(20):
    local.sendto(b"x", local.getsockname())
    group.sendto(b"x", ("239.3.3.4", 5000))
    broadcast.sendto(b"x", (wide, 5000))
    big.sendto(b"x" * 3000, (there, 5000))
    flags.sendmsg([b"x"], [], socket.MSG_DONTROUTE, (there, 5000))
    mixed.sendto(b"x", (there, 5000))
    time.sleep(0.05)
mixed.sendto(b"x" * 3000, (there, 5000))
print(json.dumps({name: value.fileno() for name, value in globals().items() if hasattr(value, "fileno")}), flush=True)
time.sleep(60)
"""
BURST = """
import socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind((sys.argv[1], 7700))
s.setsockopt(socket.SOL_SOCKET, 33, 8 << 20)  # SO_RCVBUFFORCE
print("bound", flush=True)
s.recv(100)
time.sleep(60)
"""


@pytest.fixture(scope="module")
def sandbox(softverbs: bool) -> Iterator[Sandbox]:
    """One for each backend: the program's ports are taken as long as it runs."""
    del softverbs
    with Sandbox("test") as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def running(sandbox: Sandbox, softverbs: bool) -> Iterator[Service]:
    with Service(sandbox, sides=[sandbox.a], softverbs=softverbs) as service:
        yield service


def run(service: Service) -> list[str]:
    return run_words(*(["--softverbs"] if service.softverbs else []))


@pytest.fixture(scope="module")
def program(running: Service, sandbox: Sandbox) -> tuple[Program, dict[str, int]]:
    here, there = sandbox.a.address, sandbox.b.address
    wide = here.rpartition(".")[0] + ".255"
    argv = [*run(running), "--", sys.executable, "-c", PROGRAM, here, there, wide]
    started = sandbox.start(sandbox.a, argv, env=running.env)
    started.wait_for("idle")
    return started, json.loads(started.output.splitlines()[-1])


def explained(service: Service, what: str) -> list[dict[str, str]]:
    steps: list[dict[str, str]] = json.loads(service.ask("explain", what, "--json"))["steps"]
    return steps


@pytest.mark.parametrize(("name", "reason"), [
    ("group", Reason.MULTICAST_LOOP), ("broadcast", Reason.BROADCAST), ("big", Reason.MTU),
    ("flags", Reason.SEND_FLAGS), ("local", Reason.LOOPBACK)])
def test_a_sender_by_the_kernel(running: Service, program: tuple[Program, dict[str, int]], name: str,
                                reason: Reason) -> None:
    started, fds = program
    steps = explained(running, f"{started.pid}:{fds[name]}")
    (sending,) = [step for step in steps if step["step"] == "sending"]
    assert sending["text"] == f"0 datagrams by the ring, 20 by the kernel, the last because {reason.text}"
    assert (sending["ok"], sending["remedy"], sending["reason"]) == (False, reason.remedy, reason.slug)
    assert "the flow is on a ring, but nothing" not in str(steps)
    (line,) = [step for step in explained(running, str(started.pid))
               if step["text"].startswith(f"{started.pid}:{fds[name]} ")]
    says = "on the kernel: " if name == "local" else "but sends by the kernel: "
    assert line["text"].endswith(says + reason.text), line
    assert not line["ok"]
    (sock,) = [s for s in Api(running).call("GET", f"/v1/sockets?pid={started.pid}")[1] if s["fd"] == fds[name]]
    assert sock["tx_os_reason"] == reason.slug


def test_a_sender_by_both_and_one_that_never_sent(running: Service, program: tuple[Program, dict[str, int]]) -> None:
    started, fds = program
    (sending,) = [s for s in explained(running, f"{started.pid}:{fds['mixed']}") if s["step"] == "sending"]
    assert sending["ok"], sending
    assert sending["text"].endswith(f"by the kernel, the last because {Reason.MTU.text}")
    idle = explained(running, f"{started.pid}:{fds['idle']}")
    assert not [step for step in idle if step["step"] == "sending" or not step["ok"]], idle
    lines = [step["text"] for step in explained(running, str(started.pid))]
    for name in ("mixed", "idle"):
        assert next(line for line in lines if line.startswith(f"{started.pid}:{fds[name]} ")).endswith(": offloaded")


@pytest.mark.parametrize(("name", "what", "reason"), [
    ("tcp", "a TCP socket", Reason.TYPE), ("tcp6", "a TCP socket over IPv6", Reason.TYPE),
    ("udp6", "a UDP socket over IPv6", Reason.FAMILY), ("lite", "a UDP-Lite socket", Reason.TYPE),
    ("raw", "a raw socket", Reason.TYPE), ("unix", "a Unix socket", Reason.FAMILY),
    ("epoll", "an epoll set, no socket", None), ("plain", "no socket (/dev/null)", None)])
def test_kinds_that_are_never_offloaded(running: Service, program: tuple[Program, dict[str, int]], name: str, what: str,
                                        reason: Reason | None) -> None:
    started, fds = program
    session, kind = explained(running, f"{started.pid}:{fds[name]}")
    assert session["ok"]
    assert kind["text"] == f"fd {fds[name]} is {what}" + (f": {reason.text}" if reason else "")
    assert ("TCP with VMA_HYBRID_TCP=" in kind["text"]) == (reason is Reason.TYPE), "what rings do have"
    assert kind["reason"] == (reason.slug if reason else "")
    assert kind["remedy"]
    assert not kind["ok"]
    listed = [s["text"] for s in explained(running, str(started.pid))
              if s["text"].startswith(f"{started.pid}:{fds[name]}:")]
    assert bool(listed) == (name in ("tcp", "tcp6", "udp6", "lite", "raw")), listed


def test_by_address(running: Service, sandbox: Sandbox, program: tuple[Program, dict[str, int]]) -> None:
    started, fds = program
    here = sandbox.a.address
    for place, name in ((f"{here}:5006", "tcp"), ("*:5006", "tcp"), ("[::]:5006", "tcp"), ("[::]:5007", "tcp6"),
                        (f"{here}:5007", "tcp6"), ("[::]:5008", "udp6")):
        session, kind = explained(running, place)
        assert f"process {started.pid} " in session["text"], place
        assert kind["text"].startswith(f"fd {fds[name]} is "), (place, kind)
    (nobody, *_) = explained(running, f"{here}:5009")
    assert nobody["text"] == f"no program under the shim has a socket at {here}:5009"


def test_view_5_tells_of_a_sender_by_the_kernel(running: Service, program: tuple[Program, dict[str, int]]) -> None:
    started, _ = program
    rows = vma_stats(running, started.pid, "-v", "5").splitlines()
    said = [(row.split()[1], row.split()[-1]) for row in rows if row.startswith("udp")]
    # No: the one on loopback, and the one of IPv6, of which the shim has no statistics
    assert sorted(on_ring for on_ring, _ in said) == ["No"] * 2 + ["Yes"] * 6, rows
    assert said.count(("Yes", "kernel")) == 4, rows


def vma_stats(service: Service, pid: int, *arguments: str) -> str:
    argv = [tool("vma_stats"), "-p", str(pid), "--once", "-F", *arguments]
    return subprocess.run(argv, env=os.environ | service.env, capture_output=True, text=True,
                          check=True, timeout=20).stdout


def test_a_burst_that_the_ring_could_not_hold(running: Service, sandbox: Sandbox) -> None:
    """The kernel drops it before the program sees anything: it is counted, and status says who lost how many. The
    software device has room for it."""
    here = sandbox.a.address
    argv = [*run(running), "-p", "latency", "--", sys.executable, "-c", BURST, here]
    reader = sandbox.start(sandbox.a, argv, env=running.env)
    api = Api(running)
    try:
        reader.wait_for("bound")
        until(lambda: any(f["pid"] == reader.pid and f["action"] == "ring" for f in api.socket_flows()))
        told_of_a_burst(running, sandbox, api, reader)
    finally:
        reader.stop()
    until(lambda: not [s for s in api.status()["health"] if f"rocess {reader.pid} " in s])


def told_of_a_burst(running: Service, sandbox: Sandbox, api: Api, reader: Program) -> None:
    here = sandbox.a.address
    assert f"rocess {reader.pid} " not in str(api.status()["health"])
    send = f"import socket; s = socket.socket(2, 2); [s.sendto(b'x' * 64, ('{here}', 7700)) for _ in range(3000)]"
    sandbox.start(sandbox.b, [sys.executable, "-c", send]).wait(20)
    def rings() -> list[dict[str, Any]]:
        return [ring for ring in api.call("GET", "/v1/rings")[1] if ring["pid"] == reader.pid]

    if running.softverbs:
        until(lambda: [ring["stats"]["rx_packets"] for ring in rings()] == [3000])
        assert f"rocess {reader.pid} " not in str(api.status()["health"])
        return
    (ring,) = rings()
    lost = ring["kernel"]["rx_dropped"] + ring["kernel"]["rx_ring_full"]
    assert lost > 1000, ring
    said = f"Process {reader.pid} ({ring_comm(api, reader.pid)}) lost {lost} packets at {sandbox.a.device} in the last"
    health = until(lambda: [s for s in api.status()["health"] if s.startswith(said)])
    assert "Let it poll more often; raise VMA_RX_WRE and ring.frames." in health[0]
    view = vma_stats(running, reader.pid, "-v", "3")
    lines = [" ".join(line.split()) for line in view.splitlines()]
    assert f"Packets dropped: {lost}" in lines
    assert f"HW RX Packets dropped: {lost}" in lines
    assert f"No buffers error: {ring['kernel']['rx_fill_ring_empty_descs']}" in lines
    vma_stats(running, reader.pid, "-z")
    time.sleep(0.2)
    view = vma_stats(running, reader.pid, "-v", "3")
    assert "HW RX" not in view


def ring_comm(api: Api, pid: int) -> str:
    return str(api.call("GET", f"/v1/processes/{pid}")[1]["comm"])


WAITING = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind((sys.argv[1], 0))
print("bound", flush=True)
s.recv(1)
"""


def test_deleted_down_and_configured_away(running: Service, sandbox: Sandbox) -> None:
    """Each has its own reason with a remedy that helps."""
    argv = [*run(running), "--", sys.executable, "-c", WAITING]
    first = sandbox.start(sandbox.a, [*argv, sandbox.a.address], env=running.env)
    first.wait_for("bound")
    (flow,) = [flow for flow in Api(running).socket_flows() if flow["pid"] == first.pid]
    running.ask("flows", "delete", str(flow["flow_id"]))
    until(lambda: any(step["reason"] == "flow-deleted" and "next connect" in step["remedy"]
                      for step in explained(running, str(first.pid))))

    running.ask("config", "set", "backend=kernel")
    second = sandbox.start(sandbox.a, [*argv, "0.0.0.0"], env=running.env)
    try:
        second.wait_for("bound")
        words = json.dumps(explained(running, str(second.pid)))
        assert "vmahybrid config set backend=auto (now kernel, by api)" in words
        assert "under [interface" not in words
    finally:
        running.ask("config", "set", "backend=auto")
    sandbox.a.ip("link", "set", sandbox.a.device, "down")
    try:
        third = sandbox.start(sandbox.a, [*argv, "0.0.0.0"], env=running.env)
        third.wait_for("bound")
        until(lambda: any(step["reason"] == "interface-down"
                          and step["remedy"] == f"ip link set {sandbox.a.device} up"
                          for step in explained(running, str(third.pid))))
    finally:
        sandbox.a.ip("link", "set", sandbox.a.device, "up")
        for program in (first, second, third):
            program.stop(signal.SIGKILL)


def test_a_rule_that_has_gone(running: Service, sandbox: Sandbox) -> None:
    """It is not named any more, and the remedy is what brings the flow back."""
    argv = [*run(running), "--", sys.executable, "-c", WAITING, sandbox.a.address]
    program = sandbox.start(sandbox.a, argv, env=running.env)
    try:
        program.wait_for("bound")
        (flow,) = [flow for flow in Api(running).socket_flows() if flow["pid"] == program.pid]
        running.ask("flows", "add", "kernel", flow["local"])

        def told() -> tuple[str, str] | None:
            steps = [step for step in explained(running, str(program.pid)) if step["reason"] == "rule"]
            return (steps[0]["text"], steps[0]["remedy"]) if steps else None

        text, remedy = until(told)
        assert "a rule of the operator keeps" in text
        assert "next connect" in remedy
        (rule,) = [f for f in Api(running).call("GET", "/v1/flows")[1] if f["local"] == flow["local"]]
        running.ask("flows", "delete", str(rule["flow_id"]))
        text, remedy = until(told)
        assert "gone by now" in text
        assert remedy.startswith("it comes back with the socket's next connect")
    finally:
        program.stop(signal.SIGKILL)


def test_a_rule_for_remote_hosts_is_not_named_for_an_own_address(running: Service, sandbox: Sandbox) -> None:
    for own in ("[::1]:53", "127.0.0.1:53", f"{sandbox.a.address}:53"):
        assert "rule" not in {step["step"] for step in explained(running, own)}, own
    assert "rule" in {step["step"] for step in explained(running, "10.77.0.99:53")}
