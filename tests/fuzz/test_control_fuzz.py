"""The control socket under random and half-right messages: the service stays, and serves the others.

VMH_FUZZ_SECONDS (12) says how long in all, VMH_FUZZ_SEED which messages; a failure names the seed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import socket
import time
from collections.abc import Iterator

import pytest
from net.control_client import Client, Closed
from net.service_lab import Api, Peer, assert_same_files, open_files, until, veths

from vmahybrid import contracts
from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service
from vmahybrid.contracts import lib
from vmahybrid.xdp.latebind import FORCE

pytestmark = pytest.mark.root

SECONDS = float(os.environ.get("VMH_FUZZ_SECONDS", "12")) / 2  # of each way to get a ring
REQUESTS = {lib.VMH_MSG_HELLO: "struct vmh_msg_hello", lib.VMH_MSG_RING: "struct vmh_msg_ring",
            lib.VMH_MSG_ATTACH: "struct vmh_msg_attach", lib.VMH_MSG_DETACH: "struct vmh_msg_detach",
            lib.VMH_MSG_NEIGH: "struct vmh_msg_neigh", lib.VMH_MSG_RELEASE: "struct vmh_msg_release",
            lib.VMH_MSG_REINJECT: "struct vmh_msg_reinject", lib.VMH_MSG_RING_MAPPED: "struct vmh_msg_ring_mapped",
            lib.VMH_MSG_TCP_TAKE: "struct vmh_msg_tcp_take", lib.VMH_MSG_TCP_HOME: "struct vmh_msg_tcp_home",
            lib.VMH_MSG_TCP_SHOW: "struct vmh_msg_tcp_show", lib.VMH_MSG_TCP_HIDE: "struct vmh_msg_tcp_hide",
            lib.VMH_MSG_TCP_FRAMES: "struct vmh_msg_tcp_frames", lib.VMH_MSG_TCP_RENEW: "struct vmh_msg_tcp_renew"}
REINJECT_HEAD = contracts.ffi.offsetof("struct vmh_msg_reinject", "data")
NUMBERS = (0, 1, 2, 3, 4, 5, 6, 17, 255, 256, 1023, 4096, 65535, 1 << 31, (1 << 32) - 1)


@contextlib.contextmanager
def inside(netns: str) -> Iterator[None]:
    """This thread, which is the test's process to the service, in another namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net") as home, open(f"/run/netns/{netns}") as there:
        assert libc.setns(there.fileno(), 0) == 0
        try:
            yield
        finally:
            assert libc.setns(home.fileno(), 0) == 0


