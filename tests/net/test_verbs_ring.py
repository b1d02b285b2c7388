"""The shim's ring on a raw packet QP: real programs and traffic over the software verbs device, with a service that
grants such rings and mirrors nothing, so that whatever the QP does not take shows as a datagram from the kernel."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from net.verbs_service import VerbsService

from vmahybrid.bench.sandbox import Program, Sandbox, Side
from vmahybrid.cli.run import library
from vmahybrid.contracts import addr_to_bytes, lib
from vmahybrid.stats.page import StatsPage, read_page
from vmahybrid.steering.reasons import Reason
from vmahybrid.verbs.library import softverbs_environment

pytestmark = pytest.mark.root

PROGRAM = Path(__file__).with_name("verbs_program.py")
PORT = 7600
GROUP = "239.77.0.1"
HEADERS = 42  # Ethernet, IPv4, UDP
INLINE = 204


class Lab:
    """Side b is served and its programs run under the shim; side a is the plain kernel."""

    def __init__(self, box: Sandbox, service: VerbsService, pages: Path) -> None:
        self.box, self.service, self.pages = box, service, pages

    def start(self, side: Side, *argv: str, prefix: tuple[str, ...] = (), program: Path = PROGRAM,
              **variables: str) -> Program:
        command = [*prefix, sys.executable, "-S", "-E", str(program), *argv]
        if side is self.box.a:
            return self.box.start(side, command)
        # the variables are for the program, not for what starts it: a sanitizer's runtime must come first
        env = {"LD_PRELOAD": ":".join(filter(None, [os.environ.get("VMH_SANITIZER_RUNTIME"), str(library())])),
               "VMA_HYBRID_SOCKET": str(self.service.path), "VMA_STATS_SHMEM_DIR": str(self.pages),
               "ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "detect_leaks=0:handle_segv=0"),
               **softverbs_environment(), **variables}
        return self.box.start(side, [*prefix, "env", *(f"{name}={value}" for name, value in env.items()),
                                     *command[len(prefix):]])

    def serve(self, *argv: str, program: Path = PROGRAM, **variables: str) -> Program:
        """A program on side b that has bound its socket."""
        started = self.start(self.box.b, *argv, prefix=(), program=program, **variables)
        started.wait_for('"bound"')
        return started

    def page(self, program: Program | int) -> StatsPage:
        """Of a program that was started, or of the child with this number."""
        path = self.pages / f"vmastat.{program.pid if isinstance(program, Program) else program}"
        fd = os.open(path, os.O_RDONLY)
        try:
            return read_page(fd)
        finally:
            os.close(fd)

    def ring(self, program: Program) -> dict[str, int]:
        (ring,) = self.page(program).rings
        return ring.stats

    def socket(self, program: Program) -> Any:
        (sock,) = self.page(program).sockets
        return sock

    def ask(self, sizes: list[int], address: str = "") -> dict[str, Any]:
        """Requests from the kernel's side."""
        asker = self.start(self.box.a, "ask", address or self.box.b.address, str(PORT), ",".join(map(str, sizes)))
        return last(asker)

    def offload(self, count: int, size: int = 100, every: int = 64, address: str = "") -> None:
        sender = self.start(self.box.a, "send", address or self.box.b.address, str(PORT), str(count), str(size),
                            str(every))
        assert last(sender) == {"sent": count}


def last(program: Program) -> dict[str, Any]:
    """What the program said in its last line."""
    said: dict[str, Any] = json.loads(program.result(40).splitlines()[-1])
    return said


@pytest.fixture(name="lab")
def verbs_lab(tmp_path: Path) -> Iterator[Lab]:
    with Sandbox("vr") as box, VerbsService(box, box.b, tmp_path / "control.sock") as service:
        pages = tmp_path / "pages"
        pages.mkdir()
        pages.chmod(0o1777)
        yield Lab(box, service, pages)


