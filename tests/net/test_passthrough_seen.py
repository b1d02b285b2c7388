"""Programs that the kernel serves altogether are shown, too: offloading switched off, or no service there."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from net.counter_lab import Program
from net.service_lab import Api, until

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service
from vmahybrid.vma_stats.main import main

pytestmark = pytest.mark.root
TALK = """
s = udp('127.0.0.1')
[s.sendto(b'x' * 100, s.getsockname()) for _ in range(5)]
[s.recv(200) for _ in range(4)]
"""
LISTEN = "tcp = socket.socket()\ntcp.bind(('127.0.0.1', 0))\ntcp.listen()"


def shown(capsys: pytest.CaptureFixture[str], program: Program, *argv: str) -> list[str]:
    code = main(["-F", "-p", str(program.pid), "--once", *argv])
    found = capsys.readouterr()
    assert code == 0, found
    return [line for line in found.out.splitlines() if not line.startswith("vmastat: stats for")]


def views(capsys: pytest.CaptureFixture[str], program: Program, *argv: str) -> None:
    """Views 1 and 5 of a program that ran TALK and LISTEN."""
    udp = next(line for line in shown(capsys, program, "-v", "1", *argv) if " Rx: " in line)
    assert udp.split()[2:] == ["0", "0", "0", "0", "0.0", "4", "0", "0", "0"]
    rows = [line.split() for line in shown(capsys, program, "-v", "5", *argv)[1:]]
    assert sorted(row[:2] for row in rows) == [["tcp", "No"], ["udp", "No"]]


def test_offloading_switched_off(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The service knows the program and asks nothing for it; what vma_stats wants of it is done."""
    with Sandbox("test") as sandbox, Service(sandbox, [sandbox.b]) as service, \
            Program(sandbox, service, VMA_OFFLOADED_SOCKETS="0", VMA_EXCEPTION_HANDLING="-2") as program:
        monkeypatch.setenv("VMAHYBRID_RUNDIR", str(service.rundir))
        assert program.do(TALK + f"near = udp({program.address!r})\nnear.connect(({sandbox.a.address!r}, 9))\n"
                          "near.send(b'x')\nnear.close()\n" + LISTEN) is None
        process = next(p for p in Api(service).call("GET", "/v1/processes")[1] if p["pid"] == program.pid)
        assert (process["reason"], process["sockets"], process["offloaded_sockets"], process["rings"],
                process["flows"]) == ("disabled", 1, 0, [], [])
        assert program.socket()["reason"] == "disabled"
        views(capsys, program)
        assert (program.directory / f"vmastat.{program.pid}").exists()
        shown(capsys, program, "-l", "debug")
        until(lambda: program.stats()["process"]["log_level"] == 5, 3)
        assert main(["-z", "-F", "-p", str(program.pid), "--once"]) == 0
        until(lambda: program.socket()["counters"]["rx_os_packets"] == 0, 3)


@pytest.mark.parametrize("how", ["switched-off", "policy"])
def test_a_busy_connection_of_the_kernel(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
                                         how: str) -> None:
    """Nothing counts it, and no view lets one believe that there is none."""
    variables = {"VMA_OFFLOADED_SOCKETS": "0"} if how == "switched-off" else {"VMA_HYBRID_TCP": "kernel"}
    with Sandbox("test") as sandbox, Service(sandbox, [sandbox.b]) as service, \
            Program(sandbox, service, **variables) as program:
        monkeypatch.setenv("VMAHYBRID_RUNDIR", str(service.rundir))
        fd = program.do(f"u = udp('127.0.0.1')\n{LISTEN}\nc = socket.create_connection(tcp.getsockname())\nc.fileno()")
        name = ["-F", "-p", str(program.pid), "--once"]
        for view in "123":
            assert main([*name, "-v", view]) == 0
            assert "2 sockets that the kernel alone serves are not counted: " in capsys.readouterr().err
        assert main([*name, "--top"]) == 0
        said = capsys.readouterr().out
        assert ", 2 not counted\n" in said and len(re.findall(r" tcp +No +127\.0\.0\.1:\d+ +-", said)) == 2
        assert main([*name, "-S", str(fd)]) == 0
        assert f"Fd {fd}, tcp 127.0.0.1:" in capsys.readouterr().out
        program.do("c.send(b'x')")   # without an internal thread the next call looks
        until(lambda: f"VMA INFO: Fd number : {fd}\n" in program.log.read_text(), 5)
        said = program.log.read_text()
        assert " VMA INFO: No statistics are kept of it\n VMA INFO: Is offloaded : false\n" in said
        rows = [line.split() for line in shown(capsys, program, "-v", "5")[1:]]
        assert sorted(row[:2] for row in rows) == [["tcp", "No"], ["tcp", "No"], ["udp", "No"]]


