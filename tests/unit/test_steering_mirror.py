"""The mirror against a fake target, and the table's increments against a table computed afresh."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from vmahybrid.contracts import ANY_ADDR, addr_to_bytes
from vmahybrid.errors import Refused, VmahybridError
from vmahybrid.net.netns import Netns
from vmahybrid.service.core import Core
from vmahybrid.steering.flow import Flow, FlowAction, Kind, Source
from vmahybrid.steering.keys import Act, Action, FlowKey, PortId
from vmahybrid.steering.mirror import mirror
from vmahybrid.steering.table import RingRef, SteeringTable

A1, A2, B1 = addr_to_bytes("10.0.0.1"), addr_to_bytes("10.0.0.2"), addr_to_bytes("10.1.0.1")
PEER, GROUP = addr_to_bytes("10.0.0.9"), addr_to_bytes("239.1.1.1")
ETH0, ETH1 = PortId(Netns(1, 100), 2), PortId(Netns(1, 100), 3)


class FakeTarget:
    """A map of limited size that may refuse some keys."""

    def __init__(self, entries: Mapping[int, int] | None = None, size: int = 1 << 30, bad: frozenset[int] = frozenset(),
                 ) -> None:
        self.entries, self.size, self.bad = dict(entries or {}), size, bad
        self.calls = 0

    def present(self) -> Mapping[int, int]:
        return dict(self.entries)

    def put(self, key: int, value: int) -> None:
        self.calls += 1
        if key in self.bad:
            raise OSError(22, "refused")
        if key not in self.entries and len(self.entries) >= self.size:
            raise VmahybridError("map", "full")
        self.entries[key] = value

    def delete(self, key: int) -> None:
        self.calls += 1
        self.entries.pop(key, None)


MAPS = st.dictionaries(st.integers(0, 30), st.integers(0, 3), max_size=20)


@given(present=MAPS, wanted=MAPS)
def test_after_the_mirror_the_target_is_what_is_wanted(present: dict[int, int], wanted: dict[int, int]) -> None:
    target = FakeTarget(present)
    changes = mirror(target, wanted)
    assert target.entries == wanted
    assert target.calls == changes.put + changes.deleted
    # only the difference is touched
    assert changes.deleted == len(present.keys() - wanted.keys())
    assert changes.put == sum(1 for key, value in wanted.items() if present.get(key) != value)
    assert mirror(target, wanted).put == 0


@given(present=MAPS, wanted=MAPS, bad=st.frozensets(st.integers(0, 30), max_size=5))
def test_what_is_refused_does_not_stop_the_rest(present: dict[int, int], wanted: dict[int, int],
                                                bad: frozenset[int]) -> None:
    target = FakeTarget(present, bad=bad)
    changes = mirror(target, wanted)
    failed = {key for key, _ in changes.failed}
    assert failed == {key for key in bad & wanted.keys() if present.get(key) != wanted[key]}
    assert {k: v for k, v in target.entries.items() if k not in failed} == \
        {k: v for k, v in wanted.items() if k not in failed}


@given(wanted=MAPS, present=MAPS)
def test_a_full_map_has_room_for_the_new_after_the_old(present: dict[int, int], wanted: dict[int, int]) -> None:
    target = FakeTarget(present, size=max(len(present), len(wanted)))
    assert not mirror(target, wanted).failed
    assert target.entries == wanted


@given(present=MAPS, wanted=MAPS, only=st.sets(st.integers(0, 30)))
def test_limited_to_some_keys_the_others_stay(present: dict[int, int], wanted: dict[int, int], only: set[int]) -> None:
    target = FakeTarget(present)
    mirror(target, wanted, only)
    for key in range(31):
        assert target.entries.get(key) == (wanted if key in only else present).get(key)


class FakePort:
    def __init__(self) -> None:
        self.rules: dict[FlowKey, Action] = {}

    def present(self) -> Mapping[FlowKey, Action]:
        return self.rules

    def put(self, key: FlowKey, value: Action) -> None:
        self.rules[key] = value

    def delete(self, key: FlowKey) -> None:
        self.rules.pop(key, None)


LOCALS = st.sampled_from([A1, A2, B1, ANY_ADDR, GROUP])
STEPS = st.lists(st.one_of(
    st.tuples(st.just("attach"), st.integers(1, 3), LOCALS, st.integers(1, 2), st.booleans()),
    st.tuples(st.just("remove"), st.integers(1, 12)),
    st.tuples(st.just("owner"), st.integers(1, 3)),
    st.tuples(st.just("ring"), st.integers(1, 3), st.sampled_from([ETH0, ETH1])),
    st.tuples(st.just("drop"), st.integers(1, 6)),
    st.tuples(st.just("addresses"), st.sampled_from([ETH0, ETH1]),
              st.lists(st.sampled_from([A1, A2, B1]), unique=True)),
    st.tuples(st.just("rule"), st.integers(1, 2), st.booleans()),
), max_size=25)


def _apply(table: SteeringTable, step: tuple[object, ...], rings: list[int]) -> None:
    match step:
        case ("attach", int(owner), bytes(local), int(port), bool(five)):
            kind = Kind.MULTICAST if local == GROUP else Kind.FIVE if five else Kind.THREE
            remote = (PEER, 9) if kind is Kind.FIVE else (ANY_ADDR, 0)
            table.attach(Flow(action=FlowAction.RING, source=Source.SOCKET, kind=kind, owner=owner, local=local,
                              local_port=port, remote=remote[0], remote_port=remote[1]))
        case ("remove", int(flow_id)):
            table.remove(flow_id)
        case ("owner", int(owner)):
            table.remove_owner(owner)
        case ("ring", int(owner), PortId() as port) if not any(
                ring.owner == owner and ring.port == port for ring in table.rings.values()):
            rings.append(len(rings) + 1)
            table.add_ring(RingRef(rings[-1], owner, port, Act.RING, 64 * rings[-1]))
        case ("drop", int(ring_id)):
            table.drop_ring(ring_id)
        case ("addresses", PortId() as port, list(addresses)):
            table.set_port(port, addresses, netns="host", interface="eth")
        case ("rule", int(port), bool(drop)):
            action = FlowAction.DROP if drop else FlowAction.KERNEL
            table.add_rule(Flow(action=action, source=Source.OPERATOR, kind=Kind.THREE, local=A1, local_port=port,
                                family=0))


@settings(max_examples=300, deadline=None)
@given(steps=STEPS)
@example(steps=[("ring", 1, ETH0), ("ring", 2, ETH0), ("attach", 1, GROUP, 2, False), ("attach", 2, GROUP, 1, False)])
def test_increments_lead_where_a_fresh_table_leads(steps: list[tuple[object, ...]]) -> None:
    """Whatever happens in whatever order: mirrored step by step, the maps are those of a table told only the rest."""
    table, ports, rings = SteeringTable(), {ETH0: FakePort(), ETH1: FakePort()}, list[int]()
    for port, addresses in ((ETH0, [A1, A2]), (ETH1, [B1])):
        table.set_port(port, addresses, netns="host", interface="eth")
    for step in steps:
        with contextlib.suppress(Refused):
            _apply(table, step, rings)
        for port, keys in table.take_dirty().items():
            mirror(ports[port], table.wanted(port), keys)
    for port in (ETH0, ETH1):
        assert ports[port].rules == table.wanted(port)
        fresh = _fresh_rules(table, port)
        assert ports[port].rules == fresh
    owners: dict[FlowKey, set[int]] = {}
    for flow in table.flows.values():
        for place, key in table.rules_of(flow.flow_id):
            if key.dst == GROUP and place == ETH0:
                owners.setdefault(key, set()).add(flow.owner)
    assert all(len(of_key) == 1 for of_key in owners.values())


def _fresh_rules(table: SteeringTable, port: object) -> dict[FlowKey, Action]:
    """The definition, written down without increments: of all claims on a key the highest rank."""
    best: dict[FlowKey, tuple[tuple[bool, bool, int], Action]] = {}
    operators = [f for f in table.flows.values() if f.source is Source.OPERATOR]
    entry = table._ports[port]  # type: ignore[index]
    for flow in table.flows.values():
        ring = next((r for r in table.rings.values() if r.owner == flow.owner and r.port == port), None)
        operator = flow.source is Source.OPERATOR
        if not operator and ring is None:
            continue
        for key in flow.keys(entry.addresses):
            if not operator and any(rule.covers(key) for rule in operators):
                continue
            rank = (operator, flow.local != ANY_ADDR, flow.serial)
            if operator or ring is None:
                action = Action(flow.pass_action, 0, flow.index)
            else:
                action = Action(ring.act, ring.target, flow.index)
            if key not in best or rank > best[key][0]:
                best[key] = (rank, action)
    return {key: action for key, (_, action) in best.items()}


class Guard(dict[str, int]):
    """Of a ring; changes of the keys in ``stuck`` fail."""

    stuck: frozenset[str] = frozenset()

    def present(self) -> dict[str, int]:
        return self

    def put(self, key: str, value: int) -> None:
        self._may(key)
        self[key] = value

    def delete(self, key: str) -> None:
        self._may(key)
        self.pop(key, None)

    def _may(self, key: str) -> None:
        if key in self.stuck:
            raise OSError(12, "no memory")


def test_guards_of_one_process_are_told_alike_and_what_failed_comes_again() -> None:
    rings = [SimpleNamespace(ring_id=number, port=SimpleNamespace(id="eth0"), handle=SimpleNamespace(grants=Guard()),
                             allowed={}) for number in range(3)]
    core: Any = SimpleNamespace(counters=Counter(), grants=SimpleNamespace(of_session=lambda _: rings))
    core._mirror_guard = partial(Core._mirror_guard, core)

    def tell(**wanted: int) -> list[dict[str, int]]:
        core.table = SimpleNamespace(grants=lambda *_: dict(wanted))
        Core._mirror_guards(core, 7)
        return [dict(ring.handle.grants) for ring in rings]

    assert tell(a=1, b=2) == [{"a": 1, "b": 2}] * 3
    assert rings[0].allowed is rings[1].allowed is rings[2].allowed
    rings[1].handle.grants.stuck = frozenset("ac")
    assert tell(b=2, c=3) == [{"b": 2, "c": 3}, {"a": 1, "b": 2}, {"b": 2, "c": 3}]
    assert core.counters["mirror_failures_total"] == 2
    rings[1].handle.grants.stuck = frozenset()
    assert tell(b=2, c=3) == [{"b": 2, "c": 3}] * 3
    assert tell(b=5) == [{"b": 5}] * 3
    assert core.counters["mirror_failures_total"] == 2
