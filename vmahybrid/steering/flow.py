"""A flow: what a socket or the operator asked for. The rules that follow from it are computed in table.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase

from vmahybrid.contracts import addr_to_text, family_of, lib
from vmahybrid.steering.keys import ANY_ADDR, Act, FlowKey, PortId, is_link_local, is_multicast
from vmahybrid.steering.reasons import Reason

TCP = 6
PROTO_NAMES = {17: "udp", TCP: "tcp"}
PROTO_NUMBERS = {name: number for number, name in PROTO_NAMES.items()}


class Kind(Enum):
    FIVE = "5-tuple"
    THREE = "3-tuple"
    MULTICAST = "multicast"

    @classmethod
    def from_wire(cls, code: int) -> Kind:
        """Of VMH_FLOW_*. Raises KeyError."""
        return {lib.VMH_FLOW_5T: cls.FIVE, lib.VMH_FLOW_3T: cls.THREE, lib.VMH_FLOW_MC: cls.MULTICAST}[code]


class FlowAction(Enum):
    RING = "ring"
    KERNEL = "kernel"
    DROP = "drop"


class Source(Enum):
    SOCKET = "socket"
    OPERATOR = "operator"


@dataclass(slots=True, kw_only=True)
class Flow:
    """Addresses are 16 bytes, zeros for any; ports in host order, 0 for any. ``owner`` is a session, 0 the operator.

    ``netns`` and ``interface`` of an operator's rule are shell patterns over names; those of a socket's flow are the
    exact identity of the session's namespace (text) and "*": there ``ifindex`` decides, 0 for every ring of the owner.
    """

    flow_id: int = 0
    action: FlowAction
    source: Source
    kind: Kind
    owner: int = 0
    proto: int = 17
    local: bytes = ANY_ADDR
    local_port: int = 0
    remote: bytes = ANY_ADDR
    remote_port: int = 0
    peer: tuple[bytes, int] = (ANY_ADDR, 0)     # of a connected socket whose rule is a 3-tuple
    ifindex: int = 0
    netns: str = "*"
    interface: str = "*"
    fd: int = -1
    inode: int = 0
    lane: int = 0               # of its owner's rings, see RingRef
    shared_port: bool = False   # SO_REUSEADDR or multicast: somebody else may bind the same port later
    older: frozenset[int] = frozenset()     # inodes of sockets bound to the port before this one
    of_port: bool = False       # a connection at a TCP port that has a flow, too, which entitles to send
    listens: bool = False       # a TCP port whose SYNs are the ring's
    stamps: bool = False        # a UDP socket that wants the adapter's time of arrival
    family: int = 4             # of the socket and so of its wildcard; 0: both (the operator's, and of TCP)
    created: float = 0.0
    index: int = 0              # of the hit counter
    serial: int = 0             # order of binding
    placed_on: PortId | None = None     # the interface of its last rule, which may be gone
    reason: Reason = field(default=Reason.NONE)

    @property
    def wildcard(self) -> bool:
        return self.local == ANY_ADDR

    @property
    def is_tcp_port(self) -> bool:
        return self.proto == TCP and self.kind is Kind.THREE

    @property
    def pass_action(self) -> Act:
        return Act.DROP if self.action is FlowAction.DROP else Act.PASS

    def keys(self, addresses: Iterable[bytes]) -> Iterator[FlowKey]:
        """The keys of this flow on an interface with these addresses (none if it has not the local one)."""
        if self.source is Source.OPERATOR and not self.concrete:
            return
        remote, sport = (self.remote, self.remote_port) if self.kind is Kind.FIVE else (ANY_ADDR, 0)
        if self.kind is Kind.MULTICAST:
            yield FlowKey(self.local, self.local_port, proto=self.proto)
        elif self.wildcard:
            family = family_of(remote) if remote != ANY_ADDR else self.family
            for address in addresses:
                if family in (0, family_of(address)) and not (self.proto == TCP and is_link_local(address)):
                    yield FlowKey(address, self.local_port, remote, sport, self.proto)
        elif self.local in set(addresses):
            yield FlowKey(self.local, self.local_port, remote, sport, self.proto)

    @property
    def concrete(self) -> bool:
        """Can it be an exact-match rule? A port is given, and the remote end wholly or not at all."""
        return self.local_port != 0 and (self.remote == ANY_ADDR) == (self.remote_port == 0)

    def covers(self, key: FlowKey) -> bool:
        """Does this operator's rule say something of every frame that ``key`` matches?"""
        return (self.proto == key.proto
                and self.local in (ANY_ADDR, key.dst)
                and self.local_port in (0, key.dport)
                and self.remote in (ANY_ADDR, key.src)
                and self.remote_port in (0, key.sport))

    def asked(self, key: FlowKey) -> FlowKey:
        """The frames that the socket gets of those that a key of this flow matches, as rules of the operator see it."""
        return key._replace(src=self.peer[0], sport=self.peer[1]) if self.peer[1] else key

    def applies_to(self, netns: str, interface: str) -> bool:
        """Is an operator's rule meant for this interface?"""
        return fnmatchcase(netns, self.netns) and fnmatchcase(interface, self.interface)

    def same_rule(self, other: Flow) -> bool:
        """Do two rules of the operator say the same?"""
        def said(rule: Flow) -> tuple[object, ...]:
            return (rule.action, rule.proto, rule.local, rule.local_port, rule.remote, rule.remote_port, rule.netns,
                    rule.interface)

        return said(self) == said(other)

    @property
    def local_text(self) -> str:
        return endpoint(self.local, self.local_port)

    @property
    def remote_text(self) -> str:
        return endpoint(self.remote, self.remote_port)


def endpoint(address: bytes, port: int) -> str:
    """"10.0.0.1:53", "[fe80::1]:53", "*:*"."""
    text = addr_to_text(address)
    return f"{f'[{text}]' if ':' in text else text}:{port or '*'}"


def operator_kind(local: bytes, remote: bytes, remote_port: int) -> Kind:
    """What a rule of the operator is called in the table."""
    if is_multicast(local):
        return Kind.MULTICAST
    return Kind.FIVE if remote != ANY_ADDR and remote_port else Kind.THREE
