"""Rings on a served interface: direct, by a ring veth, for other processes, and what is left when they are closed."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from net.xdp_lab import (
    ENVIRONMENT,
    A,
    B,
    Lab,
    User,
    answer,
    datagrams,
    image,
    nothing_comes,
    payload,
    receive,
    run,
    steer,
    view,
)

from vmahybrid.contracts import addr_to_bytes, flow_key, htons, lib
from vmahybrid.errors import Refused
from vmahybrid.steering.reasons import Reason
from vmahybrid.xdp.port import XdpPort, _Slots
from vmahybrid.xdp.ring import open_ring
from vmahybrid.xdp.ringveth import remove_leftovers

pytestmark = pytest.mark.root
UDP = 17
MODES = ["generic", "native"]


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab() as made:
        yield made


@pytest.fixture
def port(lab: Lab) -> Iterator[XdpPort]:
    with lab.port() as opened:
        yield opened


def test_port_reports_the_interface(lab: Lab, port: XdpPort) -> None:
    assert (port.ifname, port.mode, port.reason, port.mtu) == ("vb", "generic", Reason.GENERIC_VIRTUAL, 1500)
    assert port.info.driver == "veth"
    assert not port.info.physical
    assert port.info.mac.hex(":") == lab.mac("vb")
    assert port.attached
    assert set(port.outs()) >= {"ring", "dev", "drop", "pass-miss", "pass-ring-gone", "pass-too-long"}


@pytest.mark.parametrize(("name", "reason"), [("nope", Reason.NO_INTERFACE), ("lo", Reason.IF_UNSUPPORTED),
                                              ("vb", Reason.IF_BUSY)])
def test_port_refusals_carry_their_reason(lab: Lab, port: XdpPort, name: str, reason: Reason) -> None:
    with pytest.raises(Refused) as refused:
        XdpPort.open(lab.b, image(), name)
    assert refused.value.reason == reason


def test_rules_are_a_mirror_target(port: XdpPort) -> None:
    keys = [flow_key(B, 1, A, 2), flow_key(B, 1), flow_key("239.1.1.1", 1), flow_key("ff02::1", 1),
            flow_key("fd00::1", 1)]
    wanted = {key: bytes([lib.VMH_ACT_DROP, 0, 0, 0]) + bytes([n]) * 8 + bytes(4) for n, key in enumerate(keys)}
    for key, action in wanted.items():
        port.install(key, action)
    assert port.present() == wanted
    port.remove(keys[0])
    port.remove(keys[0])
    assert port.present() == {key: wanted[key] for key in keys[1:]}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["direct", "veth"])
def test_a_ring_exchanges_datagrams_with_a_kernel_socket(lab: Lab, kind: str, mode: str) -> None:
    with lab.port(mode) as port, lab.kernel_socket() as peer:
        ring = open_ring(port, direct_allowed=kind == "direct")
        assert (ring.kind, port.mode) == (kind, mode)
        steer(port, ring, 5001, rule=7)
        with view(ring) as mine:
            for number in range(300):  # more than a batch, and frames are used again
                peer.sendto(b"question %d" % number, (B, 5001))
                frames = receive(mine, 1)
                assert [payload(f) for f in frames] == [b"question %d" % number]
                assert mine.send([answer(f) for f in frames]) == 1
                assert datagrams(peer, 1) == [(b"question %d" % number, (B, 5001))]
        assert port.hits(7)[0] == 300
        port.zero_hits(7)
        assert port.hits(7) == (0, 0)
        assert port.outs()["ring" if kind == "direct" else "dev"] == 300
        assert ring.stats()["rx_dropped"] == 0


@pytest.mark.parametrize("mode", MODES)
def test_the_second_process_gets_a_ring_veth_and_both_work(lab: Lab, mode: str) -> None:
    with lab.port(mode) as port, lab.kernel_socket() as peer:
        first, second, third = (open_ring(port) for _ in range(3))
        assert [ring.kind for ring in (first, second, third)] == ["direct", "veth", "veth"]
        assert first.reason == (Reason.NONE if mode == "generic" else Reason.COPY_NO_ZEROCOPY)  # veth has none
        assert second.reason == third.reason == Reason.VETH_SECOND
        for number, ring in enumerate((first, second, third)):
            steer(port, ring, 5001 + number, rule=number)
        with view(first) as one, view(second) as two, view(third) as three:
            for udp_port, mine in zip((5001, 5002, 5003), (one, two, three), strict=True):
                peer.sendto(b"to %d" % udp_port, (B, udp_port))
                frames = receive(mine, 1)
                assert [payload(f) for f in frames] == [b"to %d" % udp_port]
                mine.send([answer(f) for f in frames])
                assert datagrams(peer, 1) == [(b"to %d" % udp_port, (B, udp_port))]
            assert [mine.receive() for mine in (one, two, three)] == [[], [], []]


def test_what_no_rule_names_goes_to_the_kernel(lab: Lab, port: XdpPort) -> None:
    ring = open_ring(port)
    steer(port, ring, 5001)
    with view(ring) as mine, lab.kernel_socket() as peer, lab.kernel_socket(5002, "b") as local:
        peer.sendto(b"for the kernel", (B, 5002))
        assert datagrams(local, 1)[0][0] == b"for the kernel"
        assert mine.receive() == []


@pytest.mark.parametrize("kind", ["direct", "veth"])
def test_packets_go_to_the_kernel_when_the_ring_is_closed(lab: Lab, port: XdpPort, kind: str) -> None:
    ring = open_ring(port, direct_allowed=kind == "direct")
    steer(port, ring, 5001)
    with lab.kernel_socket() as peer, lab.kernel_socket(5001, "b") as local:
        peer.sendto(b"into the ring", (B, 5001))
        assert nothing_comes(local)
        ring.close()
        peer.sendto(b"after the ring", (B, 5001))  # the rule is still there
        assert datagrams(local, 1)[0][0] == b"after the ring"
    assert port.outs()["pass-ring-gone"] == 1


def test_the_guard_lets_out_only_what_was_granted(lab: Lab, port: XdpPort) -> None:
    ring = open_ring(port, direct_allowed=False)
    steer(port, ring, 5001)
    with view(ring) as mine, lab.kernel_socket() as peer:
        peer.sendto(b"x", (B, 5001))
        frame = receive(mine, 1)[0]
        mine.send([answer(frame, source_port=5002), answer(frame, source_mac=b"\x02forge"), b"\xff" * 60])
        assert nothing_comes(peer)
        assert ring.guard_outs() == {"sent": 0, "bad-mac": 2, "bad-source": 1, "not-flow": 0, "no-dev": 0}
        mine.send([answer(frame)])
        assert datagrams(peer, 1) == [(b"x", (B, 5001))]
        ring.revoke_source(addr_to_bytes(B), htons(5001), UDP, 4)
        mine.send([answer(frame)])
        assert nothing_comes(peer)
        assert ring.guard_outs()["bad-source"] == 2
    ring.close()
    ring.revoke_source(addr_to_bytes(B), htons(5001), UDP, 4)
    with pytest.raises(Refused, match="closed"):
        ring.grant_source(addr_to_bytes(B), htons(5001), UDP, 4, 1)
    assert (ring.guard_outs(), ring.stats()) == ({}, {})


def test_a_near_end_without_its_guard_feeds_nothing_to_the_kernel(lab: Lab, port: XdpPort) -> None:
    """As after kill -9 of the service, whose bpf_links then are gone, while the program still has its ring."""
    ring = open_ring(port, direct_allowed=False)
    steer(port, ring, 5001)
    near = next(name for name in lab.links() if name.startswith("vmhr"))
    with view(ring) as mine, lab.kernel_socket() as peer, lab.kernel_socket(5009, "b") as local:
        peer.sendto(b"x", (B, 5001))
        into_host = bytearray(receive(mine, 1)[0])
        into_host[36:38] = (5009).to_bytes(2, "big")  # a good frame for a local socket, from the wire's view
        into_host[40:42] = b"\0\0"
        into_host[:6] = bytes.fromhex(lab.mac(near).replace(":", ""))
        ring._veth._guard_link.close()  # type: ignore[attr-defined]
        mine.send([bytes(into_host)])
        assert nothing_comes(local)


@pytest.mark.parametrize("kind", ["direct", "veth"])
def test_a_process_without_any_privilege_drives_a_ring(lab: Lab, port: XdpPort, kind: str) -> None:
    ring = open_ring(port, direct_allowed=kind == "direct")
    steer(port, ring, 5001)
    with User(ring) as user, lab.kernel_socket() as peer:
        assert user.report["uid"] == 65534
        assert {user.report[name] for name in ("CapPrm", "CapEff", "CapInh", "CapAmb")} == {"0" * 16}
        assert user.report["NoNewPrivs"] == "1"
        for number in range(50):
            peer.sendto(b"%d" % number, (B, 5001))
            assert datagrams(peer, 1) == [(b"%d" % number, (B, 5001))]


@pytest.mark.parametrize("bind_after", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_several_receive_queues_make_one_direct_ring(mode: str, bind_after: bool) -> None:
    with Lab(queues=4) as wide, wide.port(mode) as port:
        ring = open_ring(port, bind_after=bind_after)
        assert (ring.kind, len(ring.xsk_fds), ring.reply_fields()["nqueues"]) == ("direct", 4, 4)
        steer(port, ring, 5001)
        with view(ring) as mine, contextlib.ExitStack() as stack:
            assert ring.bind_after == bind_after
            if bind_after:
                ring.bind()
                assert not ring.bind_after
            peers = [stack.enter_context(wide.kernel_socket()) for _ in range(32)]
            for number, peer in enumerate(peers):
                peer.sendto(b"%d" % number, (B, 5001))
            by_queue = [mine.receive(queue=queue) for queue in range(4)]
            assert sum(bool(frames) for frames in by_queue) > 1  # the sender's hash did spread them
            frames = list(itertools.chain.from_iterable(by_queue))
            assert sorted(int(payload(f)) for f in frames) == list(range(32))
            for queue, some in enumerate(by_queue):
                mine.send([answer(f) for f in some], queue)
            assert [datagrams(peer, 1)[0][0] for peer in peers] == [b"%d" % n for n in range(32)]


def test_too_many_queues_give_a_ring_veth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vmahybrid.xdp.ring.MAX_QUEUES", 2)
    with Lab(queues=3) as wide, wide.port() as port, wide.kernel_socket() as peer:
        ring = open_ring(port)
        assert (ring.kind, ring.reason) == ("veth", Reason.VETH_QUEUES)
        steer(port, ring, 5001)
        with view(ring) as mine:
            peer.sendto(b"collected", (B, 5001))
            frames = receive(mine, 1)
            mine.send([answer(f) for f in frames])
            assert datagrams(peer, 1)[0][0] == b"collected"


def test_the_queue_of_a_killed_process_is_direct_again(lab: Lab, port: XdpPort) -> None:
    for _ in range(3):
        ring = open_ring(port)
        assert ring.kind == "direct"
        with User(ring) as user:
            user.kill()
            ring.close()


def test_a_process_that_keeps_a_closed_ring_leaves_the_others_a_veth(lab: Lab, port: XdpPort) -> None:
    ring = open_ring(port)
    with User(ring):
        ring.close()
        second = open_ring(port)
        assert (second.kind, second.reason) == ("veth", Reason.VETH_SECOND)


@pytest.mark.parametrize("mtu", [1500, 3000, 9000])
def test_full_frames_fit_and_longer_ones_go_to_the_kernel(mtu: int) -> None:
    with Lab(mtu=mtu) as lab, lab.port() as port, lab.kernel_socket() as peer, lab.kernel_socket(5001, "b") as local:
        ring = open_ring(port)
        assert ring.geometry["frame_size"] == (2048 if mtu == 1500 else 4096)
        assert ring.mtu == min(mtu, 4096 - 256 - 8 - 14)
        steer(port, ring, 5001)
        with view(ring) as mine:
            full = os.urandom(ring.mtu - 28)
            peer.sendto(full, (B, 5001))
            assert [payload(f) for f in receive(mine, 1)] == [full]
            if mtu > ring.mtu:
                peer.sendto(full + b"!", (B, 5001))
                assert local.recv(10000) == full + b"!"
                assert port.outs()["pass-too-long"] == 1
        assert ring.stats()["rx_dropped"] == 0


def test_a_new_mtu_reaches_program_and_ring_veth(lab: Lab, port: XdpPort) -> None:
    ring = open_ring(port, direct_allowed=False)
    steer(port, ring, 5001)
    near = next(name for name in lab.links() if name.startswith("vmhr"))
    for worker, name in ((lab.a, "va"), (lab.b, "vb")):
        run(worker, "ip", "link", "set", name, "mtu", "1700")
    port.set_mtu(1700)
    assert "mtu 65535" in run(lab.b, "ip", "link", "show", near)  # whatever the interface has
    assert ring.mtu == 1700
    with view(ring) as mine, lab.kernel_socket() as peer:
        peer.sendto(bytes(1672), (B, 5001))
        assert [len(payload(f)) for f in receive(mine, 1)] == [1672]


@pytest.mark.parametrize("direct", [True, False])
def test_an_interface_that_is_renamed_gives_rings(lab: Lab, port: XdpPort, direct: bool) -> None:
    for change in (("vb", "down"), ("vb", "name", "renamed"), ("renamed", "up")):
        run(lab.b, "ip", "link", "set", *change)
    ring = open_ring(port, direct_allowed=direct)
    assert (ring.kind == "direct") is direct
    assert port.ifname == "renamed"


def test_a_ring_veth_is_quiet_and_named(lab: Lab, port: XdpPort) -> None:
    ring = open_ring(port, direct_allowed=False)
    near = next(name for name in lab.links() if name.startswith("vmhr"))
    shown = run(lab.b, "ip", "-d", "address", "show", near)
    assert "alias vmahybrid ring" in shown
    assert "NOARP" in shown
    assert "inet" not in shown.replace("inet6 addrgenmode", "")
    time.sleep(0.3)  # an end that speaks does so when it comes up
    assert set(ring.guard_outs().values()) == {0}


def test_nothing_is_left_after_close(lab: Lab) -> None:
    fds, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    port = lab.port()
    rings = [open_ring(port) for _ in range(4)]
    assert len([name for name in lab.links() if name.startswith("vmhr")]) == 3
    assert threading.active_count() == threads + 1  # the namespace of the far ends
    rings[1].close()
    rings[1].close()
    assert len([name for name in lab.links() if name.startswith("vmhr")]) == 2
    port.close()
    port.close()
    assert lab.links() == ["lo", "vb"]
    assert "xdp" not in run(lab.b, "ip", "link", "show", "vb")
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == fds
    with pytest.raises(Refused) as refused:
        open_ring(port)
    assert refused.value.reason == Reason.IF_GONE
    assert len(os.listdir("/proc/self/fd")) == fds
    with lab.port() as again:
        assert open_ring(again).kind == "direct"


def test_a_ring_on_a_vanished_interface_is_refused_as_gone(lab: Lab, port: XdpPort) -> None:
    run(lab.b, "ip", "link", "del", "vb")
    with pytest.raises(Refused) as refused:
        open_ring(port)
    assert refused.value.reason == Reason.IF_GONE


def test_an_interface_that_disappears_takes_its_rings_along(lab: Lab, port: XdpPort) -> None:
    open_ring(port)
    open_ring(port)
    run(lab.b, "ip", "link", "del", "vb")
    assert not port.attached
    port.close()
    assert lab.links() == ["lo"]


WITHOUT_IPC_LOCK = """
import resource
from net.xdp_lab import Lab
from vmahybrid.errors import Refused
from vmahybrid.xdp.ring import open_ring
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
with Lab() as lab, lab.port() as port:
    try:
        open_ring(port)
    except Refused as refused:
        print(refused.reason.slug, refused)
    print(len(port.rings), lab.links())
