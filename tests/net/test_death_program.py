"""kill -9 of programs under the shim while datagrams come in: nothing of them stays, the others go on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from net.death_lab import (
    Lab,
    count,
    gone_within,
    kill9,
    longest_gap,
    progresses,
    stats_page,
    summary,
)

from vmahybrid.bench.sandbox import Program, Sandbox
from vmahybrid.bench.served import Service

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(300)]

TIMES = 20
WITHIN = 1.0  # seconds, the issue's
PORT = 7100


@pytest.fixture(scope="module")
def served(softverbs: bool) -> Iterator[Lab]:
    """One service for all of them."""
    with Sandbox("death") as sandbox, Service(sandbox, softverbs=softverbs) as service:
        yield Lab(sandbox, service)


@pytest.fixture
def lab(served: Lab) -> Iterator[Lab]:
    yield served
    served.end_programs()


def held(lab: Lab, program: Program) -> list[str]:
    """What is there because of the program: by the service's word and by the kernel's."""
    found = [f"flow {flow['local']}" for flow in lab.api.status()["flows"] if flow["pid"] == program.pid]
    found += [f"ring {ring['ring_id']}" for ring in lab.api.call("GET", "/v1/rings")[1] if ring["pid"] == program.pid]
    found += [f"process {program.pid}" for process in lab.api.status()["processes"] if process["pid"] == program.pid]
    found += [str(stats_page(program.pid))] if stats_page(program.pid).exists() else []
    return found


@pytest.mark.parametrize("place", [1, 2])
def test_twenty_times(lab: Lab, place: int) -> None:
    """One port, twenty programs after each other, a sender on the kernel that never stops.

    The second place: another program has the interface's own queue, so each of the twenty gets a ring veth."""
    a, b = lab.sandbox.sides
    kind = lab.kinds(place)[-1]
    neighbours = [lab.role(b, "serve", b.address, PORT + 1)]
    lab.on_ring(*neighbours)
    if place == 1:  # it was there for what stays with the interface: the far end of its own queue
        killed = kill9(neighbours[0])
        gone_within(WITHIN, killed, lambda: held(lab, neighbours[0]), "killed program")
        gone_within(WITHIN, killed, lambda: [name for name in lab.memory_files() if "umem" in name], "its memory")
        neighbours = []
    lab.plain(a, "send", b.address, PORT, "block", 0.0003).wait_for("sending")
    quiet_maps, quiet_memory, quiet_links = lab.maps(), lab.memory_files(), lab.links()
    gone, again = [], []
    for _ in range(TIMES):
        begun = time.monotonic()
        program = lab.role(b, "sink", b.address, PORT)
        lab.on_ring(program)
        again.append(time.monotonic() - begun)
        progresses(program)
        assert lab.ring_kinds(program.pid) == [kind]
        assert stats_page(program.pid).exists()
        busy = lab.maps()
        assert busy["rules3"] == quiet_maps.get("rules3", 0) + 1
        for name, of_kinds in (("xsks", ["direct"]), ("rin_xsks", ["direct", "veth"])):  # direct: both ways in
            assert busy.get(name, 0) == quiet_maps.get(name, 0) + (kind in of_kinds)
        assert len(lab.memory_files()) == len(quiet_memory) + (kind != "verbs")
        assert (lab.links() != quiet_links) == (kind == "veth")

        killed = kill9(program)
        gone.append(gone_within(WITHIN, killed, lambda program=program: held(lab, program), "killed program"))
        left = [lambda: lab.memory_files()[len(quiet_memory):], lambda: lab.ring_veths() if lab.links() != quiet_links
                else [], lambda: {} if lab.maps() == quiet_maps else lab.maps()]
        gone.append(max(gone_within(WITHIN, killed, look, "of a killed program") for look in left))
    summary(f"kill -9 of a program, {kind} ring: all of it gone", gone)
    summary(f"the port on the ring of the next process, {kind}", again)
    for neighbour in neighbours:
        assert lab.flows(neighbour.pid)
    progresses(lab.plain(b, "sink", b.address, PORT))  # no rule of the dead takes the kernel's datagrams
    assert "internal error" not in " ".join(lab.api.status()["health"])


def test_flows_command_forgets_it(lab: Lab) -> None:
    """What the issue names: `vmahybrid flows`."""
    _, b = lab.sandbox.sides
    program = lab.role(b, "sink", b.address, PORT)
    lab.on_ring(program)
    assert len(lab.service.ring_flows(program.pid)) == 1
    killed = kill9(program)
    gone_within(WITHIN, killed, lambda: held(lab, program), "killed program")
    assert lab.service.ring_flows(program.pid) == []


def test_three_programs_and_the_first_dies(lab: Lab) -> None:
    """The first has the interface's queue, the others ring veths. They do not notice its death."""
    a, b = lab.sandbox.sides
    servers = [lab.role(b, "serve", b.address, PORT + n, waiting) for n, waiting in enumerate(("block", "poll"))]
    lab.on_ring(*servers)
    third = lab.role(b, "serve", b.address, PORT + 2, "epoll")
    lab.on_ring(third)
    servers.append(third)
    askers = [lab.plain(a, "ask", b.address, PORT + n, "block", 0.002) for n in range(3)]
    for asker in askers:
        progresses(asker, 5)
    kinds = [lab.ring_kinds(server.pid) for server in servers]
    assert sorted(kinds) == [[kind] for kind in lab.kinds(3)]
    which = kinds.index(lab.kinds(1))
    first = servers.pop(which)
    orphan = askers.pop(which)
    lost = [count(asker, "lost") for asker in askers]
    killed = kill9(first)
    time.sleep(2)
    gaps = []
    for server, asker, before in zip(servers, askers, lost, strict=True):
        progresses(asker)
        assert count(asker, "lost") == before
        assert lab.flows(server.pid), lab.why(server)
        gaps.append(longest_gap(asker, killed))
        assert gaps[-1] < 0.5
    summary("the others' longest gap at the death of the first", gaps)
    # its place is free: the next one gets the interface's queue
    fourth = lab.role(b, "serve", b.address, PORT + which, "select")
    lab.on_ring(fourth)
    assert lab.ring_kinds(fourth.pid) == lab.kinds(1)
    progresses(orphan, 5)


def test_both_ends_and_a_third_under_the_shim(lab: Lab) -> None:
    """Two servers and both of their clients in the sandbox, each on a ring of its own, four at once."""
    a, b = lab.sandbox.sides
    servers = [lab.role(b, "serve", b.address, PORT + n, waiting) for n, waiting in enumerate(("epoll", "block"))]
    lab.on_ring(*servers)
    askers = [lab.role(a, "ask", b.address, PORT + n, waiting, 0.002) for n, waiting in enumerate(("poll", "block"))]
    lab.on_ring(*askers)
    for program in (*servers, *askers):
        progresses(program, 5)
    for side in ((servers[0], servers[1]), (askers[0], askers[1])):
        assert sorted(lab.ring_kinds(p.pid)[0] for p in side) == lab.kinds(2)
    begun = time.monotonic()
    lost = [count(asker, "lost") for asker in askers]
    time.sleep(2)
    assert [count(asker, "lost") for asker in askers] == lost
    assert [count(server, "back") for server in servers] == [0, 0]
    packets = {flow["pid"]: flow["packets"] for flow in lab.flows()}
    for program in (*servers, *askers):
        assert packets[program.pid] > 100, f"{program.argv[-5:]}: not by the ring. {lab.why(program)}"
    summary("four programs on rings: longest gap", [longest_gap(asker, begun) for asker in askers])
    assert Path(f"/proc/{lab.service.program.pid}").exists()
