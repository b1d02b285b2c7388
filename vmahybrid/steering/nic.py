"""What a flow on a raw packet QP must not do: take frames that the table gives to somebody else.

The rule of such a flow is in the NIC, made by its program, and takes frames before XDP sees them. The service can't
change it, only send the flow home, whereupon the program deletes it. So a flow in a NIC has all of its keys or none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from vmahybrid.steering.claim import winner
from vmahybrid.steering.flow import Flow, FlowAction, Source
from vmahybrid.steering.keys import ANY_ADDR, FlowKey, PortId
from vmahybrid.steering.reasons import Reason

if TYPE_CHECKING:
    from vmahybrid.steering.table import SteeringTable


def ruled(table: SteeringTable, flow: Flow) -> bool:
    """Would its NIC rule take frames that a rule of the operator keeps on the kernel, or drops?"""
    return any(_rule_on(table, port, flow.asked(key)) for port, key in _keys(table, flow))


def displaced(table: SteeringTable, dirty: Mapping[PortId, set[FlowKey]]) -> list[tuple[Flow, Reason]]:
    """Flows in a NIC that do not have all of their keys, with why; ``dirty`` are the keys that changed."""
    touched = {(port, key.dport) for port, keys in dirty.items() for key in keys}
    owners = {(ring.owner, ring.port) for ring in table.rings.values() if ring.in_nic}
    found: list[tuple[Flow, Reason]] = []
    for owner in {owner for owner, _ in owners}:
        for flow in table.of_owner(owner):
            if any((port, flow.local_port) in touched for its, port in owners if its == owner):
                reason = _lost(table, flow)
                if reason is not Reason.NONE:
                    found.append((flow, reason))
    return found


def _keys(table: SteeringTable, flow: Flow) -> Iterator[tuple[PortId, FlowKey]]:
    """What the program's NIC rules match, on each of its QPs' interfaces."""
    for ring in table.rings.values():
        if ring.in_nic and ring.owner == flow.owner and table.ring_on(flow, ring.port) is ring:
            for key in flow.keys(table.addresses(ring.port)):
                yield ring.port, key


def _lost(table: SteeringTable, flow: Flow) -> Reason:
    for port, key in _keys(table, flow):
        if _rule_on(table, port, flow.asked(key)):
            return Reason.RULE
        claims = table.claims(port).get(key)
        if claims and winner(claims).flow.owner != flow.owner:
            return Reason.CONFLICT
        if key.src == ANY_ADDR and _more_specific(table, port, key, flow.owner):
            return Reason.CONFLICT
    return Reason.NONE


def _rule_on(table: SteeringTable, port: PortId, key: FlowKey) -> bool:
    place = table.place_of(port)
    return any(rule.applies_to(*place) and (rule.covers(key) or (rule.action is FlowAction.DROP and _part(rule, key)))
               for rule in table.flows.values() if rule.source is Source.OPERATOR)


def _part(rule: Flow, key: FlowKey) -> bool:
    """Is the rule about some of the frames that ``key`` matches? One that says kernel does no harm then: the socket
    gets the frame either way."""
    return (key.src == ANY_ADDR and rule.proto == key.proto and rule.local in (ANY_ADDR, key.dst)
            and rule.local_port == key.dport)


def _more_specific(table: SteeringTable, port: PortId, key: FlowKey, owner: int) -> bool:
    """Has another program a connected socket there that the rule would rob? Not where it has a QP too and the NIC
    decides, by priority: softverbs compares priorities within a process only."""
    for other, claims in table.claims(port).items():
        if other.src == ANY_ADDR or (other.dst, other.dport, other.proto) != (key.dst, key.dport, key.proto):
            continue
        best = winner(claims)
        ring = table.rings.get(best.ring_id)
        if ring is None or best.flow.owner == owner or best.flow.source is not Source.SOCKET:
            continue
        if ring.software or not ring.in_nic:
            return True
    return False
