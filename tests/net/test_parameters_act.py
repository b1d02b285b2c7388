"""Parameters that change what a program does or how the library behaves in it: with and without each of them."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fuzz.lying_service import LyingService
from net.service_lab import (  # noqa: F401
    Api,
    compiled,
    module_pair,
    module_services,
    on_both,
    tcp_echo,
    until,
    xdp_only,
)
from net.test_tcp_many import moves
from net.test_tcp_shim import introduce

from vmahybrid.bench.sandbox import Program, Sandbox
from vmahybrid.bench.served import Service, run_words
from vmahybrid.cli.client import Client
from vmahybrid.config import profiles
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

    def run(text: str, *arguments: str, trace: Path | None = None, environment: dict[str, str] | None = None,
            **parameters: str) -> Program:
        """``trace``: where strace writes sched_yield(2) of all threads. ``environment``: for what `run -e` refuses."""
        chosen = [word for name, value in parameters.items() for word in ("-e", f"{name}={value}")]
        spy = ["strace", "-f", "--seccomp-bpf", "-qq", "-e", "trace=sched_yield", "-o", str(trace)] if trace else []
        device = ["--softverbs"] if service.softverbs else []
        argv = [*spy, *run_words(*device, *chosen), "--", sys.executable, "-uc", PROLOGUE + text]
        here, there = netns_pair.a.address, netns_pair.b.address
        begun.append(netns_pair.start(netns_pair.a, [*argv, here, there, *arguments],
                                      env=service.env | (environment or {})))
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


@on_both(
    ("mode", "failed", "reason", "logged"),
    [("2", 22, "none", True), ("1", 0, "sockopt", True), ("0", 0, "sockopt", False), ("-1", 0, "sockopt", False)], 2,
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
    assert socket_of(service, program, 5001)["reason"] == "sendfile"


@xdp_only("no ring has a part in it")
def test_abort(start: Run) -> None:
    program = start(CORKED, VMA_EXCEPTION_HANDLING="3")
    assert program.wait(20) == -signal.SIGABRT
    assert "VMA_EXCEPTION_HANDLING=3" in program.errors


@xdp_only("no ring has a part in it")
def test_exit_where_there_is_no_service(service: Service, netns_pair: Sandbox, start: Run, tmp_path: Path) -> None:
    text = "s = udp(5003); tell(went_on=1)"
    for wanted, mode in ((1, "-2"), (0, "-1")):
        program = start(text, VMA_EXCEPTION_HANDLING=mode, VMA_HYBRID_SOCKET=str(tmp_path / "none.sock"))
        assert program.wait(20) == wanted
        assert ("went_on" in program.output) is (wanted == 0)
    assert start(text, VMA_EXCEPTION_HANDLING="-2").wait(20) == 0


@xdp_only("no ring has a part in it")
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


SENT = r"""
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
static void mine(int sig) { (void)sig; dprintf(1, "mine\n"); _exit(7); }
static void *thread(void *unused)
{
	pthread_kill(pthread_self(), SIGSEGV);
	return unused;
}
int main(int argc, char **argv)
{
	union sigval value = { .sival_int = 5 };
	const char *how = argv[1];
	struct sigaction now;
	pthread_t t;

	(void)argc;
	if (socket(AF_INET, SOCK_DGRAM, 0) < 0)
		return 1;
	if (!strcmp(how, "own handler")) {
		if (sigaction(SIGSEGV, NULL, &now) || now.sa_handler != SIG_DFL || now.sa_flags)
			return 2;
		if (signal(SIGSEGV, mine) != SIG_DFL)
			return 3;
	}
	if (!strcmp(how, "queue"))
		sigqueue(getpid(), SIGSEGV, value);
	else if (!strcmp(how, "thread"))
		pthread_create(&t, NULL, thread, NULL);
	else
		kill(getpid(), SIGSEGV);
	for (;;)
		pause();
}
"""


@pytest.mark.parametrize("how", ["kill", "queue", "thread", "own handler"])
def test_a_sent_sigsegv_ends_the_program_as_ever(tmp_path: Path, how: str) -> None:
    """Nothing fails again after a handler of it; and who asks for the handler is told what the kernel would say."""
    source, program = tmp_path / "sent.c", tmp_path / "sent"
    source.write_text(SENT)
    subprocess.run(["gcc", "-Wall", "-Wextra", "-Werror", "-pthread", "-o", program, source], check=True, timeout=60)
    argv = run_words("-e", "VMA_HANDLE_SIGSEGV=1", "-e", f"VMA_HYBRID_SOCKET={tmp_path / 'none'}", "--")
    done = subprocess.run([*argv, str(program), how], capture_output=True, text=True, timeout=5, check=False)
    own = how == "own handler"
    assert done.returncode == (7 if own else -signal.SIGSEGV), done.stderr
    assert done.stdout == ("mine\n" if own else "")
    assert ("VMA ERROR: Segmentation Fault" in done.stderr) is not own


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


@xdp_only("no ring has a part in it")
@pytest.mark.parametrize(
    ("asked", "allowed", "warned"),
    [("1", "1", False), ("0x1", "0", False), ("0-1", "0-1", False), ("0x3", "0-1", False), ("-1", "", False),
     ("0-1:2", "0", False), ("1-9:8,", "0", True), ("0-1:0", "0", True),
     ("1,bogus", "0", True), ("0x", "0", True), ("99999999999", "0", True), ("1-0", "0", True), ("8000", "0", True)],
)  # fmt: skip
def test_processors_of_the_internal_thread(start: Run, asked: str, allowed: str, warned: bool) -> None:
    program = start("s = udp(5006); tell(pid=os.getpid()); wait()", environment={"VMA_INTERNAL_THREAD_AFFINITY": asked})
    thread = internal_thread(program)
    whole = (thread.parent.parent / "status").read_text()
    wanted = allowed or re.search(r"^Cpus_allowed_list:\s*(\S+)$", whole, re.MULTILINE)[1]  # type: ignore[index]
    deadline = time.monotonic() + 5
    while f"Cpus_allowed_list:\t{wanted}\n" not in (thread / "status").read_text():
        assert time.monotonic() < deadline, (thread / "status").read_text()
        time.sleep(0.01)
    said = f"VMA WARNING:  Failed to set internal thread affinity: {asked}...  deferring to cpu-0.\n"
    if warned:
        program.wait_for(re.escape(said))
    assert re.findall(r"VMA WARNING: .*affinity.*\n", program.errors, re.IGNORECASE) == ([said] if warned else [])


@xdp_only("no ring has a part in it")
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


# Of cgroup v1: in v2 a thread leaves the cgroup of its process only within a subtree made for that.
CPUSETS = Path("/sys/fs/cgroup/cpuset")


@pytest.fixture
def cpuset_of_1(start: Run) -> Iterator[Path]:
    """One of the kernel's, with processor 1 alone. Its threads leave it before it goes."""
    own = CPUSETS / f"vmh-test-{os.getpid()}"
    own.mkdir()
    try:
        (own / "cpuset.mems").write_text((CPUSETS / "cpuset.mems").read_text())
        (own / "cpuset.cpus").write_text("1")
        yield own
    finally:
        for task in (own / "tasks").read_text().split():
            with suppress(OSError):
                (CPUSETS / "tasks").write_text(task)
        own.rmdir()


