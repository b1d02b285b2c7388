"""Sysctls of TCP act on connections on rings as on the kernel's, which the same program has beside."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
from net.test_tcp_path import NEVER
from net.test_tcp_shim import ShimPeer, introduce, over, with_ipv6, without_offloads

from vmahybrid.bench.sandbox import Sandbox, Side, run_command
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

_T = TypeVar("_T")

OPTIONS = {2: "mss", 3: "scale", 4: "sack", 8: "stamps"}    # kinds in a SYN


@pytest.fixture(scope="module")
def service(softverbs: bool) -> Iterator[Service]:
    """Side a is served."""
    with Sandbox("test") as sandbox:
        with_ipv6(without_offloads(sandbox))
        for ip in ("4", "6"):
            introduce(sandbox, ip)
        with Service(sandbox, sides=[sandbox.a], softverbs=softverbs) as running:
            yield running


@contextlib.contextmanager
def sysctls(side: Side, **values: int) -> Iterator[None]:
    """Of net.*, with "__" for each ".", during it."""
    names = {name.replace("__", "."): value for name, value in values.items()}
    before = run_command(*side.command(["sysctl", *(f"net.{name}" for name in names)])).splitlines()
    run_command(*side.command(["sysctl", "-qw", *(f"net.{name}={value}" for name, value in names.items())]))
    try:
        yield
    finally:
        run_command(*side.command(["sysctl", "-qw", *("=".join(line.split(" = ")) for line in before)]))


def on_both(service: Service, ip: str, run: Callable[[ShimPeer, ShimPeer, Side, Side], _T]) -> tuple[_T, _T]:
    """(on the kernel, from the SYN on a ring) of a program on side a; its peer comes next."""
    a_side, b_side = (over(side, ip) for side in service.sandbox.sides)
    found = []
    for policy in ("", "offload"):
        with ShimPeer(service, b_side, "") as b, ShimPeer(service, a_side, policy, **NEVER) as a:
            found.append(run(a, b, a_side, b_side))
    return found[0], found[1]


def syn(raw: str, ip: str) -> tuple[int, dict[str, str]]:
    """Hop limit and options of one."""
    data = bytes.fromhex(raw)
    hops, tcp = (data[8], data[20:]) if ip == "4" else (data[7], data[40:])
    found, at, end = {}, 20, (tcp[12] >> 4) * 4
    while at < end and tcp[at]:
        if tcp[at] == 1:
            at += 1
            continue
        if name := OPTIONS.get(tcp[at]):
            found[name] = "" if name == "stamps" else tcp[at + 2:at + tcp[at + 1]].hex()
        at += tcp[at + 1]
    return hops, found


@pytest.mark.parametrize(("ip", "values", "missing"), [
    ("4", {"ipv4__tcp_sack": 1}, set()),
    ("4", {"ipv4__ip_default_ttl": 33, "ipv4__tcp_sack": 0}, {"sack"}),
    ("4", {"ipv4__tcp_window_scaling": 0}, {"scale"}),
    ("6", {"ipv4__tcp_sack": 0, "ipv4__tcp_window_scaling": 0}, {"sack", "scale"}),
], ids=["defaults", "ttl-sack", "scaling", "ipv6"])  # fmt: skip
def test_what_a_syn_offers(service: Service, ip: str, values: dict[str, int], missing: set[str]) -> None:
    def run(a: ShimPeer, b: ShimPeer, _: Side, b_side: Side) -> tuple[int, dict[str, str]]:
        a.do("connect", address=b_side.address, port=b.do("listen", address=b_side.address, save_syn=True))
        b.do("accept")
        return syn(b.do("saved_syn"), ip)

    with sysctls(service.sandbox.a, **values):
        kernel, ring = on_both(service, ip, run)
    assert kernel[1].keys() == {"mss", "scale", "sack", "stamps"} - missing
    assert ring[0] == kernel[0]
    # VMA_TCP_TIMESTAMP_OPTION is 0 by default; the shift is of another buffer
    assert ring[1].keys() == kernel[1].keys() - {"stamps"}


def test_a_dead_peer_is_found_in_the_kernels_time(service: Service) -> None:
    def run(a: ShimPeer, b: ShimPeer, a_side: Side, b_side: Side) -> tuple[str, bool]:
        a.do("connect", address=b_side.address, port=b.do("listen", address=b_side.address))
        b.do("accept")
        a.do("keepalive")
        b.do("echo")
        a.do("ask", count=3, size=10)
        b_side.ip("route", "add", "blackhole", f"{a_side.address}/32")
        try:
            error, seconds = a.do("ended")
        finally:
            b_side.ip("route", "del", "blackhole", f"{a_side.address}/32")
        return error, 1.5 < seconds < 4.5

    with sysctls(service.sandbox.a, ipv4__tcp_keepalive_time=1, ipv4__tcp_keepalive_intvl=1,
                 ipv4__tcp_keepalive_probes=2):
        assert on_both(service, "4", run) == (("ETIMEDOUT", True), ("ETIMEDOUT", True))


def test_a_backlog_is_no_longer_than_somaxconn(service: Service) -> None:
    def run(a: ShimPeer, b: ShimPeer, a_side: Side, _: Side) -> int:
        port = a.do("listen", address=a_side.address)
        a.do("waits")
        return int(b.do("connect_many", address=a_side.address, port=port, count=12))

    with sysctls(service.sandbox.a, core__somaxconn=4):
        kernel, ring = on_both(service, "4", run)
    assert kernel == ring == 5


@pytest.mark.parametrize("after_idle", [0, 1])
def test_the_congestion_window_after_a_rest(service: Service, after_idle: int) -> None:
    def run(a: ShimPeer, b: ShimPeer, _: Side, b_side: Side) -> bool:
        a.do("connect", address=b_side.address, port=b.do("listen", address=b_side.address))
        b.do("accept")
        b.do("drain", size=20_000_000)
        a.do("pour", size=20_000_000)
        b.do("drained")
        before = a.do("cwnd")
        assert before > 12
        time.sleep(2)
        a.do("burst", count=1, size=10)
        after = int(a.do("cwnd"))
        return after <= 11 if after_idle else after >= before

    with sysctls(service.sandbox.a, ipv4__tcp_slow_start_after_idle=after_idle):
        _, ring = on_both(service, "4", run)    # the kernel's control may be BBR, which has its own ways
    assert ring
