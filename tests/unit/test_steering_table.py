"""The steering table: who gets a frame when several want it."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from vmahybrid.config.rule import OperatorRule
from vmahybrid.contracts import ANY_ADDR, addr_to_bytes
from vmahybrid.errors import Refused
from vmahybrid.net.netns import Netns
from vmahybrid.steering.flow import Flow, FlowAction, Kind, Source
from vmahybrid.steering.keys import Act, Action, FlowKey, GrantKey, PortId
from vmahybrid.steering.reasons import Reason
from vmahybrid.steering.table import RingRef, SteeringTable

A1, A2, B1 = addr_to_bytes("10.0.0.1"), addr_to_bytes("10.0.0.2"), addr_to_bytes("10.1.0.1")
PEER, GROUP = addr_to_bytes("10.0.0.9"), addr_to_bytes("239.1.1.1")
ETH0, ETH1 = PortId(Netns(1, 100), 2), PortId(Netns(1, 100), 3)


def flow(owner: int = 1, local: bytes = A1, port: int = 5000, remote: bytes = ANY_ADDR, remote_port: int = 0,
         kind: Kind | None = None, ifindex: int = 0) -> Flow:
    guessed = kind or (Kind.FIVE if remote_port else Kind.THREE)
    return Flow(action=FlowAction.RING, source=Source.SOCKET, kind=guessed, owner=owner, local=local, local_port=port,
                remote=remote, remote_port=remote_port, ifindex=ifindex)


@pytest.fixture
def table() -> SteeringTable:
    """Two interfaces; sessions 1 and 2 have a ring on the first, session 1 on the second too."""
    made = SteeringTable()
    made.set_port(ETH0, [A1, A2], netns="host", interface="eth0")
    made.set_port(ETH1, [B1], netns="host", interface="eth1")
    made.add_ring(RingRef(11, 1, ETH0, Act.RING, 64))
    made.add_ring(RingRef(12, 2, ETH0, Act.DEV, 3))
    made.add_ring(RingRef(13, 1, ETH1, Act.RING, 0))
    made.take_dirty()
    return made


def target(table: SteeringTable, key: FlowKey, port: PortId = ETH0) -> tuple[Act, int] | None:
    action = table.wanted(port).get(key)
    return (action.kind, action.target) if action else None


def test_a_specific_address_is_one_rule_on_its_interface(table: SteeringTable) -> None:
    made = table.attach(flow())
    assert table.wanted(ETH0) == {FlowKey(A1, 5000): Action(Act.RING, 64, made.index)}
    assert table.wanted(ETH1) == {}
    assert table.rule_count(made) == 1
    assert table.take_dirty() == {ETH0: {FlowKey(A1, 5000)}}


def test_the_time_of_arrival_for_one_of_several_sockets(table: SteeringTable) -> None:
    key, group = FlowKey(A1, 5000), FlowKey(GROUP, 5000)
    stamps = lambda key: table.wanted(ETH0)[key].stamps  # noqa: E731
    older = table.attach(replace(flow(), stamps=True))
    assert Action.from_bytes(table.wanted(ETH0)[key].to_bytes()) == Action(Act.RING, 64, older.index, stamps=True)
    table.attach(flow())
    assert stamps(key), "the newest socket wins, and leads to the same ring"
    table.attach(flow(owner=2))
    assert not stamps(key), "another program's ring"
    wants = table.attach(replace(flow(local=GROUP, kind=Kind.MULTICAST), stamps=True))
    table.attach(flow(local=GROUP, kind=Kind.MULTICAST))
    assert stamps(group)
    table.remove(wants.flow_id)
    assert not stamps(group)
    table.add_ring(RingRef(14, 3, ETH0, Act.PASS, 0))
    table.attach(replace(flow(owner=3, port=5001), stamps=True))
    assert not stamps(FlowKey(A1, 5001)), "a raw packet QP has its own"


def test_a_wildcard_is_one_rule_per_address_of_each_ring(table: SteeringTable) -> None:
    made = table.attach(flow(local=ANY_ADDR))
    assert set(table.wanted(ETH0)) == {FlowKey(A1, 5000), FlowKey(A2, 5000)}
    assert set(table.wanted(ETH1)) == {FlowKey(B1, 5000)}
    assert table.rule_count(made) == 3


@pytest.mark.parametrize(("family", "wanted"), [(4, {4}), (6, {6}), (0, {4, 6})])
def test_a_wildcard_of_tcp_has_the_families_of_its_socket(table: SteeringTable, family: int, wanted: set[int]) -> None:
    six, link_local = addr_to_bytes("fd00::1"), addr_to_bytes("fe80::1")
    table.set_port(ETH0, [A1, six, link_local], netns="host", interface="eth0")
    table.attach(replace(flow(local=ANY_ADDR), proto=6, family=family))
    keys = {4: FlowKey(A1, 5000, proto=6), 6: FlowKey(six, 5000, proto=6)}
    assert set(table.wanted(ETH0)) == {keys[version] for version in wanted}


def test_flows_go_by_the_ring_of_their_lane(table: SteeringTable) -> None:
    """Or by that of the lowest lane there."""
    table.add_ring(RingRef(14, 1, ETH0, Act.DEV, 7, lane=2))
    table.add_ring(RingRef(15, 1, ETH0, Act.DEV, 8, lane=1))
    for lane in range(4):
        table.attach(replace(flow(port=5000 + lane), lane=lane))
    everywhere = table.attach(replace(flow(local=ANY_ADDR, port=6000), lane=2))
    keys = [FlowKey(A1, 5000 + lane) for lane in range(4)]
    assert [target(table, key) for key in keys] == [(Act.RING, 64), (Act.DEV, 8), (Act.DEV, 7), (Act.RING, 64)]
    assert [ring.ring_id for ring in table.rings_of(everywhere)] == [14, 13]
    table.drop_ring(11)
    table.drop_ring(14)
    assert [target(table, key) for key in keys] == [(Act.DEV, 8)] * 4
    table.add_ring(RingRef(16, 1, ETH0, Act.RING, 128))
    assert [target(table, key) for key in keys] == [(Act.RING, 128), (Act.DEV, 8), (Act.RING, 128), (Act.RING, 128)]
    assert {key.sport for key in table.grants(1, ETH0)} == {5000, 5001, 5002, 5003, 6000}  # whichever it receives by


def test_a_rule_of_the_operator_sees_the_peer_of_a_port_s_flow(table: SteeringTable) -> None:
    kept = Flow(action=FlowAction.KERNEL, source=Source.OPERATOR, kind=Kind.THREE, remote=PEER)
    table.add_rule(kept)
    table.attach(flow(port=5001))
    table.attach(replace(flow(port=5002), peer=(A2, 9)))
    with pytest.raises(Refused) as refused:
        table.attach(replace(flow(port=5003), peer=(PEER, 9)))
    assert refused.value.reason == Reason.RULE


def test_a_wildcard_follows_addresses_and_rings(table: SteeringTable) -> None:
    made = table.attach(flow(local=ANY_ADDR))
    table.set_port(ETH0, [A2], netns="host", interface="eth0")
    assert set(table.wanted(ETH0)) == {FlowKey(A2, 5000)}
    table.drop_ring(13)
    assert table.wanted(ETH1) == {}
    table.set_port(ETH0, [], netns="host", interface="eth0")
    assert (table.rule_count(made), made.reason) == (0, Reason.NOT_OFFLOADABLE_ADDR)
    table.set_port(ETH0, [A1], netns="host", interface="eth0")
    assert (table.rule_count(made), made.reason) == (1, Reason.NONE)


def test_a_flow_is_of_the_interface_of_its_last_rule(table: SteeringTable) -> None:
    first, second = table.attach(flow()), table.attach(flow(local=B1))
    everywhere = table.attach(flow(local=ANY_ADDR))
    table.set_port(ETH0, [], netns="host", interface="eth0")
    assert table.of_interface(ETH0) == [first]
    assert table.of_interface(ETH1) == [second, everywhere]
    table.set_port(ETH0, [A1], netns="host", interface="eth0")
    assert table.of_interface(ETH0) == [first, everywhere]


def test_a_wildcard_may_come_before_the_first_ring(table: SteeringTable) -> None:
    made = table.attach(flow(owner=3, local=ANY_ADDR))
    assert (table.rule_count(made), made.reason) == (0, Reason.NO_INTERFACE)
    table.add_ring(RingRef(14, 3, ETH1, Act.DEV, 5))
    assert target(table, FlowKey(B1, 5000), ETH1) == (Act.DEV, 5)


def test_an_address_that_no_ring_of_the_owner_has_is_refused(table: SteeringTable) -> None:
    with pytest.raises(Refused) as refused:
        table.attach(flow(owner=2, local=B1))
    assert refused.value.reason == Reason.NOT_OFFLOADABLE_ADDR
    with pytest.raises(Refused):
        table.attach(flow(ifindex=ETH1.ifindex))
    assert table.flows == {}


def test_the_newest_binding_wins_and_the_older_comes_back(table: SteeringTable) -> None:
    older, newer = table.attach(flow(owner=1)), table.attach(flow(owner=2))
    assert target(table, FlowKey(A1, 5000)) == (Act.DEV, 3)
    assert (older.reason, newer.reason) == (Reason.CONFLICT, Reason.NONE)
    table.remove(newer.flow_id)
    assert target(table, FlowKey(A1, 5000)) == (Act.RING, 64)
    assert older.reason is Reason.NONE


def test_a_port_of_tcp_is_no_other_process_s_as_long_as_it_has_connections(table: SteeringTable) -> None:
    def tcp(owner: int, local: bytes = A1, remote_port: int = 0) -> Flow:
        remote = PEER if remote_port else ANY_ADDR
        return replace(flow(owner, local, remote=remote, remote_port=remote_port), proto=socket.IPPROTO_TCP)

    older = table.attach(tcp(1))
    for local in (A1, ANY_ADDR):
        with pytest.raises(Refused) as refused:
            table.attach(tcp(2, local))
        assert refused.value.reason == Reason.PORT_SHARED
    table.attach(tcp(2, remote_port=9))
    table.attach(tcp(2, A2))
    again = table.attach(tcp(1))    # its listener is closed, and listens again
    table.remove(older.flow_id)
    table.remove(again.flow_id)
    assert table.attach(tcp(2)).reason is Reason.NONE


@pytest.mark.parametrize("attached_first", [1, 2])
def test_a_port_of_tcp_stays_with_the_first_when_another_gets_a_ring_there(table: SteeringTable, attached_first: int,
                                                                           ) -> None:
    """Both listen at every address, where 1 had a ring and 2 none."""
    table.drop_ring(12)
    table.drop_ring(13)
    table.add_ring(RingRef(14, 2, ETH1, Act.DEV, 4))
    flows = {owner: table.attach(replace(flow(owner, ANY_ADDR), proto=socket.IPPROTO_TCP))
             for owner in (attached_first, 3 - attached_first)}
    table.add_ring(RingRef(15, 2, ETH0, Act.DEV, 3))
    key = FlowKey(A1, 5000, proto=socket.IPPROTO_TCP)
    assert target(table, key) == (Act.RING, 64)
    assert target(table, key._replace(dst=B1), ETH1) == (Act.DEV, 4)
    assert all(made.reason is Reason.NONE for made in flows.values())
    for addresses in ([A2], [A1, A2]):    # it goes, and comes back
        table.set_port(ETH0, addresses, netns="host", interface="eth0")
    assert target(table, key) == (Act.RING, 64)
    table.remove(flows[1].flow_id)
    assert target(table, key) == (Act.DEV, 3)


def test_a_bound_address_beats_a_newer_wildcard(table: SteeringTable) -> None:
    table.attach(flow(owner=1))
    wild = table.attach(flow(owner=2, local=ANY_ADDR))
    assert target(table, FlowKey(A1, 5000)) == (Act.RING, 64)
    assert target(table, FlowKey(A2, 5000)) == (Act.DEV, 3)
    assert (table.rule_count(wild), wild.reason) == (1, Reason.NONE)


def test_five_and_three_tuple_are_different_keys(table: SteeringTable) -> None:
    table.attach(flow())
    table.attach(flow(owner=2, remote=PEER, remote_port=7))
    assert target(table, FlowKey(A1, 5000)) == (Act.RING, 64)
    assert target(table, FlowKey(A1, 5000, PEER, 7)) == (Act.DEV, 3)


def test_a_group_of_two_processes_is_nobodys(table: SteeringTable) -> None:
    first = table.attach(flow(local=GROUP, kind=Kind.MULTICAST, ifindex=2))
    assert target(table, FlowKey(GROUP, 5000)) == (Act.RING, 64)
    with pytest.raises(Refused) as refused:
        table.attach(flow(owner=2, local=GROUP, kind=Kind.MULTICAST, ifindex=2))
    assert refused.value.reason == Reason.MULTICAST_SHARED
    assert table.take_evicted() == [(first, Reason.MULTICAST_SHARED)]
    assert table.wanted(ETH0) == {}


def test_two_sockets_of_one_process_share_a_group(table: SteeringTable) -> None:
    first = table.attach(flow(local=GROUP, kind=Kind.MULTICAST))
    second = table.attach(flow(local=GROUP, kind=Kind.MULTICAST))
    assert target(table, FlowKey(GROUP, 5000)) == (Act.RING, 64)
    table.remove(second.flow_id)
    assert target(table, FlowKey(GROUP, 5000)) == (Act.RING, 64)
    table.remove(first.flow_id)
    assert target(table, FlowKey(GROUP, 5000)) is None
    assert table.take_evicted() == []


def test_a_later_ring_that_brings_two_groups_together_sends_both_home(table: SteeringTable) -> None:
    first = table.attach(flow(local=GROUP, kind=Kind.MULTICAST, ifindex=ETH1.ifindex))
    second = table.attach(flow(owner=2, local=GROUP, kind=Kind.MULTICAST))
    assert table.take_evicted() == []
    table.add_ring(RingRef(15, 2, ETH1, Act.DEV, 9))
    assert {made.flow_id for made, _ in table.take_evicted()} == {first.flow_id, second.flow_id}
    assert table.wanted(ETH1) == {}
    assert table.flows == {}


def test_a_rule_keeps_flows_on_the_kernel(table: SteeringTable) -> None:
    covered = table.attach(flow(remote=PEER, remote_port=53))
    other = table.attach(flow(remote=PEER, remote_port=54))
    rule = table.add_rule(OperatorRule("kernel", "udp", "*:*", "*:53").flow())
    assert table.take_evicted() == [(covered, Reason.RULE)]
    assert list(table.flows) == [other.flow_id, rule.flow_id]
    with pytest.raises(Refused) as refused:
        table.attach(flow(owner=2, remote=PEER, remote_port=53))
    assert refused.value.reason == Reason.RULE
    table.remove(rule.flow_id)
    assert table.attach(flow(owner=2, remote=PEER, remote_port=53)).reason is Reason.NONE


def test_a_kernel_rule_inside_a_flow_is_an_exception_of_it(table: SteeringTable) -> None:
    table.attach(flow())
    table.add_rule(OperatorRule("kernel", "udp", "10.0.0.1:5000", "10.0.0.9:7").flow())
    assert target(table, FlowKey(A1, 5000)) == (Act.RING, 64)
    assert target(table, FlowKey(A1, 5000, PEER, 7)) == (Act.PASS, 0)


def test_a_rule_on_one_address_takes_only_that_of_a_wildcard(table: SteeringTable) -> None:
    made = table.attach(flow(local=ANY_ADDR))
    table.add_rule(OperatorRule("drop", "udp", "10.0.0.1:5000").flow())
    assert target(table, FlowKey(A1, 5000)) == (Act.DROP, 0)
    assert target(table, FlowKey(A2, 5000)) == (Act.RING, 64)
    assert (table.take_evicted(), table.rule_count(made)) == ([], 2)


def test_a_rule_for_another_interface_does_not_matter(table: SteeringTable) -> None:
    table.add_rule(OperatorRule("kernel", "udp", "*:5000", interface="eth1").flow())
    assert table.attach(flow()).reason is Reason.NONE
    made = table.attach(flow(local=ANY_ADDR, port=5000, owner=1))
    assert target(table, FlowKey(B1, 5000), ETH1) == (Act.PASS, 0)
    assert made.flow_id in table.flows


def test_limits(table: SteeringTable) -> None:
    table.max_rules = 2
    table.attach(flow(port=1))
    with pytest.raises(Refused) as refused:
        table.attach(flow(local=ANY_ADDR, port=2))
    assert refused.value.reason == Reason.RULE_LIMIT
    table.attach(flow(port=3))
    with pytest.raises(Refused):
        table.attach(flow(port=4))


def test_everything_of_an_owner_goes_with_it(table: SteeringTable) -> None:
    table.attach(flow(local=ANY_ADDR))
    table.attach(flow(remote=PEER, remote_port=9))
    kept = table.attach(flow(owner=2, local=A2))
    assert len(table.remove_owner(1)) == 2
    assert set(table.wanted(ETH0)) == {FlowKey(A2, 5000)}
    assert table.wanted(ETH1) == {}
    assert list(table.rings) == [12]
    assert list(table.flows) == [kept.flow_id]
    table.drop_port(ETH0)
    assert list(table.rings) == []
    assert (table.rule_count(kept), kept.reason) == (0, Reason.NO_INTERFACE)


def test_a_ring_goes_from_under_two_flows_of_one_key(table: SteeringTable) -> None:
    flows = [table.attach(flow()), table.attach(flow())]
    table.drop_ring(11)
    assert table.wanted(ETH0) == {}
    assert [made.reason for made in flows] == [Reason.NOT_OFFLOADABLE_ADDR] * 2  # of the ring that is left


def test_grants_are_the_proven_sources(table: SteeringTable) -> None:
    specific = table.attach(flow(owner=2))
    group = table.attach(flow(owner=2, local=GROUP, port=6000, kind=Kind.MULTICAST))
    assert table.grants(2, ETH0) == {GrantKey(A1, 5000): specific.flow_id, GrantKey(A1, 6000): group.flow_id,
                                     GrantKey(A2, 6000): group.flow_id}
    table.remove(specific.flow_id)
    assert GrantKey(A1, 5000) not in table.grants(2, ETH0)
    assert table.grants(99, ETH0) == table.grants(2, PortId(ETH0.netns, 9)) == {}


def test_grants_outlive_what_goes_home(table: SteeringTable) -> None:
    gone = [table.attach(flow(owner=2)), table.attach(flow(owner=2, local=ANY_ADDR, port=6000))]
    table.part(gone[0].flow_id)
    table.evict(gone[1].flow_id, Reason.FLOW_DELETED)
    assert not table.of_owner(2)
    assert {(key.src, key.sport) for key in table.grants(2, ETH0)} == {(A1, 5000), (A1, 6000), (A2, 6000)}
    table.set_port(ETH0, [A2], netns="red", interface="eth0")
    assert {(key.src, key.sport) for key in table.grants(2, ETH0)} == {(A2, 6000)}     # it may be another host's by now
    again = table.attach(flow(owner=2, local=A2, port=6000))
    assert table.grants(2, ETH0) == {GrantKey(A2, 6000): again.flow_id}
    for one in gone:
        table.parted(one)
    assert table.grants(2, ETH0) == {GrantKey(A2, 6000): again.flow_id}
    table.part(again.flow_id)
    table.remove_owner(2)
    assert not table.grants(2, ETH0)


def test_counter_indexes_are_used_again_only_when_free(table: SteeringTable) -> None:
    first, second = table.attach(flow(port=1)), table.attach(flow(port=2))
    assert 0 < first.index != second.index > 0
    table.remove(first.flow_id)
    assert table.attach(flow(port=3)).index == first.index
