"""Counters mean what research/libvma.md 1e says: exactly N events, and N is read; nothing else has moved."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from net.counter_lab import Peer, Program, Values, changes
from net.service_lab import until

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root
N, SIZE = 7, 100


class Lab:
    """One program for the tests of a module: each makes its own sockets."""

    def __init__(self, sandbox: Sandbox, service: Service, **variables: str) -> None:
        self.peer = Peer(sandbox)
        self.program = Program(sandbox, service, **variables)
        self.do = self.program.do
        sandbox.start(sandbox.a, ["sysctl", "-qw", "net.ipv4.icmp_ratelimit=0"]).result(5)

    def ring(self, name: str = "s", *options: str, **more: Any) -> tuple[str, int]:
        """A socket on a ring; where it is."""
        return self.program.address, self.program.on_ring(name, *options, **more)

    def close(self) -> None:
        self.program.close()
        self.peer.close()

    def counted(self, act: Callable[[], object], name: str = "s") -> Values:
        """The socket's counters by which ``act`` changed."""
        before = self.program.socket(name)["counters"]
        act()
        return changes(before, self.program.socket(name)["counters"], "counter")

    def iomux(self, kind: str) -> Values:
        return next(i["counters"] for i in self.program.stats()["iomux"] if i["kind"] == kind)

    def rings(self) -> Values:
        (ring,) = self.program.stats()["rings"]
        return dict(ring["stats"])


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Sandbox("test") as sandbox, Service(sandbox, [sandbox.b]) as service:
        made = Lab(sandbox, service, VMA_RX_POLL="2000", VMA_SELECT_POLL="200", VMA_CPU_USAGE_STATS="1")
        try:
            yield made
        finally:
            made.close()


# ---- sockets: what comes and goes by the ring


def test_received(lab: Lab) -> None:
    where = lab.ring()
    lab.peer.send(where, N, SIZE)
    assert lab.counted(lambda: lab.do(f"for _ in range({N}): s.recv(2048)")) == {
        "rx_packets": N, "rx_bytes": N * SIZE, "rx_poll_hit": N}


def test_received_into_a_buffer_that_is_too_small(lab: Lab) -> None:
    where = lab.ring()
    lab.peer.send(where, N, SIZE)
    assert lab.counted(lambda: lab.do(f"for _ in range({N}): s.recv(10)")) == {
        "rx_packets": N, "rx_bytes": N * 10, "rx_poll_hit": N}


def test_peeked(lab: Lab) -> None:
    where = lab.ring()
    lab.peer.send(where, 1, SIZE)
    assert lab.counted(lambda: lab.do(f"for _ in range({N}): s.recv(2048, socket.MSG_PEEK)")) == {"rx_poll_hit": N}
    assert lab.counted(lambda: lab.do("s.recv(2048)")) == {"rx_packets": 1, "rx_bytes": SIZE, "rx_poll_hit": 1}


def test_nothing_there(lab: Lab) -> None:
    lab.ring()
    lab.do("s.setblocking(False)")
    assert lab.counted(lambda: lab.do(f"[fails(s.recv, 10) for _ in range({N})]")) == {
        "rx_eagain": N, "rx_poll_miss": N}


def test_waited_in_vain(lab: Lab) -> None:
    """SO_RCVTIMEO: one miss per call, however often it wakes up."""
    lab.ring()
    lab.do("timeout(s, 20000)")
    assert lab.counted(lambda: lab.do(f"[fails(s.recv, 10) for _ in range({N})]")) == {
        "rx_eagain": N, "rx_poll_miss": N}


def test_sent(lab: Lab) -> None:
    lab.ring()
    sink = lab.peer.udp()
    assert lab.counted(lambda: lab.do(
        f"for _ in range({N}): s.sendto(b'x' * {SIZE}, {sink.getsockname()!r})")) == {
            "tx_packets": N, "tx_bytes": N * SIZE}
    for _ in range(N):
        assert len(sink.recv(2048)) == SIZE


def test_sent_in_one_call(lab: Lab) -> None:
    """sendmmsg(2): a count per datagram."""
    lab.ring()
    sink = lab.peer.udp()
    lab.do(f"s.connect({sink.getsockname()!r})")
    assert lab.counted(lambda: lab.do(f"sendmmsg(s, {N}, {SIZE})")) == {"tx_packets": N, "tx_bytes": N * SIZE}


def test_errors_of_the_peer(lab: Lab) -> None:
    """A closed port: each second send is told so."""
    lab.ring()
    closed = lab.peer.udp()
    there = closed.getsockname()
    lab.do(f"s.connect({there!r})")
    closed.close()
    lab.do("s.send(b'x')")  # resolved, and on the ring
    until(lambda: lab.do("fails(s.send, b'x')") == "Connection refused", 3)

    def act() -> None:
        for _ in range(N):
            assert lab.do("fails(s.send, b'x')") == ""
            time.sleep(0.02)
            assert lab.do("fails(s.send, b'x')") == "Connection refused"

    assert lab.counted(act) == {"tx_packets": N, "tx_bytes": N, "tx_errors": N}


