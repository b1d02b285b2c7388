"""The service dies or stops while programs exchange datagrams on rings: nobody waits, all come back by themselves."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest
from net.death_lab import Lab, all_progress, count, kill9, longest_gap, stats_page, summary, until, xdp_program

from vmahybrid.bench.sandbox import Program, Sandbox
from vmahybrid.bench.served import Service

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(400)]

TIMES = 10  # on each kind of rings
GAP = 2.0    # seconds, the longest that a program may wait, with its retries; a tenth where nothing else runs
BACK = 10.0  # seconds until the programs are on rings of the next service; half a second where nothing else runs
PORT = 7200


@pytest.fixture
def lab(netns_pair: Sandbox, softverbs: bool) -> Iterator[Lab]:
    lab = Lab(netns_pair, Service(netns_pair, softverbs=softverbs))
    lab.service.start()
    try:
        yield lab
    finally:
        lab.service.kill()


def start_pairs(lab: Lab, waitings: list[tuple[str, str]]) -> tuple[list[Program], list[Program]]:
    """Servers on side b and their clients on side a, all on rings."""
    a, b = lab.sandbox.sides
    servers = [lab.role(b, "serve", b.address, PORT + n, way) for n, (way, _) in enumerate(waitings)]
    lab.on_ring(*servers)
    askers = [lab.role(a, "ask", b.address, PORT + n, way, 0.002) for n, (_, way) in enumerate(waitings)]
    lab.on_ring(*askers)
    all_progress([*servers, *askers], 5)
    return servers, askers


def nothing_left(lab: Lab, links: dict[str, set[str]], programs: list[Program]) -> None:
    for side in lab.sandbox.sides:
        until(lambda side=side: xdp_program(side) is None, 1.0, f"an XDP program on {side.interface}")
    until(lambda: lab.links() == links, 1.0, "a link is left")
    assert [str(path) for path in lab.service.rundir.iterdir()] == []
    for program in programs:
        program.stop(signal.SIGKILL)
        stats_page(program.pid).unlink(missing_ok=True)  # nobody is there to do it for a program that is killed


def test_killed_under_load_again_and_again(lab: Lab) -> None:
    """Three clients and three servers, by three ways to wait, through many deaths and starts of the service."""
    links = lab.links()
    servers, askers = start_pairs(lab, [("block", "poll"), ("epoll", "block"), ("poll", "epoll")])
    gaps, alone, back, lost = [], [], [], []
    for _ in range(TIMES):
        before = [count(asker, "lost") for asker in askers]
        killed = kill9(lab.service.program)
        time.sleep(0.3)  # the kernel serves them meanwhile
        all_progress([*servers, *askers], GAP)
        alone.append(max(longest_gap(program, killed) for program in (*servers, *askers)))
        lab.service.start()
        ready = time.monotonic()
        lab.on_ring(*servers, *askers, timeout=BACK)
        back.append(time.monotonic() - ready)
        all_progress([*servers, *askers], GAP)
        gaps.append(max(longest_gap(program, killed) for program in (*servers, *askers)))
        lost.append(sum(count(asker, "lost") - n for asker, n in zip(askers, before, strict=True)))
        assert gaps[-1] < GAP, f"gap of {gaps[-1]:.3f} s"
        assert back[-1] < BACK
    summary("kill -9 of the service: longest gap until the kernel serves", alone)
    summary("kill -9 of the service: longest gap, with the way back to the rings", gaps)
    summary("from READY to all six programs on rings", back)
    summary("requests without an answer in time, three clients", lost, "datagrams")
    print(f"answers that came late: {[count(asker, 'late') for asker in askers]}; "
          f"older after younger at the servers: {[count(server, 'back') for server in servers]}")
    packets = {flow["pid"]: flow["packets"] for flow in lab.flows()}
    assert all(packets[program.pid] > 0 for program in (*servers, *askers)), packets
    code = lab.service.program.stop(signal.SIGTERM, 10)
    assert code == 0, lab.service.log[-2000:]
    stopped = time.monotonic()
    all_progress([*servers, *askers], GAP)
    assert max(longest_gap(program, stopped - 2) for program in (*servers, *askers)) < GAP
    nothing_left(lab, links, [*servers, *askers])


def test_stopped_and_started(lab: Lab) -> None:
    """SIGTERM: the programs are told, and lose nothing that was on its way."""
    links = lab.links()
    servers, askers = start_pairs(lab, [("block", "epoll"), ("select", "block")])
    gaps, back, lost = [], [], []
    for _ in range(5):
        before = [count(asker, "lost") - count(asker, "late") for asker in askers]
        begun = time.monotonic()
        assert lab.service.program.stop(signal.SIGTERM, 10) == 0, lab.service.log[-2000:]
        assert list(lab.service.rundir.iterdir()) == []
        all_progress([*servers, *askers], GAP)
        lab.service.start()
        back.append(lab.on_ring(*servers, *askers, timeout=BACK))
        all_progress([*servers, *askers], GAP)
        gaps.append(max(longest_gap(program, begun) for program in (*servers, *askers)))
        lost.append(sum(count(asker, "lost") - count(asker, "late") - n
                        for asker, n in zip(askers, before, strict=True)))
        assert gaps[-1] < GAP
    summary("SIGTERM of the service and a new start: longest gap", gaps)
    summary("from READY to all four programs on rings", back)
    summary("requests without any answer, two clients", lost, "datagrams")
    assert sum(lost) == 0
    assert lab.service.program.stop(signal.SIGTERM, 10) == 0
    nothing_left(lab, links, [*servers, *askers])
