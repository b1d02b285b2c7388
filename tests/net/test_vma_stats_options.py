"""Every option of the monitoring manual's table acts: on a real service, with two real programs on a ring."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from net.counter_lab import Peer, Program
from net.service_lab import Api, until
from terminal import Terminal

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service
from vmahybrid.vma_stats.main import main
from vmahybrid.vma_stats.options import parse

pytestmark = pytest.mark.root
MANUAL = Path("/work/shared/reference/vma-monitoring-manual-9.8.80.txt")
DEAD = int(Path("/proc/sys/kernel/pid_max").read_text()) + 7


CHILD = """
pid = os.fork()
if not pid:
    c = udp({address!r})
    for _ in range(3):
        c.sendto(b'x', ({address!r}, 9))
    time.sleep(20)
    os._exit(0)
pid
"""


def test_the_child_of_a_fork_has_a_file_of_its_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With its sockets, for those who read it by -k and its number; gone with the child."""
    with Sandbox("test") as sandbox, Service(sandbox, [sandbox.b]) as service, \
            Program(sandbox, service, VMA_STATS_SHMEM_DIR=str(tmp_path)) as program:
        program.on_ring()
        child = program.do("import os, time" + CHILD.format(address=sandbox.b.address))
        until((tmp_path / f"vmastat.{child}").exists, 5)
        time.sleep(0.3)     # it has sent all
        assert main(["-k", f"{tmp_path}/", "-p", str(child), "-v", "3", "--once"]) == 0
        assert re.search(r"Tx (Offload|OS info): 0 / 3 / 0", capsys.readouterr().out)
        os.kill(child, 15)
        until(lambda: not (tmp_path / f"vmastat.{child}").exists(), 5)
        assert (tmp_path / f"vmastat.{program.pid}").exists()


def test_a_program_that_lives_keeps_its_file(capsys: pytest.CaptureFixture[str], softverbs: bool) -> None:
    """-k is for those who have no service: also when there was one. It goes with the program, or at exec(3)."""
    with Sandbox("test") as sandbox, Service(sandbox, [sandbox.b], softverbs=softverbs) as service, \
            Program(sandbox, service) as program, Program(sandbox, service) as other:
        pages = [p.directory / f"vmastat.{p.pid}" for p in (program, other)]
        show = ["-k", str(program.directory), "-p", str(program.pid), "--once"]
        program.on_ring()
        other.on_ring()
        assert service.program.stop(signal.SIGTERM, 10) == 0
        time.sleep(0.1)
        assert [page.exists() for page in pages] == [True, True]
        assert main(show) == 0
        service.start()
        until(lambda: len(Api(service).call("GET", "/v1/processes")[1]) == 2, 5)
        assert main(show) == 0
        assert "no service answers" in capsys.readouterr().err
        program.process.kill()
        other.tell("import os\nos.execvpe('sleep', ['sleep', '20'], {'PATH': os.environ['PATH']})")
        until(lambda: not any(page.exists() for page in pages), 3)
        assert other.process.poll() is None
        other.process.kill()


def test_a_name_adds_nothing_to_the_log() -> None:
    with Sandbox("test") as sandbox, Service(sandbox, [sandbox.b]) as service, Program(sandbox, service) as program:
        program.do("open('/proc/self/comm', 'w').write('e\\x1b[31m\\rX\\a')")
        program.on_ring()
        assert program.stats()["process"]["comm"] == "e?[31m?X?"
        program.close()
        until(lambda: f"process {program.pid} (e?[31m?X?): session 1 ended" in service.log, 3, lambda: service.log)
        assert {c for c in service.log if not c.isprintable()} <= {"\n"}


class Stage(NamedTuple):
    """Two programs: ``one`` has a socket on a ring with 5 datagrams of 100 bytes read, a group, and TCP sockets."""

    one: Program
    two: Program
    fd: int

    def read(self) -> int:
        return int(self.one.socket()["counters"]["rx_packets"])