@xdp_only("no ring has a part in it")
@pytest.mark.parametrize(("asked", "acts"), [("0", "0"), ("1", "1"), ("0-1", "0-1")])
def test_the_log_says_where_the_internal_thread_runs(start: Run, asked: str, acts: str) -> None:
    program = start("s = udp(5018); tell(pid=os.getpid()); wait()", VMA_INTERNAL_THREAD_AFFINITY=asked,
                    VMA_TRACELEVEL="debug")  # fmt: skip
    program.wait_for(f"the internal thread runs on cpus {acts}\n")


@xdp_only("no ring has a part in it")
def test_the_internal_thread_is_not_attached_with_the_one_that_starts_it(start: Run) -> None:
    program = start("s = udp(5019); tell(pid=os.getpid()); wait()",
                    VMA_INTERNAL_THREAD_AFFINITY="-1", VMA_RING_ALLOCATION_LOGIC_RX="31", VMA_TRACELEVEL="debug")
    program.wait_for("the internal thread runs on cpus 0-1\n")
    assert "is attached to processor" in program.errors


if (CPUSETS / "cpuset.cpus").exists():
    @xdp_only("no ring has a part in it")
    @pytest.mark.parametrize(("asked", "said"), [
        ("0", " Failed to set internal thread affinity: 0...  its cpuset decides: cpus 1."),
        ("bogus", " Failed to set internal thread affinity: 0...  its cpuset decides: cpus 1."),
        ("0-1", ""), ("1", ""), ("-1", "")])  # fmt: skip
    def test_the_cpuset_decides_over_the_affinity(start: Run, cpuset_of_1: Path, asked: str, said: str) -> None:
        program = start("s = udp(5016); tell(pid=os.getpid()); wait()", VMA_INTERNAL_THREAD_CPUSET=str(cpuset_of_1),
                        VMA_TRACELEVEL="debug", environment={"VMA_INTERNAL_THREAD_AFFINITY": asked})  # fmt: skip
        thread = internal_thread(program)
        program.wait_for("the internal thread runs on cpus 1\n")
        assert "Cpus_allowed_list:\t1\n" in (thread / "status").read_text()
        deferring = re.findall(r"affinity: (\S+)\.\.\.  deferring to cpu-0", program.errors)
        assert deferring == (["bogus"] if asked == "bogus" else [])
        assert program.errors.count("affinity:") == bool(said) + len(deferring)
        assert said in program.errors


@pytest.mark.parametrize(("switch", "times"), [("0", 1), ("1", 3)])
def test_packets_wake_the_internal_thread(
    start: Run, service: Service, netns_pair: Sandbox, switch: str, times: int
) -> None:
    """More than once: of five programs one had a thread that slept on, since nobody told it of the first ring."""
    send = f"import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); " \
           f"[s.sendto(b'x', ('{netns_pair.a.address}', 5008)) for _ in range(10)]"  # fmt: skip
    for _ in range(times):
        program = start("s = udp(5008); tell(pid=1); wait()", VMA_INTERNAL_THREAD_ARM_CQ=switch,
                        VMA_PROGRESS_ENGINE_INTERVAL="0")  # fmt: skip
        told(program)
        netns_pair.start(netns_pair.b, [sys.executable, "-S", "-E", "-c", send]).result()
        deadline = time.monotonic() + (5 if switch == "1" else 0.5)
        waiting = 0
        while waiting < 10 and time.monotonic() < deadline:
            waiting = socket_of(service, program, 5008)["counters"]["rx_ready_packets"]
        assert waiting == (10 if switch == "1" else 0)
        program.stop(signal.SIGKILL)
        until(lambda: not Api(service).status()["processes"])


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