@pytest.mark.parametrize("waiting", ["block", "poll", "epoll"])
@pytest.mark.parametrize("spin", ["0", "-1"])
def test_every_datagram_once_and_in_order(lab: Lab, waiting: str, spin: str) -> None:
    """Sleeping for each datagram and spinning for ever; none comes by the kernel as well."""
    program = lab.serve("sink", waiting, lab.box.b.address, str(PORT), "4000", "3", VMA_RX_POLL=spin,
                        VMA_SELECT_POLL=spin, VMA_RX_UDP_POLL_OS_RATIO="10")
    lab.offload(4000, every=8)
    lab.service.wait(lambda: lab.socket(program).counters["rx_packets"] >= 4000)
    page, ring = lab.page(program), lab.ring(program)
    assert last(program) == {"distinct": 4000, "total": 4000, "broken": 0, "disorder": 0}
    (sock,) = page.sockets
    assert (sock.counters["rx_packets"], sock.counters["rx_os_packets"]) == (4000, 0)
    assert (ring["rx_packets"], ring["rx_tagged"], ring["rx_hw_csum"], ring["cq_errors"]) == (4000, 4000, 4000, 0)
    if spin == "0":
        assert ring["interrupts_requested"] > 10
    (offer,) = lab.service.asked("ring")
    assert (offer["verbs"], offer["verbs_reason"], offer["verbs_device"]) == (lib.VMH_VERBS_USABLE, 0, b"sv_vb")


SIZES = [8, 9, INLINE - HEADERS - 1, INLINE - HEADERS, INLINE - HEADERS + 1, 500, 1471, 1472]


@pytest.mark.parametrize("inline", ["204", "0"])
@pytest.mark.parametrize("waiting", ["block", "epoll"])
def test_sizes_both_ways(lab: Lab, inline: str, waiting: str) -> None:
    """Answers are sent inline up to the limit and from registered memory beyond; checksums are the device's."""
    program = lab.serve("echo", waiting, lab.box.b.address, str(PORT), VMA_RX_POLL="0", VMA_SELECT_POLL="0",
                        VMA_TX_MAX_INLINE=inline)
    lab.ask([8])  # the neighbour is known from the page; the first answer may still be the kernel's
    result = lab.ask(SIZES * 20)
    assert result["wrong"] == {}
    assert result["slowest"] < 0.5
    ring, sock = lab.ring(program), lab.socket(program)
    sent = ring["tx_packets"]
    assert sent + sock.counters["tx_os_packets"] == len(SIZES) * 20 + 1
    assert sock.counters["tx_os_packets"] <= 1
    assert abs(ring["tx_inline"] - (4 * 20 if inline != "0" else 0)) <= 1


def test_more_frames_in_flight_than_descriptors(lab: Lab) -> None:
    """Descriptors of both directions go round many times, with the smallest rings."""
    program = lab.serve("echo", "block", lab.box.b.address, str(PORT), VMA_RX_WRE="32", VMA_RX_WRE_BATCHING="4",
                        VMA_TX_WRE="16", VMA_TX_WRE_BATCHING="2", VMA_RX_BUFS="256", VMA_QP_COMPENSATION_LEVEL="8",
                        VMA_CQ_POLL_BATCH_MAX="3")
    assert lab.ask([8, 1000] * 500)["wrong"] == {}
    ring = lab.ring(program)
    assert ring["rx_packets"] == 1000
    assert ring["pool_rx_free"] <= 256


