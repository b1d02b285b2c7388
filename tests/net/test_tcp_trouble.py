"""Ring trouble: an interface goes down, away, or gets another address, while a connection on its ring carries bulk data
in both directions, to a peer on the kernel. It goes home, or on, as the kernel's does; no byte is lost, and it may come
back.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from net.service_lab import lost_at_once, under_shim, until
from net.test_tcp_path import NEVER, conversation
from net.test_tcp_shim import ShimPeer, comes_to_ring, offloaded, over, with_ipv6, without_offloads

from vmahybrid.bench.sandbox import Sandbox, Side, run_command
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

SIZE = 12_000_000
MAC = "02:76:6d:68:02:01"
LONG = 2.2      # seconds


@pytest.fixture(scope="module")
def service(softverbs: bool) -> Iterator[Service]:
    """Side a is served; where it goes down its connections go home."""
    with Sandbox("test") as sandbox:
        with_ipv6(without_offloads(sandbox))
        for side in sandbox.sides:
            run_command(*keeps_addresses(side).split())
        with Service(sandbox, sides=[sandbox.a], softverbs=softverbs) as running:
            yield lost_at_once(running)


@pytest.fixture
def patient(service: Service) -> Iterator[Service]:
    service.ask("config", "set", "ring.down_seconds=10")
    yield service
    lost_at_once(service)


def command(side: Side, *words: str) -> str:
    return " ".join(side.command(["ip", *words]))


def keeps_addresses(side: Side) -> str:
    """Those of IPv6, too, when the interface goes down."""
    return " ".join(side.command(["sysctl", "-qw", f"net.ipv6.conf.{side.device}.keep_addr_on_down=1"]))


def down_and_up(side: Side, seconds: float = 0.3) -> list[str]:
    return [command(side, "link", "set", side.device, "down"), f"sleep {seconds}",
            command(side, "link", "set", side.device, "up")]


def own_down(a: Side, b: Side) -> list[str]:
    return down_and_up(a)


def carrier_lost(a: Side, b: Side) -> list[str]:
    return down_and_up(b)


def made_again(a: Side, b: Side) -> list[str]:
    again = [command(a, "link", "add", a.device, "address", a.mac, "type", "veth",
                     "peer", "name", b.device, "address", b.mac, "netns", b.netns)]  # fmt: skip
    for side in (a, b):
        again += [command(side, "address", "add", f"{side.address}/24", "dev", side.device),
                  command(side, "address", "add", f"{over(side, '6').address}/64", "dev", side.device, "nodad"),
                  keeps_addresses(side),
                  " ".join(side.command(["ethtool", "-K", side.device, "tso", "off", "gso", "off", "tx", "off"])),
                  command(side, "link", "set", side.device, "up")]
    return [command(a, "link", "del", a.device), "sleep 0.1", *again]


def another_mac(a: Side, b: Side) -> list[str]:
    return [command(a, "link", "set", a.device, "address", MAC),
            command(b, "neigh", "replace", a.address, "lladdr", MAC, "dev", b.device)]


def its_own_mac(a: Side, b: Side) -> None:
    a.ip("link", "set", a.device, "address", a.mac)
    b.ip("neigh", "replace", a.address, "lladdr", a.mac, "dev", b.device)


Trouble = Callable[[Side, Side], list[str]]
TROUBLES = [own_down, carrier_lost, made_again, another_mac]


@pytest.mark.parametrize("server", [False, True], ids=["client", "server"])
@pytest.mark.parametrize("policy", ["offload", "adaptive"])
@pytest.mark.parametrize("trouble", TROUBLES, ids=[trouble.__name__ for trouble in TROUBLES])
def test_a_connection_outlives_it(service: Service, trouble: Trouble, policy: str, server: bool) -> None:
    a_side, b_side = service.sandbox.sides
    with conversation(service, policy, server=server) as a:
        if trouble is another_mac and policy == "offload":
            time.sleep(2.5)     # the kernel does not know of it before (docs/tcp-wiring.md, What is missing)
        steps = ["sleep 0.15", *trouble(a_side, b_side)]
        beside = subprocess.Popen(["sh", "-ec", "\n".join(steps)])
        begin = time.monotonic()
        try:
            assert a.do("bulk", 30, size=SIZE) == ""
        finally:
            assert beside.wait(10) == 0
        took = time.monotonic() - begin
        print(f"{SIZE * 2 / took / 1e6:.0f} MB/s, {took:.1f} s; {service.ask('explain', str(a.pid))}")
        comes_to_ring(service, a)
    until(lambda: not offloaded(service))
    if trouble is another_mac:
        its_own_mac(a_side, b_side)
    assert service.program.running
    assert "Traceback" not in service.program.errors


def without_route(a: Side, b: Side) -> list[str]:
    route = [f"{a.address.rpartition('.')[0]}.0/24", "dev", a.device]
    return [command(a, "route", "del", *route), "sleep 1.3", command(a, "route", "add", *route, "src", a.address)]


def unreachable(a: Side, b: Side) -> list[str]:
    route = ["unreachable", f"{over(b, '6').address}/128"]
    return [command(a, "-6", "route", "add", *route), "sleep 1.3", command(a, "-6", "route", "del", *route)]


def takes_the_address_along(a: Side, b: Side) -> list[str]:
    keeps, address = keeps_addresses(a), over(a, "6").address
    return [f"{keeps[:-1]}0", *down_and_up(a), keeps,
            command(b, "neigh", "replace", address, "lladdr", a.mac, "dev", b.device),  # the kernel takes 2 s to ask
            command(a, "address", "add", f"{address}/64", "dev", a.device, "nodad")]


@pytest.mark.parametrize("policy", ["offload", "adaptive"])
@pytest.mark.parametrize(("trouble", "ip"), [
    (own_down, "4"), (carrier_lost, "4"), (without_route, "4"), (unreachable, "6"),
    (takes_the_address_along, "6")])  # fmt: skip
def test_a_short_one_leaves_it_on_its_ring(patient: Service, trouble: Trouble, ip: str, policy: str) -> None:
    """The ring goes on as soon as there is a way, and what was under way goes again then."""
    a_side, b_side = patient.sandbox.sides
    with conversation(patient, policy, ip) as a:
        flows = [sock["flow_id"] for sock in offloaded(patient)]
        steps = trouble(a_side, b_side)
        beside = subprocess.Popen(["sh", "-ec", "\n".join(["sleep 0.05", *steps])])
        try:
            while beside.poll() is None:
                assert a.do("ask", 2, count=1, size=100_000) == ""
        finally:
            assert beside.wait(10) == 0
        now = [sock["flow_id"] for sock in offloaded(patient)]
        assert flows == now, patient.ask("explain", str(a.pid))
    assert "Traceback" not in patient.program.errors


@pytest.mark.parametrize(("policy", "ip", "lo", "seconds"), [
    ("offload", "4", "up", 0), ("offload", "6", "up", 1), ("offload", "6", "down", 0), ("adaptive", "mapped", "up", 1),
    ("adaptive", "4", "down", 0)])  # fmt: skip
def test_it_outlives_a_long_one(service: Service, policy: str, ip: str, lo: str, seconds: int) -> None:
    """Longer than a service repeats what the kernel refuses, and sooner than the kernel knows of the connection."""
    a = service.sandbox.a
    service.ask("config", "set", f"ring.down_seconds={seconds}")
    a.ip("link", "set", "lo", lo)
    try:
        with conversation(service, policy, ip) as program:
            steps = ["sleep 0.05", *down_and_up(a, LONG)]
            beside = subprocess.Popen(["sh", "-ec", "\n".join(steps)])
            try:
                assert program.do("bulk", 60, size=SIZE) == ""    # the kernel measures no round trip there
            finally:
                assert beside.wait(10) == 0
            until(lambda: program.do("ask", count=4, size=100) == "")
    finally:
        lost_at_once(service)
        a.ip("link", "set", "lo", "up")
        if lo == "down":
            a.ip("address", "replace", "::1/128", "dev", "lo")
    until(lambda: not offloaded(service))


def test_another_mac_while_it_is_down(patient: Service) -> None:
    a_side, b_side = patient.sandbox.sides
    with conversation(patient, "adaptive") as a:
        steps = down_and_up(a_side)
        steps[1:2] = [*another_mac(a_side, b_side), steps[1]]
        steps += another_mac(a_side, b_side)[1:]    # the peer's went with its carrier
        subprocess.run(["sh", "-ec", "\n".join(steps)], check=True, timeout=10)
        try:
            assert a.do("ask", 5, count=2, size=100_000) == ""
            comes_to_ring(patient, a)
        finally:
            its_own_mac(a_side, b_side)
    assert "MAC" in patient.program.errors


def just_up(service: Service, ip: str) -> None:
    side = service.sandbox.a
    side.ip("link", "set", side.device, "up")


def made_anew(service: Service, ip: str) -> None:
    subprocess.run(["sh", "-ec", "\n".join(made_again(*service.sandbox.sides))], check=True, timeout=10)


def service_anew(service: Service, ip: str) -> None:
    assert service.program.stop(signal.SIGTERM, 10) == 0
    service.start()
    lost_at_once(service)
    just_up(service, ip)


def address_late(service: Service, ip: str) -> None:
    side = over(service.sandbox.a, ip)
    side.ip("address", "del", f"{side.address}/64", "dev", side.device)
    just_up(service, ip)
    time.sleep(1)
    side.ip("address", "add", f"{side.address}/64", "dev", side.device, "nodad")


@pytest.mark.parametrize(("ip", "up"), [
    ("4", just_up), ("6", just_up), ("4", made_anew), ("6", service_anew), ("6", address_late)])  # fmt: skip
def test_a_half_closed_one_outlives_it(service: Service, ip: str, up: Callable[[Service, str], None]) -> None:
    """The peer has ended its stream, and does not say so again."""
    a_side, b_side = (over(side, ip) for side in service.sandbox.sides)
    with ShimPeer(service, b_side, "") as b, ShimPeer(service, a_side, "offload", **NEVER) as a:
        a.do("connect", address=b_side.address, port=b.do("listen", address=b_side.address))
        b.do("accept")
        until(lambda: a.pid in {sock["pid"] for sock in offloaded(service)})
        b.do("send", data="last")
        b.do("shutdown")
        time.sleep(0.1)
        a_side.ip("link", "set", a_side.device, "down")
        until(lambda: not offloaded(service))
        time.sleep(0.5)
        up(service, ip)
        assert a.do("read", size=5) == "last"
        a.do("send", data="more")
        assert b.do("read", size=4) == "more"


def test_what_was_lost_goes_again_when_it_is_up(service: Service) -> None:
    """The kernel's own timeouts are over after 1, 3 or 4, and 7 or 10 s; it is up after 4.5 s."""
    ip = "6" if service.softverbs else "4"
    a_side, b_side = service.sandbox.sides
    peer = over(b_side, ip)
    knows = command(a_side, "neigh", "replace", peer.address, "lladdr", b_side.mac, "dev", a_side.device,
                    "nud", "permanent")
    mac = command(b_side, "link", "set", b_side.device, "address")
    with ShimPeer(service, peer, "") as b, ShimPeer(service, over(a_side, ip), "offload", **NEVER) as a:
        a.do("connect", address=peer.address, port=b.do("listen", address=peer.address))
        b.do("accept")
        b.do("echo")
        a.do("ask", count=5, size=100)
        assert offloaded(service)
        down, *_, up = down_and_up(a_side)
        steps = [knows, f"{mac} {MAC}", "sleep 0.1", down, f"{mac} {b_side.mac}", "sleep 4.4", up, knows]
        beside = subprocess.Popen(["sh", "-ec", "\n".join(steps)])
        try:
            time.sleep(0.05)
            begun = time.monotonic()
            assert a.do("ask", count=1, size=100) == ""
            assert 4.3 < time.monotonic() - begun < 6
        finally:
            assert beside.wait(10) == 0
        assert not offloaded(service)