@xdp_only("no ring has a part in it")
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


@xdp_only("no ring has a part in it")
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
libc = ctypes.CDLL("libc.so.6", use_errno=True)  # its own prctl(): the shim would leave its rings for a filter
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
for _ in range(2300):
    try:
        assert s.sendto(b"x", (there, 5017)) == 1
    except BlockingIOError:
        refused += 1
tell(refused=refused)
wait()
"""


@xdp_only("the wake-up of an AF_XDP ring is what fails; a full send queue: tests/unit/c/test_ring_verbs.c")
@pytest.mark.parametrize("switch", ["0", "1"])
def test_a_full_ring(start: Run, service: Service, switch: str) -> None:
    numbers = {"x86_64": 44, "aarch64": 206}
    text = RING_THAT_STAYS_FULL.replace("SENDTO", str(numbers[platform.machine()]))
    program = start(text, VMA_TX_NONBLOCKED_EAGAINS=switch, VMA_TX_WRE="256")
    refused = told(program)["refused"]
    counters = socket_of(service, program, 5016)["counters"]
    assert (refused > 0) is (switch == "1")
    assert counters["tx_eagain"] == refused
    assert (counters["tx_os_packets"] > 100) is (switch == "0")


CONNECTED = """
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(sys.argv[3] == "1"))
s.bind((here, 5021))
s.connect((there, 5022))
if sys.argv[3] == "later":
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
tell(connected=1)
tell(got=[s.recv(10).decode() for _ in range(2)])
wait()
"""


@on_both(("three", "reuse", "kind", "remote", "counted"), [
    ("1", "0", "3-tuple", "*:*", 3), ("0", "0", "5-tuple", "10.77.0.2:5022", 2),
    ("1", "1", "5-tuple", "10.77.0.2:5022", 2), ("1", "later", "5-tuple", "10.77.0.2:5022", 2)], 2)
def test_rules_of_connected_sockets(start: Run, service: Service, netns_pair: Sandbox, three: str, reuse: str,
                                    kind: str, remote: str, counted: int) -> None:
    """Either way nothing of anybody but the peer is received; a port that others may share has a rule for the peer."""
    program = start(CONNECTED, reuse, VMA_UDP_3T_RULES=three)
    program.wait_for("connected")
    send = f"import socket; here = ('{netns_pair.a.address}', 5021)\n" \
           "for port, said in (5022, b'one'), (5023, b'stranger'), (5022, b'two'):\n" \
           " s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('', port)); s.sendto(said, here); s.close()"
    netns_pair.start(netns_pair.b, [sys.executable, "-c", send]).result()
    program.wait_for(r'"got": \["one", "two"\]')
    flow, = Api(service).socket_flows()
    assert (flow["kind"], flow["remote"], flow["packets"]) == (kind, remote, counted)
    assert socket_of(service, program, 5021)["counters"]["rx_packets"] == 2
    assert re.search(rf" 10\.77\.0\.1:5021 +{re.escape(remote)} +ring ", service.ask("flows"))


READ_ONE = """
s = udp(5024)
s.settimeout(None)
tell(bound=1)
s.recv(10)
tell(read=1)
wait()
"""


@on_both(("mode", "interval", "kept"), [("0", "0", 0), ("2", "10", 1), ("0", "10", 0), ("1", "0", 1), ("1", "10", 0),
                                        ("2", "0", 1)], 2)
def test_buffers_go_back(
    start: Run, service: Service, netns_pair: Sandbox, mode: str, interval: str, kept: int
) -> None:
    """0 gives the read buffer back at once, 1 when the internal thread has time, 2 not before the next one is read."""
    program = start(READ_ONE, VMA_BUFFER_BATCHING_MODE=mode, VMA_PROGRESS_ENGINE_INTERVAL=interval)
    program.wait_for("bound")
    send = f"import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); " \
           f"s.sendto(b'x', ('{netns_pair.a.address}', 5024))"  # fmt: skip
    netns_pair.start(netns_pair.b, [sys.executable, "-c", send]).result()
    program.wait_for("read")
    time.sleep(0.3)
    with Client(service.rundir / "api.sock") as client:
        ring, = client.get("v1", "rings")
    assert ring["stats"]["rx_packets"] == 1
    assert ring["stats"]["queue_len"] == kept


DRAINED = """
time.sleep(1)       # everything has come
s.setblocking(False)
fcntl.ioctl(s, 0x541b, bytes(4))    # FIONREAD: off the ring, all of it
got = 0
try:
    while s.recv(2000):
        got += 1
except BlockingIOError:
    pass
