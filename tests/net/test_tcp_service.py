"""TCP_TAKE and TCP_HOME: the service parks the socket of an attached connection and brings it home."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
from net.service_lab import Api, Peer, module_pair, module_service, open_files, until  # noqa: F401

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service
from vmahybrid.contracts import lib
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


def has_ended(sock: socket.socket) -> bool:
    """By a FIN or a reset. Raises TimeoutError: it has not."""
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


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


@contextlib.contextmanager
def several(service: Service, sandbox: Sandbox, far: socket.socket, count: int
            ) -> Iterator[tuple[Peer, list[socket.socket], list[list[Any]]]]:
    """The program with attached connections, their other ends, and (name, flow) of each."""
    with Peer(service, sandbox.a) as peer, contextlib.ExitStack() as stack:
        assert peer.do("ring", ifname="va")["status"] == 0
        others, wanted = [], []
        for i in range(count):
            local = peer.do("connect", name=f"c{i}", to=list(far.getsockname()))
            others.append(stack.enter_context(far.accept()[0]))
            others[-1].settimeout(3)
            reply = peer.do("attach", name=f"c{i}", kind="5t", local=local, remote=list(far.getsockname()),
                            ifname="va", proto=socket.IPPROTO_TCP)
            assert reply["status"] == 0, reply
            wanted.append([f"c{i}", reply["flow_id"]])
        yield peer, others, wanted


def taken(service: Service) -> int:
    return int(Api(service).status()["counters"].get("tcp_taken_total", 0))


def test_several_are_parked_together(service: Service, netns_pair: Sandbox, far: socket.socket) -> None:
    """Each with its own state; what is refused among them is refused alone, also the last one and one of them twice."""
    with several(service, netns_pair, far, 20) as (peer, others, wanted):
        before, unknown = taken(service), ["c0", 99999]
        said = peer.do("take_all", wanted=[*wanted[:10], unknown, wanted[3], *wanted[10:], unknown])
        refused = {10: Reason.NOT_OWNER, 11: Reason.TCP_STATE, 22: Reason.NOT_OWNER}
        assert {i: reply["reason"] for i, reply in enumerate(said) if reply["status"]} == refused
        assert taken(service) - before == 20
        states = [TcpState.unpack(bytes.fromhex(reply["state"])) for reply in said if not reply["status"]]
        assert [state.lport for state in states] == [other.getpeername()[1] for other in others]
        for i, (name, flow) in enumerate(wanted):
            assert peer.do("home", name=name, flow_id=flow, state=states[i].pack().hex())["status"] == 0
        for i, other in enumerate(others):
            other.send(b"%d" % i)
            assert peer.do("recv", name=f"c{i}") == str(i)
            peer.do("close", name=f"c{i}")
            assert other.recv(10) == b""
    assert not service.program.errors.count("Traceback")


def test_several_come_home_together(service: Service, netns_pair: Sandbox, far: socket.socket) -> None:
    """What is refused among them is refused alone: no state, another's, one of them twice. One whose peer has closed is
    told so, and those that were refused may come later, where fewer come than were said to follow."""
    with several(service, netns_pair, far, 12) as (peer, others, wanted):
        others[7].shutdown(socket.SHUT_WR)
        time.sleep(0.05)
        states = [reply["state"] for reply in peer.do("take_all", wanted=wanted)]
        homed = Api(service).status()["counters"].get("tcp_homed_total", 0)
        going = [[*one, states[i]] for i, one in enumerate(wanted)]
        going[2] = [*wanted[2], "00" * 300]
        going[5] = [*wanted[5], states[4]]
        said = peer.do("home_all", wanted=[*going, going[0]])
        assert [i for i, reply in enumerate(said) if reply["status"]] == [2, 5, 12]
        assert {said[i]["reason"] for i in (2, 5, 12)} == {Reason.TCP_STATE}
        begun = time.monotonic()
        said = peer.do("home_all", wanted=[[*wanted[i], states[i]] for i in (2, 5)], more=3)
        assert [reply["status"] for reply in said] == [0, 0]
        assert 0.09 < time.monotonic() - begun < 1
        assert Api(service).status()["counters"]["tcp_homed_total"] - homed == 12
        assert Api(service).socket_flows() == []
        for i, other in enumerate(others):
            if i != 7:
                other.send(b"%d" % i)
            assert peer.do("recv", name=f"c{i}") == ("" if i == 7 else str(i))
            peer.do("close", name=f"c{i}")
            assert other.recv(10) == b""
    assert not service.program.errors.count("Traceback")


def test_much_among_several_that_come_home(service: Service, netns_pair: Sandbox, far: socket.socket) -> None:
    """More than a megabyte that nobody has read comes home beside others."""
    with several(service, netns_pair, far, 3) as (peer, others, wanted):
        states = [TcpState.unpack(bytes.fromhex(reply["state"])) for reply in peer.do("take_all", wanted=wanted)]
        much = b"much" * 300_000
        states[1] = dataclasses.replace(states[1], receive=much, rcv_nxt=(states[1].rcv_nxt + len(much)) % (1 << 32))
        going = [[*one, state.pack().hex()] for one, state in zip(wanted, states, strict=True)]
        assert [reply["status"] for reply in peer.do("home_all", wanted=going, room=2 << 20)] == [0, 0, 0]
        got = 0
        while got < len(much):
            got += len(peer.do("recv", name="c1"))
        for i in (0, 2):
            others[i].send(b"%d" % i)
            assert peer.do("recv", name=f"c{i}") == str(i)


def test_a_program_that_ends_while_several_come_home(service: Service, netns_pair: Sandbox, far: socket.socket) -> None:
    """Each peer hears of it, from the kernel or from the service."""
    with Peer(service, netns_pair.a):
        files = open_files(service.program.pid)
    for n in range(5):
        with several(service, netns_pair, far, 16) as (peer, others, wanted):
            states = [reply["state"] for reply in peer.do("take_all", wanted=wanted)]
            peer.tell("home_all", wanted=[[*one, state] for one, state in zip(wanted, states, strict=True)])
            time.sleep(0.002 * n)
            peer.kill()
            assert until(lambda ends=others: all(map(has_ended, ends)))
    assert until(lambda: not Api(service).socket_flows())
    assert until(lambda: len(open_files(service.program.pid)) <= len(files))
    assert not service.program.errors.count("Traceback")


def test_a_lot_takes_little_longer_than_one(service: Service, netns_pair: Sandbox, far: socket.socket) -> None:
    with several(service, netns_pair, far, 41) as (peer, _, wanted):
        begun = time.monotonic()
        for one in wanted[:8]:
            assert peer.do("take_all", wanted=[one])[0]["status"] == 0
        alone = (time.monotonic() - begun) / 8
        begun = time.monotonic()
        assert not any(reply["status"] for reply in peer.do("take_all", wanted=wanted[8:40]))
        together = (time.monotonic() - begun) / 32
        assert together < alone / 2, (together, alone)
        assert until(lambda: peer.do("take_all", wanted=wanted[40:], more=5)[0]["status"] == 0)    # none follows


def test_what_follows_a_lot_waits_for_it(service: Service, netns_pair: Sandbox, far: socket.socket) -> None:
    with several(service, netns_pair, far, 3) as (peer, _, wanted):
        *said, last = peer.do("take_all", wanted=wanted, detach=wanted[0][1])
        assert [reply["status"] for reply in (*said, last)] == [0] * 4
        assert {flow["flow_id"] for flow in Api(service).socket_flows()} == {flow for _, flow in wanted[1:]}


def test_an_answer_that_came_too_late(service: Service, netns_pair: Sandbox, far: socket.socket) -> None:
    """The program says that nobody answered: the connection is the kernel's, as it was, and not one that has ended."""
    with attached(service, netns_pair, far) as (peer, other, flow):
        assert peer.do("take", name="c", flow_id=flow["flow_id"])["status"] == 0
        assert peer.do("detach", flow_id=flow["flow_id"], cause=int(Reason.NO_ANSWER))["status"] == 0
        assert Api(service).socket_flows() == []
        other.send(b"to the kernel")
        assert peer.do("recv", name="c") == "to the kernel"


