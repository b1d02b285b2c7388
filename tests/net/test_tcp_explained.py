"""`vmahybrid explain`, `home` and `adopt` of TCP sockets on rings: what is well is not said to be wrong, and what the
service can't know it does not say."""

from __future__ import annotations

import os

import pytest
from net.service_lab import counter, until
from net.test_tcp_ended import lists
from net.test_tcp_seen import Lab, lab, service_of_tcp  # noqa: F401

pytestmark = pytest.mark.root

MANY = 6
STEPS = f"""
def connect_many():
    global many
    many = [tcp() for _ in range({MANY})]
    for s in many:
        s.connect(far)
    return [s.fileno() for s in many], [s.getsockname()[1] for s in many]

def short():
    with tcp() as s:
        s.connect(far)
"""


def explained(lab: Lab, what: str) -> list[str]:  # noqa: F811
    """Without the ladder of other backends, which has a "no" for each that this host lacks."""
    return [line for line in lab.service.ask("explain", what).splitlines() if " ladder " not in f" {line} "]


def kind_of(pid: int, fd: str) -> str:
    try:
        return os.getxattr(f"/proc/{pid}/fd/{fd}", "system.sockprotoname").rstrip(b"\0").decode()
    except OSError:     # no socket
        return ""


def test_by_its_address(lab: Lab) -> None:  # noqa: F811
    """Of a connection that `ss` shows, too, and of a listener."""
    program = lab.program()
    program.do(STEPS + "\nlistener = tcp()\nlistener.bind((here, 0))\nlistener.listen()\nlistener.setblocking(False)\n"
               "fails(listener.accept)")
    _, ports = program.do("connect_many()")
    until(lambda: "ESTAB" in lists(lab, ports[0]), 5)
    for port in (ports[0], program.do("listener.getsockname()[1]")):
        said = explained(lab, f"{program.address}:{port}")
        assert any(" flow " in line for line in said), said
        assert not [line for line in said if line.split()[:1] == ["no"]], said
        assert len(said) == len(set(said)), said


def test_the_shims_own_are_not_listed(lab: Lab) -> None:  # noqa: F811
    """It keeps kernel sockets of ended connections for a second."""
    program = lab.program()
    program.do(STEPS + "\nfor _ in range(3):\n    short()")
    kinds = [(fd, kind_of(program.pid, fd)) for fd in os.listdir(f"/proc/{program.pid}/fd")]
    assert [fd for fd, kind in kinds if kind == "TCP" and int(fd) > 512], kinds
    said = explained(lab, str(program.pid))
    assert not [line for line in said if "TCP socket" in line], said


def test_without_a_slot(lab: Lab) -> None:  # noqa: F811
    program = lab.program(VMA_STATS_FD_NUM="3")
    program.do(STEPS)
    fds, _ = program.do("connect_many()")
    peers = [lab.accept() for _ in fds]
    over = fds[-1]
    for what in (f"{program.pid}:{over}", str(program.pid)):
        said = explained(lab, what)
        assert any("whether it is on a ring is not known" in line for line in said), said
        assert not [line for line in said if "the kernel has sockets of this type" in line], said
    homed = counter(lab.service, "tcp_homed_total")
    assert "whether it has is not known" in lab.service.ask("home", f"{program.pid}:{over}")
    until(lambda: counter(lab.service, "tcp_homed_total") > homed, 5)
    peers[-1].sendall(b"to the kernel")
    assert program.do("many[-1].recv(100).decode()") == "to the kernel"
