"""SO_TIMESTAMPNS on a ring tells when the datagram arrived, not when it was read."""

from __future__ import annotations

import sys

import pytest
from net.service_lab import Api

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service

pytestmark = [pytest.mark.apps, pytest.mark.timeout(60)]

LATE = """
import socket, struct, sys, time
SO_TIMESTAMPNS = 35
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
sock.bind((sys.argv[1], 7300))
print("bound", flush=True)
sock.recv(10)
for _ in range(3):
    time.sleep(0.3)
    data, ancillary, _, _ = sock.recvmsg(100, 200)
    seconds, nanoseconds = struct.unpack("ll", ancillary[0][2])
    print("late", seconds + nanoseconds / 1e9 - float(data), flush=True)
"""
SEND = """
import socket, sys, time
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.connect((sys.argv[1], 7300))
sock.send(b"first")
time.sleep(0.1)
for _ in range(3):
    sock.send(b"%.6f" % time.time())
    time.sleep(0.05)
"""


def test_a_stamp_is_the_time_of_arrival(netns_pair: Sandbox, softverbs: bool) -> None:
    a, b = netns_pair.sides
    with Service(netns_pair, softverbs=softverbs) as service:
        argv = service.run_argv([sys.executable, "-S", "-E", "-c", LATE, b.address], "none")
        receiver = netns_pair.start(b, argv, env=service.env)
        receiver.wait_for("bound")
        netns_pair.start(a, [sys.executable, "-S", "-E", "-c", SEND, b.address]).result(10)
        flows = [flow for flow in Api(service).socket_flows() if flow["pid"] == receiver.pid]
        late = [float(line.split()[1]) for line in receiver.result(10).splitlines() if line.startswith("late")]
    assert flows and flows[0]["packets"] == 4
    assert len(late) == 3
    assert min(late) > 0
    assert sorted(late)[1] < 0.02, late  # a millisecond where nothing else runs
