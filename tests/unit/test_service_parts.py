"""Parts of the service that need neither root nor a namespace."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

from vmahybrid.config.interface_glob import InterfaceGlob
from vmahybrid.config.service import load
from vmahybrid.contracts import addr_to_bytes, lib, pack, size_of
from vmahybrid.errors import UsageError, VmahybridError
from vmahybrid.net.bond import Bond
from vmahybrid.net.page import LinkInfo
from vmahybrid.net.rtnl import link_info
from vmahybrid.net.sockdiag import Bound, bound_sockets
from vmahybrid.net.watcher import NetWatcher
from vmahybrid.service.apiserver import read_token
from vmahybrid.service.control import TokenBucket
from vmahybrid.service.drops import WINDOW, Drops, dropped, sentence
from vmahybrid.service.events import BACKLOG, EventLog
from vmahybrid.service.grace import Grace
from vmahybrid.service.instance import Instance, listener, remove_socket
from vmahybrid.service.messages import HEADER, REINJECT_HEAD, REQUESTS, ProtocolError, event, parse
from vmahybrid.service.namespaces import Namespace
from vmahybrid.service.ports import named, serving
from vmahybrid.service.shared import competitors
from vmahybrid.service.tcpmoves import TcpMoves
from vmahybrid.steering.flow import Flow, FlowAction, Kind, Source
from vmahybrid.steering.keys import ANY_ADDR
from vmahybrid.steering.reasons import ROWS, Reason, parse_reasons

A, B, GROUP = (addr_to_bytes(text) for text in ("10.0.0.1", "10.0.0.2", "239.1.1.1"))


@pytest.mark.parametrize("type_", REQUESTS)
def test_every_request_is_parsed_and_answered(type_: int) -> None:
    ctype, reply_type, least, _ = REQUESTS[type_]
    size = REINJECT_HEAD if type_ == lib.VMH_MSG_REINJECT else size_of(ctype)  # the only one that varies
    header = {"magic": lib.VMH_CTL_MAGIC, "version": lib.VMH_CTL_VERSION, "type": type_, "len": size, "seq": 7}
    request = parse(pack(ctype, hdr=header)[:size], least, False)
    assert (request.type, request.seq) == (type_, 7)
    for data, status in ((request.reply(), 0), (request.refusal(5, Reason.RULE), -5)):
        assert len(data) == size_of(reply_type)
        magic, version, kind, length, seq, got, reason = struct.unpack_from("=IHHIIiI", data)
        assert (magic, version, kind, length, seq, got) == (lib.VMH_CTL_MAGIC, lib.VMH_CTL_VERSION,
                                                            type_ | lib.VMH_MSG_REPLY, len(data), 7, status)
        assert reason == (Reason.RULE if status else 0)


def test_a_protocol_error_carries_its_reply() -> None:
    with pytest.raises(ProtocolError) as error:
        parse(b"x" * 30, 0, False)
    assert len(error.value.reply) == size_of(HEADER)
    assert struct.unpack_from("=i", error.value.reply, 16)[0] == -71
    assert len(event(lib.VMH_EV_BYE)) == size_of("struct vmh_msg_event")


def test_the_token_bucket() -> None:
    now = 0.0
    bucket = TokenBucket(10, 3, lambda: now)
    assert [round(bucket.delay(), 3) for _ in range(5)] == [0, 0, 0, 0.1, 0.2]
    now = 0.2
    assert bucket.delay() == pytest.approx(0.1)
    now = 100
    assert [bucket.delay() for _ in range(3)] == [0, 0, 0]


def test_events_are_kept_followed_and_ended() -> None:
    async def scenario() -> None:
        log = EventLog()
        for number in range(BACKLOG + 5):
            log.add("test", str(number))
        follower = log.follow(BACKLOG + 3)
        assert [(await anext(follower)).serial for _ in range(2)] == [BACKLOG + 4, BACKLOG + 5]
        late = asyncio.ensure_future(anext(follower))
        await asyncio.sleep(0)
        log.add("test", "live", a=1)
        assert (await late).data == {"a": 1}
        first = await anext(log.follow(0))
        assert first.serial == 7  # the older ones are gone
        log.close()
        assert [event async for event in follower] == []
        assert [event.serial async for event in log.follow(BACKLOG + 5)] == [BACKLOG + 6]

    asyncio.run(scenario())


def test_a_slow_follower_loses_the_oldest_only() -> None:
    async def scenario() -> None:
        log = EventLog()
        follower = log.follow(0)
        waiting = asyncio.ensure_future(anext(follower))
        await asyncio.sleep(0)
        for number in range(3000):
            log.add("test", str(number))
        assert (await waiting).serial > 1000
        seen = [(await anext(follower)).serial for _ in range(10)]
        assert seen == sorted(seen)
        assert seen[0] > 1000
        log.close()

    asyncio.run(scenario())


def test_grace_waits_for_a_period_that_began_later(monkeypatch: pytest.MonkeyPatch) -> None:
    periods: list[str] = []

    def synchronize() -> None:
        periods.append("begin")
        time.sleep(0.05)
        periods.append("end")

    monkeypatch.setattr("vmahybrid.service.grace._synchronize", synchronize)

    async def scenario() -> None:
        grace = Grace()
        first = asyncio.ensure_future(grace.wait())
        await asyncio.sleep(0.02)
        assert periods == ["begin"]
        others = [asyncio.ensure_future(grace.wait()) for _ in range(5)]
        await first
        assert not any(other.done() for other in others)
        await asyncio.gather(*others)
        assert periods == ["begin", "end"] * 2  # five callers, one period
        await grace.wait()
        assert len(periods) == 6

    asyncio.run(scenario())


@dataclass
class Link:
    name: str
    up: bool = True
    loopback: bool = False
    arphrd: int = 1
    master: int = 0
    kind: str = ""
    bond: Bond | None = None
    lower: int = 0


@pytest.mark.parametrize(("link", "interfaces", "address", "reason"), [
    (Link("eth0"), [], True, Reason.NONE),
    (Link("eth0"), [], False, Reason.NOT_OFFLOADABLE_ADDR),
    (Link("eth0"), ["eth0"], False, Reason.NONE),
    (Link("eth0"), ["eth*"], True, Reason.NONE),
    (Link("eth0"), ["blue:eth0"], True, Reason.NONE),
    (Link("eth0"), ["red:eth0", "eth1"], True, Reason.NO_INTERFACE),
    (Link("eth0", up=False), [], True, Reason.IF_DOWN),
    (Link("eth0", master=4), ["eth0"], True, Reason.IF_UNSUPPORTED),
    (Link("wg0", arphrd=65534), ["wg0"], True, Reason.IF_UNSUPPORTED),
    (Link("vmhr3"), [], True, Reason.IF_UNSUPPORTED),
    (Link("vmhf3"), [], True, Reason.IF_UNSUPPORTED),
    (Link("lo", loopback=True, arphrd=772), ["lo"], True, Reason.LOOPBACK),
])
def test_which_interfaces_are_served(link: Link, interfaces: list[str], address: bool, reason: Reason) -> None:
    config = load(command_line={"interfaces": interfaces})
    assert serving(config, "blue", link, address) is reason


def bond(mode: int, fail_over_mac: int = 0) -> Link:
    return Link("bond0", kind="bond", bond=Bond(mode, fail_over_mac))


def attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


VLAN, MACVLAN = Link("bond0.10", kind="vlan"), Link("macvlan0", kind="macvlan")


@pytest.mark.parametrize(("layers", "reason"), [
    ([bond(1)], Reason.NONE),
    ([bond(1, 1)], Reason.NONE),
    ([bond(4)], Reason.NONE),
    ([bond(1, 2)], Reason.BOND_MODE),
    *(([bond(mode)], Reason.BOND_MODE) for mode in (0, 2, 3, 5, 6)),
    ([VLAN, bond(1)], Reason.NONE),
    ([VLAN, bond(4, 1)], Reason.BOND_VLAN),
    ([VLAN, bond(0)], Reason.BOND_MODE),
    ([VLAN, Link("eth0")], Reason.NONE),
    ([VLAN, VLAN, bond(1)], Reason.NONE),
    ([VLAN, VLAN, bond(1, 1)], Reason.BOND_VLAN),
    ([VLAN, VLAN, bond(0)], Reason.BOND_MODE),
    ([MACVLAN, bond(1, 1)], Reason.NONE),  # with an address of its own
    ([MACVLAN, bond(0)], Reason.BOND_MODE),
    ([MACVLAN, VLAN, bond(1, 1)], Reason.BOND_VLAN),
    ([VLAN, MACVLAN, bond(3)], Reason.BOND_MODE),
])
def test_bonds(layers: list[Link], reason: Reason) -> None:
    assert serving(load(), "host", layers[0], True, layers) is reason


def test_an_interface_is_judged_with_the_devices_under_it() -> None:
    """Recorded links in the mirror that the service has: asking for a lower device asks for no other verdict."""
    async def verdicts() -> list[Reason]:
        def mirror(worker: Any, served: Any, changed: Any) -> NetWatcher:
            return NetWatcher(worker, asyncio.get_running_loop(), served, changed)

        worker: Any = SimpleNamespace(netns=SimpleNamespace(name="host"))
        namespace = Namespace(worker, load, cast(Any, None), mirror, lambda *_: None)
        watcher = cast(NetWatcher, namespace.watcher)

        def link(ifindex: int, kind: str, lower: int = 0, bond: Bond | None = None) -> LinkInfo:
            return LinkInfo(ifindex, f"if{ifindex}", 1500, bytes(6), True, False, 1, kind=kind, lower=lower, bond=bond)

        watcher._raw_links = [
            link(2, ""), link(3, "bond", bond=Bond(0, 0)), link(4, "vlan", 2), link(5, "vlan", 3),
            link(6, "vlan", 99),  # just gone
            link(7, "bond", bond=Bond(1, 1)), link(8, "vlan", 7), link(9, "vlan", 8), link(10, "macvlan", 3),
            link(11, "macvlan", 9), link(12, "veth", 3),  # a peer is not what it is made on
            link(13, "vlan", 14), link(14, "vlan", 13)]   # half read
        return [Reason(link.reason) for link in watcher.links()]

    without = Reason.NOT_OFFLOADABLE_ADDR  # nobody has an address here
    assert asyncio.run(verdicts()) == [
        without, Reason.BOND_MODE, without, Reason.BOND_MODE, without, without, Reason.BOND_VLAN, Reason.BOND_VLAN,
        Reason.BOND_MODE, Reason.BOND_VLAN, without, without, without]


@pytest.mark.parametrize(("foreign", "lower"), [(b"", 5), (attribute(37, b"\0\0\0\0"), 0)])
def test_a_lower_device_of_another_namespace_is_none_of_this_one(foreign: bytes, lower: int) -> None:
    """IFLA_LINK_NETNSID: a macvlan in a container; the number may be that of another device there."""
    body = struct.pack("=BxHiII", 0, 1, 7, 0x11043, 0) + attribute(3, b"eth0\0") + attribute(5, b"\5\0\0\0") + foreign
    message = ifinfmsg(struct.pack("=IHHII", 16 + len(body), 16, 0, 1, 0) + body)
    message.decode()
    assert link_info(message).lower == lower


@pytest.mark.parametrize(("data", "expected"), [
    (attribute(1, b"\x01") + attribute(13, b"\x02"), Bond(1, 2)),
    (attribute(1, b"\x04"), Bond(4, 0)),
    (b"", Bond(0, 0)),
])
def test_bonds_as_the_kernel_reports_them(data: bytes, expected: Bond) -> None:
    """IFLA_LINKINFO { IFLA_INFO_KIND, IFLA_INFO_DATA { IFLA_BOND_MODE, IFLA_BOND_FAIL_OVER_MAC } } of RTM_NEWLINK."""
    linkinfo = attribute(1, b"bond\0") + attribute(2, data)
    body = struct.pack("=BxHiII", 0, 1, 7, 0x11043, 0) + attribute(3, b"bond0\0") + attribute(18, linkinfo)
    message = ifinfmsg(struct.pack("=IHHII", 16 + len(body), 16, 0, 1, 0) + body)
    message.decode()
    link = link_info(message)
    assert (link.name, link.kind, link.up, link.bond) == ("bond0", "bond", True, expected)


def test_an_interface_that_the_configuration_leaves_to_the_kernel(tmp_path: Path) -> None:
    path = tmp_path / "vmahybrid.toml"
    path.write_text('backend = "kernel"\n[interface."eth0"]\nbackend = "xdp"\n')
    config = load(path)
    assert serving(config, "host", Link("eth0"), True) is Reason.NONE
    assert serving(config, "host", Link("eth1"), True) is Reason.BACKEND_CONFIG


def test_a_pattern_names_nothing_that_can_not_be_served() -> None:
    config = load(command_line={"interfaces": ["blue:*", "br0"]})
    lo, ours, port = Link("lo", loopback=True, arphrd=772), Link("vmhr3"), Link("va", master=4)
    assert not any(named(config, "blue", link) for link in (lo, ours, Link("vmhf0"), port))
    assert named(config, "blue", Link("vb"))
    assert named(config, "host", Link("br0", master=4))  # by its name: status says why it is not served


def test_what_is_attached_at_the_start() -> None:
    config = load(command_line={"interfaces": ["eth0", "blue:v*"]})
    assert named(config, "host", Link("eth0"))
    assert not named(config, "blue", Link("eth0"))  # served there, but on demand
    assert named(config, "blue", Link("va"))
    assert not named(config, "red", Link("va"))
    assert InterfaceGlob.parse("a:b") == InterfaceGlob("a", "b")
    assert InterfaceGlob.parse("b") == InterfaceGlob("", "b")


def flow(kind: Kind, local: bytes = A, remote: bytes = ANY_ADDR) -> Flow:
    return Flow(action=FlowAction.RING, source=Source.SOCKET, kind=kind, local=local, local_port=5, remote=remote)


def test_competitors() -> None:
    mine, anywhere, same, other, connected = (Bound(1, 0, A, ANY_ADDR), Bound(2, 0, ANY_ADDR, ANY_ADDR),
                                              Bound(3, 0, A, ANY_ADDR), Bound(4, 0, B, ANY_ADDR), Bound(5, 0, B, A))
    group = Bound(6, 0, GROUP, ANY_ADDR)
    everybody = [mine, anywhere, same, other, connected, group]
    asked = ((Kind.THREE, A, ANY_ADDR), (Kind.MULTICAST, GROUP, ANY_ADDR), (Kind.FIVE, B, A))
    found = {kind: {b.inode for b in competitors(flow(kind, local, remote), everybody, {1})}
             for kind, local, remote in asked}
    assert found == {Kind.THREE: {3, 5}, Kind.MULTICAST: {2, 6}, Kind.FIVE: {5}}
    assert {b.inode for b in competitors(flow(Kind.THREE, ANY_ADDR), everybody, {1})} == {2, 3, 4, 5, 6}


def test_bound_sockets_are_those_of_the_kernel() -> None:
    kind = socket.SOCK_DGRAM
    with socket.socket(socket.AF_INET, kind) as one, socket.socket(socket.AF_INET6, kind) as six:
        for sock in (one, six):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
        six.bind(("::", port))
        found = {b.inode: (b.local, b.remote) for b in bound_sockets(port)}
        assert found == {os.fstat(one.fileno()).st_ino: (addr_to_bytes("127.0.0.1"), ANY_ADDR),
                         os.fstat(six.fileno()).st_ino: (ANY_ADDR, ANY_ADDR)}
    assert bound_sockets(port) == []


def test_one_instance_per_control_socket(tmp_path: Path) -> None:
    control = tmp_path / "run" / "control.sock"
    first, second = Instance(control), Instance(control)
    first.acquire()
    with pytest.raises(VmahybridError, match=f"process {os.getpid()} serves it already"):
        second.acquire()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(str(control))
        assert listener(control) is None
        sock.listen()
        assert listener(control) == os.getpid()
        os.unlink(first.lock_path)  # somebody tidied up: the socket still says who is there
        with pytest.raises(VmahybridError, match=f"process {os.getpid()} serves it already"):
            second.acquire()
    first.release()
    second.acquire()
    assert not control.exists()  # nobody answered there
    second.release()
    second.release()
    assert list(control.parent.iterdir()) == []
    third = Instance(tmp_path / "new" / "control.sock")
    third.acquire()
    third.release()
    assert not third.control.parent.exists()  # who made it removes it


def test_only_sockets_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    path.write_text("precious")
    assert not remove_socket(path)
    assert path.read_text() == "precious"
    assert not remove_socket(tmp_path / "none")


def test_tokens(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("0123456789abcdef\n")
    path.chmod(0o644)
    with pytest.raises(UsageError, match="may be read by others"):
        read_token(str(path))
    path.chmod(0o600)
    assert read_token(str(path)) == "0123456789abcdef"
    path.write_text("short")
    with pytest.raises(UsageError, match="no token"):
        read_token(str(path))
    with pytest.raises(UsageError, match="No such file"):
        read_token(str(tmp_path / "none"))


def test_reasons() -> None:
    assert [row.code for row in ROWS] == sorted({row.code for row in ROWS})
    assert (Reason.FORK.slug, Reason.from_slug("fork"), Reason.from_code(30)) == ("fork", Reason.FORK, Reason.FORK)
    assert Reason.from_code(65000) is Reason.PROTOCOL
    assert next(iter(Reason)) is Reason.NONE
    assert "ip link" in Reason.IF_DOWN.remedy
    for bad in ('REASON(1, A, "a" "b", "")', 'REASON(1, A, "a", "t", "")\nREASON(1, B, "b", "t", "")',
                'REASON(1, A, "a", "t", "")\nREASON(2, B, "a", "t", "")'):
        with pytest.raises(ValueError, match="line"):
            parse_reasons(bad)


def test_losses_of_the_last_minute() -> None:
    """A ring begins at zero; what is older than a minute is the new beginning; no change, no loss."""
    drops = Drops()

    def rose(now: float, **kernel: int) -> int:
        before, after = drops.note(1, kernel, now)
        return dropped(after) - dropped(before)

    assert rose(0, rx_dropped=5, rx_ring_full=2) == 7
    assert rose(30, rx_dropped=9, rx_ring_full=2) == 11
    assert rose(31) == 11  # could not be read
    assert rose(WINDOW + 1, rx_dropped=9, rx_ring_full=2) == 4
    assert rose(WINDOW + 31, rx_dropped=9, rx_ring_full=2) == 0
    assert drops.note(2, {"rx_dropped": 3}, 100) == ({}, {"rx_dropped": 3})


@pytest.mark.parametrize(("after", "words", "not_said"), [
    ({"rx_dropped": 7, "rx_fill_ring_empty_descs": 7}, ["no free frame", "VMA_RX_WRE and ring.frames"], "rx_size"),
    ({"rx_ring_full": 7}, ["receive ring was full", "ring.rx_size"], "WRE"),
    ({"rx_dropped": 7}, ["Let it poll more often."], "raise")])
def test_the_sentence_of_a_loss(after: dict[str, int], words: list[str], not_said: str) -> None:
    said = sentence("process 9 (x)", "eth0", 4, {}, after)
    assert said.startswith("Process 9 (x) lost 7 packets at eth0 in the last minute: its ring 4 ")
    assert not [word for word in words if word not in said], said
    assert not_said not in said


def test_a_port_is_forgotten_with_its_last_flow() -> None:
    def port(flow_id: int, owner: int = 1) -> Flow:
        return Flow(action=FlowAction.RING, source=Source.SOCKET, kind=Kind.THREE, owner=owner,
                    proto=socket.IPPROTO_TCP, local_port=80, flow_id=flow_id)

    table = {1: port(1), 2: port(2), 3: port(3, owner=2)}
    moves = TcpMoves(cast(Any, SimpleNamespace(table=SimpleNamespace(flows=table), backend=None)))
    for flow in table.values():
        moves.note_port(flow)
    del table[1]
    moves.forget_port(1, session=1)     # connections that it has left name it, and are under the rest's rule
    assert set(moves._ports) == {1, 2, 3}
    del table[2]
    moves.forget_port(1, session=1)     # the rest may be gone for another reason, and go home still
    moves.forget_port(2, session=2)
    assert set(moves._ports) == {1, 2, 3}
    moves.forget_port(2, session=1)
    assert set(moves._ports) == {3}
    moves.forget_port(2, session=1)
    moves.abandon(2, dead=False)
    assert not moves._ports and not moves._of_port
