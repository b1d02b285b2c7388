"""Connections on rings over a wire with faults: every byte arrives, in order, both ways, whoever is under the shim.

The stack alone, over a wire made of memory, is in tests/unit/c/test_tcp_faults.c."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from net.service_lab import Api
from net.test_tcp_shim import ShimPeer, end_of_stream, introduce, on_ring, over, with_ipv6
from net.test_tcp_syn import Calls, know, listening
from net.wire_lab import Faults, WireSandbox

from vmahybrid.bench.served import Service

pytestmark = [pytest.mark.root, pytest.mark.timeout(90)]

MOVES = Path(__file__).with_name("tcp_moves_program.py")
DUPLEX = Path(__file__).with_name("tcp_duplex.py")
SERVERS = Path(__file__).parents[1] / "apps" / "tcp_servers.py"
WHO = ["client", "server", "both"]
CASES = {
    "loss 1 %": (Faults(loss=0.01), 2_000_000),
    "loss 5 %": (Faults(loss=0.05), 600_000),
    "loss 20 %": (Faults(loss=0.2), 80_000),
    "reordering": (Faults(reorder=0.05), 2_000_000),
    "duplication": (Faults(duplicate=0.1), 2_000_000),
    "all of it": (Faults(loss=0.02, reorder=0.03, duplicate=0.03), 600_000),
}


@pytest.fixture(scope="module")
def wire() -> Iterator[WireSandbox]:
    with WireSandbox("wire") as made:
        yield made


@pytest.fixture(scope="module")
def service(wire: WireSandbox) -> Iterator[Service]:
    with Service(with_ipv6(wire)) as running:
        introduce(wire)
        know(wire, "6")
        yield running


def stream(service: Service, wire: WireSandbox, who: str, faults: Faults, size: int,
           **variables: str) -> dict[str, int]:
    """Bytes there and back over the bad wire, compared; what the wire did."""
    policies = {name: "offload" if who in (name, "both") else "" for name in ("client", "server")}
    with (ShimPeer(service, wire.b, policies["server"], **variables) as b,
          ShimPeer(service, wire.a, policies["client"], **variables) as a):
        port = b.do("listen", address=wire.b.address)
        b.do("waits")
        a.do("connect", address=wire.b.address, port=port)
        b.do("accept")
        b.do("echo")
        assert a.do("ask", count=3, size=100) == ""
        on_ring(service, *[peer for peer, name in ((a, "client"), (b, "server")) if policies[name]])
        with wire.bad(faults) as counts:
            assert a.do("bulk", 60, size=size) == ""
        end_of_stream(a, b, service)
    return counts


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("case", CASES)
def test_a_stream_both_ways(service: Service, wire: WireSandbox, case: str, who: str) -> None:
    faults, size = CASES[case]
    counts = stream(service, wire, who, faults, size)
    for count, share in (("lost", faults.loss), ("doubled", faults.duplicate), ("late", faults.reorder)):
        assert counts[count] >= counts["frames"] * share / 3, counts


@pytest.mark.parametrize("who", WHO)
def test_reordering_is_no_loss(service: Service, wire: WireSandbox, who: str) -> None:
    """Over 5 ms each way: taken for losses, each 20th frame late would leave a tenth of the rate. With timestamps,
    as the kernel's connection has them: without, it is as slow itself."""
    took = {}
    for way in ("", who):
        began = time.monotonic()
        stream(service, wire, way, Faults(reorder=0.05, length=0.005), 12_000_000, VMA_TCP_TIMESTAMP_OPTION="2")
        took[way] = time.monotonic() - began
    assert took[who] < 2 * took[""] + 2, took


@pytest.mark.parametrize("who", WHO)
def test_corruption(service: Service, wire: WireSandbox, who: str) -> None:
    """Of what a ring sends and of what it gets: by the checksum, on a virtual interface too, where that of a local
    kernel may be of the addresses alone."""
    counts = stream(service, wire, who, Faults(corrupt_a=0.03, corrupt_b=0.03), 1_000_000)
    assert counts["corrupted"] > 10, counts


@pytest.mark.parametrize("who", WHO)
def test_connections_open_and_close_over_a_bad_wire(service: Service, wire: WireSandbox, who: str) -> None:
    """SYNs, FINs and their answers are lost, doubled and late, too."""
    with Calls(service, wire.b, who in ("server", "both")) as b, Calls(service, wire.a, who in ("client", "both")) as a:
        port = listening(b, wire.b)
        b.do("serve", name="l")
        with wire.bad(Faults(loss=0.05, duplicate=0.1, reorder=0.1), seed=7) as counts:
            assert a.do("visits", 60, address=wire.b.address, port=port, count=20) == 20
        assert counts["lost"] and counts["doubled"] and counts["late"], counts


