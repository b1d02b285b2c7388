"""Between virtual interfaces as they are made (tso and gso on) the peer's kernel sends frames of several segments: a
ring takes them whole, in several buffers, and nobody has to send anything again."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from net.service_lab import until
from net.test_service_switch import TCX, bulk, interface
from net.test_tcp_long_frames import ECHO, why
from net.test_tcp_shim import ShimPeer, at_home, flows, offloaded, on_ring, over, with_ipv6
from net.test_tcp_syn import know

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service
from vmahybrid.xdp.latebind import FORCE

pytestmark = pytest.mark.root

MOMENT = 0.1  # seconds, on a busy machine; what is lost comes again after 0.2 s
SIZES = [3000, 10_000, 100_000, 1_000_000]
BULK = 40_000_000  # more than a ring takes at a stretch


@pytest.fixture(scope="module", name="service", params=["bound", "in two steps"])
def served(request: pytest.FixtureRequest) -> Iterator[Service]:
    with Sandbox("test") as sandbox:
        running = Service(with_ipv6(sandbox))
        if request.param != "bound":
            running.env[FORCE] = "1"
        with running:
            know(sandbox, "4", "6")
            yield running


def ways(service: Service, name: str) -> int:
    """Frames that went that way at either side."""
    return sum(int(interface(service, side)["outs"][name]) for side in service.sandbox.sides)


def pour(sender: ShimPeer, reader: ShimPeer, size: int) -> float:
    """Seconds from the first byte that is sent to the last one that has come."""
    reader.do("drain", size=size)
    sent, start = sender.do("pour", 20, size=size)
    got, end = reader.do("drained", 20)
    assert got == sent
    return float(end - start)


def soon(sender: ShimPeer, reader: ShimPeer, size: int) -> None:
    assert pour(sender, reader, size) < MOMENT


def on_rings(service: Service, *programs: ShimPeer) -> None:
    until(lambda: sorted(s["pid"] for s in offloaded(service)) == sorted(p.pid for p in programs),
          what=lambda: f"{offloaded(service)}, {flows(service)}")


@pytest.mark.parametrize("ip", ["4", "6"])
@pytest.mark.parametrize("shimmed", ["client", "server"])
@pytest.mark.parametrize("size", SIZES)
def test_the_first_data(service: Service, size: int, shimmed: str, ip: str) -> None:
    """From either end, of a connection from the SYN that stays where it is."""
    b_side, cut = over(service.sandbox.b, ip), ways(service, "ring-too-long")
    policies = ("offload", "") if shimmed == "client" else ("", "offload")
    with ShimPeer(service, b_side, policies[1]) as b, ShimPeer(service, over(service.sandbox.a, ip), policies[0]) as a:
        port = b.do("listen", address=b_side.address)
        b.do("waits")
        a.do("connect", address=b_side.address, port=port)
        b.do("accept")
        mine, other = (a, b) if shimmed == "client" else (b, a)
        soon(other, mine, size)
        on_rings(service, mine)
        soon(mine, other, 100)
        soon(other, mine, size)
        on_rings(service, mine)
        assert ways(service, "ring-too-long") == cut
        a.do("close")
        assert b.do("read", size=1) == ""


def test_of_a_second_program(service: Service) -> None:
    """Its ring is behind a veth."""
    a_side, b_side = service.sandbox.sides
    dev = ways(service, "dev")
    with ShimPeer(service, b_side, "offload") as b, ShimPeer(service, b_side, "offload") as d, \
            ShimPeer(service, a_side, "") as a, ShimPeer(service, a_side, "") as c:
        for client, other in ((a, b), (c, d)):
            port = other.do("listen", address=b_side.address)
            other.do("waits")
            client.do("connect", address=b_side.address, port=port)
            other.do("accept")
            for size in SIZES:
                soon(client, other, size)
        on_rings(service, b, d)
        assert ways(service, "dev") > dev


POSTS = """
import socket, sys, time
for _ in range(30):
    start = time.monotonic()
    with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as s:
        s.sendall(b"x" * 10000)
        got = 0
        while got < 10000:
            got += len(s.recv(65536))
    print(time.monotonic() - start, flush=True)
"""


@pytest.mark.parametrize("shimmed", ["client", "server"])
def test_new_connections_in_a_row(service: Service, shimmed: str) -> None:
    """None pays for its 10 kB; each did with 0.2 s."""
    sandbox = service.sandbox
    variables = {"VMA_HYBRID_TCP": "offload", "VMA_TRACELEVEL": "warning"}
    echo = [sys.executable, "-c", ECHO, sandbox.b.address]
    listener = sandbox.start(sandbox.b, service.run_argv(echo, **variables) if shimmed == "server" else echo,
                             env=service.env)
    until(lambda: bool(listener.output.strip()))
    argv = [sys.executable, "-c", POSTS, sandbox.b.address, listener.output.strip()]
    client = sandbox.start(sandbox.a, service.run_argv(argv, **variables) if shimmed == "client" else argv,
                           env=service.env)
    client.wait(20)
    took = sorted(float(line) for line in client.output.split())
    assert len(took) == 30, client.errors
    assert took[15] < 0.02
    assert took[-3] < 0.1
    assert "several segments" not in client.errors + listener.errors
    listener.stop()


@pytest.mark.parametrize("ip", ["4", "6"])
def test_bulk_goes_home(service: Service, ip: str) -> None:
    """The kernel is better at it."""
    a_side, b_side = (over(side, ip) for side in service.sandbox.sides)
    with ShimPeer(service, b_side, "offload") as b, ShimPeer(service, a_side, "") as a:
        port = b.do("listen", address=b_side.address)
        b.do("waits")
        a.do("connect", address=b_side.address, port=port)
        b.do("accept")
        soon(a, b, 1_000_000)
        on_rings(service, b)
        pour(a, b, BULK)
        at_home(service)
        assert "tcp-long-frames" in why(service, b)


@pytest.mark.parametrize("service", ["bound"], indirect=True)    # the others do not switch to tcx
def test_super_packets_at_tcx(service: Service) -> None:
    """While bulk traffic of others comes, the frames come by another program."""
    a_side, b_side = service.sandbox.sides
    with ShimPeer(service, b_side, "") as b, ShimPeer(service, a_side, "offload") as a:
        a.do("connect", address=b_side.address, port=b.do("listen", address=b_side.address))
        b.do("accept")
        b.do("echo")
        assert a.do("ask", count=20, size=100) == ""
        on_ring(service, a)
        with bulk(service.sandbox, a_side, 6):
            until(lambda: interface(service, a_side)["hook"] == TCX, 5.0)
            assert a.do("ask", count=20, size=100) == ""
            cut = ways(service, "ring-too-long")
            assert a.do("bulk", 30, size=2_000_000) == ""
            on_ring(service, a)
            assert ways(service, "ring-too-long") == cut
        a.do("close")
        assert b.do("echo_ended")
