"""Bad input on the control socket: refused, the connection closed, everybody else undisturbed."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from net.control_client import HEADER, Client, Closed
from net.service_lab import Api, Peer, assert_same_files, open_files, until

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service
from vmahybrid.contracts import addr_to_bytes, lib, size_of
from vmahybrid.steering.reasons import Reason

pytestmark = pytest.mark.root

HELLO, ATTACH = "struct vmh_msg_hello", "struct vmh_msg_attach"


@pytest.fixture(scope="module")
def netns_pair() -> Iterator[Sandbox]:
    with Sandbox("test") as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def service(netns_pair: Sandbox) -> Iterator[Service]:
    """The resident keeps the service in the test's own namespace, which it would leave a second after each client."""
    with Service(netns_pair) as running, Client(running.env["VMA_HYBRID_SOCKET"]) as resident:
        resident.hello()
        yield running


@pytest.fixture(autouse=True)
def others_are_undisturbed(service: Service, netns_pair: Sandbox) -> Iterator[None]:
    """A program with a ring and a flow that lives through every test; no descriptor stays in the service."""
    with Peer(service, netns_pair.a) as good:
        good.do("ring", ifname="va")
        port = good.bound("s")
        flow = good.do("attach", name="s", kind="3t", local=["10.77.0.1", port])
        before = open_files(service.program.pid)
        yield
        assert_same_files(service.program.pid, before)
        assert [f["flow_id"] for f in Api(service).socket_flows()] == [flow["flow_id"]]
        assert good.do("detach", flow_id=flow["flow_id"])["status"] == 0


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    with Client(service.env["VMA_HYBRID_SOCKET"]) as made:
        yield made


def refused(client: Client, reason: Reason, type_: int = 0) -> None:
    """The last words of the service: -EPROTO with the reason, then the end."""
    reply = client.reply()
    header = getattr(reply, "hdr", reply)
    assert (header.status, header.reason, header.type & ~lib.VMH_MSG_REPLY) == (-71, reason, type_)
    with pytest.raises(Closed):
        client.receive()


def hello_with(**header: int) -> Callable[[Client], bytes]:
    return lambda client: client.pack(lib.VMH_MSG_HELLO, HELLO, hdr=header)


@pytest.mark.parametrize(("message", "reason", "type_"), [
    (hello_with(magic=1), Reason.PROTOCOL, 0),
    (hello_with(version=lib.VMH_CTL_VERSION + 1), Reason.VERSION, lib.VMH_MSG_HELLO),
    (hello_with(len=10), Reason.PROTOCOL, lib.VMH_MSG_HELLO),
    (hello_with(len=0xFFFFFFFF), Reason.PROTOCOL, lib.VMH_MSG_HELLO),
    (hello_with(type=99), Reason.PROTOCOL, 99),
    (hello_with(type=lib.VMH_MSG_HELLO | lib.VMH_MSG_REPLY), Reason.PROTOCOL, lib.VMH_MSG_HELLO),
    (lambda client: client.pack(lib.VMH_MSG_HELLO, HELLO)[:-1], Reason.PROTOCOL, lib.VMH_MSG_HELLO),
    (lambda client: client.pack(lib.VMH_MSG_HELLO, HELLO) + b"x", Reason.PROTOCOL, lib.VMH_MSG_HELLO),
    (lambda client: client.pack(lib.VMH_MSG_HELLO, HELLO) + bytes(100000), Reason.PROTOCOL, lib.VMH_MSG_HELLO),
    (lambda _: b"short", Reason.PROTOCOL, 0),
    (lambda client: client.pack(lib.VMH_MSG_RELEASE, "struct vmh_msg_release"), Reason.PROTOCOL, lib.VMH_MSG_RELEASE),
])
def test_malformed_first_messages(client: Client, message: Callable[[Client], bytes], reason: Reason, type_: int,
                                  service: Service) -> None:
    client.send(message(client))
    refused(client, reason, type_)
    assert "refused and closed" in service.log


def test_a_second_hello(client: Client) -> None:
    assert client.hello().hdr.status == 0
    client.send(client.pack(lib.VMH_MSG_HELLO, HELLO))
    refused(client, Reason.PROTOCOL, lib.VMH_MSG_HELLO)


def test_attach_without_a_descriptor(client: Client) -> None:
    client.hello()
    client.send(client.pack(lib.VMH_MSG_ATTACH, ATTACH, kind=lib.VMH_FLOW_3T, family=4, proto=17))
    refused(client, Reason.PROTOCOL, lib.VMH_MSG_ATTACH)


@pytest.mark.parametrize(("fields", "reason"), [({"proto": 17}, Reason.TYPE), ({"kind": lib.VMH_FLOW_5T}, Reason.TYPE),
                                                ({"local_addr": addr_to_bytes("192.0.2.1")},
                                                 Reason.NOT_OFFLOADABLE_ADDR)])
def test_a_port_of_something_else(client: Client, fields: dict[str, Any], reason: Reason) -> None:
    client.hello()
    assert client.attach_port("10.77.0.1", 0, **fields).hdr.reason == reason


@pytest.mark.parametrize("fields", [{"kind": 9}, {"family": 5}, {"proto": 1}])
def test_attach_of_something_else(client: Client, fields: dict[str, int]) -> None:
    client.hello()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        client.send(client.pack(lib.VMH_MSG_ATTACH, ATTACH, **{"kind": 1, "family": 4, "proto": 17, **fields}),
                    sock.fileno())
        refused(client, Reason.PROTOCOL, lib.VMH_MSG_ATTACH)