tell(got=got)
wait()
"""
HELD = """
import fcntl
s = udp(5025)
s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
tell(bound=1)
""" + DRAINED


@on_both(("least", "low", "high"), [("262144", 113, 115), ("65536", 28, 30), ("1", 1, 3)], 1)
def test_least_receive_limit(
    start: Run, service: Service, netns_pair: Sandbox, least: str, low: int, high: int
) -> None:
    """200 datagrams of 1200 bytes wait for a socket with the smallest SO_RCVBUF: each counts for 2304."""
    program = start(HELD, VMA_RX_BYTES_MIN=least)
    program.wait_for("bound")
    send = f"import socket, time; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n" \
           f"for _ in range(200): s.sendto(bytes(1200), ('{netns_pair.a.address}', 5025)); time.sleep(0.0005)"
    netns_pair.start(netns_pair.b, [sys.executable, "-c", send]).result()
    got = int(program.wait_for(r'"got": (\d+)')[1])
    counters = socket_of(service, program, 5025)["counters"]
    assert counters["rx_packets"] + counters["rx_drop_packets"] == 200
    assert (got, counters["rx_os_packets"]) == (counters["rx_packets"], 0)
    assert low <= got <= high
    assert counters["rx_limit"] == max(int(least), 2304), "SO_RCVBUF is 2304 at least"


@xdp_only("no ring has a part in it")
@pytest.mark.parametrize("switch", ["0", "1"])
def test_first_value_of_multicast_loop(start: Run, switch: str) -> None:
    text = """
s = udp(5026)
tell(loop=s.getsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP))
"""
    assert told(start(text, VMA_TX_MC_LOOPBACK=switch))["loop"] == int(switch)


KERNEL_S_TURN = """
import threading
s = udp(5027, "")
s.settimeout(None)
s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 1, 0))
k = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
threading.Timer(0.3, k.sendto, (b"x", ("127.0.0.1", 5027))).start()
begun = time.monotonic()
s.recv(10)
tell(took=time.monotonic() - begun)
"""


@on_both(("ratio", "soon"), [("1", True), ("0", False)], 1)
def test_looks_at_the_kernel_while_spinning(start: Run, ratio: str, soon: bool) -> None:
    """A datagram of the kernel, between two of which 0 never looks: it is found at the end of the call."""
    took = told(start(KERNEL_S_TURN, VMA_RX_POLL="-1", VMA_RX_UDP_POLL_OS_RATIO=ratio))["took"]
    assert (0.25 < took < 0.8) is soon
    assert (took > 0.95) is not soon


CALLS_TILL_SEEN = """
calls_until = ctypes.CDLL(sys.argv[3]).calls_until
s = udp(5043, "")
k = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
taken = []
for _ in range(20):
    k.sendto(b"x", ("127.0.0.1", 5043))
    taken.append(calls_until(s.fileno(), 1))    # until the kernel's socket is looked at
    calls_until(s.fileno(), 0)                  # which has no more
tell(taken=taken)
"""


@pytest.fixture(scope="module")
def recv_loop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory, "recv_loop.c", "-shared", "-fPIC")


@on_both(["ratio"], [(2000,), (10,)], 1)
def test_looks_of_calls_that_do_not_block(start: Run, recv_loop: Path, ratio: int) -> None:
    """As many calls as are asked, where none of them was interrupted for so long that the program came seldom."""
    taken = told(start(CALLS_TILL_SEEN, str(recv_loop), VMA_RX_UDP_POLL_OS_RATIO=str(ratio)))["taken"]
    assert ratio * 0.8 <= max(taken) <= ratio + 1, taken


def loops_of_yield(start: Run, tmp_path: Path, **parameters: str) -> int:
    """How often a receive call of 50 ms that spins gave the processor to others."""
    trace = tmp_path / "trace"
    text = """
s = udp(5028)
s.settimeout(None)
s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 50000))
try:
    s.recv(10)
except BlockingIOError:
    tell(timed_out=1)
"""
    program = start(text, VMA_RX_POLL="-1", trace=trace, **parameters)
    assert "timed_out" in program.result(20)
    return trace.read_text().count("sched_yield(")


def test_yield_while_spinning(start: Run, tmp_path: Path) -> None:
    assert loops_of_yield(start, tmp_path) == 0
    assert loops_of_yield(start, tmp_path, VMA_RX_POLL_YIELD="1000") > 5


SPINNERS = """
import select
import threading
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
def spin(port):
    s = udp(port)
    s.settimeout(None)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 300000))
    def poll():
        p = select.poll()
        p.register(s, select.POLLIN)
        p.poll(300)
    try:
        poll() if how == "poll" else s.recv(10)
    except BlockingIOError:
        pass
threads = [threading.Thread(target=spin, args=(5100 + i,)) for i in range(count)]
for t in threads:
    t.start()
for t in threads:
    t.join()
