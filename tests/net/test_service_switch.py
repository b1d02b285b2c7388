"""The service goes to tcx while bulk TCP of the kernel crosses a served interface, takes its program off one without a
rule, and back; rings notice nothing."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from apps.shimmed import Stage
from net.service_lab import Api, Peer, foreign_program, udp_from, until, xdp_only

from vmahybrid.bench.sandbox import Program, Sandbox, Side
from vmahybrid.bench.served import Service, xdp_program
from vmahybrid.contracts import lib
from vmahybrid.steering.reasons import Reason

pytestmark = pytest.mark.root

TCX = "generic, now tcx (bulk traffic)"
XDP = "generic XDP"
OFF = "generic XDP, off: no rule"
FAR = ["10.77.0.2", 7000]


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with Sandbox("test") as made:
        yield made


@pytest.fixture
def service(sandbox: Sandbox, softverbs: bool) -> Iterator[Service]:
    with Service(sandbox, softverbs=softverbs) as running:
        yield running


@contextmanager
def bulk(sandbox: Sandbox, to: Side, seconds: int) -> Iterator[None]:
    """One TCP stream of the kernel to that side, through its end."""
    source = next(side for side in sandbox.sides if side is not to)
    server = sandbox.start(to, ["iperf3", "-s", "-1", "--forceflush"])
    server.wait_for("listening")
    client = sandbox.start(source, ["iperf3", "-c", to.address, "-t", str(seconds), "-J"])
    try:
        yield
    finally:
        client.stop()
        server.stop()


def interface(service: Service, side: Side) -> Any:
    return next(i for i in Api(service).status()["interfaces"] if i["netns"] == side.netns and i["hook"])


def far_ends(side: Side) -> list[str]:
    return [link["ifname"] for link in json.loads(side.ip("-j", "link")) if link["ifname"].startswith("vmhf")]


def test_sockperf_loses_nothing_while_it_switches(sandbox: Sandbox, service: Service) -> None:
    """Twice on AF_XDP rings, whose frames come by either hook. On raw packet QPs once: the programs of the software
    device are in tcx, where those of the service come and go."""
    rounds, seconds, out = (1, 7, "pass-rule") if service.softverbs else (2, 14, "ring")
    stage = Stage(sandbox, service)
    server = stage.serve("sockperf", "server", "-i", sandbox.b.address)
    stage.wait_bound(sandbox.b, 11111)
    client = stage.client("sockperf", "ping-pong", "-i", sandbox.b.address, "-t", str(seconds), "--mps=3000",
                          "--full-rtt")
    stage.require_rings(server, client)
    before_all = interface(service, sandbox.b)["switches"]
    seen = []
    for _ in range(rounds):
        assert interface(service, sandbox.b)["hook"] == XDP
        with bulk(sandbox, sandbox.b, 10):
            until(lambda: interface(service, sandbox.b)["hook"] == TCX, 3.0)
            before = interface(service, sandbox.b)["outs"][out]
            time.sleep(0.5)
            seen.append(interface(service, sandbox.b)["outs"][out] - before)
            print(interface(service, sandbox.b))
        assert interface(service, sandbox.b)["hook"] == TCX  # not at once
        until(lambda: interface(service, sandbox.b)["hook"] == XDP, 5.0)
    text = client.result(20)
    server.stop()
    assert re.search(r"dropped messages = 0; # duplicated messages = 0; # out-of-order messages = 0", text), text
    assert min(seen) > 20  # by the far end; two polling programs and iperf3 share few cores
    shown = interface(service, sandbox.b)
    assert (shown["switches"] - before_all, shown["switch_failures"]) == (2 * rounds, 0)
    assert shown["outs"]["pass-ring-gone"] == 0
    assert Api(service).status()["counters"]["switches_total"] >= 2 * rounds
    assert 'event="switches"' in Api(service).call("GET", "/metrics")[1]


@xdp_only("AF_XDP rings move between the hooks")
def test_order_stays_while_it_switches_under_load(sandbox: Sandbox, service: Service) -> None:
    stage = Stage(sandbox, service)
    server = stage.serve("sockperf", "server", "-i", sandbox.b.address)
    stage.wait_bound(sandbox.b, 11111)
    client = stage.client("sockperf", "under-load", "-i", sandbox.b.address, "-t", "11", "--mps=10000")
    stage.require_rings(server, client)
    before = interface(service, sandbox.b)["switches"]
    with bulk(sandbox, sandbox.b, 4):
        until(lambda: interface(service, sandbox.b)["hook"] == TCX, 3.0)
        time.sleep(1.0)
    until(lambda: interface(service, sandbox.b)["hook"] == XDP, 6.0)
    text = client.result(20)
    server.stop()
    counted = re.search(r"dropped messages = (\d+); # duplicated messages = 0; # out-of-order messages = 0", text)
    assert counted, text
    assert interface(service, sandbox.b)["switches"] - before == 2
    assert int(counted[1]) < 1000, text  # of 110,000, with three programs that want a core each on few of them


@xdp_only("AF_XDP rings move between the hooks")
def test_reinject_and_a_second_program_in_both_states(sandbox: Sandbox, service: Service) -> None:
    def rounds(first: Peer, second: Peer) -> None:
        for peer, kind in ((first, lib.VMH_RING_DIRECT), (second, lib.VMH_RING_VETH)):
            ring = peer.do("ring", ifname="vb")
            assert (ring["status"], ring["kind"]) == (0, kind)
            port = peer.bound("s")
            flow = peer.do("attach", name="s", kind="3t", local=[sandbox.b.address, port])
            outs = interface(service, sandbox.b)["outs"]
            udp_from(sandbox, sandbox.a, "to the ring", sandbox.b.address, port)
            assert peer.do("recv", name="s", timeout=0.2) == ""
            after = interface(service, sandbox.b)["outs"]
            way = "ring" if kind == lib.VMH_RING_DIRECT else "dev"
            assert after[way] - outs[way] == 1
            assert peer.do("detach", flow_id=flow["flow_id"], cause=int(Reason.FORK))["status"] == 0
            for number in range(20):
                given = peer.do("reinject", name="s", kind="3t", source=["10.77.0.1", 7000],
                                local=[sandbox.b.address, port], ifname="vb", data=f"unread {number}")
                assert given["status"] == 0
            got = [peer.do("recvfrom", name="s", timeout=0.5) for _ in range(20)]
            assert got == [[f"unread {n}", ["10.77.0.1", 7000]] for n in range(20)]

    with Peer(service, sandbox.b) as one, Peer(service, sandbox.b) as two:
        rounds(one, two)
    with bulk(sandbox, sandbox.b, 30):
        until(lambda: interface(service, sandbox.b)["hook"] == TCX, 3.0)
        with Peer(service, sandbox.b) as one, Peer(service, sandbox.b) as two:  # rings that are made in tcx
            rounds(one, two)
        assert interface(service, sandbox.b)["hook"] == TCX


def test_switched_off_it_stays_in_xdp(sandbox: Sandbox, tmp_path: Path) -> None:
    file = tmp_path / "off.toml"
    file.write_text("[bulk]\nswitch = false\ndetach = false\n", "utf-8")
    with Service(sandbox, arguments=["--config", str(file)]) as service, Peer(service, sandbox.b) as peer:
        assert peer.do("ring", ifname="vb")["nqueues"] == 1
        with bulk(sandbox, sandbox.b, 10):
            until(lambda: interface(service, sandbox.b)["outs"]["pass-too-long"] > 2000, 5.0)
            time.sleep(0.6)
            assert interface(service, sandbox.b)["hook"] == XDP
        assert interface(service, sandbox.b)["switches"] == 0
        assert far_ends(sandbox.b) == []


@xdp_only("AF_XDP rings move between the hooks")
def test_kill_9_in_tcx_leaves_the_kernel_and_the_next_service_cleans_up(sandbox: Sandbox, service: Service) -> None:
    with Peer(service, sandbox.b) as peer:
        assert peer.do("ring", ifname="vb")["nqueues"] == 2
        assert len(far_ends(sandbox.b)) == 1
        port = peer.bound("s")
        assert peer.do("attach", name="s", kind="3t", local=[sandbox.b.address, port])["rules"] == 1
        with bulk(sandbox, sandbox.b, 10):
            until(lambda: interface(service, sandbox.b)["hook"] == TCX, 3.0)
            service.program.process.kill()
            service.program.process.wait()
            udp_from(sandbox, sandbox.a, "to the kernel", sandbox.b.address, port)
            assert peer.do("recv", name="s") == "to the kernel"
        service.start()
        assert far_ends(sandbox.b) == []


@xdp_only("AF_XDP rings move between the hooks")
def test_mtu_and_loss_of_the_interface(sandbox: Sandbox, service: Service) -> None:
    with Peer(service, sandbox.b) as peer:
        assert peer.do("ring", ifname="vb")["nqueues"] == 2
        port = peer.bound("s")
        assert peer.do("attach", name="s", kind="3t", local=[sandbox.b.address, port])["rules"] == 1
        with bulk(sandbox, sandbox.b, 10):
            until(lambda: interface(service, sandbox.b)["hook"] == TCX, 3.0)
            for side in sandbox.sides:
                side.ip("link", "set", side.interface.split(":")[-1], "mtu", "1700")
            until(lambda: interface(service, sandbox.b)["mtu"] == 1700, 2.0)
            time.sleep(0.3)
            before = interface(service, sandbox.b)["outs"]["ring"]
            udp_from(sandbox, sandbox.a, "x" * 1672, sandbox.b.address, port)
            assert peer.do("recv", name="s", timeout=0.2) == ""
            assert interface(service, sandbox.b)["outs"]["ring"] - before == 1
        sandbox.b.ip("link", "del", "vb")
        until(lambda: far_ends(sandbox.b) == [], 2.0)


def line_of(service: Service, side: Side) -> str:
    """What `vmahybrid status` shows of an interface."""
    return next(line for line in service.ask("status").splitlines() if f" {side.netns} " in line)


def gauge(service: Service, side: Side) -> str:
    """The metric that tells whether our program is attached."""
    text = str(Api(service).call("GET", "/metrics")[1])
    return next(line[-3:] for line in text.splitlines()
                if line.startswith(f'vmahybrid_interface_attached{{interface="{side.device}",netns="{side.netns}"'))


def test_off_without_a_rule(sandbox: Sandbox, service: Service, softverbs: bool) -> None:
    """Both ends after 3 s, each for itself; back with the first ring or rule, before its answer."""
    api = Api(service)
    for side in sandbox.sides:
        until(lambda side=side: interface(service, side)["hook"] == OFF, 5.0)  # type: ignore[misc]
        until(lambda side=side: xdp_program(side) is None)  # type: ignore[misc]  # told a moment before
        assert (interface(service, side)["attached"], gauge(service, side)) == (False, "0.0")
    assert "generic, off" in line_of(service, sandbox.b)
    assert f"va, vb: {OFF}" in service.ask("status")
    assert (api.status()["health"], api.status()["counters"]["switches_total"]) == ([], 2)
    with Peer(service, sandbox.b) as peer:
        assert peer.ring("vb")["status"] == 0
        port = peer.bound("s")
        flow = peer.do("attach", name="s", kind="3t", local=[sandbox.b.address, port])
        assert flow["rules"] == 1
        assert xdp_program(sandbox.b) is not None
        assert "generic, off" not in line_of(service, sandbox.b)    # before the ring has lost what nobody reads
        outs = interface(service, sandbox.b)["outs"]
        udp_from(sandbox, sandbox.a, "to the ring", sandbox.b.address, port)
        shown, way = interface(service, sandbox.b), "pass-rule" if softverbs else "ring"
        assert (shown["hook"], shown["attached"], gauge(service, sandbox.b)) == (XDP, True, "1.0")
        assert shown["outs"][way] - outs[way] == 1
        time.sleep(3.5)
        assert interface(service, sandbox.b)["hook"] == XDP  # it has a rule
        assert interface(service, sandbox.a)["hook"] == OFF
        assert peer.do("detach", flow_id=flow["flow_id"])["status"] == 0
        until(lambda: interface(service, sandbox.b)["hook"] == OFF, 5.0)  # its ring is there still
        until(lambda: api.status()["counters"]["switches_total"] == 4)
        assert peer.do("attach", name="s", kind="3t", local=[sandbox.b.address, port])["rules"] == 1
        assert xdp_program(sandbox.b) is not None
    until(lambda: interface(service, sandbox.b)["hook"] == OFF, 6.0)
    until(lambda: xdp_program(sandbox.b) is None)
    until(lambda: api.status()["counters"]["switches_total"] == 6)
    assert api.status()["counters"].get("switch_failures_total", 0) == 0
    netns = sandbox.b.netns
    assert [line.split(": ", 1)[1] for line in service.log.splitlines() if f"{netns}:vb: generic" in line] == [
        OFF, XDP, OFF, XDP, OFF]


def test_it_stays_attached_where_the_operator_wants_it(sandbox: Sandbox, tmp_path: Path) -> None:
    file = tmp_path / "on.toml"
    file.write_text("[bulk]\ndetach = false\n", "utf-8")
    with Service(sandbox, arguments=["--config", str(file)]) as service:
        time.sleep(4.0)
        assert interface(service, sandbox.b)["hook"] == XDP
        assert xdp_program(sandbox.b) is not None


LATE = """
import socket, sys, time, os
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).bind((sys.argv[1], 0))
print("ring", flush=True)
while not os.path.exists(sys.argv[2]):
    time.sleep(0.02)
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind((sys.argv[1], 7123))
print("bound", flush=True)
print(s.recv(100), flush=True)
time.sleep(60)
"""


@pytest.fixture
def late(sandbox: Sandbox, service: Service, tmp_path: Path) -> Iterator[Program]:
    """A program with a ring and without a flow, whose interface is off. It binds when tmp_path / "go" is there."""
    argv = [sys.executable, "-S", "-c", LATE, sandbox.b.address, str(tmp_path / "go")]
    program = sandbox.start(sandbox.b, service.run_argv(argv), env=service.env)
    program.wait_for("ring")
    until(lambda: interface(service, sandbox.b)["hook"] == OFF, 6.0)
    until(lambda: xdp_program(sandbox.b) is None)
    assert interface(service, sandbox.b)["rings"] == 1
    yield program
    program.stop(9)


@xdp_only("a raw packet QP steers without XDP")
def test_a_program_comes_too_late(sandbox: Sandbox, service: Service, late: Program, tmp_path: Path) -> None:
    """Another XDP program took the interface: who asks why is told by all that tell."""
    api = Api(service)
    with foreign_program(sandbox.b):
        (tmp_path / "go").touch()
        late.wait_for("bound")
        udp_from(sandbox, sandbox.a, "by the kernel", sandbox.b.address, 7123)
        late.wait_for("by the kernel")
        assert api.socket_flows() == []
        shown = interface(service, sandbox.b)
        assert (shown["backend"], shown["mode"], shown["reason"], shown["attached"]) == (
            "kernel", "none", "interface-busy", False)
        assert "another XDP program holds the interface: XDP program" in shown["reason_text"]
        assert any("another XDP program holds" in sentence for sentence in api.status()["health"])
        assert api.status()["counters"]["mirror_failures_total"] == 1
        steps = api.call("GET", f"/v1/sockets/{late.pid}/explain")[1]["steps"]
        assert any(step["reason"] == "interface-busy" and not step["ok"] for step in steps)
        with Peer(service, sandbox.b) as second:
            refused = second.ring("vb")
            assert refused["reason"] == Reason.IF_BUSY
    until(lambda: api.status()["health"] == [], 7.0)
    with Peer(service, sandbox.b) as third:
        assert third.ring("vb")["status"] == 0
        third.bound("s", 7124)
        assert third.do("attach", name="s", kind="3t", local=[sandbox.b.address, 7124])["rules"] == 1
        assert xdp_program(sandbox.b) is not None


def test_a_rule_waits_for_the_interface(sandbox: Sandbox, service: Service) -> None:
    """Of the operator: it stays in the table, is told to steer nothing, and acts when the interface is free."""
    api = Api(service)
    until(lambda: interface(service, sandbox.b)["hook"] == OFF, 6.0)
    until(lambda: xdp_program(sandbox.b) is None)
    with foreign_program(sandbox.b):
        status, rule = api.call("POST", "/v1/flows", {"action": "drop", "proto": "udp", "netns": sandbox.b.netns,
                                                      "local": f"{sandbox.b.address}:7125", "remote": "*:*"})
        assert status == 201, rule
        for flow in (rule, next(f for f in api.status()["flows"] if f["flow_id"] == rule["flow_id"])):
            assert (flow["action"], flow["reason"], flow["rules"]) == ("kernel", "interface-busy", 1)
        assert len(api.status()["health"]) == 1
        time.sleep(1.0)
        assert api.status()["counters"]["switch_failures_total"] == 1
    until(lambda: interface(service, sandbox.b)["hook"] == XDP, 7.0)
    flow = next(f for f in api.status()["flows"] if f["flow_id"] == rule["flow_id"])
    assert (flow["action"], flow["reason"], api.status()["health"]) == ("drop", "none", [])
    udp_from(sandbox, sandbox.a, "dropped", sandbox.b.address, 7125)
    until(lambda: interface(service, sandbox.b)["outs"]["drop"] == 1)