def test_too_many_and_unasked_descriptors(service: Service) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    for count in (2, 16, 17, 200):
        with Client(service.env["VMA_HYBRID_SOCKET"]) as client:
            client.send(client.pack(lib.VMH_MSG_HELLO, HELLO), *[null] * count)
            refused(client, Reason.PROTOCOL, lib.VMH_MSG_HELLO)
    with Client(service.env["VMA_HYBRID_SOCKET"]) as client:
        client.hello()
        client.send(client.pack(lib.VMH_MSG_RING, "struct vmh_msg_ring", ifindex=1), null)
        refused(client, Reason.PROTOCOL, lib.VMH_MSG_RING)
    os.close(null)


@pytest.mark.parametrize("make", [
    lambda: os.open(os.devnull, os.O_RDONLY),
    lambda: os.pipe()[0],
    lambda: os.pidfd_open(os.getpid()),
    lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM).detach(),
    lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).detach(),
    lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).detach(),
    lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).detach(),
])
def test_descriptors_that_prove_nothing(client: Client, make: Callable[[], int]) -> None:
    client.hello()
    fd = make()
    try:
        reply = client.attach(fd, "3t", ("10.77.0.1", 5000))
        assert (reply.hdr.status, reply.hdr.reason, reply.flow_id) == (-1, Reason.NOT_OWNER, 0)
        # refused, not thrown out
        assert client.detach(12345).status == 0
    finally:
        os.close(fd)


def test_what_is_to_be_renewed_and_is_no_socket(client: Client, service: Service) -> None:
    """Nothing of it stays in the service; one that is no parked connection is left alone."""
    client.hello()
    memory = os.memfd_create("none")
    before = open_files(service.program.pid)
    try:
        for _ in range(20):
            assert client.call(lib.VMH_MSG_TCP_RENEW, "struct vmh_msg_tcp_renew", memory).status < 0
    finally:
        os.close(memory)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        assert client.call(lib.VMH_MSG_TCP_RENEW, "struct vmh_msg_tcp_renew", sock.fileno()).status == 0
        assert sock.getsockname()[1]
    assert_same_files(service.program.pid, before)


def test_a_socket_that_lingers_holds_nobody_up(client: Client, service: Service) -> None:
    """close(2) of a TCP socket with SO_LINGER and unsent data waits for a minute: not in the service's loop."""
    client.hello()
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\5\0\0\0")  # 5 s
        sender.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                sender.send(bytes(1 << 20))
        client.send(client.pack(lib.VMH_MSG_ATTACH, ATTACH, kind=1, family=4, proto=17), sender.fileno())
        os.close(sender.detach())
        begun = time.monotonic()
        assert client.reply().hdr.reason == Reason.NOT_OWNER
        assert Api(service).status()["ready"]
        assert time.monotonic() - begun < 2
        server.accept()[0].close()


def test_other_peoples_flows_and_rings(client: Client, service: Service) -> None:
    flow = Api(service).socket_flows()[0]
    client.hello()
    assert client.detach(flow["flow_id"]).status == 0  # nothing of this program's, so nothing to do
    assert [f["flow_id"] for f in Api(service).socket_flows()] == [flow["flow_id"]]
    ring = Api(service).call("GET", "/v1/rings")[1]
    ring_id = (ring["rings"] if isinstance(ring, dict) else ring)[0]["ring_id"]
    released = client.release(ring_id)
    assert (released.status, released.reason) == (-1, Reason.NOT_OWNER)


def test_a_program_that_does_not_read(service: Service) -> None:
    """Its replies pile up in its socket; then it is taken for lost."""
    with Client(service.env["VMA_HYBRID_SOCKET"]) as client:
        client.hello()
        message = client.pack(lib.VMH_MSG_DETACH, "struct vmh_msg_detach", flow_id=1)
        client.sock.settimeout(20)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while True:  # ends in the test's time limit if the service goes on
                client.send(message)


def test_a_flood_leaves_room_for_others(service: Service, client: Client) -> None:
    with Client(service.env["VMA_HYBRID_SOCKET"]) as flood:
        flood.hello()
        flood.sock.setblocking(False)
        message = flood.pack(lib.VMH_MSG_DETACH, "struct vmh_msg_detach", flow_id=1)
        until_time = time.monotonic() + 1.0
        client.hello()
        slowest = 0.0
        while time.monotonic() < until_time:
            try:
                while True:
                    flood.send(message)
            except BlockingIOError:
                pass
            try:
                while True:
                    flood.sock.recv(1024)
            except BlockingIOError:
                pass
            begun = time.monotonic()
            assert client.detach(1).status == 0
            slowest = max(slowest, time.monotonic() - begun)
        assert slowest < 0.5


def test_nothing_is_said(service: Service) -> None:
    """Connections without a word cost a descriptor or two each and end by themselves."""
    before = open_files(service.program.pid)
    idle = [Client(service.env["VMA_HYBRID_SOCKET"]) for _ in range(50)]
    until(lambda: len(open_files(service.program.pid)) >= len(before) + 100)
    with Client(service.env["VMA_HYBRID_SOCKET"]) as client:
        assert client.hello().hdr.status == 0
    for client in idle:
        client.close()


def test_a_statistics_file_that_is_none(service: Service, tmp_path: object) -> None:
    for make in (lambda: os.open("/dev/null", os.O_RDWR), lambda: os.open("/proc/self/status", os.O_RDONLY),
                 lambda: os.memfd_create("small"), lambda: os.pipe()[1]):
        fd = make()
        with Client(service.env["VMA_HYBRID_SOCKET"]) as client:
            assert client.hello(fd).hdr.status == 0
            assert Api(service).call("GET", f"/v1/processes/{os.getpid()}")[0] == 200
            assert Api(service).call("GET", f"/v1/processes/{os.getpid()}/stats")[0] == 404
        os.close(fd)


def test_header_size_is_what_both_sides_think() -> None:
    assert size_of(HEADER) == 24
