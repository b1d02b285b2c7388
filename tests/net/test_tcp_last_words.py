"""What send() took arrives when the program ends at once, or the service stops, and the peer had closed its side: it
reads, some time, and must get all and the end of the stream."""

from __future__ import annotations

import sys
import time

import pytest
from net.service_lab import under_shim
from net.test_tcp_shim import bare_pair, over, served, with_ipv6, without_offloads  # noqa: F401
from net.test_tcp_syn import know

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

SPEAKS = """
import os, socket, struct, sys, time
role, how, size, address, port = *sys.argv[1:3], int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
if role == "server":
    listener = socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    print("ready", flush=True)
    sock = listener.accept()[0]
else:
    sock = socket.create_connection((address, port))
while sock.recv(1 << 16):
    pass
sock.sendall(b"x" * size)
if how == "leaves":
    os._exit(0)
if how == "lingers":
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 6))
    print("said", flush=True)
sock.close()
print("said", flush=True)
if how == "executes":
    os.execv("/bin/sleep", ["sleep", "5"])
if how in ("waits", "lingers"):
    time.sleep(20)
"""
LISTENS = """
import socket, sys, time
role, size, rest, buffer, address, port = *sys.argv[1:2], int(sys.argv[2]), *map(float, sys.argv[3:5]), *sys.argv[5:]
family = socket.AF_INET6 if ":" in address else socket.AF_INET
with socket.socket(family, socket.SOCK_STREAM) as sock:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, int(buffer))
    if role == "client":
        sock.connect((address, int(port)))
    else:
        sock.bind((address, int(port)))
        sock.listen()
        print("ready", flush=True)
        sock = sock.accept()[0]
    sock.settimeout(10)
    sock.send(b"question")
    sock.shutdown(socket.SHUT_WR)
    time.sleep(rest)
    got = 0
    try:
        while part := sock.recv(size):
            got += len(part)
            if rest == 0:
                time.sleep(0.002)
        print("all of", got)
    except OSError as error:
        print("got", got, error)
"""
# bytes said; then of the peer: bytes of a recv(), seconds before the first one, SO_RCVBUF
STEADY = 300000, 16384, 0, 65536
RESTS = 300000, 65536, 0.4, 20000
NARROW = 20000, 65536, 0.4, 1
PORT = iter(range(7500, 7600))


class Talk:
    """A program under the shim that says its last words, and its peer on the kernel."""

    def __init__(self, service: Service, box: Sandbox, ip: str, role: str, how: str, case: tuple[float, ...]) -> None:
        size, *peer = case
        ends = {"server": (box.b, box.a), "client": (box.a, box.b)}[role]
        to = [over(box.b, ip).address, str(next(PORT))]
        other = "client" if role == "server" else "server"
        speaks = under_shim(service, [sys.executable, "-S", "-c", SPEAKS, role, how, str(size), *to],
                            VMA_HYBRID_TCP="offload")
        listens = [sys.executable, "-S", "-c", LISTENS, other, *map(str, peer), *to]
        starts = [lambda: box.start(ends[0], speaks, env=service.env), lambda: box.start(ends[1], listens)]
        if role == "client":
            starts.reverse()
        made = [starts[0]()]
        made[0].wait_for("ready")
        made.append(starts[1]())
        self.speaker, self.listener = made if role == "server" else reversed(made)
        self.size = size

    def ends_well(self) -> None:
        assert self.listener.result(15).split()[-3:] == ["all", "of", str(self.size)]


@pytest.fixture(scope="module", autouse=True)
def known(service: Service, netns_pair: Sandbox) -> None:
    know(netns_pair, "4", "6")


@pytest.mark.parametrize("ip", ["4", "6"])
@pytest.mark.parametrize(("role", "how", "case"), [
    ("server", "returns", STEADY), ("client", "returns", STEADY), ("server", "returns", RESTS),
    ("client", "returns", RESTS), ("server", "returns", NARROW), ("client", "returns", NARROW),
    ("client", "leaves", RESTS), ("server", "executes", RESTS), ("client", "executes", RESTS)],
    ids=lambda value: {STEADY: "steady", RESTS: "rests", NARROW: "narrow"}.get(value, value))
def test_the_program_ends(service: Service, netns_pair: Sandbox, role: str, ip: str, how: str,
                          case: tuple[float, ...]) -> None:
    began = time.monotonic()
    talk = Talk(service, netns_pair, ip, role, how, case)
    if how != "executes":
        assert talk.speaker.wait(5) == 0
        assert time.monotonic() - began < 4
    talk.ends_well()
    talk.speaker.close()


@pytest.mark.parametrize("how", ["waits", "lingers"])
@pytest.mark.parametrize("ip", ["4", "6"])
def test_the_service_stops(softverbs: bool, ip: str, how: str) -> None:
    """While a connection that the program has closed, or is about to, still sends."""
    with Sandbox("stop") as box, Service(with_ipv6(without_offloads(box)), softverbs=softverbs) as service:
        know(box, "4", "6")
        talk = Talk(service, box, ip, "client", how, RESTS)
        talk.speaker.wait_for("said")
        service.stop()
        talk.ends_well()
        talk.speaker.close()
