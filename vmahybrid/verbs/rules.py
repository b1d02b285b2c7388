"""Rules of the steering table as flow rules of a raw packet QP: a target of :func:`vmahybrid.steering.mirror.mirror`.

A key becomes Ethernet, IPv4 and UDP or TCP specifications (verbs: ibv_create_flow(3)); priority 0 for a 5-tuple, 1 for
the rest, the order in which libvma has them. Frames that match come to the QP and not to the kernel.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vmahybrid.contracts import addr_to_text, family_of
from vmahybrid.errors import UsageError
from vmahybrid.steering.keys import ANY_ADDR, Act, Action, FlowKey, is_multicast
from vmahybrid.verbs.qp import RawQp, attempt

ETHERTYPE_IPV4 = 0x0800
_L4 = {socket.IPPROTO_UDP: "IBV_FLOW_SPEC_UDP", socket.IPPROTO_TCP: "IBV_FLOW_SPEC_TCP"}


@dataclass(frozen=True, slots=True)
class Match:
    """What of a frame must be equal. ``source`` and ``source_port`` are None for any."""

    priority: int
    mac: str                # destination, "01:00:5e:01:02:03"
    protocol: int
    destination: str
    port: int
    source: str | None = None
    source_port: int | None = None


def match_of(key: FlowKey, mac: bytes) -> Match:
    """``mac``: of the interface. Raises UsageError for a key that is not IPv4, tagged, or neither UDP nor TCP."""
    if family_of(key.dst) != 4:
        raise UsageError(f"rule for {addr_to_text(key.dst)}", "flow rules are made for IPv4")
    if key.vlan or key.vlan2:
        raise UsageError(f"rule for {addr_to_text(key.dst)}", "flow rules are made for untagged frames")
    if key.proto not in _L4:
        raise UsageError(f"rule for protocol {key.proto}", "flow rules are made for UDP and TCP")
    hardware = b"\x01\x00\x5e" + bytes([key.dst[13] & 0x7F]) + key.dst[14:16] if is_multicast(key.dst) else mac
    text = ":".join(f"{byte:02x}" for byte in hardware)
    if key.src == ANY_ADDR and not key.sport:
        return Match(1, text, key.proto, addr_to_text(key.dst), key.dport)
    return Match(0, text, key.proto, addr_to_text(key.dst), key.dport, addr_to_text(key.src), key.sport)


class FlowRules:
    """A MirrorTarget: the rules that steer to one QP. Only what says RING is a rule of the NIC; a key that is to pass
    has none, so that its frames reach the kernel."""

    def __init__(self, qp: RawQp, mac: bytes) -> None:
        self._qp, self._mac = qp, mac
        self._flows: dict[FlowKey, tuple[Action, Any]] = {}    # the pyverbs Flow, None for a key that passes

    def present(self) -> Mapping[FlowKey, Action]:
        """A device can't be asked for its rules; they live and die with the QP's process, so this is all there is."""
        return {key: action for key, (action, _) in self._flows.items()}

    def put(self, key: FlowKey, value: Action) -> None:
        """Add or replace. Raises UsageError, VerbsError."""
        self.delete(key)
        flow = None
        if value.kind is Act.RING:
            flow = attempt(f"flow rule {addr_to_text(key.dst)}:{key.dport} on {self._qp.device}", self._create,
                           match_of(key, self._mac))
        self._flows[key] = value, flow

    def delete(self, key: FlowKey) -> None:
        """Raises VerbsError; the rule is then forgotten all the same."""
        _, flow = self._flows.pop(key, (None, None))
        if flow is not None:
            attempt(f"end of flow rule {addr_to_text(key.dst)}:{key.dport} on {self._qp.device}", flow.close)

    def close(self) -> None:
        """All of them. Before the QP. Idempotent."""
        for key in list(self._flows):
            self.delete(key)

    def _create(self, match: Match) -> Any:
        import pyverbs.enums as e
        from pyverbs.flow import Flow, FlowAttr
        from pyverbs.spec import EthSpec, Ipv4ExtSpec, TcpUdpSpec

        ip: dict[str, object] = {"dst_ip": match.destination, "proto": match.protocol}
        l4: dict[str, object] = {"dst_port": match.port}
        if match.source is not None:
            ip["src_ip"], l4["src_port"] = match.source, match.source_port
        attributes = FlowAttr(num_of_specs=3, priority=match.priority, port=self._qp.port)
        attributes.specs.extend([EthSpec(ether_type=ETHERTYPE_IPV4, dst_mac=match.mac), Ipv4ExtSpec(**ip),
                                 TcpUdpSpec(getattr(e, _L4[match.protocol]), **l4)])
        return Flow(self._qp.qp, attributes)
