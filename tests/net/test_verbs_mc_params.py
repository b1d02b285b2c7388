"""VMA_ETH_MC_L2_ONLY_RULES and VMA_MC_FORCE_FLOWTAG on a QP of the software device."""

from __future__ import annotations

import time

import pytest
from net.test_verbs_ring import GROUP, PORT, Lab, verbs_lab  # noqa: F401

from vmahybrid.bench.sandbox import Program
from vmahybrid.contracts import lib

pytestmark = [pytest.mark.root, pytest.mark.timeout(60)]

SAME_MAC = "225.77.0.1"  # as GROUP: 01:00:5e:4d:00:01
MEMBER = """
import socket, sys
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(sys.argv[3]))
sock.bind(("", int(sys.argv[2])))
sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton(sys.argv[1]) + bytes(4))
sock.settimeout(20)
print('"bound"', flush=True)
while True:
    sock.recv(2000)
"""


def joined(lab: Lab, reuse: bool, **variables: str) -> Program:
    """A member of GROUP whose rules are in force."""
    path = lab.pages / "member.py"
    path.write_text(MEMBER)
    program = lab.serve(GROUP, str(PORT), str(int(reuse)), program=path, **variables)
    lab.service.wait(lambda: any(a["kind"] == lib.VMH_FLOW_MC for a in lab.service.asked("attach")))
    return program


def received(lab: Lab, program: Program, address: str, count: int) -> dict[str, int]:
    before = lab.ring(program)
    lab.offload(count, address=address)
    lab.offload(1)  # unicast, after them
    lab.service.wait(lambda: lab.ring(program)["rx_packets"] > before["rx_packets"])
    earlier, now = -1, before
    while now["rx_packets"] != earlier:  # until all have come
        earlier = now["rx_packets"]
        time.sleep(0.3)
        now = lab.ring(program)
    return {name: now[name] - before[name] for name in ("rx_packets", "rx_no_socket", "rx_tagged")}


@pytest.mark.parametrize("l2_only", [False, True])
def test_rules_by_the_ethernet_address_alone(lab: Lab, l2_only: bool) -> None:
    """They take a group with the same address along, which is sorted out in the program."""
    program = joined(lab, False, VMA_ETH_MC_L2_ONLY_RULES=str(int(l2_only)))
    assert received(lab, program, GROUP, 20)["rx_packets"] == 21
    stray = received(lab, program, SAME_MAC, 20)
    assert (stray["rx_packets"], stray["rx_no_socket"]) == ((21, 20) if l2_only else (1, 0))


@pytest.mark.parametrize(("reuse", "force", "tagged"), [(0, 0, 20), (1, 0, 0), (1, 1, 20)])
def test_flow_tags_of_groups(lab: Lab, reuse: int, force: int, tagged: int) -> None:
    program = joined(lab, bool(reuse), VMA_MC_FORCE_FLOWTAG=str(force))
    first = received(lab, program, GROUP, 20)
    assert first["rx_packets"] == 21 and first["rx_tagged"] - tagged in (0, 1)  # the unicast one has a tag of its own
    assert lab.socket(program).counters["rx_packets"] + lab.socket(program).counters["rx_ready_packets"] >= 20
