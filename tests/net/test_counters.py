"""Counters mean what research/libvma.md 1e says: exactly N events, and N is read; nothing else has moved."""

from __future__ import annotations

import platform
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from net.counter_lab import REFUSED, Peer, Program, Values, changes
from net.service_lab import until, xdp_only

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service
from vmahybrid.stats.counters import IOMUX, RING, SOCKET

pytestmark = pytest.mark.root
N, SIZE = 7, 100


class Lab:
    """One program for the tests of a module: each makes its own sockets."""

    def __init__(self, sandbox: Sandbox, service: Service, **variables: str) -> None:
        self.peer = Peer(sandbox)
        self.program = Program(sandbox, service, **variables)
        self.do = self.program.do
        self.sandbox = sandbox
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


XDP = xdp_only("a QP has counters of its own, tested by test_verbs_params.py and test_verbs_ring.py")


@pytest.fixture(scope="module")
def lab(softverbs: bool) -> Iterator[Lab]:
    with Sandbox("test") as sandbox, Service(sandbox, [sandbox.b], softverbs=softverbs) as service:
        made = Lab(sandbox, service, VMA_RX_POLL="2000", VMA_SELECT_POLL="200", VMA_CPU_USAGE_STATS="1",
                   VMA_PROGRESS_ENGINE_INTERVAL="0")  # else the internal thread may be the one that takes a frame
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


@pytest.mark.parametrize(("call", "each"), [
    ("recv(s.fileno(), None, 0, 0)", 0),
    ("readv(s.fileno(), (ctypes.c_size_t * 4)(at, 10, 0, 0), 2)", 10),
    ("readv(s.fileno(), (ctypes.c_size_t * 4)(0, 0, at, 10), 2)", 10)])
def test_received_beside_an_empty_buffer(lab: Lab, call: str, each: int) -> None:
    """No byte would go to its address, which may be none, and none is counted."""
    where = lab.ring()
    lab.peer.send(where, N, SIZE)
    lab.do("room = ctypes.create_string_buffer(10); at = ctypes.addressof(room)")
    assert lab.counted(lambda: lab.do(f"for _ in range({N}): assert libc.{call} == {each}")) == {
        "rx_packets": N, "rx_poll_hit": N} | ({"rx_bytes": N * each} if each else {})


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
    warm = lab.peer.udp().getsockname()
    until(lambda: lab.do(f"s.sendto(b'x', {warm!r})") and lab.program.socket()["counters"]["tx_packets"], 5)
    assert lab.counted(lambda: lab.do(
        f"for _ in range({N}): s.sendto(b'x' * {SIZE}, {sink.getsockname()!r})")) == {
            "tx_packets": N, "tx_bytes": N * SIZE}
    for _ in range(N):
        assert len(sink.recv(2048)) == SIZE


def test_received_in_one_call(lab: Lab) -> None:
    """recvmmsg(2): a count per datagram; an eagain only where there is none at all."""
    where = lab.ring()
    lab.do("s.setblocking(False)")
    lab.peer.send(where, N, SIZE)
    lab.do("time.sleep(0.05)\nselect.select([s], [], [], 1)")
    assert lab.counted(lambda: lab.do(f"recvmmsg(s, {N + 2}, 2048)")) == {
        "rx_packets": N, "rx_bytes": N * SIZE, "rx_poll_hit": N}
    assert lab.counted(lambda: lab.do(f"recvmmsg(s, {N + 2}, 2048)")) == {"rx_eagain": 1, "rx_poll_miss": 1}


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
    assert lab.counted(lambda: lab.do("libc.recv(s.fileno(), None, 10, 0)")) == {"rx_errors": 1, "rx_poll_hit": 1}
    lab.peer.send(where, 1, SIZE)  # what comes after it is received again
    assert lab.counted(lambda: lab.do("s.recv(2048)")) == {"rx_packets": 1, "rx_bytes": SIZE, "rx_poll_hit": 1}


