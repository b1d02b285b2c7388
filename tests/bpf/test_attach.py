"""Live: programs on a veth between two namespaces of the test's own."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bpf.frames import UDP
from bpf.harness import AF_XDP, MTU, hits, index
from vmahybrid.contracts import action, flow_key, lib, pack
from vmahybrid.errors import Refused
from vmahybrid.net.netns import NetnsWorker
from vmahybrid.steering.reasons import Reason
from vmahybrid.xdp.attach import InterfaceBusy, attach, driver_of
from vmahybrid.xdp.bpf import XDP_DROP, XDP_PASS, XDP_REDIRECT, ProgramSet, load_set
from vmahybrid.xdp.holder import attached
from vmahybrid.xdp.image import Image

pytestmark = pytest.mark.root

NEAR, FAR = "10.99.0.1", "10.99.0.2"


def ip(*argv: str) -> None:
    subprocess.run(["ip", *argv], check=True, timeout=10, capture_output=True)


@dataclass
class Pair:
    """Interface va (NEAR) in namespace near, vb (FAR) in far; a macvlan vm on va, which has no native XDP."""

    near: NetnsWorker
    far: NetnsWorker
    name: str

    @property
    def va(self) -> int:
        return self.near.call(socket.if_nametoindex, "va")

    @property
    def vm(self) -> int:
        return self.near.call(socket.if_nametoindex, "vm")


@pytest.fixture
def pair() -> Iterator[Pair]:
    a, b = (f"vmh-t-{os.getpid()}-{side}" for side in "ab")
    try:
        for name in (a, b):
            ip("netns", "add", name)
        ip("-n", a, "link", "add", "va", "numrxqueues", "70", "type", "veth", "peer", "name", "vb", "netns", b)
        ip("-n", a, "link", "add", "vm", "link", "va", "type", "macvlan")
        for name, device, address in ((a, "va", NEAR), (b, "vb", FAR)):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            ip("-n", name, "link", "set", device, "up")
        with NetnsWorker.open_path(f"/run/netns/{a}") as near, NetnsWorker.open_path(f"/run/netns/{b}") as far:
            yield Pair(near, far, a)
    finally:
        for name in (a, b):
            subprocess.run(["ip", "netns", "del", name], check=False, timeout=10, capture_output=True)


@pytest.fixture
def loaded(image: Image) -> Iterator[ProgramSet]:
    with load_set(image, ["steer", "ring_in"]) as programs:
        config = pack("struct vmh_port_config", max_frame=MTU + 14, flags=lib.VMH_PORT_F_3T)
        programs.maps["port"].update(index(0), config)
        yield programs


def until(condition: Callable[[], bool], seconds: float = 2.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def datagram(pair: Pair, port: int) -> bytes | None:
    """What the kernel's socket on NEAR:port gets of a datagram from FAR; None if nothing comes in 0.3 s."""
    with pair.near.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver, \
            pair.far.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        receiver.bind((NEAR, port))
        receiver.settimeout(0.3)
        sender.sendto(b"hello", (NEAR, port))
        try:
            return receiver.recv(100)
        except TimeoutError:
            return None


@pytest.mark.parametrize("mode", ["generic", "native"])
def test_rules_act_on_traffic(pair: Pair, loaded: ProgramSet, mode: str) -> None:
    link = pair.near.call(attach, loaded.programs["steer"], pair.va, mode)
    try:
        assert (link.mode, link.reason, link.alive) == (mode, Reason.NONE, True)
        assert datagram(pair, 5000) == b"hello"
        loaded.maps["rules3"].update(flow_key(NEAR, 5000, proto=UDP), action(lib.VMH_ACT_DROP, rule=7))
        assert datagram(pair, 5000) is None
        assert datagram(pair, 5001) == b"hello"
        assert hits(loaded.maps["rule_hits"], 7) == (1, 14 + 20 + 8 + 5)
    finally:
        link.close()
    assert datagram(pair, 5000) == b"hello"
    assert pair.near.call(attached, pair.va) == {}


def test_auto_is_generic_on_veth(pair: Pair, loaded: ProgramSet) -> None:
    link = pair.near.call(attach, loaded.programs["steer"], pair.va)
    assert (link.mode, link.reason, link.detail) == ("generic", Reason.GENERIC_VIRTUAL, "")
    assert pair.near.call(attached, pair.va) == {"generic": loaded.programs["steer"].id}
    link.close()
    link.close()
    assert not link.alive


