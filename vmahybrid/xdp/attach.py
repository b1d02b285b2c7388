"""Attach an XDP program to an interface by bpf_link, in the best mode for the driver.

The link is not pinned: it dies with its owner, and packets then go to the kernel. Another program on the interface is
never replaced. Call from a thread that is in the interface's network namespace; the link then works from any.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from typing import Literal

from vmahybrid.errors import Refused
from vmahybrid.steering.reasons import Reason
from vmahybrid.xdp.bpf import ATTACH_TCX_INGRESS, ATTACH_XDP, BpfProgram, Descriptor, bpf_attr, bpf_call, object_info
from vmahybrid.xdp.holder import Holder, holders

Mode = Literal["native", "generic"]

_LINK_CREATE = 28
_BPF_F_BEFORE = 1 << 3  # alone: before all other programs
_FLAGS: dict[Mode, int] = {"generic": 1 << 1, "native": 1 << 2}  # XDP_FLAGS_SKB_MODE, XDP_FLAGS_DRV_MODE

# Names as ETHTOOL_GDRVINFO gives them. Native XDP on veth takes TSO from the peer: kernel TCP falls to a third, while
# rings are not faster (research/afxdp.md, E). virtio_net is not here: its host side is a real path.
VIRTUAL_DRIVERS = frozenset({
    "", "veth", "tun", "bridge", "dummy", "802.1Q VLAN Support", "macvlan", "ipvlan", "vxlan", "geneve", "gretap",
    "ifb", "netkit", "openvswitch", "xen_netback", "bonding",
})

_SIOCETHTOOL = 0x8946
_GDRVINFO = 3


class InterfaceBusy(Refused):
    """Another XDP program holds the interface; ``holders`` says which."""

    def __init__(self, name: str, found: list[Holder]) -> None:
        self.holders = found
        who = "; ".join(map(str, found)) or "an XDP program that is already gone again"
        pids = sorted({pid for holder in found for pid in holder.pids})
        remedy = (f"stop process {', '.join(map(str, pids))}" if pids else
                  f"detach it if it is not needed: ip link set dev {name} xdp off" if found else "try again")
        super().__init__(name, f"another XDP program holds the interface: {who}", remedy, Reason.IF_BUSY)


class HeldAbove(InterfaceBusy):
    """A program on an interface above this one keeps it from getting one; ``above`` names those that have one."""

    def __init__(self, name: str, above: Sequence[str] = ()) -> None:
        self.holders = []
        who = f" ({', '.join(above)})" if above else ""
        Refused.__init__(self, name, f"an interface above it{who} has an XDP program, and the kernel attaches them "
                         "from below upwards only", "detach that one, and attach it again later", Reason.IF_BUSY)


class Attachment(Descriptor):
    """A program on an interface until close(). ``reason`` says why not a better mode, ``detail`` in the kernel's words.
    """

    def __init__(self, fd: int, ifindex: int, mode: Mode, reason: Reason, detail: str = "") -> None:
        super().__init__(fd)
        self.ifindex, self.mode, self.reason, self.detail = ifindex, mode, reason, detail

    @property
    def alive(self) -> bool:
        """False once closed, or when the interface is gone: the kernel then leaves a link to nothing."""
        if self.fd < 0:
            return False
        # struct bpf_link_info: type, id, prog_id, padding, xdp.ifindex or tcx.ifindex
        return bool(struct.unpack_from("=4xI4x4xI", object_info(self.fd, 24))[1])


def driver_of(ifindex: int) -> str:
    """The driver's name from ethtool, "" if it has none. sysfs would show another namespace. Raises OSError: ENXIO."""
    name = socket.if_indextoname(ifindex)
    info = array.array("B", struct.pack("=I", _GDRVINFO) + bytes(192))
    request = struct.pack("16sP16x", name.encode(), info.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as any_socket:
        try:
            fcntl.ioctl(any_socket, _SIOCETHTOOL, request)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            return ""
    return info.tobytes()[4:36].split(b"\0")[0].decode("utf-8", "replace")


def _name(ifindex: int) -> str:
    try:
        return socket.if_indextoname(ifindex)
    except OSError as error:
        raise Refused(f"interface {ifindex}", "it is not in this network namespace", Reason.IF_GONE.remedy,
                      Reason.IF_GONE) from error


def _try(prog: BpfProgram, ifindex: int, mode: Mode) -> int:
    """Descriptor of the link, or a negative errno."""
    return bpf_call(_LINK_CREATE, bpf_attr("IIII", prog.fd, ifindex, ATTACH_XDP, _FLAGS[mode]))


def _order(mode: str, driver: str) -> tuple[list[Mode], Reason]:
    """Modes to try, and why generic is the first of them."""
    if mode == "native":
        return ["native"], Reason.NONE
    if mode == "generic":
        return ["generic"], Reason.NONE
    if mode != "auto":
        raise ValueError(f'XDP mode {mode!r}: not "auto", "native" or "generic"')
    if driver in VIRTUAL_DRIVERS:
        return ["generic"], Reason.GENERIC_VIRTUAL
    return ["native", "generic"], Reason.NONE


def _failure(name: str, errors: dict[Mode, int]) -> Refused:
    why = "; ".join(f"{mode} mode: {os.strerror(number)}" for mode, number in errors.items())
    remedy = Reason.ATTACH_FAILED.remedy
    if errno.EPERM in errors.values():
        remedy = "start the service as root, or with CAP_NET_ADMIN and CAP_BPF"
    elif list(errors) == ["native"]:
        remedy = 'the MTU may be too large for native mode, or the driver has none: set interface.mode = "auto"'
    return Refused(name, f"the kernel refused the XDP program: {why}", remedy, Reason.ATTACH_FAILED)


def attach(prog: BpfProgram, ifindex: int, mode: str = "auto", *, driver: str | None = None) -> Attachment:
    """Attach ``prog``; an explicit mode is never changed, "auto" is generic on virtual and unknown drivers, else
    native, then generic. ``driver``: its name if known, else it is asked.

    Raises InterfaceBusy (HeldAbove too), Refused (IF_GONE, ATTACH_FAILED), ValueError for an unknown mode.
    """
    name = _name(ifindex)
    modes, reason = _order(mode, driver_of(ifindex) if driver is None else driver)
    errors: dict[Mode, int] = {}
    for attempt in modes:
        result = _try(prog, ifindex, attempt)
        if result >= 0:
            if errors:
                reason = Reason.GENERIC_NO_NATIVE
            detail = "; ".join(f"{tried}: {os.strerror(number)}" for tried, number in errors.items())
            return Attachment(result, ifindex, attempt, reason, detail)
        if result in (-errno.EBUSY, -errno.EEXIST):
            found = holders(ifindex)
            # EEXIST: a program in the other mode, or on a device above this one
            raise InterfaceBusy(name, found) if found or result == -errno.EBUSY else HeldAbove(name)
        errors[attempt] = -result
    raise _failure(name, errors)


def _try_tcx(prog: BpfProgram, ifindex: int) -> int:
    return bpf_call(_LINK_CREATE, bpf_attr("IIIIIIQ", prog.fd, ifindex, ATTACH_TCX_INGRESS, _BPF_F_BEFORE, 0, 0, 0))


def tcx_missing(prog: BpfProgram) -> str:
    """Why this kernel takes no program at the tcx hook, "" if it does. Attaches nothing."""
    result = _try_tcx(prog, 0)
    if result == -errno.ENODEV:  # it looked for the interface
        return ""
    if result >= 0:
        os.close(result)
        return ""
    return f"this kernel has no tcx (linux 6.6): {os.strerror(-result)}"


def attach_tcx(prog: BpfProgram, ifindex: int) -> Attachment:
    """Attach a program for the tcx hook at the ingress of the interface, before all others. ``mode`` is "generic".

    Raises Refused (ATTACH_FAILED).
    """
    result = _try_tcx(prog, ifindex)
    if result < 0:
        raise Refused(f"interface {ifindex}", f"the kernel refused the tcx program: {os.strerror(-result)}",
                      Reason.ATTACH_FAILED.remedy, Reason.ATTACH_FAILED)
    return Attachment(result, ifindex, "generic", Reason.NONE)