def test_receiving_that_fails_beside_a_ring(lab: Lab) -> None:
    """From the host itself, as in test_received_by_the_kernel."""
    port = lab.program.on_ring(address="0.0.0.0")
    lab.do(f"near = udp('127.0.0.1')\nnear.sendto(bytes({SIZE}), ('127.0.0.1', {port}))")
    assert lab.counted(lambda: lab.do("libc.recv(s.fileno(), None, 10, 0)")) == {"rx_os_errors": 1}


def test_receiving_that_fails_by_the_kernel(home: Lab) -> None:
    home.peer.send((home.program.address, home.do("s.getsockname()[1]")), 1, SIZE)
    assert home.counted(lambda: home.do("libc.recv(s.fileno(), None, 10, 0)")) == {"rx_os_errors": 1}


OF_UDP = {
    "sendto": ("'sendto', {0}, b'x', 1, 0, BAD, 16", True),
    "sendto, short": ("'sendto', {0}, b'x', 1, 0, bytes([2, 0]), 2", True),
    "recvmmsg in the past": ("'recvmmsg', {0}, ctypes.byref(Message()), 1, 0, (ctypes.c_long * 2)(-1, 0)", False),
}


@pytest.mark.parametrize("call", {**REFUSED, **OF_UDP})
def test_refused_calls(lab: Lab, call: str) -> None:
    """The kernel refuses them at the sight of their arguments; the socket stays on its ring."""
    lab.ring()
    lab.do(f"s.connect({lab.peer.udp().getsockname()!r})\ns.send(b'x')")
    until(lambda: lab.do("s.send(b'x')") and lab.program.socket()["tx_offloaded"], 5)
    code, sends = {**REFUSED, **OF_UDP}[call]
    found = lab.counted(lambda: lab.do(f"assert all(refused({code.format('s')}) for _ in range({N}))"))
    ours = call == "recvmmsg in the past"
    assert found == {"tx_os_errors" if sends else "rx_errors" if ours else "rx_os_errors": N}
    assert lab.program.socket()["rx_offloaded"]
    lab.do("s.close()")


def test_shut_for_reading(lab: Lab) -> None:
    """Zero bytes are its end then, and no datagram."""
    lab.ring()
    lab.do(f"s.connect({lab.peer.udp().getsockname()!r})\ns.shutdown(socket.SHUT_RD)")
    assert lab.counted(lambda: lab.do(f"assert [s.recv(10) for _ in range({N})] == [b''] * {N}")) == {}


def test_shut_for_reading_by_the_kernel(home: Lab) -> None:
    home.do(f"s.connect({home.peer.udp().getsockname()!r})\ns.shutdown(socket.SHUT_RD)")
    assert home.counted(lambda: home.do(f"assert [s.recv(10) for _ in range({N})] == [b''] * {N}")) == {}


def test_empty_datagrams(lab: Lab, home: Lab) -> None:
    lab.do("near = udp('127.0.0.1')\nfar = udp('127.0.0.1')")
    assert lab.counted(lambda: lab.do(
        f"for _ in range({N}): near.sendto(b'', far.getsockname()) or far.recv(10)"), "far") == {"rx_os_packets": N}
    home.peer.send((home.program.address, home.do("s.getsockname()[1]")), N, 0)
    assert home.counted(lambda: home.do(f"for _ in range({N}): s.recv(10)")) == {"rx_os_packets": N}


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
    assert last["rx_limit"] == max(lab.do("s.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)"), 65536), "RX_BYTES_MIN"


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


SENDS = {
    "select": "select.select([], [s], [], 0.1)[1]",
    "poll": "polled_out([s], 100)",
    "epoll": "out.poll(0.1)",
}
DEFINE_OUT = """
out = select.epoll()
out.register(s.fileno(), select.EPOLLOUT)
def polled_out(fds, ms):
    p = select.poll()
    p.register(fds[0], select.POLLOUT)
    return p.poll(ms)
"""


def ready_to_send(lab: Lab, expected: Values) -> None:
    lab.do(DEFINE_OUT)
    try:
        for kind, wait in SENDS.items():
            before = lab.iomux(kind)
            lab.do(f"for _ in range({N}): assert len({wait}) == 1")
            assert changes(before, lab.iomux(kind), "counter") == expected, kind
    finally:
        lab.do("out.close()\ns.close()")