tell(timed_out=1)
"""


@pytest.mark.parametrize("how", ["recv", "poll"])
def test_more_spin_than_there_are_processors(start: Run, tmp_path: Path, how: str) -> None:
    """They take turns; who is alone has the processor."""
    def yields(count: int, **parameters: str) -> int:
        trace = tmp_path / "trace"
        program = start(f"count, how = {count}, {how!r}" + SPINNERS, VMA_RX_POLL="-1", VMA_SELECT_POLL="-1",
                        trace=trace, **parameters)
        assert "timed_out" in program.result(20)
        return trace.read_text().count("sched_yield(")

    assert yields(3) > 100
    assert yields(3, VMA_HYBRID_SPIN_TURNS="0") == 0
    assert yields(1) == 0


QUEUED = """
s = udp(5029)
tell(bound=1)
time.sleep(0.5)
s.recv(10)              # takes all that has come off the ring
tell(first=1)
time.sleep(0.5)
s.recv(10)
wait()
"""


@on_both(("rate", "queued"), [("1", 18), ("0", 8)], 1)
def test_a_look_at_the_ring_while_something_is_queued(
    start: Run, service: Service, netns_pair: Sandbox, rate: str, queued: int
) -> None:
    program = start(QUEUED, VMA_RX_CQ_DRAIN_RATE_NSEC=rate, VMA_RX_UDP_POLL_OS_RATIO="0",
                    VMA_PROGRESS_ENGINE_INTERVAL="0")  # fmt: skip
    send = f"import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); " \
           f"[s.sendto(b'x', ('{netns_pair.a.address}', 5029)) for _ in range(10)]"  # fmt: skip
    for after in ("bound", "first"):
        program.wait_for(after)
        netns_pair.start(netns_pair.b, [sys.executable, "-S", "-E", "-c", send]).result()
    until(lambda: socket_of(service, program, 5029)["counters"]["rx_packets"] == 2)
    assert socket_of(service, program, 5029)["counters"]["rx_ready_packets"] == queued


TAKEN_AT_ONCE = """
s = udp(5041)
tell(bound=1)
time.sleep(1)       # everything has come
s.recv(10)
tell(first=1)
wait()
"""


@on_both(("most", "taken"), [("1", 1), ("16", 16), ("128", 60)], 1)
def test_packets_taken_in_one_look(start: Run, service: Service, netns_pair: Sandbox, most: str, taken: int) -> None:
    program = start(TAKEN_AT_ONCE, VMA_CQ_POLL_BATCH_MAX=most, VMA_RX_UDP_POLL_OS_RATIO="0",
                    VMA_PROGRESS_ENGINE_INTERVAL="0")  # fmt: skip
    program.wait_for("bound")
    send = f"import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); " \
           f"[s.sendto(b'x', ('{netns_pair.a.address}', 5041)) for _ in range(60)]"  # fmt: skip
    netns_pair.start(netns_pair.b, [sys.executable, "-S", "-E", "-c", send]).result()
    program.wait_for("first")
    with Client(service.rundir / "api.sock") as client:
        ring, = client.get("v1", "rings")
    assert ring["stats"]["drained_max"] == taken
    assert socket_of(service, program, 5041)["counters"]["rx_ready_packets"] == taken - 1


@on_both(("most", "delivered"), [("10000", 20), ("7", 7), ("0", 0)], 1)
def test_frames_that_the_internal_thread_takes(
    start: Run, service: Service, netns_pair: Sandbox, most: str, delivered: int
) -> None:
    """Of a ring that nobody looks at: in one look at least, or exactly, so many."""
    program = start("s = udp(5030); tell(pid=1); wait()", VMA_PROGRESS_ENGINE_WCE_MAX=most)
    told(program)
    send = f"import socket, time; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n" \
           f"for _ in range(1400): s.sendto(b'x', ('{netns_pair.a.address}', 5030)); time.sleep(0.0002)"  # fmt: skip
    netns_pair.start(netns_pair.b, [sys.executable, "-S", "-E", "-c", send]).result()
    if delivered:
        until(lambda: socket_of(service, program, 5030)["counters"]["rx_ready_packets"] >= delivered)
    else:
        time.sleep(0.3)
        assert socket_of(service, program, 5030)["counters"]["rx_ready_packets"] == 0
    with Client(service.rundir / "api.sock") as client:
        most_at_once = max(ring["stats"]["drained_max"] for ring in client.get("v1", "rings") if ring["stats"])
    assert most_at_once >= 20 if delivered == 20 else most_at_once == delivered


@on_both(("interval", "waiting"), [("10", True), ("0", False)], 1)
def test_what_waits_for_a_program_that_does_something_else(
    start: Run, service: Service, netns_pair: Sandbox, interval: str, waiting: bool
) -> None:
    program = start("s = udp(5043); tell(pid=1); wait()", VMA_PROGRESS_ENGINE_INTERVAL=interval)
    told(program)
    send = f"import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n" \
           f"for _ in range(20): s.sendto(b'x', ('{netns_pair.a.address}', 5043))"  # fmt: skip
    netns_pair.start(netns_pair.b, [sys.executable, "-S", "-E", "-c", send]).result()

    def queued() -> int:
        return int(socket_of(service, program, 5043)["counters"]["rx_ready_packets"])

    if waiting:
        until(lambda: queued() == 20)
    else:
        time.sleep(0.3)
        assert queued() == 0


@on_both(("offloaded",), [("1",), ("0",)], 1)
def test_sockets_that_are_not_offloaded(start: Run, service: Service, offloaded: str) -> None:
    program = start("s = udp(5037); tell(fd=s.fileno()); wait()", VMA_OFFLOADED_SOCKETS=offloaded)
    told(program)
    with Client(service.rundir / "api.sock") as client:
        found = [flow["local"] for flow in client.get("v1", "flows")]
    assert any(":5037" in local for local in found) is (offloaded == "1"), found


def test_mtu(start: Run, service: Service) -> None:
    text = """
s = udp(5031)
for _ in range(100):      # until the neighbour is known
    s.sendto(b"x", (there, 5032))
    time.sleep(0.005)
for _ in range(10):
    s.sendto(bytes(1000), (there, 5032))
tell(done=1)
wait()
"""
    sent = {}
    for mtu in ("0", "900"):
        program = start(text, VMA_MTU=mtu)
        told(program)
        counters = socket_of(service, program, 5031)["counters"]
        sent[mtu] = counters["tx_bytes"] >= 10000, counters["tx_os_bytes"] >= 10000
        assert ("Mismatch between interface va MTU=1500 and VMA_MTU=900." in program.errors) is (mtu == "900")
        program.stop()
    assert sent == {"0": (True, False), "900": (False, True)}


SPIN = """
import select
s = udp(5033)
s.settimeout(None)
s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 300000))
begun = time.thread_time()
try:
    s.recv(10)
