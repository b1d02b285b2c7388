"""Between ring and kernel socket there is no order. But the datagram that a program has peeked at, or whose length it
has asked for, is the one that it gets next: else it would cut it off."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from net.service_lab import module_pair, module_services, until  # noqa: F401

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service

pytestmark = [pytest.mark.root, pytest.mark.timeout(60)]

PORT = 7100
LARGE = 4000  # comes in fragments, so by the kernel; what is small comes by the ring
# sends back as many bytes as it is told to, separated by blanks
PEER = f"""
import socket
s = socket.socket(type=socket.SOCK_DGRAM)
s.bind(("10.77.0.2", {PORT}))
print("ready", flush=True)
while True:
    data, source = s.recvfrom(100)
    for size in data.split():
        s.sendto(b"x" * int(size), source)
"""
# what it has seen of a datagram, how many came in the meantime, and what it got
PROGRAM = f"""
import array, fcntl, socket, struct, sys, termios, time
how = sys.argv[1]
s = socket.socket(type=socket.SOCK_DGRAM)
s.connect(("10.77.0.2", {PORT}))
s.settimeout(3)

def order(text):
    s.send(text)
    time.sleep(0.03)

def seen():
    if how == "peek":
        return s.recv_into(bytearray(1), 1, socket.MSG_PEEK | socket.MSG_TRUNC)
    n = array.array("i", [0])
    fcntl.ioctl(s, termios.FIONREAD, n)
    return n[0]

order(b"5")
assert s.recv(100) == b"xxxxx"
for first, then in ((b"10", b"{LARGE}"), (b"{LARGE}", b"10"), (b"{LARGE} 10", b"20"), (b"10 {LARGE}", b"30")):
    for turns in range(12):  # whichever turn it is of VMA_RX_UDP_POLL_OS_RATIO
        order(first)
        length = seen()
        order(then)
        if length != seen():
            print("another one", first, then, turns, length)
        left = []
        while len(left) < len((first + b" " + then).split()):
            left.append(len(s.recv(length if not left else 9000)))
        if left[0] != length or sorted(left) != sorted(map(int, (first + b" " + then).split())):
            print("cut off", first, then, turns, length, left)
print("done")
"""


@pytest.mark.parametrize(("profile", "ways"), [("safe", "peek/fionread"), ("adaptive", "fionread/peek"),
                                               ("none", "peek/fionread")])
def test_what_was_seen_is_what_comes(service: Service, netns_pair: Sandbox, profile: str, ways: str) -> None:
    """One way on AF_XDP rings, the other on raw packet QPs: each profile has both, and so has each kind of ring."""
    how = ways.split("/")[service.softverbs]
    netns_pair.start(netns_pair.b, [sys.executable, "-c", PEER]).wait_for("ready")
    argv = service.run_argv([sys.executable, "-c", PROGRAM, how], profile)
    assert netns_pair.start(netns_pair.a, argv, env=service.env).result(50) == "done\n"


# bursts that stay unread, one whenever the file says so; then what was read
BURSTS = f"""
import socket, sys, time
s = socket.socket(type=socket.SOCK_DGRAM)
s.connect(("10.77.0.2", {PORT}))
size = 0
for line in open(sys.argv[1]):
    for _ in range(3):
        size += 1
        s.send(b"%d" % size)
        time.sleep(0.02)
    print("sent", size, flush=True)
s.settimeout(3)
print(*(len(s.recv(100)) for _ in range(size)), flush=True)
"""


@pytest.mark.parametrize("profile", ["safe", "latency"])
def test_order_over_ring_kernel_and_ring(softverbs: bool, tmp_path: Path, profile: str) -> None:
    """Unread datagrams of a ring, then of the kernel while there is no service, then of a ring again."""
    fifo = str(tmp_path / "orders")
    os.mkfifo(fifo)
    with Sandbox("order") as box, Service(box, softverbs=softverbs) as own:
        box.start(box.b, [sys.executable, "-c", PEER]).wait_for("ready")
        program = box.start(box.a, own.run_argv([sys.executable, "-c", BURSTS, fifo], profile), env=own.env)
        with open(fifo, "w", buffering=1) as orders:
            for sent in (3, 6, 9):
                if sent == 6:
                    own.program.stop(signal.SIGTERM)
                if sent == 9:
                    own.start()
                    until(lambda: bool(own.ring_flows(program.pid)), 5)
                print("send", file=orders)
                program.wait_for(rf"sent {sent}\n")
                if sent != 6:
                    assert own.ring_flows(program.pid)
        assert program.result(10).splitlines()[-1] == "1 2 3 4 5 6 7 8 9"
