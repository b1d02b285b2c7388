"""Which RDMA device belongs to which interface.

Hardware says it in sysfs: /sys/class/infiniband/DEV/device/net/IF, with dev_port for devices of several ports. sysfs
shows the namespace of the thread that mounted it, so the service looks at a mount of its own (:func:`scan_here`), and
hardware whose interfaces are elsewhere shows none. Devices without a bus device name theirs in ``parent`` (rxe) or in
the table of addresses (ports/P/gid_attrs/ndevs), whatever its namespace: there an address has to fit as well. Software
devices have no sysfs: their name is ``sv_IFNAME``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vmahybrid.verbs.library import SOFTWARE_PREFIX
from vmahybrid.xdp.probe import mount_sysfs

SYSFS = Path("/sys")


@dataclass(frozen=True, slots=True)
class RdmaLink:
    """A port (from 1) of an RDMA device and the interface that it shares."""

    device: str
    port: int
    ifname: str
    ifindex: int
    driver: str     # "" where there is no bus device (rxe, siw)


def scan(sysfs: Path = SYSFS) -> list[RdmaLink]:
    """Every port with an Ethernet interface that this sysfs shows, by device name. Empty without RDMA."""
    try:
        devices = sorted((sysfs / "class/infiniband").iterdir())
    except OSError:
        return []
    return [link for device in devices for link in _links(sysfs, device)]


def scan_here() -> list[RdmaLink]:
    """Of the calling thread's network namespace; of /sys where mounting is not allowed."""
    if not (SYSFS / "class/infiniband").is_dir():  # the class is the kernel's, the devices are the namespace's
        return []
    try:
        root = mount_sysfs()
    except OSError:
        return scan()
    try:
        return scan(Path(f"/proc/self/fd/{root}"))
    finally:
        os.close(root)


def names(sysfs: Path = SYSFS) -> list[str]:
    """Every RDMA device, those without an Ethernet interface too."""
    try:
        return sorted(path.name for path in (sysfs / "class/infiniband").iterdir())
    except OSError:
        return []


def device_of(ifname: str, listed: list[str], links: list[RdmaLink]) -> tuple[str, int] | None:
    """(device, port) of an interface, or None: the software device if libibverbs ``listed`` it, else sysfs's."""
    if SOFTWARE_PREFIX + ifname in listed:
        return SOFTWARE_PREFIX + ifname, 1
    return next(((link.device, link.port) for link in links if link.ifname == ifname), None)


def _links(sysfs: Path, device: Path) -> Iterator[RdmaLink]:
    driver = _driver(device)
    for net in sorted(_entries(device / "device/net")):
        port = _number(net / "dev_port") + 1
        ifindex = _number(net / "ifindex")
        if ifindex > 0 and (device / f"ports/{port}").is_dir():
            yield RdmaLink(device.name, port, net.name, ifindex, driver)
    if (device / "device").exists():
        return
    parent = _text(device / "parent")
    for port in sorted(int(path.name) for path in _entries(device / "ports") if path.name.isdigit()):
        name = parent or next(filter(None, (_text(path) for path in sorted(
            _entries(device / f"ports/{port}/gid_attrs/ndevs")))), "")
        ifindex = _number(sysfs / "class/net" / name / "ifindex") if name and "/" not in name else 0
        if ifindex > 0 and _eui64(_text(sysfs / "class/net" / name / "address")) in _addresses(device, port):
            yield RdmaLink(device.name, port, name, ifindex, driver)


def _addresses(device: Path, port: int) -> set[str]:
    """The lower halves of the port's GIDs, and the device's GUID."""
    gids = (_text(path) for path in _entries(device / f"ports/{port}/gids"))
    return {_text(device / "node_guid"), *(gid[20:] for gid in gids)}


def _eui64(mac: str) -> str:
    """The modified EUI-64 of a MAC (RFC 4291, appendix A) as sysfs writes halves of GIDs; "-" for what is no MAC."""
    try:
        a, b, c, d, e, f = bytes.fromhex(mac.replace(":", ""))
    except ValueError:
        return "-"
    return f"{a ^ 2:02x}{b:02x}:{c:02x}ff:fe{d:02x}:{e:02x}{f:02x}"


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:  # an unused address says EINVAL
        return ""


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.isascii() and text.isdigit() else 0


def _driver(device: Path) -> str:
    try:
        return os.path.basename(os.readlink(device / "device/driver"))
    except OSError:
        return ""