except BlockingIOError:
    received = time.thread_time() - begun
begun = time.thread_time()
assert select.select([s], [], [], 0.3) == ([], [], [])
tell(received=received, selected=time.thread_time() - begun)
"""


@on_both(("receive", "choose"), [("0", "-1"), ("-1", "0"), ("0", "0"), ("-1", "-1")], 2)
def test_spinning(start: Run, receive: str, choose: str) -> None:
    spent = told(start(SPIN, VMA_RX_POLL=receive, VMA_SELECT_POLL=choose))
    assert (spent["received"] > 0.08) is (receive == "-1"), spent
    assert (spent["selected"] > 0.08) is (choose == "-1"), spent


# Nothing in it is on a ring. What each wait took, and the time of the processor in it.
FORCED = """
import select, threading
s = udp(0, "127.0.0.1")
server, listener = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
c = socket.create_connection(server.getsockname())
r, w = os.pipe()
def of_poll(*files, timeout=400):
    p = select.poll()
    for file in files:
        p.register(file, select.POLLIN)
    return lambda: p.poll(timeout)
def of_epoll(*files):
    e = select.epoll()
    for file in files:
        e.register(file, select.EPOLLIN)
    return lambda: e.poll(0.4)
waits = {"poll": of_poll(r, s), "tcp": of_poll(c), "listener": of_poll(listener), "select":
         lambda: select.select([r, s], [], [], 0.4)[0], "epoll": of_epoll(r, s), "epoll tcp": of_epoll(c),
         "pipe": of_poll(r), "select pipe": lambda: select.select([r], [], [], 0.4)[0], "epoll pipe": of_epoll(r),
         "sleep": of_poll()}
for name, wait_so in waits.items():
    begun, used = time.monotonic(), time.thread_time()
    assert not wait_so()
    tell(**{name: [time.monotonic() - begun, time.thread_time() - used]})
# what comes is seen
threading.Timer(0.1, lambda: os.write(w, b"x")).start()
begun = time.monotonic()
assert len(waits["poll"]()) == 1 and len(waits["epoll"]()) == 1 and time.monotonic() - begun < 0.35
tell(done=1)
"""
OF_SOCKETS = {"poll", "tcp", "listener", "select", "epoll", "epoll tcp"}


@xdp_only("no ring has a part in it")
@pytest.mark.parametrize(("asked", "spins"), [
    ({"VMA_SELECT_POLL_OS_FORCE": "0", "VMA_SELECT_POLL": "-1"}, False),
    ({"VMA_SELECT_POLL_OS_FORCE": "1", "VMA_SELECT_POLL": "-1"}, True),
    ({"VMA_SELECT_POLL_OS_FORCE": "1", "VMA_SELECT_POLL": "10000"}, False),  # microseconds
    ({"VMA_SELECT_POLL_OS_FORCE": "1", "VMA_SELECT_POLL": "0"}, False),
    ({"VMA_SELECT_POLL_OS_FORCE": "1", "VMA_SELECT_POLL": "-1", "VMA_SELECT_POLL_OS_RATIO": "0"}, True),
    ({"VMA_SPEC": "latency"}, True),
    ({"VMA_SPEC": "latency", "VMA_SELECT_POLL_OS_FORCE": "0"}, False),
    ({"VMA_SPEC": "{}/own.conf"}, True),
    ({"VMA_HYBRID_POLICY": "{}/own.conf"}, True),
], ids=lambda case: "-".join(f"{name[4:]}={value}" for name, value in case.items()) if isinstance(case, dict) else "")
def test_the_kernel_is_polled_where_nothing_is_on_a_ring(
    start: Run, tmp_path: Path, asked: dict[str, str], spins: bool
) -> None:
    """Nearly the whole time, or hardly; never where there are pipes alone, or nothing."""
    (tmp_path / "own.conf").write_text("VMA_SELECT_POLL = -1\nVMA_SELECT_POLL_OS_FORCE = 1\n")
    environment = {"VMA_HYBRID_TCP": "adaptive"} | {name: value.format(tmp_path) for name, value in asked.items()}
    program = start(FORCED, environment=environment)
    program.wait_for("done")
    told_of = {name: value for line in program.output.splitlines() for name, value in json.loads(line).items()}
    waits = {name: value for name, value in told_of.items() if isinstance(value, list)}
    assert waits.keys() >= OF_SOCKETS
    for name, (took, used) in waits.items():
        assert 0.399 <= took < 1.5, (name, took)
        assert (used > 0.04) is (spins and name in OF_SOCKETS), (name, used)


@xdp_only("softverbs keeps what finds no buffer (docs/verbs.md); tests/net/test_verbs_ring.py has the QP's")
@pytest.mark.parametrize(("posted", "low", "high"), [("128", 100, 260), ("16000", 500, 500)])
def test_receive_buffers_of_a_ring(
    start: Run, service: Service, netns_pair: Sandbox, posted: str, low: int, high: int
) -> None:
    """500 datagrams come while nobody looks at the ring: no more than were posted are there afterwards."""
    program = start(HELD.replace("5025", "5034").replace(", 1)", ", 4 << 20)"), VMA_RX_WRE=posted,
                    VMA_RX_BYTES_MIN="4194304", VMA_PROGRESS_ENGINE_INTERVAL="0")
    program.wait_for("bound")
    send = f"import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n" \
           f"for _ in range(500): s.sendto(b'x', ('{netns_pair.a.address}', 5034))"
    netns_pair.start(netns_pair.b, [sys.executable, "-S", "-E", "-c", send]).result()
    assert low <= int(program.wait_for(r'"got": (\d+)')[1]) <= high


BATCHES = """
import fcntl
s = udp(5039)
s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
tell(bound=1)
for _ in range(40):
    s.recv(2000)
