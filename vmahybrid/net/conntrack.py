"""What the kernel's connection tracking knows of connections that move to rings. Source: nfnetlink_conntrack.h.

A ring sends and receives the names that the socket has. Where this host translates them (NAT) those are not the names
on the wire, and only the kernel can carry the connection. And of what a ring carries connection tracking sees nothing:
when the connection comes home its segments are far outside of the window that was last seen, and a firewall that drops
what is `ct state invalid`, or lets in what is `established` only, would drop them. So its entry is told to be liberal.

Nothing here loads a module: without connection tracking in the kernel there is nothing to ask.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from vmahybrid.contracts import addr_to_text
from vmahybrid.net.tcpask import Names

NETLINK_NETFILTER = 12
NFTABLES_GROUP = 1 << 6     # NFNLGRP_NFTABLES of linux/netfilter/nfnetlink.h, as a bit
_COUNT = Path("/proc/sys/net/netfilter/nf_conntrack_count")     # of the namespace of the thread
_NONE = (errno.ENOENT, errno.EINVAL, errno.EOPNOTSUPP)  # no such entry, or the kernel has no such subsystem
_LEGACY_TABLES = ("ip_tables_names", "ip6_tables_names")


def exists() -> bool:
    """Does the kernel track connections at all?"""
    return _COUNT.exists()


def entries() -> int:
    """How many connections this namespace has tracked; 0 also where the kernel tracks none."""
    try:
        return int(_COUNT.read_text())
    except (OSError, ValueError):
        return 0


def settle(names: Names) -> bool | None:
    """Before a connection leaves the kernel: is it translated? If not its entry follows no windows any more. None: it
    is not tracked, so nothing was done. In a thread of the namespace. Raises OSError."""
    from pyroute2.netlink.nfnetlink.nfctsocket import IPS_NAT_MASK

    found = _ask("get", names) if entries() else []
    if not found:
        return None
    if found[0].get_attr("CTA_STATUS") & IPS_NAT_MASK:
        return True
    _ask("set", names, protoinfo=_liberal())
    return False


def forget(names: Names) -> None:
    """A connection has ended, of which the kernel saw no end: its entry would stay for days. In a thread of the
    namespace. Raises OSError."""
    _ask("del", names)


def events() -> socket.socket | None:
    """Becomes readable when rules of nftables change; None without nftables. In a thread of the namespace."""
    try:
        sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, NETLINK_NETFILTER)
    except OSError:
        return None
    try:
        sock.bind((0, NFTABLES_GROUP))
    except OSError:
        sock.close()
        return None
    return sock


def translates() -> bool:
    """Are there rules in this namespace that translate addresses or ports? In a thread of it. Raises OSError."""
    if not exists():
        return False
    for name in _LEGACY_TABLES:
        with contextlib.suppress(OSError):
            if "nat" in Path("/proc/thread-self/net", name).read_text().split():
                return True
    return any(chain.get_attr("NFTA_CHAIN_TYPE") == "nat" and chain.get_attr("NFTA_CHAIN_USE")
               for chain in _nft_chains())


def _answer(ask: Callable[[], Iterable[Any]]) -> list[Any]:
    """Nothing where there is nothing to tell of; any other error is an OSError."""
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        return list(ask())
    except NetlinkError as error:
        if error.code in _NONE:
            return []
        raise OSError(error.code, str(error)) from error


def _ask(command: str, names: Names, **attributes: Any) -> list[Any]:
    """The answer; nothing if there is no such entry."""
    from pyroute2 import NFCTSocket
    from pyroute2.netlink.nfnetlink.nfctsocket import NFCTAttrTuple

    local, remote = addr_to_text(names.laddr), addr_to_text(names.raddr)
    family = socket.AF_INET6 if ":" in local else socket.AF_INET
    wanted = NFCTAttrTuple(family=family, saddr=local, daddr=remote, proto=socket.IPPROTO_TCP, sport=names.lport,
                           dport=names.rport)
    with NFCTSocket(nfgen_family=family) as netlink:
        return _answer(lambda: netlink.entry(command, tuple_orig=wanted, **attributes))


def _liberal() -> Any:
    """For both directions: no segment is out of the window."""
    from pyroute2.netlink.nfnetlink.nfctsocket import IP_CT_TCP_FLAG_BE_LIBERAL, NFCTAttr

    class Flags(NFCTAttr):  # type: ignore[misc]
        def attrs(self) -> list[Any]:
            flag = (IP_CT_TCP_FLAG_BE_LIBERAL, IP_CT_TCP_FLAG_BE_LIBERAL)   # value, mask
            return [["CTA_PROTOINFO_TCP", {"attrs": [["CTA_PROTOINFO_TCP_FLAGS_ORIGINAL", flag],
                                                     ["CTA_PROTOINFO_TCP_FLAGS_REPLY", flag]]}]]

    return Flags()


def _nft_chains() -> list[Any]:
    """Of all families."""
    from pyroute2 import NFTSocket
    from pyroute2.netlink.nfnetlink.nftsocket import NFT_MSG_GETCHAIN, nft_chain_msg

    with NFTSocket(nfgen_family=socket.AF_UNSPEC) as netlink:
        return _answer(lambda: netlink.request_get(nft_chain_msg(), NFT_MSG_GETCHAIN))
