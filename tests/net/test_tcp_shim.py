"""VMA_HYBRID_TCP: connections of unmodified programs are adopted onto rings and go home."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from net.service_lab import Api, Peer, Refusal, under_shim, until

from vmahybrid.bench.sandbox import Sandbox, Side, run_command
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

PROGRAM = Path(__file__).with_name("tcp_shim_peer.py")


class ShimPeer(Peer):
    """tcp_shim_peer.py, under the shim unless ``policy`` is empty."""

    def __init__(self, service: Service, side: Side, policy: str, rounds: int = 8, **variables: str) -> None:
        argv, env = [sys.executable, str(PROGRAM), "6" if ":" in side.address else "4"], dict(service.env)
        if policy:
            variables = {"VMA_THREAD_MODE": "1", **variables}   # it has threads, profile latency is for one
            argv = under_shim(service, argv, VMA_HYBRID_TCP=policy, VMA_HYBRID_TCP_ROUNDS=str(rounds),
                              VMA_RX_POLL="1000", **variables)
        self.process = subprocess.Popen(side.command(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        bufsize=1, env={**os.environ, **env})
        self.side = side


def without_offloads(sandbox: Sandbox) -> Sandbox:
    """Rings get what the kernel left for a NIC to do otherwise."""
    for side in sandbox.sides:
        run_command(*side.command(["ethtool", "-K", side.device, "tso", "off", "gso", "off", "tx", "off"]))
    return sandbox


def introduce(sandbox: Sandbox, ip: str = "4") -> None:
    """Each side knows the other one for good: the first connection need not wait for it."""
    for side, other in (sandbox.sides, sandbox.sides[::-1]):
        side.ip("neigh", "replace", over(other, ip).address, "lladdr", other.mac, "dev", side.device,
                "nud", "permanent")


def with_ipv6(sandbox: Sandbox) -> Sandbox:
    """The address of each side in fd77::/64 as well."""
    for number, side in enumerate(sandbox.sides, 1):
        for name in ("all", "default", side.device, "lo"):
            run_command(*side.command(["sysctl", "-qw", f"net.ipv6.conf.{name}.disable_ipv6=0"]))
        side.ip("address", "add", f"fd77::{number}/64", "dev", side.device, "nodad")
    return sandbox


def over(side: Side, ip: str) -> Side:
    """``side`` by its IPv6 address, or by its IPv4 address as AF_INET6 sockets have it ("mapped")."""
    v6 = "fd77::" + side.address.rpartition(".")[2]
    return replace(side, address={"4": side.address, "6": v6, "mapped": f"::ffff:{side.address}"}[ip])


@pytest.fixture(scope="module", name="netns_pair")
def bare_pair() -> Iterator[Sandbox]:
    with Sandbox("test") as sandbox:
        yield with_ipv6(without_offloads(sandbox))


@pytest.fixture(scope="module", name="service")
def served(netns_pair: Sandbox, softverbs: bool) -> Iterator[Service]:
    """One service for the file; programs get AF_XDP rings, or raw packet QPs."""
    with Service(netns_pair, softverbs=softverbs) as running:
        yield running


Pair = tuple[ShimPeer, ShimPeer]


def connected(service: Service, netns_pair: Sandbox, ip: str) -> Iterator[Callable[..., Pair]]:
    """pair(client's policy, server's) -> the two, connected."""
    with ExitStack() as stack:
        def make(client: str, server: str, timeout: float = 0) -> Pair:
            to = over(netns_pair.b, ip)
            b = stack.enter_context(ShimPeer(service, to, server))
            a = stack.enter_context(ShimPeer(service, over(netns_pair.a, ip), client))
            port = b.do("listen", address=to.address)
            a.do("connect", address=to.address, port=port, timeout=timeout)
            b.do("accept")
            return a, b

        yield make


@pytest.fixture
def pair(service: Service, netns_pair: Sandbox) -> Iterator[Callable[..., Pair]]:
    yield from connected(service, netns_pair, "4")


@pytest.fixture(params=["6", "mapped"])
def pair6(service: Service, netns_pair: Sandbox, request: pytest.FixtureRequest) -> Iterator[Callable[..., Pair]]:
    yield from connected(service, netns_pair, request.param)


def flows(service: Service) -> list[Any]:
    return [flow for flow in Api(service).socket_flows() if flow["proto"] == "tcp" and flow["action"] == "ring"]


def offloaded(service: Service) -> list[Any]:
    """Connections on rings, as their programs have it."""
    listed = Api(service).call("GET", "/v1/sockets")[1]
    return [s for s in listed if s["proto"] == "tcp" and s["offloaded"] and s["remote"].rpartition(":")[2] != "*"]


def on_ring(service: Service, *programs: ShimPeer) -> None:
    """Each has one connection on a ring, and a flow that was hit."""
    def all_there() -> bool:
        # XDP counts no frame that a QP has taken
        hit = {flow["pid"] for flow in flows(service) if flow["packets"] or service.softverbs}
        pids = sorted(socket["pid"] for socket in offloaded(service))
        return pids == sorted(p.pid for p in programs) and hit >= set(pids)

    def why() -> str:
        return "\n".join(service.ask("explain", str(program.process.pid)) for program in programs)

    until(all_there, what=lambda: f"{offloaded(service)}, {flows(service)}\n{why()}")


def comes_to_ring(service: Service, program: ShimPeer) -> None:
    """By small rounds, more of them where the first came before the service knew the neighbour."""
    until(lambda: program.do("ask", count=40, size=100) == "" and program.pid in {s["pid"] for s in offloaded(service)},
          what=lambda: service.ask("explain", str(program.pid)))


def at_home(service: Service) -> None:
    """No connection is on a ring; the rule of a port may be there still."""
    until(lambda: not offloaded(service) and all(flow["kind"] == "3-tuple" for flow in flows(service)),
          what=lambda: f"{offloaded(service)}, {flows(service)}")


def end_of_stream(a: ShimPeer, b: ShimPeer, service: Service) -> None:
    """``a`` closes, and ``b`` sees a clean end."""
    a.do("close")
    assert b.do("echo_ended")
    b.do("close")
    at_home(service)


@pytest.mark.parametrize("shimmed", ["client", "server", "both"])
@pytest.mark.parametrize("policy", ["offload", "adaptive"])
def test_echo(pair: Callable[..., Pair], service: Service, shimmed: str, policy: str) -> None:
    a, b = pair(policy if shimmed != "server" else "", policy if shimmed != "client" else "")
    b.do("echo")
    assert a.do("ask", count=40, size=100) == ""
    assert a.do("ask", count=5, size=5000) == ""
    on_ring(service, *([a, b] if shimmed == "both" else [a] if shimmed == "client" else [b]))
    assert a.do("bulk", 20, size=300000) == ""
    end_of_stream(a, b, service)


@pytest.mark.parametrize("shimmed", ["client", "server", "both"])
@pytest.mark.parametrize("policy", ["offload", "adaptive"])
def test_echo_over_ipv6(pair6: Callable[..., Pair], service: Service, shimmed: str, policy: str) -> None:
    test_echo(pair6, service, shimmed, policy)


@pytest.mark.parametrize("how", ["select", "poll", "epoll"])
@pytest.mark.parametrize("shimmed", ["server", "both"])
def test_echo_by_readiness(pair: Callable[..., Pair], service: Service, how: str, shimmed: str) -> None:
    a, b = pair("offload" if shimmed == "both" else "", "offload")
    b.do("echo", how=how)
    assert a.do("ask", count=20, size=100) == ""
    on_ring(service, *([a, b] if shimmed == "both" else [b]))
    assert a.do("bulk", 20, size=300000) == ""
    end_of_stream(a, b, service)


def test_a_connection_without_blocking(pair: Callable[..., Pair], service: Service) -> None:
    a, b = pair("offload", "", timeout=3)
    b.do("echo")
    assert a.do("ask", count=10, size=100) == ""
    on_ring(service, a)
    end_of_stream(a, b, service)


def test_flags(pair: Callable[..., Pair], service: Service) -> None:
    a, b = pair("offload", "")
    assert a.do("nowait") == "EAGAIN"
    assert a.do("writable")
    b.do("send", data="abc")
    assert a.do("peek", size=2) == "ab"
    assert a.do("read", size=3) == "abc"
    with pytest.raises(Refusal, match="Timeout"):
        a.do("read", size=1, timeout=0.1)
    a.do("nodelay")
    on_ring(service, a)
    b.do("close")
    assert a.do("read", size=1) == ""
    a.do("close")
    at_home(service)


@pytest.mark.parametrize("what", ["dup", "fork"])
def test_what_sends_it_home(pair: Callable[..., Pair], service: Service, what: str) -> None:
    a, b = pair("offload", "")
    a.do("send", data="one")
    assert b.do("read", size=3) == "one"
    on_ring(service, a)
    a.do(what)
    at_home(service)
    if what == "fork":
        assert b.do("read", size=5) == "child"
    a.do("send", data="two")
    assert b.do("read", size=3) == "two"
    b.do("send", data="back")
    assert a.do("read", size=4) == "back"
    a.do("close")
    assert b.do("read", size=1) == ""


@pytest.mark.parametrize("what", ["dup", "fork"])
def test_what_sends_it_home_over_ipv6(pair6: Callable[..., Pair], service: Service, what: str) -> None:
    test_what_sends_it_home(pair6, service, what)


@pytest.mark.parametrize("policy", ["offload", "adaptive"])
def test_shutdown_over_ipv6(pair6: Callable[..., Pair], service: Service, policy: str) -> None:
    test_shutdown(pair6, service, policy)


@pytest.mark.parametrize("policy", ["offload", "adaptive"])
def test_shutdown(pair: Callable[..., Pair], service: Service, policy: str) -> None:
    """What began on the ring is shut down there; what was adopted goes home before."""
    a, b = pair(policy, "")
    b.do("echo")
    assert a.do("ask", count=20, size=10) == ""
    on_ring(service, a)
    a.do("shutdown")
    assert b.do("echo_ended")
    if policy == "offload":
        on_ring(service, a)
    else:
        at_home(service)
    b.do("send", data="back")
    assert a.do("read", size=4) == "back"
    b.do("close")
    assert a.do("read", size=1) == ""
    a.do("close")
    at_home(service)


def test_children_that_do_not_get_it(pair: Callable[..., Pair], service: Service) -> None:
    """Python's sockets have FD_CLOEXEC."""
    a, b = pair("offload", "")
    b.do("echo")
    assert a.do("ask", count=20, size=100) == ""
    on_ring(service, a)
    assert (a.do("spawn"), a.do("run")) == ([0, 0, 0], 0)
    assert a.do("ask", count=20, size=100) == ""
    on_ring(service, a)
    end_of_stream(a, b, service)