tell(read=1)
""" + DRAINED


@xdp_only("of a QP's: tests/unit/c/test_ring_verbs.c")
@pytest.mark.parametrize(("batch", "low", "high"), [("1", 120, 128), ("64", 80, 92), ("", 108, 128)])
def test_receive_buffers_go_back_in_batches(
    start: Run, netns_pair: Sandbox, batch: str, low: int, high: int
) -> None:
    """Of 128 buffers 40 were used and read: how many are there for the datagrams that come then."""
    more = {"VMA_RX_WRE_BATCHING": batch} if batch else {}
    assert low <= buffers_after_40(start, netns_pair, "128", **more) <= high


@xdp_only("of a QP's: tests/unit/c/test_ring_verbs.c")
@pytest.mark.parametrize("copied", [False, True], ids=["built-in", "file"])
def test_receive_buffers_go_back_as_the_profile_says(
    start: Run, netns_pair: Sandbox, tmp_path: Path, copied: bool
) -> None:
    """In batches of 256, not our own 16; a file with the values of the built-in one acts as that."""
    (tmp_path / "copy.conf").write_text(profiles.text_of("throughput"))
    spec = str(tmp_path / "copy.conf") if copied else "throughput"
    assert 465 <= buffers_after_40(start, netns_pair, "512", VMA_SPEC=spec) <= 480


def buffers_after_40(start: Run, netns_pair: Sandbox, posted: str, **more: str) -> int:
    """Of ``posted`` buffers."""
    program = start(BATCHES, VMA_RX_WRE=posted, VMA_RX_BYTES_MIN="4194304", VMA_PROGRESS_ENGINE_INTERVAL="0", **more)
    program.wait_for("bound")
    send = f"import socket, time; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n" \
           f"for n in range(540):\n" \
           f"    s.sendto(b'x', ('{netns_pair.a.address}', 5039))\n" \
           f"    time.sleep(0.002 if n < 39 else 0.4 if n == 39 else 0)"  # fmt: skip
    netns_pair.start(netns_pair.b, [sys.executable, "-S", "-E", "-c", send]).result()
    return int(program.wait_for(r'"got": (\d+)')[1])


MOVES = """
conns = [socket.create_connection((there, 5035)) for _ in range(3)]
end = time.monotonic() + 1.5
while time.monotonic() < end:
    for c in conns:
        c.sendall(b"ask")
        c.recv(10)
tell(done=1)
wait()
"""
ANSWERS = tcp_echo(5035)


def on_rings(start: Run, service: Service, box: Sandbox, seconds: str, **variables: str) -> int:
    """How many of three hot connections are after so long."""
    server = box.start(box.b, [sys.executable, "-S", "-E", "-c", ANSWERS])
    server.wait_for("ready")
    told(start(MOVES.replace("1.5", seconds), VMA_HYBRID_TCP="adaptive", VMA_HYBRID_TCP_BULK="0",
               VMA_HYBRID_TCP_LOSS="0", **variables))  # fmt: skip
    with Client(service.rundir / "api.sock") as client:
        found = [at["offloaded"] for at in client.get("v1", "sockets") if at["proto"] == "tcp"]
    server.stop(signal.SIGKILL)
    return sum(found)


@xdp_only("TCP: tests/net/test_tcp_shim.py is on both")
@pytest.mark.parametrize(("percent", "moved"), [("100", {3}), ("1", {1, 2})])
def test_time_for_moving_connections(
    start: Run, service: Service, netns_pair: Sandbox, percent: str, moved: set[int]
) -> None:
    """Each move takes 10 ms at least, so 1 percent has the next one wait for 1 s."""
    assert on_rings(start, service, netns_pair, "1.5", VMA_HYBRID_TCP_ROUNDS="8",
                    VMA_HYBRID_TCP_BUDGET=percent) in moved


@xdp_only("TCP: tests/net/test_tcp_shim.py is on both")
@pytest.mark.parametrize(("most", "moved"), [("0", 3), ("2", 0)])
def test_many_busy_connections(start: Run, service: Service, netns_pair: Sandbox, most: str, moved: int) -> None:
    assert on_rings(start, service, netns_pair, "1.5", VMA_HYBRID_TCP_ROUNDS="300", VMA_HYBRID_TCP_BUDGET="100",
                    VMA_HYBRID_TCP_MANY=most, VMA_HYBRID_TCP_TOGETHER="0") == moved  # fmt: skip


@xdp_only("TCP: tests/net/test_tcp_shim.py is on both")
@pytest.mark.parametrize(("most", "moved"), [("2", 0), ("3", 3)])
def test_many_of_one_thread_together(start: Run, service: Service, netns_pair: Sandbox, most: str, moved: int) -> None:
    assert on_rings(start, service, netns_pair, "3", VMA_HYBRID_TCP_ROUNDS="300", VMA_HYBRID_TCP_MANY="2",
                    VMA_HYBRID_TCP_TOGETHER=most) == moved  # fmt: skip


@xdp_only("TCP: tests/net/test_tcp_shim.py is on both")
@pytest.mark.parametrize(("times", "moved"), [("100", 3), ("2000", 0)])
def test_many_that_have_lasted(start: Run, service: Service, netns_pair: Sandbox, times: str, moved: int) -> None:
    """A second, or six."""
    assert on_rings(start, service, netns_pair, "3", VMA_HYBRID_TCP_ROUNDS="300", VMA_HYBRID_TCP_MANY="2",
                    VMA_HYBRID_TCP_LASTS=times) == moved  # fmt: skip


@xdp_only("TCP: tests/net/test_tcp_shim.py is on both")
@pytest.mark.parametrize(("rounds", "moved"), [("16", False), ("200", True)])
def test_busy_is_who_makes_so_many_rounds(
    start: Run, service: Service, netns_pair: Sandbox, rounds: str, moved: bool
) -> None:
    """They come to be hot after 100 rounds: by then they are busy, or not yet."""
    found = on_rings(start, service, netns_pair, "1.5", VMA_HYBRID_TCP_ROUNDS="100", VMA_HYBRID_TCP_BUDGET="100",
                     VMA_HYBRID_TCP_MANY="2", VMA_HYBRID_TCP_BUSY=rounds, VMA_HYBRID_TCP_TOGETHER="0")  # fmt: skip
    assert bool(found) is moved


SHORT_LIVES = """
for rounds in 12 * [40] + [200]:
    with socket.create_connection((there, 5035)) as c:
        for _ in range(rounds):
            c.sendall(b"ask")
            c.recv(10)
