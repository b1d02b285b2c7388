"""Programs with rough lives under the shim: they close everything, fork in storms, open and close without end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from net.death_lab import PYTHON, Lab, descriptors, until
from net.service_lab import resident_mib

from vmahybrid.bench.sandbox import Program, Sandbox
from vmahybrid.bench.served import Service

pytestmark = [pytest.mark.root, pytest.mark.slow]

LIFE = str(Path(__file__).with_name("death_life.py"))
PORT = 7600
MORE = 5.0  # MiB that the service may have grown
FAR_END = 12  # descriptors of the service for the far end of an interface, with the program that goes with it


@pytest.fixture(scope="module")
def served(softverbs: bool) -> Iterator[Lab]:
    """One service for all of them."""
    with Sandbox("life") as sandbox, Service(sandbox, softverbs=softverbs) as service:
        yield Lab(sandbox, service)


@pytest.fixture
def lab(served: Lab) -> Iterator[Lab]:
    """With a plain server that echoes on side b."""
    served.echo(served.sandbox.b, PORT)
    yield served
    served.end_programs()


def live(lab: Lab, life: str) -> Program:
    a, b = lab.sandbox.sides
    return lab.shimmed(a, [*PYTHON, LIFE, life, b.address, str(PORT)])


def at(program: Program, what: str, timeout: float = 30.0) -> None:
    program.wait_for(f"^{what} {program.pid}$|\n{what} {program.pid}\n", timeout)


def go_on(program: Program) -> None:
    program.process.send_signal(signal.SIGUSR1)


def ends_well(program: Program) -> None:
    go_on(program)
    assert program.wait(30) == 0, program.errors
    assert "Traceback" not in program.errors


@pytest.mark.parametrize("how", ["closefrom", "closerange", "close"])
def test_closes_everything_and_goes_on(lab: Lab, how: str) -> None:
    program = live(lab, how)
    at(program, "before")
    lab.on_ring(program)
    session = lab.api.status()["processes"][0]["session"]
    go_on(program)
    at(program, "after")
    lab.on_ring(program)
    assert [p["session"] for p in lab.api.status()["processes"]] == [session], "the session did not survive"
    assert len(lab.flows(program.pid)) == 1
    assert lab.flows(program.pid)[0]["packets"] >= 50
    # a service that is new gets all that it needs of it, too: the statistics, and the flows
    assert lab.service.program.stop(signal.SIGTERM, 10) == 0
    lab.service.start()
    lab.on_ring(program)
    assert lab.api.status()["processes"][0]["sockets"] == 1
    go_on(program)
    at(program, "later")
    assert lab.flows(program.pid)[0]["packets"] >= 50
    ends_well(program)
    until(lambda: not lab.api.status()["processes"], 2)


def test_storm_of_forks(lab: Lab) -> None:
    program = live(lab, "forks")
    at(program, "before")
    lab.on_ring(program)
    held = descriptors(lab.service.program.pid)
    go_on(program)
    at(program, "after", 60)
    # what was open at the fork is the kernel's, what is new is on a ring
    until(lambda: len(lab.flows(program.pid)) >= 1, 3, lab.why(program))
    assert any(flow["packets"] >= 50 for flow in lab.flows(program.pid)), lab.flows(program.pid)
    until(lambda: [p["pid"] for p in lab.api.status()["processes"]] == [program.pid], 3,
          "sessions of children that ended are left")
    wanted = len(held) + (FAR_END if lab.service.softverbs else 0)  # its children's first ring was the first on AF_XDP
    until(lambda: len(descriptors(lab.service.program.pid)) <= wanted, 3,
          f"more than {len(held)} descriptors of the service")
    assert not lab.ring_veths()
    ends_well(program)


def test_two_thousand_sockets_after_each_other(lab: Lab) -> None:
    program = live(lab, "cycles")
    at(program, "before", 60)
    lab.on_ring(program)

    def state() -> tuple[int, int, int]:
        return (len(descriptors(program.pid)), len(lab.flows(program.pid)), len(descriptors(lab.service.program.pid)))

    before, memory = state(), resident_mib(lab.service.program.pid)
    go_on(program)
    at(program, "after", 90)
    grown = resident_mib(lab.service.program.pid) - memory
    until(lambda: state() <= before, 2, f"descriptors, flows, the service's descriptors: {before} became {state()}")
    print(f"2000 cycles: descriptors, flows, the service's descriptors {state()}; the service grew {grown:.2f} MiB")
    assert grown < MORE
    assert lab.maps()["rules3"] + lab.maps()["rules5"] == 1
    ends_well(program)


def test_sixty_four_sockets(lab: Lab) -> None:
    program = live(lab, "many")
    at(program, "after", 60)
    flows = lab.flows(program.pid)
    assert len(flows) == 64
    assert min(flow["packets"] for flow in flows) > 0
    go_on(program)
    at(program, "closed")
    until(lambda: not lab.flows(program.pid), 2)
    assert sum(lab.maps()[name] for name in ("rules3", "rules5")) == 0
    ends_well(program)


def test_threads(lab: Lab) -> None:
    program = live(lab, "threads")
    at(program, "after", 60)
    assert len(lab.flows(program.pid)) >= 1
    ends_well(program)
