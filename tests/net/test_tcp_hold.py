"""Received TCP data that waits in a ring's frames: sockets that are not read must leave the others frames to go on."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from net.counter_lab import Program
from net.service_lab import Api, until
from net.test_tcp_shim import introduce, without_offloads
from net.test_tcp_syn import Calls, opened

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service, tool
from vmahybrid.net.netns import NetnsWorker

pytestmark = pytest.mark.root

FRAMES = 1024   # 768 of them for receiving


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    file: Path = tmp_path_factory.mktemp("config") / "small.toml"
    file.write_text(f"[ring]\nframes = {FRAMES}\nrx_size = 256\ntx_size = 256\n")
    with Sandbox("test") as sandbox, Service(without_offloads(sandbox), arguments=["--config", str(file)]) as running:
        introduce(sandbox)
        yield running


def ring(service: Service, pid: int) -> dict[str, Any]:
    stats = [ring["stats"] for ring in Api(service).call("GET", "/v1/rings")[1] if ring["pid"] == pid]
    assert len(stats) == 1
    return dict(stats[0])


def another(a: Calls, b: Calls, port: int, number: int) -> None:
    a.do("new", name=f"c{number}")
    assert a.call(f"c{number}", "connect", [b.side.address, port]) is None
    assert b.do("accept", name="l", new=f"s{number}") == a.side.address


def test_sockets_that_are_not_read_do_not_starve_the_ring(service: Service) -> None:
    a_side, b_side = service.sandbox.sides
    with Calls(service, b_side, True) as b, Calls(service, a_side, False) as a:
        port = opened(a, b, b_side)
        poured = []
        for number in range(4):
            another(a, b, port, number)
            poured.append(a.do("pour", 20, name=f"c{number}", most=4_000_000))
            assert poured[-1][0] > 500_000      # more than all frames have
        full = ring(service, b.pid)
        assert full["rx_tcp_copied"] > 500
        assert full["queue_len"] <= FRAMES * 3 // 8
        for number in range(300):
            assert a.call("c", "send", f"question {number}") == len(f"question {number}")
            assert b.call("s", "recv", 100) == f"question {number}"
            assert b.call("s", "send", "answer") == 6
            assert a.call("c", "recv", 100) == "answer"
        after = ring(service, b.pid)
        assert after["rx_tcp_kept"] - full["rx_tcp_kept"] >= 300
        assert "Rx TCP zero copy:" in service.sandbox.start(
            None, [tool("vma_stats"), "-p", str(b.pid), "-v", "3", "-c", "1"], env=service.env).result(20)
        for number, (size, sum_) in enumerate(poured):
            assert b.do("drain", 20, name=f"s{number}", size=size) == [size, sum_]
        until(lambda: ring(service, b.pid)["queue_len"] <= 1)  # one is given back at leisure
        for number in range(4):
            assert a.do("pour", 20, name=f"c{number}", most=20_000)[0] >= 20_000
            assert b.do("drain", 20, name=f"s{number}", size=20_000)[0] == 20_000


def test_unread_bytes_go_home_with_the_socket_and_free_their_frames(service: Service) -> None:
    a_side, b_side = service.sandbox.sides
    with Calls(service, b_side, True) as b, Calls(service, a_side, False) as a:
        port = opened(a, b, b_side)
        another(a, b, port, 0)
        size, sum_ = a.do("pour", 20, name="c0", most=100_000)
        b.call("s", "recv", 100, 0x40)     # MSG_DONTWAIT: a look at the ring
        until(lambda: ring(service, b.pid)["queue_len"] > 10)
        b.do("dup", name="s0", new="other")
        until(lambda: ring(service, b.pid)["queue_len"] <= 1)
        assert b.do("drain", 20, name="other", size=size) == [size, sum_]
        assert a.call("c", "send", "x") == 1
        assert b.call("s", "recv", 1) == "x"


def test_a_ring_that_goes_leaves_nothing_mapped(service: Service) -> None:
    """A service that stops, with unread bytes on the ring and connections that are closing."""
    a_side, b_side = service.sandbox.sides

    def mapped(pid: int) -> int:
        return Path(f"/proc/{pid}/maps").read_text().count("vmahybrid-umem") + \
            Path(f"/proc/{pid}/maps").read_text().count("umem")

    with Calls(service, b_side, True) as b, Calls(service, a_side, False) as a:
        port = opened(a, b, b_side)
        another(a, b, port, 0)
        size, sum_ = a.do("pour", 20, name="c0", most=50_000)
        b.call("s", "recv", 100, 0x40)
        assert mapped(b.pid)
        service.program.stop(signal.SIGTERM)
        until(lambda: not mapped(b.pid), 5)
        assert b.do("drain", 20, name="s0", size=size) == [size, sum_]
        service.start()


@pytest.fixture(scope="module", params=[False, True], ids=["xdp", "softverbs"])
def usual(request: pytest.FixtureRequest) -> Iterator[Service]:
    with Sandbox("usual") as sandbox, Service(without_offloads(sandbox), softverbs=request.param) as running:
        introduce(sandbox)
        yield running


@contextlib.contextmanager
def reader(service: Service, code: str) -> Iterator[tuple[Program, NetnsWorker]]:
    """A program on side b, and who speaks to it."""
    with Program(service.sandbox, service, VMA_HYBRID_TCP="offload", VMA_TRACELEVEL="warn") as program, \
            contextlib.closing(NetnsWorker.open_path(service.sandbox.a.netns)) as worker:  # fmt: skip
        program.do(code)
        yield program, worker


CONNECTIONS, PIECES = 400, 30
ACCEPTS = """
l = socket.socket()
l.bind((HERE, 0))
l.listen(1000)
l.settimeout(5)

