"""Connections on rings follow the kernel's way to the peer: its neighbour, its MTU, its route, and ICMP.

The peer is the kernel's. What can be followed stays on the ring, everything else goes home; nothing stands still.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from net.service_lab import Refusal, until
from net.test_tcp_shim import ShimPeer, comes_to_ring, offloaded, over, with_ipv6, without_offloads

from vmahybrid.bench.sandbox import Sandbox, Side, run_command
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

POLICIES = ["offload", "adaptive"]
SOON = 4.0      # seconds; a connection that stands still waits for longer
NEVER = {"VMA_HYBRID_TCP_BULK": "0", "VMA_HYBRID_TCP_LOSS": "0", "VMA_HYBRID_TCP_BUDGET": "100"}
MACS = iter(f"02:76:6d:68:01:{number:02x}" for number in range(256))


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """Side a is served; a second pair of interfaces, wa and wb, is not."""
    with Sandbox("test") as sandbox:
        with_ipv6(without_offloads(sandbox))
        a, b = sandbox.sides
        a.ip("link", "add", "wa", "type", "veth", "peer", "name", "wb", "netns", b.netns)
        for side, device, address in ((a, "wa", "10.78.0.1/24"), (b, "wb", "10.78.0.2/24")):
            side.ip("address", "add", address, "dev", device)
            side.ip("link", "set", device, "up")
            for name in ("all", side.device, device):
                run_command(*side.command(["sysctl", "-qw", f"net.ipv4.conf.{name}.rp_filter=0"]))
        with Service(sandbox, sides=[a]) as running:
            yield running


@pytest.fixture(autouse=True)
def neighbours_anew(request: pytest.FixtureRequest) -> None:
    """Each finds the other as it is now."""
    if "service" in request.fixturenames:
        for side in request.getfixturevalue("service").sandbox.sides:
            side.ip("neigh", "flush", "dev", side.device)


@contextmanager
def qdisc(side: Side, *what: str) -> Iterator[None]:
    run_command(*side.command(["tc", "qdisc", "replace", "dev", side.device, "root", *what]))
    try:
        yield
    finally:
        run_command(*side.command(["tc", "qdisc", "del", "dev", side.device, "root"]))


@contextmanager
def mute(side: Side) -> Iterator[None]:
    """Nothing that it sends arrives."""
    with qdisc(side, "blackhole"):
        yield


@contextmanager
def conversation(service: Service, policy: str, ip: str = "4", server: bool = False,
                 to: Side | None = None, ends: bool = True) -> Iterator[ShimPeer]:
    """A program on side a whose connection to an echo server on the kernel, or from a client there, is on a ring."""
    a_side, b_side = over(service.sandbox.a, ip), to or over(service.sandbox.b, ip)
    with ShimPeer(service, b_side, "") as b, ShimPeer(service, a_side, policy, **NEVER) as a:
        one, other = (b, a) if server else (a, b)
        port = other.do("listen", address=other.side.address)
        if server and policy == "offload":
            other.do("waits")
        one.do("connect", address=other.side.address, port=port)
        other.do("accept")
        a.do("nodelay")
        b.do("echo")
        comes_to_ring(service, a)
        yield a
        a.do("close")
        assert not ends or b.do("echo_ended")


def goes_on(a: ShimPeer, size: int = 20000) -> None:
    """The next answers come in time."""
    begin = time.monotonic()
    assert a.do("ask", SOON, count=2, size=size) == ""
    assert time.monotonic() - begin < SOON


def on_ring(service: Service, a: ShimPeer) -> bool:
    return [s["pid"] for s in offloaded(service)] == [a.pid]


def is_home(service: Service, a: ShimPeer, reason: str) -> None:
    """Or was, and is on a ring again."""
    log = service.ask("explain", str(a.pid))
    assert reason in log, log


@pytest.mark.parametrize("server", [False, True], ids=["client", "server"])
@pytest.mark.parametrize("ip", ["4", "6"])
@pytest.mark.parametrize("policy", POLICIES)
def test_neighbour_gets_another_mac(service: Service, policy: str, ip: str, server: bool) -> None:
    a_side, b_side = service.sandbox.sides
    with conversation(service, policy, ip, server) as a:
        mac, address = next(MACS), over(b_side, ip).address
        b_side.ip("link", "set", b_side.device, "address", mac)
        if ip == "6":   # taking it away would take the address, too
            b_side.ip("address", "replace", "fd77::2/64", "dev", b_side.device, "nodad")
        a_side.ip("neigh", "replace", address, "lladdr", mac, "dev", a_side.device, "nud", "reachable")
        time.sleep(0.3)
        goes_on(a)
        assert on_ring(service, a)


@pytest.mark.parametrize("ip", ["4", "6"])
@pytest.mark.parametrize("policy", POLICIES)
def test_mtu_shrinks(service: Service, policy: str, ip: str) -> None:
    sides = service.sandbox.sides
    with conversation(service, policy, ip) as a:
        try:
            for side in sides:
                side.ip("link", "set", side.device, "mtu", "1300")
            time.sleep(0.3)
            goes_on(a)
            assert on_ring(service, a)
        finally:
            for side in sides:
                side.ip("link", "set", side.device, "mtu", "1500")
        goes_on(a)


def test_mtu_shrinks_under_what_waits(service: Service) -> None:
    """Segments are queued when it happens."""
    sides = service.sandbox.sides
    slow = ("tbf", "rate", "2mbit", "burst", "3000", "latency", "1s")
    with conversation(service, "offload") as a, qdisc(sides[1], *slow):
        shrink = "; ".join(" ".join(side.command(["ip", "link", "set", side.device, "mtu", "1000"])) for side in sides)
        later = subprocess.Popen(["sh", "-c", f"sleep 0.15; {shrink}"])
        try:
            goes_on(a, 100000)
        finally:
            assert later.wait() == 0
            for side in sides:
                side.ip("link", "set", side.device, "mtu", "1500")


@pytest.mark.parametrize("server", [False, True], ids=["client", "server"])
@pytest.mark.parametrize("policy", POLICIES)
def test_route_leaves_the_interface(service: Service, policy: str, server: bool) -> None:
    a_side, b_side = service.sandbox.sides
    here, there = f"{a_side.address}/32", f"{b_side.address}/32"
    with conversation(service, policy, server=server) as a:
        try:
            a_side.ip("route", "add", there, "via", "10.78.0.2", "dev", "wa")
            until(lambda: not offloaded(service), what=lambda: str(offloaded(service)))
            is_home(service, a, "tcp-route")
            b_side.ip("route", "add", here, "via", "10.78.0.1", "dev", "wb")
            with mute(b_side):  # the old way is gone
                goes_on(a)
        finally:
            for side, to in ((a_side, there), (b_side, here)):
                subprocess.run(side.command(["ip", "route", "del", to]), check=False, capture_output=True)
        goes_on(a)


@pytest.mark.parametrize("policy", POLICIES)
def test_policy_routing(service: Service, policy: str) -> None:
    """The kernel alone knows the way then."""
    a_side, _ = service.sandbox.sides
    with conversation(service, policy) as a:
        try:
            a_side.ip("rule", "add", "priority", "100", "fwmark", "9", "table", "99")
            until(lambda: not offloaded(service), what=lambda: str(offloaded(service)))
            goes_on(a)
        finally:
            a_side.ip("rule", "del", "priority", "100")


@pytest.mark.parametrize("policy", POLICIES)
def test_neighbour_that_moves_without_a_word(service: Service, policy: str) -> None:
    """The kernel's entry is wrong: it finds out by asking, so the connection goes home."""
    a_side, b_side = service.sandbox.sides
    with conversation(service, policy) as a:
        b_side.ip("link", "set", b_side.device, "arp", "off", "address", next(MACS))  # no gratuitous ARP
        b_side.ip("link", "set", b_side.device, "arp", "on")
        assert a.do("ask", 12.0, count=2, size=100) == ""
    a_side.ip("neigh", "flush", "dev", a_side.device)


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_answers_for_a_while(service: Service, policy: str) -> None:
    """It goes home, and on from there."""
    with conversation(service, policy) as a:
        with mute(service.sandbox.b):
            a.do("send", data="hello")
            until(lambda: not offloaded(service), 5, what=lambda: str(offloaded(service)))
            is_home(service, a, "tcp-stuck")
        assert a.do("read", size=5) == "hello"
        goes_on(a)


