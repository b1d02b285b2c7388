"""rtnetlink of one namespace: dumps, events and neighbour requests, decoded by pyroute2's message classes.

The sockets are plain ones: pyroute2 0.9's own are asyncio objects that live on a loop of their own, while events are
wanted on the service's loop and dumps in the namespace's worker thread. Message formats: rtnetlink(7),
linux/rtnetlink.h, linux/neighbour.h.
"""

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pyroute2.netlink.rtnl.marshal import MarshalRtnl

from vmahybrid.contracts import addr_to_bytes, lib
from vmahybrid.net.bond import Bond
from vmahybrid.net.page import ZERO, AddressInfo, LinkInfo, NeighbourInfo, RouteInfo

RTM_NEWLINK, RTM_DELLINK, RTM_GETLINK = 16, 17, 18
RTM_NEWADDR, RTM_DELADDR, RTM_GETADDR = 20, 21, 22
RTM_NEWROUTE, RTM_DELROUTE, RTM_GETROUTE = 24, 25, 26
RTM_NEWNEIGH, RTM_DELNEIGH, RTM_GETNEIGH = 28, 29, 30
RTM_NEWRULE, RTM_DELRULE, RTM_GETRULE = 32, 33, 34
RTM_NEWNEXTHOP, RTM_DELNEXTHOP = 104, 105

_HEADER = struct.Struct("=IHHII")
_NDMSG = struct.Struct("=BxHiHBB")
_ERROR, _DONE = 2, 3
_F_REQUEST, _F_ACK, _F_DUMP, _F_CREATE, _F_DUMP_INTR = 1, 4, 0x300, 0x400, 0x10
_SOL_NETLINK, _GET_STRICT_CHK, _CAP_ACK = 270, 12, 10
# link, neighbours, and per family addresses, routes and rules, and nexthop objects
_GROUPS = sum(1 << group - 1 for group in (1, 3, 5, 7, 8, 9, 11, 19, 32))

TABLE_DEFAULT, TABLE_MAIN, TABLE_LOCAL = 253, 254, 255
TABLES = (TABLE_LOCAL, TABLE_MAIN, TABLE_DEFAULT)
_DEFAULT_RULES = {
    4: {(0, TABLE_LOCAL), (32766, TABLE_MAIN), (32767, TABLE_DEFAULT)},
    6: {(0, TABLE_LOCAL), (32766, TABLE_MAIN)},
}
_FAMILIES = {socket.AF_INET: 4, socket.AF_INET6: 6}
_NUMBERS = {4: socket.AF_INET, 6: socket.AF_INET6}

NUD_VALID = 0x02 | 0x04 | 0x08 | 0x10 | 0x80    # reachable, stale, delay, probe, permanent; noarp has no MAC to use
NUD_PERMANENT = 0x80
_NTF_USE, _NDA_DST, _NDA_FLAGS_EXT, _NTF_EXT_MANAGED = 1, 1, 15, 1

_marshal = MarshalRtnl()


@dataclass(frozen=True, slots=True)
class NeighbourEvent:
    """A neighbour as the kernel has it now; ``gone`` where it was deleted."""

    info: NeighbourInfo
    permanent: bool
    gone: bool = False


def _mac(text: str | None) -> bytes:
    try:
        return bytes.fromhex((text or "").replace(":", ""))
    except ValueError:
        return b""


