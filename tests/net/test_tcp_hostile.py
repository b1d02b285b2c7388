"""Peers that vanish and peers that do not exist, with connections on rings from the SYN."""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from net.service_lab import Api, assert_same_files, module_service, open_files, resident_mib, until  # noqa: F401
from net.test_tcp_shim import bare_pair, over  # noqa: F401
from net.test_tcp_syn import Calls, Stage, known, listening, opened, stage  # noqa: F401

from vmahybrid.bench.sandbox import Program, Sandbox, Side, run_command
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

FLOOD = Path(__file__).with_name("syn_flood.py")
PER_SECOND = 5000
SYNS = 15000

SERVER = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
listener = socket.create_server((sys.argv[1], 0), family=family, backlog=16)
print("port", listener.getsockname()[1], flush=True)
while True:
    with listener.accept()[0] as connection:
        connection.sendall(connection.recv(100))
"""

# each listener in turn; seconds from the SYN to the answer, of those that are answered within a time
CLIENT = """
import json, socket, sys, time
took = [[], []]
time.sleep(0.5)
for _ in range(int(sys.argv[2])):
    for port, list in zip(sys.argv[4:], took):
        begun = time.monotonic()
        try:
            with socket.create_connection((sys.argv[1], int(port)), timeout=float(sys.argv[3])) as connection:
                connection.sendall(b"question")
                assert connection.recv(100) == b"question"
        except TimeoutError:
            continue
        list.append(time.monotonic() - begun)
    time.sleep(0.02)
