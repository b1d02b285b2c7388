"""What takes a TCP connection from its ring: each move is an event with its reason, and VMA_EXCEPTION_HANDLING acts as
it does for UDP."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator

import pytest
from net.service_lab import Api, under_shim, until
from net.test_tcp_move_commands import events
from net.test_tcp_shim import offloaded, without_offloads

from vmahybrid.bench.sandbox import Program, Sandbox
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

PORT = 7400
ECHO = """
import socket, sys, threading
def serve(sock):
    with sock:
        while data := sock.recv(65536):
            sock.sendall(data)
with socket.create_server((sys.argv[1], int(sys.argv[2])), backlog=64) as listener:
    print("ready", flush=True)
    while True:
        threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""
# connects, is busy, and makes the calls that are named
PROGRAM = """
import array, ctypes, fcntl, json, os, socket, sys, time
address, port, *calls = sys.argv[1:]
s = socket.create_connection((address, int(port)))
s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for _ in range(100):
    s.sendall(b"x" * 20)
    assert len(s.recv(20, socket.MSG_WAITALL)) == 20
fd, file, told = s.fileno(), os.open("/proc/self/exe", os.O_RDONLY), {}
r, w = os.pipe()
os.write(w, b"spliced")

def fork():
    if not os.fork():
        os._exit(0)
    os.wait()

def passed():
    a, b = socket.socketpair()
    a.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])

def execute():
    os.set_inheritable(fd, True)
    os.execv(sys.executable, [sys.executable, "-Sc", "print('{}', flush=True); import time; time.sleep(60)"])

def execute_at():
    os.set_inheritable(fd, True)
    argv = [os.fsencode(sys.executable), b"-Sc", b"print('{}', flush=True); import time; time.sleep(60)"]
    environment = [b"%s=%s" % pair for pair in os.environb.items()]
    vectors = [(ctypes.c_char_p * (len(words) + 1))(*words) for words in (argv, environment)]
    ctypes.CDLL(None).execveat(-100, argv[0], *vectors, 0)

CALLS = {
    "sockopt": lambda: s.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno"),
    "ioctl": lambda: fcntl.ioctl(fd, 0x5421 + 0x10000, b"\\0" * 16),
    "oob": lambda: s.send(b"!", socket.MSG_OOB),
    "errqueue": lambda: s.recvmsg(1, 100, socket.MSG_ERRQUEUE | socket.MSG_DONTWAIT),
    "dup": lambda: os.dup(fd),
    "dup2": lambda: os.dup2(fd, 200),
    "dupfd": lambda: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 150),
    "sendfile": lambda: os.sendfile(fd, file, 0, 3),
    "splice": lambda: os.splice(r, fd, 7),
    "preadv": lambda: os.pwritev(fd, [b"x"], 0),
    "close": s.close, "fork": fork, "passed": passed, "exec": execute, "execat": execute_at,
    "pidfd": lambda: ctypes.CDLL(None).pidfd_getfd(os.pidfd_open(os.getpid()), fd, 0),
    "same": lambda: os.dup2(fd, fd), "inheritable": lambda: fcntl.ioctl(fd, 0x5450, b""),
}
for call in calls:
    try:
        CALLS[call]()
        told[call] = 0
    except OSError as error:
        told[call] = error.errno
print(json.dumps(told), flush=True)
if calls != ["close"]:
    time.sleep(60)
"""
KERNELS = ["sockopt", "oob", "errqueue", "dup", "dup2", "dupfd", "sendfile", "splice", "preadv", "ioctl"]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Sandbox("test") as sandbox, Service(without_offloads(sandbox)) as running:
        sandbox.start(sandbox.b, [sys.executable, "-uc", ECHO, sandbox.b.address, str(PORT)]).wait_for("ready")
        yield running


def begin(service: Service, policy: str, *calls: str, **variables: str) -> Program:
    box = service.sandbox
    argv = under_shim(service, [sys.executable, "-uc", PROGRAM, box.b.address, str(PORT), *calls], profile="none",
                      VMA_HYBRID_TCP=policy, VMA_RX_POLL="100", **({"VMA_HYBRID_TCP_ROUNDS": "8"} | variables))
    return box.start(box.a, argv, env=service.env)


