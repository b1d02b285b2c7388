"""The route and neighbour page (contracts/net_page.h): a sealed memfd that the service writes and shims map read-only.

Every write happens between two increments of ``seq``. Readers need those increments ordered against the writes in
between. CPython runs each of these stores as one aligned machine store, in program order, and x86 keeps stores in
order, so nothing more is needed there. On machines with weaker order (arm64) a store by Python has no release
semantics; a system call does in practice (exception entry and return are context synchronising, and the membarrier
call below is a full barrier), so :meth:`NetPage._barrier` issues membarrier(2) between the phases. Writes are rare.
"""

import ctypes
import fcntl
import mmap
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vmahybrid.contracts import ffi, lib, size_of
from vmahybrid.net.bond import Bond

ZERO = bytes(16)
_TSO = platform.machine() in ("x86_64", "i686")
_SYS_MEMBARRIER = 283  # asm-generic (arm64, riscv)
_MEMBARRIER_GLOBAL = 1
F_SEAL_FUTURE_WRITE = 16  # linux/fcntl.h, not in Python 3.11
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class LinkInfo:
    """A network device. ``reason`` (reasons.def) says why rings may not be asked for here; 0: they may."""

    ifindex: int
    name: str
    mtu: int
    mac: bytes
    up: bool                # administratively up, with carrier
    loopback: bool
    arphrd: int             # ARPHRD_* of linux/if_arp.h; 1 is Ethernet
    kind: str = ""          # "veth", "bond", ...; "" for hardware
    master: int = 0         # ifindex of the bond, bridge or VRF it is part of
    lower: int = 0          # ifindex of the device under it (VLAN) or its peer (veth); 0: none in this namespace
    reason: int = 0
    bond: Bond | None = None  # of a bond

    @property
    def flags(self) -> int:
        served = lib.VMH_LINK_SERVED * (self.reason == 0)
        return int(lib.VMH_LINK_UP * self.up | lib.VMH_LINK_LOOPBACK * self.loopback
                   | lib.VMH_LINK_VLAN * (self.kind == "vlan") | served)


@dataclass(frozen=True, slots=True)
class AddressInfo:
    """An address of a device. Addresses are 16 bytes, IPv4 as ::ffff:a.b.c.d."""

    ifindex: int
    family: int             # 4 or 6
    prefixlen: int
    address: bytes
    broadcast: bytes = ZERO
    secondary: bool = False
    scope: int = 0          # RT_SCOPE_* of linux/rtnetlink.h


@dataclass(frozen=True, slots=True)
class RouteInfo:
    family: int
    prefixlen: int
    type: int               # VMH_ROUTE_*
    complex: bool
    oif: int
    metric: int
    mtu: int
    dst: bytes
    gateway: bytes
    prefsrc: bytes
    scope: int = 0
    metrics: bool = False   # of TCP, on which only the kernel acts


@dataclass(frozen=True, slots=True)
class NeighbourInfo:
    """``mac`` is usable where ``valid``; else the next hop is being resolved or unreachable."""

    ifindex: int
    family: int
    address: bytes
    mac: bytes
    valid: bool


def slot_of(ifindex: int, address: bytes) -> int:
    """Where the search for a neighbour begins (FNV-1a, net_page.h)."""
    value = 2166136261
    for byte in ifindex.to_bytes(4, sys.byteorder) + address:
        value = (value ^ byte) * 16777619 & 0xFFFFFFFF
    return value % int(lib.VMH_NET_NEIGHS)


