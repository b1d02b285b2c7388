"""Parameters that change what a program does or how the library behaves in it: with and without each of them."""

from __future__ import annotations

import json
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fuzz.lying_service import LyingService
from net.service_lab import Api, module_pair, module_service, until  # noqa: F401

from vmahybrid.bench.sandbox import Program, Sandbox
from vmahybrid.bench.served import Service, run_words
from vmahybrid.cli.client import Client
from vmahybrid.steering.reasons import Reason

pytestmark = pytest.mark.root

PROLOGUE = """
import ctypes, json, os, resource, socket, struct, sys, time
here, there = sys.argv[1:3]
UDP_CORK = (socket.IPPROTO_UDP, 1, 1)   # only the kernel can
def udp(port, address=here):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.bind((address, port))
    return s
def tell(**facts):
    print(json.dumps(facts), flush=True)
def wait():
    time.sleep(30)
"""

Run = Callable[..., Program]


@pytest.fixture
def start(service: Service, netns_pair: Sandbox) -> Iterator[Run]:
    """Starts a Python text under the shim on side a, with parameters; ended with the test."""
    begun: list[Program] = []

    def run(text: str, *arguments: str, **parameters: str) -> Program:
        chosen = [word for name, value in parameters.items() for word in ("-e", f"{name}={value}")]
        argv = [*run_words(*chosen), "--", sys.executable, "-uc", PROLOGUE + text]
        here, there = netns_pair.a.address, netns_pair.b.address
        begun.append(netns_pair.start(netns_pair.a, [*argv, here, there, *arguments], env=service.env))
        return begun[-1]

    yield run
    for program in begun:
        program.stop(signal.SIGKILL)
    until(lambda: not Api(service).status()["processes"])


def told(program: Program) -> dict[str, Any]:
    """What it told first."""
    found: dict[str, Any] = json.loads(program.wait_for(r"\{.*\}\n")[0])
    return found


def socket_of(service: Service, program: Program, port: int) -> dict[str, Any]:
    """Its socket, as the service knows it."""
    with Client(service.rundir / "api.sock") as client:
        found = [s for s in client.get("v1", "sockets") if s["local"].endswith(f":{port}")]
    assert len(found) == 1, (found, program.errors)
    return dict(found[0])


CORKED = """
s = udp(5000)
try:
    s.setsockopt(*UDP_CORK)
    tell(failed=0)
except OSError as error:
    tell(failed=error.errno)
wait()
"""


@pytest.mark.parametrize(
    ("mode", "failed", "reason", "logged"),
    [("-1", 0, "sockopt", False), ("0", 0, "sockopt", False), ("1", 0, "sockopt", True), ("2", 22, "none", True)],
)
def test_a_call_that_only_the_kernel_can_do(
    start: Run, service: Service, mode: str, failed: int, reason: str, logged: bool
) -> None:
    program = start(CORKED, VMA_EXCEPTION_HANDLING=mode)
    assert told(program)["failed"] == failed
    seen = socket_of(service, program, 5000)
    assert (seen["reason"], seen["offloaded"]) == (reason, reason == "none")
    assert ("VMA ERROR: fd " in program.errors) is logged


def test_sendfile_fails_where_it_was_asked_to(start: Run, service: Service) -> None:
    text = """
s = udp(5001)
s.connect((there, 5002))
with open("/proc/self/exe", "rb") as file:
    try:
        os.sendfile(s.fileno(), file.fileno(), 0, 100)
        tell(failed=0)
    except OSError as error:
        tell(failed=error.errno)
wait()
"""
    program = start(text, VMA_EXCEPTION_HANDLING="2")
    assert told(program)["failed"] == 22
    assert socket_of(service, program, 5001)["offloaded"]
    program.stop()
    program = start(text)
    assert told(program)["failed"] == 0
    assert socket_of(service, program, 5001)["reason"] == "unknown-call"


def test_abort(start: Run) -> None:
    program = start(CORKED, VMA_EXCEPTION_HANDLING="3")
    assert program.wait(20) == -signal.SIGABRT
    assert "VMA_EXCEPTION_HANDLING=3" in program.errors


