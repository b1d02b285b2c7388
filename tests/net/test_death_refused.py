"""Programs and services that are not let in: no service, no permission, a second service; and one without rights."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from net.death_lab import PYTHON, Lab, progresses, stats_page, until

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service, tool
from vmahybrid.verbs.library import softverbs_environment

pytestmark = pytest.mark.root

PORT = 7400
LIFE = str(Path(__file__).with_name("death_life.py"))
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all", "--inh-caps=-all",
          "--no-new-privs"]
WARNING = ("* Interface {} will not be offloaded.",  # the README of VMA, "CAP_NET_RAW and root access"
           "* Offloaded resources are restricted to root or user with CAP_NET_RAW privileges",
           "* Read the CAP_NET_RAW and root access section in the VMA's User Manual for more information")


@pytest.fixture
def unstarted(netns_pair: Sandbox, softverbs: bool) -> Iterator[Lab]:
    """A sandbox whose service does not run."""
    service = Service(netns_pair, softverbs=softverbs)
    yield Lab(netns_pair, service)
    service.kill()


def said_by_shim(errors: str) -> list[str]:
    """After the banner."""
    return [line for line in errors.rpartition("-" * 75 + "\n")[2].splitlines() if "VMA" in line.upper()]


def exchange(lab: Lab, prefix: list[str]) -> list[str]:
    """An asker under the shim and a plain server exchange datagrams by the kernel; what the shim said at level info."""
    a, b = lab.sandbox.sides
    lab.echo(b, PORT)
    asker = lab.role(a, "ask", b.address, PORT, "poll", 0.002, prefix=prefix, VMA_TRACELEVEL="info")
    progresses(asker, 5, 100)
    if lab.service.rundir.joinpath("api.sock").exists():
        assert not lab.flows(asker.pid)
    asker.stop()  # SIGINT: it ends in good order, and removes its statistics, for which there is nobody else
    assert not stats_page(asker.pid).exists()
    return said_by_shim(asker.errors)


def test_no_service(unstarted: Lab) -> None:
    said = exchange(unstarted, [])
    assert len(said) == 1, said
    assert "no vmahybrid service answers" in said[0]
    assert unstarted.service.env["VMA_HYBRID_SOCKET"] in said[0]


@pytest.mark.parametrize("end", ["os._exit(0)", "os.abort()", *(f"os.kill(os.getpid(), {n})" for n in (2, 9, 15))])
@pytest.mark.parametrize("later", ["vma_stats", "run"])
def test_no_service_and_no_farewell(unstarted: Lab, end: str, later: str, tmp_path: Path) -> None:
    """Its statistics stay only where nobody could take them away, until somebody asks for any, or runs a program."""
    use = ("import os, signal, socket; signal.signal(2, signal.SIG_DFL); s = socket.socket(2, 2);"
           "s.bind(('127.0.0.1', 0)); s.sendto(b'x', s.getsockname()); print(len(s.recv(9)), flush=True);")
    argv = unstarted.service.run_argv([*PYTHON, "-c", use + end], VMA_STATS_SHMEM_DIR=str(tmp_path),
                                      VMA_TRACELEVEL="info")
    program = unstarted.sandbox.start(unstarted.sandbox.a, argv, env=unstarted.service.env)
    program.wait(20)
    assert program.output.startswith("1")
    assert "no vmahybrid service answers" in program.errors
    assert [path.name for path in tmp_path.iterdir()] == ([] if "_exit" in end else [f"vmastat.{program.pid}"])
    argv = [tool("vma_stats"), "-k", str(tmp_path)] if later == "vma_stats" else [
        tool("vmahybrid"), "run", "-e", f"VMA_STATS_SHMEM_DIR={tmp_path}", "--", "true"]
    subprocess.run(argv, capture_output=True, timeout=20, check=False)
    assert not list(tmp_path.iterdir())


def test_a_service_that_begins_removes_what_dead_programs_left(netns_pair: Sandbox) -> None:
    stale = stats_page(int(Path("/proc/sys/kernel/pid_max").read_text()) + os.getpid())
    stale.write_bytes(b"VMS1")
    with Service(netns_pair):
        assert not stale.exists()


def test_no_permission(netns_pair: Sandbox, tmp_path: Path, softverbs: bool) -> None:
    config = tmp_path / "service.toml"
    config.write_text('[control]\nmode = "0600"\n')
    with Service(netns_pair, arguments=["--config", str(config)], softverbs=softverbs) as service:
        lab = Lab(netns_pair, service)
        assert os.stat(service.env["VMA_HYBRID_SOCKET"]).st_mode & 0o777 == 0o600
        said = exchange(lab, NOBODY)
        assert len(said) == 1, said
        assert "may not be opened by this user" in said[0]


def test_without_any_right_but_permission(netns_pair: Sandbox, tmp_path: Path, softverbs: bool) -> None:
    """uid 65534 without a capability: permission on the control socket is all that a program needs. With a device that
    has raw packet QPs, which take CAP_NET_RAW, it gets the manual's warning and the next rung, AF_XDP."""
    config = tmp_path / "service.toml"
    config.write_text('[control]\nmode = "0666"\n')
    with Service(netns_pair, arguments=["--config", str(config)]) as service:
        lab = Lab(netns_pair, service)
        _, b = netns_pair.sides
        device = softverbs_environment() if softverbs else {}
        server = lab.role(b, "serve", b.address, PORT, prefix=NOBODY, **device)
        lab.on_ring(server)
        status = Path(f"/proc/{server.pid}/status").read_text()
        assert "CapEff:\t0000000000000000" in status and "Uid:\t65534\t65534" in status
        lab.plain(netns_pair.a, "ask", b.address, PORT, "block", 0.002)
        progresses(server, 5, 100)
        assert lab.flows(server.pid)[0]["packets"] >= 100
        for line in WARNING:
            assert server.errors.count(f" VMA WARNING: {line.format(b.device)}\n") == softverbs


