"""Flows on raw packet QPs: the table passes them in XDP, and sends them home when their NIC rule would rob somebody."""

from __future__ import annotations

import pytest

from vmahybrid.config.rule import OperatorRule
from vmahybrid.contracts import ANY_ADDR, addr_to_bytes
from vmahybrid.errors import Refused
from vmahybrid.net.netns import Netns
from vmahybrid.steering.flow import Flow, FlowAction, Kind, Source
from vmahybrid.steering.keys import Act, Action, FlowKey, PortId
from vmahybrid.steering.reasons import Reason
from vmahybrid.steering.table import RingRef, SteeringTable

A1, A2, PEER, GROUP = (addr_to_bytes(text) for text in ("10.0.0.1", "10.0.0.2", "10.0.0.9", "239.1.1.1"))
ETH0 = PortId(Netns(1, 100), 2)
QP, OTHER_QP, XDP = 1, 2, 3  # sessions


def flow(owner: int = QP, local: bytes = A1, port: int = 5000, remote: bytes = ANY_ADDR, remote_port: int = 0) -> Flow:
    kind = Kind.MULTICAST if local == GROUP else Kind.FIVE if remote_port else Kind.THREE
    return Flow(action=FlowAction.RING, source=Source.SOCKET, kind=kind, owner=owner, local=local, local_port=port,
                remote=remote, remote_port=remote_port)


@pytest.fixture
def table() -> SteeringTable:
    made = SteeringTable()
    made.set_port(ETH0, [A1, A2], netns="host", interface="eth0")
    made.add_ring(RingRef(11, QP, ETH0, Act.PASS, 0))
    made.add_ring(RingRef(12, OTHER_QP, ETH0, Act.PASS, 0))
    made.add_ring(RingRef(13, XDP, ETH0, Act.RING, 64))
    return made


def home(table: SteeringTable) -> list[tuple[Flow, Reason]]:
    """As the service converges."""
    table.settle_nic()
    table.take_dirty()
    return table.take_evicted()


def test_the_xdp_program_passes_and_counts(table: SteeringTable) -> None:
    made = table.attach(flow(local=ANY_ADDR))
    passing = Action(Act.PASS, 0, made.index)
    assert table.wanted(ETH0) == {FlowKey(A1, 5000): passing, FlowKey(A2, 5000): passing}
    assert (table.rule_count(made), made.reason) == (2, Reason.NONE)
    assert home(table) == []


def test_a_program_that_comes_later_is_told_everything(table: SteeringTable) -> None:
    table.attach(flow())
    table.take_dirty()
    table.set_port(ETH0, [A1, A2], netns="host", interface="eth0")
    assert table.take_dirty() == {}
    table.refresh(ETH0)
    assert table.take_dirty() == {ETH0: {FlowKey(A1, 5000)}}


@pytest.mark.parametrize("winner", [OTHER_QP, XDP])
def test_a_newer_socket_of_another_program_takes_the_whole_flow(table: SteeringTable, winner: int) -> None:
    lost = table.attach(flow(local=ANY_ADDR))
    won = table.attach(flow(winner, local=A1))
    assert home(table) == [(lost, Reason.CONFLICT)]
    assert set(table.wanted(ETH0)) == {FlowKey(A1, 5000)}
    assert table.rule_count(won) == 1


def test_an_older_socket_on_xdp_loses_and_comes_back(table: SteeringTable) -> None:
    older = table.attach(flow(XDP))
    newer = table.attach(flow())
    assert home(table) == []
    assert (older.reason, table.wanted(ETH0)[FlowKey(A1, 5000)].kind) == (Reason.CONFLICT, Act.PASS)
    table.remove(newer.flow_id)
    assert (older.reason, table.wanted(ETH0)[FlowKey(A1, 5000)].kind) == (Reason.NONE, Act.RING)


def test_a_connected_socket_on_xdp_is_not_starved(table: SteeringTable) -> None:
    broad = table.attach(flow())
    table.attach(flow(XDP, remote=PEER, remote_port=7))
    assert home(table) == [(broad, Reason.CONFLICT)]


