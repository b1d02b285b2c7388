"""A client with a fixed port, whose server closes first and has the name in TIME_WAIT: the next connection is taken at
once, though the last one was on a ring, with a clock of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest
from net.service_lab import under_shim
from net.test_tcp_move_commands import events
from net.test_tcp_shim import without_offloads

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

ROUNDS = 400
SERVER = f"""
import socket, sys
l = socket.socket()
l.bind((sys.argv[1], 7610))
l.listen()
print("ready", flush=True)
while True:
    c, _ = l.accept()
    c.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range({ROUNDS}):
        c.sendall(c.recv(100))
    c.close()
"""
CLIENT = f"""
import json, socket, sys, time
took, server = [], (sys.argv[2], 7610)
for _ in range(8):
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    s.bind((sys.argv[1], 7611))
    begun = time.monotonic()
    while True:
        try:
            s.connect(server)
            break
        except OSError:     # the name is the last one's until the peer has acknowledged its end
            time.sleep(0.001)
    took.append(time.monotonic() - begun)
    for _ in range({ROUNDS}):
        s.sendall(b"x" * 50)
        s.recv(100)
    assert not s.recv(100)
    s.close()
print(json.dumps(took))
"""
HOT = {"VMA_HYBRID_TCP_ROUNDS": "16", "VMA_HYBRID_TCP_PAYS": "0", "VMA_HYBRID_TCP_BUDGET": "100"}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Sandbox("test") as sandbox, Service(without_offloads(sandbox)) as running:
        sandbox.start(sandbox.b, [sys.executable, "-c", SERVER, sandbox.b.address]).wait_for("ready")
        yield running


@pytest.mark.parametrize("policy", ["offload", "adaptive"])
def test_no_connect_waits(service: Service, policy: str) -> None:
    box = service.sandbox
    argv = [sys.executable, "-c", CLIENT, box.a.address, box.b.address]
    for _ in range(4):
        command = under_shim(service, argv, profile="none", VMA_HYBRID_TCP=policy, **HOT)
        program = box.start(box.a, command, env=service.env)
        took = json.loads(program.result(40))
        assert max(took[1:]) < 0.7, took
        assert any(kind == "tcp-adopted" for kind, _ in events(service, program.pid))