@pytest.mark.parametrize("policy", POLICIES)
def test_user_timeout_is_not_measured_anew(service: Service, policy: str) -> None:
    """The kernel would begin at zero: a connection that is to end within seconds ends on its ring."""
    with conversation(service, policy, ends=False) as a:
        a.do("user_timeout", ms=2500)
        with mute(service.sandbox.b):
            a.do("send", data="hello")
            error, seconds = a.do("ended")
        assert error == "ETIMEDOUT"
        assert 2.2 < seconds < 3.2


def ipv6_again(service: Service) -> None:
    """A link that was down, or had a small MTU, has lost its address."""
    for number, side in enumerate(service.sandbox.sides, 1):
        side.ip("address", "replace", f"fd77::{number}/64", "dev", side.device, "nodad")


def subnet(side: Side, ip: str) -> tuple[str, ...]:
    """The kernel's route to the peer's network, as `ip route change` takes it."""
    if ip == "6":
        return "-6", "route", "change", "fd77::/64", "dev", side.device, "proto", "kernel", "metric", "256"
    network = side.address.rpartition(".")[0] + ".0/24"
    return "route", "change", network, "dev", side.device, "proto", "kernel", "scope", "link", "src", side.address


@contextmanager
def metrics(side: Side, ip: str = "4") -> Iterator[None]:
    """The route to the peer has an initial window that no stack has by default."""
    side.ip(*subnet(side, ip), "initcwnd", "3")
    try:
        yield
    finally:
        side.ip(*subnet(side, ip))


