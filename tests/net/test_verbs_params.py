"""Parameters whose effect only the device sees, on a QP of the software device: each test fails if one is ignored."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from net.test_verbs_ring import PORT, Lab, last
from net.verbs_service import VerbsService

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.verbs.library import LIBRARY, softverbs_directory

pytestmark = pytest.mark.root
BLUEFLAME = {"MLX5_SHUT_UP_BF": "1", "MLX5_POST_SEND_PREFER_BF": "0", "MLX4_POST_SEND_PREFER_BF": "0"}


@pytest.fixture
def lab(netns_pair: Sandbox, tmp_path: Path) -> Iterator[Lab]:
    with VerbsService(netns_pair, netns_pair.b, tmp_path / "control") as service:
        yield Lab(netns_pair, service, tmp_path)


@pytest.fixture(scope="module")
def spy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of verbs_spy.c as a libibverbs.so.1 that needs the software one, by its path."""
    directory, real = tmp_path_factory.mktemp("spy"), softverbs_directory() / LIBRARY
    name = directory / "real.so"  # lends its soname only
    shared = ["cc", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*shared, "-o", name, f"-Wl,-soname,{real}", "-x", "c", "/dev/null"], check=True, timeout=60)
    subprocess.run([*shared, "-o", directory / LIBRARY, Path(__file__).with_name("verbs_spy.c"), f'-DREAL="{real}"',
                    "-Wl,--no-as-needed", name], check=True, timeout=60)
    return directory


def seen(lab: Lab, spy: Path, datagrams: int, **variables: str) -> Counter[str]:
    """What the library was asked for by a program that echoed so many datagrams."""
    log = lab.pages / "spy"
    program = lab.serve("echo", "block", lab.box.b.address, str(PORT), LD_LIBRARY_PATH=str(spy), VMH_SPY_LOG=str(log),
                        **variables)
    assert lab.ask([100] * datagrams)["wrong"] == {}
    assert lab.ring(program)["rx_packets"] == datagrams, "not on the QP"
    return Counter(log.read_text().splitlines())


@pytest.mark.parametrize("bf", ["0", "1"])
def test_blueflame(lab: Lab, spy: Path, bf: str) -> None:
    """The providers of ConnectX adapters read it from the environment, when the device is opened."""
    found = seen(lab, spy, 1, VMA_BF=bf)
    assert {line for line in found if line.startswith("open ")} == {
        f"open {name}={value if bf == '0' else ''}" for name, value in BLUEFLAME.items()}


SIZES = [
    ({"VMA_RX_BUFS": "1"}, ["VMA_RX_BUFS = 1 is not a number from 64 to 2147483647, {}, using [64]"]),
    ({"VMA_RX_BUFS": "100", "VMA_RX_WRE": "1000"}, ["VMA_RX_WRE = 1000 is not a number from 16 to 50, {}, using [50]"]),
    ({"VMA_TX_BUF_SIZE": "100"}, ["VMA_TX_BUF_SIZE = 100 is not a number from 2048 to 65280, {}, using [2048]"]),
    ({"VMA_TX_BUFS": "9000"}, ["VMA_TX_BUFS = 9000 is not a number from 15 to 2047, {}, using [2047]"]),
    ({"VMA_CQ_MODERATION_PERIOD_USEC": "70000"},
     ["VMA_CQ_MODERATION_PERIOD_USEC = 70000 is not a number from 0 to 65535, {}, using [65535]"]),
    ({"VMA_CQ_MODERATION_COUNT": "65536", "VMA_RX_WRE": "200000", "VMA_RX_BUFS": "400000"},
     ["VMA_RX_WRE = 200000 is not a number from 16 to 32752, {}, using [32752]",
      "VMA_CQ_MODERATION_COUNT = 65536 is not a number from 0 to 65535, {}, using [65535]"]),
    ({"VMA_CQ_AIM_MAX_PERIOD_USEC": "2147483647"},
     ["VMA_CQ_AIM_MAX_PERIOD_USEC = 2147483647 is not a number from 0 to 65535, {}, using [65535]"]),
    ({"VMA_CQ_AIM_MAX_PERIOD_USEC": "65535", "VMA_CQ_MODERATION_PERIOD_USEC": "65535"}, []),
    ({"VMA_RING_DEV_MEM_TX": "2147483647"},
     ["VMA_RING_DEV_MEM_TX = 2147483647 is not what vb can have, using [0]"]),
    ({"VMA_RX_BUFS": "8192", "VMA_TX_BUFS": "500", "VMA_TX_WRE": "1024", "VMA_TX_BUF_SIZE": "2000"}, []),
]


