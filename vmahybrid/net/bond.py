"""Which bonds, and which VLANs over bonds, may carry rings. The rules are those of VMA's README (Troubleshooting)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from vmahybrid.steering.reasons import Reason

ACTIVE_BACKUP, LACP = 1, 4  # BOND_MODE_ACTIVEBACKUP, BOND_MODE_8023AD of linux/if_bonding.h
NONE, ACTIVE = 0, 1         # BOND_FOM_NONE, BOND_FOM_ACTIVE
# kinds whose frames are those of the device under them (IFLA_LINK; of a veth that is its peer)
STACKED = frozenset(("vlan", "macvlan", "macvtap", "ipvlan", "ipvtap", "macsec"))
DEEPEST = 8                 # MAX_NEST_DEV of linux/netdevice.h


@dataclass(frozen=True, slots=True)
class Bond:
    """Of a bond, as the kernel's IFLA_BOND_* attributes have them."""

    mode: int
    fail_over_mac: int

    @classmethod
    def of(cls, data: Any) -> Bond:
        """From IFLA_INFO_DATA of a link of kind "bond"; attributes that are not there have the kernel's default."""
        return cls(data.get_attr("IFLA_BOND_MODE") or 0, data.get_attr("IFLA_BOND_FAIL_OVER_MAC") or 0)

    @property
    def refusal(self) -> Reason:
        """NONE, or why rings may not be asked for on it."""
        if self.mode not in (ACTIVE_BACKUP, LACP) or self.fail_over_mac not in (NONE, ACTIVE):
            return Reason.BOND_MODE
        return Reason.NONE

    @property
    def vlan_refusal(self) -> Reason:
        """The same of a VLAN device over it."""
        return self.refusal or (Reason.BOND_VLAN if self.fail_over_mac == ACTIVE else Reason.NONE)


class Layer(Protocol):
    @property
    def kind(self) -> str:
        """IFLA_INFO_KIND, "" of hardware."""
        ...
    @property
    def lower(self) -> int:
        """ifindex of the device under it, in the same namespace; or 0."""
        ...
    @property
    def bond(self) -> Bond | None: ...


L = TypeVar("L", bound=Layer)


def stack(link: L, device: Callable[[int], L | None]) -> list[L]:
    """The interface and what it is made on, downwards; ``device`` finds one by its ifindex."""
    layers = [link]
    while layers[-1].kind in STACKED and len(layers) <= DEEPEST:
        below = device(layers[-1].lower) if layers[-1].lower else None
        if below is None:
            break
        layers.append(below)
    return layers


def refusal(layers: Sequence[Layer]) -> Reason:
    """Of the uppermost: NONE, or why a bond in this stack lets nothing on rings."""
    bond = layers[-1].bond
    if bond is None:
        return Reason.NONE
    return bond.vlan_refusal if any(layer.kind == "vlan" for layer in layers) else bond.refusal
