"""The adapter's time stamps (SO_TIMESTAMPING) on AF_XDP rings in native mode.

veth binds the program to itself and answers its call, but never has a time: the stamps of these tests are of a stand-in
for the kernel function (stamp_stand_in), by CLOCK_MONOTONIC, so that a conversion would show.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from net.stamp_lab import ALL, RX_SOFTWARE, SECOND, SOFTWARE, received, receiver
from stamp_stand_in import python_path

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service
from vmahybrid.xdp.latebind import FORCE

pytestmark = [pytest.mark.root, pytest.mark.timeout(60)]


@contextmanager
def served(box: Sandbox, where: Path, *, mode: str = "native", stand_in: bool = True,
           direct: str = "first") -> Iterator[Service]:
    file = where / "service.toml"
    file.write_text(f'[interface."{box.b.device}"]\nmode = "{mode}"\n[ring]\ndirect = "{direct}"\n')
    service = Service(box, [box.b], arguments=["--config", str(file)])
    service.start({"PYTHONPATH": python_path(where)} if stand_in else None)
    try:
        yield service
    except BaseException:
        service.kill()
        raise
    service.stop()


@pytest.mark.parametrize("direct", ["first", "never"])
@pytest.mark.parametrize(("conversion", "told"), [(0, False), (1, True), (2, True), (3, False), (4, True)])
def test_stamps_of_the_driver(netns_pair: Sandbox, tmp_path: Path, direct: str, conversion: int, told: bool) -> None:
    """As they are: a veth has no /dev/ptp to follow, so that 3 can't be."""
    with served(netns_pair, tmp_path, direct=direct) as service:
        seen, found = received(netns_pair, service, receiver(netns_pair, service, ALL, conversion))
    assert found["counters"]["rx_packets"] == 3, "not on the ring"
    for datagram in seen:
        ((software, unused, hardware),) = datagram["times"]
        assert unused == 0 and 0 < datagram["real"] - software < SECOND
        assert 0 < datagram["monotonic"] - hardware < SECOND if told else hardware == 0
    assert seen[0]["times"] < seen[1]["times"] < seen[2]["times"]


def test_in_two_steps(netns_pair: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel maps no bound socket: the flags come with the second step."""
    monkeypatch.setenv(FORCE, "1")
    with served(netns_pair, tmp_path) as service:
        seen, found = received(netns_pair, service, receiver(netns_pair, service, ALL, 4))
    assert found["counters"]["rx_packets"] == 3
    assert all(0 < datagram["monotonic"] - datagram["times"][0][2] < SECOND for datagram in seen)


def test_what_veth_says(netns_pair: Sandbox, tmp_path: Path) -> None:
    """The real call: veth takes the program, and has no time."""
    with served(netns_pair, tmp_path, stand_in=False) as service:
        program = receiver(netns_pair, service, ALL, 4)
        shown = service.ask("status")
        seen, found = received(netns_pair, service, program)
    assert "native XDP with the adapter's time stamps" in " ".join(shown.split())
    assert found["counters"]["rx_packets"] == 3
    assert all(datagram["times"][0][0] > 0 and datagram["times"][0][1:] == [0, 0] for datagram in seen)


def test_generic_mode_has_none(netns_pair: Sandbox, tmp_path: Path) -> None:
    with served(netns_pair, tmp_path, mode="generic") as service:
        seen, found = received(netns_pair, service, receiver(netns_pair, service, ALL, 4))
        shown = service.ask("status")
    assert "time stamps" not in shown
    assert found["counters"]["rx_packets"] == 3
    assert all(datagram["times"][0][2] == 0 for datagram in seen)


CHANGING = """
import socket, struct, sys
def times(s):
    controls = s.recvmsg(100, 400)[1]
    return [struct.unpack("6q", data)[4:] != (0, 0) for _, kind, data in controls if kind == 37]
def bound(port):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.bind((sys.argv[1], port))
    s.settimeout(5)
    return s
one, other = bound(7310), bound(7311)
for flags in %s:
    one.setsockopt(socket.SOL_SOCKET, 37, flags)
    print("set", flush=True)
    print("got", times(one), times(other), flush=True)
"""
BOTH = ("import socket, sys\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "for port in (7310, 7311): s.sendto(b'x', (sys.argv[1], port))")


def test_asked_for_on_the_way(netns_pair: Sandbox, tmp_path: Path) -> None:
    """By a bound socket, no more, and again; the other socket asks for nothing."""
    box, script = netns_pair, CHANGING % [0, ALL, RX_SOFTWARE | SOFTWARE, ALL]
    with served(box, tmp_path) as service:
        program = box.start(box.b, service.run_argv([sys.executable, "-S", "-E", "-c", script, box.b.address], "none",
                                                    VMA_HW_TS_CONVERSION="4"), env=service.env)
        for number in range(1, 5):
            program.wait_for(r"(?s)" + r"set\n.*" * number)
            box.start(box.a, [sys.executable, "-S", "-E", "-c", BOTH, box.b.address]).result(10)
            program.wait_for(r"(?s)" + r"got.*\n.*" * number)
        assert program.process.wait(10) == 0
    said = [line for line in program.output.splitlines() if line.startswith("got")]
    assert said == ["got [] []", "got [True] []", "got [False] []", "got [True] []"]


GROUP = """
import socket, struct, sys
def member(flags):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.setsockopt(socket.SOL_SOCKET, 37, flags)
    s.bind(("239.1.2.3", 7312))
    group = socket.inet_aton("239.1.2.3") + socket.inet_aton(sys.argv[1])
    s.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
    s.settimeout(5)
    return s
members = [member(flags) for flags in (%d, 0, %d)]
print("bound", flush=True)
for s in members:
    data, controls, _, _ = s.recvmsg(100, 400)
    print("got", data, [struct.unpack("6q", c)[4:] != (0, 0) for _, kind, c in controls if kind == 37], flush=True)
"""
TO_GROUP = ("import socket, sys\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
            "s.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(sys.argv[1]))\n"
            "s.sendto(b'to all', ('239.1.2.3', 7312))")


def test_one_of_a_group_asks(netns_pair: Sandbox, tmp_path: Path) -> None:
    """The newest socket's rule is the one that acts: it has the time for the first one all the same."""
    box, script = netns_pair, GROUP % (ALL, RX_SOFTWARE | SOFTWARE)
    with served(box, tmp_path) as service:
        program = box.start(box.b, service.run_argv([sys.executable, "-S", "-E", "-c", script, box.b.address], "none",
                                                    VMA_HW_TS_CONVERSION="4"), env=service.env)
        program.wait_for("bound")
        flows = service.ring_flows(program.pid)
        box.start(box.a, [sys.executable, "-S", "-E", "-c", TO_GROUP, box.a.address]).result(10)
        assert program.process.wait(10) == 0
    assert flows
    said = [line for line in program.output.splitlines() if line.startswith("got")]
    assert said == ["got b'to all' [True]", "got b'to all' []", "got b'to all' [False]"]