def test_ready_to_send_is_not_received(lab: Lab) -> None:
    lab.ring()
    ready_to_send(lab, {"poll_hit": N})


def test_ready_to_send_without_a_ring(home: Lab) -> None:
    ready_to_send(home, {})


def test_ready_to_send_without_polling(small_lab: Callable[..., Lab]) -> None:
    """VMA_SELECT_POLL=0: the kernel's answer is that of a sleep."""
    lab = small_lab(VMA_SELECT_POLL="0")
    lab.ring()
    lab.do(DEFINE_OUT + "both = select.POLLIN | select.POLLOUT\np = select.poll()\np.register(s, both)\n"
           "out.modify(s.fileno(), both)")
    waits = {"select": "select.select([s], [s], [], 0.1)[1]", "poll": "p.poll(100)", "epoll": "out.poll(0.1)"}
    for kind, wait in waits.items():
        before = lab.iomux(kind)
        lab.do(f"for _ in range({N}): assert len({wait}) == 1")
        assert changes(before, lab.iomux(kind), "counter") == {"poll_miss": N}, kind


def test_waits_that_fail(lab: Lab) -> None:
    """select(2) with a descriptor that is closed, epoll_wait(2) without room or with a bad address, where something is
    ready: neither a hit nor a miss, and nothing that was ready."""
    where = lab.ring()
    lab.do(DEFINE + "gone = os.dup(r)\nos.close(gone)")
    try:
        before = lab.iomux("select")
        lab.do(f"[fails(select.select, [s, gone], [], [], 0) for _ in range({N})]")
        assert changes(before, lab.iomux("select"), "counter") == {"errors": N}
        before = lab.iomux("poll")
        lab.do(f"[libc.poll(None, 1, 0) for _ in range({N})]")
        assert changes(before, lab.iomux("poll"), "counter") == {"errors": N}
        before = lab.iomux("epoll")
        lab.do(f"[libc.epoll_wait(ep.fileno(), None, 0, 0) for _ in range({N})]")
        assert changes(before, lab.iomux("epoll"), "counter") == {"errors": N}
        lab.peer.send(where, 1, SIZE)
        assert lab.do("len(ep.poll(1))") == 1
        before = lab.iomux("epoll")
        lab.do(f"[libc.epoll_wait(ep.fileno(), None, 1, 0) for _ in range({N})]")
        assert lab.do("ctypes.get_errno()") in (0, 14)
        assert changes(before, lab.iomux("epoll"), "counter") == {"errors": N}
    finally:
        lab.do("ep.close()\nos.close(r)\nos.close(w)\ns.close()")


def interrupted_waits(lab: Lab, expected: Values) -> None:
    lab.do("""
def stop(*_):
    raise InterruptedError
signal.signal(signal.SIGALRM, stop)
p, ep = select.poll(), select.epoll()
for one in (p, ep):
    one.register(s.fileno(), select.POLLIN)
def interrupted(wait):
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    return fails(wait)
""")
    waits = {"select": "lambda: select.select([s], [], [], 5)", "poll": "lambda: p.poll(5000)",
             "epoll": "lambda: ep.poll(5)"}
    try:
        for kind, wait in waits.items():
            before = lab.iomux(kind)
            assert lab.do(f"[interrupted({wait}) for _ in range({N})]") == ["InterruptedError"] * N
            assert changes(before, lab.iomux(kind), "counter") == expected, kind
    finally:
        lab.do("ep.close()\ns.close()")


def test_waits_that_a_signal_ends(lab: Lab) -> None:
    """An error, and what was polled, was so in vain."""
    lab.ring()
    interrupted_waits(lab, {"errors": N, "poll_miss": N})


def test_waits_without_a_ring_that_a_signal_ends(home: Lab) -> None:
    interrupted_waits(home, {"errors": N})


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


