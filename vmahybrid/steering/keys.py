"""What a rule matches and what it does, as typed values; the bytes in the maps are bpf/vmh_flow.h's."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Self

from vmahybrid import contracts
from vmahybrid.contracts import ANY_ADDR, htons, lib, ntohs
from vmahybrid.net.netns import Netns

__all__ = ["ANY_ADDR", "Act", "Action", "FlowKey", "GrantKey", "PortId", "is_link_local", "is_multicast"]


class PortId(NamedTuple):
    """An interface of the host: ifindexes repeat across namespaces."""

    netns: Netns
    ifindex: int


class Act(IntEnum):
    """What the XDP program does with a matching frame (VMH_ACT_*)."""

    PASS = lib.VMH_ACT_PASS
    RING = lib.VMH_ACT_RING
    DEV = lib.VMH_ACT_DEV
    DROP = lib.VMH_ACT_DROP


class FlowKey(NamedTuple):
    """Exact match of a frame. Addresses are 16 bytes (IPv4 mapped), ports in host order. ``src`` and ``sport`` are zero
    for a 3-tuple or multicast rule."""

    dst: bytes
    dport: int
    src: bytes = ANY_ADDR
    sport: int = 0
    proto: int = 17
    vlan: int = 0
    vlan2: int = 0

    def to_bytes(self) -> bytes:
        return contracts.pack("struct vmh_flow_key", dst=self.dst, src=self.src, dport=htons(self.dport),
                              sport=htons(self.sport), proto=self.proto, family=contracts.family_of(self.dst),
                              vlan=self.vlan, vlan2=self.vlan2)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Raises ValueError if ``data`` is too short."""
        k = contracts.unpack("struct vmh_flow_key", data)
        return cls(bytes(k.dst), ntohs(k.dport), bytes(k.src), ntohs(k.sport), k.proto, k.vlan, k.vlan2)


class GrantKey(NamedTuple):
    """A source that the process behind a ring veth may send from."""

    src: bytes
    sport: int
    proto: int = 17

    def to_bytes(self) -> bytes:
        return contracts.pack("struct vmh_grant_key", src=self.src, sport=htons(self.sport), proto=self.proto,
                              family=contracts.family_of(self.src))

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Raises ValueError if ``data`` is too short."""
        k = contracts.unpack("struct vmh_grant_key", data)
        return cls(bytes(k.src), ntohs(k.sport), k.proto)


@dataclass(frozen=True, slots=True)
class Action:
    """``target``: first XSKMAP slot of a ring, or DEVMAP slot. ``rule``: index of the hit counter. ``listens``: SYNs
    for this TCP port are the ring's, also where the kernel listens. ``stamps``: with the adapter's time of arrival."""

    kind: Act
    target: int = 0
    rule: int = 0
    listens: bool = False
    stamps: bool = False

    def to_bytes(self) -> bytes:
        flags = (lib.VMH_ACT_F_LISTEN if self.listens else 0) | (lib.VMH_ACT_F_STAMP if self.stamps else 0)
        return contracts.action(self.kind, self.target, self.rule, flags)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        kind, target, rule, flags = contracts.parse_action(data)
        return cls(Act(kind), target, rule, bool(flags & lib.VMH_ACT_F_LISTEN), bool(flags & lib.VMH_ACT_F_STAMP))


def is_multicast(address: bytes) -> bool:
    """224.0.0.0/4 (RFC 5771) or ff00::/8 (RFC 4291)."""
    if contracts.family_of(address) == 4:
        return address[12] & 0xF0 == 0xE0
    return address[0] == 0xFF


def is_link_local(address: bytes) -> bool:
    """fe80::/10 (RFC 4291): an address of one link, the same on others."""
    return address[0] == 0xFE and address[1] & 0xC0 == 0x80
