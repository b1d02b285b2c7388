"""Rings in two steps, as kernels need them that can't map a bound AF_XDP socket: forced here, since this one can."""

from __future__ import annotations

import errno
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from apps.shimmed import Stage, nap, stop
from net.death_lab import Lab
from net.service_lab import Api, Peer, assert_same_files, lost_at_once, open_files, udp_from, until, veths

from vmahybrid.bench.sandbox import Program, Sandbox, Side
from vmahybrid.bench.served import Service
from vmahybrid.contracts import lib
from vmahybrid.net.netns import NetnsWorker
from vmahybrid.service.binding import MAP_SECONDS
from vmahybrid.steering.reasons import Reason
from vmahybrid.xdp.latebind import FORCE
from vmahybrid.xdp.umem import Umem
from vmahybrid.xdp.xsk import Xsk

pytestmark = pytest.mark.root
ECHO = str(Path(__file__).parents[1] / "vm" / "udp_echo.py")
A = "10.77.0.1"
DIRECT, VETH = lib.VMH_RING_DIRECT, lib.VMH_RING_VETH
NOT_BOUND: int = lib.VMH_RING_F_BIND_AFTER
DATAGRAMS = 50


@pytest.fixture
def service(netns_pair: Sandbox) -> Iterator[Service]:
    running = Service(netns_pair)
    running.start({FORCE: "1"})
    yield running
    running.stop()


@pytest.fixture
def foreign(netns_pair: Sandbox) -> Iterator[None]:
    """Somebody else's AF_XDP socket has the queue of side a."""
    worker = NetnsWorker.open_path(netns_pair.a.netns)
    with Umem(16) as umem:
        xsk = worker.call(Xsk.open, umem, "va", 0, zerocopy=False)
        yield
        xsk.close()
    worker.close()


def rings(service: Service) -> list[tuple[int, str]]:
    """(pid, kind) of every ring that the service knows."""
    return [(ring["pid"], ring["kind"]) for ring in Api(service).call("GET", "/v1/rings")[1]]


def echoing(lab: Lab, side: Side, port: int, **variables: str) -> Program:
    program = lab.shimmed(side, [sys.executable, "-S", ECHO, side.address, str(port)], **variables)
    program.wait_for("ready", 10)
    return program


def exchange(sandbox: Sandbox, address: str, port: int) -> None:
    """DATAGRAMS from side b, one after another; each comes back."""
    worker = NetnsWorker.open_path(sandbox.b.netns)
    try:
        with worker.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.settimeout(3)
            client.connect((address, port))
            for number in range(DATAGRAMS):
                client.send(b"%d" % number)
                assert client.recv(100) == b"%d" % number
    finally:
        worker.close()


def carried(service: Service, pid: int) -> list[int]:
    """Packets by the rules of a program's flows to rings."""
    return [flow["packets"] for flow in Api(service).socket_flows() if (flow["pid"], flow["action"]) == (pid, "ring")]


def test_the_service_says_so(service: Service) -> None:
    assert Api(service).status()["features"]["map_bound_xsk"] is False


def test_echo_on_a_direct_ring_and_on_a_ring_veth(service: Service, netns_pair: Sandbox) -> None:
    lab = Lab(netns_pair, service)
    programs = [echoing(lab, netns_pair.a, port, VMA_TRACELEVEL="debug") for port in (7001, 7002)]
    for port, program in zip((7001, 7002), programs, strict=True):
        exchange(netns_pair, A, port)
        assert carried(service, program.pid) == [DATAGRAMS]
    assert sorted(rings(service)) == sorted([(programs[0].pid, "direct"), (programs[1].pid, "veth")])
    sent = Api(service).call("GET", "/v1/rings")[1]
    assert [ring["guard"].get("sent") for ring in sent if ring["kind"] == "veth"] == [DATAGRAMS]
    for program in programs:
        program.stop(9)
    until(lambda: rings(service) == [])
    until(lambda: veths(netns_pair.a) == [])


