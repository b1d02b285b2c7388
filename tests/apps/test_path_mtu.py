"""A path narrower than its first link: b - a (router) - c, where the link from a to c has an MTU of 800.

A router's ICMP error tells the kernel, and nothing tells the shim: it has to ask. Every case runs on the kernel as
well, which sets what is expected.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from vmahybrid.bench.sandbox import Program, Sandbox, run_command
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.apps

FAR = "10.99.0.2"
WANT, DO, PROBE, INTERFACE = 1, 2, 3, 4  # of IP_MTU_DISCOVER
# a send every 120 ms: the shim asks every 100 ms
SENDER = """
import os, socket, sys, time
how, mode, pause, gap = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("10.77.0.2", 0))
s.setsockopt(socket.IPPROTO_IP, 10, mode)  # IP_MTU_DISCOVER
to = ("10.99.0.2", 5000)
if how == "connected":
    s.connect(to)
def put(size):
    try:
        s.send(b"x" * size) if how == "connected" else s.sendto(b"x" * size, to)
        print("sent", size, flush=True)
    except OSError as error:
        print(os.strerror(error.errno), flush=True)
    time.sleep(gap)
put(8)
for _ in range(6): put(1300)
put(700)  # may meet the error of one before
put(700)
if pause:
    print("pause", flush=True)
    time.sleep(pause)
    for _ in range(6): put(1301)
"""
RECEIVER = """
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("10.99.0.2", 5000))
print("ready", flush=True)
while True: print("got", len(s.recv(9000)), flush=True)
"""


@dataclass
class Lab:
    sandbox: Sandbox
    service: Service
    far: str
    statistics: Path

    def send(self, shim: bool, how: str, mode: int, pause: float = 0.0, flush: bool = True) -> Program:
        if flush:
            self.sandbox.b.ip("route", "flush", "cache")
        self.statistics.unlink(missing_ok=True)
        argv = [sys.executable, "-S", "-E", "-c", SENDER, how, str(mode), str(pause), "0.12" if shim else "0.02"]
        if not shim:
            return self.sandbox.start(self.sandbox.b, argv)
        argv = self.service.run_argv(argv, profile="none", VMA_STATS_FILE=str(self.statistics))
        return self.sandbox.start(self.sandbox.b, argv, env=self.service.env)

    def receiver(self) -> Program:
        into = ["nsenter", f"--net=/run/netns/{self.far}"]
        program = self.sandbox.start(None, [*into, sys.executable, "-S", "-E", "-c", RECEIVER])
        program.wait_for("ready")
        return program

    def by_ring(self) -> int:
        """Datagrams that the sender's socket sent by its ring."""
        found = re.search(r"Tx Offload: \d+ / (\d+) ", self.statistics.read_text())
        assert found, self.statistics.read_text()
        return int(found[1])

    def widen(self, mtu: int) -> None:
        self.sandbox.a.ip("link", "set", "vx", "mtu", str(mtu))
        run_command("ip", "-n", self.far, "link", "set", "vy", "mtu", str(mtu))


@pytest.fixture(scope="module")
def lab(softverbs: bool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Sandbox("pmtu") as sandbox:
        far = sandbox.a.netns[:-1] + "c"
        run_command("ip", "netns", "add", far)
        sandbox.at_close(lambda: subprocess.run(["ip", "netns", "del", far], check=True, timeout=30))
        route(sandbox, far)
        with Service(sandbox, sides=[sandbox.b], softverbs=softverbs) as service:
            service.ask("config", "set", f"backend={service.backend}")
            yield Lab(sandbox, service, far, tmp_path_factory.mktemp("pmtu") / "statistics")


def route(sandbox: Sandbox, far: str) -> None:
    a, b = sandbox.sides
    link = ["link", "add", "vx", "mtu", "800", "type", "veth", "peer", "name", "vy", "mtu", "800", "netns", far]
    a.ip(*link)
    a.ip("address", "add", "10.99.0.1/24", "dev", "vx")
    a.ip("link", "set", "vx", "up")
    run_command("ip", "-n", far, "address", "add", f"{FAR}/24", "dev", "vy")
    run_command("ip", "-n", far, "link", "set", "vy", "up")
    run_command("ip", "-n", far, "route", "add", "default", "via", "10.99.0.1")
    run_command(*a.command(["sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv4.icmp_ratelimit=0"]))
    b.ip("route", "add", "10.99.0.0/24", "via", a.address)


@dataclass(frozen=True)
class Told:
    """How the six datagrams of 1300 bytes went, and whether one of 700 was sent and got after them."""

    sent: int
    refused: int
    got: int
    small: tuple[bool, bool]


def told(lab: Lab, shim: bool, how: str, mode: int) -> Told:
    receiver = lab.receiver()
    sent = lab.send(shim, how, mode).result(30)
    got = receiver.output
    receiver.close()
    small = sent.endswith("sent 700\n"), "got 700" in got
    return Told(sent.count("sent 1300"), sent.count("too long"), got.count("got 1300"), small)


_kernel: dict[tuple[str, int], Told] = {}


@pytest.mark.parametrize("how", ["connected", "unconnected"])
@pytest.mark.parametrize("mode", [WANT, DO, PROBE, INTERFACE], ids=["want", "do", "probe", "interface"])
def test_as_the_kernel_sends(lab: Lab, how: str, mode: int) -> None:
    """Two more may be lost than on the kernel, before the shim has asked."""
    if (how, mode) not in _kernel:
        _kernel[how, mode] = told(lab, False, how, mode)
    kernel, mine = _kernel[how, mode], told(lab, True, how, mode)
    for ours, theirs in ((mine.sent, kernel.sent), (mine.refused, kernel.refused), (mine.got, kernel.got)):
        assert abs(ours - theirs) <= 2, f"{mine}, the kernel: {kernel}"
    assert mine.small == kernel.small == (True, True)
    assert lab.by_ring() >= 1


def test_what_the_kernel_knows_already(lab: Lab) -> None:
    """The kernel heard it from another program's datagrams: not one is lost."""
    told(lab, False, "unconnected", WANT)
    receiver = lab.receiver()
    sender = lab.send(True, "unconnected", WANT, flush=False)
    sender.result(30)
    assert receiver.output.count("got 1300") == 6, sender.output
    receiver.close()
    assert 1 <= lab.by_ring() <= 3  # the small ones


def test_a_path_that_widens(lab: Lab) -> None:
    """When the kernel has forgotten, large datagrams go by the ring again."""
    run_command(*lab.sandbox.b.command(["sysctl", "-qw", "net.ipv4.route.mtu_expires=2"]))
    receiver = lab.receiver()
    sender = lab.send(True, "unconnected", WANT, pause=2.5)
    sender.wait_for("pause")
    assert receiver.output.count("got 1300") >= 3
    lab.widen(1500)
    sender.result(30)
    assert receiver.output.count("got 1301") == 6, sender.output
    receiver.close()
    assert lab.by_ring() >= 6
    lab.widen(800)
    run_command(*lab.sandbox.b.command(["sysctl", "-qw", "net.ipv4.route.mtu_expires=600"]))
