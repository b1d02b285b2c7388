"""Each interface: driver, MTU, queues, offloads, zero-copy, and who holds its XDP hook."""

import fcntl
import os
import socket
import struct
from array import array
from collections.abc import Iterator, Mapping

from vmahybrid.cli.probes import Check
from vmahybrid.service.ports import OWN_VETHS

TOPIC = "interfaces"
SIOCETHTOOL = 0x8946
# linux/ethtool.h: GTSO, GGRO, GFLAGS (bit 15 of whose value is LRO)
OFFLOADS = {"TSO": 0x1E, "GRO": 0x2B}
GFLAGS, FLAG_LRO = 0x25, 1 << 15
MTU_ONE_PAGE = 3498  # larger frames than this need multi-buffer XDP in native mode

NETLINK_GENERIC, GENL_ID_CTRL, CTRL_CMD_GETFAMILY = 16, 16, 3
CTRL_ATTR_FAMILY_ID, CTRL_ATTR_FAMILY_NAME = 1, 2
NETDEV_CMD_DEV_GET, NETDEV_A_DEV_IFINDEX, NETDEV_A_DEV_XDP_FEATURES, NETDEV_A_DEV_XDP_RX_METADATA_FEATURES = 1, 1, 3, 5
NLM_F_REQUEST, NLMSG_ERROR = 1, 2
XDP_FEATURES = {1: "basic", 2: "redirect", 4: "ndo-xmit", 8: "zero-copy", 16: "hw-offload", 32: "rx-sg", 64: "xmit-sg"}

RX_METADATA = {1: "timestamp", 2: "hash", 4: "vlan-tag"}
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


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def _attributes(data: bytes) -> dict[int, bytes]:
    found, at = {}, 0
    while at + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, at)
        if length < 4:
            break
        found[kind & 0x3FFF] = data[at + 4 : at + length]
        at += (length + 3) & ~3
    return found


def _genetlink(sock: socket.socket, family: int, command: int, attribute: bytes) -> dict[int, bytes] | None:
    """One request, one answer; None if the kernel refuses."""
    message = struct.pack("=BBH", command, 1, 0) + attribute
    sock.send(struct.pack("=IHHII", 16 + len(message), family, NLM_F_REQUEST, 1, 0) + message)
    answer = sock.recv(1 << 16)
    length, kind = struct.unpack_from("=IH", answer)
    return None if kind == NLMSG_ERROR else _attributes(answer[20:length])


def hardware_stamps(name: str) -> bool:
    """Can the adapter stamp what it receives (ethtool(8) -T)?"""
    info = array("I", [ETHTOOL_GET_TS_INFO, *[0] * 10])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        try:
            fcntl.ioctl(sock, SIOCETHTOOL, struct.pack("16sP16x", name.encode(), info.buffer_info()[0]))
        except OSError:
            return False
    return bool(info[1] & SOF_TIMESTAMPING_RX_HARDWARE)


def _device(ifindex: int) -> dict[int, bytes] | None:
    """What the netdev family (kernel 6.3 and newer) says of it; None where the kernel can't say."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_GENERIC) as sock:
        sock.settimeout(2)
        name = _attribute(CTRL_ATTR_FAMILY_NAME, b"netdev\0")
        family = _genetlink(sock, GENL_ID_CTRL, CTRL_CMD_GETFAMILY, name)
        if family is None:
            return None
        number = struct.unpack("=H", family[CTRL_ATTR_FAMILY_ID])[0]
        index = _attribute(NETDEV_A_DEV_IFINDEX, struct.pack("=I", ifindex))
        return _genetlink(sock, number, NETDEV_CMD_DEV_GET, index)


def _announced(ifindex: int, attribute: int, names: Mapping[int, str]) -> set[str] | None:
    device = _device(ifindex)
    if device is None or attribute not in device:
        return None
    bits = struct.unpack("=Q", device[attribute])[0]
    return {name for bit, name in names.items() if bits & bit}


def xdp_features(ifindex: int) -> set[str] | None:
    """What the driver announces; None where the kernel can't say."""
    return _announced(ifindex, NETDEV_A_DEV_XDP_FEATURES, XDP_FEATURES)


def rx_metadata(ifindex: int) -> set[str] | None:
    """What the driver tells XDP programs of a frame; None where the kernel can't say."""
    return _announced(ifindex, NETDEV_A_DEV_XDP_RX_METADATA_FEATURES, RX_METADATA)


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
        yield Check(TOPIC, name, "ok", "virtual: where the peer's end has TSO or GSO on, its TCP sends frames that fit "
                    "no ring, and a connection that gets one goes home (tcp-long-frames)")  # fmt: skip
    yield _stamps(name, info.ifindex)
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


def _stamps(name: str, ifindex: int) -> Check:
    hard, metadata = hardware_stamps(name), rx_metadata(ifindex)
    data = {"hardware_stamps": hard, "xdp_rx_metadata": None if metadata is None else sorted(metadata)}
    if not hard:
        text = "no hardware time stamps; software ones (SO_TIMESTAMPING) come with every ring"
        if metadata and "timestamp" in metadata:
            text += " (the driver hands XDP those that a frame brings along, and makes none)"
    else:
        driver = "gives" if metadata and "timestamp" in metadata else "does not give"
        text = (f"hardware time stamps, which the driver {driver} to XDP. AF_XDP rings do not read them in this "
                "version: sockets that ask for them are the kernel's, but on raw packet QPs")  # fmt: skip
    return Check(TOPIC, name, "ok", text, data=data)


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
        if holder.name == "steer":
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