def test_unread_data_survives_the_way_home(pair: Callable[..., Pair], service: Service) -> None:
    a, b = pair("offload", "")
    b.do("send", data="unread")
    on_ring(service, a)
    a.do("dup")
    at_home(service)
    assert a.do("read", size=6) == "unread"


def test_the_peer_of_a_program_that_exits(pair: Callable[..., Pair], service: Service) -> None:
    a, b = pair("offload", "")
    a.do("send", data="last")
    on_ring(service, a)
    a.close()   # the end of its input
    assert b.do("read", size=5) == "last"
    at_home(service)


def test_the_peer_of_a_program_that_is_killed(pair: Callable[..., Pair], service: Service) -> None:
    a, b = pair("offload", "")
    a.do("send", data="last")
    assert b.do("read", size=4) == "last"
    on_ring(service, a)
    a.kill()
    at_home(service)
    with pytest.raises(Refusal, match="ConnectionReset"):
        b.do("send_and_read")


def test_policy_kernel_does_nothing(pair: Callable[..., Pair], service: Service) -> None:
    a, b = pair("kernel", "")
    b.do("echo")
    assert a.do("ask", count=100, size=100) == ""
    assert flows(service) == []
    end_of_stream(a, b, service)


def test_a_service_that_stops(softverbs: bool) -> None:
    with Sandbox("stop") as sandbox, Service(without_offloads(sandbox), softverbs=softverbs) as service, \
            ShimPeer(service, sandbox.b, "") as b, ShimPeer(service, sandbox.a, "offload") as a:
        port = b.do("listen", address=sandbox.b.address)
        # a peer that nobody has spoken to may not be known yet, and its connection stays the kernel's
        knock = f"import socket; socket.create_connection(({sandbox.b.address!r}, {port}))"
        sandbox.start(sandbox.a, [sys.executable, "-S", "-E", "-c", knock]).result(10)
        b.do("accept")
        time.sleep(0.5)
        a.do("connect", address=sandbox.b.address, port=port)
        b.do("accept")
        b.do("echo")
        assert a.do("ask", count=10, size=100) == ""
        on_ring(service, a)
        service.stop()
        assert a.do("ask", count=10, size=100) == ""
        a.do("close")
        assert b.do("echo_ended")