@pytest.mark.parametrize(("asked", "warnings"), SIZES, ids=lambda case: str(case)[:40])
def test_sizes_that_a_ring_cannot_have(lab: Lab, asked: dict[str, str], warnings: list[str]) -> None:
    program = lab.serve("echo", "block", lab.box.b.address, str(PORT), **asked)
    assert lab.ask([100] * 2)["wrong"] == {}
    assert lab.ring(program)["rx_packets"] == 2, "not on the QP"
    said = [line.removeprefix(" VMA WARNING: ") for line in program.errors.splitlines() if " is not " in line]
    assert said == [text.format("which is what vb can have") for text in warnings]


@pytest.mark.parametrize("fork", ["0", "1"])
def test_fork(lab: Lab, spy: Path, fork: str) -> None:
    assert seen(lab, spy, 1, VMA_FORK=fork)["fork_init"] == int(fork)


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_send_completions(lab: Lab, spy: Path, batch: int) -> None:
    """The device is asked for one per batch."""
    found = seen(lab, spy, 96, VMA_TX_WRE_BATCHING=str(batch))
    assert found["send signalled"] + found["send"] == 96
    assert found["send signalled"] == 96 // batch


@pytest.mark.parametrize(("interval", "seen"), [("50", {0, 50}), ("60000", {50})])
def test_how_often_moderation_adapts(lab: Lab, interval: str, seen: set[int]) -> None:
    """Few and small frames want the least delay: microseconds that are held, in a second of such traffic."""
    program = lab.serve("echo", "block", lab.box.b.address, str(PORT), VMA_RX_POLL="0", VMA_SELECT_POLL="0",
                        VMA_CQ_AIM_INTERVAL_MSEC=interval)
    found = {lab.ring(program)["mod_usec"]}
    for _ in range(8):
        assert lab.ask([64] * 2000)["wrong"] == {}
        found.add(lab.ring(program)["mod_usec"])
    assert found == seen


@pytest.mark.parametrize(("rate", "count", "period", "wanted"), [
    (100, 33, 77, (33, 33, 77, 77)),
    (100, 5000, 60000, (34, 2000, 9600, 10000)),
    (100, 33, 60000, (33, 33, 9600, 10000)),
    (2000, 5000, 60000, (1, 100, 100, 500)),
])
def test_adaptive_moderation(lab: Lab, rate: int, count: int, period: int, wanted: tuple[int, int, int, int]) -> None:
    """At 3400 to 200,000 frames a second: frames and microseconds per interrupt, each at its limit or by the rate."""
    program = lab.serve("sink", "block", lab.box.b.address, str(PORT), "999999", "1", VMA_RX_POLL="0",
                        VMA_CQ_AIM_INTERVAL_MSEC="100", VMA_CQ_AIM_INTERRUPTS_RATE_PER_SEC=str(rate),
                        VMA_CQ_AIM_MAX_COUNT=str(count), VMA_CQ_AIM_MAX_PERIOD_USEC=str(period))
    sender = lab.start(lab.box.a, "send", lab.box.b.address, str(PORT), "8000", "1200", "8")
    low, high, shortest, longest = wanted
    lab.service.wait(lambda: (ring := lab.ring(program)) and low <= ring["mod_count"] <= high
                     and shortest <= ring["mod_usec"] <= longest)
    assert sender.running, "too late: it is what an idle ring has"
    sender.wait(10)
    assert last(program)["broken"] == 0