@pytest.mark.parametrize("direct", ["first", "never"])
def test_sockperf(netns_pair: Sandbox, tmp_path: Path, direct: str) -> None:
    config = tmp_path / "vmahybrid.toml"
    config.write_text(f'[ring]\ndirect = "{direct}"\n')
    service = Service(netns_pair, arguments=["--config", str(config)])
    service.start({FORCE: "1"})
    stage = Stage(netns_pair, service, env={"LD_PRELOAD": str(nap())})
    target = ["-i", netns_pair.b.address, "-p", "11111"]
    server = stage.serve("sockperf", "server", *target)
    server.wait_for(r"\[SERVER\]|listen", 10)
    stage.wait_bound(netns_pair.b, 11111)
    client = stage.client("sockperf", "ping-pong", *target, "-m", "64", "-t", "2")
    client.wait_for("Starting test|Warmup", 10)
    stage.require_rings(server, client)
    assert {kind for _, kind in rings(service)} == {"direct" if direct == "first" else "veth"}
    said = client.result(20)
    assert re.search(r"# dropped messages = 0\b", said), said
    stop(server)
    service.stop()


def test_nothing_is_steered_before_the_second_step(service: Service, netns_pair: Sandbox) -> None:
    with Peer(service, netns_pair.a) as peer:
        ring = peer.do("ring", ifname="va", mapped=False)
        assert (ring["status"], ring["kind"], ring["fds"], ring["flags"] & NOT_BOUND) == (0, DIRECT, 2, NOT_BOUND)
        port = peer.bound("s")
        flow: dict[str, Any] = {"name": "s", "kind": "3t", "local": [A, port]}
        assert peer.do("attach", **flow)["status"] < 0
        assert peer.do("ring", ifname="va")["reason"] == Reason.RING_FAILED  # one per interface
        udp_from(netns_pair, netns_pair.b, "kernel", A, port)
        assert peer.do("recv", name="s") == "kernel"
        done = peer.do("mapped", ring_id=ring["ring_id"])
        assert (done["status"], done["ring_id"], done["flags"] & NOT_BOUND) == (0, ring["ring_id"], 0)
        assert peer.do("attach", **flow)["status"] == 0
        again = peer.do("mapped", ring_id=ring["ring_id"])
        assert (again["status"], again["reason"]) == (-errno.EOPNOTSUPP, Reason.RING_FAILED)
        assert peer.do("mapped", ring_id=ring["ring_id"] + 7)["reason"] == Reason.NOT_OWNER
        with Peer(service, netns_pair.a) as other:
            assert other.do("mapped", ring_id=ring["ring_id"])["reason"] == Reason.NOT_OWNER
        udp_from(netns_pair, netns_pair.b, "ring", A, port)
        until(lambda: carried(service, peer.pid) == [1])


def test_kill_between_the_steps(service: Service, netns_pair: Sandbox) -> None:
    with Peer(service, netns_pair.a) as peer:  # what is opened once and kept is open now
        peer.do("ring", ifname="va")
    until(lambda: not Api(service).status()["processes"])
    before = open_files(service.program.pid)
    for _ in range(5):
        first, second = Peer(service, netns_pair.a), Peer(service, netns_pair.a)
        assert first.do("ring", ifname="va", mapped=False)["kind"] == DIRECT
        assert second.do("ring", ifname="va", mapped=False)["kind"] == VETH
        assert len(veths(netns_pair.a)) == 1
        for peer in (first, second):
            peer.kill()
            peer.close()
        until(lambda: rings(service) == [] and veths(netns_pair.a) == [], 1.0)
        until(lambda: not Api(service).status()["processes"], 1.0)
    assert_same_files(service.program.pid, before)
    with Peer(service, netns_pair.a) as peer:
        assert peer.do("ring", ifname="va")["kind"] == DIRECT


def test_release_between_the_steps(service: Service, netns_pair: Sandbox) -> None:
    with Peer(service, netns_pair.a) as peer:
        ring = peer.do("ring", ifname="va", mapped=False)
        assert peer.do("release", ring_id=ring["ring_id"])["status"] == 0
        assert rings(service) == []
        assert peer.do("mapped", ring_id=ring["ring_id"])["reason"] == Reason.RING_FAILED
        assert peer.do("ring", ifname="va")["kind"] == DIRECT


