"""VMA_HYBRID_TCP=adaptive: a connection on a ring that is bulk, lossy or idle goes home by itself, and comes back."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest
from net.service_lab import Api, idle_cpu, until
from net.test_tcp_shim import ShimPeer, at_home, comes_to_ring, flows, offloaded, on_ring, without_offloads

from vmahybrid.bench.lossy import LossySandbox
from vmahybrid.bench.sandbox import Program, Sandbox, Side
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

NEVER = {"VMA_HYBRID_TCP_BULK": "0", "VMA_HYBRID_TCP_LOSS": "0", "VMA_HYBRID_TCP_IDLE": "0",
         "VMA_HYBRID_TCP_BUDGET": "100"}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Sandbox("test") as sandbox, Service(without_offloads(sandbox)) as running:
        yield running


@contextmanager
def hot(service: Service, policy: str = "adaptive", before: Callable[[ShimPeer, ShimPeer, int], None] | None = None,
        **variables: str) -> Iterator[tuple[ShimPeer, ShimPeer]]:
    """A program whose connection to an echo server on the kernel has come to the ring, and the server. ``before`` it
    does: with the server's port, and without a connection."""
    a_side, b_side = service.sandbox.sides
    with ShimPeer(service, b_side, "") as b, ShimPeer(service, a_side, policy, **(NEVER | variables)) as a:
        port = b.do("listen", address=b_side.address)
        if before:
            before(a, b, port)
        a.do("connect", address=b_side.address, port=port)
        a.do("nodelay")
        b.do("accept")
        b.do("echo")
        comes_to_ring(service, a)
        on_ring(service, a)
        yield a, b
        assert a.do("ask", count=5, size=5000) == ""
        a.do("close")
        assert b.do("echo_ended")


def why(service: Service, a: ShimPeer) -> str:
    return service.ask("explain", str(a.process.pid))


def comes_back(service: Service, a: ShimPeer) -> None:
    """Twice as many rounds as at first."""
    assert a.do("ask", count=12, size=100) == ""
    assert flows(service) == []
    assert a.do("ask", count=20, size=100) == ""
    on_ring(service, a)


def test_bulk_goes_home_and_comes_back(service: Service) -> None:
    with hot(service, VMA_HYBRID_TCP_BULK="256", VMA_HYBRID_TCP_PAYS="0") as (a, _b):
        assert a.do("bulk", 40, size=30_000_000) == ""
        at_home(service)
        assert "tcp-bulk" in why(service, a)
        comes_back(service, a)


def test_what_is_less_than_asked_for_is_no_bulk(service: Service) -> None:
    """The same as above, by another measure of it: more in 100 ms than there is."""
    with hot(service, VMA_HYBRID_TCP_BULK="100000000", VMA_HYBRID_TCP_LOSS="0") as (a, _b):
        assert a.do("bulk", 40, size=30_000_000) == ""
        assert len(flows(service)) == 1, why(service, a)


@pytest.mark.parametrize(("rounds", "moved"), [(20, True), (300, False)])
def test_rounds_before_a_connection_is_moved(service: Service, rounds: int, moved: bool) -> None:
    """VMA_HYBRID_TCP_ROUNDS on either side of its default, 64."""
    a_side, b_side = service.sandbox.sides
    with ShimPeer(service, b_side, "") as b, ShimPeer(service, a_side, "adaptive", rounds, **NEVER) as a:
        port = b.do("listen", address=b_side.address)
        a.do("connect", address=b_side.address, port=port)
        b.do("accept")
        b.do("echo")
        assert a.do("ask", count=40 if moved else 150, size=100) == ""
        if moved:
            on_ring(service, a)
        time.sleep(0.2)
        assert len(flows(service)) == moved, why(service, a)


def test_small_rounds_at_full_speed_are_no_bulk(service: Service) -> None:
    with hot(service, VMA_HYBRID_TCP_BULK="1") as (a, _b):
        for _ in range(3):
            a.do("half_rtt", count=3000, size=1000)
        assert len(flows(service)) == 1


def test_rounds_that_are_bulk_by_a_lower_threshold(service: Service) -> None:
    """2000 bytes in each round, as above."""
    with hot(service, VMA_HYBRID_TCP_BULK="1", VMA_HYBRID_TCP_TURN="1") as (a, _b):
        for _ in range(3):
            a.do("half_rtt", count=3000, size=1000)
        at_home(service)
        assert "tcp-bulk" in why(service, a)


