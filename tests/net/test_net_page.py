"""The route and neighbour page against the kernel: two namespaces joined by a veth, a reader of the mapped page."""

import asyncio
import ctypes
import errno
import fcntl
import ipaddress
import mmap
import os
import resource
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from vmahybrid.contracts import addr_to_bytes, ffi, lib
from vmahybrid.net.netns import NetnsWorker
from vmahybrid.net.page import LinkInfo, NeighbourInfo, NetPage, slot_of
from vmahybrid.net.watcher import NetWatcher

pytestmark = pytest.mark.root


def ip(arguments: str, check: bool = True) -> str:
    return subprocess.run(["ip", *arguments.split()], check=check, capture_output=True, text=True).stdout


@pytest.fixture
def pair() -> Iterator[tuple[str, str]]:
    """a: 10.9.0.1/24 and fd09::1/64 on `vh`, b: .2; everything removed afterwards."""
    a, b = (f"vmh-t-{os.getpid()}-{side}" for side in "ab")
    try:
        for name in (a, b):
            ip(f"netns add {name}")
            ip(f"-n {name} link set lo up")
        ip(f"-n {a} link add vh type veth peer name vh netns {b}")
        for number, name in enumerate((a, b), 1):
            ip(f"-n {name} addr add 10.9.0.{number}/24 dev vh")
            ip(f"-n {name} addr add fd09::{number}/64 dev vh nodad")
            ip(f"-n {name} link set vh up")
        yield a, b
    finally:
        for name in (a, b):
            ip(f"netns del {name}", check=False)


class Reader:
    """Reads the page as a shim does: a read-only mapping of the passed fd, the sequence lock, the hash."""

    def __init__(self, fd: int, size: int) -> None:
        self._map = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
        self._buffer = ffi.from_buffer(self._map)
        self.page: Any = ffi.cast("struct vmh_net_page *", self._buffer)

    def copy(self) -> Any:
        while True:
            before = self.page.seq
            snapshot = ffi.new("struct vmh_net_page *")
            ffi.memmove(snapshot, self.page, ffi.sizeof(snapshot[0]))
            if before % 2 == 0 and self.page.seq == before:
                return snapshot

    def neighbour(self, ifindex: int, address: str) -> bytes | None:
        page, key = self.copy(), addr_to_bytes(address)
        slot = slot_of(ifindex, key)
        while page.neighs[slot].ifindex:
            entry = page.neighs[slot]
            if entry.ifindex == ifindex and bytes(entry.addr) == key:
                return bytes(entry.mac) if entry.valid else None
            slot = (slot + 1) % lib.VMH_NET_NEIGHS
        return None

    def route(self, destination: str) -> dict[str, Any]:
        """The decision: type, dev, via, src as `ip route get` names them."""
        page = self.copy()
        wanted = ipaddress.ip_address(destination)
        for route in page.routes[0 : page.nroutes]:
            if route.family != wanted.version:
                continue
            raw = bytes(route.dst)[12:] if route.family == 4 else bytes(route.dst)
            network = ipaddress.ip_network((raw, route.prefixlen), strict=False)
            if wanted in network:
                return self._decision(page, route)
        return {"type": "none"}

    @staticmethod
    def _decision(page: Any, route: Any) -> dict[str, Any]:
        names = {link.ifindex: ffi.string(link.name).decode() for link in page.links[0 : page.nlinks]}
        v4 = route.family == 4

        def text(raw: Any) -> str:
            data = bytes(raw)
            return "" if not any(data) else str(ipaddress.ip_address(data[12:] if v4 else data))

        source = text(route.prefsrc)
        gateway = text(route.gateway)
        for address in page.addrs[0 : page.naddrs] if not source and route.oif else ():
            if address.ifindex == route.oif and address.family == route.family:
                own = ipaddress.ip_interface((bytes(address.addr)[12:], address.prefixlen)) if v4 else None
                if own and gateway and ipaddress.ip_address(gateway) not in own.network:
                    continue
                source = text(address.addr)
                break
        kinds = {1: "unicast", 2: "local", 3: "broadcast", 5: "multicast", 255: "other"}
        return {
            "type": kinds[route.type],
            "dev": names.get(route.oif, ""),
            "via": gateway,
            "src": source,
            "complex": bool(route.flags & lib.VMH_ROUTE_F_COMPLEX),
            "metrics": bool(route.flags & lib.VMH_ROUTE_F_METRICS),
        }


