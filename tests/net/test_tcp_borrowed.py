"""The child of a vfork brings connections home from the memory of its parent, with descriptors of its own: who waits in
the parent hears of it. And a server whose connections are others'."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from net.service_lab import compiled, homed
from net.test_tcp_seen import Lab, lab, service_of_tcp  # noqa: F401

pytestmark = pytest.mark.root

STEPS = """
import select, subprocess

def connects():
    global conn
    conn = tcp()
    conn.connect(far)

def waits(how):
    global told, heard
    told = select.epoll()
    told.register(conn, FLAGS[how])

def child():
    # its descriptors, but for this one, are closed before it executes
    subprocess.run(["/bin/true"], pass_fds=[conn.fileno()], check=True)

def hears(seconds=3):
    return [events & select.EPOLLIN for fd, events in told.poll(seconds)] == [select.EPOLLIN]

FLAGS = {"level": select.EPOLLIN, "edge": select.EPOLLIN | select.EPOLLET, "once": select.EPOLLIN | select.EPOLLONESHOT,
         "exclusive": select.EPOLLIN | select.EPOLLEXCLUSIVE}

"""
IN_TIME = 3.0  # seconds; the poll waits for 6

SERVER = """
import select, subprocess

def serves():
    global listener, ours, theirs
    listener = tcp()
    listener.bind((here, 0))
    listener.listen()
    select.select([listener], [], [], 0)
    ours, theirs = socket.socketpair()
    return listener.getsockname()[1]

def hands_on(to):
    conn, _ = listener.accept()
    if to == "input":
        answers = ["sh", "-c", "head -c 3; printf answer >&0"]
        done = subprocess.run(answers, stdin=conn, stdout=subprocess.PIPE, check=True)
        conn.close()
        return done.stdout.decode()
    socket.send_fds(ours, [b"x"], [conn.fileno()])
    conn.close()
    _, fds, _, _ = socket.recv_fds(theirs, 1, 1)
    with socket.socket(fileno=fds[0]) as conn:
        said = conn.recv(10)
        conn.sendall(b"answer")
    return said.decode()
"""



@pytest.mark.parametrize("how", ["level", "edge", "once", "exclusive"])
@pytest.mark.parametrize("policy", ["offload", "kernel"])
def test_a_set_of_the_parent(lab: Lab, policy: str, how: str) -> None:  # noqa: F811
    program = lab.program(VMA_HYBRID_TCP=policy)
    program.do(STEPS)
    for _ in range(3):
        program.do("connects()")
        there = lab.accept()
        program.do(f"waits({how!r})")
        program.do("child()")
        there.sendall(b"a")
        assert program.do("hears()")
        assert program.do("conn.recv(10).decode()") == "a"
        program.do("told.close(); conn.close()")


@pytest.fixture(scope="module")
def waits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory, "vfork_waits.c", "-pthread")


@pytest.mark.parametrize("policy", ["offload", "kernel"])
def test_a_thread_of_the_parent(lab: Lab, waits: Path, policy: str) -> None:  # noqa: F811
    argv = [str(waits), lab.sandbox.a.address, str(lab.port)]
    program = lab.sandbox.start(lab.sandbox.b, lab.service.run_argv(argv, "none", VMA_HYBRID_TCP=policy,
                                                                    VMA_SELECT_POLL="0"), env=lab.service.env)
    there = lab.accept()
    program.wait_for("child", 5)
    there.sendall(b"a")
    said = program.wait_for(r"(\w+) after (\d+\.\d)", 8)
    assert said[1] == "readable"
    assert float(said[2]) < IN_TIME


@pytest.mark.parametrize("to", ["passed", "input"])
def test_a_server_that_hands_its_connections_on(lab: Lab, to: str) -> None:  # noqa: F811
    """After a few they come to the kernel's listener, and none has to go home."""
    program = lab.program()
    program.do(f"{SERVER}")
    port = program.do("serves()")
    before = homed(lab.service)
    for _ in range(20):
        with lab.worker.socket(socket.AF_INET, socket.SOCK_STREAM) as client:
            client.settimeout(5)
            client.connect((lab.sandbox.b.address, port))
            client.sendall(b"ask")
            assert program.do(f"hands_on({to!r})") == "ask"
            assert client.recv(10) == b"answer"
    assert homed(lab.service) - before < 8
