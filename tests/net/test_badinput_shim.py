"""Malformed messages to the control socket while programs under the shim exchange datagrams: they notice nothing."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections.abc import Iterator

import pytest
from net.control_client import Client
from net.death_lab import Lab, count, descriptors, longest_gap, progresses, summary
from net.service_lab import until

from vmahybrid import contracts
from vmahybrid.bench.sandbox import Program, Sandbox
from vmahybrid.bench.served import Service
from vmahybrid.contracts import lib

pytestmark = pytest.mark.root

PORT = 7500
SECONDS = 5.0
TYPES = [lib.VMH_MSG_HELLO, lib.VMH_MSG_RING, lib.VMH_MSG_ATTACH, lib.VMH_MSG_DETACH, lib.VMH_MSG_NEIGH,
         lib.VMH_MSG_RELEASE, lib.VMH_MSG_RING_MAPPED, lib.VMH_MSG_EVENT, lib.VMH_MSG_REPLY, 0, 77]


def header(**fields: int) -> bytes:
    size = contracts.size_of("struct vmh_msg_hdr")
    return contracts.pack("struct vmh_msg_hdr", **{"magic": lib.VMH_CTL_MAGIC, "version": lib.VMH_CTL_VERSION,
                                                    "type": lib.VMH_MSG_RING, "len": size, "seq": 1, **fields})


def nasty(rng: random.Random) -> bytes:
    """A wrong version, magic, length or type, a huge one, noise."""
    body = rng.randbytes(rng.choice((0, 1, 8, 40, 300, 1000)))
    kind = rng.choice(TYPES)
    length = contracts.size_of("struct vmh_msg_hdr") + len(body)
    return rng.choice((
        header(version=rng.choice((0, 2, 65535)), type=kind),
        header(magic=rng.getrandbits(32)),
        header(type=kind, len=length) + body,
        header(type=kind, len=rng.getrandbits(32)) + body,
        rng.randbytes(rng.randrange(1, 2000)),
        bytes(rng.choice((1, 23, 24, 1024, 1025, 60000))),
    ))


def attack(path: str, rng: random.Random) -> int:
    """One connection, well or badly begun; messages sent."""
    sent = 0
    with Client(path) as client, contextlib.suppress(OSError):
        if rng.random() < 0.5:
            client.hello()
        strange = os.open(rng.choice(("/dev/null", "/proc/self/exe", "/")), os.O_RDONLY | os.O_CLOEXEC)
        try:
            for _ in range(rng.randrange(1, 6)):
                client.send(nasty(rng), *[strange] * rng.choice((0, 0, 1, 3, 17)))
                sent += 1
        finally:
            os.close(strange)
    return sent


@pytest.fixture
def service(netns_pair: Sandbox, softverbs: bool) -> Iterator[Service]:
    with Service(netns_pair, softverbs=softverbs) as running:
        yield running


def missing(asker: Program) -> int:
    """Answers that never came. On a busy machine one may take more than the 0.1 s after which it is counted as lost."""
    return count(asker, "lost") - count(asker, "late")


def test_programs_are_not_disturbed(service: Service, netns_pair: Sandbox) -> None:
    lab = Lab(netns_pair, service)
    a, b = netns_pair.sides
    server = lab.role(b, "serve", b.address, PORT, "epoll")
    lab.on_ring(server)
    asker = lab.role(a, "ask", b.address, PORT, "block", 0.001)
    lab.on_ring(asker)
    progresses(asker)
    programs = (server, asker)
    sessions = {p["pid"]: p["session"] for p in lab.api.status()["processes"]}
    flows = {p.pid: [f["flow_id"] for f in lab.flows(p.pid)] for p in programs}
    held, before, begun, sent = len(descriptors(service.program.pid)), missing(asker), time.monotonic(), 0
    rng = random.Random(5)
    while time.monotonic() < begun + SECONDS:
        sent += attack(service.env["VMA_HYBRID_SOCKET"], rng)
    for program in programs:
        progresses(program)
        assert longest_gap(program, begun) < 0.5
    assert sent > 100
    assert until(lambda: missing(asker) == before, 3)
    status = lab.api.status()
    assert {p["pid"]: p["session"] for p in status["processes"] if p["pid"] in sessions} == sessions
    assert {p.pid: [f["flow_id"] for f in lab.flows(p.pid)] for p in programs} == flows
    assert status["counters"]["protocol_errors_total"] > 20
    assert not status["counters"].get("internal_errors_total")
    assert "refused and closed" in service.log
    deadline = time.monotonic() + 3
    while (now := len(descriptors(service.program.pid))) > held and time.monotonic() < deadline:
        time.sleep(0.05)
    assert now <= held, descriptors(service.program.pid)
    print(f"{sent} messages, {status['counters']['protocol_errors_total']} refused")
    summary("longest gap under malformed messages", [longest_gap(program, begun) for program in programs])


def test_connections_that_say_nothing(service: Service, netns_pair: Sandbox) -> None:
    """Two hundred of them, and a backlog that is full: programs start and run all the same."""
    lab = Lab(netns_pair, service)
    _, b = netns_pair.sides
    silent = []
    try:
        for _ in range(200):
            mute = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            silent.append(mute)
            mute.connect(service.env["VMA_HYBRID_SOCKET"])
        server = lab.role(b, "serve", b.address, PORT)
        lab.on_ring(server)
    finally:
        for mute in silent:
            mute.close()
    lab.plain(netns_pair.a, "ask", b.address, PORT, "block", 0.002)
    progresses(server, 5)
