"""Counters of TCP sockets: exactly N events, and N is read, on a ring and by the kernel. A call is a packet, as in
VMA."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from net.counter_lab import REFUSED, Program, Values, changes
from net.service_lab import until
from net.test_counters import DEFINE_OUT, SENDS
from net.test_tcp_shim import introduce, without_offloads

from vmahybrid.bench.lossy import LossySandbox
from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service
from vmahybrid.net.netns import NetnsWorker
from vmahybrid.vma_stats.main import main

pytestmark = pytest.mark.root
N, SIZE = 7, 100


class Lab:
    """A program on side b, and the kernel on side a at the other end of its connection ``c``."""

    def __init__(self, sandbox: Sandbox, service: Service, policy: str, **variables: str) -> None:
        self._worker = NetnsWorker.open_path(sandbox.a.netns)
        self._listener = self._worker.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self._listener.bind((sandbox.a.address, 0))
        self._listener.listen()
        self.on_ring = policy == "offload"
        self.program = Program(sandbox, service, VMA_HYBRID_TCP=policy, VMA_HYBRID_TCP_ROUNDS="10000",
                               VMA_RX_POLL="2000", VMA_SELECT_POLL="0", **variables)
        self.do = self.program.do
        self.peers: list[socket.socket] = []
        self.fd = -1

    def connect(self, mapped: bool = False) -> socket.socket:
        """The peer's end of a new connection, the program's is ``c``; ``mapped``: an AF_INET6 socket of its own."""
        for _ in range(20):  # the first one may be the kernel's: the neighbour is not known yet
            host, port = self._listener.getsockname()
            address = (f"::ffff:{host}" if mapped else host, port)
            self.do(f"c = socket.socket(socket.{'AF_INET6' if mapped else 'AF_INET'})\nc.connect({address!r})")
            peer = self._listener.accept()[0]
            peer.settimeout(3)
            self.peers.append(peer)
            self.fd = self.do("c.fileno()")
            if bool(self.shown()["rx_offloaded"]) is self.on_ring:
                return peer
        raise AssertionError(self.shown())

    def shown(self) -> Any:
        """The socket, also while the program is in a call."""
        return next(sock for sock in self.program.stats()["sockets"] if sock["fd"] == self.fd)

    def counted(self, act: Callable[[], object]) -> Values:
        before = self.shown()["counters"]
        act()
        return changes(before, self.shown()["counters"], "counter")

    def iomux(self, kind: str) -> Values:
        return next(i["counters"] for i in self.program.stats()["iomux"] if i["kind"] == kind)

    def gauge(self, name: str) -> int:
        return int(self.shown()["counters"][name])

    def queued(self, peer: socket.socket, size: int) -> None:
        """Bytes from the peer that nobody reads yet."""
        before = int(self.do("struct.unpack('i', __import__('fcntl').ioctl(c, 0x541b, bytes(4)))[0]"))
        peer.sendall(b"x" * size)
        until(lambda: self.do("struct.unpack('i', __import__('fcntl').ioctl(c, 0x541b, bytes(4)))[0]")
              == before + size, 5)  # fmt: skip

    def close(self) -> None:
        self.program.close()
        for sock in (*self.peers, self._listener):
            sock.close()
        self._worker.close()


@pytest.fixture(scope="module")
def world() -> Iterator[tuple[Sandbox, Service]]:
    with Sandbox("test") as sandbox, Service(without_offloads(sandbox), [sandbox.b]) as service:
        yield sandbox, service


@pytest.fixture(scope="module")
def ring(world: tuple[Sandbox, Service]) -> Iterator[Lab]:
    made = Lab(*world, "offload")
    yield made
    made.close()


@pytest.fixture(scope="module")
def kernel(world: tuple[Sandbox, Service]) -> Iterator[Lab]:
    made = Lab(*world, "adaptive")  # by the kernel until it has proved itself
    yield made
    made.close()


@pytest.fixture(scope="module")
def strict(world: tuple[Sandbox, Service]) -> Iterator[Lab]:
    made = Lab(*world, "offload", VMA_EXCEPTION_HANDLING="2")
    yield made
    made.close()


def test_received(ring: Lab) -> None:
    peer = ring.connect()
    ring.queued(peer, N * SIZE)
    found = ring.counted(lambda: ring.do(f"[c.recv({SIZE}) for _ in range({N})]"))
    assert found == {"rx_packets": N, "rx_bytes": N * SIZE, "rx_poll_hit": N}


def test_one_call_is_one_packet_however_the_bytes_come(ring: Lab) -> None:
    peer = ring.connect()
    ring.program.tell(f"len(c.recv({3 * SIZE}, socket.MSG_WAITALL))")
    for _ in range(3):
        peer.sendall(b"x" * SIZE)
    assert ring.program.answer() == 3 * SIZE
    counters = ring.shown()["counters"]
    assert (counters["rx_packets"], counters["rx_bytes"]) == (1, 3 * SIZE)
    ring.program.tell("c.sendall(bytes(3 << 20))")
    got = 0
    while got < 3 << 20:
        got += len(peer.recv(1 << 16))
    ring.program.answer()
    counters = ring.shown()["counters"]
    assert counters["tx_bytes"] == 3 << 20
    ring.program.tell("c.setsockopt(6, 1, 1)\n__import__('os').write(c.fileno(), bytes(3 << 20))")
    got = 0
    while got < 3 << 20:
        got += len(peer.recv(1 << 16))
    assert ring.program.answer() == 3 << 20
    after = ring.shown()["counters"]
    assert (after["tx_packets"] - counters["tx_packets"], after["tx_bytes"]) == (1, 6 << 20)


def test_a_look_is_no_packet(ring: Lab, kernel: Lab) -> None:
    ring.queued(ring.connect(), SIZE)
    assert ring.counted(lambda: ring.do(f"[c.recv({SIZE}, socket.MSG_PEEK) for _ in range({N})]")) == {"rx_poll_hit": N}
    kernel.queued(kernel.connect(), SIZE)
    assert kernel.counted(lambda: kernel.do(f"[c.recv({SIZE}, socket.MSG_PEEK) for _ in range({N})]")) == {}


def test_nothing_there(ring: Lab, kernel: Lab) -> None:
    act = f"[fails(c.recv, 10, socket.MSG_DONTWAIT) for _ in range({N})]"
    ring.connect()
    assert ring.counted(lambda: ring.do(act)) == {"rx_eagain": N, "rx_poll_miss": N}
    kernel.connect()
    assert kernel.counted(lambda: kernel.do(act)) == {"rx_os_eagain": N}


def test_waited_in_vain(ring: Lab) -> None:
    ring.connect()
    act = f"timeout(c, 3000)\n[fails(c.recv, 10) for _ in range({N})]"
    assert ring.counted(lambda: ring.do(act)) == {"rx_eagain": N, "rx_poll_miss": N}


def test_waited_for(ring: Lab) -> None:
    """It came after the polling had ended."""
    peer = ring.connect()

    def act() -> None:
        ring.program.tell("c.recv(10)")
        until(lambda: ring.gauge("rx_poll_miss") == 1)
        peer.sendall(b"x")
        ring.program.answer()

    assert ring.counted(act) == {"rx_packets": 1, "rx_bytes": 1, "rx_poll_miss": 1}


def test_sent(ring: Lab, kernel: Lab) -> None:
    act = f"[c.send(bytes({SIZE})) for _ in range({N})]"
    ring.connect()
    assert ring.counted(lambda: ring.do(act)) == {"tx_packets": N, "tx_bytes": N * SIZE}
    kernel.connect()
    assert kernel.counted(lambda: kernel.do(act)) == {"tx_os_packets": N, "tx_os_bytes": N * SIZE}


@pytest.mark.parametrize("kind", SENDS)
@pytest.mark.parametrize("where", ["ring", "kernel"])
def test_ready_to_send_is_not_received(request: pytest.FixtureRequest, where: str, kind: str) -> None:
    """As of a UDP socket; see test_counters.py. Something that came is counted."""
    lab: Lab = request.getfixturevalue(where)
    peer = lab.connect()
    lab.do("s = c" + DEFINE_OUT)

    def counted(code: str) -> Values:
        before = lab.iomux(kind)
        lab.do(f"for _ in range({N}): assert len({code}) == 1")
        grown = changes(before, lab.iomux(kind), "counter")
        return {name: value for name, value in grown.items() if name.endswith("rx_ready")}

    assert counted(SENDS[kind]) == {}
    if kind == "select":
        lab.queued(peer, SIZE)
        assert counted("select.select([s], [s], [], 0.1)[0]") == {"rx_ready" if where == "ring" else "os_rx_ready": N}
    lab.do("out.close()")


# what the kernel does on its own: such a call sends a connection home first
ENDS_IN_KERNEL = {
    "sendmmsg": (f"sendmmsg(c, {N}, {SIZE})", {"tx_os_packets": N, "tx_os_bytes": N * SIZE}),
    "recvmmsg": (f"recvmmsg(c, {N}, {SIZE})", {"rx_os_packets": N, "rx_os_bytes": N * SIZE}),
    "sendfile": (f"f = open(sys.executable, 'rb')\nos.sendfile(c.fileno(), f.fileno(), 0, {SIZE})",
                 {"tx_os_packets": 1, "tx_os_bytes": SIZE}),
    "splice": (f"r, w = os.pipe()\nos.splice(c.fileno(), w, {SIZE})\nos.splice(r, c.fileno(), {SIZE})",
               {"rx_os_packets": 1, "rx_os_bytes": SIZE, "tx_os_packets": 1, "tx_os_bytes": SIZE}),
    "pwritev2": (f"os.pwritev(c.fileno(), [bytes({SIZE})], -1, 0)", {"tx_os_packets": 1, "tx_os_bytes": SIZE}),
    "nothing there": (f"fails(recvmmsg, c, 1, {SIZE}, socket.MSG_DONTWAIT)", {"rx_os_eagain": 1}),
    "no file": ("fails(os.sendfile, c.fileno(), 999, 0, 1)", {"tx_os_errors": 1}),
}


@pytest.mark.parametrize("call", ENDS_IN_KERNEL)
@pytest.mark.parametrize("where", ["ring", "kernel"])
def test_calls_that_end_in_the_kernel(request: pytest.FixtureRequest, where: str, call: str) -> None:
    """The one that sends the connection home, and the next one."""
    lab: Lab = request.getfixturevalue(where)
    code, expected = ENDS_IN_KERNEL[call]
    peer = lab.connect()
    for _ in range(2):
        if any(name.startswith("rx_os_p") for name in expected):
            lab.queued(peer, expected["rx_os_bytes"])
        assert lab.counted(lambda: lab.do(code)) == expected
    assert not lab.shown()["rx_offloaded"]


def test_no_room(ring: Lab, kernel: Lab) -> None:
    """The peer does not read: what is accepted waits, and then no more is."""
    fill = "c.setblocking(False)\nwhile not fails(c.send, bytes(65536)):\n    pass"
    wait = "time.sleep(0.3)\nwhile not fails(c.send, bytes(65536)):\n    pass"
    act = f"[fails(c.send, b'x') for _ in range({N})]"
    ring.connect()
    ring.do(fill)
    ring.do(wait)
    assert ring.counted(lambda: ring.do(act)) == {"tx_eagain": N}
    unsent = ring.do("struct.unpack('i', __import__('fcntl').ioctl(c, 0x5411, bytes(4)))[0]")
    assert ring.gauge("tx_ready_bytes") == unsent > 10000
    kernel.connect()
    kernel.do(fill)
    kernel.do(wait)
    assert kernel.counted(lambda: kernel.do(act)) == {"tx_os_eagain": N}


def test_errors(ring: Lab, kernel: Lab) -> None:
    """The peer resets: one call is told, then sends fail."""
    for lab, os in ((ring, ""), (kernel, "os_")):
        peer = lab.connect()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()
        until(lambda: lab.do("select.select([c], [], [], 0)[0] != []"))  # noqa: B023  called at once
        assert lab.counted(lambda: lab.do("fails(c.recv, 10)")).items() >= {f"rx_{os}errors": 1}.items()  # noqa: B023
        found = lab.counted(lambda: lab.do(f"[fails(c.send, b'x', socket.MSG_NOSIGNAL) for _ in range({N})]"))  # noqa: B023
        assert found == {f"tx_{os}errors": N}


OF_TCP = {
    "recv": ("'recv', {0}, BAD, 9, 0", False),
    "read of -1": ("'read', {0}, bytes(1), ctypes.c_ssize_t(-1)", False),
    "sendto": ("'sendto', {0}, b'x', 1, 0, BAD, 16", True),
    "sendto, long": ("'sendto', {0}, b'x', 1, 0, bytes(200), 200", True),
    "sendmsg of many": ("'sendmsg', {0}, ctypes.byref(Message(iov=8, iovlen=2000)), 0", True),
    "sendmsg of nowhere": ("'sendmsg', {0}, ctypes.byref(Message(iov=8, iovlen=1)), 0", True),
    "writev of -1": ("'writev', {0}, (ctypes.c_size_t * 2)(4096, 1 << 63), 1", True),
}


@pytest.mark.parametrize("call", {**REFUSED, **OF_TCP})
@pytest.mark.parametrize("where", ["ring", "kernel"])
def test_refused_calls(request: pytest.FixtureRequest, where: str, call: str) -> None:
    """Nothing moves, and the connection stays where it is."""
    lab: Lab = request.getfixturevalue(where)
    code, sends = {**REFUSED, **OF_TCP}[call]
    lab.queued(peer := lab.connect(), SIZE)
    found = lab.counted(lambda: lab.do(f"assert all(refused({code.format('c')}) for _ in range({N}))"))
    found.pop("rx_poll_hit", 0)
    assert found == {f"{'tx' if sends else 'rx'}_{'' if lab.on_ring else 'os_'}errors": N}
    assert bool(lab.shown()["rx_offloaded"]) is lab.on_ring
    assert lab.do("len(c.recv(1000))") == SIZE
    lab.do("c.send(b'x')")
    assert peer.recv(10) == b"x"


# what only the kernel can do, with the descriptor of the connection; whether it sends
OF_KERNEL = {
    "recvmmsg": ("libc.recvmmsg({}, bytes(200), 1, 0, None)", False),
    "sendmmsg": ("libc.sendmmsg({}, bytes(200), 1, 0)", True),
    "sendfile": ("libc.sendfile({}, zero, None, 9)", True),
    "sendfile64": ("libc.sendfile64({}, zero, None, 9)", True),
    "splice to": ("libc.splice(pipe[0], None, {}, None, 9, 0)", True),
    "splice from": ("libc.splice({}, None, pipe[1], None, 9, 0)", False),
    "pwritev2": ("libc.pwritev2({}, vector(), 1, ctypes.c_long(-1), 0)", True),
    "preadv2": ("libc.preadv2({}, vector(), 1, ctypes.c_long(-1), 0)", False),
}


@pytest.mark.parametrize("call", OF_KERNEL)
def test_refused_by_exception_handling(strict: Lab, call: str) -> None:
    code, sends = OF_KERNEL[call]
    strict.queued(peer := strict.connect(), SIZE)
    strict.do("import os\nzero, pipe = os.open('/dev/zero', os.O_RDONLY), os.pipe()\nos.write(pipe[1], bytes(9))")
    act = f"[({code.format('c.fileno()')}, ctypes.get_errno()) for _ in range({N})]"
    found = strict.counted(lambda: check_refused(strict.do(act)))
    assert found == {f"{'tx' if sends else 'rx'}_errors": N}
    assert strict.do("len(c.recv(1000))") == SIZE
    strict.do("c.send(b'x')\nos.close(zero)\nfor end in pipe: os.close(end)")
    assert peer.recv(10) == b"x"


def check_refused(said: list[list[int]]) -> None:
    assert said == [[-1, errno.EINVAL]] * N


def test_the_address_is_met_last(ring: Lab, kernel: Lab) -> None:
    """recvfrom(2): the bytes are gone by then."""
    for lab, error in ((ring, "rx_errors"), (kernel, "rx_os_errors")):
        lab.queued(lab.connect(), SIZE)
        act = f"assert all(refused('recvfrom', c, bytes(1), 1, 0, bytes(16), BAD) for _ in range({N}))"
        assert lab.counted(lambda: lab.do(act))[error] == N  # noqa: B023  called at once
        assert lab.do("len(c.recv(1000))") == SIZE - N


@pytest.mark.parametrize("where", ["ring", "kernel"])
def test_refused_by_the_connection_first(request: pytest.FixtureRequest, where: str) -> None:
    """As in Linux: nothing there, and nothing may be sent, come before a bad address."""
    lab: Lab = request.getfixturevalue(where)
    peer, os = lab.connect(), "" if where == "ring" else "os_"
    told = "[libc.{}(c.fileno(), BAD, 9, 0x4040), ctypes.get_errno()]"
    found = lab.counted(lambda: lab.do(f"assert {told.format('recv')} == [-1, 11], ctypes.get_errno()"))
    assert found.pop("rx_poll_miss", 1) == 1
    assert found == {f"rx_{os}eagain": 1}
    peer.close()
    until(lambda: lab.do("select.select([c], [], [], 0)[0] != []"))
    assert lab.do(f"{told.format('recv')}[0]") == 0
    lab.do("c.shutdown(socket.SHUT_WR)")
    now = "" if lab.shown()["rx_offloaded"] else "os_"
    found = lab.counted(lambda: lab.do(f"assert {told.format('send')} == [-1, 32], ctypes.get_errno()"))
    assert found == {f"tx_{now}errors": 1}


@pytest.mark.parametrize("where", ["ring", "kernel"])
def test_the_end_is_nothing(request: pytest.FixtureRequest, where: str) -> None:
    """Neither a packet nor, unlike with libvma, an error: docs/vma_stats.md."""
    lab: Lab = request.getfixturevalue(where)
    lab.connect().close()
    until(lambda: lab.do("select.select([c], [], [], 0)[0] != []"))
    assert lab.counted(lambda: lab.do(f"assert [c.recv(10) for _ in range({N})] == [b''] * {N}")) == {}


def test_queues(ring: Lab, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
                world: tuple[Sandbox, Service]) -> None:  # fmt: skip
    """Gauges, and the columns of view 5."""
    peer = ring.connect()
    ring.queued(peer, N * SIZE)
    counters = ring.shown()["counters"]
    assert (counters["rx_ready_bytes"], counters["rx_ready_bytes_max"]) == (N * SIZE, N * SIZE)
    assert counters["rx_ready_packets"] == counters["rx_ready_packets_max"] == 1
    monkeypatch.setenv("VMAHYBRID_RUNDIR", str(world[1].rundir))
    assert main(["-F", "-p", str(ring.program.pid), "-v", "5"]) == 0
    local = ":".join(map(str, ring.do("c.getsockname()")))
    row = next(line for line in capsys.readouterr().out.splitlines() if local in line).split()
    assert row[:4] == ["tcp", "Yes", str(N * SIZE), "0"]
    ring.do(f"c.recv({N * SIZE})")
    counters = ring.shown()["counters"]
    assert (counters["rx_ready_bytes"], counters["rx_ready_packets"]) == (0, 0)
    assert counters["rx_ready_bytes_max"] == N * SIZE


@pytest.mark.parametrize("where", ["ring", "kernel"])
def test_names_of_both_families(request: pytest.FixtureRequest, world: tuple[Sandbox, Service], where: str,
                                capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """View 5 has them as ss(8) does, whoever serves the connection."""
    lab: Lab = request.getfixturevalue(where)
    peer = lab.connect(mapped=True)
    monkeypatch.setenv("VMAHYBRID_RUNDIR", str(world[1].rundir))
    assert main(["-F", "-p", str(lab.program.pid), "-v", "5"]) == 0
    ends = [f"[::ffff:{host}]:{port}" for host, port in (peer.getpeername(), peer.getsockname())]
    assert ends in [line.split()[4:6] for line in capsys.readouterr().out.splitlines()]


def test_sent_again(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as TCP_INFO says, on a wire that loses one segment of five; zeroed, it counts on from there."""
    total = "struct.unpack('<I', c.getsockopt(6, 11, 104)[100:104])[0]"
    with LossySandbox("test", 0.2) as sandbox, Service(without_offloads(sandbox), [sandbox.b]) as service:
        introduce(sandbox)
        lab = Lab(sandbox, service, "offload")
        monkeypatch.setenv("VMAHYBRID_RUNDIR", str(service.rundir))
        try:
            lossy(lab, lab.connect())
            until(lambda: lab.gauge("retransmits") == lab.do(total))   # a lost ACK has a segment sent once more
            again = lab.do(total)
            assert again > 0
            assert main(["-F", "-p", str(lab.program.pid), "-v", "3", "--once", "-s", str(lab.fd)]) == 0
            said = capsys.readouterr().out
            assert f"Retransmissions: {again}\n" in said and f"Retransmissions:     {again}" in said   # of its ring
            assert main(["-F", "-p", str(lab.program.pid), "-z", "--once"]) == 0
            until(lambda: lab.gauge("retransmits") == 0)
            lossy(lab, lab.peers[-1])
            until(lambda: lab.gauge("retransmits") == lab.do(total) - again)
            assert lab.gauge("retransmits") > 0
        finally:
            lab.close()


def lossy(lab: Lab, peer: socket.socket) -> None:
    """Enough segments that some are lost, all acknowledged in the end."""
    lab.do("c.setsockopt(6, 1, 1)")
    for _ in range(40):
        lab.do(f"c.send(bytes({SIZE}))")
    got = 0
    while got < 40 * SIZE:
        got += len(peer.recv(1 << 16))
    until(lambda: lab.gauge("tx_ready_bytes") == 0, 8)
