"""SO_MAX_PACING_RATE of UDP sockets on rings: blocking ones are paced there, others are the kernel's."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from net.service_lab import module_pair, module_services  # noqa: F401
from net.test_tcp_shim import introduce

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service
from vmahybrid.cli.client import Client

pytestmark = [pytest.mark.root, pytest.mark.timeout(60)]

PROGRAM = """
import json, socket, struct, sys, time
PACING, there = 47, (sys.argv[1], 7320)
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
def set_(data): s.setsockopt(socket.SOL_SOCKET, PACING, data)
def get(size): return s.getsockopt(socket.SOL_SOCKET, PACING, size)
def send(count, size=958):
    begin, errors = time.monotonic(), 0
    for _ in range(count):
        try:
            s.sendto(bytes(size), there)
        except OSError as error:
            errors += 1
    return time.monotonic() - begin, errors
send(1)
told = (lambda: ({body}))()
print("told", json.dumps(told), flush=True)
time.sleep(30)
"""


def run(box: Sandbox, service: Service, body: str) -> tuple[Any, dict[str, Any], str]:
    """Result of the expression, the socket as the service sees it, and the log."""
    introduce(box)  # the first datagrams are not to be the kernel's because it has to ask for the neighbour
    argv = [sys.executable, "-S", "-E", "-c", PROGRAM.replace("{body}", body), box.b.address]
    program = box.start(box.a, service.run_argv(argv, "none"), env=service.env)
    told = json.loads(program.wait_for(r"told (.*)\n")[1])
    with Client(service.rundir / "api.sock") as client:
        (found,) = [s for s in client.get("v1", "sockets") if s["pid"] == program.pid]
    program.stop()
    return told, found, program.errors


RATE = 1_000_000  # bytes per second: a datagram of 1000 bytes, headers included, each millisecond


def test_a_blocking_socket_is_paced_on_its_ring(netns_pair: Sandbox, service: Service) -> None:
    (free, (paced, errors), (off, _)), found, _ = run(
        netns_pair, service, f"[send(200)[0], [set_({RATE}), send(200)][1], [set_(-1), send(200)][1]]")
    assert 0.195 < paced < 0.35 and errors == 0
    assert free < 0.1 > off
    assert found["counters"]["tx_packets"] >= 599, found


def test_bursts_of_vma_s_struct(netns_pair: Sandbox, service: Service) -> None:
    """Twenty datagrams at once after a pause, as many bytes as max_burst_sz says; then the rate."""
    ((first, _), (then, _), kernel, struct_), found, _ = run(
        netns_pair, service, "[set_(struct.pack('=IIHxx', 8000, 50000, 1000)), time.sleep(0.2), send(45), send(100),"
        " struct.unpack('Q', get(8))[0], struct.unpack('=IIHxx', get(12))][2:]")
    assert first < 0.02 and 0.09 < then < 0.25
    assert (kernel, struct_) == (RATE, [8000, 50000, 1000])
    assert found["counters"]["tx_packets"] >= 145


def test_a_non_blocking_socket_is_the_kernel_s(netns_pair: Sandbox, service: Service) -> None:
    told, found, log = run(netns_pair, service, f"[set_({RATE}), s.setblocking(False), send(100)][2]")
    assert told[1] == 0
    assert (found["tx_os_reason"], found["counters"]["tx_os_packets"]) == ("pacing", 100)
    assert log.count("SO_MAX_PACING_RATE of a non-blocking UDP socket is left to the kernel") == 1


def test_the_timeout_of_sending(netns_pair: Sandbox, service: Service) -> None:
    """At 10 kB/s a datagram has 0.1 s: with half of that to wait every second call fails, as with a full buffer."""
    timeout = "s.setsockopt(1, socket.SO_SNDTIMEO, struct.pack('ll', 0, 50000))"
    (took, errors), found, _ = run(netns_pair, service, f"[set_(10000), {timeout}, send(5)][2]")
    assert 1 <= errors <= 4 and took < 0.6
    assert found["counters"]["tx_eagain"] == errors


def test_what_is_read_back_is_the_kernel_s(netns_pair: Sandbox, service: Service) -> None:
    body = ("[[set_(v), get(4).hex(), get(8).hex()][1:] for v in (5, 0x7fffffff, 0xffffffff - (1 << 32),"
            " struct.pack('Q', 1 << 40), struct.pack('Q', (1 << 64) - 1), 0)]")
    told, _, _ = run(netns_pair, service, body)
    argv = [sys.executable, "-c", PROGRAM.replace("{body}", body), netns_pair.b.address]
    plain = netns_pair.start(netns_pair.a, argv)
    assert told == json.loads(plain.wait_for(r"told (.*)\n")[1])
    plain.stop()