def test_receiving_that_fails(lab: Lab) -> None:
    """EINTR of a handler that raises, and a bad address."""
    where = lab.ring()
    lab.do("""
def stop(*_):
    raise InterruptedError
signal.signal(signal.SIGALRM, stop)
def interrupted():
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    try:
        s.recv(10)
    except InterruptedError:
        return True
""")
    assert lab.counted(lambda: lab.do(f"[interrupted() for _ in range({N})]")) == {"rx_errors": N, "rx_poll_miss": N}
    lab.peer.send(where, 1, SIZE)
    assert lab.counted(lambda: lab.do("libc.recv(s.fileno(), None, 10, 0)")) == {
        "rx_errors": 1, "rx_packets": 1, "rx_bytes": SIZE, "rx_poll_hit": 1}


def test_no_room(lab: Lab) -> None:
    """What SO_RCVBUF has no room for is dropped; the rest waits, and is read."""
    where = lab.ring("s", "(socket.SOL_SOCKET, socket.SO_RCVBUF, 2304)")
    fits, sent = 0, 200
    before = lab.program.socket()["counters"]
    ring = lab.rings()
    lab.peer.send(where, sent, 1000)
    lab.do("time.sleep(0.05)\nselect.poll().poll(0)\n[select.select([s], [], [], 0) for _ in range(20)]")
    now = lab.program.socket()["counters"]
    fits = now["rx_ready_packets"]
    assert 0 < fits < sent
    assert changes(before, now, "counter") == {"rx_drop_packets": sent - fits, "rx_drop_bytes": (sent - fits) * 1000}
    assert changes(before, now, "gauge") == {
        "rx_ready_packets": fits, "rx_ready_bytes": fits * 1000, "rx_ready_packets_max": fits,
        "rx_ready_bytes_max": fits * 1000}
    assert lab.rings()["rx_dropped"] - ring["rx_dropped"] == sent - fits
    lab.do("s.setblocking(False)")
    assert lab.do("sum(fails(s.recv, 2048) == '' for _ in range(300))") == fits
    last = lab.program.socket()["counters"]
    assert changes(now, last, "gauge") == {"rx_ready_packets": 0, "rx_ready_bytes": 0}
    assert last["rx_packets"] - before["rx_packets"] == fits
    assert last["rx_limit"] == lab.do("s.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)")


# ---- sockets: what the kernel carries


def test_received_by_the_kernel(lab: Lab) -> None:
    """From the host itself: it never crosses the ring, though the socket is on one."""
    port = lab.program.on_ring(address="0.0.0.0")
    lab.do(f"near = udp('127.0.0.1')\n[near.sendto(b'x' * {SIZE}, ('127.0.0.1', {port})) for _ in range({N})]")
    assert lab.counted(lambda: lab.do(f"for _ in range({N}): s.recv(2048)")) == {
        "rx_os_packets": N, "rx_os_bytes": N * SIZE}


@pytest.fixture
def home(lab: Lab) -> Lab:
    """With a socket that only the kernel serves."""
    lab.ring()
    lab.do("s.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, 1)")
    assert lab.program.socket()["reason"] == "sockopt"
    return lab


def test_all_by_the_kernel(home: Lab) -> None:
    sink = home.peer.udp()
    assert home.counted(lambda: home.do(
        f"for _ in range({N}): s.sendto(b'x' * {SIZE}, {sink.getsockname()!r})")) == {
            "tx_os_packets": N, "tx_os_bytes": N * SIZE}
    where = (home.program.address, home.do("s.getsockname()[1]"))
    home.peer.send(where, N, SIZE)
    assert home.counted(lambda: home.do(f"for _ in range({N}): s.recv(2048)")) == {
        "rx_os_packets": N, "rx_os_bytes": N * SIZE}
    home.do("s.setblocking(False)")
    assert home.counted(lambda: home.do(f"[fails(s.recv, 10) for _ in range({N})]")) == {"rx_os_eagain": N}
    assert home.counted(lambda: home.do(f"[fails(s.send, b'x') for _ in range({N})]")) == {"tx_os_errors": N}


def test_errors_by_the_kernel(home: Lab) -> None:
    closed = home.peer.udp()
    home.do(f"s.connect({closed.getsockname()!r})\ntimeout(s, 1000000)")
    closed.close()

    def act() -> None:
        for _ in range(N):
            assert home.do("s.send(b'x')\nfails(s.recv, 10)") == "Connection refused"

    assert home.counted(act) == {"tx_os_packets": N, "tx_os_bytes": N, "rx_os_errors": N}


