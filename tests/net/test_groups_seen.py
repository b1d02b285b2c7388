"""Multicast facts of a socket as vma_stats shows them: all groups, also once the kernel serves it for good."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from net.counter_lab import Program
from net.service_lab import until

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service
from vmahybrid.vma_stats.main import main

pytestmark = pytest.mark.root

SETUP = """
def inet(*names):
    return b''.join(socket.inet_aton(name) for name in names)
def request(group, source='', index=0):
    addresses = [struct.pack('=HH4s120x', 2, 0, inet(name)) for name in (group, source) if name]
    return struct.pack('@Q', index) + b''.join(addresses)
def ip(name, value):
    return fails(m.setsockopt, socket.IPPROTO_IP, name, value)
JOIN, LEAVE, ADD_SOURCE, DROP_SOURCE, BLOCK, MSFILTER = 35, 36, 39, 40, 38, 41
JOIN_GROUP, LEAVE_GROUP, JOIN_SOURCE, LEAVE_SOURCE, GROUP_FILTER = 42, 45, 46, 47, 48
m = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
"""


class Lab:
    def __init__(self, program: Program, capsys: pytest.CaptureFixture[str]) -> None:
        self.program, self._capsys = program, capsys
        self.here = program.address
        program.do(SETUP + f"here = {self.here!r}\nindex = socket.if_nametoindex("
                   "[name for _, name in socket.if_nameindex() if name != 'lo'][0])")

    def does(self, code: str) -> None:
        assert self.program.do(code) == ""

    def view(self, number: int) -> str:
        self._capsys.readouterr()
        assert main(["-F", "-p", str(self.program.pid), "-v", str(number), "--once"]) == 0
        return self._capsys.readouterr().out

    def groups(self) -> list[str]:
        """Of view 4, which has to agree with view 3 and with the kernel."""
        listed = re.findall(r"^\[([\d.]+)\] ", self.view(4), re.M)
        assert re.findall(r"^- Member of = \[([\d.]+)\]$", self.view(3), re.M) == listed
        words = [line.split() for line in Path(f"/proc/{self.program.pid}/net/igmp").read_text().splitlines()]
        kernel = {".".join(str(byte) for byte in reversed(bytes.fromhex(row[0])))
                  for row in words if re.fullmatch("[0-9A-F]{8}", row[0])}
        assert kernel - {"224.0.0.1"} == set(listed)
        return listed


Make = Callable[..., Lab]


@pytest.fixture
def make(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    with Sandbox("test") as sandbox, Service(sandbox, [sandbox.b]) as service:
        monkeypatch.setenv("VMAHYBRID_RUNDIR", str(service.rundir))
        programs = []

        def make_one(**variables: str) -> Lab:
            programs.append(Program(sandbox, service, **variables))
            return Lab(programs[-1], capsys)

        yield make_one
        for program in programs:
            program.close()


def test_as_many_groups_as_a_socket_may_join(make: Make) -> None:
    """net.ipv4.igmp_max_memberships is 20; where it is raised, 64 are listed and the log tells of the next."""
    lab = make(VMA_TRACELEVEL="info")
    lab.does("m.bind(('', 7001))\n''.join(ip(JOIN, inet(f'239.1.1.{n}', here)) for n in range(1, 21))")
    assert lab.groups() == [f"239.1.1.{n}" for n in range(1, 21)]
    assert "mc groups" not in lab.program.log.read_text()
    lab.does("open('/proc/sys/net/ipv4/igmp_max_memberships', 'w').write('100') and ''")
    lab.does("''.join(ip(JOIN, inet(f'239.1.1.{n}', here)) for n in range(21, 65))")
    assert lab.groups() == [f"239.1.1.{n}" for n in range(1, 65)]
    lab.does("''.join(ip(JOIN, inet(f'239.1.1.{n}', here)) for n in range(65, 68))")
    said = lab.program.log.read_text()
    assert said.count("VMA Statistics can monitor up to 64 mc groups of a socket\n") == 1


HOME = {
    "option": "m.bind(('', 7001))\nfails(m.setsockopt, socket.SOL_SOCKET, socket.SO_MARK, 1)",
    "rule": "m.bind((here, 7001))\nfails(m.connect, (here.rsplit('.', 1)[0] + '.1', 77))",
    "switched-off": "fails(m.bind, ('', 7001))",
}


@pytest.mark.parametrize("how", HOME)
def test_a_socket_that_is_the_kernels_for_good(make: Make, tmp_path: Path, how: str) -> None:
    rules = tmp_path / "libvma.conf"
    rules.write_text("use os udp_connect *:*\n" if how == "rule" else "")
    lab = make(VMA_CONFIG_FILE=str(rules), VMA_OFFLOADED_SOCKETS=str(int(how != "switched-off")))
    lab.does(HOME[how])
    shown = lab.program.socket("m")
    assert shown["reason"] == {"option": "sockopt", "rule": "libvma-conf", "switched-off": "disabled"}[how]
    lab.does("ip(JOIN, inet('239.1.1.1', here)) + ip(JOIN_GROUP, request('239.1.1.2', index=index))")
    assert lab.groups() == ["239.1.1.1", "239.1.1.2"]
    lab.does("ip(LEAVE, inet('239.1.1.1', here)) + ip(JOIN, inet('239.1.1.3', here))")
    assert lab.groups() == ["239.1.1.3", "239.1.1.2"]
    lab.does("ip(LEAVE_GROUP, request('239.1.1.2', index=index))")
    assert lab.groups() == ["239.1.1.3"]
    lab.does("ip(socket.IP_MULTICAST_LOOP, 0) + ip(socket.IP_MULTICAST_IF, inet(here))")
    assert f"- UDP, Blocked, MC Loop Disabled, MC IF = [{lab.here}]\n" in lab.view(3)


@pytest.mark.parametrize("how", ["ring", "switched-off"])
def test_interface_by_its_index(make: Make, how: str) -> None:
    """Its first address is shown; none, once the choice is taken back."""
    lab = make(VMA_OFFLOADED_SOCKETS=str(int(how == "ring")))
    lab.does("ip(socket.IP_MULTICAST_IF, inet('0.0.0.0') + bytes(4) + struct.pack('@i', index))")
    assert f", MC IF = [{lab.here}]\n" in lab.view(3)
    lab.does("ip(socket.IP_MULTICAST_IF, inet('0.0.0.0') + bytes(4) + struct.pack('@i', 0))")
    assert "MC IF" not in lab.view(3)


def test_groups_with_sources(make: Make) -> None:
    """The first such call sends the socket home. Who drops the last source of a group leaves it."""
    lab = make()
    lab.does("m.bind(('', 7001))\nip(JOIN, inet('239.1.1.1', here))")
    assert lab.groups() == ["239.1.1.1"]
    lab.does("ip(ADD_SOURCE, inet('232.1.1.1', here, '10.9.9.1'))")
    until(lambda: lab.program.socket("m")["reason"] == "source-membership", 3)
    assert lab.groups() == ["239.1.1.1", "232.1.1.1"]
    lab.does("ip(ADD_SOURCE, inet('232.1.1.1', here, '10.9.9.2'))")
    lab.does("ip(DROP_SOURCE, inet('232.1.1.1', here, '10.9.9.1')) + ip(BLOCK, inet('239.1.1.1', here, '10.9.9.1'))")
    assert lab.groups() == ["239.1.1.1", "232.1.1.1"]
    lab.does("ip(DROP_SOURCE, inet('232.1.1.1', here, '10.9.9.2'))")
    assert lab.groups() == ["239.1.1.1"]
    lab.does("ip(JOIN_SOURCE, request('232.1.1.2', '10.9.9.1', index))")
    assert lab.groups() == ["239.1.1.1", "232.1.1.2"]
    lab.does("ip(LEAVE_SOURCE, request('232.1.1.2', '10.9.9.1', index))")
    assert lab.groups() == ["239.1.1.1"]
    # an empty list of sources to hear is the end of a membership
    lab.does("ip(MSFILTER, inet('239.1.1.1', here) + struct.pack('@II', 1, 0))")
    assert lab.groups() == []
