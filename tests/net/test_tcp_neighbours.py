"""Hosts that answer no ARP: who connects to them without blocking keeps none of the program's other calls waiting."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest
from net.service_lab import tcp_echo
from net.test_tcp_shim import introduce, without_offloads

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

PORT = 7420
# how long each call took at the most (s), and whether the kernel goes on with the connects
PROGRAM = """
import json, os, socket, sys, time
def took(call, *arguments):
    began = time.monotonic()
    result = call(*arguments)
    return time.monotonic() - began, result
def live():
    sock = socket.create_connection((sys.argv[1], int(sys.argv[2])))
    sock.sendall(b"a")
    assert sock.recv(1) == b"a"
    return sock
worst = dict.fromkeys(("connect", "dup", "live", "close"), 0.0)
for i in range(3):
    one = live()
    dead = [socket.socket() for _ in range(4)]
    for j, sock in enumerate(dead):
        sock.setblocking(False)
        seconds, error = took(sock.connect_ex, (f"10.77.0.{100 + 10 * i + j}", 9))
        assert error == 115, error
        worst["connect"] = max(worst["connect"], seconds)
    for name, call in (("dup", one.dup), ("live", live), ("close", one.close)):
        worst[name] = max(worst[name], took(call)[0])
    time.sleep(0.1)
print(json.dumps(worst))
"""


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Sandbox("arp") as sandbox, Service(without_offloads(sandbox)) as running:
        introduce(sandbox)
        yield running


@pytest.mark.parametrize("policy", [None, "offload", "adaptive"])
def test_hosts_that_are_not_there_delay_nothing(service: Service, policy: str | None) -> None:
    box = service.sandbox
    server = box.start(box.b, [sys.executable, "-uc", tcp_echo(PORT)])
    server.wait_for("ready")
    argv = [sys.executable, "-c", PROGRAM, box.b.address, str(PORT)]
    if policy:
        argv = service.run_argv(argv, "none", VMA_HYBRID_TCP=policy, VMA_RX_POLL="100", VMA_TRACELEVEL="warn")
    worst = json.loads(box.start(box.a, argv, env=service.env if policy else None).result(30))
    server.close()
    assert max(worst.values()) < 0.4, worst  # a request for a neighbour takes a second
