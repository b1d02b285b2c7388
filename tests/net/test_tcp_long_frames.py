"""Between virtual interfaces as they are made (tso and gso on) the peer's kernel sends frames of several segments.
Where rings can't take them (before Linux 6.6) a connection that gets one goes home, and loses no more than a moment.
test_tcp_chains.py has the rings that can."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import pytest
from net.service_lab import until
from net.test_service_switch import TCX, bulk, interface
from net.test_tcp_shim import ShimPeer, at_home, offloaded, on_ring, over, with_ipv6
from net.test_tcp_syn import know

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service
from vmahybrid.xdp.xsk import NO_CHAINS

pytestmark = pytest.mark.root

SIZE = 2_000_000
IN_TIME = 2.0  # seconds; without the way home not even 100 kB


@pytest.fixture(scope="module", name="service")
def served() -> Iterator[Service]:
    with Sandbox("test") as sandbox:
        running = Service(with_ipv6(sandbox))
        running.env[NO_CHAINS] = "1"
        with running:
            know(sandbox, "4", "6")
            yield running


def too_long(service: Service) -> int:
    """What came to either side."""
    return sum(int(interface(service, side)["outs"]["ring-too-long"]) for side in service.sandbox.sides)


def quick(peer: ShimPeer, size: int = SIZE) -> None:
    """The stream comes back whole, soon."""
    start = time.monotonic()
    assert peer.do("bulk", 30, size=size) == ""
    assert time.monotonic() - start < IN_TIME


def why(service: Service, program: ShimPeer) -> str:
    return service.ask("explain", str(program.process.pid))


@pytest.mark.parametrize("ip", ["4", "6"])
@pytest.mark.parametrize("shimmed", ["client", "server", "both"])
@pytest.mark.parametrize("policy", ["adaptive", "offload"])
def test_goes_home_and_stays_there(service: Service, policy: str, shimmed: str, ip: str) -> None:
    """With both on rings nobody sends such frames."""
    b_side = over(service.sandbox.b, ip)
    names = [policy if shimmed in (who, "both") else "" for who in ("client", "server")]
    with ShimPeer(service, b_side, names[1]) as b, ShimPeer(service, over(service.sandbox.a, ip), names[0]) as a:
        port = b.do("listen", address=b_side.address)
        b.do("waits")
        a.do("connect", address=b_side.address, port=port)
        b.do("accept")
        b.do("echo")
        assert a.do("ask", count=40, size=100) == ""
        mine = [p for p, name in ((a, names[0]), (b, names[1])) if name]
        on_ring(service, *mine)
        before = too_long(service)
        quick(a)
        if shimmed != "both":
            at_home(service)
            assert too_long(service) > before
            assert "tcp-long-frames" in why(service, mine[0])
            assert a.do("ask", count=200, size=100) == ""
            assert not offloaded(service)
        quick(a)
        assert a.do("ask", count=5, size=3000) == ""
        a.do("close")
        assert b.do("echo_ended")


def test_the_operator_brings_it_back(service: Service) -> None:
    """And long frames send it home again."""
    a_side, b_side = service.sandbox.sides
    with ShimPeer(service, b_side, "") as b, ShimPeer(service, a_side, "adaptive", VMA_HYBRID_TCP_BUDGET="100") as a:
        a.do("connect", address=b_side.address, port=b.do("listen", address=b_side.address))
        b.do("accept")
        b.do("echo")
        assert a.do("ask", count=40, size=100) == ""
        for _ in range(2):
            on_ring(service, a)
            quick(a)
            at_home(service)
            assert "tcp-long-frames" in why(service, a)
            service.ask("adopt", str(a.process.pid))
            assert a.do("ask", count=40, size=100) == ""
        on_ring(service, a)
        a.do("close")
        assert b.do("echo_ended")


def test_an_answer_of_two_segments(service: Service) -> None:
    a_side, b_side = service.sandbox.sides
    with ShimPeer(service, b_side, "") as b, ShimPeer(service, a_side, "offload") as a:
        a.do("connect", address=b_side.address, port=b.do("listen", address=b_side.address))
        b.do("accept")
        b.do("send", data="x" * 3000)
        start = time.monotonic()
        assert a.do("read", size=3000) == "x" * 3000
        assert time.monotonic() - start < 0.5  # the peer's first retransmission comes after 0.2 s
        at_home(service)
        b.do("close")
        assert a.do("read", size=1) == ""


def test_before_it_is_accepted(service: Service) -> None:
    a_side, b_side = service.sandbox.sides
    with ShimPeer(service, b_side, "offload") as b, ShimPeer(service, a_side, "") as a:
        port = b.do("listen", address=b_side.address)
        b.do("waits")
        a.do("connect", address=b_side.address, port=port)
        a.do("send", data="y" * 60_000)
        time.sleep(0.2)
        before = time.monotonic()
        b.do("accept")
        assert b.do("read", size=60_000) == "y" * 60_000
        assert time.monotonic() - before < IN_TIME
        at_home(service)
        assert "tcp-long-frames" in why(service, b)


def test_others_stay(service: Service) -> None:
    """It goes alone: a connection of small messages has no such frames."""
    a_side, b_side = service.sandbox.sides
    with ShimPeer(service, b_side, "") as b, ShimPeer(service, b_side, "") as d, \
            ShimPeer(service, a_side, "offload") as a, ShimPeer(service, a_side, "offload") as c:
        for client, server in ((a, b), (c, d)):
            client.do("connect", address=b_side.address, port=server.do("listen", address=b_side.address))
            server.do("accept")
            server.do("echo")
            assert client.do("ask", count=20, size=100) == ""
        on_ring(service, a, c)
        quick(a)
        on_ring(service, c)
        assert c.do("ask", count=20, size=100) == ""
        assert len(offloaded(service)) == 1


CONNECTIONS = """
import socket, sys
for _ in range(3):
    with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as s:
        s.sendall(b"x" * 20000)
        got = 0
        while got < 20000:
            got += len(s.recv(65536))
"""
ECHO = """
import socket, sys
with socket.create_server((sys.argv[1], 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    while True:
        with listener.accept()[0] as s:
            while data := s.recv(65536):
                s.sendall(data)
"""


@pytest.mark.parametrize("policy", ["offload", "adaptive"])
def test_the_log_says_it_once(service: Service, policy: str) -> None:
    """As a warning where the user wants all on rings."""
    sandbox = service.sandbox
    server = sandbox.start(sandbox.b, [sys.executable, "-c", ECHO, sandbox.b.address])
    until(lambda: bool(server.output.strip()))
    argv = [sys.executable, "-c", CONNECTIONS, sandbox.b.address, server.output.strip()]
    client = sandbox.start(sandbox.a, service.run_argv(argv, VMA_HYBRID_TCP=policy, VMA_HYBRID_TCP_ROUNDS="1",
                                                       VMA_TRACELEVEL="warning"), env=service.env)
    client.wait(20)
    said = [line for line in (client.output + client.errors).splitlines() if "several segments" in line]
    assert len(said) == (policy == "offload"), client.errors
    server.stop()


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
            before = too_long(service)
            assert a.do("bulk", 30, size=SIZE) == ""
            assert too_long(service) > before
            at_home(service)
        a.do("close")
        assert b.do("echo_ended")
