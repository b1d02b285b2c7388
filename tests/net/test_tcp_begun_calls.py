"""A call that waits while its connection goes home ends as it would have: with all of its buffers, and no later."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from net.introduced_lab import introduced  # noqa: F401
from net.service_lab import homed

from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

PORT = 7788
BUFFERS, EACH = 64, 65536  # more buffers than the shim gives to the stack at once
# a peer that does next to nothing for half a second, and then as it is told
PEER = f"""
import socket, struct, time
listener = socket.create_server(("", {PORT}))
print("ready", flush=True)
while True:
    conn = listener.accept()[0]
    what = conn.recv(1)
    if what in b"rh":
        conn.sendall(b"r" if what == b"r" else b"h" * 700)
    time.sleep(0.5)
    if what == b"s":
        left = {BUFFERS * EACH}
        while left and (data := conn.recv(min(left, {EACH}))):
            left -= len(data)
        conn.sendall(b"%20d" % ({BUFFERS * EACH} - left))
    elif what == b"i":
        conn.sendall(b"i" * 2800)
        time.sleep(0.3)
        conn.sendall(b"i" * 200)
    elif what == b"m":
        for _ in range(20):
            conn.sendall(b"m" * 3000)
            conn.send(b"!", socket.MSG_OOB)
    elif what in b"uhl":
        if what == b"u":
            conn.send(b"!", socket.MSG_OOB)
            time.sleep(0.05)
        conn.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        conn.close()
        continue
    elif what == b"r":
        conn.sendall(b"r" * {BUFFERS * EACH - 1})
    try:
        conn.recv(1)
    except ConnectionResetError:
        pass    # it has left something unread
    conn.close()
"""
# one call, and dup() by another thread when it has begun, but where the peer sends it home
CALL = f"""
import os, signal, socket, sys, threading, time
what, conn = sys.argv[1], socket.create_connection((sys.argv[2], {PORT}))
buffers = [bytearray({EACH}) for _ in range({BUFFERS})]
def go_home(after):
    time.sleep(after)
    os.close(os.dup(conn.fileno()))
if what not in ("reset", "signal", "mixed"):
    threading.Thread(target=go_home, args=(1 if what == "timeout" else 0.25,)).start()
if what == "send":
    conn.send(b"s")
    print(conn.sendmsg(buffers), int(conn.recv(20, socket.MSG_WAITALL)))
elif what == "receive":
    conn.send(b"r")
    print(conn.recvmsg_into(buffers, 0, socket.MSG_WAITALL)[0], sum(b.count(b"r") for b in buffers))
elif what == "half":
    conn.send(b"h")
    print(len(conn.recv(3000, socket.MSG_WAITALL)))
    try:
        print(conn.recv(1))
    except OSError as e:
        print(repr(e))
elif what == "late":
    conn.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, (9).to_bytes(8, "little") + bytes(8))
    conn.send(b"l")
    try:
        print(conn.recv(1))
    except OSError as e:
        print(repr(e))
elif what == "mixed":
    conn.send(b"m")
    conn.settimeout(5)
    got = 0
    while got < 60000 and (data := conn.recv(3000)):
        got += data.count(b"m")     # urgent ones come, too, when there is another
    print(got)
elif what == "signal":
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.siginterrupt(signal.SIGUSR1, False)
    threading.Timer(0.25, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    conn.send(b"i")
    print(len(conn.recv(3000, socket.MSG_WAITALL)))
    go_home(0)
elif what == "reset":
    conn.settimeout(4)
    conn.send(b"u")
    try:
        print(conn.recv(1))
    except OSError as e:
        print(repr(e))
else:
    conn.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, (1).to_bytes(8, "little") + (500_000).to_bytes(8, "little"))
    begun = time.monotonic()
    try:
        conn.recv(1)
    except BlockingIOError:
        print(time.monotonic() - begun)
"""


@pytest.fixture(scope="module", autouse=True)
def slow_peer(service: Service) -> Iterator[None]:
    peer = service.sandbox.start(service.sandbox.a, [sys.executable, "-S", "-c", PEER])
    peer.wait_for("ready")
    yield
    peer.close()


def said(service: Service, policy: str, what: str) -> str:
    """By the program, whose connection went home from its ring in the midst of the call, unless ``policy`` is ""."""
    argv, before = [sys.executable, "-S", "-c", CALL, what, service.sandbox.a.address], homed(service)
    if policy:
        argv = service.run_argv(argv, "none", VMA_HYBRID_TCP=policy, VMA_RX_POLL="100")
    answer = service.sandbox.start(service.sandbox.b, argv, env=service.env).result(30)
    assert homed(service) - before == bool(policy)
    return answer


@pytest.mark.parametrize("policy", ["", "offload"], ids=["kernel", "offload"])
@pytest.mark.parametrize("what", ["send", "receive"])
def test_all_of_its_buffers(service: Service, policy: str, what: str) -> None:
    assert said(service, policy, what).split() == [str(BUFFERS * EACH)] * 2


@pytest.mark.parametrize("policy", ["", "offload"], ids=["kernel", "offload"])
def test_a_reset_in_its_second_half(service: Service, policy: str) -> None:
    """The call says what it has got, the next one why there is no more."""
    first, second = said(service, policy, "half").splitlines()
    assert first == "700"
    assert "ConnectionResetError" in second


@pytest.mark.parametrize("policy", ["", "offload"], ids=["kernel", "offload"])
def test_a_reset_before_its_time_is_over(service: Service, policy: str) -> None:
    assert "ConnectionResetError" in said(service, policy, "late")


@pytest.mark.parametrize("policy", ["", "offload"], ids=["kernel", "offload"])
def test_urgent_bytes_in_the_midst_of_others(service: Service, policy: str) -> None:
    """What comes behind the first one, until the connection is at home, is not lost, nor taken for urgent."""
    assert said(service, policy, "mixed") == "60000\n"


@pytest.mark.parametrize("policy", ["", "offload"], ids=["kernel", "offload"])
def test_a_signal_before_it_has_anything(service: Service, policy: str) -> None:
    """With SA_RESTART it ends nothing, also when data comes later. The connection goes home afterwards only."""
    assert said(service, policy, "signal") == "3000\n"


@pytest.mark.parametrize("policy", ["", "offload"], ids=["kernel", "offload"])
def test_its_time_goes_on(service: Service, policy: str) -> None:
    """SO_RCVTIMEO is of the call, wherever it waits."""
    assert 1.4 < float(said(service, policy, "timeout")) < 2.1


@pytest.mark.parametrize("policy", ["", "offload"], ids=["kernel", "offload"])
def test_a_reset_after_an_urgent_byte(service: Service, policy: str) -> None:
    """The byte sends the connection home. The peer resets it, and does not send it a second time."""
    assert "ConnectionResetError" in said(service, policy, "reset")