@pytest.mark.parametrize(("window", "stays"), [("100", True), ("3000", False)])
def test_bulk_in_a_longer_time(service: Service, window: str, stays: bool) -> None:
    """Half a MiB now and then: none of it is a MiB in 100 ms, all of it is one in 3 s."""
    with hot(service, VMA_HYBRID_TCP_BULK="1024", VMA_HYBRID_TCP_TURN="0", VMA_HYBRID_TCP_WINDOW=window) as (a, _b):
        for _ in range(8):
            assert a.do("bulk", size=250_000) == ""
            time.sleep(0.4)
        if stays:
            assert len(flows(service)) == 1
        else:
            at_home(service)
            assert "tcp-bulk" in why(service, a)


@pytest.mark.parametrize(("small", "size", "moves"), [("100", 100, False), ("101", 100, True),
                                                      ("4096", 5000, False), ("8192", 5000, True)])
def test_what_is_small(service: Service, small: str, size: int, moves: bool) -> None:
    a_side, b_side = service.sandbox.sides
    with ShimPeer(service, b_side, "") as b, \
            ShimPeer(service, a_side, "adaptive", **NEVER, VMA_HYBRID_TCP_SMALL=small) as a:
        port = b.do("listen", address=b_side.address)
        a.do("connect", address=b_side.address, port=port)
        a.do("nodelay")
        b.do("accept")
        b.do("echo")
        assert a.do("ask", count=40, size=size) == ""
        if moves:
            on_ring(service, a)
        else:
            assert flows(service) == []
        a.do("close")
        assert b.do("echo_ended")


def test_an_idle_connection_goes_home_and_comes_back(service: Service) -> None:
    with hot(service, VMA_HYBRID_TCP_IDLE="1", VMA_HYBRID_TCP_PAYS="0") as (a, _b):
        until(lambda: not flows(service), what=lambda: str(flows(service)))
        assert "tcp-idle" in why(service, a)
        comes_back(service, a)


def test_one_that_is_used_is_not_idle(service: Service) -> None:
    with hot(service, VMA_HYBRID_TCP_IDLE="1") as (a, _b):
        for _ in range(10):
            assert a.do("ask", count=1, size=100) == ""
            time.sleep(0.2)
        assert len(flows(service)) == 1


SLOW_ECHO = """
import socket, sys, time
s = socket.create_server((sys.argv[1], 0))
print("port", s.getsockname()[1], flush=True)
c = s.accept()[0]
while data := c.recv(100):
    time.sleep(0.001)
    c.sendall(data)
"""
ASKS = """
import socket, sys
s = socket.create_connection((sys.argv[1], int(sys.argv[2])))
while True:
    s.sendall(b"x" * 100)
    assert s.recv(100)
"""
BUSY = "import time; print('busy', flush=True); end = time.monotonic() + 20\nwhile time.monotonic() < end: pass"


@pytest.mark.parametrize("percent", ["5", "0"])
def test_other_programs_want_the_processor(service: Service, percent: str) -> None:
    """It waits for answers on one that a program computes on: spinning gains nothing, so the kernel has it."""
    a_side, b_side = service.sandbox.sides
    one = ["taskset", "-c", str(min(os.sched_getaffinity(0)))]
    with ExitStack() as ends:
        echo = service.sandbox.start(b_side, [sys.executable, "-c", SLOW_ECHO, b_side.address])
        ends.callback(echo.stop, signal.SIGKILL)
        port = echo.wait_for(r"port (\d+)", 10)[1]
        argv = service.run_argv([sys.executable, "-c", ASKS, b_side.address, port], "adaptive", VMA_RX_POLL="-1",
                                VMA_HYBRID_TCP_PROCESSOR=percent)
        asks = service.sandbox.start(a_side, [*one, *argv], env=service.env)
        ends.callback(asks.stop, signal.SIGKILL)
        until(lambda: asks.pid in {s["pid"] for s in offloaded(service)} or moved(service, asks.pid))
        busy = service.sandbox.start(a_side, [*one, sys.executable, "-c", BUSY])
        ends.callback(busy.stop, signal.SIGKILL)
        if percent != "0":
            until(lambda: moved(service, asks.pid), 15, what=lambda: service.ask("explain", str(asks.pid)))
        else:
            time.sleep(2)
            assert not moved(service, asks.pid)