@pytest.fixture(scope="module")
def stage(softverbs: bool) -> Iterator[Stage]:
    with Sandbox("test") as sandbox, Service(sandbox, [sandbox.b], softverbs=softverbs) as service:
        peer = Peer(sandbox)
        variables = {"VMA_RX_POLL": "2000", "VMA_TRACELEVEL": "info"}
        with Program(sandbox, service, **variables) as one, Program(sandbox, service, **variables) as two:
            port = one.on_ring()
            peer.send((one.address, port), 5, 100)
            one.do("[s.recv(200) for _ in range(5)]")
            one.do(f"""
m = udp('0.0.0.0', 7997)
m.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP,
             socket.inet_aton('224.4.1.3') + socket.inet_aton({sandbox.b.address!r}))
tcp = socket.socket()
tcp.bind(('127.0.0.1', 0))
tcp.listen()
h = udp({sandbox.b.address!r})
h.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, 1)
""")
            two.on_ring()
            os.environ["VMAHYBRID_RUNDIR"] = str(service.rundir)
            yield Stage(one, two, one.do("s.fileno()"))
            del os.environ["VMAHYBRID_RUNDIR"]
        peer.close()


Run = Callable[..., str]


@pytest.fixture
def run(stage: Stage, capsys: pytest.CaptureFixture[str]) -> Run:
    """vma_stats of the first program; what it prints."""
    def call(*argv: str, pid: str | None = "", clean: bool = False, code: int = 0) -> str:
        chosen = [] if pid is None else ["-p", pid or str(stage.one.pid)]
        got = main([*([] if clean else ["-F"]), *chosen, *argv])
        found = capsys.readouterr()
        assert (got, found.err != "") == (code, bool(code)), found
        return found.out

    return call


def check_pid(stage: Stage, run: Run, option: str) -> None:
    for program in (stage.one, stage.two):
        assert f"with pid: {program.pid}\n" in run(option, str(program.pid), "--once", pid=None)


def check_directory(stage: Stage, run: Run, option: str) -> None:
    """Both programs run; one of them has its page in this directory (VMA_STATS_SHMEM_DIR)."""
    for program in (stage.one, stage.two):
        assert f"with pid: {program.pid}\n" in run(option, str(program.directory), "--once", pid=None)


def check_name(stage: Stage, run: Run, option: str) -> None:
    name = stage.one.stats()["process"]["comm"]
    assert f"stats for application: {name} with pid: " in run(option, name, "--once", pid=None)


def check_find(stage: Stage, run: Run, option: str) -> None:
    assert re.search(rf"with pid: ({stage.one.pid}|{stage.two.pid})\n", run(option, "--once", pid=None))


def check_forbid_clean(stage: Stage, run: Run, option: str) -> None:
    stale = stage.one.directory / f"vmastat.{DEAD}"
    stale.write_bytes(b"VMS1")
    run("-k", str(stage.one.directory), option, "--once", clean=True)
    assert stale.exists()
    run("-k", str(stage.one.directory), "--once", clean=True)
    assert not stale.exists()
    assert (stage.one.directory / f"vmastat.{stage.one.pid}").exists()


def check_interval(stage: Stage, run: Run, option: str) -> None:
    first, second = (json.loads(line)["read_at"] for line in run(option, "2", "-c", "2", "--json").splitlines())
    assert 1.9 < second - first < 2.6


def check_cycles(stage: Stage, run: Run, option: str) -> None:
    assert len(run(option, "2", "--json").splitlines()) == 2


def check_view(stage: Stage, run: Run, option: str) -> None:
    texts = [run(option, str(view), "--once") for view in range(1, 6)]
    assert f"\n {stage.fd:<3} Rx:          5       0        0       0  100.0       0" in texts[0]
    assert "---- queue pkt -----" in texts[1]
    for line in (f"\tFd=[{stage.fd}]\n", "Rx Offload: 0 / 5 / 0 / 0 [kilobytes/packets/eagains/errors]\n",
                 "\tCQ=[0]\n", "\tRING_ETH=[0]\n", "\tBUFFER_POOL(RX)=[0]\n"):
        assert line in texts[2]
    assert re.search(r"^\[224\.4\.1\.3\] +\d+ $", texts[3], re.M)
    assert "VMA Group Membership Information" in texts[3]
    # all processes, all sockets: on a ring, kept on the kernel, and such as are never offloaded
    netstat = run(option, "5", pid=None)
    here = rf" {stage.one.pid}/\S+ +\S+$"
    assert re.search(rf"^udp +Yes .*{re.escape(stage.one.address)}:\d+ .*{here}", netstat, re.M)
    assert re.search(rf"^udp +No .*{re.escape(stage.one.address)}:\d+ .*{here}", netstat, re.M)
    assert re.search(rf"^tcp +No +0 +0 +127\.0\.0\.1:\d+ +0\.0\.0\.0:\* +LISTEN +\d+ +{here}", netstat, re.M)
    assert re.search(rf" {stage.two.pid}/\S+ +\S+$", netstat, re.M)