def kernel_decision(namespace: str, destination: str) -> dict[str, Any]:
    result = subprocess.run(
        ["ip", "-n", namespace, "route", "get", destination], capture_output=True, text=True, check=False
    )
    if result.returncode:
        return {"type": "none"}
    words = result.stdout.split()
    kinds = {"local", "broadcast", "multicast", "unreachable", "blackhole", "prohibit"}
    kind = words[0] if words[0] in kinds else "unicast"
    found: dict[str, Any] = {key: words[words.index(key) + 1] for key in ("dev", "via", "src") if key in words}
    return {"type": kind} | found


@asynccontextmanager
async def watching(
    namespace: str, served: Callable[[LinkInfo], int] = lambda _: 0
) -> AsyncIterator[tuple[NetWatcher, Reader, list[set[str]]]]:
    changes: list[set[str]] = []
    worker = NetnsWorker.open_path(namespace)
    watcher = NetWatcher(worker, asyncio.get_running_loop(), served, changes.append)
    await watcher.start()
    try:
        yield watcher, Reader(watcher.page_fd, watcher.page_size), changes
    finally:
        await watcher.close()
        worker.close()


async def until(condition: Callable[[], bool], limit: float = 2.0) -> float:
    """Seconds until it holds."""
    begin = time.perf_counter()
    while not condition():
        assert time.perf_counter() - begin < limit, "did not happen"
        await asyncio.sleep(0.001)
    return time.perf_counter() - begin


ROUTES = """route add 10.20.0.0/16 via 10.9.0.2
route add 10.20.30.0/24 via 10.9.0.3 metric 50
route add 10.20.30.0/24 via 10.9.0.4 metric 10
route add 10.20.30.7/32 dev vh
route add default via 10.9.0.254
route add blackhole 10.66.0.0/16
route add unreachable 10.67.0.0/16
route add prohibit 10.68.0.0/16
route add 10.40.0.0/14 via 10.9.0.5 src 10.9.0.77
route add 10.50.0.0/16 via 10.9.0.5 mtu 1200
route add 10.51.0.0/16 nexthop via 10.9.0.5 nexthop via 10.9.0.6
route add 239.1.0.0/16 dev vh
route add fd20::/16 via fd09::2
route add fd20:1::/32 via fd09::3"""

_TEXT = """10.9.0.1 10.9.0.2 10.9.0.77 10.9.0.200 10.9.0.255 10.9.0.0 127.0.0.1 127.9.9.9 10.20.0.1 10.20.30.1
10.20.30.7 10.20.30.255 10.20.29.255 10.20.31.0 10.21.0.0 10.66.1.1 10.67.1.1 10.68.1.1 10.40.0.0 10.43.255.255
10.44.0.0 10.50.1.1 8.8.8.8 1.1.1.1 239.1.2.3 192.168.1.1 10.10.10.1 10.10.10.2 10.10.10.255
255.255.255.255 fd09::2 fd20::1 fd20:1::1 fd09::1"""
DESTINATIONS = _TEXT.split()


def test_decisions_are_the_kernels(pair: tuple[str, str]) -> None:
    a, _ = pair
    ip(f"-n {a} addr add 10.9.0.77/24 dev vh")
    ip(f"-n {a} addr add 10.10.10.1/24 dev vh")
    for line in ROUTES.splitlines():
        ip(f"-n {a} {line}")

    async def main() -> None:
        async with watching(a) as (watcher, reader, _):
            page = reader.copy()
            assert page.flags == 0
            assert page.generation == watcher.generation
            wrong = []
            for destination in DESTINATIONS:
                ours, kernel = reader.route(destination), kernel_decision(a, destination)
                special = kernel["type"] in ("unreachable", "blackhole", "prohibit", "none")
                if special:
                    same = ours["type"] in ("other", "none")
                elif kernel["type"] == "multicast":
                    same = ours["dev"] == kernel["dev"] and ours["src"] == kernel["src"]
                elif destination == "255.255.255.255":
                    same = kernel["type"] == "broadcast"    # the shim knows this address without the page
                else:
                    keys = ["type", "via"] if kernel["type"] == "local" else ["type", "dev", "via"]
                    keys += ["src"] if ":" not in destination and kernel["type"] == "unicast" else []
                    same = all(ours.get(key, "") == kernel.get(key, "") for key in keys)
                if not same:
                    wrong.append((destination, ours, kernel))
            assert wrong == []
            assert reader.route("10.51.1.1")["complex"]
            assert not reader.route("10.50.1.1")["complex"]
            (limited,) = [route for route in page.routes[0 : page.nroutes] if route.mtu]
            assert limited.mtu == 1200

    asyncio.run(main())


