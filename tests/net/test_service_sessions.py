"""The service on real namespaces: what a program asks for and gets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from net.service_lab import Api, Peer, module_pair, module_services, udp_from, until, veths, xdp_only  # noqa: F401

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service
from vmahybrid.contracts import lib
from vmahybrid.steering.reasons import Reason

pytestmark = pytest.mark.root


@pytest.fixture(autouse=True)
def nothing_left(service: Service) -> Iterator[None]:
    """The service forgets every program that a test started."""
    yield
    until(lambda: not Api(service).socket_flows() and not Api(service).status()["processes"])


@pytest.fixture
def peer(service: Service, netns_pair: Sandbox) -> Iterator[Peer]:
    """A program on side a that said HELLO and has a ring."""
    with Peer(service, netns_pair.a) as made:
        assert made.ring()["status"] == 0
        yield made


@xdp_only("what a QP gets: tests/net/test_verbs_ladder.py")
def test_hello_ring_attach_detach(service: Service, netns_pair: Sandbox) -> None:
    api = Api(service)
    with Peer(service, netns_pair.a, hello=False) as peer:
        hello = peer.do("hello")
        assert (hello["status"], hello["session"] > 0, hello["net_page_size"] > 0) == (0, True, True)
        ring = peer.ring(frames=4096, rx_size=512, tx_size=256)
        assert {name: ring[name] for name in ("status", "nqueues", "kind", "frames", "rx_size", "tx_size", "mtu")} == {
            "status": 0, "nqueues": 2, "kind": lib.VMH_RING_DIRECT, "frames": 4096, "rx_size": 512, "tx_size": 256,
            "mtu": 1500}
        port = peer.bound("s")
        flow = peer.do("attach", name="s", kind="3t", local=["10.77.0.1", port])
        assert (flow["status"], flow["rules"]) == (0, 1)
        udp_from(netns_pair, netns_pair.b, "to the ring", "10.77.0.1", port)
        assert peer.do("recv", name="s", timeout=0.3) == ""
        shown = api.socket_flows()
        assert [(f["flow_id"], f["action"], f["local"], f["packets"], f["pid"], f["rules"]) for f in shown] == [
            (flow["flow_id"], "ring", f"10.77.0.1:{port}", 1, peer.pid, 1)]
        assert peer.do("detach", flow_id=flow["flow_id"], cause=int(Reason.FORK))["status"] == 0
        udp_from(netns_pair, netns_pair.b, "to the kernel", "10.77.0.1", port)
        assert peer.do("recv", name="s") == "to the kernel"
        assert api.socket_flows() == []
        assert api.status()["reasons"]["fork"] >= 1
        assert peer.do("release", ring_id=ring["ring_id"])["status"] == 0
        assert api.status()["processes"][0]["rings"] == []
        assert peer.ring()["kind"] == lib.VMH_RING_DIRECT


def test_neighbour(peer: Peer) -> None:
    assert peer.do("neigh", ifname="va", address="10.77.0.2")["status"] == 0
    lost = peer.do("neigh", ifname="va", address="10.77.0.99")
    assert (lost["status"] < 0, lost["reason"]) == (True, Reason.NO_NEIGHBOUR)


def test_a_neighbour_that_does_not_answer_keeps_no_other_request_waiting(peer: Peer) -> None:
    first, then = peer.do("neigh_and_release", ifname="va", addresses=["10.77.0.97", "10.77.0.98"])
    assert (first["reason"], [late["reason"] for late in then]) == (Reason.NOT_OWNER, [Reason.NO_NEIGHBOUR] * 2)
    hasty = peer.do("neigh_and_release", ifname="va", addresses=["10.77.0.99"] * 70)
    assert hasty[0]["reason"] == Reason.NO_NEIGHBOUR  # too many at a time: answered at once
    assert len(hasty[1]) == 70


def test_a_connected_socket(peer: Peer, netns_pair: Sandbox) -> None:
    port = peer.bound("s", connect=["10.77.0.2", 7000])
    flow = peer.do("attach", name="s", kind="5t", local=["10.77.0.1", port], remote=["10.77.0.2", 7000])
    assert (flow["status"], flow["rules"]) == (0, 1)
    wrong = peer.do("attach", name="s", kind="5t", local=["10.77.0.1", port], remote=["10.77.0.2", 7001])
    assert wrong["reason"] == Reason.NOT_OWNER
    # unconnected claims more than the socket has
    assert peer.do("attach", name="s", kind="3t", local=["10.77.0.1", port])["reason"] == Reason.NOT_OWNER
    # connected, and the whole port, which nobody else can have
    far = ["10.77.0.2", 7000]
    assert peer.do("attach", name="s", kind="3t", local=["10.77.0.1", port], remote=far)["status"] == 0
    shared = peer.bound("r", connect=far, reuse="SO_REUSEADDR")
    refused = peer.do("attach", name="r", kind="3t", local=["10.77.0.1", shared], remote=far)
    assert refused["reason"] == Reason.PORT_SHARED


@pytest.mark.parametrize(("bind", "kind", "local", "remote"), [
    ("10.77.0.1", "3t", ["10.77.0.1", -1], None),
    ("10.77.0.1", "3t", ["*", 0], None),
    ("10.77.0.1", "3t", ["10.77.0.2", 0], None),
    ("0.0.0.0", "3t", ["10.77.0.1", 0], None),
    ("10.77.0.1", "5t", ["10.77.0.1", 0], ["10.77.0.2", 9]),
    ("10.77.0.1", "mc", ["10.77.0.1", 0], None),
    ("10.77.0.1", "mc", ["239.1.2.3", 0], None),
])
def test_a_socket_that_does_not_prove_it(peer: Peer, bind: str, kind: str, local: list[object],
                                         remote: list[object] | None) -> None:
    port = peer.bound("s", address=bind)
    asked = [local[0], port + int(str(local[1]))]
    refused = peer.do("attach", name="s", kind=kind, local=asked, remote=remote)
    assert (refused["status"] < 0, refused["reason"], refused["flow_id"]) == (True, Reason.NOT_OWNER, 0)


def test_a_socket_of_one_interface_is_steered_there_only(peer: Peer, service: Service, netns_pair: Sandbox) -> None:
    netns_pair.a.ip("link", "add", "vx", "type", "veth", "peer", "name", "vy")
    netns_pair.a.ip("address", "add", "10.78.0.1/24", "dev", "vx")
    for name in ("vx", "vy"):
        netns_pair.a.ip("link", "set", name, "up")
    port = peer.bound("s", address="0.0.0.0", device="vx")
    flow = peer.do("attach", name="s", kind="3t", local=["*", port])
    assert (flow["status"], flow["rules"]) == (0, 0)  # the ring is on va
    refused = peer.do("attach", name="s", kind="3t", local=["*", port], ifname="va")
    assert refused["reason"] == Reason.NOT_OWNER
    netns_pair.a.ip("link", "del", "vx")


def test_a_socket_of_another_namespace(service: Service, netns_pair: Sandbox, peer: Peer) -> None:
    """The same address and port there prove nothing here: the socket moves, its namespace does not."""
    netns_pair.b.ip("address", "add", "10.77.0.1/32", "dev", "lo")
    with Peer(service, netns_pair.b, hello=False) as other:
        other.do("socket", name="s", bind=["10.77.0.1", 5111])
        # a session lives where its process lives when it says HELLO; its sockets must live there too
        other.do("enter", path=f"/run/netns/{netns_pair.a.netns}")
        other.do("hello")
        refused = other.do("attach", name="s", kind="3t", local=["10.77.0.1", 5111])
        assert refused["reason"] == Reason.NOT_OWNER
        other.do("socket", name="own", bind=["10.77.0.1", 5111])
        assert other.ring()["status"] == 0
        assert other.do("attach", name="own", kind="3t", local=["10.77.0.1", 5111])["status"] == 0
    netns_pair.b.ip("address", "del", "10.77.0.1/32", "dev", "lo")


def test_wildcards_follow_addresses(peer: Peer, service: Service, netns_pair: Sandbox) -> None:
    port = peer.bound("w", address="0.0.0.0")
    flow = peer.do("attach", name="w", kind="3t", local=["*", port])
    assert (flow["status"], flow["rules"]) == (0, 1)
    api = Api(service)
    netns_pair.a.ip("address", "add", "10.77.0.11/24", "dev", "va")
    until(lambda: api.socket_flows()[0]["rules"] == 2, 0.5)
    udp_from(netns_pair, netns_pair.b, "x", "10.77.0.11", port)
    until(lambda: api.socket_flows()[0]["packets"] == 1, 1)
    netns_pair.a.ip("address", "del", "10.77.0.11/24", "dev", "va")
    until(lambda: api.socket_flows()[0]["rules"] == 1, 0.5)


def test_two_processes_on_one_interface(peer: Peer, service: Service, netns_pair: Sandbox) -> None:
    api = Api(service)
    with Peer(service, netns_pair.a) as second:
        ring = second.ring()
        kind, far = (lib.VMH_RING_VERBS, 0) if service.softverbs else (lib.VMH_RING_VETH, 1)
        assert (ring["status"], ring["kind"], len(veths(netns_pair.a))) == (0, kind, far)
        first_port, second_port = peer.bound("s"), second.bound("s")
        assert peer.do("attach", name="s", kind="3t", local=["10.77.0.1", first_port])["status"] == 0
        assert second.do("attach", name="s", kind="3t", local=["10.77.0.1", second_port])["status"] == 0
        stolen = second.do("attach", name="s", kind="3t", local=["10.77.0.1", first_port])
        assert stolen["reason"] == Reason.NOT_OWNER
        udp_from(netns_pair, netns_pair.b, "x", "10.77.0.1", second_port)
        until(lambda: {f["pid"]: f["packets"] for f in api.socket_flows()} == {peer.pid: 0, second.pid: 1})
    until(lambda: veths(netns_pair.a) == [], 1.0)
    assert [flow["pid"] for flow in api.socket_flows()] == [peer.pid]


def test_a_second_ring_on_one_interface_is_refused(peer: Peer) -> None:
    assert peer.ring()["reason"] == Reason.RING_FAILED


def test_interfaces_that_are_not_served(peer: Peer) -> None:
    assert peer.do("ring", ifname="lo")["reason"] == Reason.LOOPBACK


@xdp_only("a QP's sizes are the program's own")
def test_odd_ring_sizes(peer: Peer, service: Service, netns_pair: Sandbox) -> None:
    with Peer(service, netns_pair.a) as other:
        for sizes in ({"frames": 3}, {"rx_size": 1 << 30}, {"tx_size": 0xFFFFFFFF}):
            assert other.ring(**sizes)["reason"] == Reason.RING_FAILED
        assert other.ring()["status"] == 0


def test_reuseport_stays_on_the_kernel(peer: Peer) -> None:
    port = peer.bound("s", reuse="SO_REUSEPORT")
    refused = peer.do("attach", name="s", kind="3t", local=["10.77.0.1", port])
    assert refused["reason"] == Reason.PORT_SHARED


def test_a_newer_socket_on_a_shared_port_takes_the_flow(peer: Peer, service: Service, netns_pair: Sandbox) -> None:
    port = peer.bound("s", reuse="SO_REUSEADDR")
    flow = peer.do("attach", name="s", kind="3t", local=["10.77.0.1", port])
    assert flow["status"] == 0
    with Peer(service, netns_pair.a, hello=False) as stranger:
        stranger.bound("s", port, reuse="SO_REUSEADDR")
        assert peer.do("event", timeout=4) == [lib.VMH_EV_FLOW_HOME, flow["flow_id"], 0, Reason.CONFLICT]


def test_multicast_of_two_processes_goes_home(peer: Peer, service: Service, netns_pair: Sandbox) -> None:
    group = {"reuse": "SO_REUSEADDR", "join": ["239.1.2.3", "10.77.0.1"]}
    port = peer.bound("m", address="239.1.2.3", **group)
    flow = peer.do("attach", name="m", kind="mc", local=["239.1.2.3", port], ifname="va")
    assert (flow["status"], flow["rules"]) == (0, 1)
    with Peer(service, netns_pair.a) as second:
        second.ring()
        second.bound("m", port, address="0.0.0.0", **group)
        refused = second.do("attach", name="m", kind="mc", local=["239.1.2.3", port], ifname="va")
        assert refused["reason"] == Reason.MULTICAST_SHARED
        assert peer.do("event", timeout=4) == [lib.VMH_EV_FLOW_HOME, flow["flow_id"], 0, Reason.MULTICAST_SHARED]
    assert peer.do("attach", name="m", kind="mc", local=["239.1.2.3", port], ifname="va")["status"] == 0


def test_multicast_of_a_stranger_goes_home(peer: Peer, service: Service, netns_pair: Sandbox) -> None:
    group = {"reuse": "SO_REUSEADDR", "join": ["239.1.2.3", "10.77.0.1"]}
    port = peer.bound("m", address="239.1.2.3", **group)
    flow = peer.do("attach", name="m", kind="mc", local=["239.1.2.3", port], ifname="va")
    with Peer(service, netns_pair.a, hello=False) as stranger:
        stranger.bound("m", port, address="0.0.0.0", **group)
        assert peer.do("event", timeout=4) == [lib.VMH_EV_FLOW_HOME, flow["flow_id"], 0, Reason.MULTICAST_SHARED]
        refused = peer.do("attach", name="m", kind="mc", local=["239.1.2.3", port], ifname="va")
        assert refused["reason"] == Reason.MULTICAST_SHARED


def test_rules_of_the_operator(peer: Peer, service: Service, netns_pair: Sandbox) -> None:
    api = Api(service)
    peer.bound("dns", connect=["10.77.0.2", 53])
    port = peer.bound("d2", connect=["10.77.0.2", 53])
    refused = peer.do("attach", name="d2", kind="5t", local=["10.77.0.1", port], remote=["10.77.0.2", 53])
    assert refused["reason"] == Reason.RULE  # the default rule for name resolution
    port = peer.bound("s")
    flow = peer.do("attach", name="s", kind="3t", local=["10.77.0.1", port])
    code, rule = api.call("POST", "/v1/flows", {"action": "drop", "proto": "udp", "local": f"10.77.0.1:{port}"})
    assert code in (200, 201), rule
    assert peer.do("event") == [lib.VMH_EV_FLOW_HOME, flow["flow_id"], 0, Reason.RULE]
    udp_from(netns_pair, netns_pair.b, "dropped", "10.77.0.1", port)
    assert peer.do("recv", name="s", timeout=0.3) == ""
    until(lambda: api.call("GET", f"/v1/flows/{rule['flow_id']}")[1]["packets"] == 1)
    assert api.call("DELETE", f"/v1/flows/{rule['flow_id']}")[0] in (200, 204)
    udp_from(netns_pair, netns_pair.b, "passed", "10.77.0.1", port)
    assert peer.do("recv", name="s") == "passed"
    assert peer.do("attach", name="s", kind="3t", local=["10.77.0.1", port])["status"] == 0


def test_limits_of_rings(service: Service, netns_pair: Sandbox) -> None:
    api = Api(service)
    assert api.call("PATCH", "/v1/config", {"limits.rings": 1})[0] == 200
    with Peer(service, netns_pair.a) as first, Peer(service, netns_pair.a) as second:
        assert first.ring()["status"] == 0
        assert second.ring()["reason"] == Reason.RING_LIMIT
        assert api.call("PATCH", "/v1/config", {"limits.rings": 256})[0] == 200
        assert second.ring()["status"] == 0


def test_explain(peer: Peer, service: Service) -> None:
    port = peer.bound("s")
    flow = peer.do("attach", name="s", kind="3t", local=["10.77.0.1", port])
    fd = next(f["fd"] for f in Api(service).socket_flows() if f["flow_id"] == flow["flow_id"])
    for name in (f"{peer.pid}:{fd}", f"10.77.0.1:{port}"):
        code, explained = Api(service).call("GET", f"/v1/sockets/{name}/explain")
        assert code == 200, explained
        steps = {step["step"]: step["ok"] for step in explained["steps"]}
        assert steps == dict.fromkeys(("session", "rule", "address", "interface", "ladder", "ring", "flow"), True)
    assert Api(service).call("GET", "/v1/sockets/nonsense/explain")[0] == 422
    assert Api(service).call("GET", "/v1/sockets/4194304:3/explain")[0] == 404


def test_explain_names_every_group(peer: Peer, service: Service, netns_pair: Sandbox) -> None:
    """Also one that is the kernel's because somebody else listens to it."""
    port = peer.bound("m", address="0.0.0.0", reuse="SO_REUSEADDR", join=["239.1.2.3", "10.77.0.1"])
    assert peer.do("attach", name="m", kind="3t", local=["*", port])["status"] == 0
    for group in ("239.1.2.3", "239.1.2.4"):
        assert peer.do("attach", name="m", kind="mc", local=[group, port], ifname="va")["status"] == 0
    udp_from(netns_pair, netns_pair.b, "x", "239.1.2.3", port, device="vb")
    fd = Api(service).socket_flows()[0]["fd"]

    def texts() -> str:
        steps = Api(service).call("GET", f"/v1/sockets/{peer.pid}:{fd}/explain")[1]["steps"]
        return "\n".join(step["text"] for step in steps if step["step"] == "flow")

    found = "has 1 rule(s), made in its device by the program. {}: {} packets" if service.softverbs else (
        "has 1 rule(s) in the XDP program{}: {} packets")
    more = "XDP comes before the software device, and passed to it or to the kernel socket" if service.softverbs else ""
    until(lambda: f"group 239.1.2.3:{port}, {found.format(more, 1)}" in texts(), what=texts)
    assert f"group 239.1.2.4:{port}, {found.format(more, 0)}" in texts()
    with Peer(service, netns_pair.a) as other:
        other.ring()
        other.bound("m", port, address="0.0.0.0", reuse="SO_REUSEADDR", join=["239.1.2.4", "10.77.0.1"])
        assert other.do("attach", name="m", kind="mc", local=["239.1.2.4", port], ifname="va")["status"] < 0
    assert f"group 239.1.2.4:{port}: {Reason.MULTICAST_SHARED.text}" in texts()
    assert peer.do("attach", name="m", kind="mc", local=["239.1.2.4", port], ifname="va")["status"] == 0
    assert Reason.MULTICAST_SHARED.text not in texts()


