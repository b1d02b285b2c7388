"""TCP_TAKE and TCP_HOME: the service parks the socket of an attached connection and brings it home (a preview)."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from net.service_lab import Api, Peer, module_pair, module_service, open_files, until  # noqa: F401

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service
from vmahybrid.net.netns import NetnsWorker
from vmahybrid.net.tcpstate import TcpState
from vmahybrid.steering.reasons import Reason

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def far(netns_pair: Sandbox) -> Iterator[socket.socket]:
    """A listener on side b."""
    worker = NetnsWorker.open_path(f"/run/netns/{netns_pair.b.netns}")
    try:
        with worker.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.bind((netns_pair.b.address, 0))
            listener.listen()
            listener.settimeout(3)
            yield listener
    finally:
        worker.close()


@contextlib.contextmanager
def attached(service: Service, sandbox: Sandbox, far: socket.socket) -> Iterator[tuple[Peer, socket.socket, Any]]:
    """The program with an attached connection "c", the other end, and the reply to ATTACH."""
    with Peer(service, sandbox.a) as peer:
        assert peer.do("ring", ifname="va")["status"] == 0
        local = peer.do("connect", name="c", to=list(far.getsockname()))
        other, _ = far.accept()
        with other:
            other.settimeout(3)
            reply = peer.do("attach", name="c", kind="5t", local=local, remote=list(far.getsockname()), ifname="va",
                            proto=socket.IPPROTO_TCP)
            assert reply["status"] == 0, reply
            yield peer, other, reply


def speak(sock: socket.socket) -> None:
    """The peer of a connection that is gone learns of it at the latest when it sends."""
    sock.send(b"x")
    sock.recv(1)


def test_it_is_parked_and_comes_home(service: Service, netns_pair: Sandbox, far: socket.socket) -> None:
    with attached(service, netns_pair, far) as (peer, other, flow):
        taken = peer.do("take", name="c", flow_id=flow["flow_id"])
        assert taken["status"] == 0 and taken["len"] == taken["bytes"] == 200
        shown = Api(service).socket_flows()
        assert [f["flow_id"] for f in shown] == [flow["flow_id"]]
        before = shown[0]["packets"]
        other.send(b"to the ring")
        assert until(lambda: Api(service).socket_flows()[0]["packets"] > before)
        assert peer.do("take", name="c", flow_id=flow["flow_id"])["reason"] == Reason.TCP_STATE
        assert peer.do("home", name="c", flow_id=flow["flow_id"])["status"] == 0
        assert Api(service).socket_flows() == []
        assert peer.do("recv", name="c") == "to the ring"   # the peer sends again what the ring had
        peer.do("close", name="c")
        assert other.recv(10) == b""
    counters = Api(service).status()["counters"]
    assert counters["tcp_taken_total"] >= 1 and counters["tcp_homed_total"] >= 1


def test_the_state_is_the_connections(service: Service, netns_pair: Sandbox, far: socket.socket) -> None:
    with attached(service, netns_pair, far) as (peer, _, flow):
        assert peer.do("take", name="c", flow_id=flow["flow_id"])["status"] == 0
        assert peer.do("home", name="c", flow_id=flow["flow_id"] + 1, data="no state")["reason"] == Reason.TCP_STATE
        state = TcpState.unpack(bytes.fromhex(peer.do("state")))
        assert (state.rport, state.send, state.receive) == (far.getsockname()[1], b"", b"")
        other_port = peer.do("home", name="c", flow_id=flow["flow_id"], port=1)
        assert other_port["status"] != 0
        assert peer.do("home", name="c", flow_id=flow["flow_id"])["status"] == 0


def test_who_attached_nothing_takes_nothing(service: Service, netns_pair: Sandbox, far: socket.socket) -> None:
    with Peer(service, netns_pair.a) as peer:
        assert peer.do("ring", ifname="va")["status"] == 0
        peer.do("connect", name="c", to=list(far.getsockname()))
        far.accept()[0].close()
        assert peer.do("take", name="c", flow_id=77)["reason"] == Reason.NOT_OWNER


def test_a_killed_program_resets_its_peer(service: Service, netns_pair: Sandbox, far: socket.socket) -> None:
    with Peer(service, netns_pair.a):
        files = open_files(service.program.pid)
    with attached(service, netns_pair, far) as (peer, other, flow):
        assert peer.do("take", name="c", flow_id=flow["flow_id"])["status"] == 0
        peer.kill()
        time.sleep(0.5)
        with pytest.raises(ConnectionResetError):
            speak(other)
    until(lambda: len(open_files(service.program.pid)) <= len(files))