"""


def test_a_small_memlock_limit_is_named_with_its_remedy() -> None:
    done = subprocess.run(["setpriv", "--bounding-set=-ipc_lock", sys.executable, "-P", "-c", WITHOUT_IPC_LOCK],
                          env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()
    assert first.startswith("memlock ring on vb: ")
    assert "ulimit -l unlimited" in first
    assert second == "0 ['lo', 'vb']"


def test_refused_rings_leave_nothing(lab: Lab, port: XdpPort) -> None:
    fds = len(os.listdir("/proc/self/fd"))
    port._ring_slots = port._dev_slots = _Slots(0, "test")  # the last step of both kinds fails
    for direct in (True, False):
        with pytest.raises(Refused) as refused:
            open_ring(port, direct_allowed=direct)
        assert refused.value.reason == Reason.RING_LIMIT
    for wrong in ({"rx_size": 1000}, {"tx_size": 1 << 30}, {"frames": 0}, {"frames": 1 << 30}):
        with pytest.raises(ValueError, match=next(iter(wrong)).split("_")[0]):
            open_ring(port, **wrong)
    assert len(os.listdir("/proc/self/fd")) == fds
    assert lab.links() == ["lo", "vb"]


# A service in the namespace argv[1] that gives a ring veth to an unprivileged process and says its pid.
SERVICE = """
import sys, time
from net.xdp_lab import B, User, image, steer
from vmahybrid.net.netns import NetnsWorker
from vmahybrid.xdp.port import XdpPort
from vmahybrid.xdp.ring import open_ring
with NetnsWorker.open_path(sys.argv[1]) as worker, XdpPort.open(worker, image(), "vb") as port:
    for direct, udp_port in ((True, 5001), (False, 5002)):
        ring = open_ring(port, direct_allowed=direct)
        steer(port, ring, udp_port, rule=udp_port)
        print(User(ring, orphan=True).process.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("traffic", [False, True])
def test_kill_9_of_the_service_leaves_packets_to_the_kernel(lab: Lab, traffic: bool) -> None:
    """The two processes live on with their rings; the next service takes the interface over and cleans up."""
    fd = lab.b.namespace_fd()
    stop = threading.Event()
    service = subprocess.Popen([sys.executable, "-P", "-c", SERVICE, f"/proc/self/fd/{fd}"], pass_fds=[fd],
                               stdout=subprocess.PIPE, env=ENVIRONMENT)
    users: list[int] = []
    try:
        assert service.stdout is not None
        users = [int(service.stdout.readline()) for _ in range(2)]
        with lab.kernel_socket() as peer, contextlib.ExitStack() as stack:
            for udp_port in (5001, 5002):
                peer.sendto(b"alive", (B, udp_port))
                assert datagrams(peer, 1) == [(b"alive", (B, udp_port))]
            if traffic:
                noise = stack.enter_context(lab.kernel_socket())
                flood = threading.Thread(target=_flood, args=(noise, stop))
                flood.start()
                stack.callback(flood.join)
                stack.callback(stop.set)
            service.kill()
            service.wait()
            locals_ = [stack.enter_context(lab.kernel_socket(udp_port, "b")) for udp_port in (5001, 5002)]
            for number, local in enumerate(locals_):
                peer.sendto(b"to the kernel", (B, 5001 + number))
                while local.recv(100) != b"to the kernel":  # among the noise
                    pass
        assert "xdp" not in run(lab.b, "ip", "link", "show", "vb")
        assert len(lab.b.call(remove_leftovers)) == 1
        assert lab.links() == ["lo", "vb"]
        with lab.port() as port:
            assert open_ring(port).reason == Reason.VETH_SECOND  # the old one still has the queue
            os.kill(users[0], signal.SIGKILL)
            assert open_ring(port).kind == "direct"
    finally:
        service.kill()
        service.wait()
        service.stdout.close()
        os.close(fd)
        for pid in users:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _flood(sock: socket.socket, stop: threading.Event) -> None:
    while not stop.is_set():
        for udp_port in (5001, 5002):
            with contextlib.suppress(ConnectionRefusedError):
                sock.sendto(b"noise", (B, udp_port))
        time.sleep(0.001)


def test_leftover_ring_veths_are_removed_by_alias(lab: Lab) -> None:
    for name, alias in (("vmhr77", "vmahybrid ring"), ("vmhr78", "somebody else's")):
        run(lab.b, "ip", "link", "add", name, "type", "veth", "peer", "name", f"p{name}")
        run(lab.b, "ip", "link", "set", name, "alias", alias)
    assert lab.b.call(remove_leftovers) == ["vmhr77"]
    assert lab.links() == ["lo", "pvmhr78", "vb", "vmhr78"]