def test_a_rule_is_added_once_and_explained_without_a_program(service: Service) -> None:
    api = Api(service)
    body = {"action": "kernel", "proto": "udp", "local": "10.77.0.1:5999"}
    code, rule = api.call("POST", "/v1/flows", body)
    assert code == 201
    code, problem = api.call("POST", "/v1/flows", body)
    assert (code, f"flow {rule['flow_id']} is this rule" in problem["detail"], bool(problem["remedy"])) == (409, True,
                                                                                                            True)
    steps = api.call("GET", "/v1/sockets/10.77.0.1:5999/explain")[1]["steps"]
    assert [step["text"] for step in steps if step["step"] == "rule"] == [
        f"rule {rule['flow_id']} of the operator: kernel udp 10.77.0.1:5999 *:*: 0 packets"]
    assert api.call("DELETE", f"/v1/flows/{rule['flow_id']}")[0] == 204


@pytest.mark.parametrize(("method", "path", "body", "names"), [
    ("GET", "/v1/sockets/abc/explain", None, "socket 'abc'"),
    ("PATCH", "/v1/config", {"nope": 1}, 'configuration: unknown key "nope"'),
    ("PATCH", "/v1/config", {"limits.rings": -4}, "configuration key limits.rings: -4"),
])
def test_problems_name_what_failed_and_what_to_do(service: Service, method: str, path: str, body: object,
                                                  names: str) -> None:
    code, problem = Api(service).call(method, path, body)
    assert (code, problem["detail"].startswith(names)) == (422, True), problem
    assert problem["remedy"]


@xdp_only("direct rings and ring veths")
def test_no_direct_ring_by_policy(service: Service, netns_pair: Sandbox) -> None:
    api = Api(service)
    assert api.call("PATCH", "/v1/config", {"ring.direct": "never"})[0] == 200
    with Peer(service, netns_pair.a) as only:
        assert only.ring()["kind"] == lib.VMH_RING_VETH
        steps = api.call("GET", "/v1/rings")
        shown = steps[1] if steps[0] == 200 else api.status()
        assert "veth-policy" in str(shown)
    assert api.call("PATCH", "/v1/config", {"ring.direct": "first"})[0] == 200
