"""Connections from the SYN where local ports are scarce: as many as the kernel makes."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from net.test_tcp_shim import bare_pair, introduce, served  # noqa: F401

from vmahybrid.bench.sandbox import Sandbox, run_command
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

CLIENT = """
import socket, struct, sys, time
connections, failed = [], []
for number in range(int(sys.argv[2])):
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))    # leaves no TIME_WAIT
    try:
        one.connect((sys.argv[1], 7200 + number % 2))
        connections.append(one)
    except OSError as error:
        failed.append(f"{number}: {error.strerror}")
    time.sleep(float(sys.argv[3]))
print(len(connections), *failed, len({one.getsockname()[1] for one in connections}) <= 20, sep=", ")
"""
SERVER = """
import select, socket, sys
listeners = [socket.create_server((sys.argv[1], port), backlog=64) for port in (7200, 7201)]
print("ready", flush=True)
accepted = []
while True:
    accepted += [one.accept() for one in select.select(listeners, [], [])[0]]
"""


@pytest.fixture
def narrow(netns_pair: Sandbox) -> Iterator[Sandbox]:
    """Side a has 20 local ports, and side b takes connections at two."""
    a, b = netns_pair.sides
    introduce(netns_pair)
    before = run_command(*a.command(["sysctl", "-n", "net.ipv4.ip_local_port_range"])).split()
    server = netns_pair.start(b, [sys.executable, "-c", SERVER, b.address])
    server.wait_for("ready")
    run_command(*a.command(["sysctl", "-qw", "net.ipv4.ip_local_port_range=41000 41019"]))
    yield netns_pair
    run_command(*a.command(["sysctl", "-qw", f"net.ipv4.ip_local_port_range={' '.join(before)}"]))
    server.stop()


@pytest.mark.parametrize("pause", ["0", "0.02"], ids=["at once", "slowly"])
@pytest.mark.parametrize("count", [36, 40])
def test_as_many_as_on_the_kernel(service: Service, narrow: Sandbox, count: int, pause: str) -> None:
    """Each port has a connection to either; the internal thread may have been first to take more."""
    client = [sys.executable, "-c", CLIENT, narrow.b.address, str(count), pause]
    assert narrow.start(narrow.a, client).result().strip() == f"{count}, True"
    argv = service.run_argv(client, VMA_HYBRID_TCP="offload", VMA_TRACELEVEL="warn")
    assert narrow.start(narrow.a, argv, env=service.env).result().strip() == f"{count}, True"