@pytest.mark.parametrize("keep_full", ["1", "0"])
def test_buffers_all_held_by_a_socket_that_is_not_read(lab: Lab, keep_full: str) -> None:
    """128 buffers, of which the socket may hold all. With VMA_CQ_KEEP_QP_FULL the ring drops and counts what it can't
    keep; without it the QP runs dry."""
    program = lab.serve("hold", lab.box.b.address, str(PORT), VMA_RX_WRE="64", VMA_RX_WRE_BATCHING="8",
                        VMA_RX_BUFS="128", VMA_QP_COMPENSATION_LEVEL="8", VMA_CQ_KEEP_QP_FULL=keep_full)
    for _ in range(20):  # until it is full: what comes faster than the internal thread looks finds no posted buffer
        lab.offload(500, size=50, every=16)
        time.sleep(0.3)
        ring = lab.ring(program)
        if ring["rx_packets"] >= 200 or (keep_full == "0" and ring["rx_packets"] == 128):
            break
    assert ring["queue_len"] == ring["rx_packets"] - ring["rx_dropped"]
    lab.offload(50, size=50, every=1)
    time.sleep(0.3)
    later = lab.ring(program)
    if keep_full == "1":
        assert 0 < ring["queue_len"] <= 128 - 48
        assert later["rx_packets"] == ring["rx_packets"] + 50
        # between two refills less than a batch may still be kept
        assert ring["rx_dropped"] + 50 - 8 < later["rx_dropped"] <= ring["rx_dropped"] + 50
        assert later["queue_len"] == later["rx_packets"] - later["rx_dropped"]
    else:
        assert later["pool_rx_empty"] > 0
        assert (ring["queue_len"], ring["rx_dropped"]) == (128, 0)
        assert later["rx_packets"] == ring["rx_packets"]


def test_wildcards_follow_the_addresses(lab: Lab) -> None:
    """What comes for an address without a rule is the kernel's, and reaches the program as well."""
    program = lab.serve("echo", "block", "0.0.0.0", str(PORT))
    lab.box.b.ip("address", "add", "10.77.0.9/24", "dev", lab.box.b.device)

    def received() -> tuple[int, int]:
        counters = lab.socket(program).counters
        return counters["rx_packets"], counters["rx_os_packets"]

    assert lab.ask([20] * 5)["wrong"] == {}
    assert received() == (5, 0)
    lab.offload(5, address="10.77.0.9")
    lab.service.wait(lambda: received() == (5, 5))
    lab.service.set_addresses([lab.box.b.address, "10.77.0.9"])
    time.sleep(0.5)
    lab.offload(5, address="10.77.0.9")
    lab.service.wait(lambda: received() == (10, 5))
    lab.service.set_addresses([lab.box.b.address])
    time.sleep(0.5)
    lab.offload(5, address="10.77.0.9")
    lab.service.wait(lambda: received() == (10, 10))
    assert lab.ask([20] * 5)["wrong"] == {}
    assert received() == (15, 10)


def test_multicast(lab: Lab) -> None:
    program = lab.serve("sink", "block", "0.0.0.0", str(PORT), "500", "3", GROUP)
    lab.service.wait(lambda: len(lab.service.asked("attach")) >= 2)
    time.sleep(0.2)
    lab.offload(500, every=8, address=GROUP)
    ring = lab.ring(program)
    assert last(program) == {"distinct": 500, "total": 500, "broken": 0, "disorder": 0}
    assert ring["rx_packets"] == 500
    group = next(a for a in lab.service.asked("attach") if a["kind"] == lib.VMH_FLOW_MC)
    assert group["local_addr"] == addr_to_bytes(GROUP)


def test_static_and_adaptive_moderation(lab: Lab) -> None:
    plain = {"VMA_RX_POLL": "0", "VMA_SELECT_POLL": "0"}
    program = lab.serve("hold", lab.box.b.address, str(PORT), **plain, VMA_CQ_AIM_INTERVAL_MSEC="0",
                        VMA_CQ_MODERATION_COUNT="17", VMA_CQ_MODERATION_PERIOD_USEC="29")
    assert [lab.ring(program)[name] for name in ("mod_count", "mod_usec")] == [17, 29]
    program = lab.serve("hold", lab.box.b.address, str(PORT + 4), **plain, VMA_CQ_AIM_INTERVAL_MSEC="0",
                        VMA_CQ_MODERATION_PERIOD_USEC="70000")
    assert [lab.ring(program)[name] for name in ("mod_count", "mod_usec")] == [48, 65535]  # as the device has it
    program = lab.serve("hold", lab.box.b.address, str(PORT + 3), **plain, VMA_CQ_MODERATION_ENABLE="0")
    assert [lab.ring(program)[name] for name in ("mod_count", "mod_usec")] == [0, 0]
    program = lab.serve("echo", "block", lab.box.b.address, str(PORT + 1), **plain, VMA_CQ_AIM_INTERVAL_MSEC="50")
    assert [lab.ring(program)[name] for name in ("mod_count", "mod_usec")] == [48, 50]
    asker = lab.start(lab.box.a, "ask", lab.box.b.address, str(PORT + 1), ",".join(["64"] * 3000))
    lab.service.wait(lambda: lab.ring(program)["mod_usec"] == 0)  # few and small frames: the least delay
    asker.wait(20)
    lab.service.wait(lambda: lab.ring(program)["mod_usec"] == 50)  # no traffic: as configured
    program = lab.serve("hold", lab.box.b.address, str(PORT + 2), VMA_RX_POLL="-1")
    assert [lab.ring(program)[name] for name in ("mod_count", "mod_usec")] == [0, 0]


