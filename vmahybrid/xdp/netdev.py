"""What the kernel's netdev family (Documentation/netlink/specs/netdev.yaml) says of an interface's XDP, in the calling
thread's network namespace."""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping

NETLINK_GENERIC, GENL_ID_CTRL, CTRL_CMD_GETFAMILY = 16, 16, 3
CTRL_ATTR_FAMILY_ID, CTRL_ATTR_FAMILY_NAME = 1, 2
NETDEV_CMD_DEV_GET, NETDEV_A_DEV_IFINDEX, NETDEV_A_DEV_XDP_FEATURES, NETDEV_A_DEV_XDP_RX_METADATA_FEATURES = 1, 1, 3, 5
NLM_F_REQUEST, NLMSG_ERROR = 1, 2
XDP_FEATURES = {1: "basic", 2: "redirect", 4: "ndo-xmit", 8: "zero-copy", 16: "hw-offload", 32: "rx-sg", 64: "xmit-sg"}

RX_METADATA = {1: "timestamp", 2: "hash", 4: "vlan-tag"}


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