def opening(service: Service, policy: str, ip: str) -> list[Any]:
    """What opening_program.py says."""
    a_side, b_side = (over(side, ip) for side in service.sandbox.sides)
    with ShimPeer(service, b_side, "") as b, ShimPeer(service, a_side, "") as filler:
        port = b.do("listen", address=b_side.address, backlog=0)    # beside one that waits it answers no SYN
        filler.do("connect", address=b_side.address, port=port)     # the neighbour is known then
        argv = [sys.executable, str(Path(__file__).parent / "opening_program.py"), b_side.address, str(port)]
        if policy:
            argv = under_shim(service, argv, VMA_HYBRID_TCP=policy, VMA_THREAD_MODE="1", VMA_RX_POLL="1000")
        with subprocess.Popen(a_side.command(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
                              env={**os.environ, **service.env}) as program:
            assert program.stdin and program.stdout
            try:
                said = [json.loads(program.stdout.readline())]
                if policy:
                    until(lambda: len(offloaded(service)) == 12)
                for state in ("down", "up"):
                    a_side.ip("link", "set", a_side.device, state)
                    until(lambda: not offloaded(service))
                    if state == "up":
                        b.do("accept_all")
                    program.stdin.write("\n")
                    said.append(json.loads(program.stdout.readline()))
            except BaseException:
                program.kill()
                raise
            finally:
                a_side.ip("link", "set", a_side.device, "up")
    return said


@pytest.mark.parametrize("ip", ["4", "6"])
def test_who_opens_waits_for_a_route(service: Service, ip: str) -> None:
    """A connect() that has sent its SYN from the ring, as one of the kernel's."""
    assert opening(service, "offload", ip) == opening(service, "", ip)
    until(lambda: not offloaded(service))


def taken_by_ring(service: Service, server: ShimPeer, client: ShimPeer, address: str, port: int) -> bool:
    """A new connection to the listener of ``server``."""
    client.do("connect", address=address, port=port)
    server.do("accept")
    client.do("echo")
    assert server.do("ask", count=2, size=100) == ""
    found = any(sock["pid"] == server.pid for sock in offloaded(service))
    server.do("close")
    assert client.do("echo_ended")
    return found


def test_who_waits_at_a_listener(service: Service) -> None:
    """Connections that nobody has accepted yet outlive it; when they are, the listener comes back to its ring."""
    a_side, b_side = service.sandbox.sides
    with ExitStack() as stack:
        a = stack.enter_context(ShimPeer(service, a_side, "offload", **NEVER))
        early, later, new = (stack.enter_context(ShimPeer(service, b_side, "")) for _ in range(3))
        clients = {"early": early, "later": later}
        port = a.do("listen", address=a_side.address)
        a.do("waits")
        for name, client in clients.items():
            client.do("connect", address=a_side.address, port=port)
            client.do("send", data=name)
        subprocess.run(["sh", "-ec", "\n".join(own_down(a_side, b_side))], check=True, timeout=10)
        while clients:
            a.do("accept")
            client = clients.pop(a.do("read", size=5))
            a.do("send", data="seen")
            assert client.do("read", size=4) == "seen"
            a.do("close")
        until(lambda: taken_by_ring(service, a, new, a_side.address, port) or service.softverbs)  # QPs don't listen


def test_a_wildcard_listens_where_an_interface_comes_back() -> None:
    with Sandbox("test") as sandbox:
        a, b = without_offloads(sandbox).sides
        a.ip("link", "add", "wa", "type", "veth", "peer", "name", "wb", "netns", b.netns)
        wa, wb = replace(a, device="wa", address="10.78.0.1"), replace(b, device="wb", address="10.78.0.2")
        for side in (wa, wb):
            side.ip("address", "add", f"{side.address}/24", "dev", side.device)
            side.ip("link", "set", side.device, "up")
        with Service(sandbox, sides=[a, wa]) as service, ShimPeer(service, a, "offload", **NEVER) as server, \
                ShimPeer(service, b, "") as client:
            wa.ip("link", "set", "wa", "down")
            port = server.do("listen", address="0.0.0.0")
            until(lambda: taken_by_ring(service, server, client, a.address, port))
            wa.ip("link", "set", "wa", "up")
            until(lambda: taken_by_ring(service, server, client, wa.address, port))
            assert taken_by_ring(service, server, client, a.address, port)