@pytest.mark.parametrize("percent", ["5", "0"])
def test_the_processor_is_wanted_before(service: Service, percent: str) -> None:
    """A thread that waits for its processor while the kernel serves it would only take more of it on a ring."""
    a_side, b_side = service.sandbox.sides
    one = ["taskset", "-c", str(min(os.sched_getaffinity(0)))]
    quick = SLOW_ECHO.replace("    time.sleep(0.001)\n", "")   # it could run all the time
    started = [service.sandbox.start(b_side, [sys.executable, "-c", quick, b_side.address])]
    try:
        port = started[0].wait_for(r"port (\d+)", 10)[1]
        for _ in range(2):
            started.append(service.sandbox.start(a_side, [*one, sys.executable, "-c", BUSY]))
            started[-1].wait_for("busy", 10)
        argv = service.run_argv([sys.executable, "-c", ASKS, b_side.address, port], "adaptive",
                                VMA_HYBRID_TCP_PROCESSOR=percent)
        asks = service.sandbox.start(a_side, [*one, *argv], env=service.env)
        started.append(asks)
        if percent != "0":
            until(lambda: moved(service, asks.pid), 15, what=lambda: service.ask("explain", str(asks.pid)))
            assert not Api(service).call("GET", "/v1/rings")[1]     # nor has it been on one
        else:
            until(lambda: asks.pid in {s["pid"] for s in offloaded(service)}, 15)
    finally:
        for program in started:
            program.stop(signal.SIGKILL)


@pytest.mark.parametrize(("share", "polls", "rests"), [
    ("20", "100000", True), ("0", "100000", False), ("20", "-1", False)])
def test_a_spinning_thread_leaves_the_processor(service: Service, share: str, polls: str, rests: bool) -> None:
    """On a ring for good: it waits for answers a millisecond each, and another program computes on its processor."""
    a_side, b_side = service.sandbox.sides
    one = ["taskset", "-c", str(min(os.sched_getaffinity(0)))]
    with ExitStack() as ends:
        echo = service.sandbox.start(b_side, [sys.executable, "-c", SLOW_ECHO, b_side.address])
        ends.callback(echo.stop, signal.SIGKILL)
        port = echo.wait_for(r"port (\d+)", 10)[1]
        argv = service.run_argv([sys.executable, "-c", ASKS, b_side.address, port], "none", VMA_HYBRID_TCP="offload",
                                VMA_RX_POLL=polls, VMA_HYBRID_SPIN_SHARE=share)
        asks = service.sandbox.start(a_side, [*one, *argv], env=service.env)
        ends.callback(asks.stop, signal.SIGKILL)
        until(lambda: asks.pid in {s["pid"] for s in offloaded(service)})
        busy = service.sandbox.start(a_side, [*one, sys.executable, "-c", BUSY])
        ends.callback(busy.stop, signal.SIGKILL)
        busy.wait_for("busy", 10)
        if rests:
            until(lambda: idle_cpu(asks.pid, 0.5) < 0.2, 15)
        else:
            time.sleep(2)
            assert idle_cpu(asks.pid, 1) > 0.25
        assert asks.pid in {s["pid"] for s in offloaded(service)}


ROUNDS = """
import socket, sys, time
s = socket.create_connection((sys.argv[1], int(sys.argv[2])))
n, end = 0, time.monotonic() + 2
while time.monotonic() < end:
    s.sendall(b"x" * 100)
    assert s.recv(100)
    n += 1
print(n)
"""


def rounds(service: Service, n: int, *client: str, **variables: str) -> list[int]:
    """Of n clients, each with a server, all on one processor."""
    a_side, b_side = service.sandbox.sides
    one = ["taskset", "-c", str(min(os.sched_getaffinity(0)))]
    quick = SLOW_ECHO.replace("    time.sleep(0.001)\n", "")

    def start(side: Side, before: Sequence[str], *argv: str) -> Program:
        command = service.run_argv([sys.executable, "-c", *argv], "none", **variables)
        return service.sandbox.start(side, [*one, *before, *command], env=service.env)

    servers = [start(b_side, (), quick, b_side.address) for _ in range(n)]
    try:
        ports = [server.wait_for(r"port (\d+)", 20)[1] for server in servers]
        clients = [start(a_side, client, ROUNDS, b_side.address, port) for port in ports]
        return [int(found.result(30).split()[-1]) for found in clients]
    finally:
        for server in servers:
            server.stop(signal.SIGKILL)