def accepts():
    c = l.accept()[0]
    c.settimeout(5)
    return c

def connects(to):
    return socket.create_connection(to, 5)

def answers(times):
    for _ in range(times):
        other.sendall(other.recv(100))

def whole():
    return all(one.recv(PIECES * 200, socket.MSG_WAITALL) == bytes([number % 256]) * PIECES * 200
               for number, one in enumerate(many))
"""


def test_many_connections_with_a_little_each(usual: Service) -> None:
    """Together they have more frames than one of the ring's queues can get. Listeners are not on QPs."""
    here = usual.sandbox.b.address
    setting = f"HERE, PIECES, many = {here!r}, {PIECES}, []"
    with reader(usual, setting + ACCEPTS) as (program, worker), contextlib.ExitStack() as stack:
        address = here, program.do("l.getsockname()[1]")
        listener = stack.enter_context(worker.socket(socket.AF_INET, socket.SOCK_STREAM))
        listener.bind((usual.sandbox.a.address, 0))
        listener.listen(1000)

        def connected(name: str) -> socket.socket:
            if usual.softverbs:
                program.do(name.format(f"connects({listener.getsockname()!r})"))
                peer = stack.enter_context(listener.accept()[0])
            else:
                peer = stack.enter_context(worker.socket(socket.AF_INET, socket.SOCK_STREAM))
                peer.connect(address)
                program.do(name.format("accepts()"))
            peer.settimeout(5)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return peer

        many = [connected("many.append({})") for _ in range(CONNECTIONS)]
        for _ in range(PIECES):
            for number, peer in enumerate(many):
                peer.sendall(bytes([number % 256]) * 200)
        asks = connected("other = {}")
        program.tell("answers(300)")
        for _ in range(300):
            asks.sendall(b"question")
            assert asks.recv(100) == b"question"
        program.answer()
        used = ring(usual, program.pid)
        assert used["rx_tcp_kept"] > 0 if usual.softverbs else used["rx_tcp_copied"] > 0
        assert program.do("whole()")


SOCKETS, DATAGRAMS = 100, 60
BINDS = """
def udp():
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.bind((HERE, 0))
    s.settimeout(5)
    select.select([s], [], [], 0)
    return s

def answers(times):
    for _ in range(times):
        other.sendto(*other.recvfrom(100))

def whole():
    return all(one.recv(1000) == bytes([number % 256]) * 300 for one in many for number in range(DATAGRAMS))

import select
many, other = [udp() for _ in range(SOCKETS)], udp()
"""


def test_datagrams_that_nobody_reads(usual: Service) -> None:
    """Each socket has room for its own; another one is served all the same."""
    here = usual.sandbox.b.address
    setting = f"HERE, SOCKETS, DATAGRAMS = {here!r}, {SOCKETS}, {DATAGRAMS}"
    with reader(usual, setting + BINDS) as (program, worker), \
            worker.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:  # fmt: skip
        ports, other = program.do("[[one.getsockname()[1] for one in many], other.getsockname()[1]]")
        peer.settimeout(5)
        for number in range(DATAGRAMS):
            for port in ports:
                peer.sendto(bytes([number % 256]) * 300, (here, port))
            program.do("select.select([other], [], [], 0)")     # a look at the ring
        program.tell("answers(300)")
        for _ in range(300):
            peer.sendto(b"question", (here, other))
            assert peer.recv(100) == b"question"
        program.answer()
        assert program.do("whole()")