tell(done=1)
wait()
"""


@xdp_only("TCP: tests/net/test_tcp_shim.py is on both")
@pytest.mark.parametrize(("pays", "moved"), [("0", {12, 13}), ("20", {12, 13}), ("1000", {1, 2})])
def test_moves_that_do_not_pay(start: Run, service: Service, netns_pair: Sandbox, pays: str, moved: set[int]) -> None:
    """Moved after 8 rounds, and closed after 32 more: the first one says that those who follow are not worth it before
    80 of their own, which only the last one makes. The first may end before its neighbour is known."""
    server = netns_pair.start(netns_pair.b, [sys.executable, "-S", "-E", "-c", ANSWERS])
    server.wait_for("ready")
    program = start(SHORT_LIVES, VMA_HYBRID_TCP="adaptive", VMA_HYBRID_TCP_ROUNDS="8", VMA_HYBRID_TCP_BUDGET="100",
                    VMA_HYBRID_TCP_PAYS=pays)
    told(program)
    found = len(moves(service, program))
    server.stop(signal.SIGKILL)
    assert found in moved


BY_KERNEL = """
conns = [socket.socket() for _ in range(2)]
conns[1].bind((here, 5036))     # so the kernel connects it
for c in conns:
    c.connect((there, 5035))
    for _ in range(3):
        c.sendall(b"ask")
        c.recv(10)
tell(done=1)
wait()
"""


@xdp_only("TCP: tests/net/test_tcp_shim.py is on both")
@pytest.mark.parametrize(("three", "kinds"), [("0", ["3-tuple", "5-tuple"]), ("1", ["3-tuple"])])
def test_rules_of_tcp_connections(
    start: Run, service: Service, netns_pair: Sandbox, three: str, kinds: list[str]
) -> None:
    """One from its SYN on, by a rule of its port, and one that the kernel opens."""
    introduce(netns_pair)
    server = netns_pair.start(netns_pair.b, [sys.executable, "-S", "-E", "-c", ANSWERS])
    server.wait_for("ready")
    program = start(BY_KERNEL, VMA_HYBRID_TCP="offload", VMA_TCP_3T_RULES=three, VMA_HYBRID_TCP_SHOW="0")
    told(program)
    assert sorted({flow["kind"] for flow in Api(service).socket_flows()}) == kinds
    bound = socket_of(service, program, 5036)
    server.stop(signal.SIGKILL)
    assert (bound["offloaded"], bound["reason"]) == ((True, "none") if three == "0" else (False, "tcp-rules"))


@xdp_only("no ring has a part in it")
def test_the_profile_of_run_is_shown(start: Run, service: Service) -> None:
    told(start("s = udp(5014); tell(bound=1); wait()", VMA_HYBRID_PROFILE="trading", VMA_SPEC="latency"))
    with Client(service.rundir / "api.sock") as client:
        assert [process["profile"] for process in client.get("v1", "processes")] == ["trading"]


@xdp_only("no ring has a part in it")
@pytest.mark.parametrize(("given", "shown"), [({}, ""), ({"VMA_APPLICATION_ID": "feed%d"}, "feed{pid}")])
def test_the_application_id_is_shown(start: Run, service: Service, given: dict[str, str], shown: str) -> None:
    pid = told(start("s = udp(5044); tell(pid=os.getpid()); wait()", **given))["pid"]
    with Client(service.rundir / "api.sock") as client:
        assert [process["application_id"] for process in client.get("v1", "processes")] == [shown.format(pid=pid)]
        assert [p["application_id"] for p in client.get("v1", "status")["processes"]] == [shown.format(pid=pid)]