def test_auto_is_native_on_other_drivers(pair: Pair, loaded: ProgramSet) -> None:
    link = pair.near.call(attach, loaded.programs["steer"], pair.va, driver="ixgbe")
    assert (link.mode, link.reason) == ("native", Reason.NONE)
    link.close()


def test_auto_falls_back_to_generic_and_says_why(pair: Pair, loaded: ProgramSet) -> None:
    link = pair.near.call(attach, loaded.programs["steer"], pair.vm, driver="ixgbe")
    assert (link.mode, link.reason) == ("generic", Reason.GENERIC_NO_NATIVE)
    assert link.detail == "native: Operation not supported"
    link.close()


def test_an_explicit_mode_is_not_changed(pair: Pair, loaded: ProgramSet) -> None:
    with pytest.raises(Refused, match=r"vm: .*native mode: Operation not supported") as error:
        pair.near.call(attach, loaded.programs["steer"], pair.vm, "native")
    assert error.value.reason == Reason.ATTACH_FAILED
    assert pair.near.call(attached, pair.vm) == {}
    with pytest.raises(ValueError, match="offload"):
        pair.near.call(attach, loaded.programs["steer"], pair.va, "offload")


def test_native_beyond_its_mtu(pair: Pair, loaded: ProgramSet, image: Image) -> None:
    """A frame that does not fit a page: native mode refuses without fragments, generic mode does not mind."""
    for worker, device in ((pair.near, "va"), (pair.far, "vb")):
        worker.call(ip, "link", "set", device, "mtu", "9000")
    with pytest.raises(Refused, match="MTU may be too large"):
        pair.near.call(attach, loaded.programs["steer"], pair.va, "native")
    link = pair.near.call(attach, loaded.programs["steer"], pair.va, driver="ixgbe")
    assert (link.mode, link.reason) == ("generic", Reason.GENERIC_NO_NATIVE)
    link.close()
    with load_set(image, ["steer"], frags=True) as for_fragments:
        link = pair.near.call(attach, for_fragments.programs["steer"], pair.va, "native")
        assert link.mode == "native"
        link.close()


@pytest.mark.parametrize("second", ["auto", "generic", "native"])
@pytest.mark.parametrize("first", ["generic", "native"])
def test_a_busy_interface_is_refused_and_its_holder_named(pair: Pair, loaded: ProgramSet, first: str,
                                                          second: str) -> None:
    holder = loaded.programs["ring_in"]
    link = pair.near.call(attach, holder, pair.va, first)
    with pytest.raises(InterfaceBusy) as error:
        pair.near.call(attach, loaded.programs["steer"], pair.va, second)
    assert error.value.reason == Reason.IF_BUSY
    [found] = error.value.holders
    assert (found.program, found.name, found.mode) == (holder.id, "ring_in", first)
    assert os.getpid() in found.pids
    assert f"XDP program {holder.id} 'ring_in' ({first})" in str(error.value)
    assert pair.near.call(attached, pair.va) == {first: holder.id}
    link.close()


@pytest.mark.parametrize("mode", ["xdpgeneric", "xdpdrv"])
def test_a_program_of_another_tool_is_not_replaced(pair: Pair, loaded: ProgramSet, mode: str) -> None:
    """Attached by netlink, as `ip link set ... xdp` and xdp-loader do: there is no link, and it outlives its maker."""
    identity = loaded.programs["ring_in"].id
    pair.near.call(subprocess.run, ["bpftool", "net", "attach", mode, "id", str(identity), "dev", "va"], check=True,
                   timeout=10)
    with pytest.raises(InterfaceBusy) as error:
        pair.near.call(attach, loaded.programs["steer"], pair.va)
    assert [found.program for found in error.value.holders] == [identity]
    assert list(pair.near.call(attached, pair.va).values()) == [identity]


def test_interfaces_that_are_not_there(pair: Pair, loaded: ProgramSet) -> None:
    with pytest.raises(Refused, match="interface 987654") as error:
        pair.near.call(attach, loaded.programs["steer"], 987654)
    assert error.value.reason == Reason.IF_GONE


