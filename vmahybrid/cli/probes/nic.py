"""Each interface: driver, MTU, queues, offloads, zero-copy, and who holds its XDP hook."""

import fcntl
import os
import socket
import struct
from array import array
from collections.abc import Iterator

from vmahybrid.cli.probes import Check
from vmahybrid.service.ports import OWN_VETHS
from vmahybrid.xdp import kfunc
from vmahybrid.xdp.netdev import rx_metadata, xdp_features

TOPIC = "interfaces"
SIOCETHTOOL = 0x8946
# linux/ethtool.h: GTSO, GGRO, GFLAGS (bit 15 of whose value is LRO)
OFFLOADS = {"TSO": 0x1E, "GRO": 0x2B}
GFLAGS, FLAG_LRO = 0x25, 1 << 15
MTU_ONE_PAGE = 3498  # larger frames than this need multi-buffer XDP in native mode

STEERING = ("steer", "steer_stamped")
ETHTOOL_GET_TS_INFO, SOF_TIMESTAMPING_RX_HARDWARE = 0x41, 4


def _ethtool(sock: socket.socket, name: str, command: int) -> int | None:
    """The value of a struct ethtool_value; None where the driver has no such thing."""
    value = array("I", [command, 0])
    try:
        fcntl.ioctl(sock, SIOCETHTOOL, struct.pack("16sP16x", name.encode(), value.buffer_info()[0]))
    except OSError:
        return None
    return value[1]


def offloads(name: str) -> dict[str, bool]:
    """State of TSO, GRO and LRO, without those that the driver does not know (ethtool(8) -k)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        found = {key: _ethtool(sock, name, command) for key, command in OFFLOADS.items()}
        flags = _ethtool(sock, name, GFLAGS)
    states = {key: bool(value) for key, value in found.items() if value is not None}
    return states if flags is None else states | {"LRO": bool(flags & FLAG_LRO)}


def hardware_stamps(name: str) -> tuple[bool, int]:
    """Can the adapter stamp what it receives, and the N of its clock's /dev/ptpN, -1 without (ethtool(8) -T)?"""
    info = array("i", [ETHTOOL_GET_TS_INFO, 0, -1, *[0] * 8])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        try:
            fcntl.ioctl(sock, SIOCETHTOOL, struct.pack("16sP16x", name.encode(), info.buffer_info()[0]))
        except OSError:
            return False, -1
    return bool(info[1] & SOF_TIMESTAMPING_RX_HARDWARE), info[2]


def interface(name: str) -> Iterator[Check]:
    """All lines of one interface of this namespace. Raises OSError if it is gone."""
    from vmahybrid.xdp.attach import VIRTUAL_DRIVERS
    from vmahybrid.xdp.probe import probe

    info = probe(name)
    if not info.ethernet:
        yield Check(TOPIC, name, "ok", "not Ethernet: it is never served")
        return
    features, states = xdp_features(info.ifindex), offloads(name)
    data = {"driver": info.driver, "mtu_bytes": info.mtu, "queues": info.queues, "offloads": states,
            "xdp_features": None if features is None else sorted(features)}  # fmt: skip
    yield Check(TOPIC, name, "ok", f"driver {info.driver or 'unknown'}, MTU {info.mtu}, {info.queues} receive queues; "
                + _offload_text(states), data=data)  # fmt: skip
    if info.driver not in VIRTUAL_DRIVERS:
        yield from _native(name, info.driver, features)
    else:
        yield Check(TOPIC, name, "ok", "virtual: where the peer's end has TSO or GSO on, its TCP sends long frames, "
                    "and a connection that gets bulk by them goes home (tcp-long-frames)")  # fmt: skip
    yield _stamps(name, info.ifindex, info.driver)
    if info.mtu > MTU_ONE_PAGE:
        yield Check(TOPIC, name, "warn", f"MTU {info.mtu}: native XDP may need multi-buffer support of the driver",
                    f"ip link set {name} mtu 1500")  # fmt: skip
    if states.get("LRO"):
        yield Check(TOPIC, name, "warn", "LRO is on: drivers refuse XDP, or packets are merged before it",
                    f"ethtool -K {name} lro off")  # fmt: skip
    if info.queues > 1:
        yield Check(TOPIC, name, "warn", f"{info.queues} receive queues: a process shares them through a ring veth "
                    "unless it may have all", f"ethtool -L {name} combined 1")  # fmt: skip
    yield from _holders(name, info.ifindex)


def _offload_text(states: dict[str, bool]) -> str:
    return ", ".join(f"{name} {'on' if on else 'off'}" for name, on in states.items()) or "offloads unknown"


def _stamps(name: str, ifindex: int, driver: str) -> Check:
    from vmahybrid.xdp.stamped import obstacle

    (hard, clock), metadata = hardware_stamps(name), rx_metadata(ifindex)
    told = metadata is not None and "timestamp" in metadata
    data = {"hardware_stamps": hard, "clock": f"/dev/ptp{clock}" if clock >= 0 else None,
            "xdp_rx_metadata": None if metadata is None else sorted(metadata)}  # fmt: skip
    if not hard:
        text = "no hardware time stamps; software ones (SO_TIMESTAMPING) come with every ring"
        if told:
            text += " (the driver hands native XDP those that a frame brings along, and makes none)"
    elif why := obstacle(ifindex, driver, "auto") or kfunc.missing():
        text = (f"hardware time stamps, which AF_XDP rings don't have: {why}. Sockets that ask for them are the "
                "kernel's, but on raw packet QPs")  # fmt: skip
    else:
        text = "hardware time stamps, which AF_XDP rings in native mode have from the driver" + _clock_text(clock)
    return Check(TOPIC, name, "ok", text, data=data)


def _clock_text(clock: int) -> str:
    """What VMA_HW_TS_CONVERSION=3, the default, needs."""
    if clock < 0:
        return ", with VMA_HW_TS_CONVERSION=1, 2 or 4: it has no clock that could be followed"
    return f". To be synchronised with the system's clock, programs must be able to read /dev/ptp{clock}"


def _native(name: str, driver: str, features: set[str] | None) -> Iterator[Check]:
    if features is None:
        yield Check(TOPIC, name, "warn", "the kernel can't say what the driver can do in XDP; the service will try")
    elif "basic" not in features:
        yield Check(TOPIC, name, "warn", f"{driver} has no native XDP: generic mode, which copies every packet")
    elif "zero-copy" not in features:
        yield Check(TOPIC, name, "warn", f"{driver} has native XDP, without zero-copy")
    else:
        yield Check(TOPIC, name, "ok", f"{driver} has native XDP with zero-copy")


def _holders(name: str, ifindex: int) -> Iterator[Check]:
    from vmahybrid.xdp.holder import attached, holders

    if not attached(ifindex):
        return
    for holder in holders(ifindex):
        if holder.name in STEERING:
            yield Check(TOPIC, name, "ok", f"served: {holder}")
        else:
            yield Check(TOPIC, name, "warn", f"held by {holder}; the service will not replace it",
                        f"stop that program, or: ip link set dev {name} xdp off")  # fmt: skip


def names() -> list[str]:
    """Interfaces of this namespace, the loopback and our own veths left out."""
    return [name for _, name in socket.if_nameindex() if name != "lo" and not name.startswith(OWN_VETHS)]


def exists(name: str) -> bool:
    try:
        socket.if_nametoindex(name)
    except (OSError, ValueError):
        return False
    return os.fsencode(name) != b"" and len(name) < 16