def check_details(stage: Stage, run: Run, option: str) -> None:
    assert "total offloaded" in run(option, "1", "-c", "1")
    assert "pkt/s" in run(option, "2", "-c", "1")


def lines_after(stage: Stage, act: Callable[[], object], last: str) -> str:
    """What the program logs from now on, when ``last`` is among it."""
    at = stage.one.log.stat().st_size
    act()
    return str(until(lambda: (text := stage.one.log.read_text()[at:]).rstrip().endswith(last) and text, 3,
                     lambda: stage.one.log.read_text()[at:]))


END = "=" * 50


def dump_more(stage: Stage, run: Run, option: str) -> None:
    """Of an epoll set what its members are to the rings; of a socket which stamps it asked for."""
    stage.one.do("""
ep, stamped = select.epoll(), udp('127.0.0.1')
stamped.setsockopt(socket.SOL_SOCKET, 35, 1)    # SO_TIMESTAMPNS
[ep.register(member, select.EPOLLIN) for member in (s, stamped)]
""")
    try:
        epoll, stamped = stage.one.do("[ep.fileno(), stamped.fileno()]")
        text = lines_after(stage, lambda: run(option, str(epoll), "warn"), f"WARNING: {END}")
        lines = [line.removeprefix(" VMA WARNING: ") for line in text.splitlines()]
        assert lines[2:7] == [f"Fd number : {epoll}", "Offloaded Fds : 1", f"Offloaded Fds list: {stage.fd}",
                              "Number of rings : 1", "Number of ready Fds : 0"]
        text = lines_after(stage, lambda: run(option, str(stamped), "warn"), f"WARNING: {END}")
        assert "Socket timestamp : m_b_rcvtstamp true, m_b_rcvtstampns true, m_n_tsing_flags 0\n" in text
    finally:
        stage.one.do("ep.close()\nstamped.close()")


def check_dump(stage: Stage, run: Run, option: str) -> None:
    text = lines_after(stage, lambda: run(option, str(stage.fd), "warn"), f"WARNING: {END}")
    assert text.startswith(f" VMA WARNING: ============ DUMPING FD {stage.fd} STATISTICS ============\n")
    assert " VMA WARNING: Rx Offload : 0 / 5 / 0 / 0 [kilobytes/packets/eagains/errors]\n" in text
    assert " VMA WARNING: Rx reuse buffer pending : false\n VMA WARNING: Rx reuse buffer postponed : false\n" in text
    assert " VMA WARNING: Socket timestamp : m_b_rcvtstamp false, m_b_rcvtstampns false, m_n_tsing_flags 0\n" in text
    dump_more(stage, run, option)
    text = lines_after(stage, lambda: run(option, "0"), f"INFO: {END}")
    assert "======= DUMPING STATISTICS FOR ALL OPEN FDS ======" in text
    assert text.count("SOCKET FD") == len(stage.one.stats()["sockets"])
    text = lines_after(stage, lambda: run(option, "9999", code=1), f"INFO: {END}")
    assert " VMA INFO: No statistics are kept of it\n" in text


def check_zero(stage: Stage, run: Run, option: str) -> None:
    assert stage.read() == 5
    assert "Zero counters..." in run(option, "--once")
    until(lambda: stage.read() == 0)


LEVELS = {"none": -1, "panic": 0, "error": 1, "warn": 2, "info": 3, "details": 4, "debug": 5, "fine": 6, "finer": 7,
          "all": 8, "1": 1, "2": 2, "3": 3, "4": 5, "5": 6, "6": 7, "7": 8}


def check_log_level(stage: Stage, run: Run, option: str) -> None:
    for level, number in LEVELS.items():
        run(option, level, "--once")
        until(lambda: stage.one.stats()["process"]["log_level"] == number, 3, level)  # noqa: B023  called at once
    act = "x = udp('0.0.0.0')\nx.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, 1)"
    run(option, "debug", "--once")
    time.sleep(0.1)
    said = lines_after(stage, lambda: stage.one.do(act), "4 bytes) = 0")
    assert re.search(r"VMA DEBUG: fd \d+: .* only the kernel implements\n", said)
    run(option, "info", "--once")
    time.sleep(0.1)
    at = stage.one.log.stat().st_size
    stage.one.do(act)
    assert stage.one.log.read_text()[at:] == ""


