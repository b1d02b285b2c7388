"""Many connections on rings, one after another: as much memory, descriptors, rules, frames and ports as before."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from net.service_lab import Api, assert_same_files, compiled, open_files, resident_mib
from net.test_tcp_shim import introduce, without_offloads

from vmahybrid.bench.sandbox import Program, Sandbox
from vmahybrid.bench.served import Service

pytestmark = [pytest.mark.root, pytest.mark.slow]

COUNT = int(os.environ.get("VMH_TCP_CHURN", "20000"))  # in each of five turns
MIB = 1.5  # what an allocator may keep; 100,000 records of 72 bytes in TIME_WAIT would be 7
SHIM = {"VMA_HYBRID_TCP": "offload", "VMA_TRACELEVEL": "warn", "VMA_RX_POLL": "200"}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory, "tcp_churn.c")


@pytest.fixture
def service() -> Iterator[Service]:
    with Sandbox("churn") as sandbox, Service(without_offloads(sandbox)) as running:
        introduce(sandbox)
        yield running


def turn(client: Program, number: int) -> None:
    client.process.send_signal(signal.SIGUSR1)
    client.wait_for(rf"(done {COUNT}\n){{{number}}}", 60)


def frames(service: Service) -> dict[int, tuple[int, int]]:
    """Of the rings' counters, by process: what no descriptor was there for, and what was dropped."""
    rings = Api(service).call("GET", "/v1/rings")[1]
    return {ring["pid"]: (ring["kernel"].get("rx_fill_ring_empty_descs", 0), ring["kernel"].get("rx_dropped", 0))
            for ring in rings}


def by_ring(service: Service) -> dict[int, int]:
    """Packets that the rules of each process led to its ring."""
    flows = [flow for flow in Api(service).socket_flows() if flow["action"] == "ring"]
    return {pid: sum(flow["packets"] for flow in flows if flow["pid"] == pid) for pid in {f["pid"] for f in flows}}


def test_nothing_is_left_of_many_connections(service: Service, program: Path) -> None:
    a, b = service.sandbox.sides
    words = [str(program), "server", b.address, "7000"]
    server = service.sandbox.start(b, service.run_argv(words, profile="none", **SHIM), env=service.env)
    server.wait_for("ready")
    words = [str(program), "client", b.address, "7000", str(COUNT)]
    client = service.sandbox.start(a, service.run_argv(words, profile="none", **SHIM), env=service.env)
    client.wait_for("ready")
    turn(client, 1)  # every port that is kept has been used now, every pool has its size
    Api(service).status(), frames(service), by_ring(service)  # the first answers take memory that stays
    files = {program.pid: open_files(program.pid) for program in (client, server, service.program)}
    memory = {pid: resident_mib(pid) for pid in files}
    flows = sorted((flow["pid"], flow["kind"], flow["local"], flow["remote"]) for flow in Api(service).socket_flows())
    held, carried = frames(service), by_ring(service)
    moved = Api(service).status()["counters"]
    begun = time.monotonic()
    for number in range(2, 6):
        turn(client, number)
    print(f"{4 * COUNT / (time.monotonic() - begun):.0f} connections a second")
    for pid, before in files.items():
        assert_same_files(pid, before)
    grown = {pid: resident_mib(pid) - was for pid, was in memory.items()}
    assert max(grown.values()) < MIB, grown
    assert flows == sorted((flow["pid"], flow["kind"], flow["local"], flow["remote"])
                           for flow in Api(service).socket_flows())
    assert frames(service) == held
    # each brings the server a SYN, an ACK or data, a FIN, and all came by the rules
    assert by_ring(service)[server.pid] - carried[server.pid] >= 4 * COUNT * 3
    now = Api(service).status()["counters"]
    for name in ("tcp_taken_total", "tcp_homed_total"):  # all were on rings, from their SYNs to their ends
        assert now.get(name, 0) == moved.get(name, 0)


@pytest.mark.parametrize(("way", "count"), [("reset", 5000), ("refused", 5000), ("home", 1000)])
def test_nothing_is_left_of_those_that_end_otherwise(service: Service, program: Path, way: str, count: int) -> None:
    """Go home to the kernel, are reset, or refused: no memory, no descriptor, no rule."""
    a, b = service.sandbox.sides
    words = [str(program), "server", b.address, "7000"]
    service.sandbox.start(b, words).wait_for("ready")   # on the kernel: one process less whose memory moves
    words = [str(program), "client", b.address, "7000", str(count), way]
    client = service.sandbox.start(a, service.run_argv(words, profile="none", **SHIM), env=service.env)
    client.wait_for("ready")

    def turns(number: int) -> None:
        client.process.send_signal(signal.SIGUSR1)
        client.wait_for(rf"(done {count}\n){{{number}}}", 60)

    turns(1)
    Api(service).status(), Api(service).socket_flows()
    files = [*open_files(client.pid), "anon_inode"]     # eventfd, made when a thread sleeps for the first time
    memory = {pid: resident_mib(pid) for pid in (client.pid, service.program.pid)}
    moved, carried = Api(service).status()["counters"], by_ring(service)
    for number in (2, 3):
        turns(number)
    assert_same_files(client.pid, files)
    grown = {pid: resident_mib(pid) - was for pid, was in memory.items()}
    homed = Api(service).status()["counters"].get("tcp_homed_total", 0) - moved.get("tcp_homed_total", 0)
    if way == "home":
        assert homed >= 2 * count
    else:  # each is brought at least a SYN|ACK or a RST, by a rule of the client's
        assert by_ring(service)[client.pid] - carried[client.pid] >= 2 * count
    assert max(grown.values()) < MIB, grown