@pytest.fixture
def service(netns_pair: Sandbox, softverbs: bool) -> Iterator[Service]:
    with Service(netns_pair, softverbs=softverbs) as running:
        yield running


def test_second_service(service: Service, netns_pair: Sandbox) -> None:
    lab = Lab(netns_pair, service)
    _, b = netns_pair.sides
    server = lab.role(b, "sink", b.address, PORT)
    lab.on_ring(server)
    second = netns_pair.start(None, [tool("vmahybrid"), "start", "--foreground"], env=service.env)
    assert second.wait(20) == 1
    lines = second.errors.splitlines()
    assert len(lines) == 1, lines
    assert str(service.program.pid) in lines[0] and service.env["VMA_HYBRID_SOCKET"] in lines[0]
    # the first one has noticed nothing
    assert lab.flows(server.pid)
    late = lab.role(b, "sink", b.address, PORT + 1)
    lab.on_ring(late)


def test_a_service_that_comes_later(unstarted: Lab) -> None:
    """A program that began on the kernel comes to the rings with its next socket, the old ones too."""
    lab = unstarted
    a, b = lab.sandbox.sides
    lab.echo(b, PORT)
    program = lab.shimmed(a, [*PYTHON, LIFE, "late", b.address, str(PORT)])
    program.wait_for(f"before {program.pid}")
    with lab.service:
        program.process.send_signal(signal.SIGUSR1)
        program.wait_for(f"after {program.pid}")
        until(lambda: len(lab.flows(program.pid)) == 2, 3, lab.why(program))
        program.process.send_signal(signal.SIGUSR1)
        program.wait_for(f"later {program.pid}")
        assert all(flow["packets"] >= 50 for flow in lab.flows(program.pid)), lab.flows(program.pid)
        program.process.send_signal(signal.SIGUSR1)
        assert program.wait(10) == 0, program.errors
