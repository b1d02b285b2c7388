"""A thread waits in recv() for datagrams that the kernel alone has, when its socket may come to a ring."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from net.service_lab import Api, until

from vmahybrid.bench.sandbox import Program, Sandbox
from vmahybrid.bench.served import Service

pytestmark = [pytest.mark.root, pytest.mark.timeout(60)]

PORT = 7493
GROUP = "239.7.7.7"
# When the file is there, it has another socket.
AGAIN = """
print("ready", flush=True)
while not os.path.exists(go):
    time.sleep(0.02)
other = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
other.bind((address, 0))
print("again", flush=True)
"""
# Sends back what comes
SERVER = f"""
import os, socket, struct, sys, threading, time
address, go, groups = sys.argv[1:]
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("0.0.0.0" if groups else address, {PORT}))
for number in map(int, groups.split()):
    s.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP,
                 struct.pack("4s4si", socket.inet_aton("{GROUP}"), bytes(4), number))
def serve():
    while True:
        data, who = s.recvfrom(100)
        s.sendto(data, who)
threading.Thread(target=serve, daemon=True).start()
{AGAIN}
time.sleep(60)
"""
# How long it waits, when it may come to a ring meanwhile
TIMED = f"""
import os, socket, struct, sys, threading, time
address, go, _ = sys.argv[1:]
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind((address, {PORT}))
s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 4, 0))
took = []
def wait():
    begun = time.monotonic()
    try:
        s.recv(1)
    except BlockingIOError:
        took.append(time.monotonic() - begun)
thread = threading.Thread(target=wait)
thread.start()
{AGAIN}
thread.join()
print(3.9 < took[0] < 5.5, flush=True)
"""
CLIENT = f"""
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind((sys.argv[1], 0))
s.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(sys.argv[1]))
s.settimeout(3)
for n in range(20):
    s.sendto(b"%d" % n, (sys.argv[2], {PORT}))
    assert s.recv(100) == b"%d" % n, n
print("done", flush=True)
"""


def ask(sandbox: Sandbox, address: str) -> None:
    client = sandbox.start(sandbox.a, [sys.executable, "-c", CLIENT, sandbox.a.address, address])
    assert client.result(30) == "done\n"


def start(service: Service, profile: str, go: Path, groups: str = "", program: str = SERVER) -> Program:
    b = service.sandbox.b
    argv = service.run_argv([sys.executable, "-c", program, b.address, str(go), groups], profile)
    started = service.sandbox.start(b, argv, env=service.env)
    started.wait_for("ready", 15)
    return started


def comes(service: Service, program: Program, go: Path) -> None:
    service.start()
    time.sleep(1)   # who was told that there is none asks again then
    go.touch()
    program.wait_for("again", 10)


def of_port(service: Service, what: str, server: Program) -> list[dict[str, Any]]:
    return [one for one in Api(service).call("GET", f"/v1/{what}")[1]
            if one["pid"] == server.pid and one["local"].endswith(f":{PORT}")]


def on_ring(service: Service, server: Program) -> list[dict[str, Any]]:
    return of_port(service, "flows", server)


@pytest.mark.parametrize("profile", ["none", "adaptive", "latency"])
def test_the_service_comes_later(netns_pair: Sandbox, softverbs: bool, tmp_path: Path, profile: str) -> None:
    """The first datagrams are the kernel's. When one has ended that wait the socket comes to a ring."""
    with Service(netns_pair, softverbs=softverbs) as service:
        service.program.stop(signal.SIGTERM, 10)
        server = start(service, profile, tmp_path / "go")
        ask(netns_pair, netns_pair.b.address)
        comes(service, server, tmp_path / "go")
        until(lambda: [sock["reason"] for sock in of_port(service, "sockets", server)] == ["receiver-waits"], 5)
        ask(netns_pair, netns_pair.b.address)
        until(lambda: on_ring(service, server), 5)
        ask(netns_pair, netns_pair.b.address)
        server.close()


@pytest.mark.parametrize("profile", ["none", "adaptive", "latency"])
def test_a_group_of_loopback_as_well(netns_pair: Sandbox, softverbs: bool, tmp_path: Path, profile: str) -> None:
    number = netns_pair.b.ip("-o", "link", "show", "dev", netns_pair.b.device).split(":")[0]
    with Service(netns_pair, softverbs=softverbs) as service:
        for groups in (f"{number} 1", f"1 {number}"):
            server = start(service, profile, tmp_path / "go", groups)
            ask(netns_pair, GROUP)
            assert on_ring(service, server)
            server.close()


def test_no_timeout_begins_anew(netns_pair: Sandbox, softverbs: bool, tmp_path: Path) -> None:
    with Service(netns_pair, softverbs=softverbs) as service:
        service.program.stop(signal.SIGTERM, 10)
        program = start(service, "none", tmp_path / "go", program=TIMED)
        comes(service, program, tmp_path / "go")
        assert program.result(20) == "ready\nagain\nTrue\n"