@pytest.mark.parametrize("server", [False, True], ids=["client", "server"])
@pytest.mark.parametrize("ip", ["4", "6"])
@pytest.mark.parametrize("policy", POLICIES)
def test_metrics_of_tcp_come_to_the_route(service: Service, policy: str, ip: str, server: bool) -> None:
    """Only the kernel acts on them; and an answer to a SYN would be wrong already, so listeners are its, too."""
    ipv6_again(service)
    with conversation(service, policy, ip, server) as a, metrics(service.sandbox.a, ip):
        until(lambda: not offloaded(service), what=lambda: str(offloaded(service)))
        is_home(service, a, "tcp-metrics")
        goes_on(a)


@pytest.mark.parametrize(("change", "reason"), [
    (("route", "{}", "{there}/32", "dev", "{dev}", "initcwnd", "20"), "tcp-metrics"),
    (("route", "{}", "{there}/32", "nexthop", "dev", "{dev}", "nexthop", "dev", "{dev}", "weight", "2"),
     "route-complex"),
    (("rule", "{}", "priority", "100", "fwmark", "9", "table", "99"), "policy-routing"),
], ids=["metrics", "multipath", "rule"])
@pytest.mark.parametrize("policy", POLICIES)
def test_it_comes_back_however_long_that_lasts(service: Service, policy: str, change: tuple[str, ...],
                                               reason: str) -> None:
    """Also when it has been tried meanwhile, in vain."""
    a_side, b_side = service.sandbox.sides

    def does(what: str) -> None:
        a_side.ip(*(word.format(what, there=b_side.address, dev=a_side.device) for word in change))

    def tried() -> bool:
        goes_on(a, 100)
        return reason in service.ask("explain", str(a.pid))

    def back() -> bool:
        goes_on(a, 100)
        return on_ring(service, a)

    with conversation(service, policy) as a:
        does("add")
        try:
            until(lambda: not offloaded(service), what=lambda: str(offloaded(service)))
            until(tried, 5)
            time.sleep(1)
            goes_on(a)
        finally:
            does("del")
        until(back, 10)


def busy(service: Service, client: ShimPeer, server: ShimPeer) -> None:
    client.do("connect", address=server.side.address, port=server.do("listen", address=server.side.address))
    server.do("accept")
    server.do("echo")
    assert client.do("ask", count=100, size=100) == ""