def test_an_interface_that_disappears(pair: Pair, loaded: ProgramSet) -> None:
    link = pair.near.call(attach, loaded.programs["steer"], pair.va)
    ip("-n", pair.name, "link", "del", "va")
    assert not link.alive
    link.close()


def test_drivers(pair: Pair) -> None:
    assert pair.near.call(driver_of, pair.va) == "veth"
    assert pair.near.call(driver_of, pair.vm) == "macvlan"
    assert pair.near.call(driver_of, 1) == ""


OWNER = """
import sys, time
from vmahybrid.net.netns import NetnsWorker
from vmahybrid.xdp.attach import attach
from vmahybrid.xdp.bpf import load_set
from vmahybrid.xdp.image import Image
image = Image.from_json(sys.stdin.read())
worker = NetnsWorker.open_path(sys.argv[1])
link = worker.call(attach, load_set(image, ["steer"]).programs["steer"], int(sys.argv[2]))
print("attached", flush=True)
time.sleep(60)
"""


def test_kill_9_of_the_owner_detaches(pair: Pair, image: Image) -> None:
    root = str(Path(__file__).resolve().parents[2])
    with subprocess.Popen([sys.executable, "-c", OWNER, f"/run/netns/{pair.name}", str(pair.va)], text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          env={**os.environ, "PYTHONPATH": root}) as owner:
        try:
            assert owner.stdin is not None
            assert owner.stdout is not None
            owner.stdin.write(image.to_json())
            owner.stdin.close()
            assert owner.stdout.readline() == "attached\n"
            assert list(pair.near.call(attached, pair.va)) == ["generic"]
            with load_set(image, ["steer"]) as mine, pytest.raises(InterfaceBusy, match=f"process {owner.pid} "):
                pair.near.call(attach, mine.programs["steer"], pair.va)
        finally:
            os.kill(owner.pid, signal.SIGKILL)
        assert owner.wait(10) == -signal.SIGKILL
    assert until(lambda: pair.near.call(attached, pair.va) == {}, seconds=1)


@pytest.mark.parametrize(("queue", "verdict"), [
    (0, XDP_REDIRECT), (1, XDP_PASS), (3, XDP_REDIRECT), (63, XDP_REDIRECT), (64, XDP_PASS), (69, XDP_PASS)])
def test_receive_queues(pair: Pair, loaded: ProgramSet, queue: int, verdict: int) -> None:
    """A ring has one slot per queue; a queue beyond VMH_QUEUES must not reach the slots of the next ring."""
    loaded.maps["rules3"].update(flow_key(NEAR, 5000, proto=UDP), action(lib.VMH_ACT_RING, 64))
    # native mode gives every queue of a veth its xdp_rxq_info, which test runs need
    link = pair.near.call(attach, loaded.programs["ring_in"], pair.va, "native")
    frame = struct.pack("!12xHBBHHHBBH4s4sHHHH", 0x0800, 0x45, 0, 28, 0, 0, 64, 17, 0, socket.inet_aton(FAR),
                        socket.inet_aton(NEAR), 4000, 5000, 8, 0)
    rings = [socket.socket(AF_XDP, socket.SOCK_RAW) for _ in range(4)]
    try:
        for ring, slot in zip(rings, (64, 67, 127, 128), strict=True):
            loaded.maps["xsks"].update(index(slot), index(ring.fileno()))
        result = pair.near.call(loaded.programs["steer"].test_run, frame, ifindex=pair.va, queue=queue)
        assert result.retval == verdict
    finally:
        link.close()
        for ring in rings:
            ring.close()


@pytest.mark.parametrize(("queue", "verdict"), [(0, XDP_DROP), (1, XDP_REDIRECT), (64, XDP_DROP)])
def test_ring_in_delivers_to_the_socket_of_the_queue(pair: Pair, loaded: ProgramSet, queue: int, verdict: int) -> None:
    link = pair.near.call(attach, loaded.programs["steer"], pair.va, "native")
    with socket.socket(AF_XDP, socket.SOCK_RAW) as ring:
        loaded.maps["rin_xsks"].update(index(1), index(ring.fileno()))
        result = pair.near.call(loaded.programs["ring_in"].test_run, bytes(60), ifindex=pair.va, queue=queue)
    link.close()
    assert result.retval == verdict
