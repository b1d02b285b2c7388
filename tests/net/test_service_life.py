"""Life and death: of programs, of interfaces, of the service."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from net.service_lab import (
    Api,
    Peer,
    assert_same_files,
    idle_cpu,
    lost_at_once,
    open_files,
    resident_mib,
    udp_from,
    until,
    veths,
)

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service, tool, xdp_program
from vmahybrid.contracts import lib, size_of
from vmahybrid.service.main import LOG_FILE
from vmahybrid.steering.reasons import Reason

pytestmark = pytest.mark.root


def test_kill_of_a_program_20_times(service: Service, netns_pair: Sandbox) -> None:
    """Rules, ring, veth and file are gone within 1 s, and the port can be offloaded again."""
    api = Api(service)
    with Peer(service, netns_pair.a) as first, Peer(service, netns_pair.a) as second:
        for peer in (first, second):  # what is opened once and kept is open now
            peer.do("ring", ifname="va")
    until(lambda: not api.status()["processes"])
    before = open_files(service.program.pid)
    port = 5321
    for turn in range(20):
        first, second = Peer(service, netns_pair.a, hello=False), Peer(service, netns_pair.a)
        stats = Path(f"/tmp/vmastat.{first.pid}")
        stats.write_bytes(bytes(size_of("struct vmh_stats_page")))
        try:
            first.do("hello", stats=str(stats))
            assert first.do("ring", ifname="va")["kind"] == lib.VMH_RING_DIRECT, turn
            assert second.do("ring", ifname="va")["kind"] == lib.VMH_RING_VETH
            first.bound("s", port)
            assert first.do("attach", name="s", kind="3t", local=["10.77.0.1", port])["status"] == 0
            second.bound("s", port + 1)
            assert second.do("attach", name="s", kind="3t", local=["10.77.0.1", port + 1])["status"] == 0
            begun = time.monotonic()
            first.kill()
            second.kill()
            until(lambda: not api.socket_flows() and not api.status()["processes"], 1.0)
            until(lambda: not veths(netns_pair.a), 1.0)
            until(lambda: not stats.exists(), 1.0)  # noqa: B023
            assert time.monotonic() - begun < 1.5
        finally:
            first.close()
            second.close()
            stats.unlink(missing_ok=True)
    rules = [i["rules"] for i in api.status()["interfaces"] if i["name"] == "va"]
    assert rules == [0, 0] or rules == [0]
    assert_same_files(service.program.pid, before)


def test_a_file_that_is_not_the_programs_stays(service: Service, netns_pair: Sandbox, tmp_path: Path) -> None:
    peer = Peer(service, netns_pair.a, hello=False)
    page = bytes(size_of("struct vmh_stats_page"))
    elsewhere, linked = tmp_path / "vmastat.1", tmp_path / f"vmastat.{peer.pid}"
    elsewhere.write_bytes(page)
    linked.symlink_to(elsewhere)
    peer.do("hello", stats=str(linked))  # the descriptor is that of vmastat.1
    peer.kill()
    until(lambda: not Api(service).status()["processes"])
    time.sleep(0.2)
    assert elsewhere.exists()
    assert linked.is_symlink()
    peer.close()


def test_a_file_replaced_after_hello_stays(service: Service, netns_pair: Sandbox, tmp_path: Path) -> None:
    peer = Peer(service, netns_pair.a, hello=False)
    stats = tmp_path / f"vmastat.{peer.pid}"
    stats.write_bytes(bytes(size_of("struct vmh_stats_page")))
    peer.do("hello", stats=str(stats))
    (tmp_path / "other").write_text("precious")
    (tmp_path / "other").rename(stats)
    peer.kill()
    until(lambda: not Api(service).status()["processes"])
    time.sleep(0.2)
    assert stats.read_text() == "precious"
    peer.close()


def test_the_peers_user_removes_the_file(service: Service, netns_pair: Sandbox, tmp_path: Path) -> None:
    """A user's file in a directory where that user may not unlink stays: root's rights are not lent."""
    os.chmod(tmp_path, 0o755)
    page = bytes(size_of("struct vmh_stats_page"))
    own = tmp_path / "own"
    own.mkdir()
    os.chown(own, 65534, 65534)
    parent = tmp_path.parent
    for directory in (parent, parent.parent):
        os.chmod(directory, 0o755)
    kept = []
    for directory, removed in ((own, True), (tmp_path, False)):
        peer = Peer(service, netns_pair.a, hello=False, prefix=("setpriv", "--reuid=65534", "--regid=65534",
                                                                "--clear-groups"))
        stats = directory / f"vmastat.{peer.pid}"
        stats.write_bytes(page)
        os.chown(stats, 65534, 65534)
        peer.do("hello", stats=str(stats))
        peer.kill()
        until(lambda: not Api(service).status()["processes"])
        until(lambda: not stats.exists() or not removed)  # noqa: B023
        time.sleep(0.2)
        kept.append(stats.exists())
        peer.close()
    assert kept == [False, True]


def test_an_unprivileged_program(service: Service, netns_pair: Sandbox) -> None:
    with Peer(service, netns_pair.a, prefix=("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups",
                                             "--no-new-privs", "--bounding-set=-all")) as peer:
        assert peer.do("ring", ifname="va")["status"] == 0
        port = peer.bound("s")
        assert peer.do("attach", name="s", kind="3t", local=["10.77.0.1", port])["status"] == 0
        assert Api(service).status()["processes"][0]["uid"] == 65534


@pytest.mark.parametrize("how", ["down", "deleted", "emptied"])
def test_an_interface_that_goes_while_in_use(service: Service, netns_pair: Sandbox, how: str) -> None:
    with Peer(lost_at_once(service), netns_pair.a) as peer, Peer(service, netns_pair.a) as second:
        ring = peer.do("ring", ifname="va")
        second.do("ring", ifname="va")
        port = peer.bound("s")
        flow = peer.do("attach", name="s", kind="3t", local=["10.77.0.1", port])
        reason = Reason.IF_DOWN if how == "down" else Reason.IF_GONE
        if how == "down":
            netns_pair.a.ip("link", "set", "va", "down")
        else:
            if how == "emptied":  # as the kernel does with one that it deletes, but the service hears of it before
                netns_pair.a.ip("address", "del", "10.77.0.1/24", "dev", "va")
                until(lambda: Api(service).socket_flows()[0]["action"] != "ring")
            netns_pair.a.ip("link", "del", "va")
        events = sorted([peer.do("event"), peer.do("event")])
        assert events == [[lib.VMH_EV_RING_GONE, ring["ring_id"], 0, reason],
                          [lib.VMH_EV_FLOW_HOME, flow["flow_id"], 0, reason]]
        assert peer.do("release", ring_id=ring["ring_id"])["status"] == 0
        assert peer.do("detach", flow_id=flow["flow_id"])["status"] == 0
        until(lambda: not veths(netns_pair.a))
        if how == "down":
            netns_pair.a.ip("link", "set", "va", "up")
            until(lambda: second.do("ring", ifname="va")["status"] == 0, 5)
            assert xdp_program(netns_pair.a) is not None
            assert peer.do("ring", ifname="va")["status"] == 0
            assert peer.do("attach", name="s", kind="3t", local=["10.77.0.1", port])["rules"] == 1
        else:
            a, b = netns_pair.sides
            a.ip("link", "add", "va", "type", "veth", "peer", "name", "vb", "netns", b.netns)
            a.ip("address", "add", "10.77.0.1/24", "dev", "va")
            for side in (a, b):
                side.ip("link", "set", side.device, "up")
            until(lambda: xdp_program(a) is not None and xdp_program(b) is not None)  # they were named
            assert second.do("ring", ifname="va")["status"] == 0
            assert peer.do("ring", ifname="va")["status"] == 0
            assert peer.do("attach", name="s", kind="3t", local=["10.77.0.1", port])["rules"] == 1


def test_sigterm_sends_everybody_home_and_leaves_nothing(make_service: Callable[..., Service],
                                                         netns_pair: Sandbox) -> None:
    with make_service() as service:
        peers = [Peer(service, netns_pair.a) for _ in range(3)]
        ports = []
        for peer in peers:
            peer.do("ring", ifname="va")
            ports.append(peer.bound("s"))
            assert peer.do("attach", name="s", kind="3t", local=["10.77.0.1", ports[-1]])["status"] == 0
        begun = time.monotonic()
        service.program.process.send_signal(signal.SIGTERM)
        for peer in peers:
            assert peer.do("event") == [lib.VMH_EV_BYE, 0, 0, Reason.SERVICE_STOP]
            assert peer.do("closed")
        assert service.program.wait(3) == 0
        assert time.monotonic() - begun < 2.5
        udp_from(netns_pair, netns_pair.b, "home", "10.77.0.1", ports[0])
        assert peers[0].do("recv", name="s") == "home"
        for peer in peers:
            peer.close()
        assert service.leftovers() == []


def test_kill_of_the_service_and_the_next_one(make_service: Callable[..., Service], netns_pair: Sandbox) -> None:
    """The kernel takes the programs back at once; the next service removes what is left."""
    with make_service() as service:
        first, second = Peer(service, netns_pair.a), Peer(service, netns_pair.a)
        for peer in (first, second):
            peer.do("ring", ifname="va")
        port = second.bound("s")
        assert second.do("attach", name="s", kind="3t", local=["10.77.0.1", port])["status"] == 0
        service.program.process.kill()
        service.program.wait()
        assert second.do("closed")
        until(lambda: xdp_program(netns_pair.a) is None)
        udp_from(netns_pair, netns_pair.b, "home", "10.77.0.1", port)
        assert second.do("recv", name="s") == "home"
        assert len(veths(netns_pair.a)) == 1
        first.close()
        service.start()
        assert veths(netns_pair.a) == []
        with Peer(service, netns_pair.a) as again:
            assert again.do("ring", ifname="va")["status"] == 0
        second.close()


def test_a_living_services_veths_are_not_touched(service: Service, make_service: Callable[..., Service],
                                                 netns_pair: Sandbox) -> None:
    with Peer(service, netns_pair.a) as first, Peer(service, netns_pair.a) as second:
        first.do("ring", ifname="va")
        second.do("ring", ifname="va")
        port = first.bound("s")
        assert first.do("attach", name="s", kind="3t", local=["10.77.0.1", port])["rules"] == 1  # else it lets go
        mine = veths(netns_pair.a)
        other = make_service(sides=[])
        other.start()
        try:
            assert veths(netns_pair.a) == mine != []
            with Peer(other, netns_pair.a) as peer:
                refused = peer.do("ring", ifname="va")
                assert refused["reason"] == Reason.IF_BUSY
        finally:
            other.stop()


def test_an_interface_that_was_held(make_service: Callable[..., Service], netns_pair: Sandbox, tmp_path: Path) -> None:
    """A named one is attached when the other XDP program goes, and nobody is told of that program any more."""
    stays = tmp_path / "stays.toml"
    stays.write_text("[bulk]\ndetach = false\n")
    holder = make_service(sides=[], arguments=["--interface", netns_pair.a.interface, "--config", str(stays)])
    holder.start()
    held = f"process {holder.program.pid} "
    until(lambda: xdp_program(netns_pair.a) is not None)
    with make_service(sides=[netns_pair.a]) as service:
        assert held in str(Api(service).status()["health"])
        holder.stop()
        until(lambda: held not in str(Api(service).status()["health"]))
        until(lambda: xdp_program(netns_pair.a) is not None)


def test_a_request_that_never_ends(make_service: Callable[..., Service], netns_pair: Sandbox) -> None:
    """The service stops all the same, and its log has no fault of ours."""
    with make_service(sides=[netns_pair.a]) as service, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(service.rundir / "api.sock"))
        client.sendall(b"POST /v1/flows HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                       b"Content-Length: 100\r\n\r\n{")
        time.sleep(0.2)
        service.stop()
        assert "Traceback" not in service.log


def test_a_second_service_is_refused(service: Service, netns_pair: Sandbox) -> None:
    second = netns_pair.start(None, [tool("vmahybrid"), "start", "--foreground"], env=service.env)
    assert second.wait(20) == 1
    assert f"process {service.program.pid} serves it already" in second.errors
    assert second.errors.count("\n") == 1
    with Peer(service, netns_pair.a) as peer:
        assert peer.do("ring", ifname="va")["status"] == 0


def test_the_daemon_returns_when_ready(netns_pair: Sandbox, tmp_path: Path) -> None:
    """Its paths are those of the caller's directory, an interface that is not there is told, the log is kept aside."""
    environment = {"VMAHYBRID_RUNDIR": str(tmp_path)}
    control = os.path.relpath(tmp_path / "control.sock")
    syslog, log = Path("/dev/log").exists(), Path(LOG_FILE)
    before = log.stat().st_size if log.exists() else 0
    started = netns_pair.start(None, [tool("vmahybrid"), "start", "--interface", netns_pair.a.interface,
                                      "--interface", "nosuch0", "--control", control], env=environment)
    assert "ready" in started.result(30)
    pid = int((tmp_path / "control.sock.lock").read_text())
    try:
        assert xdp_program(netns_pair.a) is not None
        status = netns_pair.start(None, [tool("vmahybrid"), "status", "--json"], env=environment)
        assert status.wait(20) == 1  # unhealthy
        assert "Interface nosuch0 was named, but does not exist" in status.output
        if not syslog:
            assert "WARNING Interface nosuch0 was named" in log.read_text()[before:]
            assert before or log.stat().st_mode & 0o777 == 0o640
        again = netns_pair.start(None, [tool("vmahybrid"), "start"], env=environment)
        assert again.wait(20) == 1
        assert f"process {pid} serves it already" in again.errors
    finally:
        os.kill(pid, signal.SIGINT)
    until(lambda: not (tmp_path / "control.sock.lock").exists(), 3)
    assert list(tmp_path.iterdir()) == []
    if not syslog and not before:
        log.unlink()
    assert xdp_program(netns_pair.a) is None


