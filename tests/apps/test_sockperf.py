"""sockperf on rings: every way to wait, every mode, multicast, data integrity; on both sides and on one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from apps.shimmed import Stage, nap, stop

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.apps
PORT = 11111
SECONDS = 1  # of one run, in whole ones: tens of thousands of round trips


# Who is alone on rings, of AF_XDP and of raw packet QPs: each test has each program alone, and by turns of the tests
# each is alone on each backend.
ALONE = ("server/client", "client/server")


def on_sides(turn: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("stage", ["both", ALONE[turn % 2]], indirect=True)


@pytest.fixture(scope="module")
def served(softverbs: bool) -> Iterator[tuple[Sandbox, Service]]:
    with Sandbox("sockperf") as sandbox, Service(sandbox, softverbs=softverbs) as service:
        yield sandbox, service


@pytest.fixture
def stage(served: tuple[Sandbox, Service], softverbs: bool, request: pytest.FixtureRequest) -> Stage:
    chosen = getattr(request, "param", "both").split("/")
    return Stage(*served, shimmed=chosen[softverbs and len(chosen) - 1], env={"LD_PRELOAD": str(nap())})


def feed(stage: Stage, tmp_path: Path, addresses: list[str]) -> str:
    path = tmp_path / "feed"
    path.write_text("".join(f"U:{address}\n" for address in addresses))
    return str(path)


def dropped(text: str) -> int:
    found = re.search(r"# dropped messages = (\d+)", text)
    assert found, text
    return int(found[1])


def run(stage: Stage, server: list[str], client: list[str]) -> str:
    serving = stage.serve("sockperf", "server", *server)
    try:
        serving.wait_for(r"\[SERVER\]|listen", 10)
        stage.wait_bound(stage.sandbox.b, PORT)
        asking = stage.client("sockperf", *client, "-t", str(SECONDS))
        asking.wait_for("Starting test|Warmup", 10)
        stage.require_rings(serving, asking)
        return asking.result(SECONDS + 20)
    finally:
        stop(serving)


@on_sides(0)
def test_ping_pong(stage: Stage) -> None:
    target = ["-i", stage.sandbox.b.address, "-p", str(PORT)]
    said = run(stage, target, ["ping-pong", *target, "-m", "64"])
    assert "Summary: Latency is" in said
    assert dropped(said) == 0


@on_sides(1)
def test_non_blocking(stage: Stage) -> None:
    target = ["-i", stage.sandbox.b.address, "-p", str(PORT), "--nonblocked"]
    said = run(stage, target, ["ping-pong", *target])
    assert dropped(said) == 0


@pytest.mark.parametrize(
    ("mux", "stage"),
    [(mux, sides) for turn, mux in enumerate(("recvfrom", "select", "poll", "epoll"))
     for sides in ("both", ALONE[turn % 2])],
    indirect=["stage"],
)  # fmt: skip
def test_waiting(stage: Stage, mux: str, tmp_path: Path) -> None:
    address = stage.sandbox.b.address
    ports = [PORT] if mux == "recvfrom" else [PORT, PORT + 1, PORT + 2]
    path = feed(stage, tmp_path, [f"{address}:{port}" for port in ports])
    options = ["-f", path, "-F", mux]
    said = run(stage, options, ["ping-pong", *options])
    assert dropped(said) == 0


@on_sides(2)
def test_under_load(stage: Stage) -> None:
    target = ["-i", stage.sandbox.b.address, "-p", str(PORT)]
    said = run(stage, target, ["under-load", *target, "--mps", "5000", "--reply-every", "10"])
    assert "Summary: Latency is" in said


@on_sides(3)
def test_throughput(stage: Stage) -> None:
    target = ["-i", stage.sandbox.b.address, "-p", str(PORT)]
    said = run(stage, target, ["throughput", *target, "-m", "64"])
    assert re.search(r"Message Rate is \d{4,}", said), said


@pytest.mark.parametrize("size", ["14", "64", "1000", "1472", "4000"])
def test_data_integrity(stage: Stage, size: str) -> None:
    target = ["-i", stage.sandbox.b.address, "-p", str(PORT)]
    said = run(stage, target, ["ping-pong", *target, "--data-integrity", "-m", size])
    # this version says nothing of success: it ends with an error at the first wrong byte
    assert dropped(said) == 0
    assert "Summary: Latency is" in said


def multicast_options(stage: Stage) -> tuple[list[str], list[str]]:
    group = ["-i", "239.2.2.2", "-p", str(PORT)]
    server = [*group, "--mc-rx-if", stage.sandbox.b.address, "--mc-tx-if", stage.sandbox.b.address]
    client = [*group, "--mc-rx-if", stage.sandbox.a.address, "--mc-tx-if", stage.sandbox.a.address]
    return server, client


@on_sides(4)
def test_multicast(stage: Stage) -> None:
    server, client = multicast_options(stage)
    said = run(stage, server, ["ping-pong", *client, "-m", "64"])
    assert dropped(said) == 0


def test_multicast_groups_by_epoll(stage: Stage, tmp_path: Path) -> None:
    server, client = multicast_options(stage)
    path = feed(stage, tmp_path, [f"239.2.2.{n}:{PORT}" for n in range(10, 14)])
    said = run(stage, ["-f", path, "-F", "epoll", *server[4:]], ["ping-pong", "-f", path, "-F", "epoll", *client[4:]])
    assert dropped(said) == 0


def test_latency_profile(stage: Stage) -> None:
    stage.profile = "latency"
    target = ["-i", stage.sandbox.b.address, "-p", str(PORT)]
    said = run(stage, target, ["ping-pong", *target])
    assert dropped(said) == 0
