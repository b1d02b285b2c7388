"""What an interface is: driver, queues, MAC, MTU. Every function runs in the calling thread's network namespace."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
from dataclasses import dataclass

from vmahybrid.xdp.attach import driver_of

SIOCETHTOOL = 0x8946
SIOCGIFHWADDR = 0x8927
SIOCGIFMTU = 0x8921
SIOCGIFFLAGS = 0x8913
ETHTOOL_GCHANNELS = 0x0000003C
ARPHRD_ETHER = 1
IFF_LOOPBACK = 0x8

# new mount API, same numbers on every architecture (asm-generic/unistd.h)
_SYS_FSOPEN, _SYS_FSCONFIG, _SYS_FSMOUNT = 430, 431, 432
_FSOPEN_CLOEXEC, _FSMOUNT_CLOEXEC, _FSCONFIG_CMD_CREATE = 1, 1, 6

# Paravirtual NICs have a device and a driver, yet a packet from the same host arrives with only the
# pseudo-header sum (VIRTIO_NET_HDR_F_NEEDS_CSUM and its like).
PARAVIRTUAL = frozenset({"virtio_net", "vmxnet3", "hv_netvsc", "xen_netfront", "vif", "ibmveth"})

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class InterfaceInfo:
    """An Ethernet interface at one moment. ``queues`` are active receive queues; ``mtu`` is in bytes."""

    name: str
    ifindex: int
    driver: str  # "" if the driver does not say
    mac: bytes
    mtu: int
    queues: int
    physical: bool  # frames come from a wire, with whole checksums
    ethernet: bool  # and not the loopback


def probe(ifname: str) -> InterfaceInfo:
    """Raises OSError (ENODEV: no such interface in this namespace)."""
    try:
        ifindex = socket.if_nametoindex(ifname)
    except OSError as error:
        raise OSError(errno.ENODEV, f"no interface {ifname} in this namespace") from error
    name = driver_of(ifindex)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        hwaddr = _ifreq(sock, SIOCGIFHWADDR, ifname)
        mtu = struct.unpack_from("i", _ifreq(sock, SIOCGIFMTU, ifname), 16)[0]
        flags = struct.unpack_from("H", _ifreq(sock, SIOCGIFFLAGS, ifname), 16)[0]
        queues, device = _sysfs(ifname)
        if queues == 0:
            queues = _channels(sock, ifname)
    return InterfaceInfo(
        name=ifname, ifindex=ifindex, driver=name, mac=hwaddr[18:24], mtu=mtu, queues=queues,
        physical=device and name not in PARAVIRTUAL,
        ethernet=struct.unpack_from("H", hwaddr, 16)[0] == ARPHRD_ETHER and not flags & IFF_LOOPBACK)


def _ifreq(sock: socket.socket, request: int, ifname: str) -> bytes:
    return fcntl.ioctl(sock, request, struct.pack("16s24x", ifname.encode()))


def _ethtool(sock: socket.socket, ifname: str, command: bytes) -> bytes:
    buffer = ctypes.create_string_buffer(command, len(command))
    fcntl.ioctl(sock, SIOCETHTOOL, struct.pack("16sP16x", ifname.encode(), ctypes.addressof(buffer)))
    return buffer.raw


def _channels(sock: socket.socket, ifname: str) -> int:
    """Receive plus combined channels by ETHTOOL_GCHANNELS; 1 for drivers that do not say."""
    try:
        answer = struct.unpack("9I", _ethtool(sock, ifname, struct.pack("I32x", ETHTOOL_GCHANNELS)))
    except OSError:
        return 1
    return max(1, int(answer[5]) + int(answer[8]))


def _sysfs(ifname: str) -> tuple[int, bool]:
    """(active receive queues, has a device) from sysfs; (0, False) where sysfs can't be mounted."""
    try:
        root = mount_sysfs()
    except OSError:
        return 0, False
    try:
        here = os.open(f"class/net/{ifname}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=root)
        try:
            return _rx_queues(here), _exists(here, "device")
        finally:
            os.close(here)
    except OSError:
        return 0, False
    finally:
        os.close(root)


def _rx_queues(interface: int) -> int:
    queues = os.open("queues", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=interface)
    try:
        return sum(name.startswith("rx-") for name in os.listdir(queues))
    finally:
        os.close(queues)


def _exists(directory: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory)
    except FileNotFoundError:
        return False
    return True


def mount_sysfs() -> int:
    """A detached mount of sysfs, which shows the namespace of the thread that mounts it, not of the one that reads:
    /sys of the service always shows the service's own namespace. Needs CAP_SYS_ADMIN, as setns(2) does."""
    context = _syscall(_SYS_FSOPEN, b"sysfs", _FSOPEN_CLOEXEC)
    try:
        _syscall(_SYS_FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0)
        return _syscall(_SYS_FSMOUNT, context, _FSMOUNT_CLOEXEC, 0)
    finally:
        os.close(context)


def _syscall(number: int, *args: int | bytes | None) -> int:
    result = int(_libc.syscall(number, *(ctypes.c_long(a) if isinstance(a, int) else a for a in args)))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
