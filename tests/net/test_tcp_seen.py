"""What vma_stats and the fd dump say of TCP sockets, whatever the program has done with them."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from net.counter_lab import Program
from net.service_lab import until
from net.test_tcp_shim import introduce, without_offloads

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service
from vmahybrid.net.netns import NetnsWorker
from vmahybrid.steering.reasons import Reason
from vmahybrid.vma_stats.main import main

pytestmark = pytest.mark.root

HELPERS = """
import fcntl

def tcp(kind=0):
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM | kind)

def setfl(sock, on):
    flags = fcntl.fcntl(sock, fcntl.F_GETFL)
    fcntl.fcntl(sock, fcntl.F_SETFL, flags | os.O_NONBLOCK if on else flags & ~os.O_NONBLOCK)

def fionbio(sock, on):
    fcntl.ioctl(sock, 0x5421, struct.pack("i", on))
"""


class Lab:
    """The program, on side b, and a listener of the kernel, on side a."""

    def __init__(self, service: Service) -> None:
        self.service, self.sandbox = service, service.sandbox
        self._open = contextlib.ExitStack()
        worker = self._open.enter_context(contextlib.closing(NetnsWorker.open_path(self.sandbox.a.netns)))
        self.listener = self._open.enter_context(worker.socket(socket.AF_INET, socket.SOCK_STREAM))
        self.listener.bind((self.sandbox.a.address, 0))
        self.listener.listen()
        self.listener.settimeout(5)
        self.worker = worker
        self.port = self.listener.getsockname()[1]
        self.programs: list[Program] = []

    def program(self, **variables: str) -> Program:
        settings = {"VMA_HYBRID_TCP": "offload", "VMA_TRACELEVEL": "info"} | variables
        made = self._open.enter_context(Program(self.sandbox, self.service, **settings))
        made.do(f"{HELPERS}\nfar = ({self.sandbox.a.address!r}, {self.port})\nhere = {self.sandbox.b.address!r}\n"
                "first = tcp()\nfirst.connect(far)")  # with it there is a session, by which the dump is asked for
        self.accept()
        return made

    def accept(self) -> socket.socket:
        return self._open.enter_context(self.listener.accept()[0])

    def deaf_port(self) -> int:
        """Of a listener that answers no SYN: its queue is full, of connections that nobody accepts."""
        deaf = self._open.enter_context(self.worker.socket(socket.AF_INET, socket.SOCK_STREAM))
        deaf.bind((self.sandbox.a.address, 0))
        deaf.listen(0)
        for _ in range(3):
            filler = self._open.enter_context(self.worker.socket(socket.AF_INET, socket.SOCK_STREAM))
            filler.setblocking(False)
            filler.connect_ex(deaf.getsockname())
        return int(deaf.getsockname()[1])

    def close(self) -> None:
        self._open.close()


@pytest.fixture(scope="module", name="service")
def service_of_tcp() -> Iterator[Service]:
    with Sandbox("test") as sandbox, Service(without_offloads(sandbox)) as running:
        introduce(sandbox)
        yield running


@pytest.fixture
def lab(service: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.setenv("VMAHYBRID_RUNDIR", str(service.rundir))
    with contextlib.closing(Lab(service)) as made:
        yield made


def dumped(program: Program, name: str = "s") -> str:
    """What -S has it write."""
    fd = program.do(f"{name}.fileno()")
    before = len(program.log.read_text()) if program.log.exists() else 0
    assert main(["-F", "-p", str(program.pid), "-S", str(fd), "info", "--once"]) == 0

    def written() -> str:
        return program.log.read_text()[before:] if program.log.exists() else ""

    until(lambda: written().count("=" * 50 + "\n") >= 2, 5, written)
    return written()


def value(said: str, name: str) -> str:
    """Of a line of the dump; "" where it is missing."""
    found = re.search(rf"{re.escape(name)} : (.*)$", said, re.M)
    return found[1] if found else ""


# ---- non-blocking ----

@pytest.mark.parametrize("how", ["setfl", "fionbio"])
def test_non_blocking(lab: Lab, how: str) -> None:
    program = lab.program()

    def shown(name: str) -> tuple[bool, str]:
        return program.socket(name)["blocking"], value(dumped(program, name), "Is blocking")

    program.do(f"s = tcp()\n{how}(s, True)")
    assert shown("s") == (False, "false")
    program.do(f"{how}(s, False)\ns.connect(far)")
    lab.accept()
    assert program.socket()["offloaded"]
    assert shown("s") == (True, "true")
    program.do(f"{how}(s, True)")
    assert shown("s") == (False, "false")
    program.do(f"l = tcp()\nl.bind((here, 0))\nl.listen()\n{how}(l, True)\nfails(l.accept)")
    assert program.socket("l")["offloaded"]
    assert shown("l") == (False, "false")
    with lab.worker.socket(socket.AF_INET, socket.SOCK_STREAM) as peer:
        peer.connect((program.address, program.do("l.getsockname()[1]")))
        program.do("select.select([l], [], [], 3)\nc = l.accept()[0]\nsetfl(c, False)")
        assert program.socket("c")["offloaded"]
        assert shown("c") == (True, "true")
        program.do(f"{how}(c, True)")
        assert shown("c") == (False, "false")


# ---- states ----

def states(said: str) -> tuple[str, str, str]:
    return value(said, "Socket state"), value(said, "Connection state"), value(said, "PCB state")


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("@ii", 1, 0))
    sock.close()


def explained(lab: Lab, program: Program, name: str) -> list[Any]:
    ask = ("explain", f"{program.pid}:{program.do(f'{name}.fileno()')}", "--json")
    steps: list[Any] = json.loads(lab.service.ask(*ask))["steps"]
    return steps


def test_a_connection_that_the_peer_has_reset(lab: Lab) -> None:
    """Before and after the program has been told."""
    program = lab.program()
    program.do("s = tcp()\ns.connect(far)")
    peer = lab.accept()
    assert states(dumped(program)) == ("TCP_SOCK_CONNECTED_RDWR", "TCP_CONN_CONNECTED", "ESTABLISHED")
    reset(peer)
    until(lambda: states(dumped(program))[1:] == ("TCP_CONN_RESETED", "CLOSED"), 3, lambda: dumped(program))
    assert program.do("fails(s.recv, 1)") == "Connection reset by peer"
    assert states(dumped(program))[1:] == ("TCP_CONN_RESETED", "CLOSED")


def test_a_connection_that_has_ended_well(lab: Lab) -> None:
    program = lab.program()
    program.do("s = tcp()\ns.connect(far)")
    lab.accept().close()
    program.do("s.recv(1)\ns.shutdown(1)")
    until(lambda: states(dumped(program))[1:] == ("TCP_CONN_INIT", "CLOSED"), 3, lambda: dumped(program))


def test_a_listener(lab: Lab) -> None:
    program = lab.program()
    program.do("l = tcp()\nl.bind((here, 0))\nl.listen()\nl.setblocking(False)\nfails(l.accept)")
    said = dumped(program, "l")
    assert value(said, "Is offloaded") == "true"
    assert states(said) == ("TCP_SOCK_ACCEPT_READY", "TCP_CONN_INIT", "LISTEN")


@pytest.mark.parametrize("way", ["drop", "refuse"])
def test_a_connect_that_has_failed(lab: Lab, way: str) -> None:
    """The socket is the kernel's, as new; asked without an answer of connect(), it is still the ring's."""
    slug, state, error = {"refuse": ("tcp-refused", "TCP_CONN_ERROR", "Connection refused"),
                          "drop": ("tcp-no-answer", "TCP_CONN_TIMEOUT", "Connection timed out")}[way]
    port = 9 if way == "refuse" else lab.deaf_port()
    program = lab.program(VMA_TCP_CTL_THREAD="0")
    limit = "s.setsockopt(socket.IPPROTO_TCP, 18, 500)\n"  # TCP_USER_TIMEOUT
    program.do(f"s = tcp(socket.SOCK_NONBLOCK)\n{limit}there = (far[0], {port})\nfails(s.connect, there)")
    until(lambda: value(dumped(program), "Connection state") != "TCP_CONN_CONNECTING", 8, lambda: dumped(program))
    assert states(dumped(program))[1:] == (state, "CLOSED")
    program.do("s = tcp()\n" + limit)
    assert program.do("fails(s.connect, there)", 20) == error
    shown = program.socket()
    assert (shown["offloaded"], shown["reason"]) == (False, slug)
    reason = next(reason for reason in Reason if reason.slug == slug)
    assert value(dumped(program), "Reason") == reason.text
    assert any((step["ok"], step["text"]) == (False, reason.text) for step in explained(lab, program, "s"))
    if way == "refuse":
        program.do("s.connect(far)")
        lab.accept()
        assert (program.socket()["offloaded"], program.socket()["reason"]) == (True, "none")


@pytest.mark.parametrize("policy", ["offload", "adaptive"])
def test_a_bound_socket(lab: Lab, policy: str) -> None:
    program = lab.program(VMA_HYBRID_TCP=policy)
    local = "{}:{}".format(*program.do("s = tcp()\ns.bind((here, 0))\ns.getsockname()"))
    shown = program.socket()
    assert (shown["local"], shown["reason"]) == (local, "tcp-bound" if policy == "offload" else "tcp-kernel")
    if policy == "offload":
        assert value(dumped(program), "Bind info") == local
    assert not any(step["step"] == "bind" and not step["ok"] for step in explained(lab, program, "s"))
    program.do("s.listen()")
    assert program.socket()["reason"] == ("tcp-accept" if policy == "offload" else "tcp-kernel")


@pytest.mark.parametrize("stamps", [False, True])
def test_the_segment_size_that_was_offered(lab: Lab, stamps: bool) -> None:
    for size in (1000, 1460):
        program = lab.program(VMA_MSS=str(size), VMA_TCP_TIMESTAMP_OPTION=str(int(stamps)))
        program.do("s = tcp()\ns.connect(far)")
        peer = lab.accept()
        less = 12 * stamps
        assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) == size - less
        assert value(dumped(program), "Segment size") == f"mss {size - less}, advtsd_mss {size}"
        assert program.do("struct.unpack_from('I', s.getsockopt(6, 11, 104), 84)[0]") == size - less  # tcpi_advmss
