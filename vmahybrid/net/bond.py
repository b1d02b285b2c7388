"""Which bonds, and which VLANs over bonds, may carry rings. The rules are those of VMA's README (Troubleshooting)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vmahybrid.steering.reasons import Reason

ACTIVE_BACKUP, LACP = 1, 4  # BOND_MODE_ACTIVEBACKUP, BOND_MODE_8023AD of linux/if_bonding.h
NONE, ACTIVE = 0, 1         # BOND_FOM_NONE, BOND_FOM_ACTIVE


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