def test_exit_where_there_is_no_service(service: Service, netns_pair: Sandbox, start: Run, tmp_path: Path) -> None:
    text = "s = udp(5003); tell(went_on=1)"
    for wanted, mode in ((1, "-2"), (0, "-1")):
        program = start(text, VMA_EXCEPTION_HANDLING=mode, VMA_HYBRID_SOCKET=str(tmp_path / "none.sock"))
        assert program.wait(20) == wanted
        assert ("went_on" in program.output) is (wanted == 0)
    assert start(text, VMA_EXCEPTION_HANDLING="-2").wait(20) == 0


@pytest.mark.parametrize("switch", ["0", "1"])
def test_backtrace_of_a_crash(start: Run, switch: str) -> None:
    program = start("s = udp(5004); ctypes.string_at(1)", VMA_HANDLE_SIGSEGV=switch)
    assert program.wait(20) == -signal.SIGSEGV
    lines = re.findall(r"^/\S+\(.*\) ?\[0x[0-9a-f]+\]$", program.errors, re.MULTILINE)
    assert (len(lines) > 3) is (switch == "1"), program.errors
    assert ("VMA INFO: Registered a SIGSEGV handler" in program.errors) is (switch == "1")
    assert ("VMA ERROR: Segmentation Fault" in program.errors) is (switch == "1")
    assert program.output == ""


def test_the_program_s_own_handler_is_left_alone() -> None:
    text = "import ctypes, socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); ctypes.string_at(1)"
    shim = run_words("-e", "VMA_HANDLE_SIGSEGV=1", "--")
    argv = [*shim, sys.executable, "-X", "faulthandler", "-c", text]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == -signal.SIGSEGV
    assert "No SIGSEGV handler: the program has its own" in done.stderr
    assert "Fatal Python error: Segmentation fault" in done.stderr
    assert "VMA ERROR" not in done.stderr


CALLBACK = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
void lines_come_here(int level, const char *line);
void lines_come_here(int level, const char *line) { printf("<%d>%s", level, line); }
int main(int argc, char **argv)
{
	char text[32];

	(void)argv;
	snprintf(text, sizeof(text), "%p", argc > 1 ? (void *)text : (void *)lines_come_here);
	setenv("VMA_LOG_CB_FUNC_PTR", text, 1);
	return socket(AF_INET, SOCK_DGRAM, 0) < 0;
}
"""


def test_log_lines_go_to_the_program(tmp_path: Path) -> None:
    source, program = tmp_path / "callback.c", tmp_path / "callback"
    source.write_text(CALLBACK)
    subprocess.run(["gcc", "-Wall", "-Wextra", "-Werror", "-o", program, source], check=True, timeout=60)
    argv = run_words("-e", "VMA_TRACELEVEL=details", "--", str(program))
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=True)
    assert done.stderr == ""
    assert "<3> VMA INFO: VMA_VERSION" in done.stdout
    done = subprocess.run([*argv, "wrong"], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout == ""
    assert re.search(r"VMA WARNING: VMA_LOG_CB_FUNC_PTR = 0x[0-9a-f]+ is not the address of a function", done.stderr)


def internal_thread(program: Program) -> Path:
    """Its directory in /proc; the first process of the command's group that has one."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for comm in Path(f"/proc/{told(program)['pid']}/task").glob("*/comm"):
            if comm.read_text() == "vmahybrid\n":
                return comm.parent
        time.sleep(0.01)
    raise AssertionError(program.errors)