print(json.dumps(took))
"""


@pytest.mark.parametrize("who", ["client", "server"])
def test_half_open(stage: Stage, who: str) -> None:  # noqa: F811
    """The peer has lost the connection without a word: it is reset when something is sent."""
    def scenario(a: Calls, b: Calls, to: Side) -> Any:
        opened(a, b, to)
        gone, there = ((b, "s"), (a, "c")) if who == "client" else ((a, "c"), (b, "s"))
        gone[0].do("vanish", name=gone[1])
        time.sleep(0.1)
        seen = [there[0].do("poll", name=there[1]), there[0].call(there[1], "send", "x")]
        seen += [there[0].do("until", name=there[1], wanted="POLLERR"), there[0].call(there[1], "send", "x")]
        return [*seen, there[0].call(there[1], "recv", 1), there[0].call(there[1], "send", "x")]

    stage.compare(scenario, who)


def test_a_name_that_is_used_again(stage: Stage) -> None:  # noqa: F811
    """The client comes back with the same port, while the server still has the connection that it lost."""
    def scenario(a: Calls, b: Calls, to: Side) -> Any:
        port = opened(a, b, to)
        own = a.call("c", "getsockname")
        a.do("vanish", name="c")
        a.do("new", name="d")
        seen = [a.call("d", "setsockopt", 1, 2, 1), a.call("d", "bind", own)]   # SO_REUSEADDR
        seen += [a.call("d", "connect", [to.address, port]), b.do("accept", name="l", new="t") == a.side.address]
        seen += [b.do("poll", name="s"), b.call("s", "recv", 1)]
        return [*seen, a.call("d", "send", "again"), b.call("t", "recv", 9)]

    stage.compare(scenario, "server")


def flood_of(sandbox: Sandbox, to: Side, ports: str, count: int) -> Program:
    """SYNs by a clock: a flood at full speed would take the processor from the others, and prove that alone."""
    argv = [sandbox.a.device, to.mac, to.address, ports, str(count), str(PER_SECOND)]
    return sandbox.start(sandbox.a, [sys.executable, "-S", str(FLOOD), *argv])


def test_syn_flood(stage: Stage) -> None:  # noqa: F811
    """Connections that are there go on meanwhile, an honest one comes in afterwards, and nothing of the flood stays."""
    sandbox = stage.sandbox
    with Calls(stage.service, sandbox.b, True) as b, Calls(stage.service, sandbox.a, False) as a:
        port = opened(a, b, sandbox.b)
        b.do("timeout", name="s", which="SO_RCVTIMEO", seconds=0.3)
        b.call("s", "recv", 1)   # a thread's first sleep makes an eventfd, which stays
        b.do("timeout", name="s", which="SO_RCVTIMEO", seconds=0)
        memory, files = resident_mib(b.pid), open_files(b.pid)
        flood, took = flood_of(sandbox, sandbox.b, str(port), SYNS), []
        b.call("l", "setblocking", False)
        while flood.running or not took:
            begun = time.monotonic()
            assert a.call("c", "send", "ping") == 4 and b.call("s", "recv", 4) == "ping"
            assert b.call("s", "send", "pong") == 4 and a.call("c", "recv", 4) == "pong"
            took.append(time.monotonic() - begun)
            assert b.do("accept", name="l", new="x") == "EAGAIN"
        assert flood.result() == f"sent {SYNS}\n"
        assert statistics.median(took) < 0.1, sorted(took)
        b.call("l", "setblocking", True)
        begun = time.monotonic()
        a.do("new", name="d")
        assert a.call("d", "connect", [sandbox.b.address, port]) is None
        assert b.do("accept", name="l", new="t") == sandbox.a.address
        assert time.monotonic() - begun < 4
        assert a.call("d", "send", "honest") == 6 and b.call("t", "recv", 9) == "honest"
        assert b.do("close", name="t") is None
        assert_same_files(b.pid, files)
        assert resident_mib(b.pid) < memory + 4


def in_a_flood(service: Service, sandbox: Sandbox, ip: str, tries: int, limit: float) -> list[list[float]]:
    """How long clients wait at a listener on a ring and at one of the kernel, to which the SYNs come in turn."""
    to = over(sandbox.b, ip)
    argv = [sys.executable, "-c", SERVER, to.address]
    on_ring = service.run_argv(argv, "none", VMA_HYBRID_TCP="offload", VMA_RX_POLL="200", VMA_TRACELEVEL="warning")
    servers = [sandbox.start(sandbox.b, on_ring, env=service.env), sandbox.start(sandbox.b, argv)]
    try:
        ports = [server.wait_for(r"port (\d+)")[1] for server in servers]
        until(lambda: [s for s in Api(service).call("GET", "/v1/sockets")[1] if s["offloaded"] and
                       s["local"].endswith(f":{ports[0]}")])
        flood = flood_of(sandbox, to, ",".join(ports), 100 * PER_SECOND)
        try:
            client = [sys.executable, "-c", CLIENT, to.address, str(tries), str(limit), *ports]
            took: list[list[float]] = json.loads(sandbox.start(sandbox.a, client).result(50))
            assert flood.running
            return took
        finally:
            flood.stop()
    finally:
        for server in servers:
            server.stop()


@pytest.mark.parametrize("ip", ["4", "6"])
def test_honest_clients_in_a_flood(service: Service, netns_pair: Sandbox, ip: str) -> None:
    """They get in, and about as soon as at the kernel's listener; a frame that a busy machine loses costs a second."""
    ring, kernel = in_a_flood(service, netns_pair, ip, 25, 5)
    assert len(ring) == len(kernel) == 25
    assert statistics.median(ring) < 2 * statistics.median(kernel) + 0.02, (sorted(ring), sorted(kernel))


def test_no_cookies(service: Service, netns_pair: Sandbox) -> None:
    """net.ipv4.tcp_syncookies=0: they wait at either."""
    sysctl = netns_pair.b.command(["sysctl", "-qw"])
    run_command(*sysctl, "net.ipv4.tcp_syncookies=0")
    try:
        ring, kernel = in_a_flood(service, netns_pair, "4", 4, 0.9)
    finally:
        run_command(*sysctl, "net.ipv4.tcp_syncookies=1")
    assert len(ring) < 2 and len(kernel) < 2, (ring, kernel)
