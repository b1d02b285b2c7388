"""vmahybrid home, adopt and stop: the operator moves connections of running programs, and ends the service."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from net.test_tcp_policy import NEVER, hot
from net.test_tcp_shim import ShimPeer, at_home, flows, offloaded, on_ring, without_offloads
from net.test_tcp_syn import nobody

from vmahybrid.bench.sandbox import Sandbox, SandboxError
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Sandbox("test") as sandbox, Service(without_offloads(sandbox)) as running:
        yield running


@pytest.fixture(params=["adaptive", "offload"])
def asking(service: Service, request: pytest.FixtureRequest) -> Iterator[ShimPeer]:
    """A program with one connection to an echo server of the kernel, on its ring."""
    with hot(service, request.param) as (a, _b):
        yield a


def tcp_fd(service: Service, pid: int) -> int:
    found = [s for s in offloaded(service) if s["pid"] == pid]
    assert len(found) == 1
    return int(found[0]["fd"])


CONNECTING = """
import select, socket, sys, time
socks = [socket.socket() for _ in range(40)]
one = select.epoll() if sys.argv[1] == "epoll" else select.poll()
for sock in socks:
    sock.setblocking(False)
    sock.connect_ex((sys.argv[2], 4000))
    one.register(sock, select.POLLOUT)
print("connecting", flush=True)
end, seen = time.monotonic() + 5, []
while time.monotonic() < end and not seen:
    seen = one.poll(0.05 if sys.argv[1] == "epoll" else 50)