def test_what_only_the_kernel_can_send_is_left_to_it(pair: tuple[str, str]) -> None:
    """A source of a narrower scope than the route's is passed over; a locked MTU means datagrams without DF."""
    a, _ = pair
    ip(f"-n {a} addr add 10.30.0.1/24 scope link dev vh")
    ip(f"-n {a} addr del 10.9.0.1/24 dev vh")
    ip(f"-n {a} addr add 10.31.0.1/32 dev vh")
    ip(f"-n {a} route add 10.32.0.0/16 via 10.30.0.2")
    ip(f"-n {a} route add 10.33.0.0/16 dev vh")
    ip(f"-n {a} route add 10.34.0.0/16 via 10.30.0.2 src 10.31.0.1")
    ip(f"-n {a} route add 10.35.0.0/16 dev vh mtu lock 1400")
    ip(f"-n {a} route add 10.36.0.0/16 dev vh mtu 1400")

    async def main() -> None:
        async with watching(a) as (_watcher, reader, _):
            assert kernel_decision(a, "10.32.1.1")["src"] == "10.31.0.1"
            assert reader.route("10.32.1.1")["complex"]
            assert kernel_decision(a, "10.33.1.1")["src"] == "10.30.0.1"
            complex_ = [reader.route(f"10.{n}.1.1")["complex"] for n in (33, 34, 35, 36)]
            assert complex_ == [False, False, True, False]
            ip(f"-n {a} addr del 10.30.0.1/24 dev vh")
            ip(f"-n {a} addr add 10.30.0.1/24 dev vh")
            await until(lambda: reader.route("10.32.1.1").get("complex") is False)
            assert kernel_decision(a, "10.32.1.1")["src"] == "10.30.0.1"

    asyncio.run(main())


METRICS = {"advmss 1400": True, "window 4096": True, "initcwnd 3": True, "initrwnd 3": True, "rto_min 300ms": True,
           "quickack 1": True, "congctl reno": True, "features ecn": True, "cwnd lock 3": True, "ssthresh 9": True,
           "rtt 30ms": True, "rttvar 30ms": True, "reordering 9": True, "fastopen_no_cookie 1": True,
           "mtu 1400 initcwnd 3": True, "mtu 1400": False, "metric 7": False, "hoplimit 9": False}


@pytest.mark.parametrize("destination", ["10.37.0.0/16", "fd37::/32"])
def test_metrics_of_tcp_are_seen(pair: tuple[str, str], destination: str) -> None:
    a, _ = pair
    host = str(ipaddress.ip_network(destination)[9])

    async def main() -> None:
        async with watching(a) as (_watcher, reader, _):
            for words, expected in METRICS.items():
                ip(f"-n {a} route add {destination} dev vh {words}")
                await until(lambda: reader.route(host).get("type") == "unicast")
                assert reader.route(host)["metrics"] == expected, words
                ip(f"-n {a} route del {destination}")
                await until(lambda: reader.route(host)["type"] == "none")

    asyncio.run(main())


CHANGES: list[tuple[str, Callable[[Reader], Any]]] = [
    ("route add 10.77.0.0/16 via 10.9.0.9", lambda r: r.route("10.77.1.1").get("via") == "10.9.0.9"),
    ("route replace 10.77.0.0/16 via 10.9.0.10", lambda r: r.route("10.77.1.1").get("via") == "10.9.0.10"),
    ("route del 10.77.0.0/16", lambda r: r.route("10.77.1.1")["type"] == "none"),
    ("addr add 10.78.0.1/24 dev vh", lambda r: r.route("10.78.0.9").get("src") == "10.78.0.1"),
    ("addr del 10.78.0.1/24 dev vh", lambda r: r.route("10.78.0.9")["type"] == "none"),
    ("route add fd77::/16 via fd09::9", lambda r: r.route("fd77::1").get("via") == "fd09::9"),
    ("link set vh mtu 1400", lambda r: 1400 in [link.mtu for link in r.page.links[0 : r.page.nlinks]]),
    ("rule add from 10.9.0.1 table 100", lambda r: r.page.flags & lib.VMH_NET_F_POLICY),
    ("rule del from 10.9.0.1 table 100", lambda r: not r.page.flags & lib.VMH_NET_F_POLICY),
    ("route add 10.99.0.0/16 via 10.9.0.9 table default", lambda r: r.route("10.99.1.1").get("via") == "10.9.0.9"),
    ("route add default via 10.9.0.254", lambda r: r.page.flags & lib.VMH_NET_F_POLICY),  # hides table default
    ("route flush table default", lambda r: not r.page.flags & lib.VMH_NET_F_POLICY),
    ("link set vh down", lambda r: r.route("10.9.0.2")["type"] == "none"),      # announced by nobody but the link
    ("link set vh up", lambda r: r.route("10.9.0.2")["type"] == "unicast"),
]


