"""Parameters of TCP that concern listeners, the internal thread and the send queue."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from net.test_tcp_params import experiment, first_ack, served_pair  # noqa: F401

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service

pytestmark = [pytest.mark.root, pytest.mark.timeout(60)]
Served = tuple[Sandbox, Service]

SERVER = """
import socket, sys, time
listener = socket.create_server((sys.argv[1], int(sys.argv[2])), backlog=100)
listener.settimeout(0.1)
try:
    listener.accept()  # rings listen from here on
except TimeoutError:
    pass
print("ready", flush=True)
time.sleep(5)
"""
MANY = """
import select, socket, sys, time
kept = []
for _ in range(12):
    kept.append(socket.socket())
    kept[-1].setblocking(False)
    kept[-1].connect_ex((sys.argv[1], int(sys.argv[2])))
time.sleep(0.6)
print(len(select.select([], kept, [], 0)[1]))
"""
ONE_BY_ONE = """
import socket, sys, time
kept, took = [], 0.0
for _ in range(4):
    time.sleep(0.02)  # until the other side looks seldom again
    begin = time.monotonic()
    kept.append(socket.create_connection((sys.argv[1], int(sys.argv[2]))))
    took += time.monotonic() - begin
print(took)
"""
SENDER = """
import socket, sys, time
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("ready", flush=True)
for _ in range(2):  # of the second the listener has a ring
    sock, _ = listener.accept()
    sock.recv(1)
    sock.sendall(bytes(400000))
time.sleep(5)
"""
READER = """
import socket, sys, time
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as sock:
    sock.sendall(b"1")
    sock.recv(400000, socket.MSG_WAITALL)
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as sock:
    begin = time.monotonic()
    sock.sendall(b"2")
    sock.recv(400000, socket.MSG_WAITALL)
    print(time.monotonic() - begin)
"""
FILL = """
import json, socket, sys, time
s = socket.create_connection((sys.argv[1], 7390))
s.close()
time.sleep(0.2)
s = socket.create_connection((sys.argv[1], 7390))
s.setblocking(False)
sent = 0
for _ in range(20):
    try:
        while True:
            sent += s.send(bytes(100000))
    except BlockingIOError:
        time.sleep(0.02)
print(json.dumps(sent), flush=True)
"""
DEAF = """
import socket, sys, time
listener = socket.create_server((sys.argv[1], 7390))
listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
print("ready", flush=True)
kept = [listener.accept() for _ in range(4)]
time.sleep(20)
"""


def told(served: Served, client: str, port: int, server_program: str = SERVER, **variables: str) -> float:
    """What the kernel's client on side b says to a listener under the shim on side a, which sleeps."""
    sandbox, service = served
    a, b = sandbox.sides
    settings = {"VMA_HYBRID_TCP": "offload", "VMA_TRACELEVEL": "warn", "VMA_PROGRESS_ENGINE_INTERVAL": "0", **variables}
    argv = service.run_argv([sys.executable, "-c", server_program, a.address, str(port)], "none", **settings)
    server = sandbox.start(a, argv, env=service.env)
    server.wait_for("ready")
    try:
        return float(sandbox.start(b, [sys.executable, "-c", client, a.address, str(port)]).result(10))
    finally:
        server.stop()


def test_syn_rate(served: Served) -> None:
    """Twelve SYNs at once; what was refused is sent again after a second."""
    assert told(served, MANY, 7391, VMA_TCP_MAX_SYN_RATE="0") == 12
    assert told(served, MANY, 7392, VMA_TCP_MAX_SYN_RATE="4") == 4


@pytest.mark.parametrize("policy", ["kernel", "adaptive", "offload"])
def test_syn_rate_where_the_kernel_listens(served: Served, policy: str) -> None:
    sandbox, service = served
    makes_one = [sys.executable, "-S", "-c", "import socket; socket.socket()"]
    argv = service.run_argv(makes_one, "none", VMA_HYBRID_TCP=policy, VMA_TCP_MAX_SYN_RATE="4",
                            VMA_TRACELEVEL="details")  # fmt: skip
    program = sandbox.start(sandbox.a, argv, env=service.env)
    program.result(10)
    assert program.errors.count("VMA_TCP_MAX_SYN_RATE has no effect where the kernel listens") == (policy != "offload")


def test_the_internal_thread_handles_control_packets(served: Served) -> None:
    """The program sleeps: the internal thread answers a SYN when it looks, or at once when it is woken."""
    rarely = {"VMA_TIMER_RESOLUTION_MSEC": "300"}
    assert told(served, ONE_BY_ONE, 7393, VMA_TCP_CTL_THREAD="0", **rarely) > 0.3
    assert told(served, ONE_BY_ONE, 7394, VMA_TCP_CTL_THREAD="2", **rarely) > 0.3
    assert told(served, ONE_BY_ONE, 7395, VMA_TCP_CTL_THREAD="1", **rarely) < 0.1


def test_a_full_buffer_of_a_program_that_sleeps(served: Served) -> None:
    """The internal thread looks seldom, and often once it has had something to answer for the program."""
    took = told(served, READER, 7396, SENDER, VMA_TIMER_RESOLUTION_MSEC="300")
    assert took < 1, took


def test_timers_in_the_internal_thread(served: Served) -> None:
    """Handled at once, it looks at them each millisecond; deferred, when it looks anyway."""
    rarely = {"VMA_TIMER_RESOLUTION_MSEC": "200", "VMA_PROGRESS_ENGINE_INTERVAL": "0"}
    handling = "VMA_INTERNAL_THREAD_TCP_TIMER_HANDLING"
    assert experiment(served, "idle", **rarely, **{handling: "0"})["wakeups"] < 50
    assert experiment(served, "idle", **rarely, **{handling: "1"})["wakeups"] > 300
    assert first_ack(experiment(served, "acks", **rarely, **{handling: "1"})) < 70


@pytest.fixture(scope="module")
def deaf(served: Served) -> Iterator[None]:
    sandbox, _ = served
    program = sandbox.start(sandbox.b, [sys.executable, "-c", DEAF, sandbox.b.address])
    program.wait_for("ready")
    yield
    program.stop()


def filled(served: Served, segments: int) -> Any:
    sandbox, service = served
    argv = service.run_argv([sys.executable, "-c", FILL, sandbox.b.address], "none", VMA_HYBRID_TCP="offload",
                            VMA_TRACELEVEL="warn", VMA_TX_SEGS_TCP=str(segments))
    return json.loads(sandbox.start(sandbox.a, argv, env=service.env).result(10))


def test_segments_that_wait(served: Served, deaf: None) -> None:
    """What a connection takes whose peer reads nothing."""
    many, few = filled(served, 1000000), filled(served, 20)
    assert many > 2 * few, (many, few)
    assert few < 20 * 1460 + 65536
