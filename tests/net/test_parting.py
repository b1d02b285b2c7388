"""UDP sockets whose flow goes home while threads send by their rings: what entitles those to send goes last, and
nothing is lost, or overtaken. Many go together."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from net.service_lab import Api, compiled, module_pair, module_services, udp_echo, under_shim, until  # noqa: F401

from vmahybrid.bench.served import Service, tool

pytestmark = pytest.mark.root

PORT, THREADS = 7481, 4
GROUP = "239.77.0.7"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory, "parting.c", "-pthread")


@pytest.fixture(scope="module")
def peer(service: Service) -> Iterator[str]:
    side = service.sandbox.b
    server = service.sandbox.start(side, [sys.executable, "-c", udp_echo(PORT), side.address])
    until(lambda: "ready" in server.output, 10.0)
    yield side.address
    server.stop()


def run(service: Service, program: Path, peer: str, how: str, lanes: dict[str, str],
        act: Callable[[subprocess.Popen[str]], None]) -> None:
    """The sockets are on rings when ``act`` is called; no answer may be lost, or behind a later one."""
    argv = under_shim(service, [str(program), peer, str(PORT), how, str(THREADS)], VMA_RX_POLL="0", **lanes)
    with subprocess.Popen(service.sandbox.a.command(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                          env=os.environ | service.env) as running:
        try:
            assert running.stdout and running.stdout.readline() == "ready\n"
            on_rings = [flow for flow in Api(service).socket_flows() if flow["action"] == "ring"]
            assert len(on_rings) == THREADS, on_rings
            act(running)
            out, _ = running.communicate("end\n", timeout=30)
        finally:
            running.kill()
    assert running.returncode == 0
    questions, lost, late = map(int, out.split())
    assert (lost, late) == (0, 0), questions


def forks(count: int) -> Callable[[subprocess.Popen[str]], None]:
    def fork(running: subprocess.Popen[str]) -> None:
        assert running.stdin and running.stdout
        for _ in range(count):
            running.stdin.write("fork\n")
            running.stdin.flush()
            assert running.stdout.readline() == "forked\n"
            time.sleep(0.4)     # they come back after 0.2 s

    return fork


RX, TX = {"VMA_RING_ALLOCATION_LOGIC_RX": "10"}, {"VMA_RING_ALLOCATION_LOGIC_TX": "10"}
# where one ring has all to itself it has no veth, and so nobody who looks at what it sends
LANES: dict[str, dict[str, str]] = {"one": {}, "receive": RX, "send": TX, "both": RX | TX}


@pytest.mark.parametrize("lanes", LANES)
def test_forks(service: Service, program: Path, peer: str, lanes: str) -> None:
    run(service, program, peer, "ask", LANES[lanes], forks(3))


@pytest.mark.parametrize("lanes", ["one", "receive"])
def test_what_comes_meanwhile_is_in_order(service: Service, program: Path, peer: str, lanes: str) -> None:
    """Also when they come back: what the kernel has is older than what comes by the ring."""
    run(service, program, peer, "flow", LANES[lanes], forks(10))


@pytest.mark.parametrize("lanes", LANES)
def test_the_operator_takes_them_home(service: Service, program: Path, peer: str, lanes: str) -> None:
    def home(running: subprocess.Popen[str]) -> None:
        pid = Api(service).socket_flows()[0]["pid"]
        subprocess.run([tool("vmahybrid"), "home", str(pid)], env=os.environ | service.env, check=True,
                       stdout=subprocess.DEVNULL, timeout=20)
        assert not any(flow["action"] == "ring" for flow in Api(service).socket_flows())
        time.sleep(0.3)

    run(service, program, peer, "ask", LANES[lanes], home)


FORKS = """
import os, socket, sys, time
sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(int(sys.argv[3]))]
for s in sockets:
    s.connect((sys.argv[1], int(sys.argv[2])))
    s.send(b"question")
    assert s.recv(100) == b"question"
print("on rings", flush=True)
sys.stdin.readline()
begun = time.monotonic()
child = os.fork()
if not child:
    os._exit(0)
print(time.monotonic() - begun)
os.waitpid(child, 0)
for s in sockets:
    s.send(b"question")
    assert s.recv(100) == b"question"
"""


def fork_with(service: Service, peer: str, sockets: int) -> float:
    """How long it takes a program with so many on rings."""
    argv = under_shim(service, [sys.executable, "-c", FORKS, peer, str(PORT), str(sockets)], VMA_RX_POLL="0")
    with subprocess.Popen(service.sandbox.a.command(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                          env=os.environ | service.env) as running:
        try:
            assert running.stdout and running.stdout.readline() == "on rings\n"
            assert len([flow for flow in Api(service).socket_flows() if flow["action"] == "ring"]) == sockets
            out, _ = running.communicate("\n", timeout=30)
        finally:
            running.kill()
    assert running.returncode == 0
    return float(out)


def test_many_go_together(service: Service, peer: str) -> None:
    few, many = (min(fork_with(service, peer, sockets) for _ in range(3)) for sockets in (2, 100))
    assert many < 25 * few      # one after the other: 50 times as long


SENDS = """
import socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(sys.argv[3]))
for number in range(6):
    s.sendto(str(number).encode(), (sys.argv[1], int(sys.argv[2])))
time.sleep(0.3)
"""
MEMBERS = """
import os, socket, sys, time
members = []
for _ in range(2):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind(("", int(sys.argv[1])))
    addresses = socket.inet_aton(sys.argv[2]) + socket.inet_aton(sys.argv[3])
    s.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, addresses)
    s.setblocking(False)
    members.append(s)
print("ready", flush=True)
sys.stdin.readline()
child = os.fork()
if not child:
    os._exit(0)
os.waitpid(child, 0)
time.sleep(0.1)
for s in members:
    got = []
    try:
        while True:
            got.append(s.recv(100).decode())
    except BlockingIOError:
        print(*got)
"""


def test_two_members_of_a_group(service: Service) -> None:
    """Each has what was unread when the program forked once."""
    a, b = service.sandbox.sides
    argv = under_shim(service, [sys.executable, "-c", MEMBERS, str(PORT + 1), GROUP, a.address])
    with subprocess.Popen(a.command(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                          env=os.environ | service.env) as running:
        try:
            assert running.stdout and running.stdout.readline() == "ready\n"
            assert any(flow["kind"] == "multicast" and flow["action"] == "ring" for flow in Api(service).socket_flows())
            sends = [sys.executable, "-c", SENDS, GROUP, str(PORT + 1), b.address]
            subprocess.run(b.command(sends), check=True, timeout=20)
            out, _ = running.communicate("\n", timeout=20)
        finally:
            running.kill()
    assert out.splitlines() == ["0 1 2 3 4 5"] * 2