def test_several_threads(lab: Lab) -> None:
    """None is lost when threads share a socket, or call select, poll and epoll at once; see vmh_alone."""
    where = lab.ring()
    threads, calls = 4, 3000
    lab.do(f"""
s.setblocking(False)
start = threading.Barrier({threads})
def hammer():
    s.sendto(b'x', {lab.peer.udp().getsockname()!r})
    fails(s.recv, 10)
    select.select([], [], [], 0)
    time.sleep(0.05)
    start.wait()
    for _ in range({calls}):
        fails(s.recv, 10)
        select.select([s], [], [], 0)
        select.select([], [], [], 0)
def together():
    all = [threading.Thread(target=hammer) for _ in range({threads})]
    [t.start() for t in all]
    [t.join() for t in all]
""")
    waits = lab.iomux("select")
    grown = lab.counted(lambda: lab.do("together()", 60))
    assert grown == {"tx_packets": threads, "tx_bytes": threads, "rx_eagain": threads * (calls + 1),
                     "rx_poll_miss": threads * (calls + 1)}
    assert changes(waits, lab.iomux("select"), "counter") == {
        "timeouts": threads * (2 * calls + 1), "poll_miss": threads * calls}
    assert where


# ---- rings, completion queues and buffer pools: one AF_XDP ring is all of them

HEADERS = 42


def grown(lab: Lab, act: Callable[[], object], kind: str = "counter") -> Values:
    before = lab.rings()
    act()
    return changes(before, lab.rings(), kind)


@XDP
def test_ring_receives(lab: Lab) -> None:
    where = lab.ring()

    def act() -> None:
        lab.peer.send(where, N, SIZE)
        lab.do(f"for _ in range({N}): s.recv(2048)")

    found = grown(lab, act)
    assert {"rx_packets": N, "rx_bytes": N * (SIZE + HEADERS)}.items() <= found.items()
    assert found.keys() <= {"rx_packets", "rx_bytes", "interrupts_requested", "interrupts_received"}


@XDP
def test_ring_sends(lab: Lab) -> None:
    """One wake-up of the kernel per call, also of sendmmsg."""
    lab.ring()
    sink = lab.peer.udp()
    lab.do(f"s.connect({sink.getsockname()!r})\ns.send(b'x')")
    assert grown(lab, lambda: lab.do(f"for _ in range({N}): s.send(b'x' * {SIZE})")) == {
        "tx_packets": N, "tx_bytes": N * (SIZE + HEADERS), "kicks": N}
    assert grown(lab, lambda: lab.do(f"sendmmsg(s, {N}, {SIZE})")) == {
        "tx_packets": N, "tx_bytes": N * (SIZE + HEADERS), "kicks": 1}
    sending = lab.rings()["pool_tx_free"]
    lab.do(f"for _ in range(100): s.send(b'x' * {SIZE})")
    assert 0 < lab.rings()["pool_tx_free"] <= sending + 16  # completions are looked at every 16 frames


@XDP
def test_ring_sleeps(lab: Lab) -> None:
    """Each receive call that finds nothing sleeps once; a datagram wakes it, a timeout does not."""
    where = lab.ring()
    lab.do("timeout(s, 30000)")
    assert grown(lab, lambda: lab.do(f"[fails(s.recv, 10) for _ in range({N})]")) == {"interrupts_requested": N}
    lab.do("timeout(s, 3000000)")

    def act() -> None:
        for _ in range(N):
            lab.program.tell("s.recv(2048)")
            time.sleep(0.1)
            lab.peer.send(where, 1, SIZE)
            lab.program.answer()

    assert grown(lab, act) == {"interrupts_requested": N, "interrupts_received": N, "rx_packets": N,
                               "rx_bytes": N * (SIZE + HEADERS)}


