"""Real programs under the shim with the real service, where the verbs rung does not carry: what carries instead, and
what is said of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from net.service_lab import Api, until

from vmahybrid.bench.sandbox import Program, Sandbox
from vmahybrid.bench.served import Service
from vmahybrid.steering.reasons import Reason

pytestmark = pytest.mark.root
PROGRAM = str(Path(__file__).with_name("verbs_program.py"))
A, B, PORT = "10.77.0.1", "10.77.0.2", 7700
NO_BPF = ("setpriv", "--bounding-set=-bpf,-net_admin,-sys_admin", "--inh-caps=-bpf,-net_admin,-sys_admin")
NO_RAW = ("setpriv", "--bounding-set=-net_raw", "--inh-caps=-net_raw")
# what daemons do that close all they did not open; the numbers stay taken
LATER = """
import ctypes, mmap, os, socket, sys, time
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes.fromhex("b8 21 00 00 00  0f 05  c3"))  # x86-64: mov eax, SYS_dup2; syscall; ret
past_the_shim = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_int, ctypes.c_int)(
    ctypes.addressof(ctypes.c_char.from_buffer(code)))  # which keeps them from the program
def bound():
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("{address}", {port}))
    return sock
bound().close()
null = os.open("/dev/null", os.O_RDWR)
for name in os.listdir("/proc/self/fd"):
    try:
        if os.readlink(f"/proc/self/fd/{{name}}") == "anon_inode:bpf-map":
            past_the_shim(null, int(name))
    except OSError:
        pass
sock = bound()
print('"bound"', flush=True)
while True:
    data, peer = sock.recvfrom(2000)
    sock.sendto(data, peer)
"""
TO_NOBODY = """
import socket, time
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.bind(("{address}", {port}))
for _ in range(5):
    sock.sendto(b"x", ("10.77.0.77", 9))
    time.sleep(0.1)
print('"sent"', flush=True)
time.sleep(60)
"""


def run(service: Service, *program: str, options: tuple[str, ...] = (), prefix: tuple[str, ...] = ()) -> Program:
    """On side a, with debug messages of the shim."""
    command = service.run_argv([sys.executable, "-S", "-E", *program], "none", VMA_TRACELEVEL="debug")
    at = command.index("run") + 1
    return service.sandbox.start(service.sandbox.a, [*prefix, *command[:at], *options, *command[at:]], env=service.env)


def ladder(service: Service) -> list[tuple[str, str]]:
    interface = next(i for i in Api(service).status()["interfaces"] if i["name"] == "va")
    return [(rung["backend"], "taken" if rung["taken"] else rung["reason"]) for rung in interface["ladder"]]


def explained(service: Service) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = json.loads(service.ask("explain", f"{A}:{PORT}", "--json"))["steps"]
    return steps


def exchange(sandbox: Sandbox) -> None:
    asker = sandbox.start(sandbox.b, [sys.executable, "-S", "-E", PROGRAM, "ask", A, str(PORT), "100,200,300"])
    assert json.loads(asker.result(20).splitlines()[-1])["wrong"] == {}


def carried_by_xdp(service: Service, program: Program) -> None:
    assert ladder(service) == [("verbs", "verbs-failed"), ("xdp", "taken")]
    assert [flow["backend"] for flow in Api(service).socket_flows()] == ["xdp"]
    rungs = [step["text"] for step in explained(service) if step["step"] == "ladder"]
    assert [text.split(":")[1].strip() for text in rungs] == ["verbs", "AF_XDP"], rungs
    exchange(service.sandbox)
    (flow,) = Api(service).socket_flows()
    assert flow["packets"] >= 3, program.errors


def test_a_device_that_takes_no_flow_rules(service: Service) -> None:
    """softverbs steers by BPF, which this program may not; a QP it gets."""
    program = run(service, PROGRAM, "echo", "block", A, str(PORT), options=("--softverbs",), prefix=NO_BPF)
    program.wait_for('"bound"')
    assert "takes no flow rules: Operation not permitted" in program.errors
    carried_by_xdp(service, program)


def test_a_device_that_takes_no_flow_rules_any_more(service: Service) -> None:
    program = run(service, "-c", LATER.format(address=A, port=PORT), options=("--softverbs",))
    program.wait_for('"bound"')
    until(lambda: [flow["backend"] for flow in Api(service).socket_flows()] == ["xdp"], 5.0)
    assert "no flow rule can be made" in program.errors
    carried_by_xdp(service, program)


def test_without_the_capability(service: Service) -> None:
    """Each rung is in what `explain` says of the program and of the socket, with the reason by name and the remedy."""
    program = run(service, PROGRAM, "echo", "block", A, str(PORT), options=("--softverbs",), prefix=NO_RAW)
    program.wait_for('"bound"')
    for asked in str(program.pid), f"{A}:{PORT}":
        steps = json.loads(service.ask("explain", asked, "--json"))["steps"]
        verbs, xdp = (step for step in steps if step["step"] == "ladder")
        assert (verbs["ok"], verbs["reason"], verbs["remedy"]) == (True, "no-cap-net-raw",
                                                                   Reason.NO_CAP_NET_RAW.remedy)
        assert (xdp["ok"], xdp["reason"], xdp["remedy"]) == (True, "", "")
        assert Reason.NO_CAP_NET_RAW.text in verbs["text"]
        assert "no-cap-net-raw" in service.ask("explain", asked)


def test_what_xdp_counts_on_the_software_device(service: Service) -> None:
    """Generic XDP sees a frame before the QP takes it: that is no datagram of the kernel socket."""
    program = run(service, PROGRAM, "echo", "block", A, str(PORT), options=("--softverbs",))
    program.wait_for('"bound"')
    exchange(service.sandbox)
    (flow,) = [step["text"] for step in explained(service) if step["step"] == "flow"]
    assert "XDP comes before the software device, and passed to it or to the kernel socket: 3 packets" in flow
    assert "NIC" not in flow
    (traffic,) = [step["text"] for step in explained(service) if step["step"] == "traffic"]
    assert "received 3 by the ring and 0 by the kernel" in traffic


@pytest.fixture
def verbs_only(netns_pair: Sandbox, tmp_path: Path) -> Iterator[Service]:
    """A service that allows va nothing but verbs."""
    path = tmp_path / "vmahybrid.toml"
    path.write_text('[interface."va"]\nbackend = "verbs"\n')
    with Service(netns_pair, arguments=["--config", str(path)]) as service:
        yield service


def test_an_interface_without_a_ring(verbs_only: Service) -> None:
    """No neighbour is asked for there, and none is the reason that the socket is on the kernel."""
    program = run(verbs_only, "-c", TO_NOBODY.format(address=A, port=PORT))
    program.wait_for('"sent"')
    assert [rung for rung, _ in ladder(verbs_only)] == ["verbs", "xdp", "kernel"]
    (interface,) = (i for i in Api(verbs_only).status()["interfaces"] if i["name"] == "va")
    assert (interface["backend"], interface["rings"]) == ("kernel", 0)
    ring = [step["text"] for step in explained(verbs_only) if step["step"] == "ring"]
    assert ring in ([Reason.NO_VERBS_LIBRARY.text], [Reason.NO_VERBS_DEVICE.text]), program.errors
    assert not [step for step in explained(verbs_only) if step["step"] == "flow"]
    assert "is kept fresh" not in verbs_only.log
