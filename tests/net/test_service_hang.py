"""A service that hangs (SIGSTOP): what is on rings goes on, what is new is the kernel's and comes to a ring later."""

from __future__ import annotations

import signal
import sys
import time
from typing import Any

import pytest
from net.service_lab import Api, until

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service

pytestmark = [pytest.mark.root, pytest.mark.timeout(90)]

ECHO = """
import select, socket, sys, time
first = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
first.bind((sys.argv[1], 7400))
print("bound", flush=True)
while True:
    data, whence = first.recvfrom(100)
    if data == b"open":
        begun = time.monotonic()
        second = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        second.bind((sys.argv[1], 7401))
        print("opened", time.monotonic() - begun, flush=True)
    elif data == b"second":
        data, whence = second.recvfrom(100)
    first.sendto(data, whence)
"""
ASK = """
import socket, sys
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.settimeout(5)
for what in sys.argv[2:]:
    sock.sendto(what.encode(), (sys.argv[1], 7400))
    if what == "second":
        sock.sendto(b"to the second", (sys.argv[1], 7401))
    print(sock.recv(100).decode(), flush=True)
"""


def packets(flows: list[dict[str, Any]]) -> dict[int, int]:
    return {int(flow["local"].rpartition(":")[2]): flow["packets"] for flow in flows}


def test_what_is_on_rings_goes_on(netns_pair: Sandbox, softverbs: bool) -> None:
    a, b = netns_pair.sides

    def ask(*what: str) -> list[str]:
        return netns_pair.start(a, [sys.executable, "-S", "-E", "-c", ASK, b.address, *what]).result(20).splitlines()

    with Service(netns_pair, softverbs=softverbs) as service:
        argv = service.run_argv([sys.executable, "-S", "-E", "-c", ECHO, b.address], "none")
        program = netns_pair.start(b, argv, env=service.env)
        program.wait_for("bound")
        api = Api(service)
        until(lambda: [flow for flow in api.socket_flows() if flow["pid"] == program.pid and flow["rules"]], 5)
        assert ask("warm") == ["warm"]
        service.program.process.send_signal(signal.SIGSTOP)
        try:
            assert ask("open") == ["open"]   # a request that nobody answers
            assert ask(*"123456", "second", "7") == [*"123456", "to the second", "7"]
        finally:
            service.program.process.send_signal(signal.SIGCONT)
        resumed = time.monotonic()
        blocked = next(float(line.split()[1]) for line in program.output.splitlines() if line.startswith("opened"))
        assert 1 < blocked < 4
        flows = until(lambda: found if len(found := [flow for flow in api.socket_flows() if flow["rules"]]) == 2
                      and service.leads_to_ring(found[0]) and service.leads_to_ring(found[1]) else None, 10)
        before = packets(flows)
        assert set(before) == {7400, 7401}
        assert before[7400] >= 9, "they came by the kernel"
        # the answer to the request that was given up made a flow, which goes, and comes when it is asked for anew
        until(lambda: ask("second") == ["to the second"] and packets(api.socket_flows()).get(7401), 10)
        print(f"on rings {time.monotonic() - resumed:.1f} s after the service went on")
        program.stop(signal.SIGKILL)
