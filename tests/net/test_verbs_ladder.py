"""Which ring a program gets from the real service, by what it says of its RDMA device and by the configuration."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from net.service_lab import Api, Peer, foreign_program, lost_at_once, udp_from, until, veths

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service
from vmahybrid.contracts import lib
from vmahybrid.steering.reasons import Reason

pytestmark = pytest.mark.root
A, DEVICE = "10.77.0.1", "sv_va"


@pytest.fixture
def configured(netns_pair: Sandbox, tmp_path: Path) -> Iterator[Callable[[str], Service]]:
    """A running service with a configuration file of this text."""
    running: list[Service] = []

    def start(text: str) -> Service:
        path = tmp_path / "vmahybrid.toml"
        path.write_text(text)
        service = Service(netns_pair, arguments=["--config", str(path)])
        service.__enter__()
        running.append(service)
        return service

    yield start
    for service in running:
        service.stop()


def rungs(ladder: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(rung["backend"], "taken" if rung["taken"] else rung["reason"]) for rung in ladder]


def shown_ladder(service: Service) -> list[tuple[str, str]]:
    return rungs(next(i for i in Api(service).status()["interfaces"] if i["name"] == "va")["ladder"])


def attached(peer: Peer, port: int) -> dict[str, Any]:
    return dict(peer.do("attach", name="s", kind="3t", local=[A, port]))


def test_a_raw_packet_qp_is_leave_and_nothing_else(service: Service, netns_pair: Sandbox) -> None:
    api = Api(service)
    with Peer(service, netns_pair.a) as peer:
        ring = peer.do("ring", ifname="va", device=DEVICE)
        assert (ring["status"], ring["kind"], ring["nqueues"], ring["fds"], ring["frames"], ring["mtu"]) == (
            0, lib.VMH_RING_VERBS, 0, 0, 0, 1500)
        assert veths(netns_pair.a) == []
        shown = api.call("GET", "/v1/rings")[1][0]
        assert (shown["kind"], shown["backend"], shown["device"], shown["mode"]) == ("verbs", "verbs", DEVICE, "none")
        assert rungs(shown["ladder"]) == [("verbs", "taken")]
        assert peer.do("ring", ifname="va", device=DEVICE)["reason"] == Reason.RING_FAILED  # one per interface
        assert peer.do("release", ring_id=ring["ring_id"])["status"] == 0
        assert api.call("GET", "/v1/rings")[1] == []
        assert peer.do("ring", ifname="va", device=DEVICE)["kind"] == lib.VMH_RING_VERBS


def test_a_frame_on_the_kernels_path_is_counted_and_comes_once(service: Service, netns_pair: Sandbox) -> None:
    api = Api(service)
    with Peer(service, netns_pair.a) as peer:
        peer.do("ring", ifname="va", device=DEVICE)
        port = peer.bound("s")
        flow = attached(peer, port)
        assert (flow["status"], flow["rules"]) == (0, 1)
        udp_from(netns_pair, netns_pair.b, "astray", A, port)
        assert peer.do("recv", name="s") == "astray"
        assert peer.do("recv", name="s", timeout=0.2) == ""
        shown = api.socket_flows()[0]
        assert (shown["action"], shown["backend"], shown["packets"], shown["rules"]) == ("ring", "verbs", 1, 1)
        interface = next(i for i in api.status()["interfaces"] if i["name"] == "va")
        assert (interface["backend"], interface["device"], interface["outs"]["pass-rule"]) == ("verbs", DEVICE, 1)
        explained = service.ask("explain", f"{A}:{port}")
        assert f"va: verbs: taken, device {DEVICE}" in " ".join(explained.split())
        assert f"a raw packet QP of the program on {DEVICE}" in " ".join(explained.split())
        assert "ok interface va is served, by raw packet QPs; XDP counts" in " ".join(explained.split())
        assert "generic" not in explained
        assert peer.do("detach", flow_id=flow["flow_id"], cause=int(Reason.FORK))["status"] == 0
        udp_from(netns_pair, netns_pair.b, "home", A, port)
        assert peer.do("recv", name="s") == "home"
        interface = next(i for i in api.status()["interfaces"] if i["name"] == "va")
        assert interface["outs"]["pass-rule"] == 1


@pytest.mark.parametrize("why", [Reason.NO_VERBS_LIBRARY, Reason.NO_VERBS_DEVICE, Reason.NO_RAW_PACKET_QP,
                                 Reason.NO_CAP_NET_RAW, Reason.VERBS_FAILED])
def test_the_next_rung_with_the_programs_reason(service: Service, netns_pair: Sandbox, why: Reason) -> None:
    with Peer(service, netns_pair.a) as peer:
        ring = peer.do("ring", ifname="va", why=int(why))
        assert (ring["status"], ring["kind"], ring["fds"]) == (0, lib.VMH_RING_DIRECT, 3)  # memory, queue, far end
        shown = Api(service).call("GET", "/v1/rings")[1][0]
        assert (shown["backend"], rungs(shown["ladder"])) == ("xdp", [("verbs", why.slug), ("xdp", "taken")])
        peer.bound("s", 7000)
        attached(peer, 7000)
        words = " ".join(service.ask("explain", f"{A}:7000").split())
        assert f"ok ladder va: verbs: {why.text}" in words
        assert "ok ladder va: AF_XDP: taken, generic mode" in words
        assert f"verbs: {why.text}; AF_XDP: taken" in " ".join(service.ask("status").split())


def test_after_a_qp_that_failed(service: Service, netns_pair: Sandbox) -> None:
    with Peer(service, netns_pair.a) as peer:
        first = peer.do("ring", ifname="va", device=DEVICE)
        peer.do("release", ring_id=first["ring_id"])
        second = peer.do("ring", ifname="va", why=int(Reason.VERBS_FAILED))
        assert (second["kind"], second["ring_id"] > first["ring_id"]) == (lib.VMH_RING_DIRECT, True)


@pytest.mark.parametrize(("backend", "device", "wanted"), [
    ("auto", DEVICE, lib.VMH_RING_VERBS), ("auto", None, lib.VMH_RING_DIRECT),
    ("verbs", DEVICE, lib.VMH_RING_VERBS), ("verbs", None, Reason.NO_RAW_PACKET_QP),
    ("xdp", DEVICE, lib.VMH_RING_DIRECT), ("kernel", DEVICE, Reason.BACKEND_CONFIG),
])
def test_what_the_configuration_chooses(configured: Callable[[str], Service], netns_pair: Sandbox, backend: str,
                                        device: str | None, wanted: int | Reason) -> None:
    service = configured(f'backend = "xdp"\n[interface."va"]\nbackend = "{backend}"\n')
    before = next(i for i in Api(service).status()["interfaces"] if i["name"] == "va")
    assert (("xdp", "backend-config") in rungs(before["ladder"])) is (backend in ("verbs", "kernel"))
    with Peer(service, netns_pair.a) as peer:
        ring = peer.do("ring", ifname="va", device=device, why=int(Reason.NO_RAW_PACKET_QP))
        if isinstance(wanted, Reason):
            assert (ring["status"] < 0, ring["reason"]) == (True, wanted)
            assert Api(service).call("GET", "/v1/rings")[1] == []
        else:
            assert (ring["status"], ring["kind"]) == (0, wanted)
        interface = next(i for i in Api(service).status()["interfaces"] if i["name"] == "va")
        assert interface["wanted"] == backend
        shown = interface["backend"], interface["mode"], interface["reason"]
        if (backend, device) == ("verbs", None):
            assert shown == ("kernel", "none", "no-raw-packet-qp")
            assert rungs(interface["ladder"]) == [("verbs", "no-raw-packet-qp"), ("xdp", "backend-config"),
                                                  ("kernel", "taken")]
        if backend == "kernel":
            assert rungs(interface["ladder"]) == [("verbs", "backend-config"), ("xdp", "backend-config"),
                                                  ("kernel", "taken")]
            explained = " ".join(service.ask("explain", str(peer.pid)).split())
            for rung in 'verbs: the configuration says backend = "kernel"', "kernel: taken":
                assert f"no ladder va: {rung}" in explained
        if backend == "xdp":
            assert rungs(interface["ladder"]) == [("verbs", "backend-config"), ("xdp", "taken")]


def row_of_va(service: Service) -> list[str]:
    """What `vmahybrid status` shows of va, by word: INTERFACE NETNS BACKEND MODE ..."""
    return next(line.split() for line in service.ask("status").splitlines() if line.startswith("va "))


def test_the_program_that_counts_is_no_mode_of_raw_packet_qps(service: Service, netns_pair: Sandbox) -> None:
    """Only AF_XDP rings have the mode of the XDP program, and the reason for it."""
    def shown() -> tuple[str, str, str]:
        interface = next(i for i in Api(service).status()["interfaces"] if i["name"] == "va")
        return interface["backend"], interface["mode"], interface["reason"]

    assert shown() == ("xdp", "generic", "generic-virtual")
    with Peer(service, netns_pair.a) as on_qp:
        on_qp.do("ring", ifname="va", device=DEVICE)
        assert shown() == ("verbs", "none", "none")
        assert row_of_va(service)[2:4] == ["verbs", DEVICE]
        assert "generic-virtual" not in " ".join(row_of_va(service))
        with Peer(service, netns_pair.a) as on_xdp:
            on_xdp.do("ring", ifname="va", why=int(Reason.NO_CAP_NET_RAW))
            assert shown() == ("verbs", "generic", "generic-virtual")
            assert row_of_va(service)[2:5] == ["verbs", f"{DEVICE},", "generic"]


def test_a_live_change_acts_on_the_next_ring(service: Service, netns_pair: Sandbox) -> None:
    with Peer(service, netns_pair.a) as first, Peer(service, netns_pair.a) as second:
        assert first.do("ring", ifname="va", device=DEVICE)["kind"] == lib.VMH_RING_VERBS
        service.ask("config", "set", "backend=xdp")
        assert second.do("ring", ifname="va", device=DEVICE)["kind"] == lib.VMH_RING_DIRECT
        with Peer(service, netns_pair.a) as third:
            service.ask("config", "set", "backend=kernel")
            assert third.do("ring", ifname="va", device=DEVICE)["reason"] == Reason.BACKEND_CONFIG
        assert len(Api(service).call("GET", "/v1/rings")[1]) == 2


def test_a_ring_that_is_gone_leaves_the_ladder_of_the_others(service: Service, netns_pair: Sandbox) -> None:
    with Peer(service, netns_pair.a) as first:
        first.do("ring", ifname="va", device=DEVICE)
        service.ask("config", "set", "backend=xdp")
        with Peer(service, netns_pair.a) as second:
            second.do("ring", ifname="va", device=DEVICE)
            assert shown_ladder(service) == [("verbs", "backend-config"), ("xdp", "taken")]
        until(lambda: len(Api(service).call("GET", "/v1/rings")[1]) == 1, 5.0)
        assert shown_ladder(service) == [("verbs", "taken")]


@pytest.fixture
def on_demand(netns_pair: Sandbox) -> Iterator[Service]:
    """A service that attaches nothing before a program asks."""
    service = Service(netns_pair, sides=[])
    with service:
        yield service


def test_without_the_xdp_program(on_demand: Service, netns_pair: Sandbox) -> None:
    api, side = Api(on_demand), netns_pair.a
    with contextlib.ExitStack() as foreign, Peer(on_demand, side) as peer, Peer(on_demand, side) as plain:
        foreign.enter_context(foreign_program(netns_pair.a))
        refused = plain.do("ring", ifname="va")
        assert refused["reason"] == Reason.IF_BUSY
        assert peer.do("ring", ifname="va", device=DEVICE)["kind"] == lib.VMH_RING_VERBS
        port = peer.bound("s")
        assert attached(peer, port)["rules"] == 1
        udp_from(netns_pair, netns_pair.b, "hello", A, port)
        assert peer.do("recv", name="s") == "hello"
        assert api.socket_flows()[0]["packets"] == 0
        assert any("only raw packet QPs" in sentence for sentence in api.status()["health"])
        foreign.close()
        assert plain.do("ring", ifname="va")["kind"] == lib.VMH_RING_DIRECT
        udp_from(netns_pair, netns_pair.b, "again", A, port)
        assert peer.do("recv", name="s") == "again"
        assert api.socket_flows()[0]["packets"] == 1  # mirrored now
        assert api.status()["health"] == []


def test_the_interface_is_let_go_after_the_last_qp(on_demand: Service, netns_pair: Sandbox) -> None:
    api = Api(on_demand)
    with Peer(on_demand, netns_pair.a) as peer:
        peer.do("ring", ifname="va", device=DEVICE)
        assert next(i for i in api.status()["interfaces"] if i["name"] == "va")["attached"]
    until(lambda: '"xdp"' not in json.dumps(json.loads(netns_pair.a.ip("-j", "link", "show", "va"))), 5.0)


def test_an_operators_rule_sends_it_home(service: Service, netns_pair: Sandbox) -> None:
    with Peer(service, netns_pair.a) as peer:
        peer.do("ring", ifname="va", device=DEVICE)
        port = peer.bound("s", address="0.0.0.0")
        flow = peer.do("attach", name="s", kind="3t", local=["*", port])
        assert flow["status"] == 0
        made = json.loads(service.ask("flows", "add", "drop", f"{A}:{port}", "--remote", "10.77.0.2:7", "--json"))
        assert peer.do("event") == [lib.VMH_EV_FLOW_HOME, flow["flow_id"], 0, int(Reason.RULE)]
        again = peer.do("attach", name="s", kind="3t", local=["*", port])
        assert again["reason"] == Reason.RULE
        service.ask("flows", "delete", str(made["flows"][0]["flow_id"]))
        assert peer.do("attach", name="s", kind="3t", local=["*", port])["status"] == 0


def test_another_program_takes_its_port(service: Service, netns_pair: Sandbox) -> None:
    with Peer(service, netns_pair.a) as old, Peer(service, netns_pair.a) as new:
        old.do("ring", ifname="va", device=DEVICE)
        port = old.bound("s", reuse="SO_REUSEADDR")
        flow = attached(old, port)
        assert new.do("ring", ifname="va")["kind"] == lib.VMH_RING_DIRECT
        new.bound("s", port, reuse="SO_REUSEADDR")
        assert attached(new, port)["status"] == 0
        assert old.do("event") == [lib.VMH_EV_FLOW_HOME, flow["flow_id"], 0, int(Reason.CONFLICT)]


def test_the_interface_goes_down(service: Service, netns_pair: Sandbox) -> None:
    with Peer(lost_at_once(service), netns_pair.a) as peer:
        ring = peer.do("ring", ifname="va", device=DEVICE)
        port = peer.bound("s")
        flow = attached(peer, port)
        netns_pair.a.ip("link", "set", "va", "down")
        events = sorted(peer.do("event")[:2] for _ in range(2))
        assert events == [[lib.VMH_EV_RING_GONE, ring["ring_id"]], [lib.VMH_EV_FLOW_HOME, flow["flow_id"]]]
        assert peer.do("release", ring_id=ring["ring_id"])["status"] == 0
        netns_pair.a.ip("link", "set", "va", "up")
        until(lambda: peer.do("ring", ifname="va", device=DEVICE)["status"] == 0)


def test_a_program_that_dies(service: Service, netns_pair: Sandbox) -> None:
    api = Api(service)
    with Peer(service, netns_pair.a) as peer:
        peer.do("ring", ifname="va", device=DEVICE)
        attached(peer, peer.bound("s"))
        peer.kill()
        until(lambda: not api.socket_flows() and not api.call("GET", "/v1/rings")[1])
    interface = next(i for i in api.status()["interfaces"] if i["name"] == "va")
    assert (interface["rules"], interface["backend"]) == (0, "xdp")


def test_an_unread_datagram_of_a_qp_is_reinjected(service: Service, netns_pair: Sandbox) -> None:
    with Peer(service, netns_pair.a) as peer:
        peer.do("ring", ifname="va", device=DEVICE)
        port = peer.bound("s")
        flow = attached(peer, port)
        peer.do("detach", flow_id=flow["flow_id"], cause=int(Reason.FORK))
        answer = peer.do("reinject", name="s", kind="3t", data="unread", source=["10.77.0.2", 9], local=[A, port],
                         ifname="va")
        assert answer["status"] == 0
        assert peer.do("recvfrom", name="s") == ["unread", ["10.77.0.2", 9]]