@pytest.mark.parametrize("peer", ["kernel", "offloaded"])
def test_moves_at_random_moments(service: Service, wire: WireSandbox, peer: str) -> None:
    """Bytes both ways, losses and reordering, a connection that is adopted or begins on the ring, and goes home in the
    midst of it: VMH_TCP_MOVES (1000) of both at least; the stack's and the service's own thousands are in
    tests/unit/c/test_tcp_move.c and tests/net/test_tcprepair.py."""
    moves = int(os.environ.get("VMH_TCP_MOVES", "1000"))
    connections = moves * 11 // 5   # three of five are adopted, and of some the first call is the dup()
    variables = {"VMA_HYBRID_TCP": "offload", "VMA_HYBRID_TCP_BUDGET": "100", "VMA_RX_POLL": "0",
                 "VMA_TRACELEVEL": "warn"}
    server = [sys.executable, str(SERVERS), "threads", wire.b.address, "7900"]
    if peer == "offloaded":
        server = service.run_argv(server, profile="none", **variables)
    serving = wire.start(wire.b, server, env=service.env)
    serving.wait_for("ready")
    before = Api(service).status()["counters"]
    program = [sys.executable, str(MOVES), wire.b.address, "7900", str(connections), str(moves)]
    try:
        with wire.bad(Faults(loss=0.01, reorder=0.02), seed=moves) as counts:
            running = wire.start(wire.a, service.run_argv(program, profile="none", **variables), env=service.env)
            said = running.result(300)
    finally:
        serving.stop(signal.SIGKILL)
    after = Api(service).status()["counters"]
    done = {name: after[name] - before.get(name, 0) for name in ("tcp_taken_total", "tcp_homed_total")}
    print(said, counts, done)
    assert said.startswith(f"moved {connections} "), said
    assert done["tcp_homed_total"] >= connections * 0.75, done
    assert done["tcp_taken_total"] >= moves, done
    assert counts["lost"] > moves / 2, counts


@pytest.mark.parametrize("peer", ["kernel", "offloaded"])
@pytest.mark.parametrize(("policy", "ip", "length"), [("offload", "4", 0), ("adaptive", "4", 0), ("offload", "6", 0),
                                                      ("offload", "4", 0.01)])
def test_moves_to_and_fro(service: Service, wire: WireSandbox, peer: str, policy: str, ip: str, length: float) -> None:
    """By the operator, of both ends, in the midst of bulk both ways that has nothing to do with each other, over a wire
    that is bad: each stream is whole, and goes on. VMH_TCP_SEED (1), VMH_TCP_SECONDS (4)."""
    seed, seconds, count = int(os.environ.get("VMH_TCP_SEED", "1")), os.environ.get("VMH_TCP_SECONDS", "4"), 4
    variables = {"VMA_HYBRID_TCP": policy, "VMA_HYBRID_TCP_BUDGET": "100", "VMA_RX_POLL": "0", "VMA_TRACELEVEL": "warn"}
    chance, api, orders = random.Random(seed), Api(service), 0

    def command(role: str, shimmed: bool) -> list[str]:
        argv = [sys.executable, str(DUPLEX), role, over(wire.b, ip).address, "7901", str(count), seconds, str(seed)]
        return service.run_argv(argv, profile="none", **variables) if shimmed else argv

    server = wire.start(wire.b, command("server", peer == "offloaded"), env=service.env)
    server.wait_for("ready")
    client = wire.start(wire.a, command("client", True), env=service.env)
    ends = [(program.pid, int(fd)) for program in (client, server) if program is client or peer == "offloaded"
            for fd in program.wait_for(r"fds ([\d ]+)\n")[1].split()]
    before = api.status()["counters"]
    with wire.bad(Faults(loss=0.02, reorder=0.03, duplicate=0.02, length=length), seed=seed) as counts:
        until = time.monotonic() + float(seconds) + 1
        while time.monotonic() < until:
            pid, fd = chance.choice(ends)
            order = {"to": chance.choice(["kernel", "ring"]), "fd": fd}
            status, said = api.call("POST", f"/v1/processes/{pid}/move", order)
            assert status in (204, 404, 409), said  # it has ended, or can't move now
            orders += 1
            time.sleep(chance.choice((0, 0.001, 0.005, 0.02, 0.05)))
        came = [int(program.result(45).split()[-1]) for program in (client, server)]
    after = api.status()["counters"]
    done = {name: after[name] - before.get(name, 0) for name in ("tcp_taken_total", "tcp_homed_total")}
    print(orders, done, counts, came)
    assert done["tcp_homed_total"] >= 5 and done["tcp_taken_total"] >= 5, done
    assert min(came) > 1_000_000 and counts["lost"] > 100, (came, counts)


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_long_way(service: Service, wire: WireSandbox, way: str) -> None:
    """Buffers grow with it, as the kernel's do: 20 ms there and back, with what is under way at first half a megabyte
    to send (0.2 Gbit/s) and one to receive (0.4)."""
    def bits(policy: str) -> float:
        server = ["iperf3", "-s", "-1", "--forceflush"]
        client = ["iperf3", "-c", wire.a.address, "-t", "3", "-O", "1", "-J"]
        if way == "down":
            client.append("-R")
        if policy:
            client = service.run_argv(client, profile="none", VMA_HYBRID_TCP=policy, VMA_TRACELEVEL="warn")
        a = wire.start(wire.a, server, env=service.env)
        a.wait_for("listening")
        told = wire.start(wire.b, client, env=service.env).result(20)
        a.wait(5)
        return float(json.loads("{" + told.partition("{")[2])["end"]["sum_received"]["bits_per_second"])

    with wire.bad(Faults(length=0.01)):
        kernel, ring = bits(""), bits("offload")
    print(f"{kernel / 1e6:.0f} Mbit/s, {ring / 1e6:.0f}")
    assert ring > 0.7 * kernel