def test_killed_program_leaves_nothing_behind(lab: Lab) -> None:
    program = lab.serve("echo", "block", lab.box.b.address, str(PORT))
    assert lab.ask([100] * 10)["wrong"] == {}
    assert lab.ring(program)["rx_packets"] == 10
    program.stop(signal.SIGKILL)
    heir = lab.start(lab.box.b, "echo", "block", lab.box.b.address, str(PORT), VMA_OFFLOADED_SOCKETS="0")
    heir.wait_for('"bound"')
    assert lab.ask([100] * 10)["wrong"] == {}


def test_closed_socket_and_kernel_heir(lab: Lab) -> None:
    """The rule goes with the socket: DETACH comes, and the kernel's receiver gets what comes then."""
    program = lab.serve("sink", "block", lab.box.b.address, str(PORT), "10", "3")
    lab.offload(10, every=1)
    assert last(program)["total"] == 10
    assert [said["cause"] for said in lab.service.asked("detach")] == [0]
    heir = lab.start(lab.box.b, "echo", "block", lab.box.b.address, str(PORT), VMA_OFFLOADED_SOCKETS="0")
    heir.wait_for('"bound"')
    assert lab.ask([100] * 10)["wrong"] == {}


def test_fork(lab: Lab) -> None:
    """While parent and child share the socket the kernel serves both; then it comes back to the parent's QP."""
    program = lab.serve("fork", lab.box.b.address, str(PORT))
    lab.offload(1)
    assert lab.ask([50] * 3)["wrong"] == {}
    program.wait_for("ended")
    lab.service.wait(lambda: len(lab.service.asked("attach")) >= 2)
    before = lab.ring(program)["rx_packets"]
    assert lab.ask([50] * 20)["wrong"] == {}
    assert lab.ring(program)["rx_packets"] == before + 20


def test_child_with_a_socket_of_its_own(lab: Lab) -> None:
    """The parent has a QP on the same device; the child opens the device anew."""
    program = lab.serve("child", lab.box.b.address, str(PORT), "21")
    child = json.loads(program.output.splitlines()[-1])["bound"]
    assert child != program.pid
    assert lab.ask([50] * 20)["wrong"] == {}
    sockets = [(sock.counters["rx_packets"], sock.counters["rx_os_packets"]) for sock in lab.page(child).sockets]
    assert (20, 0) in sockets, sockets
    assert 20 in [ring.stats["rx_packets"] for ring in lab.page(child).rings]
    assert lab.ask([50])["wrong"] == {}
    assert program.wait(10) == 0, program.errors


def test_ring_that_is_taken_away(lab: Lab) -> None:
    program = lab.serve("echo", "block", lab.box.b.address, str(PORT))
    assert lab.ask([100] * 5)["wrong"] == {}
    lab.service.event(lib.VMH_EV_RING_GONE, 1, Reason.IF_GONE.value)
    lab.service.wait(lambda: lab.service.asked("release"))
    assert lab.ask([100] * 5)["wrong"] == {}
    assert 1 not in [ring.ring_id for ring in lab.page(program).rings]
    counters = lab.socket(program).counters  # it may be on the ring that it got after that one
    assert counters["rx_packets"] + counters["rx_os_packets"] == 10


