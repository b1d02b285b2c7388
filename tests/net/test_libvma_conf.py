"""Rules of libvma.conf on real rings: what each role keeps on the kernel, and a change while the program runs."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vmahybrid.bench.sandbox import Program, Sandbox
from vmahybrid.bench.served import Service, run_words
from vmahybrid.cli.client import Client

pytestmark = pytest.mark.root

PROGRAM = """
import socket, struct, sys
here, there = sys.argv[1:]
kept = []
def udp(local=None, peer=None, send=None, group=None, sizes=(1,)):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 0)
    if local is not None:
        s.bind((here if group is None else "", local))
    if group:
        member = struct.pack("4s4s", socket.inet_aton(group), socket.inet_aton(here))
        s.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
    if peer:
        s.connect((there, peer))
        for size in sizes:
            s.send(b"x" * size)
    for port in send or ():
        for _ in range(3):
            s.sendto(b"x", (there, port))
    kept.append(s)
    return s.fileno()
for line in sys.stdin:
    print("fd", eval(line), flush=True)
"""
CONF = """\
use os udp_receiver {here}:5000-5009
use os udp_receiver 239.7.7.7:*
use os udp_connect {there}/32:6000
use os udp_sender {there}:6001
"""


@pytest.fixture
def service(netns_pair: Sandbox, softverbs: bool) -> Iterator[Service]:
    with Service(netns_pair, softverbs=softverbs) as running:
        yield running


@pytest.fixture
def ask(service: Service, netns_pair: Sandbox, tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Runs a line in the program; the socket that it made, as the service sees it."""
    here, there = netns_pair.a.address, netns_pair.b.address
    (tmp_path / "conf").write_text(CONF.format(here=here, there=there))
    device = ["--softverbs"] if service.softverbs else []
    options = ["-e", f"VMA_CONFIG_FILE={tmp_path}/conf", "-e", "VMA_TRACELEVEL=details", "-e", "VMA_BF=1", "-e",
               "VMA_TCP_MAX_SYN_RATE=9"]
    program_words = [sys.executable, "-uc", PROGRAM, here, there]
    argv = [*run_words(*device, *options, "-e", "VMA_MTU=1000"), "--", *program_words]
    (tmp_path / "in").touch()
    script = 'tail -f --pid=$$ -n +1 "$0" | exec "$@"'
    command = ["sh", "-c", script, str(tmp_path / "in"), *argv]
    program: Program = netns_pair.start(netns_pair.a, command, env=service.env)
    answered = 0

    def run(line: str) -> dict[str, Any]:
        nonlocal answered
        with (tmp_path / "in").open("a") as lines:
            lines.write(line + "\n")
        answered += 1
        fd = int(program.wait_for(rf"(?:fd \d+\n){{{answered - 1}}}fd (\d+)\n")[1])
        with Client(service.rundir / "api.sock") as client:
            found = [s for s in client.get("v1", "sockets") if s["fd"] == fd]
        assert found, program.errors
        return {**found[0], "log": program.errors}

    return run


def test_each_role_and_a_new_file(ask: Callable[[str], dict[str, Any]], tmp_path: Path, softverbs: bool) -> None:
    def reasons(line: str) -> tuple[str, bool]:
        found = ask(line)
        return found["reason"], found["offloaded"]

    assert reasons("udp(local=4999)") == ("none", True)
    assert reasons("udp(local=5000)") == ("libvma-conf", False)
    assert reasons("udp(local=5009)") == ("libvma-conf", False)
    connected = ask("udp(local=4998, peer=6001)")
    assert (connected["rx_offloaded"], connected["tx_offloaded"]) == (True, False)
    assert connected["tx_os_reason"] == "libvma-conf"
    assert reasons("udp(peer=6000)") == ("libvma-conf", False)
    assert reasons("udp(peer=5999)") == ("none", True)
    assert reasons("udp(local=7001, group='239.7.7.7')") == ("libvma-conf", True)
    sender = ask("udp(local=4001, send=(6001,))")
    assert (sender["tx_os_reason"], sender["tx_offloaded"], sender["rx_offloaded"]) == ("libvma-conf", False, True)
    assert sender["counters"]["tx_os_packets"] == 3
    sized = ask("udp(peer=5998, sizes=(972, 973, 974))")
    assert (sized["counters"]["tx_packets"], sized["counters"]["tx_os_packets"]) == (1, 2)
    assert sized["tx_os_reason"] == "mtu"
    assert ask("udp(local=4002, send=(6002,))")["tx_offloaded"]
    (tmp_path / "conf").write_text("use os udp_receiver *:4100\n")
    assert reasons("udp(local=4100)") == ("libvma-conf", False)
    assert reasons("udp(local=5001)") == ("none", True)
    (tmp_path / "conf").write_text("use os udp_receiver *:4100\nuse os *:4101\n")
    assert reasons("udp(local=4101)") == ("none", True)
    (tmp_path / "conf").write_text("use os udp_receiver *:4102\nuse os udp_receiver 10.0.0.1/33:1\nlog min-level 1\n")
    assert reasons("udp(local=4102)") == ("libvma-conf", False)
    last = ask("udp(local=4200)")
    assert f"{tmp_path}/conf:2: not a role" in last["log"]
    clamped = f'VMA WARNING: {tmp_path}/conf:2: a prefix of more than 32 bits, using 32: "10.0.0.1/33"\n'
    assert last["log"].count(clamped) == 1
    assert last["log"].count(f" VMA DETAILS: {tmp_path}/conf:3: log has no effect: VMA_TRACELEVEL and") == 1
    assert "VMA WARNING: Mismatch between interface va MTU=1500 and VMA_MTU=1000. Make sure VMA_MTU" in last["log"]
    assert last["log"].count("VMA_BF has no effect on xdp") == int(not softverbs)
    assert last["log"].count("VMA_TCP_MAX_SYN_RATE has no effect on verbs") == int(softverbs)
