"""The reader of statistics pages: every field, every lie, and random bytes."""

import os
import re
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vmahybrid._contracts import ffi, lib
from vmahybrid.config.rule import parse_endpoint
from vmahybrid.net.tcpask import Names
from vmahybrid.stats import counters, orders
from vmahybrid.stats.page import (
    HEADER_SIZE,
    OPEN_SIZE,
    SOCKET_SIZE,
    PageError,
    StatsPage,
    decode_bytes,
    open_connections,
    read_page,
)
from vmahybrid.stats.sockopts import option_name

HEADER = Path(__file__).parents[2] / "vmahybrid" / "contracts" / "stats_page.h"


def mapped(text: str) -> bytes:
    return bytes(10) + b"\xff\xff" + socket.inet_aton(text)


def page_bytes(nsocks: int = 2, fill: Callable[[Any], None] = lambda _page: None) -> bytes:
    size = HEADER_SIZE + nsocks * SOCKET_SIZE
    buffer = ffi.new("char[]", size)
    page = ffi.cast("struct vmh_stats_page *", buffer)
    page.magic, page.version, page.size = lib.VMH_STATS_MAGIC, lib.VMH_STATS_VERSION, size
    page.pid, page.nsocks, page.sock_size = 4711, nsocks, SOCKET_SIZE
    page.comm = b"sockperf"
    fill(page)
    return bytes(ffi.buffer(buffer, size))


def fill_socket(page: Any) -> None:
    page.state, page.session, page.started_ns, page.socks_over, page.calls_home = 1, 7, 1_500_000_000, 3, 5
    page.log_level, page.log_details = 0xFFFFFFFF, 2
    slot = page.socks[1]
    slot.used, slot.fd, slot.inode, slot.proto, slot.family = 1, 14, 733679757, socket.IPPROTO_UDP, 4
    slot.offloaded = slot.rx_offloaded = slot.blocking = slot.mc_loop = 1
    slot.reason, slot.reason_detail = 29, (socket.SOL_SOCKET << 16) | socket.SO_MARK
    slot.local_port, slot.local_addr = socket.htons(11111), mapped("10.0.0.1")
    slot.remote_port, slot.remote_addr = socket.htons(4242), mapped("10.0.0.2")
    slot.mc_if, slot.ngroups = mapped("10.77.1.1"), 200
    slot.groups[0] = int.from_bytes(socket.inet_aton("224.4.1.3"), sys.byteorder)
    slot.flow_id, slot.ring_id, slot.thread_rx, slot.thread_tx = 9, 2, 1234, 1235
    slot.tx_os_reason = 27
    for number, counter in enumerate(counters.SOCKET):
        setattr(slot, counter.name, (1 << 40) + number)
    page.select.rx_ready = 30372
    page.epoll[3].used, page.epoll[3].epfd, page.epoll[3].poll_hit = 1, 8, 2
    ring = page.rings[4]
    ring.used, ring.ring_id, ring.ifindex, ring.ifname = 1, 2, 6, b"veth0"
    ring.kind, ring.xdp_mode, ring.flags = lib.VMH_RING_VETH, lib.VMH_XDP_NATIVE, lib.VMH_RING_F_ZEROCOPY
    ring.rx_packets, ring.queue_len = 12, 3


@pytest.mark.parametrize(("struct", "table"), [
    ("sock", counters.SOCKET), ("ring", counters.RING), ("iomux", counters.IOMUX),
])  # fmt: skip
def test_counter_tables_are_the_members_of_the_header(struct: str, table: tuple[counters.Counter, ...]) -> None:
    body = re.search(rf"struct vmh_{struct}_stats \{{(.*?)\n\}};", HEADER.read_text(), re.S)
    assert body is not None
    members = [n.strip() for m in re.findall(r"unsigned long long ([^;]+);", body[1]) for n in m.split(",")]
    assert [m for m in members if m != "inode"] == [c.name for c in table]


@pytest.mark.parametrize(("family", "address", "shown"), [
    (4, mapped("10.0.0.1"), "10.0.0.1:80"),
    (6, mapped("10.0.0.1"), "[::ffff:10.0.0.1]:80"),
    (6, socket.inet_pton(socket.AF_INET6, "fe80::1"), "[fe80::1]:80"),
    (6, bytes(16), "[::]:80"),
])  # fmt: skip
def test_names_are_those_of_ss(family: int, address: bytes, shown: str) -> None:
    """And what the service makes of them is the address that it was."""
    def fill(page: Any) -> None:
        fill_socket(page)
        page.socks[1].family, page.socks[1].local_addr, page.socks[1].local_port = family, address, socket.htons(80)

    (view,) = decode_bytes(page_bytes(fill=fill)).sockets
    assert view.local == shown
    assert parse_endpoint("local", view.local) == (address, 80)