def test_sending_that_would_block(home: Lab) -> None:
    """Nobody answers ARP for this address: what is sent waits, and the send buffer is full soon."""
    nobody = home.program.address.rsplit(".", 1)[0] + ".99"
    home.do("s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2304)\ns.setblocking(False)")
    until(lambda: home.do(f"fails(s.sendto, b'x' * 500, ({nobody!r}, 9))"), 5)
    before = home.program.socket()["counters"]
    failed = home.do(f"sum(fails(s.sendto, b'x' * 500, ({nobody!r}, 9)) != '' for _ in range({N}))")
    assert failed > 0
    grown = changes(before, home.program.socket()["counters"], "counter")
    assert grown.pop("tx_os_eagain") == failed
    assert grown.get("tx_os_packets", 0) == N - failed


# ---- 64 bits


def test_beyond_32_bits(lab: Lab) -> None:
    where = lab.ring()
    lab.program.preset("s", (1 << 32) - 3)
    sink = lab.peer.udp()
    before = lab.program.socket()["counters"]
    assert set(before.values()) == {(1 << 32) - 3}
    lab.peer.send(where, N, SIZE)
    lab.do(f"for _ in range({N}): s.recv(2048)\nfor _ in range({N}): s.sendto(b'x' * {SIZE}, {sink.getsockname()!r})")
    after = lab.program.socket()["counters"]
    for name, grown in (("rx_packets", N), ("rx_bytes", N * SIZE), ("rx_poll_hit", N), ("tx_packets", N),
                        ("tx_bytes", N * SIZE)):
        assert after[name] == (1 << 32) - 3 + grown, name


# ---- select, poll, epoll

WAITS = {
    "select": "lambda fds, ms: select.select(fds, [], [], ms / 1000)[0]",
    "poll": "lambda fds, ms: polled(fds, ms)",
    "epoll": "lambda fds, ms: ep.poll(ms / 1000)",
}
DEFINE = """
r, w = os.pipe()
ep = select.epoll()
for fd in (s.fileno(), r):
    ep.register(fd, select.EPOLLIN)
def polled(fds, ms):
    p = select.poll()
    for fd in fds:
        p.register(fd, select.POLLIN)
    return p.poll(ms)
"""


@pytest.mark.parametrize("kind", WAITS)
def test_waits(lab: Lab, kind: str) -> None:
    where = lab.ring()
    lab.do(DEFINE + f"wait = {WAITS[kind]}")

    def counted(code: str) -> Values:
        before = lab.iomux(kind)
        lab.do(code)
        return changes(before, lab.iomux(kind), "counter")

    try:
        for ms in (0, 5):
            assert counted(f"for _ in range({N}): assert not wait([s, r], {ms})") == {"timeouts": N, "poll_miss": N}
        lab.peer.send(where, 1, SIZE)
        assert counted(f"for _ in range({N}): assert len(wait([s, r], 100)) == 1") == {"rx_ready": N, "poll_hit": N}
        lab.do("s.recv(2048)\nos.write(w, b'x')")
        assert counted(f"for _ in range({N}): assert len(wait([s, r], 100)) == 1") == {"os_rx_ready": N, "poll_hit": N}
        lab.peer.send(where, 1, SIZE)
        lab.do("time.sleep(0.05)\nwait([s, r], 0)")
        assert counted(f"for _ in range({N}): assert len(wait([s, r], 0)) == 2") == {
            "rx_ready": N, "os_rx_ready": N, "poll_hit": N}
    finally:
        lab.do("ep.close()\nos.close(r)\nos.close(w)\ns.close()")


def test_waits_that_fail(lab: Lab) -> None:
    """select(2) with a descriptor that is closed, epoll_wait(2) without room."""
    lab.ring()
    lab.do(DEFINE + "gone = os.dup(r)\nos.close(gone)")
    try:
        before = lab.iomux("select")
        lab.do(f"[fails(select.select, [s, gone], [], [], 0) for _ in range({N})]")
        assert changes(before, lab.iomux("select"), "counter") == {"errors": N, "poll_miss": N}
        before = lab.iomux("epoll")
        lab.do(f"[libc.epoll_wait(ep.fileno(), None, 0, 0) for _ in range({N})]")
        assert changes(before, lab.iomux("epoll"), "counter") == {"errors": N}
    finally:
        lab.do("ep.close()\nos.close(r)\nos.close(w)\ns.close()")


def test_waits_without_a_ring(home: Lab) -> None:
    """Sets of the kernel alone are counted too: no polling phase, os only."""
    home.do(DEFINE + "os.write(w, b'x')")
    try:
        for kind, wait in WAITS.items():
            home.do(f"wait = {wait}")
            before = home.iomux(kind)
            home.do(f"for _ in range({N}): assert len(wait([s, r], 100)) == 1")
            home.do("os.read(r, 1)")
            home.do(f"for _ in range({N}): assert not wait([s, r], 1)")
            home.do("os.write(w, b'x')")
            assert changes(before, home.iomux(kind), "counter") == {"os_rx_ready": N, "timeouts": N}, kind
    finally:
        home.do("ep.close()\nos.close(r)\nos.close(w)\ns.close()")