@pytest.mark.parametrize("ip", ["4", "6"])
@pytest.mark.parametrize("policy", POLICIES)
def test_metrics_of_tcp_keep_a_client_home(service: Service, policy: str, ip: str) -> None:
    ipv6_again(service)
    a_side, b_side = (over(side, ip) for side in service.sandbox.sides)
    with metrics(a_side, ip), ShimPeer(service, b_side, "") as b, ShimPeer(service, a_side, policy, **NEVER) as a:
        busy(service, a, b)
        assert not offloaded(service)
        is_home(service, a, "tcp-metrics")


@pytest.mark.parametrize("ip", ["4", "6"])
def test_metrics_of_tcp_keep_a_listener_home(service: Service, ip: str) -> None:
    """It comes to rings when they have gone, and goes home when they come again."""
    ipv6_again(service)
    a_side, b_side = (over(side, ip) for side in service.sandbox.sides)
    with ShimPeer(service, b_side, "") as b, ShimPeer(service, a_side, "offload") as a:
        port = a.do("listen", address=a_side.address)

        def reason_is(wanted: str) -> None:
            until(lambda: not a.do("waits") and wanted in service.ask("explain", str(a.pid)),
                  what=lambda: a_side.ip("-6", "route", "show") + service.ask("explain", str(a.pid)))

        with metrics(a_side, ip):
            reason_is("tcp-metrics")
        reason_is(": offloaded")
        with metrics(a_side, ip):
            reason_is("tcp-metrics")
            b.do("connect", address=a_side.address, port=port)
            a.do("accept")
            b.do("echo")
            assert a.do("ask", count=100, size=100) == ""
            assert not offloaded(service)


@pytest.fixture(scope="module")
def beyond() -> Iterator[tuple[Service, Side]]:
    """A service on side a of a sandbox whose side b routes to a third namespace, by a link with an MTU of 800 that the
    third does not know of."""
    with Sandbox("test") as sandbox:
        without_offloads(sandbox)
        a, b = sandbox.sides
        far = replace(b, netns=b.netns[:-1] + "c", device="vy", address="10.99.0.2")
        run_command("ip", "netns", "add", far.netns)
        sandbox.at_close(lambda: subprocess.run(["ip", "netns", "del", far.netns], check=False))
        b.ip("link", "add", "vx", "mtu", "800", "type", "veth", "peer", "name", "vy", "mtu", "1500", "netns", far.netns)
        b.ip("address", "add", "10.99.0.1/24", "dev", "vx")
        b.ip("link", "set", "vx", "up")
        far.ip("address", "add", "10.99.0.2/24", "dev", "vy")
        far.ip("link", "set", "vy", "up")
        far.ip("route", "add", "default", "via", "10.99.0.1", "mtu", "lock", "800", "advmss", "1460")
        run_command(*b.command(["sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv4.icmp_ratelimit=0"]))
        for side, device in ((b, "vx"), (far, "vy")):
            run_command(*side.command(["ethtool", "-K", device, "tso", "off", "gso", "off", "tx", "off"]))
        a.ip("route", "add", "10.99.0.0/24", "via", b.address)
        with Service(sandbox, sides=[a]) as running:
            yield running, far


@pytest.mark.parametrize("policy", POLICIES)
def test_path_is_narrower_than_both_ends(beyond: tuple[Service, Side], policy: str) -> None:
    service, far = beyond
    service.sandbox.a.ip("route", "flush", "cache")
    with conversation(service, policy, to=far) as a:
        begin = time.monotonic()
        goes_on(a)
        assert time.monotonic() - begin < 2.5   # the kernel's first timeout, for what it takes for sent, is 3 s
    assert "mtu 800" in service.sandbox.a.ip("route", "get", far.address), "the kernel has learned it"
    with conversation(service, policy, to=far) as a:    # the next one knows it from the beginning
        begin = time.monotonic()
        goes_on(a)
        assert time.monotonic() - begin < 0.2
        assert on_ring(service, a)