def test_nor_one_that_was_there_before(table: SteeringTable) -> None:
    table.attach(flow(XDP, remote=PEER, remote_port=7))
    home(table)
    broad = table.attach(flow())
    assert home(table) == [(broad, Reason.CONFLICT)]


@pytest.mark.parametrize("first", ["broad", "narrow"])
def test_the_software_device_compares_priorities_within_a_process_only(table: SteeringTable, first: str) -> None:
    for ring_id, owner in (11, QP), (12, OTHER_QP):
        table.drop_ring(ring_id)
        table.add_ring(RingRef(ring_id, owner, ETH0, Act.PASS, 0, software=True))
    broad, narrow, own = flow(), flow(OTHER_QP, remote=PEER, remote_port=7), flow(OTHER_QP, port=6000)
    for made in (broad, narrow) if first == "broad" else (narrow, broad):
        table.attach(made)
    assert home(table) == [(broad, Reason.CONFLICT)]
    table.attach(own)
    table.attach(flow(OTHER_QP, port=6000, remote=PEER, remote_port=7))
    assert home(table) == []  # of one program


@pytest.mark.parametrize(("broad", "narrow"), [(QP, OTHER_QP), (QP, QP), (XDP, QP)])
def test_where_priorities_or_the_program_decide(table: SteeringTable, broad: int, narrow: int) -> None:
    table.attach(flow(broad))
    table.attach(flow(narrow, remote=PEER, remote_port=7))
    assert home(table) == []


def test_sockets_of_one_program_share_their_qp(table: SteeringTable) -> None:
    for _ in range(2):
        table.attach(flow(local=GROUP))
        table.attach(flow())
    assert home(table) == []


def test_a_group_of_two_programs_is_the_kernels(table: SteeringTable) -> None:
    first = table.attach(flow(local=GROUP))
    with pytest.raises(Refused) as error:
        table.attach(flow(OTHER_QP, local=GROUP))
    assert error.value.reason == Reason.MULTICAST_SHARED
    assert home(table) == [(first, Reason.MULTICAST_SHARED)]


RULES = pytest.mark.parametrize("rule", [
    OperatorRule("kernel", "udp", "10.0.0.2:5000"),
    OperatorRule("drop", "udp", "10.0.0.2:5000"),
    OperatorRule("drop", "udp", "10.0.0.1:5000", "10.0.0.9:7"),
], ids=lambda rule: f"{rule.action} {rule.local}")


@RULES
def test_a_rule_about_part_of_it_sends_it_home(table: SteeringTable, rule: OperatorRule) -> None:
    made = table.attach(flow(local=ANY_ADDR))
    on_xdp = table.attach(flow(XDP, local=ANY_ADDR, port=6000))
    home(table)
    table.add_rule(rule.flow())
    assert home(table) == [(made, Reason.RULE)]
    assert on_xdp.flow_id in table.flows


@RULES
def test_and_refuses_it_where_it_was_before(table: SteeringTable, rule: OperatorRule) -> None:
    table.add_rule(rule.flow())
    with pytest.raises(Refused) as error:
        table.attach(flow(local=ANY_ADDR))
    assert error.value.reason == Reason.RULE
    table.attach(flow(XDP, local=ANY_ADDR))  # XDP can leave a part out
    table.attach(flow(port=6000))
    assert home(table) == []


def test_a_rule_that_keeps_a_peer_on_the_kernel_harms_nobody(table: SteeringTable) -> None:
    table.attach(flow())
    table.add_rule(OperatorRule("kernel", "udp", "10.0.0.1:5000", "10.0.0.9:7").flow())
    assert home(table) == []


def test_a_new_address_brings_a_conflict(table: SteeringTable) -> None:
    table.set_port(ETH0, [A1], netns="host", interface="eth0")
    made = table.attach(flow(local=ANY_ADDR))
    table.add_rule(OperatorRule("kernel", "udp", "10.0.0.2:*").flow())
    assert home(table) == []
    table.set_port(ETH0, [A1, A2], netns="host", interface="eth0")
    assert home(table) == [(made, Reason.RULE)]