def test_service_that_comes_later(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with Sandbox("test") as sandbox, Service(sandbox, [sandbox.b]) as service, \
            Program(sandbox, service, VMA_OFFLOADED_SOCKETS="0") as program:
        monkeypatch.setenv("VMAHYBRID_RUNDIR", str(service.rundir))
        program.do(TALK + LISTEN)
        service.program.stop(signal.SIGTERM, 10)
        service.start()
        until(lambda: [p["pid"] for p in Api(service).call("GET", "/v1/processes")[1]] == [program.pid], 5)
        views(capsys, program)


def program_counters(program: Program, directory: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, int]:
    """Of its UDP socket, by its file."""
    capsys.readouterr()
    assert main(["-F", *directory, "-p", str(program.pid), "--once", "--json"]) == 0
    sockets = json.loads(capsys.readouterr().out)["sockets"]
    found: dict[str, int] = next(sock["counters"] for sock in sockets if sock["proto"] == "udp")
    return found


def switches(pid: int) -> list[str]:
    return re.findall(r"ctxt_switches:\t(\d+)", Path(f"/proc/{pid}/status").read_text())


def rests(pid: int) -> bool:
    """It has answered, and waits for the next order in a call by now."""
    before = switches(pid)
    time.sleep(0.1)
    return switches(pid) == before and "\nState:\tS" in Path(f"/proc/{pid}/status").read_text()


@pytest.mark.parametrize(("asks", "waits"), [("service", "udp"), ("service", "tcp"), ("service", "epoll"),
                                             ("file", "udp"), ("no-service", "udp")])  # fmt: skip
def test_orders_to_a_program_without_a_ring(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
                                            tmp_path: Path, asks: str, waits: str) -> None:  # fmt: skip
    """Counters are zero at once; the rest is done with its next call. Nobody starts a thread for it."""
    none = str(tmp_path / "none")
    with Sandbox("test") as sandbox, Service(sandbox, [sandbox.b]) as service, \
            Program(sandbox, service, VMA_HYBRID_TCP="kernel",
                    **({"VMA_HYBRID_SOCKET": none} if asks == "no-service" else {})) as program:  # fmt: skip
        monkeypatch.setenv("VMAHYBRID_RUNDIR", str(service.rundir if asks == "service" else tmp_path))
        monkeypatch.setattr("vmahybrid.vma_stats.main.DEFAULT_DIRECTORY", str(program.directory))
        program.do(TALK + LISTEN + """
import select
c = socket.create_connection(tcp.getsockname())
e = select.epoll()
e.register(c, select.EPOLLIN)
""")
        assert until(lambda: rests(program.pid), 5)
        assert main(["-F", "-p", str(program.pid), "-z", "-l", "details", "-D", "1", "-S", "0"]) == 0
        waiting = f"process {program.pid} has not taken it yet: it computes, or waits in a call that no ring may end"
        assert waiting in capsys.readouterr().err
        assert not program_counters(program, [], capsys)["rx_os_packets"]
        assert "DUMPING" not in program.log.read_text()
        if waits == "udp":
            program.do(TALK)
        else:
            program.do("c.send(b'x')" if waits == "tcp" else "e.poll(0)")
        said = program.log.read_text()
        assert "======= DUMPING STATISTICS FOR ALL OPEN FDS ======" in said
        assert main(["-F", "-p", str(program.pid), "--once", "--json"]) == 0
        process = json.loads(capsys.readouterr().out.splitlines()[-1])["process"]
        assert (process["log_level"], process["log_details"], process["orders_waiting"]) == (4, 1, False)
        assert len(list(Path(f"/proc/{program.pid}/task").iterdir())) == 1


def test_a_child_in_our_memory_takes_no_orders(capsys: pytest.CaptureFixture[str], tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Of a vfork: they are its parent's, who would have an internal thread that dies with the child."""
    with Sandbox("test") as sandbox, Service(sandbox, [sandbox.b]) as service, \
            Program(sandbox, service, VMA_HYBRID_TCP="adaptive") as program:  # fmt: skip
        monkeypatch.setenv("VMAHYBRID_RUNDIR", str(service.rundir))
        source, vforks = tmp_path / "vforks.c", tmp_path / "vforks.so"
        source.write_text("#include <sys/wait.h>\n#include <unistd.h>\nint vforks(int fd) { int s; pid_t c = vfork();"
                          "if (!c) { if (write(fd, fd < 0 ? 0 : \"x\", 1)) _exit(0); _exit(1); }"
                          "return waitpid(c, &s, 0) == c && s == 0; }\n")  # fmt: skip
        subprocess.run(["cc", "-shared", "-fPIC", "-o", vforks, source], check=True, timeout=60)
        program.do(LISTEN + f"\nimport ctypes, os\nlib = ctypes.CDLL({str(vforks)!r})\nr, w = os.pipe()")
        program.tell("time.sleep(1)\nlib.vforks(w)")  # its next call is the child's
        assert Api(service).call("POST", f"/v1/processes/{program.pid}/move", {"to": "kernel"})[0] == 204
        assert main(["-F", "-p", str(program.pid), "-S", "0"]) == 0
        assert program.answer() == 1
        until(lambda: len(list(Path(f"/proc/{program.pid}/task").iterdir())) == 2, 5)
        assert program.log.read_text().count("======= DUMPING STATISTICS FOR ALL OPEN FDS ======") == 1


def test_beside_those_that_the_service_knows(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
                                             tmp_path: Path) -> None:  # fmt: skip
    """A program without a session is shown by its file, where that is asked for."""
    with Sandbox("test") as sandbox, Service(sandbox, [sandbox.b]) as service, \
            Program(sandbox, service) as known, \
            Program(sandbox, service, VMA_HYBRID_SOCKET=str(tmp_path / "none")) as program:
        monkeypatch.setenv("VMAHYBRID_RUNDIR", str(service.rundir))
        known.on_ring()
        program.do(TALK + LISTEN)
        directory = ["-k", str(program.directory)]
        views(capsys, program, *directory)
        (program.directory / f"vmastat.{known.pid}").symlink_to(known.directory / f"vmastat.{known.pid}")
        assert main(["-F", *directory, "-v", "5"]) == 0
        assert capsys.readouterr().out.count(f" {program.pid}/") == 2
        assert main(["-F", *directory, "-p", str(known.pid), "-z", "--once"]) == 0
        assert program_counters(program, directory, capsys)["rx_os_packets"]
        assert main(["-F", *directory, "-p", str(program.pid), "-z", "--once"]) == 0
        assert not program_counters(program, directory, capsys)["rx_os_packets"]


def test_without_a_service(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """-k reads the file, which is there from the first socket on and goes with the program; a child of a fork has its
    own from its first socket on."""
    with Sandbox("test") as sandbox, Service(sandbox, [sandbox.b]) as service, \
            Program(sandbox, service, VMA_HYBRID_SOCKET=str(tmp_path / "none")) as program:
        program.do("1")
        assert list(program.directory.glob("vmastat.*")) == []
        program.do(TALK + LISTEN)
        views(capsys, program, "-k", str(program.directory))
        child = program.do("""
import os
pid = os.fork()
if not pid:
    c = udp('127.0.0.1')
    time.sleep(20)
    os._exit(0)
pid
""")
        until((program.directory / f"vmastat.{child}").exists, 5)
        program.do(f"os.kill({child}, 15)\nos.wait()")
        program.close()
        # the child was killed: whoever looks next removes what it left, and what the program itself left is gone
        assert not (program.directory / f"vmastat.{program.pid}").exists()


@pytest.mark.parametrize("softverbs", [False, True], ids=["xdp", "softverbs"])
def test_a_ring_without_a_slot(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
                               softverbs: bool) -> None:
    """Over VMA_STATS_FD_NUM: not counted, and not called the kernel's."""
    with Sandbox("test") as sandbox, Service(sandbox, [sandbox.b], softverbs=softverbs) as service, \
            Program(sandbox, service, VMA_STATS_FD_NUM="1") as program:
        monkeypatch.setenv("VMAHYBRID_RUNDIR", str(service.rundir))
        program.on_ring()
        fd = program.do(f"more = udp({program.address!r})\nmore.fileno()")
        until(lambda: len(service.ring_flows(program.pid)) == 2, 5)
        name = ["-F", "-p", str(program.pid), "--once"]
        assert main(name) == 0
        said = capsys.readouterr().err
        assert said == ("vmastat: 1 sockets on rings are not counted, the program's statistics page had no slot for "
                        "them: raise VMA_STATS_FD_NUM\n")
        assert main([*name, "-S", str(fd)]) == 0
        assert ": on a ring, but its program's statistics page had no slot for it" in capsys.readouterr().out
        assert main([*name, "-S", "900"]) == 1
        assert f"process {program.pid} has no Fd 900: " in capsys.readouterr().err


def test_who_has_sent_on_the_kernel(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """View 5 has the rows of TCP sockets on the kernel from /proc, and who sent from the counters."""
    with Sandbox("test") as sandbox, Service(sandbox, [sandbox.b]) as service, \
            Program(sandbox, service, VMA_HYBRID_TCP="adaptive") as program:
        monkeypatch.setenv("VMAHYBRID_RUNDIR", str(service.rundir))
        program.do(f"{LISTEN}\nc = socket.create_connection(tcp.getsockname())\n[c.send(b'x') for _ in range(3)]\n"
                   "e = tcp.accept()[0]\ne.fileno()")
        rows = [line.split() for line in shown(capsys, program, "-v", "5")[1:]]
        assert sorted((row[6], row[-1]) for row in rows) == [
            ("ESTABLISHED", "-"), ("ESTABLISHED", "kernel"), ("LISTEN", "-")]