def told(program: Program) -> dict[str, int]:
    found: dict[str, int] = json.loads(program.wait_for(r"\{.*\}\n")[0])
    return found


def ended(program: Program) -> str:
    """Its standard error."""
    program.stop(signal.SIGKILL)
    return program.errors


def test_calls_fail_where_that_was_asked_for(service: Service) -> None:
    program = begin(service, "offload", *KERNELS, VMA_EXCEPTION_HANDLING="2")
    assert told(program) == dict.fromkeys(KERNELS, 22)
    until(lambda: offloaded(service), what=lambda: str(Api(service).call("GET", "/v1/sockets")))
    assert ended(program).count("VMA ERROR: fd ") == len(KERNELS)
    until(lambda: not offloaded(service))


@pytest.mark.parametrize("policy", ["offload", "adaptive"])
@pytest.mark.parametrize("call", KERNELS)
def test_one_is_logged_and_made(service: Service, policy: str, call: str) -> None:
    program = begin(service, policy, call, VMA_EXCEPTION_HANDLING="1")
    failed = {"errqueue": 11, "preadv": 29, "ioctl": 25}.get(call, 0)     # as the kernel has it
    assert told(program) == {call: failed}
    assert not offloaded(service)
    assert ended(program).count("VMA ERROR: fd ") == 1


@pytest.mark.parametrize("mode", ["-1", "0"])
def test_others_are_not_logged(service: Service, mode: str) -> None:
    program = begin(service, "offload", "oob", VMA_EXCEPTION_HANDLING=mode)
    assert told(program) == {"oob": 0}
    assert "VMA ERROR" not in ended(program)


def test_abort(service: Service) -> None:
    program = begin(service, "offload", "dup", VMA_EXCEPTION_HANDLING="3")
    assert program.wait(20) == -signal.SIGABRT
    assert "VMA_EXCEPTION_HANDLING=3" in program.errors
    until(lambda: not offloaded(service))


def test_no_exceptions(service: Service) -> None:
    """What only looks like one, what is no call on the connection, and sockets that the kernel has."""
    calls = ["same", "fork"]
    program = begin(service, "offload", *calls, VMA_EXCEPTION_HANDLING="2")
    assert told(program) == dict.fromkeys(calls, 0)
    assert "VMA ERROR" not in ended(program)
    program = begin(service, "adaptive", "dup", VMA_EXCEPTION_HANDLING="2", VMA_HYBRID_TCP_ROUNDS="1000")
    assert told(program) == {"dup": 0}
    ended(program)


REASONS = {"sockopt": "sockopt", "oob": "tcp-urgent", "errqueue": "send-flags", "dup": "dup", "dup2": "dup",
           "dupfd": "dup", "sendfile": "sendfile", "splice": "sendfile", "ioctl": "ioctl", "preadv": "unknown-call",
           "close": "closed", "fork": "fork", "passed": "fd-passed", "exec": "exec", "execat": "exec", "pidfd": "dup",
           "inheritable": "exec"}


@pytest.mark.parametrize("call", REASONS)
def test_each_move_has_its_reason(service: Service, call: str) -> None:
    """It was adopted, since a connection that began on its ring is closed there."""
    program = begin(service, "adaptive", call)
    told(program)

    def moves() -> list[tuple[str, str]]:
        return [event for event in events(service, program.pid) if event[0] in ("tcp-home", "tcp-adopted")]

    until(lambda: len(moves()) == 2, what=lambda: str(moves()))
    assert moves() == [("tcp-adopted", "tcp-busy"), ("tcp-home", REASONS[call])]
    ended(program)


def test_one_that_the_kernel_has_opened(service: Service) -> None:
    """A bound socket connects by the kernel, and comes to the ring at once."""
    text = PROGRAM.replace("s = socket.create_connection((address, int(port)))",
                           "s = socket.create_connection((address, int(port)), source_address=('', 0))")
    box = service.sandbox
    argv = service.run_argv([sys.executable, "-uc", text, box.b.address, str(PORT)], "none", VMA_HYBRID_TCP="offload")
    program = box.start(box.a, argv, env=service.env)
    told(program)
    until(lambda: ("tcp-adopted", "tcp-offload") in events(service, program.pid),
          what=lambda: str(events(service, program.pid)))
    ended(program)
