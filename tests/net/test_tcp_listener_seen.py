"""Where a TCP listener lives and why, before and after the program first waits for a connection."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from net.service_lab import Api, until
from net.test_tcp_shim import without_offloads

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service, tool
from vmahybrid.steering.reasons import Reason

pytestmark = pytest.mark.root

PORT = 7490
PROGRAM = f"""
import os, socket, sys, time
address, odd, go = sys.argv[1:]
l = socket.socket()
l.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
l.bind((address, {PORT}))
if odd == "option":
    l.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
l.listen()
if odd == "twice":
    l.listen(7)
if odd == "dup":
    os.dup(l.fileno())
print("fd", l.fileno(), flush=True)
while not os.path.exists(go):
    time.sleep(0.01)
l.setblocking(False)
try:
    l.accept()
except BlockingIOError:
    print("accepted", flush=True)
time.sleep(60)
"""
# Of a burst in the kernel's queue there is one edge
BURST = f"""
import select, socket
listener = socket.create_server(("0.0.0.0", {PORT}), backlog=64)
listener.setblocking(False)
events = select.epoll()
events.register(listener, select.EPOLLIN | select.EPOLLET)
assert events.poll(0.1) == []
def accept_all():
    while True:
        try:
            yield listener.accept()[0]
        except BlockingIOError:
            return
for _ in range(50):
    clients = [socket.create_connection(("127.0.0.1", {PORT})) for _ in range(8)]
    accepted = []
    while len(accepted) < 8:
        assert events.poll(2), len(accepted)
        accepted += accept_all()
    for one in (*clients, *accepted):
        one.close()
print("done", flush=True)
"""
RULE = f"use {{}} tcp_server *:{PORT}\n"
OTHER = f"use offload tcp_server *:{PORT + 1}\n"
CASES = [
    ("offload", "", "", Reason.TCP_ACCEPT, Reason.NONE),
    ("offload", "", "twice", Reason.TCP_ACCEPT, Reason.NONE),
    ("offload", "", "option", Reason.SOCKOPT, Reason.SOCKOPT),
    ("offload", "", "dup", Reason.DUP, Reason.DUP),
    ("offload", RULE.format("os"), "", Reason.TCP_ACCEPT, Reason.CONF_RULE),
    ("offload", RULE.format("adaptive"), "", Reason.TCP_KERNEL, Reason.TCP_KERNEL),
    ("adaptive", "", "", Reason.TCP_KERNEL, Reason.TCP_KERNEL),
    ("adaptive", RULE.format("offload"), "", Reason.TCP_ACCEPT, Reason.NONE),
    ("kernel", RULE.format("offload"), "", Reason.TCP_ACCEPT, Reason.NONE),
    ("kernel", OTHER, "", Reason.TYPE, Reason.TYPE),
]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Sandbox("test") as sandbox, Service(without_offloads(sandbox)) as running:
        yield running


@pytest.mark.parametrize(("policy", "conf", "odd", "before", "after"), CASES, ids=lambda case: str(case)[:20].strip())
def test_why_a_listener_is_where_it_is(service: Service, tmp_path: Path, policy: str, conf: str, odd: str,
                                       before: Reason, after: Reason) -> None:  # fmt: skip
    side, go, rules = service.sandbox.a, tmp_path / "go", tmp_path / "conf"
    rules.write_text(conf)
    argv = service.run_argv([sys.executable, "-Sc", PROGRAM, side.address, odd, str(go)], "none",
                            VMA_HYBRID_TCP=policy, VMA_CONFIG_FILE=str(rules), VMA_TRACELEVEL="info")
    program = service.sandbox.start(side, argv, env=service.env)
    fd = int(program.wait_for(r"fd (\d+)")[1])

    def seen(reason: Reason) -> None:
        (sock,) = [s for s in Api(service).call("GET", f"/v1/sockets?pid={program.pid}")[1] if s["fd"] == fd]
        assert (sock["reason"], sock["offloaded"], sock["local"]) == (
            reason.slug, reason is Reason.NONE, f"{side.address}:{PORT}")
        steps = json.loads(service.ask("explain", f"{program.pid}:{fd}", "--json"))["steps"]
        assert not any(step["reason"] == Reason.NOT_TRIED.slug for step in steps)
        assert reason is Reason.NONE or any(
            (step["ok"], step["text"], step["remedy"]) == (False, reason.text, reason.remedy) for step in steps), steps
        command = [tool("vma_stats"), "-F", "-p", str(program.pid), "-S", str(fd), "info"]
        said = service.sandbox.start(None, command, env=service.env).result(10)
        where = "on a ring" if reason is Reason.NONE else f"on the kernel: {reason.text}"
        assert f"vmastat: Fd {fd}, tcp {side.address}:{PORT}: {where}\n" in said

    try:
        seen(before)
        go.write_text("")
        program.wait_for("accepted")
        seen(after)
        if after is Reason.NONE:    # the program writes what it was asked before as well, while it goes to the rings
            until(lambda: program.errors.count("Socket activity") == 2, what=lambda: program.errors)
            assert program.errors.rpartition("Is offloaded : ")[2].startswith("true\n")
    finally:
        program.stop()


@pytest.mark.parametrize("policy", ["offload", "adaptive"])
def test_a_burst_at_the_kernels_queue(service: Service, policy: str) -> None:
    side = service.sandbox.a
    argv = service.run_argv([sys.executable, "-c", BURST], "latency", VMA_HYBRID_TCP=policy)
    assert service.sandbox.start(side, argv, env=service.env).result(30) == "done\n"