@pytest.mark.parametrize("silent", [False, True], ids=["told", "silent"])
def test_ring_that_is_long_in_the_making(lab: Lab, silent: bool) -> None:
    """A program waits for more than three seconds only for a service that says so."""
    lab.service.ring_seconds, lab.service.silent = 5, silent
    program = lab.serve("echo", "block", lab.box.b.address, str(PORT))
    assert lab.ask([100] * 5)["wrong"] == {}
    sock = lab.socket(program)
    assert (sock.offloaded, "the service does not answer" in program.errors) == (not silent, silent)
    lab.service.ring_seconds = 0


def test_flow_that_is_taken_home(lab: Lab) -> None:
    program = lab.serve("echo", "block", lab.box.b.address, str(PORT))
    assert lab.ask([100] * 5)["wrong"] == {}
    lab.service.event(lib.VMH_EV_FLOW_HOME, 1, Reason.RULE.value)
    lab.service.wait(lambda: lab.socket(program).reason == "rule")
    assert lab.ask([100] * 5)["wrong"] == {}
    assert lab.ring(program)["rx_packets"] == 5
    assert lab.socket(program).counters["rx_os_packets"] == 5


def test_service_that_ends(lab: Lab) -> None:
    program = lab.serve("echo", "block", lab.box.b.address, str(PORT))
    assert lab.ask([100] * 5)["wrong"] == {}
    lab.service.close()
    assert lab.ask([100] * 5)["wrong"] == {}
    assert lab.socket(program).reason == "service-gone"


def test_queue_pair_that_fails(lab: Lab) -> None:
    """A frame that is longer than the buffers puts the QP into its error state: the ring is given back, the next rung
    is asked for, and the kernel goes on with the flow."""
    for side in lab.box.sides:
        side.ip("link", "set", side.device, "mtu", "9000")
    program = lab.serve("echo", "block", lab.box.b.address, str(PORT))
    assert lab.ask([100] * 5)["wrong"] == {}
    lab.offload(1, size=5000)
    lab.service.wait(lambda: len(lab.service.asked("ring")) >= 2)
    assert [said["ring_id"] for said in lab.service.asked("release")] == [1]
    second = lab.service.asked("ring")[1]
    assert (second["verbs"], second["verbs_reason"]) == (lib.VMH_VERBS_NONE, Reason.VERBS_FAILED.value)
    assert lab.ask([100] * 5)["wrong"] == {}
    assert lab.socket(program).reason == "verbs-failed"
    assert lab.page(program).rings == []


def test_device_that_is_removed(lab: Lab) -> None:
    program = lab.serve("echo", "block", "0.0.0.0", str(PORT))
    assert lab.ask([100] * 5)["wrong"] == {}
    lab.box.b.ip("link", "delete", "dev", lab.box.b.device)
    lab.service.wait(lambda: lab.service.asked("release"))
    lab.service.wait(lambda: len(lab.service.asked("ring")) >= 2)
    second = lab.service.asked("ring")[1]
    assert second["verbs"] == lib.VMH_VERBS_NONE
    assert program.running
    assert lab.page(program).rings == []


def test_a_grant_that_cannot_be_used_is_given_back(lab: Lab) -> None:
    """The next rung is asked for, with the reason; this service has none."""
    lab.service.mtu = 20
    program = lab.serve("echo", "block", lab.box.b.address, str(PORT))
    first, second = lab.service.asked("ring")[:2]
    assert (first["verbs"], second["verbs"]) == (lib.VMH_VERBS_USABLE, lib.VMH_VERBS_NONE)
    assert (second["verbs_reason"], second["verbs_device"]) == (Reason.VERBS_FAILED.value, b"sv_vb")
    assert [said["ring_id"] for said in lab.service.asked("release")] == [1]
    assert lab.socket(program).reason == "verbs-failed"
    assert lab.ask([100] * 5)["wrong"] == {}


def test_without_cap_net_raw(lab: Lab) -> None:
    drop = ("setpriv", "--bounding-set=-net_raw", "--inh-caps=-net_raw")
    program = lab.start(lab.box.b, "echo", "block", lab.box.b.address, str(PORT), prefix=drop)
    program.wait_for('"bound"')
    (asked,) = lab.service.asked("ring")
    assert (asked["verbs"], asked["verbs_reason"]) == (lib.VMH_VERBS_NONE, Reason.NO_CAP_NET_RAW.value)
    assert asked["verbs_device"] == b"sv_vb"
    assert "* Interface vb will not be offloaded." in program.errors
    assert "* Offloaded resources are restricted to root or user with CAP_NET_RAW privileges" in program.errors
    assert lab.ask([100] * 5)["wrong"] == {}


