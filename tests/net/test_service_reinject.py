"""REINJECT: datagrams that a ring had delivered come to the kernel socket, and to no other's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from net.control_client import REINJECT_HEAD
from net.service_lab import Api, Peer, Refusal, module_pair, module_services, udp_from  # noqa: F401

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service
from vmahybrid.contracts import lib
from vmahybrid.steering.reasons import Reason

pytestmark = pytest.mark.root

FAR = ["10.77.0.2", 7000]


@pytest.fixture
def peer(service: Service, netns_pair: Sandbox) -> Iterator[Peer]:
    with Peer(service, netns_pair.a) as made:
        assert made.ring()["status"] == 0
        yield made


def give(peer: Peer, data: str, port: int, **changes: Any) -> Any:
    """The reply to a datagram for the socket "s", bound to 10.77.0.1:port."""
    fields: dict[str, Any] = {"name": "s", "kind": "3t", "source": FAR, "local": ["10.77.0.1", port], "ifname": "va"}
    return peer.do("reinject", data=data, **(fields | changes))


def test_after_detach_it_comes_to_the_socket(peer: Peer, service: Service, netns_pair: Sandbox) -> None:
    """From the peer's address, in order, and however many there are."""
    assert Api(service).status()["features"]["live_frames"] is True
    port = peer.bound("s")
    flow = peer.do("attach", name="s", kind="3t", local=["10.77.0.1", port])
    assert peer.do("detach", flow_id=flow["flow_id"], cause=int(Reason.FORK))["status"] == 0
    before = Api(service).status()["counters"].get("reinjected_total", 0)
    size = peer.do("option", name="s", option="SO_RCVBUF")
    assert give(peer, "unread ", port, repeat=300)["status"] == 0
    assert peer.do("option", name="s", option="SO_RCVBUF") == size
    got = [peer.do("recvfrom", name="s", timeout=0.2) for _ in range(300)]  # the buffer holds about 50 of this kind
    assert got == [[f"unread {n}", FAR] for n in range(300)]
    udp_from(netns_pair, netns_pair.b, "later", "10.77.0.1", port)
    assert peer.do("recvfrom", name="s")[0] == "later"
    assert Api(service).status()["counters"]["reinjected_total"] == before + 300


@pytest.mark.parametrize("size", [0, 1, 1472, 3286, 3287, 3288, 3289, lib.VMH_REINJECT_DATA])
def test_every_size(peer: Peer, size: int) -> None:
    """Beyond what one live frame may have it goes in fragments."""
    port = peer.bound("s")
    text = "".join(chr(33 + n % 90) for n in range(size))
    assert give(peer, text, port)["status"] == 0
    assert peer.do("recvfrom", name="s") == [text, FAR]


def test_a_wildcard_socket(peer: Peer) -> None:
    port = peer.bound("s", address="0.0.0.0")
    assert give(peer, "x", port, local=["*", port], to="10.77.0.1")["status"] == 0
    assert peer.do("recvfrom", name="s") == ["x", FAR]
    for other in ("10.77.0.2", "127.0.0.1", "0.0.0.0", "10.77.0.255"):
        assert give(peer, "x", port, local=["*", port], to=other)["reason"] == Reason.NOT_OWNER, other


def test_a_connected_socket(peer: Peer) -> None:
    port = peer.bound("s", connect=FAR)
    assert give(peer, "x", port, kind="5t", remote=FAR)["status"] == 0
    assert peer.do("recvfrom", name="s") == ["x", FAR]
    for source in (["10.77.0.2", 7001], ["10.77.0.3", 7000]):
        assert give(peer, "x", port, kind="5t", remote=FAR, source=source)["reason"] == Reason.NOT_OWNER
        assert give(peer, "x", port, kind="5t", remote=source, source=source)["reason"] == Reason.NOT_OWNER
    assert give(peer, "x", port, source=["10.77.0.2", 7001])["reason"] == Reason.NOT_OWNER  # claims to be unconnected
    assert peer.do("recvfrom", name="s", timeout=0.2) == []


@pytest.mark.parametrize(("address", "kind"), [("239.1.2.3", "mc"), ("0.0.0.0", "mc"), ("0.0.0.0", "3t")])
def test_multicast(peer: Peer, address: str, kind: str) -> None:
    port = peer.bound("s", address=address, join=["239.1.2.3", "10.77.0.1"])
    local = ["239.1.2.3" if kind == "mc" else "*", port]
    assert give(peer, "x", port, kind=kind, local=local, to="239.1.2.3")["status"] == 0
    assert peer.do("recvfrom", name="s") == ["x", FAR]
    if kind == "mc":
        assert give(peer, "x", port, kind=kind, local=local, to="239.1.2.4")["reason"] == Reason.NOT_OWNER


def test_without_a_ring_the_buffer_is_what_it_is(service: Service, netns_pair: Sandbox) -> None:
    """REINJECT is no way to as much kernel memory as one likes."""
    with Peer(service, netns_pair.a) as peer:
        port = peer.bound("s")
        assert give(peer, "x", port, repeat=1000)["reason"] == Reason.RING_LIMIT


def test_what_is_not_its_own_is_refused(peer: Peer) -> None:
    port = peer.bound("s")
    for changes in ({"local": ["10.77.0.1", port + 1]}, {"local": ["10.77.0.2", port]}, {"local": ["*", port]},
                    {"to": "10.77.0.2"}, {"source": ["239.1.2.3", 1]}, {"source": ["*", 1]}, {"to": "239.1.2.3"}):
        refused = give(peer, "x", port, **changes)
        assert (refused["status"], refused["reason"]) == (-1, Reason.NOT_OWNER), changes
    assert give(peer, "x", port, ifname="lo")["reason"] == Reason.IF_UNSUPPORTED
    assert peer.do("recvfrom", name="s", timeout=0.2) == []


def test_another_users_socket_on_the_port(peer: Peer, service: Service, netns_pair: Sandbox) -> None:
    """Bound with SO_REUSEADDR, it would get the datagram, from a source that the sender made up."""
    port = peer.bound("s", reuse="SO_REUSEADDR")
    with Peer(service, netns_pair.a, hello=False, prefix=("setpriv", "--reuid=65534", "--clear-groups")) as victim:
        victim.bound("s", port, reuse="SO_REUSEADDR")
        assert give(peer, "x", port)["reason"] == Reason.PORT_SHARED
        assert victim.do("recvfrom", name="s", timeout=0.2) == []
    assert give(peer, "x", port)["status"] == 0


@pytest.mark.parametrize("wrong", [
    {"size": REINJECT_HEAD + 3}, {"size": REINJECT_HEAD + 5}, {"len": 3}, {"len": 5},
    {"len": lib.VMH_REINJECT_DATA + 1}, {"len": 0xFFFFFFFF},
    {"hdr": {"len": REINJECT_HEAD + 5}}, {"size": 24, "hdr": {"len": 24}},
    {"size": REINJECT_HEAD - 1, "hdr": {"len": REINJECT_HEAD - 1}},
    {"len": lib.VMH_REINJECT_DATA + 1, "size": 4096, "hdr": {"len": 4096}},
], ids=str)
def test_wrong_lengths(service: Service, netns_pair: Sandbox, wrong: dict[str, Any]) -> None:
    with Peer(service, netns_pair.a) as peer:
        port = peer.bound("s")
        answer = give(peer, "four", port, **wrong)
        assert (answer["status"], answer["reason"]) == (-71, Reason.PROTOCOL)
        assert peer.do("closed")
        with pytest.raises(Refusal):
            give(peer, "four", port)