def test_it_is_home_already(service: Service, netns_pair: Sandbox, far: socket.socket) -> None:
    """Said again by who did not hear the answer."""
    with attached(service, netns_pair, far) as (peer, other, flow):
        assert peer.do("take", name="c", flow_id=flow["flow_id"])["status"] == 0
        for _ in range(2):
            assert peer.do("home", name="c", flow_id=flow["flow_id"])["status"] == 0
        other.send(b"goes on")
        assert peer.do("recv", name="c") == "goes on"


def test_numbers_that_the_kernel_does_not_take(service: Service, netns_pair: Sandbox, far: socket.socket) -> None:
    """They keep no thread of the service busy, and no connection from coming home."""
    with attached(service, netns_pair, far) as (peer, other, flow):
        assert peer.do("take", name="c", flow_id=flow["flow_id"])["status"] == 0
        state = TcpState.unpack(bytes.fromhex(peer.do("state")))
        wrong = dataclasses.replace(state, keep_idle_s=99999999, keep_intvl_s=1 << 31, keep_cnt=255).pack().hex()
        begun = time.monotonic()
        assert peer.do("home", name="c", flow_id=flow["flow_id"], state=wrong)["status"] == 0
        assert time.monotonic() - begun < 1
        other.send(b"goes on")
        assert peer.do("recv", name="c") == "goes on"


def test_a_program_that_ends_in_a_lot(service: Service, netns_pair: Sandbox, far: socket.socket) -> None:
    with Peer(service, netns_pair.a):
        files = open_files(service.program.pid)
    for _ in range(5):
        with several(service, netns_pair, far, 16) as (peer, others, wanted):
            peer.tell("take_all", wanted=wanted)
            time.sleep(0.005)
            peer.kill()
            time.sleep(0.3)
            assert all(map(has_ended, others))
    assert until(lambda: not Api(service).socket_flows())
    assert until(lambda: len(open_files(service.program.pid)) <= len(files))
    assert not service.program.errors.count("Traceback")