def split(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(type, flags, whole message) of each message of a datagram; a malformed rest is left out."""
    at = 0
    while at + _HEADER.size <= len(data):
        length, kind, flags, _, _ = _HEADER.unpack_from(data, at)
        if length < _HEADER.size or at + length > len(data):
            return
        yield kind, flags, data[at : at + length]
        at += length + 3 & ~3


def decode(message: bytes) -> Any:
    """One message as pyroute2's nlmsg."""
    return next(iter(_marshal.parse(message)))


class RequestSocket:
    """Dumps and changes. Blocking, one user at a time: the worker thread of the namespace."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)
        self._socket.bind((0, 0))
        self._socket.settimeout(5)
        self._socket.setsockopt(_SOL_NETLINK, _GET_STRICT_CHK, 1)   # 4.20: lets the kernel filter routes by table
        self._socket.setsockopt(_SOL_NETLINK, _CAP_ACK, 1)
        self._sequence = 0

    def close(self) -> None:
        self._socket.close()

    def _send(self, kind: int, flags: int, body: bytes) -> int:
        self._sequence += 1
        header = _HEADER.pack(_HEADER.size + len(body), kind, flags | _F_REQUEST, self._sequence, 0)
        self._socket.send(header + body)
        return self._sequence

    def _answers(self, sequence: int) -> Iterator[tuple[int, int, bytes]]:
        """Until the end; raises OSError for an error."""
        while True:
            for kind, flags, message in split(self._socket.recv(1 << 18)):
                if _HEADER.unpack_from(message)[3] != sequence:
                    continue    # of a request that timed out
                if kind in (_ERROR, _DONE):
                    code = struct.unpack_from("=i", message, _HEADER.size)[0] if len(message) >= 20 else 0
                    if code:
                        raise OSError(-code, os.strerror(-code))
                    return
                yield kind, flags, message

    def _dump(self, kind: int, body: bytes, limit: int = 1 << 16) -> list[Any]:
        """Every message, decoded; anew where the kernel says that the table changed meanwhile. What a kernel without
        IPv6, or a table that does not exist, has to say is: nothing."""
        for _attempt in range(5):
            found: list[bytes] = []
            interrupted = False
            try:
                for _kind, flags, message in self._answers(self._send(kind, _F_DUMP, body)):
                    interrupted |= bool(flags & _F_DUMP_INTR)
                    if len(found) < limit:
                        found.append(message)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.EAFNOSUPPORT, errno.EOPNOTSUPP):
                    raise
            if not interrupted:
                break
        return [decode(message) for message in found]

    def links(self) -> list[LinkInfo]:
        return sorted((link_info(m) for m in self._dump(RTM_GETLINK, bytes(16))), key=lambda link: link.ifindex)

    def addresses(self) -> list[AddressInfo]:
        """In the kernel's order: the first of a device is what it prefers as source."""
        found = [address_info(m) for m in self._dump(RTM_GETADDR, bytes(8))]
        return [address for address in found if address]

    def routes(self) -> tuple[list[RouteInfo], bool]:
        """Routes of the three tables, and whether only the kernel can tell which of them wins (see _ambiguous)."""
        routes: dict[int, list[RouteInfo]] = {}
        for family in _NUMBERS.values():
            for table in TABLES:
                body = struct.pack("=BBBBBBBBI", family, 0, 0, 0, table, 0, 0, 0, 0) + _attr_u32(15, table)  # RTA_TABLE
                messages = self._dump(RTM_GETROUTE, body, int(lib.VMH_NET_ROUTES) + 1)
                found = [route_info(m) for m in messages if not m["flags"] & _RTNH_F_DEAD]
                routes.setdefault(table, []).extend(found)
        return [route for table in TABLES for route in routes[table]], _ambiguous(routes)

    def neighbours(self) -> list[NeighbourEvent]:
        found = [neighbour_event(m) for m in self._dump(RTM_GETNEIGH, bytes(12))]
        return [entry for entry in found if entry]

    def has_policy(self) -> bool:
        """Are there ip rules other than the default ones?"""
        for family, number in _NUMBERS.items():
            rules = {rule_key(message) for message in self._dump(RTM_GETRULE, bytes([number]) + bytes(11))}
            if rules and rules != _DEFAULT_RULES[family]:
                return True
        return False

    def use_neighbour(self, ifindex: int, address: bytes, managed: bool) -> None:
        """Have the kernel resolve it now, and keep it fresh from now on (``managed``) or no longer. Raises OSError."""
        v4 = address[:12] == bytes(10) + b"\xff\xff"
        body = _NDMSG.pack(socket.AF_INET if v4 else socket.AF_INET6, 0, ifindex, 0, _NTF_USE, 0)
        body += _attr(_NDA_DST, address[12:] if v4 else address)
        if managed:
            body += _attr_u32(_NDA_FLAGS_EXT, _NTF_EXT_MANAGED)     # 5.16
        for _ in self._answers(self._send(RTM_NEWNEIGH, _F_ACK | _F_CREATE, body)):
            pass


class EventSocket:
    """The multicast groups of what the page shows. Nonblocking; for an event loop."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, 0)
        with contextlib.suppress(PermissionError):
            self._socket.setsockopt(socket.SOL_SOCKET, 33, 1 << 20)     # SO_RCVBUFFORCE
        self._socket.bind((0, _GROUPS))

    def fileno(self) -> int:
        return self._socket.fileno()

    def read(self) -> list[tuple[int, bytes]]:
        """(type, message) of what waits. Raises OSError(ENOBUFS) when events were lost."""
        found: list[tuple[int, bytes]] = []
        for _ in range(64):     # then the loop gets its turn
            try:
                found += [(kind, message) for kind, _, message in split(self._socket.recv(1 << 16))]
            except BlockingIOError:
                break
        return found

    def close(self) -> None:
        self._socket.close()


def _attr(kind: int, data: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(data), kind) + data.ljust(len(data) + 3 & ~3, b"\0")


def _attr_u32(kind: int, value: int) -> bytes:
    return _attr(kind, struct.pack("=I", value))


_RTNH_F_DEAD = 1
_LOCKED_MTU = 1 << 2    # RTAX_MTU
_NOT_OF_TCP = {"RTAX_MTU", "RTAX_HOPLIMIT", "RTAX_LOCK"}    # of the metrics; the others are TCP's, or unknown
_ROUTE_TYPES = {
    1: lib.VMH_ROUTE_UNICAST,
    2: lib.VMH_ROUTE_LOCAL,
    3: lib.VMH_ROUTE_BROADCAST,
    5: lib.VMH_ROUTE_MULTICAST,
}
_COMPLEX_ATTRS = (
    "RTA_MULTIPATH", "RTA_ENCAP", "RTA_ENCAP_TYPE", "RTA_NH_ID", "RTA_VIA", "RTA_SRC", "RTA_FLOW", "RTA_IIF",
)  # fmt: skip


def link_info(message: Any) -> LinkInfo:
    info = message.get_attr("IFLA_LINKINFO")
    kind = (info.get_attr("IFLA_INFO_KIND") or "") if info else ""
    data = info.get_attr("IFLA_INFO_DATA") if kind == "bond" else None
    return LinkInfo(
        ifindex=message["index"],
        name=message.get_attr("IFLA_IFNAME") or "",
        mtu=message.get_attr("IFLA_MTU") or 0,
        mac=_mac(message.get_attr("IFLA_ADDRESS")),
        up=message["flags"] & 0x10001 == 0x10001,       # IFF_UP, IFF_LOWER_UP
        loopback=bool(message["flags"] & 8),
        arphrd=message["ifi_type"],
        kind=kind,
        master=message.get_attr("IFLA_MASTER") or 0,
        # of a device in another namespace the number means nothing here
        lower=0 if message.get_attr("IFLA_LINK_NETNSID") is not None else message.get_attr("IFLA_LINK") or 0,
        bond=Bond.of(data) if data is not None else None,
    )


def address_info(message: Any) -> AddressInfo | None:
    family = _FAMILIES.get(message["family"])
    # On point-to-point links ADDRESS is the peer; LOCAL is ours wherever it exists.
    text = message.get_attr("IFA_LOCAL") or message.get_attr("IFA_ADDRESS")
    flags = message.get_attr("IFA_FLAGS") or message["flags"]
    if family is None or not text or (family == 6 and flags & 0x48):    # tentative, or failed duplicate detection
        return None
    broadcast = message.get_attr("IFA_BROADCAST")
    return AddressInfo(
        message["index"], family, message["prefixlen"], addr_to_bytes(text),
        addr_to_bytes(broadcast) if broadcast else ZERO, bool(flags & 1), message["scope"],
    )  # fmt: skip


def route_info(message: Any) -> RouteInfo:
    family = _FAMILIES[message["family"]]
    metrics = message.get_attr("RTA_METRICS")
    complex_ = bool(message["tos"] or message["src_len"]) or any(message.get_attr(name) for name in _COMPLEX_ATTRS)
    dst, gateway, prefsrc = (message.get_attr(name) for name in ("RTA_DST", "RTA_GATEWAY", "RTA_PREFSRC"))
    unspecified = "0.0.0.0" if family == 4 else "::"
    if metrics:     # the route sets the TTL; datagrams without DF
        complex_ |= bool(metrics.get_attr("RTAX_HOPLIMIT") or (metrics.get_attr("RTAX_LOCK") or 0) & _LOCKED_MTU)
    return RouteInfo(
        family=family,
        prefixlen=message["dst_len"],
        type=_ROUTE_TYPES.get(message["type"], lib.VMH_ROUTE_OTHER),
        complex=complex_,
        oif=message.get_attr("RTA_OIF") or 0,
        metric=message.get_attr("RTA_PRIORITY") or 0,
        mtu=(metrics.get_attr("RTAX_MTU") or 0) if metrics else 0,
        dst=addr_to_bytes(dst or unspecified),
        gateway=addr_to_bytes(gateway) if gateway else ZERO,
        prefsrc=addr_to_bytes(prefsrc) if prefsrc else ZERO,
        scope=message["scope"],
        metrics=bool(metrics) and any(name not in _NOT_OF_TCP for name, _ in metrics["attrs"]),
    )


def without_source(routes: list[RouteInfo], addresses: list[AddressInfo]) -> list[RouteInfo]:
    """Complex are those for which the kernel passes over an address of their device: its scope is narrower than the
    route's (inet_select_addr; a larger number is narrower)."""
    narrowest: dict[int, int] = {}
    for address in addresses:
        if address.family == 4:
            narrowest[address.ifindex] = max(address.scope, narrowest.get(address.ifindex, 0))
    return [
        replace(route, complex=True)
        if route.family == 4 and route.prefsrc == ZERO and narrowest.get(route.oif, 0) > route.scope else route
        for route in routes
    ]  # fmt: skip


def _covers(outer: RouteInfo, inner: RouteInfo) -> bool:
    if outer.family != inner.family or outer.prefixlen >= inner.prefixlen:
        return False
    shift = (32 if outer.family == 4 else 128) - outer.prefixlen
    return int.from_bytes(outer.dst) >> shift == int.from_bytes(inner.dst) >> shift


def _ambiguous(routes: dict[int, list[RouteInfo]]) -> bool:
    """The page sorts all tables together by prefix; the kernel asks local, main, default one after the other. That
    gives the same unless an earlier table has a shorter prefix that covers a longer one of a later table."""
    earlier: list[RouteInfo] = []
    for table in TABLES:
        wide = [route for route in earlier if route.prefixlen < (32 if route.family == 4 else 128)]
        if any(_covers(outer, inner) for inner in routes[table] for outer in wide):
            return True
        earlier += routes[table]
        if table == TABLE_MAIN and not routes[TABLE_DEFAULT]:
            break
    return False


def neighbour_event(message: Any) -> NeighbourEvent | None:
    family = _FAMILIES.get(message["family"])
    text = message.get_attr("NDA_DST")
    if family is None or not text or message["flags"] & 8:     # NTF_PROXY: not a neighbour
        return None
    mac = _mac(message.get_attr("NDA_LLADDR"))
    valid = bool(message["state"] & NUD_VALID) and len(mac) == 6
    info = NeighbourInfo(message["ifindex"], family, addr_to_bytes(text), mac, valid)
    gone = message["header"]["type"] == RTM_DELNEIGH
    return NeighbourEvent(info, bool(message["state"] & NUD_PERMANENT), gone)


def rule_key(message: Any) -> tuple[int, int, *tuple[str, ...]]:
    """(priority, table) of a rule that matches everything; anything else it says makes the key longer."""
    table = message.get_attr("FRA_TABLE") or message["table"]
    plain = {"FRA_TABLE", "FRA_PRIORITY", "FRA_SUPPRESS_PREFIXLEN", "FRA_PROTOCOL"}
    extra = [name for name, _ in message["attrs"] if name not in plain]
    if message.get_attr("FRA_SUPPRESS_PREFIXLEN") not in (None, 0xFFFFFFFF, -1):
        extra.append("suppress")
    extra += [key for key in ("src_len", "dst_len", "tos") if message[key]]
    if message["action"] != 1:      # FR_ACT_TO_TBL
        extra.append("action")
    return (message.get_attr("FRA_PRIORITY") or 0, table, *extra)
