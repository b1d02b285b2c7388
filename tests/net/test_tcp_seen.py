"""What vma_stats and the fd dump say of TCP sockets, whatever the program has done with them."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterator

import pytest
from net.counter_lab import Program
from net.service_lab import until
from net.test_tcp_shim import introduce, without_offloads

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service
from vmahybrid.net.netns import NetnsWorker
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