class Fuzzer:
    """Messages of one seed, to one service."""

    def __init__(self, seed: int, path: str) -> None:
        self.random, self.path = random.Random(seed), path
        self.sent = self.replies = self.closed = 0
        self._seq = 0

    def message(self, type_: int) -> bytes:
        """A right message, one with a few wrong bytes, one of another length, or noise."""
        choose = self.random
        size = contracts.size_of(REQUESTS[type_])
        if type_ == lib.VMH_MSG_REINJECT:
            size = REINJECT_HEAD + choose.choice((0, 1, 64, 1500))
        self._seq += 1
        header = contracts.pack("struct vmh_msg_hdr", magic=lib.VMH_CTL_MAGIC, version=lib.VMH_CTL_VERSION, type=type_,
                                len=size, seq=self._seq)
        body = bytearray(choose.randbytes(size - len(header)))
        if choose.random() < 0.7:  # small numbers reach deeper than noise
            words = [choose.choice(NUMBERS) for _ in range(len(body) // 4)]
            body[:len(words) * 4] = b"".join(word.to_bytes(4, "little") for word in words)
        if type_ == lib.VMH_MSG_RING and choose.random() < 0.3:  # one that may be granted
            body = bytearray(choose.choice((1, 2, 3)).to_bytes(4, "little") + bytes(len(body) - 4))
        if type_ == lib.VMH_MSG_REINJECT and choose.random() < 0.7:
            body[8:12] = (size - REINJECT_HEAD).to_bytes(4, "little")
        data = bytearray(header + body)
        kind = choose.random()
        if kind < 0.10:
            for _ in range(choose.randint(1, 4)):
                data[choose.randrange(len(data))] = choose.randrange(256)
        elif kind < 0.15:
            data = data[:choose.randrange(len(data))]
        elif kind < 0.20:
            data += choose.randbytes(choose.choice((1, 8, 700, 5000)))
        return bytes(data) or b"\0"

    def descriptors(self, type_: int) -> list[int]:
        choose = self.random
        makers = (lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).detach(),
                  lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM).detach(),
                  lambda: os.open(os.devnull, os.O_RDWR), lambda: os.memfd_create("fuzz"), self._bound)
        count = int(type_ in (lib.VMH_MSG_ATTACH, lib.VMH_MSG_REINJECT))
        if choose.random() < 0.1:
            count = choose.choice((0, 1, 2, 16, 20))
        return [choose.choice(makers)() for _ in range(count)]

    def _bound(self) -> int:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with contextlib.suppress(OSError):
            sock.bind(("0.0.0.0", self.random.choice((0, 256, 1024, 4096))))
        return sock.detach()

    def _perhaps_map(self, client: Client, reply: bytes) -> None:
        """The right second step of a ring that needs one, half the time."""
        if len(reply) == contracts.size_of("struct vmh_msg_ring_reply") and self.random.random() < 0.5:
            ring = contracts.unpack("struct vmh_msg_ring_reply", reply)
            if ring.hdr.status == 0 and ring.flags & lib.VMH_RING_F_BIND_AFTER:
                client.mapped(ring.ring_id)

    def connection(self) -> None:
        """Some messages on one connection, until somebody closes it."""
        with contextlib.suppress(Closed, BrokenPipeError, ConnectionResetError, TimeoutError), \
                Client(self.path) as client:
            client.sock.settimeout(1.5)
            if self.random.random() < 0.9:
                client.hello()
            for _ in range(self.random.randint(1, 20)):
                type_ = self.random.choice(list(REQUESTS)[0 if self.random.random() < 0.1 else 1:])
                fds = self.descriptors(type_)
                try:
                    self.sent += 1
                    client.send(self.message(type_), *fds)
                    if self.random.random() < 0.9:
                        reply = client.receive()
                        self.replies += 1
                        self._perhaps_map(client, reply)
                except Closed:
                    self.closed += 1
                    raise
                finally:
                    for fd in fds:
                        os.close(fd)


@pytest.fixture(params=["one step", "two steps"])
def service(request: pytest.FixtureRequest, netns_pair: Sandbox) -> Iterator[Service]:
    running = Service(netns_pair)
    running.start({FORCE: "1"} if request.param == "two steps" else None)
    yield running
    running.stop()


@pytest.mark.timeout(SECONDS + 120)
def test_noise_on_the_control_socket(service: Service, netns_pair: Sandbox) -> None:
    seed = int(os.environ.get("VMH_FUZZ_SEED", str(random.SystemRandom().randrange(1 << 32))))
    fuzzer = Fuzzer(seed, service.env["VMA_HYBRID_SOCKET"])
    api = Api(service)
    with Peer(service, netns_pair.a) as good:
        assert good.do("ring", ifname="va")["status"] == 0
        port = good.bound("s")
        flow = good.do("attach", name="s", kind="3t", local=["10.77.0.1", port])["flow_id"]
        before = open_files(service.program.pid)
        slowest = 0.0
        with inside(netns_pair.a.netns):
            until_time = time.monotonic() + SECONDS
            while time.monotonic() < until_time:
                fuzzer.connection()
                begun = time.monotonic()
                assert good.do("detach", flow_id=0)["status"] == 0, f"seed {seed}"
                slowest = max(slowest, time.monotonic() - begun)
        until(lambda: [f["flow_id"] for f in api.socket_flows()] == [flow], what=f"seed {seed}")
        until(lambda: len(api.status()["processes"]) == 1, what=f"seed {seed}")
        counters = api.status()["counters"]
        assert "Traceback" not in service.log, f"seed {seed}: {service.log[service.log.index('Traceback'):][:3000]}"
        assert counters.get("internal_errors_total", 0) == 0
        assert counters["grants_total"] > 1
        assert_same_files(service.program.pid, before)
        assert veths(netns_pair.a) == []
    print(f"seed {seed}: {fuzzer.sent} messages, {fuzzer.replies} answered, {fuzzer.closed} connections closed by the "
          f"service, slowest answer to another program {slowest * 1000:.0f} ms")
    assert slowest < 2, f"seed {seed}"
    assert fuzzer.replies > 10 * SECONDS
    assert fuzzer.closed > SECONDS