def test_a_change_takes_effect_within_100_ms(pair: tuple[str, str]) -> None:
    a, _ = pair

    async def main() -> list[float]:
        taken = []
        async with watching(a) as (_, reader, changes):
            for command, holds in CHANGES:
                before = reader.page.generation
                assert not holds(reader), command
                await asyncio.to_thread(ip, f"-n {a} {command}")
                begin = time.perf_counter()
                try:
                    await until(lambda holds=holds: holds(reader))  # type: ignore[misc]
                except AssertionError:
                    raise AssertionError(f"not in the page: {command}") from None
                taken.append(time.perf_counter() - begin)
                assert reader.page.generation > before, command
            assert {"routes", "addresses", "links", "rules"} <= set().union(*changes)
        return taken

    taken = asyncio.run(main())
    print("milliseconds:", [round(1000 * seconds, 1) for seconds in taken])
    assert max(taken) < 0.1


def test_a_change_after_a_reading_that_waited_for_a_grant(pair: tuple[str, str]) -> None:
    """Grants are made in the same thread: what a reading waits for one is not its cost, and calls for no pause."""
    a, _ = pair

    async def main() -> float:
        worker = NetnsWorker.open_path(a)
        watcher = NetWatcher(worker, asyncio.get_running_loop(), lambda _: 0, lambda _: None)
        await watcher.start()
        try:
            reader = Reader(watcher.page_fd, watcher.page_size)
            grant = asyncio.create_task(worker.call_async(time.sleep, 0.2))
            await asyncio.sleep(0)
            await asyncio.to_thread(ip, f"-n {a} route add 10.77.0.0/16 via 10.9.0.9")
            await until(lambda: reader.route("10.77.1.1").get("via") == "10.9.0.9")
            assert grant.done()
            await asyncio.to_thread(ip, f"-n {a} route del 10.77.0.0/16")
            return await until(lambda: reader.route("10.77.1.1")["type"] == "none")
        finally:
            await watcher.close()
            worker.close()

    assert asyncio.run(main()) < 0.1


def test_routes_that_vanish_without_an_event(pair: tuple[str, str]) -> None:
    """A link that goes down takes its IPv4 routes with it silently; IPv6, which announces its own, is off here."""
    a, _ = pair
    ip(f"netns exec {a} sh -c echo${{IFS}}1>/proc/sys/net/ipv6/conf/vh/disable_ipv6")
    ip(f"-n {a} route add 10.77.0.0/16 via 10.9.0.9")

    async def main() -> None:
        async with watching(a) as (_, reader, _changes):
            assert reader.route("10.77.0.1")["type"] == "unicast"
            ip(f"-n {a} link set vh down")
            assert await until(lambda: reader.route("10.77.0.1")["type"] == "none") < 0.1

    asyncio.run(main())