@pytest.mark.parametrize(
    ("asked", "allowed", "warned"),
    [("1", "1", False), ("0x1", "0", False), ("0-1", "0-1", False), ("0x3", "0-1", False), ("-1", "", False),
     ("1,bogus", "0", True), ("0x", "0", True), ("99999999999", "0", True), ("1-0", "0", True), ("8000", "0", True)],
)  # fmt: skip
def test_processors_of_the_internal_thread(start: Run, asked: str, allowed: str, warned: bool) -> None:
    program = start("s = udp(5006); tell(pid=os.getpid()); wait()", VMA_INTERNAL_THREAD_AFFINITY=asked)
    thread = internal_thread(program)
    whole = (thread.parent.parent / "status").read_text()
    wanted = allowed or re.search(r"^Cpus_allowed_list:\s*(\S+)$", whole, re.MULTILINE)[1]  # type: ignore[index]
    deadline = time.monotonic() + 5
    while f"Cpus_allowed_list:\t{wanted}\n" not in (thread / "status").read_text():
        assert time.monotonic() < deadline, (thread / "status").read_text()
        time.sleep(0.01)
    text = f"VMA WARNING:  Failed to set internal thread affinity: {asked}...  deferring to cpu-0."
    assert (text in program.errors) is warned


def test_cpuset_of_the_internal_thread(start: Run, tmp_path: Path) -> None:
    (tmp_path / "tasks").write_text("")
    program = start("s = udp(5007); tell(pid=os.getpid()); wait()", VMA_INTERNAL_THREAD_CPUSET=str(tmp_path))
    thread = internal_thread(program)
    deadline = time.monotonic() + 5
    while (tmp_path / "tasks").read_text() != f"{thread.name}\n":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    program = start("s = udp(5015); tell(pid=os.getpid()); wait()", VMA_INTERNAL_THREAD_CPUSET="/nonexistent")
    internal_thread(program)
    program.wait_for("VMA_INTERNAL_THREAD_CPUSET = /nonexistent: the internal thread can't join it .ENOENT.")


@pytest.mark.parametrize("switch", ["0", "1"])
def test_packets_wake_the_internal_thread(start: Run, service: Service, netns_pair: Sandbox, switch: str) -> None:
    program = start("s = udp(5008); tell(pid=1); wait()", VMA_INTERNAL_THREAD_ARM_CQ=switch,
                    VMA_PROGRESS_ENGINE_INTERVAL="0")  # fmt: skip
    told(program)
    send = f"import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); " \
           f"[s.sendto(b'x', ('{netns_pair.a.address}', 5008)) for _ in range(10)]"  # fmt: skip
    netns_pair.start(netns_pair.b, [sys.executable, "-c", send]).result()
    deadline = time.monotonic() + (5 if switch == "1" else 0.5)
    waiting = 0
    while waiting < 10 and time.monotonic() < deadline:
        waiting = socket_of(service, program, 5008)["counters"]["rx_ready_packets"]
    assert waiting == (10 if switch == "1" else 0)


def test_wait_after_join(start: Run) -> None:
    text = """
s = udp(5009)
member = struct.pack("4s4s", socket.inet_aton("239.5.5.5"), socket.inet_aton(here))
s.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 0)
s.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
begun = time.monotonic()
s.sendto(b"x", (there, 5010))
unicast = time.monotonic()
s.sendto(b"x", ("239.5.5.5", 5010))
first = time.monotonic()
s.sendto(b"x", ("239.5.5.5", 5010))
tell(unicast=unicast - begun, first=first - unicast, second=time.monotonic() - first)
"""
    waited = told(start(text, VMA_WAIT_AFTER_JOIN_MSEC="600"))
    assert 0.2 < waited["first"] < 1.5
    assert waited["second"] < 0.2
    assert told(start(text))["first"] < 0.2


@pytest.mark.parametrize(("loops", "busy"), [("0", False), ("-1", True), ("1000000", True)])
def test_poll_before_a_flow_is_on_a_ring(start: Run, loops: str, busy: bool) -> None:
    text = """
s = udp(5011, "127.0.0.1")
s.settimeout(None)
s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 300000))
begun, used = time.monotonic(), time.thread_time()
try:
    s.recv(10)
except BlockingIOError:
    tell(took=time.monotonic() - begun, used=time.thread_time() - used)
"""
    spent = told(start(text, VMA_RX_POLL_INIT=loops))
    assert 0.29 < spent["took"] < 2
    assert (spent["used"] > 0.05) is busy