print(len(seen), {sock.connect_ex((sys.argv[2], 4000)) for sock in socks})
"""


@pytest.mark.parametrize("by", ["epoll", "poll"])
def test_home_while_it_connects(service: Service, by: str) -> None:
    """The peer has not answered: nobody is told anything, before or after."""
    side = service.sandbox.a
    argv = service.run_argv([sys.executable, "-c", CONNECTING, by, nobody(side, 97)], "latency", VMA_RX_POLL="0",
                            VMA_SELECT_POLL_OS_FORCE="0")  # fmt: skip
    program = service.sandbox.start(side, argv, env=service.env)
    program.wait_for("connecting")
    for _ in range(4):
        time.sleep(0.3)
        service.ask("home", str(program.pid))
    assert program.result(20).splitlines()[-1] == f"0 {{{errno.EALREADY}}}"


def test_home_and_back_again(service: Service, asking: ShimPeer) -> None:
    pid = asking.pid
    fd = tcp_fd(service, pid)
    for target in (str(pid), f"{pid}:{fd}"):
        text = service.ask("home", target)
        assert "on the kernel:" in text and f"{pid}:{fd}" in text
        at_home(service)
        assert asking.do("ask", count=200, size=100) == ""
        assert not offloaded(service)  # for good
        assert "flow-deleted" in service.ask("explain", f"{pid}:{fd}")
        body = json.loads(service.ask("adopt", target, "--json"))
        assert [s["fd"] for s in body["moved"]] == [fd] and body["left"] == []
        assert asking.do("ask", count=40, size=100) == ""
        on_ring(service, asking)


@pytest.mark.parametrize("asking", ["offload"], indirect=True)
def test_the_flow_of_its_port_is_deleted(service: Service, asking: ShimPeer) -> None:
    """The kernel knows nothing of the connection yet, which comes home before the rule goes."""
    [port] = [flow for flow in flows(service) if flow["pid"] == asking.pid and flow["kind"] == "3-tuple"]
    service.ask("flows", "delete", str(port["flow_id"]))
    for _ in range(3):
        assert asking.do("ask", count=200, size=100) == ""
        at_home(service)
        assert not offloaded(service)
        time.sleep(0.5)
    assert port["flow_id"] not in [flow["flow_id"] for flow in flows(service)]


def test_a_socket_that_is_there_already_is_shown(service: Service, asking: ShimPeer) -> None:
    fd = tcp_fd(service, asking.pid)
    assert "on a ring:" in service.ask("adopt", f"{asking.pid}:{fd}")
    assert offloaded(service)


def event_log(service: Service, pid: int, silence: float = 0.5) -> list[dict[str, Any]]:
    """What has happened to a program, until nothing more does for so many seconds, or the service ends."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(silence)
        sock.connect(str(service.rundir / "api.sock"))
        sock.sendall(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        text = b""
        with contextlib.suppress(TimeoutError):
            while chunk := sock.recv(65536):
                text += chunk
    found = [json.loads(line[6:]) for line in text.splitlines() if line.startswith(b"data: ")]
    return [event for event in found if event["data"].get("pid") == pid]


def events(service: Service, pid: int, silence: float = 0.5) -> list[tuple[str, str]]:
    """Kinds and reasons."""
    return [(event["kind"], event["data"].get("reason", "")) for event in event_log(service, pid, silence)]


def test_explain_counts_calls_of_a_stream(service: Service, asking: ShimPeer) -> None:
    """Nobody knows its messages, and segments are not counted for the socket."""
    assert offloaded(service)
    what = f"{asking.pid}:{tcp_fd(service, asking.pid)}"
    steps = json.loads(service.ask("explain", what, "--json"))["steps"]
    said = {step["step"]: step["text"] for step in steps}
    assert "datagram" not in str(steps)
    assert re.fullmatch(r"\d+ calls by the ring, \d+ by the kernel", said["sending"])
    assert said["traffic"].startswith("received in ") and " calls by the ring and " in said["traffic"]


def test_each_move_is_an_event_with_its_reason(service: Service, asking: ShimPeer) -> None:
    service.ask("home", str(asking.pid))
    service.ask("adopt", str(asking.pid))
    moves = [event for event in events(service, asking.pid) if event[0] in ("tcp-home", "tcp-adopted")]
    assert moves[-2:] == [("tcp-home", "flow-deleted"), ("tcp-adopted", "operator")]
    (sock,) = [s for s in offloaded(service) if s["pid"] == asking.pid]
    found = [event for event in event_log(service, asking.pid) if event["kind"].startswith("tcp-")]
    for event in found[-2:]:
        # of one that began on its ring the program names no descriptor when it goes home
        fd = -1 if len(found) == 2 and event["kind"] == "tcp-home" else sock["fd"]
        assert event["data"].items() >= {"fd": fd, "local": sock["local"], "remote": sock["remote"]}.items()
        assert f"{sock['local']} {sock['remote']} of process" in event["text"]
        assert (f", fd {fd}: " in event["text"]) is (fd >= 0)


ASLEEP = """
import socket, sys, threading
s = socket.create_connection((sys.argv[1], int(sys.argv[2])))
for _ in range(100):
    s.send(b"x" * 50)
    s.recv(50)
print("asked", flush=True)
sys.stdin.readline()
reader = threading.Thread(target=lambda: print("got", s.recv(50), flush=True))
reader.start()
print("reading", flush=True)
sys.stdin.readline()
s.send(b"hello")
reader.join()
"""


def test_nobody_sleeps_on_in_the_kernel(service: Service) -> None:
    """Home, then a thread that blocks in recv, then adopt: it is refused, and the thread gets its bytes."""
    a_side, b_side = service.sandbox.sides
    with ShimPeer(service, b_side, "") as b:
        port = b.do("listen", address=b_side.address)
        argv = service.run_argv([sys.executable, "-c", ASLEEP, b_side.address, str(port)], "adaptive",
                                VMA_HYBRID_TCP_ROUNDS="8", **NEVER)
        program = subprocess.Popen(a_side.command(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                   bufsize=1, env={**os.environ, **service.env})
        b.do("accept")
        b.do("echo")
        with program:
            assert program.stdin and program.stdout
            assert program.stdout.readline() == "asked\n"
            (name,) = (s["socket_id"] for s in offloaded(service))
            service.ask("home", name)
            program.stdin.write("\n")
            assert program.stdout.readline() == "reading\n"
            time.sleep(0.3)
            with pytest.raises(SandboxError, match="not on a ring"):
                service.ask("adopt", name)
            program.stdin.write("\n")
            assert program.stdout.readline() == "got b'hello'\n"
            assert program.wait(5) == 0
        assert b.do("echo_ended")


@pytest.mark.parametrize(("command", "target", "why"), [
    ("home", "x", "neither PID nor PID:FD"), ("home", "1:", "neither PID nor PID:FD"), ("adopt", "0", "neither PID"),
    ("home", "999999999", "process 999999999"), ("adopt", "{pid}:9999", "no such UDP or TCP socket"),
])
def test_errors_name_the_token(service: Service, asking: ShimPeer, command: str, target: str, why: str) -> None:
    with pytest.raises(SandboxError, match=why):
        service.ask(command, target.format(pid=asking.pid))
    assert offloaded(service)


def test_stop_ends_the_service() -> None:
    with Sandbox("test") as sandbox, Service(without_offloads(sandbox)) as running:
        with ShimPeer(running, sandbox.b, "") as b, ShimPeer(running, sandbox.a, "offload", **NEVER) as a:
            port = b.do("listen", address=sandbox.b.address)
            a.do("connect", address=sandbox.b.address, port=port)
            b.do("accept")
            b.do("echo")
            assert a.do("ask", count=40, size=100) == ""
            assert flows(running)
            assert "has ended" in running.ask("stop")
            assert running.program.process.wait(5) == 0
            assert a.do("ask", count=40, size=100) == ""
            a.do("close")
            assert b.do("echo_ended")
        with pytest.raises(SandboxError, match="start it: vmahybrid start"):
            running.ask("stop")


def test_the_moves_of_a_stop_are_events(service: Service, asking: ShimPeer) -> None:
    with ThreadPoolExecutor(1) as pool:
        heard = pool.submit(events, service, asking.pid, 10)
        time.sleep(0.5)
        service.ask("stop")
        service.program.wait(10)
    service.start()
    assert ("tcp-home", "service-stop") in heard.result(), heard.result()
    assert asking.do("ask", count=20, size=100) == ""
