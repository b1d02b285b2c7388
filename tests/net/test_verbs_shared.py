"""Two programs with sockets on one port: each gets what the kernel would give it, whatever carries the rings."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from net.service_lab import Api, until

from vmahybrid.bench.sandbox import Program, Sandbox
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root
A, B, PORT, PEER = "10.77.0.1", "10.77.0.2", 7800, 4242
RECEIVE = f"""
import json, socket, sys
local, remote = sys.argv[1:]
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
sock.bind((local, {PORT}))
if remote:
    sock.connect((remote, {PEER}))
print('"bound"', flush=True)
got = []
while not got or got[-1] != "end":
    got.append(sock.recv(100).decode())
print(json.dumps(got), flush=True)
"""
SEND = f"""
import socket
for port, what in ({PEER}, "connected"), ({PEER} + 1, "other"):
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("{B}", port))
    for said in [f"{{what}}{{n}}" for n in range(5)] + ["end"]:
        sock.sendto(said.encode(), ("{A}", {PORT}))
"""


@pytest.fixture
def served(netns_pair: Sandbox, softverbs: bool) -> Iterator[Service]:
    with Service(netns_pair, softverbs=softverbs) as service:
        yield service


def receiver(service: Service, local: str, remote: str = "") -> Program:
    program = service.sandbox.start(
        service.sandbox.a, service.run_argv([sys.executable, "-S", "-E", "-c", RECEIVE, local, remote], "none"),
        env=service.env)
    program.wait_for('"bound"')
    return program


def explained(service: Service, program: Program) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = Api(service).call("GET", f"/v1/sockets/{program.pid}/explain")[1]["steps"]
    return steps


@pytest.mark.parametrize("first", ["broad", "connected"])
def test_a_connected_socket_beside_one_that_is_not(served: Service, softverbs: bool, first: str) -> None:
    if first == "broad":
        broad, connected = receiver(served, A), receiver(served, "0.0.0.0", B)
    else:
        connected, broad = receiver(served, "0.0.0.0", B), receiver(served, A)
    on_rings = {connected.pid} if softverbs else {connected.pid, broad.pid}  # softverbs can't tell them apart
    until(lambda: {flow["pid"] for flow in Api(served).socket_flows() if flow["rules"]} == on_rings, 5.0)
    if softverbs:
        until(lambda: "conflict" in [step["reason"] for step in explained(served, broad)], 5.0)
    served.sandbox.start(served.sandbox.b, [sys.executable, "-S", "-E", "-c", SEND]).result(10)
    for program, what in (connected, "connected"), (broad, "other"):
        assert json.loads(program.result(10).splitlines()[-1]) == [f"{what}{n}" for n in range(5)] + ["end"]