@pytest.mark.parametrize(("arguments", "said"), [
    (["--config", "/nonexistent.toml"], "/nonexistent.toml"),
    (["--interface", "a:b:c"], "interfaces"),
    (["--log-level", "loud"], "log.level"),
    (["--frobnicate"], "--frobnicate"),
    (["--control", ""], "control.path"),
    (["--config", ""], "--config"),
    (["--control", __file__], f"{__file__}: there is a file that is no socket"),
])
def test_wrong_arguments_name_the_token(arguments: list[str], said: str, tmp_path: Path) -> None:
    done = subprocess.run([tool("vmahybrid"), "start", "--foreground", *arguments], capture_output=True, text=True,
                          timeout=20, env={**os.environ, "VMAHYBRID_RUNDIR": str(tmp_path)}, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert said in done.stderr


def test_in_a_namespace_with_a_name(netns_pair: Sandbox, tmp_path: Path) -> None:
    """What is named without one is of the service's own, and attached at the start."""
    side = netns_pair.a
    argv = [tool("vmahybrid"), "start", "--foreground", "--interface", side.device]
    program = netns_pair.start(side, argv, env={"VMAHYBRID_RUNDIR": str(tmp_path), "CACHE_DIRECTORY": os.devnull})
    try:
        assert "1 interface(s) attached" in until(lambda: [line for line in program.errors.splitlines()
                                                           if "ready:" in line], 20)[0]
    finally:
        assert program.stop(signal.SIGTERM, 10) == 0


def test_it_says_that_root_may_start_it(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    argv = ["setpriv", "--reuid", "65534", "--clear-groups", tool("vmahybrid"), "start", "--foreground"]
    found = subprocess.run(argv, env={**os.environ, "VMAHYBRID_RUNDIR": str(tmp_path / "run")}, capture_output=True,
                           text=True, check=False, timeout=20)
    assert found.returncode == 77, found
    assert "as root" in found.stderr


def test_it_costs_little(service: Service, netns_pair: Sandbox) -> None:
    with Peer(service, netns_pair.a) as peer:
        peer.do("ring", ifname="va")
        time.sleep(2)
        assert idle_cpu(service.program.pid, 5) < 0.01
    assert resident_mib(service.program.pid) < 100


def test_silent_connections_do_not_hold_the_shutdown(make_service: Callable[..., Service], netns_pair: Sandbox) -> None:
    """Any user may connect and say nothing."""
    with make_service() as service, Peer(service, netns_pair.a) as peer, contextlib.ExitStack() as stack:
        peer.do("ring", ifname="va")
        assert peer.do("neigh", ifname="va", address="10.77.0.2")["status"] == 0
        assert "managed" in netns_pair.a.ip("neigh", "show", "dev", "va")
        for _ in range(3):
            silent = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            silent.connect(service.env["VMA_HYBRID_SOCKET"])
        udp = stack.enter_context(Peer(service, netns_pair.a))  # accepted after them
        assert udp.do("ring", ifname="va")["status"] == 0
        begun = time.monotonic()
        service.program.process.send_signal(signal.SIGTERM)
        assert service.program.wait(3) == 0
        assert time.monotonic() - begun < 1.8
        assert "ERROR" not in service.program.errors
        assert "managed" not in netns_pair.a.ip("neigh", "show", "dev", "va")


def test_directories_that_it_made_are_removed(tmp_path: Path) -> None:
    control, api = tmp_path / "a" / "b" / "c.sock", tmp_path / "a" / "d" / "api.sock"
    file = tmp_path / "c.toml"
    file.write_text(f'control.path = "{control}"\napi.unix = "{api}"\n')
    with subprocess.Popen([tool("vmahybrid"), "start", "--foreground", "--config", str(file)],
                          stderr=subprocess.PIPE, env={**os.environ, "VMAHYBRID_RUNDIR": str(tmp_path)}) as service:
        try:
            until(api.exists, 10)
            until(control.exists, 10)
        finally:
            service.terminate()
        assert service.wait(5) == 0
    assert list(tmp_path.iterdir()) == [file]