PREFIXES = [r" VMA INFO: ", r" Tid: +\d+ VMA INFO: ", r" Pid: +\d+ Tid: +\d+ VMA INFO: ",
            r" Time: +[\d.]+ Pid: +\d+ Tid: +\d+ VMA INFO: "]


def check_details_level(stage: Stage, run: Run, option: str) -> None:
    for level in (1, 2, 3, 0):
        run(option, str(level), "--once")
        until(lambda: stage.one.stats()["process"]["log_details"] == level, 3)  # noqa: B023
        text = lines_after(stage, lambda: run("-S", "9999", code=1), END)
        assert all(re.match(PREFIXES[level], line) for line in text.splitlines()), text


def check_sockets(stage: Stage, run: Run, option: str) -> None:
    out = run(option, f"{stage.fd}", "--once")
    assert re.findall(r"^ (\d+) +Rx:", out, re.M) == [str(stage.fd)]
    out = run(option, f"{stage.fd}-{stage.fd + 1},999", "--once")
    assert re.findall(r"^ (\d+) +Rx:", out, re.M) == [str(stage.fd), str(stage.fd + 1)]


def check_version(stage: Stage, run: Run, option: str) -> None:
    assert run(option).startswith("vmastat: Linked with VMA version: ")


def check_help(stage: Stage, run: Run, option: str) -> None:
    text = run(option)
    assert all(f"-{short}, --{long}" in text for short, long, _ in OPTIONS)


Check = Callable[[Stage, Run, str], None]
# in the manual's order, but for -z, which comes last
OPTIONS: list[tuple[str, str, Check]] = [
    ("p", "pid", check_pid),
    ("k", "directory", check_directory),
    ("n", "name", check_name),
    ("f", "find_pid", check_find),
    ("F", "forbid_clean", check_forbid_clean),
    ("i", "interval", check_interval),
    ("c", "cycles", check_cycles),
    ("v", "view", check_view),
    ("d", "details", check_details),
    ("S", "fd_dump", check_dump),
    ("l", "log_level", check_log_level),
    ("D", "details_level", check_details_level),
    ("s", "sockets", check_sockets),
    ("V", "version", check_version),
    ("h", "help", check_help),
    ("z", "zero", check_zero),
]


@pytest.mark.parametrize(("short", "long", "check"), OPTIONS, ids=[long for _, long, _ in OPTIONS])
def test_option(stage: Stage, run: Run, short: str, long: str, check: Check) -> None:
    check(stage, run, f"-{short}")
    value = {"k": "/x", "n": "x", "s": "1"}.get(short, "1")
    argument = [] if short in "fFzVh" else [value]
    assert parse([f"-{short}", *argument]) == parse([f"--{long}", *argument]), "both spellings"


def test_the_table_is_the_manuals() -> None:
    if not MANUAL.exists():
        pytest.skip("the manual is not here")
    named = re.findall(r"^-(\w), --(\w+)$", MANUAL.read_text(), re.M)
    assert sorted(named) == sorted((short, long) for short, long, _ in OPTIONS)


def test_a_dump_that_nobody_would_see(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-F", "-p", str(stage.one.pid), "-S", "0", "debug"]) == 0
    assert capsys.readouterr().err == f"vmastat: nothing will be seen: process {stage.one.pid} logs up to INFO only. " \
        "Give a lower level, or -l debug\n"


def test_top_on_real_programs(stage: Stage, softverbs: bool) -> None:
    """The rows are those of the programs; the pane shows what view 3 says of the socket."""
    stage.one.do("s.settimeout(0)")
    terminal = Terminal([sys.executable, "-P", "-m", "vmahybrid.vma_stats.main", "-F", "--top", "-k",
                         str(stage.one.directory)], columns=120, lines=30)
    try:
        terminal.until(lambda text: f"{stage.one.address}:" in text and "1 programs" in text)
        terminal.keys("/", "Yes", "\r", "\r")
        terminal.until(lambda text: f"---- fd {stage.fd} of " in text and "- UDP, " in text)
        ring = "verbs sv_vb" if softverbs else "xdp generic"
        terminal.until(lambda text: re.search(rf"Ring \d+: vb, {ring}", text))
        terminal.keys("q")
        assert terminal.ended() == 0
    finally:
        terminal.close()