def test_dummy_sends(start: Run, service: Service) -> None:
    text = """
s = udp(5012)
for _ in range(100):      # until the neighbour is known
    s.sendto(b"x", (there, 5013))
    time.sleep(0.005)
s.connect((there, 5013))
for _ in range(7):
    s.getsockname()
tell(done=1)
wait()
"""
    program = start(text, VMA_TRIGGER_DUMMY_SEND_GETSOCKNAME="1")
    told(program)
    counters = socket_of(service, program, 5012)["counters"]
    assert counters["tx_dummy"] == 7
    program.stop()
    program = start(text)
    told(program)
    assert socket_of(service, program, 5012)["counters"]["tx_dummy"] == 0


BOXES = {
    Reason.BOND_MODE: """\
 VMA WARNING: ******************************************************************************
 VMA WARNING: VMA doesn't support current bonding configuration of va.
 VMA WARNING: The only supported bonding mode is "802.3ad(#4)" or "active-backup(#1)"
 VMA WARNING: with "fail_over_mac=1" or "fail_over_mac=0".
 VMA WARNING: The effect of working in unsupported bonding mode is undefined.
 VMA WARNING: Read more about Bonding in the VMA's User Manual
 VMA WARNING: ******************************************************************************
""",
    Reason.BOND_VLAN: """\
 VMA WARNING: ******************************************************************
 VMA WARNING: va: vlan over bond while fail_over_mac=1 is not offloaded
 VMA WARNING: ******************************************************************
""",
}


@pytest.mark.parametrize("reason", BOXES)
def test_warning_of_a_bond(netns_pair: Sandbox, start: Run, tmp_path: Path, reason: Reason) -> None:
    """No kernel with bonds here: a service that says so of the veth."""
    lying = LyingService(netns_pair, tmp_path / "control", 1, lies=0.0, link_reason=int(reason))
    try:
        program = start("s = udp(5018); t = udp(5019); s.sendto(b'x', (there, 5020)); tell(done=1)",
                        VMA_HYBRID_SOCKET=str(tmp_path / "control"))  # fmt: skip
        assert program.wait(20) == 0, program.errors
    finally:
        lying.close()
    assert program.errors.count(BOXES[reason]) == 1, program.errors


RING_THAT_STAYS_FULL = """
libc = ctypes.CDLL(None, use_errno=True)
class Filter(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint)]
class Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.POINTER(Filter))]
s = udp(5016)
for _ in range(100):      # until the neighbour is known
    s.sendto(b"x", (there, 5017))
    time.sleep(0.005)
s.setblocking(False)
# a kick of the ring, sendto() of nothing, does nothing from here on: seccomp(2) says EAGAIN
code = (Filter * 6)((0x20, 0, 0, 0), (0x15, 0, 3, SENDTO), (0x20, 0, 0, 32), (0x15, 0, 1, 0),
                    (0x06, 0, 0, 0x00050000 | 11), (0x06, 0, 0, 0x7fff0000))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.byref(Program(6, code)), 0, 0) == 0
refused = 0
for _ in range(3000):
    try:
        assert s.sendto(b"x", (there, 5017)) == 1
    except BlockingIOError:
        refused += 1
tell(refused=refused)
wait()
"""


@pytest.mark.parametrize("switch", ["0", "1"])
def test_a_full_ring(start: Run, service: Service, switch: str) -> None:
    numbers = {"x86_64": 44, "aarch64": 206}
    text = RING_THAT_STAYS_FULL.replace("SENDTO", str(numbers[platform.machine()]))
    program = start(text, VMA_TX_NONBLOCKED_EAGAINS=switch, VMA_TX_WRE="256")
    refused = told(program)["refused"]
    counters = socket_of(service, program, 5016)["counters"]
    assert (refused > 0) is (switch == "1")
    assert counters["tx_eagain"] == refused
    assert (counters["tx_os_packets"] > 1000) is (switch == "0")


def test_the_profile_of_run_is_shown(start: Run, service: Service) -> None:
    told(start("s = udp(5014); tell(bound=1); wait()", VMA_HYBRID_PROFILE="trading", VMA_SPEC="latency"))
    with Client(service.rundir / "api.sock") as client:
        assert [process["profile"] for process in client.get("v1", "processes")] == ["trading"]
