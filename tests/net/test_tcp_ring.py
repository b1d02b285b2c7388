"""The TCP stack on a real AF_XDP ring: with the kernel as its peer, both ways, and ring to ring."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tcp_build import PROGRAMS, RING, build

from vmahybrid.bench.sandbox import Sandbox, Side, run_command

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("tcp") / "tcp_ring_peer"
    return build(target, "gcc", PROGRAMS / "tcp_ring_peer.c", PROGRAMS / "live.c", *RING)


@pytest.fixture
def talk(program: Path, netns_pair: Sandbox) -> Callable[..., str]:
    """talk(client, server, mode, number, *more): "ring" or "kernel" on each side; what the client said."""
    a, b = netns_pair.sides
    for side, peer in ((a, b), (b, a)):
        side.ip("neigh", "replace", peer.address, "lladdr", peer.mac, "dev", side.device, "nud", "permanent")
        # a ring gets what the kernel left for a NIC to do otherwise
        run_command(*side.command(["ethtool", "-K", side.device, "tso", "off", "gso", "off", "tx", "off"]))

    def command(kind: str, me: Side, you: Side) -> list[str]:
        if kind == "ring":
            return [str(program), me.device, me.address, me.mac, you.address, you.mac]
        return [sys.executable, str(PROGRAMS / "tcp_peer.py"), b.address]

    def run(client: str, server: str, mode: str, number: int, *more: str) -> str:
        netns_pair.start(b, [*command(server, b, a), "server"]).wait_for("ready")
        return netns_pair.start(a, [*command(client, a, b), mode, str(number), *more]).result(50)

    return run


PAIRS = [("ring", "kernel"), ("kernel", "ring"), ("ring", "ring")]


@pytest.mark.parametrize(("client", "server"), PAIRS)
@pytest.mark.parametrize(("mode", "number"), [("echo", 2000), ("sink", 3000000), ("generate", 3000000), ("opens", 200)])
def test_all_bytes_arrive(talk: Callable[..., str], client: str, server: str, mode: str, number: int) -> None:
    assert talk(client, server, mode, number)


@pytest.mark.parametrize("percent", ["1", "5"])
@pytest.mark.parametrize("mode", ["sink", "generate"])
def test_all_bytes_arrive_over_a_lossy_ring(talk: Callable[..., str], mode: str, percent: str) -> None:
    said = talk("ring", "kernel", mode, 2000000, percent)
    if mode == "sink":
        resent = re.search(r"resent (\d+) ", said)
        assert resent and int(resent[1]) > 0, said


def test_the_timer_waits_for_delayed_acks_of_the_kernel(talk: Callable[..., str]) -> None:
    """It holds back the ACK of a small segment for 40 ms, which is no loss. One may be late on a busy machine."""
    said = talk("ring", "kernel", "trickle", 30)
    resent = re.search(r"resent (\d+) ", said)
    assert resent and int(resent[1]) <= 3, said


def test_a_connection_of_the_kernel_goes_to_the_ring_and_comes_home(
    program: Path, netns_pair: Sandbox, tmp_path: Path
) -> None:
    """Both halves of homecoming and adoption: TCP_REPAIR (net/tcprepair.py) and the stack's import and export."""
    pytest.importorskip("vmahybrid.net.tcprepair", reason="the kernel's half of homecoming is not there yet")
    a, b = netns_pair.sides
    for side, peer in ((a, b), (b, a)):
        side.ip("neigh", "replace", peer.address, "lladdr", peer.mac, "dev", side.device, "nud", "permanent")
        run_command(*side.command(["ethtool", "-K", side.device, "tso", "off", "gso", "off", "tx", "off"]))
    server = [sys.executable, str(PROGRAMS / "tcp_peer.py"), b.address, "server"]
    netns_pair.start(b, server).wait_for("ready")
    ring = [str(program), a.device, a.address, a.mac, b.address, b.mac]
    mover = [sys.executable, str(Path(__file__).parent / "tcp_mover.py"), b.address, str(tmp_path / "state"), "200"]
    assert "there and back 200" in netns_pair.start(a, [*mover, *ring]).result(50)
