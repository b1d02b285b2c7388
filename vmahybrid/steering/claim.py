"""What a flow claims: a key on an interface. One of several claims wins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vmahybrid.steering.flow import Flow, Source


class Claim(NamedTuple):
    flow: Flow
    ring_id: int    # 0: the operator's
    order: int = 0  # of a port of TCP: since when the flow is there, also if it was away

    @property
    def rank(self) -> tuple[bool, bool, int]:
        return (self.flow.source is Source.OPERATOR, not self.flow.wildcard, self.flow.serial)


def winner(claims: Sequence[Claim]) -> Claim:
    """Who gets a frame, of those that claim it. A port of TCP stays with the process that was first: it may have no
    listener any more, and connections still."""
    best = max(claims, key=lambda claim: claim.rank)
    if best.flow.source is Source.SOCKET and best.flow.is_tcp_port:
        first = min(claims, key=lambda claim: claim.order)
        return max((claim for claim in claims if claim.flow.owner == first.flow.owner), key=lambda claim: claim.rank)
    return best
