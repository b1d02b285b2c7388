"""Hardware time stamps (SO_TIMESTAMPING) on the software verbs device, as VMA_HW_TS_CONVERSION wants them: its clock is
CLOCK_MONOTONIC, so that a conversion shows."""

from __future__ import annotations

import sys

import pytest
from net.stamp_lab import ALL, RX_SOFTWARE, SECOND, SOFTWARE, TX_SOFTWARE, received, receiver, socket_of

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service

pytestmark = [pytest.mark.root, pytest.mark.timeout(60)]


@pytest.mark.parametrize(("conversion", "clock"), [(0, ""), (1, "monotonic"), (2, "real"), (3, "real"), (4, "real")])
def test_hardware_stamps(netns_pair: Sandbox, conversion: int, clock: str) -> None:
    with Service(netns_pair, softverbs=True) as service:
        seen, found = received(netns_pair, service, receiver(netns_pair, service, ALL, conversion))
    assert found["counters"]["rx_packets"] == 3, "not on the QP"
    for datagram in seen:
        ((software, unused, hardware),) = datagram["times"]
        assert unused == 0 and 0 < datagram["real"] - software < SECOND
        if not clock:
            assert hardware == 0
            continue
        assert 0 < datagram[clock] - hardware < SECOND
        if clock == "real":
            assert hardware <= software + 100_000  # it came before it was taken, but for what the clocks are apart
    assert seen[0]["times"] < seen[1]["times"] < seen[2]["times"]


def test_no_hardware_stamps_on_a_veth(netns_pair: Sandbox) -> None:
    """Neither the kernel nor an AF_XDP ring has them there, and software ones come all the same."""
    with Service(netns_pair) as service:
        seen, found = received(netns_pair, service, receiver(netns_pair, service, ALL, 3))
    assert found["counters"]["rx_packets"] == 3
    assert all(times[0][0] > 0 and times[0][1:] == [0, 0] for times in (datagram["times"] for datagram in seen))


def test_stamps_of_sending_are_the_kernel_s(netns_pair: Sandbox) -> None:
    with Service(netns_pair) as service:
        program = netns_pair.start(netns_pair.a, service.run_argv([
            sys.executable, "-S", "-E", "-c", f"""
import socket, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.SOL_SOCKET, 37, {TX_SOFTWARE | SOFTWARE})
to = ("{netns_pair.b.address}", 7311)
s.sendto(b"x", to)
time.sleep(0.2)
print("told", [kind for _, kind, _ in s.recvmsg(100, 400, socket.MSG_ERRQUEUE)[1]], flush=True)
s.setsockopt(socket.SOL_SOCKET, 37, {RX_SOFTWARE | SOFTWARE})
s.sendto(b"x", to)
print("on", flush=True)
time.sleep(30)
"""], "none"), env=service.env)
        program.wait_for(r"told \[37")
        program.wait_for("on\n")
        found = socket_of(service, program)
        program.stop()
    assert (found["tx_os_reason"], found["counters"]["tx_os_packets"]) == ("timestamping", 1)
    assert (found["counters"]["tx_packets"], found["tx_offloaded"]) == (1, True)