def test_neighbour_is_resolved_kept_and_given_back(pair: tuple[str, str]) -> None:
    a, b = pair
    mac = ip(f"netns exec {b} cat /sys/class/net/vh/address").strip()

    async def main() -> None:
        async with watching(a) as (watcher, reader, _):
            (index,) = [link.ifindex for link in watcher.links() if link.name == "vh"]
            assert reader.neighbour(index, "10.9.0.2") is None
            begin = time.perf_counter()
            assert await watcher.resolve_neighbour(index, "10.9.0.2")
            print("resolved in ms:", 1000 * (time.perf_counter() - begin))
            assert (reader.neighbour(index, "10.9.0.2") or b"").hex(":") == mac
            # a solicitation needs a link-local source that has passed duplicate detection
            await until(lambda: "tentative" not in ip(f"-n {a} -6 addr") + ip(f"-n {b} -6 addr"), 5)
            assert await watcher.resolve_neighbour(index, addr_to_bytes("fd09::2"))
            assert (reader.neighbour(index, "fd09::2") or b"").hex(":") == mac
            assert "managed" in ip(f"-n {a} neigh show 10.9.0.2")
            assert not await watcher.resolve_neighbour(index, "10.9.0.99", timeout=0.2)
            assert "managed" not in ip(f"-n {a} neigh show 10.9.0.99")
            assert not await watcher.resolve_neighbour(9999, "10.9.0.2", timeout=0.2)
            # somebody's permanent entry is used as it is
            ip(f"-n {a} neigh add 10.9.0.50 lladdr 02:00:00:00:00:50 dev vh nud permanent")
            await until(lambda: reader.neighbour(index, "10.9.0.50") is not None)
            assert await watcher.resolve_neighbour(index, "10.9.0.50")
            assert "PERMANENT" in ip(f"-n {a} neigh show 10.9.0.50")
            ip(f"-n {a} neigh del 10.9.0.50 dev vh")
            await until(lambda: reader.neighbour(index, "10.9.0.50") is None)
        assert "managed" not in ip(f"-n {a} neigh show")
        assert "10.9.0.2" in ip(f"-n {a} neigh show")

    asyncio.run(main())


def test_generation_moves_with_the_mac_only(pair: tuple[str, str]) -> None:
    a, _ = pair

    async def main() -> None:
        async with watching(a) as (watcher, reader, _):
            (index,) = [link.ifindex for link in watcher.links() if link.name == "vh"]
            ip(f"-n {a} neigh add 10.9.0.60 lladdr 02:00:00:00:00:60 dev vh nud reachable")
            await until(lambda: reader.neighbour(index, "10.9.0.60") is not None)
            await asyncio.sleep(0.05)
            before = reader.page.generation
            ip(f"-n {a} neigh change 10.9.0.60 lladdr 02:00:00:00:00:60 dev vh nud stale")
            ip(f"-n {a} neigh change 10.9.0.60 lladdr 02:00:00:00:00:60 dev vh nud reachable")
            await asyncio.sleep(0.1)
            assert reader.page.generation == before
            ip(f"-n {a} neigh change 10.9.0.60 lladdr 02:00:00:00:00:61 dev vh nud reachable")
            await until(lambda: reader.page.generation > before)
            assert reader.neighbour(index, "10.9.0.60") == bytes.fromhex("020000000061")

    asyncio.run(main())


def test_lost_events_are_made_good(pair: tuple[str, str]) -> None:
    """The loop sleeps while the kernel throws events away (ENOBUFS)."""
    a, _ = pair

    async def main() -> None:
        async with watching(a) as (watcher, reader, _):
            assert watcher._events
            watcher._events._socket.setsockopt(1, 8, 2304)  # SO_RCVBUF: the least
            (index,) = [link.ifindex for link in watcher.links() if link.name == "vh"]
            batch = "".join(
                f"neigh add 10.9.0.{n} lladdr 02:00:00:00:00:{n:02x} dev vh nud permanent\n" for n in range(10, 90)
            )
            # while this blocks the loop, the socket overflows; the watcher then meets ENOBUFS by itself
            subprocess.run(["ip", "-n", a, "-batch", "-"], input=batch, text=True, check=True)  # noqa: ASYNC221
            await until(lambda: reader.neighbour(index, "10.9.0.89") is not None)
            assert all(reader.neighbour(index, f"10.9.0.{n}") for n in range(10, 90))

    asyncio.run(main())


def test_served_links(pair: tuple[str, str]) -> None:
    a, _ = pair
    reasons = {"vh": 12}

    async def main() -> None:
        async with watching(a, lambda link: reasons.get(link.name, 13)) as (watcher, reader, changes):
            links = {ffi.string(link.name): link for link in reader.page.links[0 : reader.page.nlinks]}
            assert links[b"vh"].reason == 12
            assert links[b"vh"].flags == lib.VMH_LINK_UP
            assert links[b"lo"].flags == lib.VMH_LINK_UP | lib.VMH_LINK_LOOPBACK
            reasons["vh"] = 0
            watcher.refresh_served()
            assert changes == [{"links"}]
            assert links[b"vh"].flags == lib.VMH_LINK_UP | lib.VMH_LINK_SERVED
            (link,) = [link for link in watcher.links() if link.name == "vh"]
            assert link.kind == "veth"
            assert bytes(links[b"vh"].mac) == link.mac
            assert watcher.addresses(link.ifindex)[0].address == addr_to_bytes("10.9.0.1")

    asyncio.run(main())