@XDP
def test_ring_drained(lab: Lab) -> None:
    """Most frames in one poll; where the frames are until they are read."""
    where = lab.ring()
    lab.program.api.call("POST", f"/v1/processes/{lab.program.pid}/zero")
    until(lambda: lab.rings()["drained_max"] == 0, 3)
    lab.do("select.select([s], [], [], 0)")     # what was put aside goes back
    frames = lab.rings()["pool_rx_free"]

    def act() -> None:
        lab.peer.send(where, N, SIZE)
        lab.do("time.sleep(0.1)\nselect.select([s], [], [], 0)")

    assert grown(lab, act, "gauge") == {"drained_max": N, "queue_len": N, "pool_rx_free": frames - N}
    found = grown(lab, lambda: lab.do(f"[s.recv(2048) for _ in range({N})]\nselect.select([s], [], [], 0)"), "gauge")
    assert found == {"queue_len": 0, "pool_rx_free": frames}


@XDP
def test_ring_frames_for_nobody(lab: Lab) -> None:
    """Malformed: a wrong sum of the IP header. Unwanted: their socket was closed."""
    where = lab.ring()
    net = lab.sandbox
    sender = lab.peer.raw(net.a.device)

    def frame(error: int) -> bytes:
        source, target = (bytes(map(int, text.split("."))) for text in (net.a.address, net.b.address))
        ip = b"\x45\0" + (20 + 8 + SIZE).to_bytes(2, "big") + b"\0\0\x40\0\x40\x11\0\0" + source + target
        total = sum(int.from_bytes(ip[at:at + 2], "big") for at in range(0, 20, 2))
        total = (total & 0xFFFF) + (total >> 16)
        ip = ip[:10] + (0xFFFF - total ^ error).to_bytes(2, "big") + ip[12:]
        udp = (9).to_bytes(2, "big") + where[1].to_bytes(2, "big") + (8 + SIZE).to_bytes(2, "big") + b"\0\0"
        macs = b"".join(bytes.fromhex(side.mac.replace(":", "")) for side in (net.b, net.a))
        return macs + b"\x08\0" + ip + udp + b"x" * SIZE

    def act() -> None:
        for error in (0, 4):
            for _ in range(N):
                sender.send(frame(error))
        lab.do("time.sleep(0.05)\nselect.select([s], [], [], 0)")

    assert grown(lab, act) == {"rx_packets": 2 * N, "rx_bytes": 2 * N * (SIZE + HEADERS), "rx_bad": N}
    lab.do(f"[s.recv(2048) for _ in range({N})]")

    where = lab.ring("gone")

    def stray() -> None:
        lab.peer.send(where, N, SIZE)
        lab.do("time.sleep(0.05)\ngone.close()\nselect.select([s], [], [], 0)")

    assert grown(lab, stray) == {"rx_packets": N, "rx_bytes": N * (SIZE + HEADERS), "rx_no_socket": N}


# ---- what runs full: a service that grants small rings


@pytest.fixture
def small_lab(tmp_path: Path) -> Iterator[Callable[..., Lab]]:
    """128 frames, all for one queue: without the switch there is no second one for bulk traffic."""
    file = tmp_path / "small.toml"
    file.write_text("[ring]\nframes = 128\nrx_size = 64\ntx_size = 64\n[bulk]\nswitch = false\n")
    with (Sandbox("test") as sandbox, ExitStack() as stack,
          Service(sandbox, [sandbox.b], arguments=["--config", str(file)]) as service):
        def make(**variables: str) -> Lab:
            made = Lab(sandbox, service, VMA_RX_POLL="2000", VMA_PROGRESS_ENGINE_INTERVAL="0", **variables)
            stack.callback(made.close)
            return made

        yield make
        stack.close()