def test_every_field_of_a_page() -> None:
    page = decode_bytes(page_bytes(fill=fill_socket))
    assert (page.pid, page.comm, page.connected, page.session, page.started) == (4711, "sockperf", True, 7, 1.5)
    assert (page.sockets_over, page.homecomings, page.log_level, page.log_details) == (3, 5, -1, 2)
    (sock,) = page.sockets
    assert (sock.socket_id, sock.fd, sock.inode, sock.proto, sock.state) == ("4711:14", 14, 733679757, "udp", "")
    assert (sock.offloaded, sock.rx_offloaded, sock.tx_offloaded) == (True, True, False)
    assert (sock.blocking, sock.mc_loop) == (True, True)
    assert (sock.local, sock.remote, sock.mc_if) == ("10.0.0.1:11111", "10.0.0.2:4242", "10.77.1.1")
    assert (sock.reason, sock.reason_detail) == ("sockopt", "SOL_SOCKET/SO_MARK")
    assert sock.reason_text
    assert sock.remedy
    assert (sock.flow_id, sock.ring_id, sock.thread_rx, sock.thread_tx) == (9, 2, 1234, 1235)
    assert sock.tx_os_reason == "mtu"
    assert len(sock.groups) == lib.VMH_STATS_GROUPS  # ngroups says 200: only the first ones are kept
    assert sock.groups[0] == "224.4.1.3"
    assert sock.counters == {c.name: (1 << 40) + n for n, c in enumerate(counters.SOCKET)}
    assert [(i.kind, i.epfd) for i in page.iomux] == [("poll", -1), ("select", -1), ("epoll", 8)]
    assert page.iomux[1].counters["rx_ready"] == 30372
    (ring,) = page.rings
    assert (ring.ring_id, ring.interface, ring.ifindex, ring.kind, ring.mode) == (2, "veth0", 6, "veth", "native")
    assert ring.zerocopy
    assert ring.stats["rx_packets"] == 12
    assert ring.stats["queue_len"] == 3


def test_unbound_sockets_and_other_families() -> None:
    def fill(page: Any) -> None:
        page.socks[0].used, page.socks[0].family, page.socks[0].proto = 1, 4, socket.IPPROTO_TCP
        page.socks[0].state = 4
        page.socks[1].used, page.socks[1].family, page.socks[1].proto, page.socks[1].state = 1, 6, 6, 200
        page.socks[1].local_port = socket.htons(53)

    four, six = decode_bytes(page_bytes(fill=fill)).sockets
    assert (four.proto, four.state, four.local, four.remote) == ("tcp", "ESTABLISHED", "0.0.0.0:*", "0.0.0.0:*")
    assert (six.state, six.local, six.remote) == ("200", "[::]:53", "[::]:*")


def test_the_pid_of_the_peer_wins_over_the_claimed_one() -> None:
    assert decode_bytes(page_bytes(fill=fill_socket), pid=99).sockets[0].socket_id == "99:14"


def test_text_is_harmless() -> None:
    def fill(page: Any) -> None:
        page.comm = b"\x1b[31m\nx\xff" + b"y" * 8  # 16 bytes, no NUL

    assert decode_bytes(page_bytes(fill=fill)).comm == "?[31m?x\ufffdyyyyyyyy"


def test_a_file_that_shrank_has_fewer_sockets() -> None:
    data = page_bytes(nsocks=2, fill=fill_socket)
    assert len(decode_bytes(data).sockets) == 1
    assert decode_bytes(data[: -SOCKET_SIZE // 2]).sockets == []  # the second slot, the used one, is cut
    assert decode_bytes(data[:HEADER_SIZE]).sockets == []


@pytest.mark.parametrize(("field", "value", "token"), [
    ("magic", 1, "magic 0x00000001"),
    ("version", 2, "version 2"),
    ("sock_size", 8, "sock_size 8"),
    ("sock_size", 0, "sock_size 0"),
    ("nsocks", 0xFFFFFFFF, "nsocks 4294967295"),
    ("nsocks", 1025, "nsocks 1025"),
])  # fmt: skip
def test_lies_are_named(field: str, value: int, token: str) -> None:
    with pytest.raises(PageError, match=re.escape(token)):
        decode_bytes(page_bytes(fill=lambda page: setattr(page, field, value)))


def test_read_from_a_file_and_from_a_short_one() -> None:
    with tempfile.TemporaryFile() as file:
        file.write(page_bytes(fill=fill_socket))
        file.flush()
        assert read_page(file.fileno()).sockets[0].fd == 14
        os.ftruncate(file.fileno(), 100)
        with pytest.raises(PageError, match="100 bytes long"):
            read_page(file.fileno())


def test_open_connections_and_such_of_a_short_file() -> None:
    names = ffi.new("struct vmh_open_name[]", 3)
    for place in (0, 2):
        names[place].used, names[place].local_port = 1, socket.htons(80)
        names[place].remote_port = socket.htons(4000 + place)
        names[place].local_addr, names[place].remote_addr = mapped("10.0.0.1"), mapped("10.0.0.2")
    with tempfile.TemporaryFile() as file:
        file.write(page_bytes() + bytes(ffi.buffer(names)))
        file.flush()
        assert open_connections(file.fileno()) == [
            Names(mapped("10.0.0.1"), 80, mapped("10.0.0.2"), 4000 + place) for place in (0, 2)
        ]
        os.ftruncate(file.fileno(), HEADER_SIZE + 2 * SOCKET_SIZE + 2 * OPEN_SIZE + 3)
        assert [names.rport for names in open_connections(file.fileno())] == [4000]
        os.ftruncate(file.fileno(), HEADER_SIZE)
        assert open_connections(file.fileno()) == []


def test_a_descriptor_that_cannot_be_read() -> None:
    fd = os.open("/", os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="directory"):
            read_page(fd)
    finally:
        os.close(fd)


def check(data: bytes) -> None:
    try:
        page = decode_bytes(data)
    except PageError:
        return
    assert isinstance(page, StatsPage)
    assert len(page.sockets) <= len(data) // SOCKET_SIZE


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=HEADER_SIZE + 3 * SOCKET_SIZE))
def test_random_bytes(data: bytes) -> None:
    check(data)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(8, HEADER_SIZE + 2 * SOCKET_SIZE - 1), st.integers(0, 255)), max_size=60),
       st.integers(0, HEADER_SIZE + 2 * SOCKET_SIZE))  # fmt: skip