def test_programs_that_spin_lend_each_other_the_processor(service: Service) -> None:
    """Four of two connections, without end and on one: else a round trip takes a slice of each."""
    slices, lent = (rounds(service, 2, VMA_HYBRID_TCP="offload", VMA_RX_POLL="-1", VMA_HYBRID_SPIN_SHARE=share)
                    for share in ("0", "20"))  # fmt: skip
    assert min(lent) > 3 * max(slices), (slices, lent)


@pytest.mark.parametrize("policy", ["offload", "adaptive"])
def test_a_realtime_thread_that_waits_lets_others_run(service: Service, policy: str) -> None:
    """It gets its answers from one of the normal class on its processor, which it would never leave to that one."""
    fifo = ["chrt", "-f", "5"]
    ((spun,), (rested,)) = (rounds(service, 1, *fifo, VMA_HYBRID_TCP=policy, VMA_HYBRID_SPIN_SHARE=share)
                            for share in ("0", "20"))  # fmt: skip
    assert rested > 1000 and (policy == "adaptive" or rested > 3 * spun), (spun, rested)


WAITS_LONG = """
import os, resource, socket, struct, sys
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
t = socket.create_connection((sys.argv[1], int(sys.argv[2])))
u.bind((t.getsockname()[0], 0))
t.sendall(b"x")
assert t.recv(1)
resource.setrlimit(resource.RLIMIT_RTTIME, (200000, 200000))
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(5))
for s in (t, u):
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("qq", 0, 700000))
    try:
        s.recv(1)
    except BlockingIOError:
        print("waited")
"""


def test_a_realtime_thread_with_a_limit_sleeps_in_time(service: Service) -> None:
    """RLIMIT_RTTIME, as rtkit has it set: the kernel ends a thread that has not slept for so long."""
    a_side, b_side = service.sandbox.sides
    server = service.sandbox.start(b_side, [sys.executable, "-c", SLOW_ECHO, b_side.address])
    try:
        port = server.wait_for(r"port (\d+)", 20)[1]
        argv = [sys.executable, "-c", WAITS_LONG, b_side.address, port]
        client = service.sandbox.start(a_side, service.run_argv(argv, "latency"), env=service.env)
        assert client.result(30).splitlines() == ["waited"] * 2
    finally:
        server.stop(signal.SIGKILL)


def moved(service: Service, pid: int) -> bool:
    """It went home for this, or is there yet."""
    return "tcp-processor" in service.ask("explain", str(pid))


def test_offload_stays_on_the_ring(service: Service) -> None:
    a_side, b_side = service.sandbox.sides
    often = {"VMA_HYBRID_TCP_BULK": "1", "VMA_HYBRID_TCP_IDLE": "1"}
    with ShimPeer(service, b_side, "") as b, ShimPeer(service, a_side, "offload", **often) as a:
        port = b.do("listen", address=b_side.address)
        a.do("connect", address=b_side.address, port=port)
        b.do("accept")
        b.do("echo")
        assert a.do("bulk", 40, size=3_000_000) == ""
        time.sleep(1.5)
        # of the connection, beside that of its port: it is shown in the kernel's list after a second or two
        until(lambda: [flow["kind"] for flow in flows(service)] == ["3-tuple", "5-tuple"])


@pytest.mark.parametrize(("percent", "least", "stays"), [
    ("1", "100", False), ("1", "1000000", True), ("60", "100", True), ("0", "100", True)])
def test_a_lossy_connection_goes_home(percent: str, least: str, stays: bool) -> None:
    with LossySandbox("test", 0.04) as sandbox, Service(without_offloads(sandbox)) as service, \
            hot(service, VMA_HYBRID_TCP_LOSS=percent, VMA_HYBRID_TCP_LOSS_SEGMENTS=least) as (a, _b):
        # long enough for two looks in a row: a short one is over before its losses are a share of anything
        assert a.do("bulk", 60, size=12_000_000) == ""
        if stays:
            assert len(flows(service)) == 1
        else:
            at_home(service)
            assert "tcp-loss" in why(service, a)