def test_a_program_that_never_takes_the_second_step(service: Service, netns_pair: Sandbox) -> None:
    with Peer(service, netns_pair.a) as idle, Peer(service, netns_pair.a) as other:
        ring = idle.do("ring", ifname="va", mapped=False)
        time.sleep(MAP_SECONDS - 1)
        assert rings(service) == [(idle.pid, "direct")]
        until(lambda: rings(service) == [], 2.0)
        assert other.do("ring", ifname="va")["kind"] == DIRECT
        assert idle.do("mapped", ring_id=ring["ring_id"])["reason"] == Reason.RING_FAILED
        time.sleep(MAP_SECONDS + 0.5)  # the ring that was mapped stays
        assert rings(service) == [(other.pid, "direct")]


def test_an_interface_that_goes_between_the_steps(service: Service, netns_pair: Sandbox) -> None:
    with Peer(lost_at_once(service), netns_pair.a) as peer:
        ring = peer.do("ring", ifname="va", mapped=False)
        netns_pair.a.ip("link", "set", "va", "down")
        assert peer.do("event")[:2] == [lib.VMH_EV_RING_GONE, ring["ring_id"]]
        assert peer.do("mapped", ring_id=ring["ring_id"])["status"] < 0
        assert rings(service) == []


def test_a_queue_that_is_taken(service: Service, netns_pair: Sandbox, foreign: None) -> None:
    """bind(2) says so only in the second step: the ring is released, and the next one is a ring veth."""
    with Peer(service, netns_pair.a) as peer:
        before = open_files(service.program.pid)
        ring = peer.do("ring", ifname="va", mapped=False)
        assert ring["kind"] == DIRECT
        refused = peer.do("mapped", ring_id=ring["ring_id"])
        assert (refused["status"], refused["reason"]) == (-errno.EBUSY, Reason.RING_FAILED)
        assert rings(service) == []
        assert_same_files(service.program.pid, before)
        second = peer.do("ring", ifname="va")
        assert (second["status"], second["kind"], second["flags"] & NOT_BOUND) == (0, VETH, 0)


def test_a_program_whose_queue_is_taken_gets_a_ring_veth(service: Service, netns_pair: Sandbox, foreign: None) -> None:
    program = echoing(Lab(netns_pair, service), netns_pair.a, 7003)
    assert rings(service) == [(program.pid, "veth")]
    exchange(netns_pair, A, 7003)
    assert carried(service, program.pid) == [DATAGRAMS]
    assert "could not be bound: Device or resource busy" in program.errors
    maps = Path(f"/proc/{program.pid}/maps").read_text()
    assert (maps.count("socket:["), maps.count("memfd:vmahybrid-umem")) == (4, 1)  # of the second ring only
    links = [os.readlink(path) for path in Path(f"/proc/{program.pid}/fd").iterdir()]
    assert sum(link.startswith("socket:") for link in links) == 3, links  # its own, the control socket, the AF_XDP one
    program.stop(9)


def test_a_socket_that_the_program_bound_itself(service: Service, netns_pair: Sandbox) -> None:
    """It can, in the interface's namespace. The service finds out and takes the ring back."""
    with Peer(service, netns_pair.a) as peer:
        ring = peer.do("ring", ifname="va", mapped=False)
        assert peer.do("bind_xsk", ifname="lo") == 0
        assert peer.do("mapped", ring_id=ring["ring_id"])["status"] == -errno.EBUSY
        assert rings(service) == []


def test_each_ring_veth_has_a_namespace_of_its_own(service: Service, netns_pair: Sandbox) -> None:
    """A socket that is not bound yet finds there no far end but its own."""
    with Peer(service, netns_pair.a) as first, Peer(service, netns_pair.a) as second, Peer(service, netns_pair.a) as x:
        assert first.do("ring", ifname="va", mapped=False)["kind"] == DIRECT
        assert second.do("ring", ifname="va", mapped=False)["kind"] == VETH
        assert x.do("ring", ifname="va", mapped=False)["kind"] == VETH
        assert len({peer.do("xsk_namespace") for peer in (first, second, x)}) == 3