def test_a_page_with_bytes_changed_and_cut(changes: list[tuple[int, int]], length: int) -> None:
    data = bytearray(page_bytes(fill=fill_socket))
    for at, value in changes:
        data[at] = value
    check(bytes(data[:length]))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 255))
def test_every_byte_the_same(value: int) -> None:
    head = bytes(page_bytes(nsocks=3))[:8]
    body = bytearray(head + bytes([value]) * (HEADER_SIZE + 3 * SOCKET_SIZE - 8))
    for field in ("nsocks", "sock_size"):
        at = ffi.offsetof("struct vmh_stats_page", field)
        body[at : at + 4] = (3 if field == "nsocks" else SOCKET_SIZE).to_bytes(4, "little")
    page = decode_bytes(bytes(body))
    assert len(page.sockets) == (3 if value else 0)


@pytest.mark.parametrize(("detail", "name"), [
    (0, ""), ((1 << 16) | 36, "SOL_SOCKET/SO_MARK"), ((17 << 16) | 103, "IPPROTO_UDP/UDP_SEGMENT"),
    (35, "IPPROTO_IP/IP_ADD_MEMBERSHIP"), ((1 << 16) | 999, "SOL_SOCKET/option 999"),
    ((270 << 16) | 1, "level 270/option 1"),
])  # fmt: skip
def test_option_names(detail: int, name: str) -> None:
    assert option_name(detail) == name


def test_zero(tmp_path: Path) -> None:
    """Counters alone; a high-water mark is what there is now, and what nobody counts in stays."""
    path = tmp_path / "page"
    path.write_bytes(page_bytes(fill=fill_socket))
    before = read(path)
    with path.open("r+b") as file:
        orders.zero(file.fileno())
    after = read(path)
    sock, was = after.sockets[0], before.sockets[0].counters
    gauges = ["rx_ready_packets", "rx_ready_bytes", "rx_limit", "tx_ready_bytes", "rx_zcopy_packets"]
    assert {name for name, value in sock.counters.items() if value} == {
        *gauges, "rx_ready_packets_max", "rx_ready_bytes_max"}
    assert all(sock.counters[name] == was[name] for name in gauges)
    assert sock.counters["rx_ready_bytes_max"] == was["rx_ready_bytes"]
    assert (sock.fd, sock.flow_id, sock.groups) == (14, 9, before.sockets[0].groups)
    assert not any(value for view in after.iomux for value in view.counters.values())
    assert after.rings[0].stats["rx_packets"] == 0 and after.rings[0].stats["queue_len"] == 3


def test_orders_are_for_pages_of_this_version_alone(tmp_path: Path) -> None:
    path = tmp_path / "page"
    for data in (b"", bytes(1 << 20), page_bytes()[:-1].replace(b"VMS1", b"VMS0")):
        path.write_bytes(data)
        with path.open("r+b") as file:
            for order in (orders.zero, orders.ask, lambda fd: orders.set_log(fd, 4, None),
                          lambda fd: orders.dump(fd, 0, 3)):  # fmt: skip
                with pytest.raises(PageError):
                    order(file.fileno())
        assert path.read_bytes() == data


def read(path: Path) -> StatsPage:
    with path.open("rb") as file:
        return read_page(file.fileno())
