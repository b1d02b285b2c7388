"""SYNs whose source is an address that the kernel does not answer: neither does a listener on a ring, which has no
other idea of where an answer goes than the frame that came."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from net.service_lab import Api, until
from net.test_tcp_shim import over, with_ipv6, without_offloads

from vmahybrid.bench.sandbox import Sandbox, run_command
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

SENDER = Path(__file__).with_name("syn_from.py")
SERVER = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
listener = socket.create_server((sys.argv[1], 0), family=family, backlog=64)
print("port", listener.getsockname()[1], flush=True)
listener.accept()
"""
ELSEWHERE = {"4": ("10.88.0.1/24", "10.88.0.9"), "6": ("fd88::1/64", "fd88::9")}
REFUSED = {"4": ("10.66.0.1", "10.67.0.1", "10.68.0.1", "192.168.44.5"),
           "6": ("fd66::1", "fd67::1", "fd68::1", "fd99::1")}
TYPES = ("blackhole", "unreachable", "prohibit")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    """The server's side has a second link, routes that refuse, and strict reverse path filtering."""
    with Sandbox("test") as pair:
        with_ipv6(without_offloads(pair))
        side = pair.b
        filter_strictly(pair, 1)
        side.ip("link", "add", "other", "type", "veth", "peer", "name", "other-end")
        for link in ("other", "other-end"):
            side.ip("link", "set", link, "up")
        for ip, (address, _) in ELSEWHERE.items():
            side.ip("address", "add", address, "dev", "other", *(["nodad"] if ip == "6" else []))
            for kind, refused in zip(TYPES, REFUSED[ip], strict=False):
                side.ip("route", "add", kind, f"{refused}/{32 if ip == '4' else 128}")
        yield pair


@pytest.fixture(scope="module")
def service(sandbox: Sandbox) -> Iterator[Service]:
    with Service(sandbox) as running:
        yield running


def filter_strictly(sandbox: Sandbox, value: int) -> None:
    run_command(*sandbox.b.command(["sysctl", "-qw", f"net.ipv4.conf.all.rp_filter={value}"]))


def know(service: Service, address: str) -> None:
    """The server's side knows who has it, and asks nobody."""
    a, b = service.sandbox.sides
    b.ip("neigh", "replace", address, "lladdr", a.mac, "dev", b.device, "nud", "permanent")


def answered(service: Service, ip: str, on_ring: bool, honest: str, *sources: str, late: bool = False) -> set[str]:
    """``late``: what is strict by now was not when the ring was made."""
    sandbox, to = service.sandbox, over(service.sandbox.b, ip)
    argv = [sys.executable, "-c", SERVER, to.address]
    if on_ring:
        argv = service.run_argv(argv, "none", VMA_HYBRID_TCP="offload", VMA_RX_POLL="200")
    server = sandbox.start(sandbox.b, argv, env=service.env)
    try:
        port = server.wait_for(r"port (\d+)")[1]
        if on_ring:
            until(lambda: [s for s in Api(service).call("GET", "/v1/sockets")[1] if s["offloaded"]])
        if late:
            filter_strictly(sandbox, 1)
            time.sleep(1.5)
        command = [sys.executable, str(SENDER), sandbox.a.device, to.mac, to.address, port, honest, *sources]
        return set(sandbox.start(sandbox.a, command).result(20).split())
    finally:
        server.stop()


@pytest.mark.parametrize("ip", ["4", "6"])
def test_who_is_answered(service: Service, ip: str) -> None:
    side = over(service.sandbox.b, ip)
    own, (other, neighbour) = side.address, ELSEWHERE[ip]
    honest = own[:-1] + "7"
    know(service, honest)
    sources = [own, other.split("/")[0], *REFUSED[ip]]
    if ip == "4":  # IPv6 knows neither such a filter nor a broadcast
        sources += [neighbour, own.rsplit(".", 1)[0] + ".255", "255.255.255.255"]
    assert answered(service, ip, False, honest, *sources) == {honest}
    assert answered(service, ip, True, honest, *sources) == {honest}


def test_the_filter_may_change(service: Service) -> None:
    side, (_, neighbour) = over(service.sandbox.b, "4"), ELSEWHERE["4"]
    honest = side.address[:-1] + "7"
    try:
        filter_strictly(service.sandbox, 0)
        assert answered(service, "4", True, honest, neighbour) >= {neighbour}  # the kernel would, by its other link
        assert answered(service, "4", True, honest, neighbour, late=True) <= {honest}
    finally:
        filter_strictly(service.sandbox, 1)


def test_a_route_for_another_kind_of_traffic_refuses_nobody(service: Service) -> None:
    side = over(service.sandbox.b, "4")
    source = side.address[:-1] + "9"
    know(service, source)
    service.sandbox.b.ip("route", "add", "blackhole", f"{source}/32", "tos", "0x10")
    try:
        assert answered(service, "4", False, source) == {source}
        assert answered(service, "4", True, source) == {source}
    finally:
        service.sandbox.b.ip("route", "del", "blackhole", f"{source}/32", "tos", "0x10")
