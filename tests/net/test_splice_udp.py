"""splice() from a UDP socket: what a ring has delivered already is the kernel's to read, too."""

from __future__ import annotations

import sys

import pytest
from net.service_lab import module_pair, module_services, udp_from  # noqa: F401

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

PORT = 7431
PROGRAM = """
import os, socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind((sys.argv[1], int(sys.argv[2])))
print("bound", flush=True)
print(s.recv(100).decode(), flush=True)
while not s.recv(100, socket.MSG_PEEK):
    pass
print("there", flush=True)
time.sleep(1)  # "third" comes, too, and stays unread
r, w = os.pipe()
print(os.read(r, os.splice(s.fileno(), w, 100)).decode(), flush=True)
print(s.recv(100).decode(), flush=True)
"""


def test_unread_datagrams(service: Service, netns_pair: Sandbox) -> None:
    a, b = netns_pair.sides
    argv = service.run_argv([sys.executable, "-S", "-E", "-c", PROGRAM, a.address, str(PORT)], "latency")
    program = netns_pair.start(a, argv, env=service.env)
    program.wait_for("bound")
    udp_from(netns_pair, b, "first", a.address, PORT)
    program.wait_for("first")
    assert service.ring_flows(program.pid)
    udp_from(netns_pair, b, "second", a.address, PORT)
    program.wait_for("there")
    udp_from(netns_pair, b, "third", a.address, PORT)
    program.wait_for("second")
    program.wait_for("third")
    program.result(10)