class NetPage:
    """The page of one namespace. ``fd`` is read-only, for passing to shims; ``size`` in bytes.

    Each setter compares with what the page holds and writes, and moves ``generation``, only where something differs
    that could change a sending decision. One writer: the event loop of the service.
    """

    def __init__(self, name: str = "vmahybrid-net") -> None:
        """Raises OSError."""
        self.size = size_of("struct vmh_net_page")
        memfd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(memfd, self.size)
            self._map = mmap.mmap(memfd, self.size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            # FUTURE_WRITE: after our own mapping nobody, not even by reopening the fd through /proc, can make a
            # writable one. A read-only file description alone would not stop a reader of the same user.
            fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | F_SEAL_FUTURE_WRITE)
            fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
            self.fd = os.open(f"/proc/self/fd/{memfd}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(memfd)
        self._buffer = ffi.from_buffer(self._map)
        self._page: Any = ffi.cast("struct vmh_net_page *", self._buffer)
        self._links: list[LinkInfo] = []
        self._addresses: list[AddressInfo] = []
        self._routes: list[RouteInfo] = []
        self._neighbours: dict[tuple[int, bytes], NeighbourInfo] = {}
        self._policy = self._translates = False
        self._truncated: set[str] = set()
        self._closed = False
        page = self._page
        page.version, page.size, page.generation = lib.VMH_NET_VERSION, self.size, 1
        page.magic = lib.VMH_NET_MAGIC

    @property
    def generation(self) -> int:
        return int(self._page.generation)

    def _barrier(self) -> None:
        if not _TSO:
            _libc.syscall(_SYS_MEMBARRIER, _MEMBARRIER_GLOBAL, 0, 0)

    @contextmanager
    def _writing(self, decides: bool = True) -> Iterator[Any]:
        page = self._page
        page.seq = (page.seq + 1) & 0xFFFFFFFF
        self._barrier()
        try:
            yield page
            page.flags = self._flags()
            if decides:
                page.generation += 1
        finally:
            self._barrier()
            page.seq = (page.seq + 1) & 0xFFFFFFFF

    def _flags(self) -> int:
        flags = (lib.VMH_NET_F_POLICY * self._policy | lib.VMH_NET_F_CLOSED * self._closed
                 | lib.VMH_NET_F_NAT * self._translates)
        return int(flags | lib.VMH_NET_F_TRUNCATED * bool(self._truncated))

    def _fits(self, table: str, count: int, limit: int) -> int:
        (self._truncated.add if count > limit else self._truncated.discard)(table)
        return min(count, limit)

    def set_links(self, links: Sequence[LinkInfo]) -> bool:
        """True if anything changed; so with the other setters."""
        if (wanted := list(links)) == self._links:
            return False
        self._links = wanted
        with self._writing() as page:
            page.nlinks = count = self._fits("links", len(wanted), lib.VMH_NET_LINKS)
            for slot, link in zip(page.links[0:count], wanted, strict=False):
                slot.ifindex, slot.flags, slot.mtu, slot.reason = link.ifindex, link.flags, link.mtu, link.reason
                slot.mac = link.mac[:6].ljust(6, b"\0")
                slot.name = link.name.encode()[:15]
        return True

    def set_addresses(self, addresses: Sequence[AddressInfo]) -> bool:
        if (wanted := list(addresses)) == self._addresses:
            return False
        self._addresses = wanted
        with self._writing() as page:
            page.naddrs = count = self._fits("addresses", len(wanted), lib.VMH_NET_ADDRS)
            for slot, address in zip(page.addrs[0:count], wanted, strict=False):
                slot.ifindex, slot.family, slot.prefixlen = address.ifindex, address.family, address.prefixlen
                slot.addr, slot.broadcast = address.address, address.broadcast
        return True

    def set_routes(self, routes: Sequence[RouteInfo]) -> bool:
        """Sorts them: longest prefix first, then lowest metric, per family; otherwise the order given is kept."""
        wanted = sorted(routes, key=lambda route: (route.family, -route.prefixlen, route.metric))
        if wanted == self._routes:
            return False
        self._routes = wanted
        with self._writing() as page:
            page.nroutes = count = self._fits("routes", len(wanted), lib.VMH_NET_ROUTES)
            for slot, route in zip(page.routes[0:count], wanted, strict=False):
                slot.family, slot.prefixlen, slot.type = route.family, route.prefixlen, route.type
                slot.flags = lib.VMH_ROUTE_F_COMPLEX * route.complex | lib.VMH_ROUTE_F_METRICS * route.metrics
                slot.oif, slot.metric, slot.mtu = route.oif, route.metric, route.mtu
                slot.dst, slot.gateway, slot.prefsrc = route.dst, route.gateway, route.prefsrc
        return True

    def set_policy(self, policy: bool) -> bool:
        """``policy``: there are ip rules beyond the default three."""
        changed, self._policy = policy != self._policy, policy
        return self._write_flags(changed)

    def set_translates(self, translates: bool) -> bool:
        """``translates``: there are rules of NAT."""
        changed, self._translates = translates != self._translates, translates
        return self._write_flags(changed)

    def _write_flags(self, changed: bool) -> bool:
        if changed:
            with self._writing():
                pass
        return changed

    def set_neighbours(self, neighbours: Sequence[NeighbourInfo]) -> bool:
        """All of them anew."""
        wanted = {(entry.ifindex, entry.address): entry for entry in neighbours}
        if wanted == self._neighbours:
            return False
        self._neighbours = wanted
        self._rehash()
        return True

    def update_neighbours(self, changed: Sequence[NeighbourInfo], gone: Sequence[tuple[int, bytes]] = ()) -> bool:
        """Some of them. A new MAC or loss of validity moves ``generation``; an equal entry writes nothing."""
        merged = dict(self._neighbours)
        for key in gone:
            merged.pop(key, None)
        merged |= {(entry.ifindex, entry.address): entry for entry in changed}
        return self.set_neighbours(list(merged.values()))

    def _rehash(self) -> None:
        """The table written anew from its entries: rare enough (a MAC changed), and deletion needs no tombstones."""
        room = int(lib.VMH_NET_NEIGHS)
        # Never full: a free slot ends every search.
        count = self._fits("neighbours", len(self._neighbours), room * 3 // 4)
        table: dict[int, NeighbourInfo] = {}
        for entry in list(self._neighbours.values())[:count]:
            slot = slot_of(entry.ifindex, entry.address)
            while slot in table:
                slot = (slot + 1) % room
            table[slot] = entry
        image = ffi.new(f"struct vmh_net_neigh[{room}]")
        for slot, entry in table.items():
            image[slot].ifindex, image[slot].family, image[slot].valid = entry.ifindex, entry.family, entry.valid
            image[slot].mac, image[slot].addr = entry.mac[:6].ljust(6, b"\0"), entry.address
        with self._writing() as page:
            page.nneighs = count
            ffi.memmove(page.neighs, image, ffi.sizeof(image))

    def close(self) -> None:
        """Tell readers that nobody updates the page any more, and let it go. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with self._writing():
            pass
        os.close(self.fd)
        self._page = None
        ffi.release(self._buffer)
        self._map.close()