def test_receive_frames_run_out(small_lab: Callable[..., Lab]) -> None:
    """Nobody looks at the ring: it has no frame left, and the kernel drops what comes. Whoever looks finds all that the
    ring had; a socket that is not read takes no more than three quarters of it, and loses none of the rest either."""
    small = small_lab(VMA_RX_BUFS="48")     # fewer than its queue has places
    where = small.ring("s", "(socket.SOL_SOCKET, 33, 1 << 24)")
    frames, sent = small.rings()["pool_rx_free"], 12 * 8
    for _ in range(12):
        small.peer.send(where, 8, SIZE)

    def look() -> tuple[dict[str, int], int]:
        small.do("[select.select([s], [], [], 0) for _ in range(4)]")
        (ring,) = small.program.stats()["rings"]
        return ring["stats"], ring["kernel"]["rx_fill_ring_empty_descs"]

    after, dropped = look()
    assert after["pool_rx_empty"] == 1  # one poll took the last frame
    assert (after["rx_packets"], dropped) == (frames, sent - frames)
    for _ in range(12):
        small.peer.send(where, 8, SIZE)
        after, dropped = look()
    assert (after["rx_packets"], dropped) == (frames + sent, sent - frames)
    assert (after["rx_dropped"], after["pool_rx_empty"]) == (0, 1)
    assert after["queue_len"] == frames - after["pool_rx_free"] <= frames * 3 // 4
    assert small.do(f"len([s.recv({SIZE} + 1) for _ in range({frames + sent})])") == frames + sent
    small.do("select.select([s], [], [], 0)")
    assert small.rings()["pool_rx_free"] >= frames - 1  # one is given back at leisure


# seccomp(2) says EAGAIN to sendto() without a buffer, the wake-up of a ring: the ring fills, and stays full. By libc's
# prctl() itself: the shim would leave its rings for a filter
STUCK = """
behind = ctypes.CDLL("libc.so.6", use_errno=True)
class Filter(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint)]
class Rules(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.POINTER(Filter))]
code = (Filter * 6)((0x20, 0, 0, 0), (0x15, 0, 3, SENDTO), (0x20, 0, 0, 32), (0x15, 0, 1, 0),
                    (0x06, 0, 0, 0x00050000 | 11), (0x06, 0, 0, 0x7fff0000))
assert behind.prctl(38, 1, 0, 0, 0) == 0 and behind.prctl(22, 2, ctypes.byref(Rules(6, code)), 0, 0) == 0
"""


@pytest.mark.parametrize("refuses", [False, True])
def test_send_ring_runs_full(small_lab: Callable[..., Lab], refuses: bool) -> None:
    """What the ring has no room for goes by the kernel, or is refused (VMA_TX_NONBLOCKED_EAGAINS); each counts once."""
    small = small_lab(VMA_TX_NONBLOCKED_EAGAINS=str(int(refuses)))
    small.ring()
    sink = small.peer.udp()
    small.do(f"s.connect({sink.getsockname()!r})\ns.setblocking(False)")
    until(lambda: small.do("s.send(b'x')") and small.program.socket()["counters"]["tx_packets"], 5)
    small.do(STUCK.replace("SENDTO", {"x86_64": "44", "aarch64": "206"}[platform.machine()]))
    sent = 200
    ring, sock = small.rings(), small.program.socket()["counters"]
    failed = small.do(f"sum(fails(s.send, b'x' * {SIZE}) != '' for _ in range({sent}))")
    rings, socks = (changes(ring, small.rings(), "counter"),
                    changes(sock, small.program.socket()["counters"], "counter"))
    full = rings["tx_full"]
    assert 0 < full < sent
    over = {"tx_eagain": full} if refuses else {"tx_os_packets": full, "tx_os_bytes": full * SIZE}
    assert failed == (full if refuses else 0)
    assert socks == {"tx_packets": sent - full, "tx_bytes": (sent - full) * SIZE} | over
    assert (small.program.socket()["tx_os_reason"] == "ring-full") is not refuses
    assert rings["pool_tx_empty"] == full
    assert (rings["tx_packets"], rings["tx_bytes"]) == (sent - full, (sent - full) * (SIZE + HEADERS))
    assert small.rings()["pool_tx_free"] == 0