WIRE = """
import collections, select, socket, sys, time
ports = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0x0300) for _ in range(2)]
for port, name in zip(ports, sys.argv[2:]):
    port.bind((name, 3))
    port.setsockopt(socket.SOL_SOCKET, 33, 1 << 24)     # SO_RCVBUFFORCE
late, wire = float(sys.argv[1]), collections.deque()
print("ready", flush=True)
while True:
    for port in select.select(ports, [], [], max(wire[0][0] - time.monotonic(), 0) if wire else None)[0]:
        frame, whence = port.recvfrom(65536)
        if whence[2] != socket.PACKET_OUTGOING:
            wire.append((time.monotonic() + late, ports[port is ports[0]], frame))
    while wire and wire[0][0] <= time.monotonic():
        _, port, frame = wire.popleft()
        port.send(frame)
"""


class LongSandbox(LossySandbox):
    """A way of ``seconds`` between the two sides."""

    def __init__(self, tag: str, seconds: float) -> None:
        super().__init__(tag, 0)
        self._seconds, self._ports = seconds, list[Side]()

    def _attach(self, port: Side, other: Side) -> None:
        self._ports.append(port)
        if len(self._ports) == 2:
            argv = [sys.executable, "-c", WIRE, str(self._seconds), *(port.device for port in self._ports)]
            self.start(port, argv).wait_for("ready")


def test_bulk_on_a_long_way() -> None:
    """On a ring it would never be a MiB in 100 ms."""
    with LongSandbox("test", 0.08) as sandbox, Service(without_offloads(sandbox)) as service, \
            hot(service, VMA_HYBRID_TCP_BULK="1024") as (a, _b):
        assert a.do("bulk", 40, size=4_000_000) == ""
        at_home(service)
        assert "tcp-bulk" in why(service, a)


def goes_home_in_its_set(service: Service, a: ShimPeer) -> None:
    """What comes after that is an event of the kernel's."""
    a.do("dup")
    at_home(service)
    a.do("send", data="x")
    assert a.do("seen") == [select.EPOLLIN]
    assert a.do("read", size=1) == "x"


def test_events_where_the_number_was_another_connections(service: Service) -> None:
    """Whose epoll_ctl(2) the kernel alone has seen."""
    def another(a: ShimPeer, b: ShimPeer, port: int) -> None:
        numbers.append(a.do("connect", address=b.side.address, port=port))
        b.do("accept")
        b.do("echo")
        assert a.do("ask", count=1, size=100) == ""
        a.do("watch", change=True)
        a.do("close")
        assert b.do("echo_ended")

    numbers: list[int] = []
    with hot(service, before=another) as (a, _b):
        assert a.do("number") == numbers[0]
        a.do("watch")
        goes_home_in_its_set(service, a)


def test_events_in_a_set_that_was_left_and_another(service: Service) -> None:
    a_side, b_side = service.sandbox.sides
    with ShimPeer(service, b_side, "") as b, ShimPeer(service, a_side, "adaptive", **NEVER) as a:
        port = b.do("listen", address=b_side.address)
        a.do("connect", address=b_side.address, port=port)
        a.do("nodelay")
        b.do("accept")
        b.do("echo")
        a.do("watch", change=True)
        a.do("unwatch")
        assert a.do("ask", count=40, size=100) == ""
        on_ring(service, a)
        a.do("watch")
        goes_home_in_its_set(service, a)
        a.do("close")
        assert b.do("echo_ended")


def test_events_of_an_exclusive_member(service: Service) -> None:
    """EPOLL_CTL_MOD refuses it, also while the kernel does not know of it."""
    with hot(service) as (a, _b):
        a.do("watch", flags=select.EPOLLEXCLUSIVE)
        assert a.do("change", events=select.EPOLLIN) == "EINVAL"
        a.do("send", data="x")
        assert a.do("seen") == [select.EPOLLIN]
        assert a.do("read", size=1) == "x"
        goes_home_in_its_set(service, a)