def test_idle_costs_nothing(pair: tuple[str, str]) -> None:
    async def main() -> float:
        async with watching(pair[0]):
            await asyncio.sleep(0.3)
            begin = resource.getrusage(resource.RUSAGE_SELF)
            await asyncio.sleep(2)
            end = resource.getrusage(resource.RUSAGE_SELF)
        return (end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime) / 2

    assert asyncio.run(main()) < 0.005  # of a core: what the issue allows the whole service


def test_a_shim_cannot_write_the_page() -> None:
    page = NetPage()
    fds = [page.fd]
    try:
        fds.append(os.open(f"/proc/self/fd/{page.fd}", os.O_RDWR))  # root may reopen it
        for fd in fds:
            for attempt in (
                lambda fd=fd: mmap.mmap(fd, page.size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE),
                lambda fd=fd: os.write(fd, b"x"),
                lambda fd=fd: os.ftruncate(fd, 0),
                lambda fd=fd: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL),
            ):
                with pytest.raises(OSError) as caught:  # noqa: PT011
                    attempt()
                assert caught.value.errno in (errno.EPERM, errno.EACCES, errno.EBADF, errno.EINVAL)
        # nor by mprotect of the mapping that it may have
        mapping = mmap.mmap(page.fd, page.size, mmap.MAP_SHARED, mmap.PROT_READ)
        buffer = ffi.from_buffer(mapping)
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(int(ffi.cast("uintptr_t", buffer)))
        assert libc.mprotect(address, ctypes.c_size_t(4096), mmap.PROT_READ | mmap.PROT_WRITE) == -1
    finally:
        os.close(fds[-1])
        page.close()


def test_closed_page_says_so() -> None:
    page = NetPage()
    reader = Reader(page.fd, page.size)
    assert reader.page.magic == lib.VMH_NET_MAGIC
    assert reader.page.size == page.size
    page.close()
    page.close()
    assert reader.page.flags == lib.VMH_NET_F_CLOSED


def test_full_tables_are_flagged_and_collisions_found() -> None:
    page = NetPage()
    reader = Reader(page.fd, page.size)
    room = int(lib.VMH_NET_NEIGHS) * 3 // 4

    def entries(count: int) -> list[NeighbourInfo]:
        texts = [f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}" for n in range(count)]
        return [NeighbourInfo(7, 4, addr_to_bytes(text), bytes([2, 0, 0, 0, 1, 1]), True) for text in texts]

    page.set_neighbours(entries(room))
    assert reader.page.flags == 0
    assert reader.page.nneighs == room
    assert all(reader.neighbour(7, f"10.0.{n >> 8}.{n & 255}") for n in range(0, room, 97))
    assert reader.neighbour(7, "10.200.0.1") is None
    page.set_neighbours(entries(room + 1))
    assert reader.page.flags == lib.VMH_NET_F_TRUNCATED
    page.set_neighbours(entries(2))
    assert reader.page.flags == 0
    page.close()


def test_readers_never_see_a_torn_table() -> None:
    """A reader in another process under constant writes: what passes the sequence lock is whole."""
    page = NetPage()
    links = [[LinkInfo(n, f"if{n}", mtu, bytes(6), True, False, 1) for n in range(1, 100)] for mtu in (1000, 2000)]
    page.set_links(links[0])
    child = os.fork()
    if not child:
        status = 1
        try:
            reader = Reader(page.fd, page.size)
            seen = set()
            end = time.monotonic() + 1.5
            while time.monotonic() < end:
                snapshot = reader.copy()
                mtus = {link.mtu for link in snapshot.links[0 : snapshot.nlinks]}
                if len(mtus) != 1:
                    os._exit(2)
                seen |= mtus
            status = 0 if seen == {1000, 2000} else 3
        finally:
            os._exit(status)
    turn = 0
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        turn += 1
        page.set_links(links[turn % 2])
        time.sleep(0.0002)
    assert os.waitstatus_to_exitcode(status) == 0
    page.close()