@contextlib.contextmanager
def with_port(service: Service, sandbox: Sandbox) -> Iterator[tuple[Peer, list[Any], int]]:
    """A program with a local port whose connections are its ring's, (address, port) and the flow."""
    with Peer(service, sandbox.a) as peer:
        assert peer.do("ring", ifname="va")["status"] == 0
        reply = peer.do("attach_port", address=sandbox.a.address, ifname="va")
        assert reply["status"] == 0, reply
        local = [sandbox.a.address, socket.ntohs(reply["local_port"])]
        peer.do("stream", name="port")
        peer.do("stream", name="c")
        yield peer, local, reply["flow_id"]


def established(sandbox: Sandbox) -> list[list[str]]:
    argv = sandbox.a.command(["ss", "-Htn", "state", "established"])
    output = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=10).stdout
    return [line.split()[2:4] for line in output.splitlines()]


def fives(service: Service) -> list[Any]:
    return [flow for flow in Api(service).socket_flows() if flow["kind"] == "5-tuple"]


def test_a_connection_of_the_ring_is_shown_and_hidden(service: Service, netns_pair: Sandbox) -> None:
    remote = [netns_pair.b.address, 4711]
    with with_port(service, netns_pair) as (peer, local, flow):
        [own] = peer.do("show", conns=[["c", flow, local, remote]], ifname="va")["flow_id"]
        assert own and [f["flow_id"] for f in fives(service)] == [own]
        assert established(netns_pair) == [[f"{local[0]}:{local[1]}", f"{remote[0]}:{remote[1]}"]]
        assert peer.do("show", conns=[["c", flow, local, remote]], ifname="va")["flow_id"] == [0]   # in use
        peer.do("stream", name="d")
        assert peer.do("show", conns=[["d", flow, local, remote]], ifname="va")["flow_id"] == [0]   # the kernel has it
        assert [f["flow_id"] for f in fives(service)] == [own]
        assert peer.do("show", conns=[["d", flow, local, [remote[0], 4712]]], ifname="va")["flow_id"] != [0]
        assert len(established(netns_pair)) == 2
        assert peer.do("hide", names=["c", "port"])["status"] == 0
        assert len(established(netns_pair)) == len(fives(service)) == 1
        assert peer.do("hide", names=["c"])["status"] == 0
        peer.do("close", name="d")
        assert established(netns_pair) == []
    assert until(lambda: not Api(service).socket_flows())
    assert not service.program.errors.count("Traceback")


def test_those_with_traffic_get_what_is_left_of_the_rules(service: Service, netns_pair: Sandbox) -> None:
    before = Api(service).call("GET", "/v1/config")[1]["limits.rules"]["value"]
    with with_port(service, netns_pair) as (peer, local, flow):
        for number in range(12):
            peer.do("stream", name=f"c{number}")
        wanted = [[f"c{number}", flow, local, [netns_pair.b.address, 4711 + number]] for number in range(12)]
        assert Api(service).call("PATCH", "/v1/config", {"limits.rules": 10})[0] == 200
        try:
            shown = [bool(peer.do("show", conns=[conn], ifname="va")["flow_id"][0]) for conn in wanted[:8]]
            there = len(Api(service).call("GET", "/v1/flows")[1]) - sum(shown)
            assert shown == [number < 8 - there for number in range(8)]
            busy = peer.do("show", conns=wanted[8:10], ifname="va", flags=lib.VMH_TCP_SHOW_BUSY)["flow_id"]
            assert busy[0] and not busy[1]
        finally:
            Api(service).call("PATCH", "/v1/config", {"limits.rules": before})
    assert until(lambda: not Api(service).socket_flows())


def test_what_is_not_shown(service: Service, netns_pair: Sandbox) -> None:
    remote = [netns_pair.b.address, 4711]
    with with_port(service, netns_pair) as (peer, local, flow), Peer(service, netns_pair.a) as other:
        assert other.do("ring", ifname="va")["status"] == 0
        other.do("stream", name="c")
        for wanted in (["c", flow, local, remote],):   # another program's port
            assert other.do("show", conns=[wanted], ifname="va")["flow_id"] == [0]
        for wanted in (["c", flow + 1000, local, remote], ["c", flow, [local[0], local[1] ^ 1], remote],
                       ["c", flow, [netns_pair.b.address, local[1]], remote], ["c", flow, local, [remote[0], 0]]):
            assert peer.do("show", conns=[wanted], ifname="va")["flow_id"] == [0], wanted
        assert other.do("hide", names=["c"])["status"] == 0
        assert established(netns_pair) == [] and fives(service) == []
        assert peer.do("show", conns=[["c", flow, local, remote]], ifname="va")["flow_id"] != [0]
        assert peer.do("show", conns=[["port", flow, local, remote]], ifname="va", count=3)["status"] == -errno.EPROTO
    assert until(lambda: not Api(service).socket_flows())