@contextmanager
def fragments(service: Service, far: Side) -> Iterator[None]:
    """What it sends has no DF bit, and comes in fragments."""
    a, b = service.sandbox.sides
    b.ip("link", "set", "vx", "mtu", "1500")
    b.ip("route", "add", f"{a.address}/32", "dev", b.device, "mtu", "lock", "800")
    far.ip("route", "replace", "default", "via", "10.99.0.1")
    run_command(*far.command(["sysctl", "-qw", "net.ipv4.ip_no_pmtu_disc=1"]))
    a.ip("route", "flush", "cache")
    try:
        yield
    finally:
        run_command(*far.command(["sysctl", "-qw", "net.ipv4.ip_no_pmtu_disc=0"]))
        far.ip("route", "replace", "default", "via", "10.99.0.1", "mtu", "lock", "800", "advmss", "1460")
        b.ip("route", "del", f"{a.address}/32")
        b.ip("link", "set", "vx", "mtu", "800")


@pytest.mark.parametrize("server", [False, True], ids=["client", "server"])
@pytest.mark.parametrize("policy", POLICIES)
def test_segments_in_fragments(beyond: tuple[Service, Side], policy: str, server: bool) -> None:
    """The kernel puts them together, of a connection that it has."""
    service, far = beyond
    with fragments(service, far), conversation(service, policy, server=server, to=far) as a:
        goes_on(a)
        until(lambda: not offloaded(service), what=lambda: str(offloaded(service)))
        is_home(service, a, "tcp-fragments")
        goes_on(a)
        assert not offloaded(service)


@pytest.mark.parametrize("policy", POLICIES)
def test_peer_of_a_dead_connection_is_reset(service: Service, policy: str) -> None:
    """It sends again what was never acknowledged, to a program that has closed its socket and looks at nothing."""
    a_side, b_side = service.sandbox.sides
    with ShimPeer(service, b_side, "") as b, ShimPeer(service, a_side, policy, **NEVER) as a:
        a.do("connect", address=b_side.address, port=b.do("listen", address=b_side.address))
        b.do("accept")
        b.do("echo")
        assert a.do("ask", count=40, size=100) == ""
        until(lambda: on_ring(service, a), what=lambda: str(offloaded(service)))
        a.do("user_timeout", ms=600)
        with mute(b_side):
            with pytest.raises(Refusal, match="TimeoutError"):
                a.do("ask", count=1, size=100)
            a.do("close")
        begin = time.monotonic()
        assert b.do("echo_ended")
        assert time.monotonic() - begin < SOON


REFUSED = """
import errno, socket, sys, time
begin = time.monotonic()
try:
    socket.create_connection((sys.argv[1], 80))
except OSError as error:
    print(errno.errorcode[error.errno], time.monotonic() - begin, flush=True)
"""


@pytest.mark.parametrize(("net", "host", "via", "forwarding", "error"),
                         [("10.99.0.0/24", "10.99.0.9", "4", "net.ipv4.ip_forward", "EHOSTUNREACH"),
                          ("fd99::/64", "fd99::9", "6", "net.ipv6.conf.all.forwarding", "ENETUNREACH")], ids=["4", "6"])
def test_a_router_that_refuses(service: Service, net: str, host: str, via: str, forwarding: str, error: str) -> None:
    """The kernel alone is told of it, and counts it, so that a connection that nobody answers begins anew there."""
    a, b = service.sandbox.sides
    ipv6_again(service)
    a.ip("route", "add", net, "via", over(b, via).address)
    b.ip("route", "add", "unreachable", net)
    unlimited = "net.ipv4.icmp_ratelimit=0", "net.ipv6.icmp.ratelimit=0"
    run_command(*b.command(["sysctl", "-qw", f"{forwarding}=1", *unlimited]))
    try:
        argv = service.run_argv([sys.executable, "-c", REFUSED, host], "latency", VMA_HYBRID_TCP="offload")
        said, seconds = service.sandbox.start(a, argv, env=service.env).result(20).split()
        assert said == error
        assert 0.9 < float(seconds) < 3     # the SYN is sent again after a second; so is the kernel's
    finally:
        a.ip("route", "del", net)
        b.ip("route", "del", "unreachable", net)
