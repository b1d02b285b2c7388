"""`ss -K` ends a connection wherever it is: the program and its peer hear what they would of the kernel's."""

from __future__ import annotations

import errno
import socket
import struct
import subprocess
import time
from typing import Any

import pytest
from net.counter_lab import Program
from net.service_lab import until
from net.test_tcp_seen import Lab, lab, service_of_tcp  # noqa: F401

pytestmark = pytest.mark.root

STEPS = """
import resource, select, threading, time

def connects():
    global s
    s = tcp()
    s.connect(far)
    return s.getsockname()[1]

def waits():
    global thread, heard
    heard = []
    thread = threading.Thread(target=lambda: heard.append(fails(s.recv, 100)))
    thread.start()

def has_heard():
    thread.join(3)
    return heard

def watches():
    global told
    told = select.epoll()
    told.register(s, select.EPOLLIN)

def is_told():
    return [events for fd, events in told.poll(3)]

def calls():
    global stop, thread
    stop = False
    thread = threading.Thread(target=lambda: [select.select([s], [], [], 0.02) for _ in iter(lambda: stop, True)])
    thread.start()

def busy():
    began = time.process_time()
    time.sleep(0.5)
    return time.process_time() - began
"""
ANEW = """
import ctypes

def disconnects():
    return ctypes.CDLL(None).connect(s.fileno(), bytes(16), 16)  # AF_UNSPEC
"""
QUEUE = """
import ctypes

def queue():
    info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    return list(struct.unpack_from("II", info, 24))  # tcpi_unacked, tcpi_sacked: waiting, and how many may

def ends_its_listening():
    return ctypes.CDLL(None).connect(s.fileno(), bytes(16), 16)  # AF_UNSPEC
"""
WAYS = ["kernel", "adopted", "shown"]


def lists(lab: Lab, port: int, *options: str) -> str:  # noqa: F811
    argv = lab.sandbox.b.command(["ss", "-Htn", *options, "sport", "=", f":{port}"])
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=10).stdout


def adopted(lab: Lab, program: Program, fd: str = "") -> None:  # noqa: F811
    """One without a ring hears of it in its calls."""
    program.do("calls()")
    try:
        assert "on a ring:" in lab.service.ask("adopt", f"{program.pid}{fd}")
    finally:
        program.do("stop = True\nthread.join()")


def begun(lab: Lab, way: str) -> tuple[Program, int, Any]:  # noqa: F811
    """The program, the port of its connection, and the peer's socket."""
    program = lab.program(VMA_HYBRID_TCP={"kernel": "kernel", "adopted": "adaptive", "shown": "offload"}[way])
    program.do(STEPS)
    port = program.do("connects()")
    peer = lab.accept()
    if way == "adopted":
        adopted(lab, program, f":{program.do('s.fileno()')}")
    peer.sendall(b"first")
    assert program.do("s.recv(100).decode()") == "first"
    assert way == "kernel" or program.socket()["offloaded"]
    until(lambda: "ESTAB" in lists(lab, port), 5)
    return program, port, peer


def ended(lab: Lab, port: int) -> None:  # noqa: F811
    assert "ESTAB" in lists(lab, port, "-K")


def is_reset(peer: Any) -> bool:
    peer.settimeout(3)
    with pytest.raises(ConnectionResetError):
        peer.recv(1)
    return True


@pytest.mark.parametrize("way", WAYS)
def test_a_call_that_waits(lab: Lab, way: str) -> None:  # noqa: F811
    program, port, peer = begun(lab, way)
    program.do("waits()")
    time.sleep(0.1)
    ended(lab, port)
    assert program.do("has_heard()") == ["Software caused connection abort"]
    assert is_reset(peer)
    assert program.do("fails(s.send, b'x')") == "Broken pipe"
    assert program.do("s.close()") is None


@pytest.mark.parametrize("way", WAYS)
def test_a_set_and_what_was_unread(lab: Lab, way: str) -> None:  # noqa: F811
    program, port, peer = begun(lab, way)
    program.do("watches()")
    ended(lab, port)
    assert program.do("is_told()") == [0x1 | 0x8 | 0x10]  # IN, ERR, HUP
    assert is_reset(peer)
    assert program.do("fails(s.recv, 100)") == "Software caused connection abort"
    assert program.do("len(s.recv(100))") == 0
    program.do("told.close()\ns.close()")

    program, port, peer = begun(lab, way)
    peer.sendall(b"unread")
    program.do("select.select([s], [], [], 3)")
    ended(lab, port)
    assert is_reset(peer)
    assert program.do("s.recv(100).decode()") == "unread"
    assert program.do("fails(s.recv, 100)") == "Software caused connection abort"


@pytest.mark.parametrize("way", WAYS)
def test_nobody_spins_afterwards(lab: Lab, way: str) -> None:  # noqa: F811
    program, port, peer = begun(lab, way)
    program.do("watches()\ns.setblocking(False)")
    ended(lab, port)
    assert is_reset(peer)
    assert program.do("busy()") < 0.25  # a core for as long would be 0.5


