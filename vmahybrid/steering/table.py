"""The steering table: every flow and the rules that follow from it on every attached interface.

The table decides, mirror.py carries out. It knows interfaces (with their addresses), rings and flows, and keeps for
each (interface, key) the claims on it. The one that wins is

1. the operator's, else
2. of a socket bound to the address itself rather than to the wildcard, else
3. of the newest binding,

as udp4_lib_lookup (net/ipv4/udp.c) scores sockets. A port of TCP stays with the process that had it first. A loser
stays in the table (reason CONFLICT) and comes back when the winner goes. A multicast key claimed by two processes is
nobody's: only the kernel can copy to both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vmahybrid.errors import Refused
from vmahybrid.steering import nic
from vmahybrid.steering.claim import Claim, winner
from vmahybrid.steering.flow import Flow, FlowAction, Kind, Source
from vmahybrid.steering.keys import ANY_ADDR, Act, Action, FlowKey, GrantKey, PortId, is_multicast
from vmahybrid.steering.reasons import Reason

MAX_INDEX = 16384  # VMH_MAX_RULES; 0 is not given out


class RingRef(NamedTuple):
    """A granted ring as the table needs it: frames reach it by ``act`` (RING or DEV) and ``target``. PASS: a raw packet
    QP takes them before XDP, by flow rules of the program; what XDP still sees of them is the kernel's. ``software``:
    its device is softverbs, which knows the rules of one process only. An owner has one ring per interface and
    ``lane``."""

    ring_id: int
    owner: int
    port: PortId
    act: Act
    target: int
    software: bool = False
    lane: int = 0

    @property
    def in_nic(self) -> bool:
        return self.act is Act.PASS


@dataclass(slots=True)
class _Port:
    netns: str
    interface: str
    addresses: tuple[bytes, ...]
    claims: dict[FlowKey, list[Claim]]
    wanted: dict[FlowKey, Action]
    dirty: set[FlowKey]


def refuse(what: str, reason: Reason, remedy: str = "") -> Refused:
    return Refused(what, reason.text, remedy or reason.remedy, int(reason))


class SteeringTable:
    """All methods are quick and run on the event loop. Changes collect until ``take_dirty`` and ``take_evicted``."""

    def __init__(self, max_rules: int = MAX_INDEX, clock: Callable[[], float] = time.time) -> None:
        self.max_rules = max_rules
        self.flows: dict[int, Flow] = {}
        self.removed = 0    # flows, since the start
        self.rings: dict[int, RingRef] = {}
        self._rings_at: dict[tuple[int, PortId], dict[int, RingRef]] = {}  # by lane
        self._ports: dict[PortId, _Port] = {}
        self._owned: dict[int, dict[int, Flow]] = {}  # of sockets, by owner
        self._parting: dict[int, dict[int, Flow]] = {}  # the same, of those that are removed, and may send yet
        self._placed: dict[int, set[tuple[PortId, FlowKey]]] = {}
        self._orders: dict[int, dict[tuple[PortId, FlowKey], int]] = {}  # of the claims of TCP ports, by flow
        self._claims_made = 0
        self._evicted: list[tuple[Flow, Reason]] = []
        self._rules: dict[int, Flow] = {}  # of the operator
        self._free = list(range(MAX_INDEX - 1, 0, -1))
        self._next_id = self._next_serial = 1
        self._clock = clock

    # ---- interfaces and rings

    def set_port(self, port: PortId, addresses: Iterable[bytes], *, netns: str, interface: str) -> None:
        """Add an attached interface, or change the addresses of one."""
        entry = self._ports.get(port)
        if entry is None:
            entry = self._ports[port] = _Port(netns, interface, (), {}, {}, set())
        elif entry.addresses == tuple(addresses):
            return
        entry.netns, entry.interface, entry.addresses = netns, interface, tuple(addresses)
        for flow in list(self.flows.values()):
            self._place(flow, only=port)

    def addresses_of(self, port: PortId) -> tuple[bytes, ...]:
        entry = self._ports.get(port)
        return entry.addresses if entry is not None else ()

    def drop_port(self, port: PortId) -> None:
        """The interface is gone: its rings and rules with it."""
        for ring in [r for r in self.rings.values() if r.port == port]:
            self.drop_ring(ring.ring_id)
        self._ports.pop(port, None)
        for placed in self._placed.values():
            placed.difference_update([place for place in placed if place[0] == port])

    def add_ring(self, ring: RingRef) -> None:
        self.rings[ring.ring_id] = ring
        self._rings_at.setdefault((ring.owner, ring.port), {})[ring.lane] = ring
        for flow in self.of_owner(ring.owner):
            self._place(flow, only=ring.port)

    def drop_ring(self, ring_id: int) -> None:
        ring = self.rings.get(ring_id)
        if ring is None:
            return
        lanes = self._rings_at[ring.owner, ring.port]
        del lanes[ring.lane]
        if not lanes:
            del self._rings_at[ring.owner, ring.port]
        flows = self.of_owner(ring.owner)
        for flow in flows:
            self._place(flow, only=ring.port)
        # Only now: while some flows had their claims still, these named the ring.
        del self.rings[ring_id]
        for flow in flows:
            self._explain(flow)

    def refresh(self, port: PortId) -> None:
        """The interface got a program: it knows nothing of the rules that are there already."""
        entry = self._ports[port]
        entry.dirty.update(entry.wanted)

    # ---- flows

    def attach(self, flow: Flow) -> Flow:
        """Add a socket's flow. Raises Refused (RULE, RULE_LIMIT, MULTICAST_SHARED, PORT_SHARED, NOT_OFFLOADABLE_ADDR).
        """
        self._check_rules(flow)
        if nic.ruled(self, flow):
            raise refuse(f"flow {flow.local_text} {flow.remote_text}", Reason.RULE)
        if flow.kind is Kind.MULTICAST and self._shared_group(flow):
            raise refuse(f"flow {flow.local_text}", Reason.MULTICAST_SHARED)
        if self._is_port_of_another(flow):
            raise refuse(f"flow {flow.local_text}", Reason.PORT_SHARED)
        keys = sum(1 for _ in self._keys(flow))
        if not keys and not flow.wildcard and flow.kind is not Kind.MULTICAST:
            raise refuse(f"flow {flow.local_text}", Reason.NOT_OFFLOADABLE_ADDR)
        return self._add(flow, keys)

    def listens_no_more(self, flow: Flow) -> None:
        """A TCP port whose SYNs are the kernel's from now on; connections that the ring has stay there."""
        flow.listens = False
        self._place(flow)

    def add_rule(self, rule: Flow) -> Flow:
        """Add a rule of the operator; socket flows that it covers wholly are evicted. Raises Refused (RULE_LIMIT)."""
        self._add(rule, sum(1 for _ in self._keys(rule)))
        for flow in [f for f in self.flows.values() if f.source is Source.SOCKET]:
            self._replace(flow)
            try:
                self._check_rules(flow)
            except Refused:
                self.evict(flow.flow_id, Reason.RULE)
        return rule

    def remove(self, flow_id: int) -> Flow | None:
        """The flow that was there, or None. Flows that it had displaced come back."""
        flow = self.flows.pop(flow_id, None)
        if flow is None:
            return None
        self.removed += 1
        self._rules.pop(flow_id, None)
        if flow.source is Source.SOCKET:
            del self._owned[flow.owner][flow_id]
        self._displace(flow, self._placed.pop(flow_id))
        self._orders.pop(flow_id, None)
        self._free.append(flow.index)
        if flow.source is Source.OPERATOR:
            for other in self.flows.values():
                self._replace(other)
        return flow

    def part(self, flow_id: int) -> Flow | None:
        """Remove a flow whose socket lives on: what its program has given to a ring may still leave, until ``parted``.
        """
        flow = self.remove(flow_id)
        if flow is not None and flow.source is Source.SOCKET:
            self._parting.setdefault(flow.owner, {})[flow_id] = flow
        return flow

    def parted(self, flow: Flow) -> None:
        parting = self._parting.get(flow.owner, {})
        parting.pop(flow.flow_id, None)
        if not parting:
            self._parting.pop(flow.owner, None)

    def evict(self, flow_id: int, reason: Reason) -> Flow | None:
        """Part with a flow against its owner's will: it is reported by ``take_evicted``."""
        flow = self.part(flow_id)
        if flow is not None and flow.source is Source.SOCKET:
            flow.reason = reason
            self._evicted.append((flow, reason))
        return flow

    def remove_owner(self, owner: int) -> list[Flow]:
        """Take back all flows and rings of a session."""
        gone = [flow for flow in self.of_owner(owner) if self.remove(flow.flow_id)]
        for ring in [r for r in self.rings.values() if r.owner == owner]:
            self.drop_ring(ring.ring_id)
        self._owned.pop(owner, None)
        self._parting.pop(owner, None)
        return gone

    def of_owner(self, owner: int) -> list[Flow]:
        return list(self._owned.get(owner, {}).values())

    # ---- what follows

    @property
    def ports(self) -> Iterable[PortId]:
        return self._ports.keys()

    def wanted(self, port: PortId) -> dict[FlowKey, Action]:
        """The rules that should be in the interface's map."""
        return self._ports[port].wanted

    def rules_of(self, flow_id: int) -> list[tuple[PortId, FlowKey]]:
        """Where a flow's claims are, the won and the lost ones."""
        return sorted(self._placed.get(flow_id, ()))

    def of_interface(self, port: PortId) -> list[Flow]:
        """Of sockets: those that have rules there, or had their last one there, since an address may go before."""
        return [flow for flow in self.flows.values() if flow.source is Source.SOCKET and (
            any(place[0] == port for place in self._placed[flow.flow_id])
            or (flow.placed_on == port and not self._placed[flow.flow_id]))]

    def rule_count(self, flow: Flow) -> int:
        """Mirrored rules of a flow."""
        return sum(1 for port, key in self._placed.get(flow.flow_id, ()) if self._winner(port, key) is flow)

    def ring_on(self, flow: Flow, port: PortId) -> RingRef | None:
        """The ring of its lane, or of the lowest lane that has one there."""
        if flow.ifindex not in (0, port.ifindex):
            return None
        lanes = self._rings_at.get((flow.owner, port))
        return None if lanes is None else lanes.get(flow.lane) or lanes[min(lanes)]

    def rings_of(self, flow: Flow) -> list[RingRef]:
        """The rings that its rules lead to, or would."""
        ports = {port for port, _ in self._placed.get(flow.flow_id, ())}
        return [ring for port in sorted(ports) if (ring := self.ring_on(flow, port)) is not None]

    def grants(self, owner: int, port: PortId) -> dict[GrantKey, int]:
        """Sources that the rings of a process may send from on an interface, with the flow that entitles it."""
        if port not in self._ports:
            return {}
        addresses = self._ports[port].addresses
        granted: dict[GrantKey, int] = {}
        parting = self._parting.get(owner, {})
        for flow in (*parting.values(), *self.of_owner(owner)):
            if flow.of_port or flow.ifindex not in (0, port.ifindex):
                continue
            own = addresses if flow.wildcard or is_multicast(flow.local) else (flow.local,)
            if flow.flow_id in parting:
                own = tuple(a for a in own if a in addresses)
            granted.update((GrantKey(a, flow.local_port, flow.proto), flow.flow_id) for a in own)
        return granted

    def claims(self, port: PortId) -> Mapping[FlowKey, Sequence[Claim]]:
        """Who wants what on an interface."""
        return self._ports[port].claims

    def addresses(self, port: PortId) -> tuple[bytes, ...]:
        return self._ports[port].addresses

    def place_of(self, port: PortId) -> tuple[str, str]:
        """Names of namespace and interface, as rules of the operator match them."""
        return self._ports[port].netns, self._ports[port].interface

    def settle_nic(self) -> None:
        """Send flows of raw packet QPs home that lost what their NIC rule would go on taking. Before ``take_dirty``."""
        dirty = {port: entry.dirty for port, entry in self._ports.items() if entry.dirty}
        for flow, reason in nic.displaced(self, dirty):
            self.evict(flow.flow_id, reason)

    def take_dirty(self) -> dict[PortId, set[FlowKey]]:
        """Keys whose rule may have changed since the last call, by interface."""
        dirty = {port: entry.dirty for port, entry in self._ports.items() if entry.dirty}
        for port in dirty:
            self._ports[port].dirty = set()
        return dirty

    def take_evicted(self) -> list[tuple[Flow, Reason]]:
        """Flows that went home against their owner's will since the last call."""
        evicted, self._evicted = self._evicted, []
        return evicted

    # ---- inside

    def _add(self, flow: Flow, keys: int) -> Flow:
        if not self._free or sum(len(entry.claims) for entry in self._ports.values()) + keys > self.max_rules:
            raise refuse(f"flow {flow.local_text}", Reason.RULE_LIMIT)
        flow.flow_id, flow.serial = self._next_id, self._next_serial
        self._next_id += 1
        self._next_serial += 1
        flow.index = self._free.pop()
        flow.created = self._clock()
        self.flows[flow.flow_id] = flow
        if flow.source is Source.SOCKET:
            self._owned.setdefault(flow.owner, {})[flow.flow_id] = flow
        else:
            self._rules[flow.flow_id] = flow
        self._placed[flow.flow_id] = set()
        self._place(flow)
        return flow

    def _keys(self, flow: Flow, only: PortId | None = None) -> Iterable[tuple[PortId, FlowKey, int]]:
        for port, entry in self._ports.items():
            if only is not None and port != only:
                continue
            ring_id = 0
            if flow.source is Source.OPERATOR:
                if not flow.applies_to(entry.netns, entry.interface):
                    continue
            elif (ring := self.ring_on(flow, port)) is not None:
                ring_id = ring.ring_id
            else:
                continue
            for key in flow.keys(entry.addresses):
                if ring_id == 0 or not self._ruled(port, flow.asked(key)):
                    yield port, key, ring_id

    def _ruled(self, port: PortId, key: FlowKey) -> bool:
        entry = self._ports[port]
        return any(rule.covers(key) and rule.applies_to(entry.netns, entry.interface)
                   for rule in self._rules.values())

    def _check_rules(self, flow: Flow) -> None:
        remote, sport = (flow.remote, flow.remote_port) if flow.kind is Kind.FIVE else (ANY_ADDR, 0)
        whole = flow.asked(FlowKey(flow.local, flow.local_port, remote, sport, flow.proto))
        ports = [p for p, e in self._ports.items() if self.ring_on(flow, p) and any(flow.keys(e.addresses))]
        ruled = [p for p in ports if not any(self._keys(flow, only=p))]
        anywhere = any(rule.covers(whole) and (rule.netns, rule.interface) == ("*", "*")
                       for rule in self._rules.values())
        if anywhere or (ports and ruled == ports):
            raise refuse(f"flow {flow.local_text} {flow.remote_text}", Reason.RULE)

    def _shared_group(self, flow: Flow) -> bool:
        """Is the group claimed by another process? Then those claims go home as well."""
        others = {claim.flow.flow_id for port, key, _ in self._keys(flow)
                  for claim in self._ports[port].claims.get(key, ())
                  if claim.flow.source is Source.SOCKET and claim.flow.owner != flow.owner}
        for flow_id in others:
            self.evict(flow_id, Reason.MULTICAST_SHARED)
        return bool(others)

    def _is_port_of_another(self, flow: Flow) -> bool:
        """Has another process this port of TCP on its rings? Its listener may be closed, and its connections not, whose
        frames would come to the ring of this one."""
        return flow.is_tcp_port and any(
            claim.flow.source is Source.SOCKET and claim.flow.owner != flow.owner
            for port, key, _ in self._keys(flow) for claim in self._ports[port].claims.get(key, ()))

    def _replace(self, flow: Flow) -> None:
        if flow.source is Source.SOCKET:
            self._place(flow)

    def _place(self, flow: Flow, only: PortId | None = None) -> None:
        """Bring a flow's claims (on one interface or all) to what its addresses and rings say now."""
        placed = self._placed[flow.flow_id]
        now = {(port, key): ring_id for port, key, ring_id in self._keys(flow, only)}
        before = {place for place in placed if only is None or place[0] == only}
        self._displace(flow, before - now.keys())
        for (port, key), ring_id in now.items():
            claims = self._ports[port].claims.setdefault(key, [])
            claims[:] = [claim for claim in claims if claim.flow is not flow]
            claims.append(Claim(flow, ring_id, self._order(flow, port, key)))
            flow.placed_on = port
            self._decide(port, key)
        placed.difference_update(before)
        placed.update(now)
        self._explain(flow)
        if flow.kind is Kind.MULTICAST and flow.source is Source.SOCKET:
            self._split_groups(now)

    def _order(self, flow: Flow, port: PortId, key: FlowKey) -> int:
        if not flow.is_tcp_port:
            return 0
        self._claims_made += 1
        return self._orders.setdefault(flow.flow_id, {}).setdefault((port, key), self._claims_made)

    def _split_groups(self, places: Iterable[tuple[PortId, FlowKey]]) -> None:
        # A ring that came later may bring two processes' groups together.
        for port, key in list(places):
            claims = [c for c in self._ports[port].claims.get(key, ()) if c.flow.source is Source.SOCKET]
            if len({claim.flow.owner for claim in claims}) > 1:
                for claim in claims:
                    self.evict(claim.flow.flow_id, Reason.MULTICAST_SHARED)

    def _displace(self, flow: Flow, places: Iterable[tuple[PortId, FlowKey]]) -> None:
        for port, key in list(places):
            entry = self._ports.get(port)
            if entry is None:
                continue
            claims = entry.claims.get(key, [])
            claims[:] = [claim for claim in claims if claim.flow is not flow]
            if not claims:
                entry.claims.pop(key, None)
            self._decide(port, key)

    def _winner(self, port: PortId, key: FlowKey) -> Flow | None:
        entry = self._ports.get(port)
        claims = entry.claims.get(key) if entry else None
        return winner(claims).flow if claims else None

    def _decide(self, port: PortId, key: FlowKey) -> None:
        entry = self._ports[port]
        claims = entry.claims.get(key)
        entry.dirty.add(key)
        if not claims:
            entry.wanted.pop(key, None)
            return
        best = winner(claims)
        if best.flow.action is FlowAction.RING:
            ring = self.rings[best.ring_id]
            # of several sockets of the process at a group, the newest need not be the one that wants it
            stamps = not ring.in_nic and any(claim.flow.stamps for claim in claims if claim.ring_id == best.ring_id)
            entry.wanted[key] = Action(ring.act, ring.target, best.flow.index, best.flow.listens, stamps)
        else:
            entry.wanted[key] = Action(best.flow.pass_action, 0, best.flow.index)
        for claim in claims:
            self._explain(claim.flow)

    def _explain(self, flow: Flow) -> None:
        """Why a flow that stays in the table has no rule."""
        places = self._placed.get(flow.flow_id)
        if flow.source is Source.OPERATOR or places is None:
            return
        if any(self._winner(port, key) is flow for port, key in places):
            flow.reason = Reason.NONE
        elif places:
            flow.reason = Reason.CONFLICT
        elif any(ring.owner == flow.owner for ring in self.rings.values()):
            flow.reason = Reason.NOT_OFFLOADABLE_ADDR
        else:
            flow.reason = Reason.NO_INTERFACE