def test_migrations_and_homecomings() -> None:
    """The service ends and comes back: the socket goes home, and then to another ring, both ways."""
    with Sandbox("test") as sandbox, Service(sandbox, [sandbox.b]) as service:
        lab = Lab(sandbox, service, VMA_RX_POLL="2000")
        try:
            lab.ring()
            sink = lab.peer.udp()
            lab.do(f"s.connect({sink.getsockname()!r})\ns.send(b'x')")
            until(lambda: lab.do("s.send(b'x')") and lab.program.socket()["counters"]["tx_packets"], 5)
            assert lab.program.socket()["ring_id"] == lab.program.stats()["rings"][0]["ring_id"]
            before, homecomings = lab.program.socket()["counters"], lab.program.stats()["process"]["homecomings"]
            for _ in range(2):
                service.program.stop(signal.SIGTERM, 5)
                service.start()
                until(lambda: lab.program.api.call("GET", f"/v1/stats/{lab.program.pid}")[0] == 200, 10)
                until(lambda: lab.program.socket()["rx_offloaded"], 10)
                lab.do("s.send(b'x')")
                until(lambda: lab.do("s.send(b'x')") and lab.program.socket()["tx_offloaded"], 5)
            now = lab.program.socket()["counters"]
            assert (now["rx_migrations"], now["tx_migrations"]) == (
                before["rx_migrations"] + 2, before["tx_migrations"] + 2)
            assert lab.program.stats()["process"]["homecomings"] == homecomings + 2
        finally:
            lab.close()


def test_sockets_without_a_slot() -> None:
    """VMA_STATS_FD_NUM: the others work, and are counted as sockets that have no counters."""
    with Sandbox("test") as sandbox, Service(sandbox, [sandbox.b]) as service:
        lab = Lab(sandbox, service, VMA_STATS_FD_NUM="3")
        try:
            lab.ring()
            lab.do(f"more = [udp({lab.program.address!r}) for _ in range({N})]")
            assert len(lab.program.stats()["sockets"]) == 3
            assert lab.program.stats()["process"]["sockets_over"] == N - 2
        finally:
            lab.close()


def test_polling_share(lab: Lab) -> None:
    """VMA_CPU_USAGE_STATS: of a second of calls that poll for 200 us and then sleep for 1.8 ms, about a tenth."""
    lab.ring()
    lab.do("end = time.monotonic() + 2.2\nwhile time.monotonic() < end: select.select([s], [], [], 0.002)")
    assert 4 <= lab.iomux("select")["polling_percent"] <= 25


def test_polling_share_of_each(lab: Lab) -> None:
    """Those that take turns have their own."""
    lab.ring()
    lab.do("ep, end = select.epoll(), time.monotonic() + 2.6\nep.register(s, 1)\n"
           "while time.monotonic() < end: ep.poll(0.001); select.select([s], [], [], 0.001)")
    shares = [lab.iomux(kind)["polling_percent"] for kind in ("select", "epoll")]
    assert all(3 <= share <= 15 for share in shares), shares


VERBS = "of rings on raw packet QPs: tests/net/test_verbs_ring.py, tests/unit/c/test_ring_verbs.c"
NOT_DRIVEN = {
    "tx_drops": "nothing that was accepted is dropped: the kernel sends what a ring has no room for",
    "tx_dummy": "seven of them: tests/net/test_parameters_act.py::test_dummy_sends",
    "rx_zcopy_packets": "programs have no way yet to borrow a datagram",
    **dict.fromkeys(("tx_ready_bytes", "retransmits", "tx_tcp_resent"), "of TCP: tests/net/test_tcp_counters.py"),
    **dict.fromkeys(("rx_tcp_kept", "rx_tcp_copied"), "of TCP: tests/unit/c/test_tcp_hold.c, net/test_tcp_hold.py"),
    "rx_tcp_merged": "of TCP: tests/net/test_tcp_params.py::test_merged_segments",
    **dict.fromkeys(("cq_errors", "rx_tagged", "rx_hw_csum", "tx_inline", "dm_packets", "dm_bytes", "dm_full",
                     "mod_count", "mod_usec", "dm_size"), VERBS),
}


def test_every_counter_is_driven_here_or_named() -> None:
    text = Path(__file__).read_text().split("VERBS = ")[0]
    known = {counter.name for counter in (*SOCKET, *RING, *IOMUX)}
    assert {name for name in known if f'"{name}"' not in text} == set(NOT_DRIVEN)