def test_without_a_device(lab: Lab) -> None:
    """The system's libibverbs finds none here, and says nothing on the program's standard error."""
    program = lab.start(lab.box.b, "echo", "block", lab.box.b.address, str(PORT), LD_LIBRARY_PATH="")
    program.wait_for('"bound"')
    (asked,) = lab.service.asked("ring")
    assert (asked["verbs"], asked["verbs_reason"], asked["verbs_device"]) == (0, Reason.NO_VERBS_DEVICE.value, b"")
    assert "VMA_VERSION: " in program.errors
    assert "WARNING" not in program.errors and "ERROR" not in program.errors
    assert lab.ask([100] * 5)["wrong"] == {}


# setns() by the instruction: the kernel would serve a program that the shim sees leave
BIND_ELSEWHERE = """
import ctypes, mmap, os, socket, sys, time
netns, address, port = sys.argv[1:]
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes.fromhex("48c7c0340100000f05c3"))  # mov rax, 308; syscall; ret
setns = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_long, ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
if setns(os.open(netns, os.O_RDONLY), 0x40000000):
    sys.exit("setns")
sock.bind((address, int(port)))
print('"bound"', flush=True)
while True:
    data, peer = sock.recvfrom(65535)
    sock.sendto(data, peer)
"""


def test_a_device_of_the_same_name_in_another_namespace(lab: Lab, tmp_path: Path) -> None:
    """A thread that has gone there finds it; what the program sends would leave by the wrong interface."""
    a, b = lab.box.sides
    a.ip("link", "add", b.device, "type", "veth", "peer", "name", "other0")
    a.ip("link", "set", b.device, "up")
    code = tmp_path / "elsewhere.py"
    code.write_text(BIND_ELSEWHERE)
    lab.serve(f"/run/netns/{a.netns}", b.address, str(PORT), program=code)
    (asked,) = lab.service.asked("ring")
    assert (asked["verbs"], asked["verbs_reason"], asked["verbs_device"]) == (0, Reason.NO_VERBS_DEVICE.value, b"")
    answer = lab.ask([100] * 5)
    assert (answer["wrong"], lab.service.asked("attach")) == ({}, [])



TAGGED = """
import socket, struct
def frame(tci, data=b"with a tag"):
    head = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 28 + len(data), 0, 0, 64, 17, 0, socket.inet_aton("{source}"),
                       socket.inet_aton("{address}"))
    total = sum(struct.unpack("!10H", head))
    total = (total & 0xffff) + (total >> 16)
    head = head[:10] + struct.pack("!H", ~total & 0xffff) + head[12:]
    return (bytes.fromhex("{to}{mac}") + struct.pack("!HHH", 0x8100, tci, 0x0800) + head
            + struct.pack("!HHHH", 9999, {port}, 8 + len(data), 0) + data)
sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
sock.bind(("{device}", 0))
for tci in [5] * 20 + [0x6000] * 20:
    sock.send(frame(tci))
"""


def test_frames_of_a_vlan_are_left_to_the_kernel(lab: Lab) -> None:
    """They are a VLAN device's, whatever address and port they name; a tag that has only a priority is none."""
    a, b = lab.box.sides
    program = lab.serve("echo", "block", b.address, str(PORT))
    code = TAGGED.format(source=a.address, address=b.address, to=b.mac.replace(":", ""), mac=a.mac.replace(":", ""),
                         port=PORT, device=a.device)
    lab.box.start(a, [sys.executable, "-S", "-E", "-c", code]).result()
    lab.service.wait(lambda: lab.socket(program).counters["rx_packets"] >= 20)
    ring = lab.ring(program)
    assert (ring["rx_packets"], ring["rx_bad"]) == (20, 0)