@pytest.mark.parametrize("way", ["adopted", "shown"])
def test_one_that_has_been_home(lab: Lab, way: str) -> None:  # noqa: F811
    """It is the kernel's to end then, and the ring's again when it is back."""
    program, port, peer = begun(lab, way)
    name = f"{program.pid}:{program.do('s.fileno()')}"
    assert "on the kernel:" in lab.service.ask("home", name)
    peer.sendall(b"second")
    assert program.do("s.recv(100).decode()") == "second"
    adopted(lab, program, f":{program.do('s.fileno()')}")
    peer.sendall(b"third")
    assert program.do("s.recv(100).decode()") == "third"
    program.do("waits()")
    ended(lab, port)
    assert program.do("has_heard()") == ["Software caused connection abort"]
    assert is_reset(peer)


@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize("how", ["killed", "reset", "closed"])
@pytest.mark.parametrize("way", WAYS)
def test_the_socket_may_have_another(lab: Lab, way: str, how: str, later: bool) -> None:  # noqa: F811
    """connect() to AF_UNSPEC, on one that was ended, that the peer has reset, or whose both sides have closed."""
    program, port, peer = begun(lab, way)
    program.do(ANEW)
    if how == "killed":
        ended(lab, port)
        assert is_reset(peer)
    if how == "reset":
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()
    program.do("select.select([s], [], [], 3)\nfails(s.recv, 100)\nfails(s.shutdown, 1)")
    time.sleep(2 if later else 0.1)     # `ss` is looked after once a second
    assert program.do("disconnects()") == 0
    assert program.do("[fails(s.getpeername), fails(s.recv, 1)]") == 2 * ["Transport endpoint is not connected"]
    assert program.do("fails(s.connect, (far[0], 9))") == "Connection refused"
    program.do("s.connect(far)")
    peer = lab.accept()
    peer.sendall(b"second")
    assert program.do("s.recv(100).decode()") == "second"
    program.do("s.sendall(b'third')")
    assert peer.recv(100) == b"third"


@pytest.mark.parametrize("way", ["kernel", "offload"])
def test_a_listener(lab: Lab, way: str) -> None:  # noqa: F811
    program = lab.program(VMA_HYBRID_TCP=way)
    program.do(STEPS + "\ns = tcp()\ns.bind((here, 0))\ns.listen()\ns.setblocking(False)\nfails(s.accept)")
    port = program.do("s.getsockname()[1]")
    assert way == "kernel" or program.socket()["offloaded"]
    with lab.worker.socket(socket.AF_INET, socket.SOCK_STREAM) as waits, \
            lab.worker.socket(socket.AF_INET, socket.SOCK_STREAM) as late:  # fmt: skip
        waits.connect((program.address, port))
        program.do("select.select([s], [], [], 3)\nwatches()")
        argv = lab.sandbox.b.command(["ss", "-HtlnK", "sport", "=", f":{port}"])
        assert "LISTEN" in subprocess.run(argv, capture_output=True, text=True, check=True, timeout=10).stdout
        assert is_reset(waits)
        assert late.connect_ex((program.address, port)) == errno.ECONNREFUSED
        assert program.do("is_told()") == [0x1 | 0x8 | 0x10]  # IN, ERR, HUP
        assert program.do("[fails(s.accept) for _ in range(3)]") == ["Invalid argument"] * 3


@pytest.mark.parametrize("way", ["kernel", "offload"])
def test_a_listener_is_disconnected(lab: Lab, way: str) -> None:  # noqa: F811
    program = lab.program(VMA_HYBRID_TCP=way)
    program.do(STEPS + QUEUE + "\ns = tcp()\ns.bind((here, 0))\ns.listen(5)\ns.setblocking(False)\nfails(s.accept)")
    address = program.address, program.do("s.getsockname()[1]")
    with lab.worker.socket(socket.AF_INET, socket.SOCK_STREAM) as waits, \
            lab.worker.socket(socket.AF_INET, socket.SOCK_STREAM) as late, \
            lab.worker.socket(socket.AF_INET, socket.SOCK_STREAM) as again:  # fmt: skip
        waits.connect(address)
        assert program.do("select.select([s], [], [], 3) and queue()") == [1, 5]
        assert program.do("ends_its_listening()") == 0
        assert is_reset(waits)
        assert late.connect_ex(address) == errno.ECONNREFUSED
        assert program.do("fails(s.accept)") == "Invalid argument"
        assert program.do("fails(s.listen)") == ""
        again.connect((program.address, program.do("s.getsockname()[1]")))
        program.do("select.select([s], [], [], 3)\nother = s.accept()[0]\nother.send(b'again')")
        assert again.recv(10) == b"again"


def test_many_at_a_time(lab: Lab) -> None:  # noqa: F811
    """More than the internal thread hears of at once."""
    program = lab.program(VMA_HYBRID_TCP="adaptive")
    program.do(STEPS + "\nmany = [tcp() for _ in range(100)]\ns = many[0]")
    for at in range(100):
        program.do(f"many[{at}].connect(far)")
        lab.accept()
    adopted(lab, program)
    assert sum(sock["offloaded"] for sock in program.stats()["sockets"]) >= 100
    lists_all = lab.sandbox.b.command(["ss", "-HtnK", "dport", "=", f":{lab.port}"])
    subprocess.run(lists_all, check=True, timeout=10, stdout=subprocess.DEVNULL)
    assert set(program.do("[fails(one.recv, 1) for one in many]")) == {"Software caused connection abort"}
