"""Programs that start others: what a child has in its statistics, and what the shim's descriptors cost it."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from net.service_lab import Api, compiled, tcp_echo, until
from net.test_tcp_shim import introduce, without_offloads

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def service(softverbs: bool) -> Iterator[Service]:
    with Sandbox("test") as sandbox, Service(without_offloads(sandbox), softverbs=softverbs) as running:
        introduce(sandbox)
        yield running


USES_A_RING = """
def use(port):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.bind((sys.argv[1], port))
    s.setblocking(False)
    try:
        s.recv(1)
    except BlockingIOError:
        return s
"""
# a grandchild: what a child leaves behind would be there, too
FORKS = f"""
import os, select, socket, sys, time
{USES_A_RING}
sets = [select.epoll() for _ in range(3)]
inherited = use(5001)
sets[0].register(inherited, select.EPOLLIN)
for generation in range(2):
    if pid := os.fork():
        sys.exit(os.waitpid(pid, 0)[1])
own = use(5002)
sets[1].register(own, select.EPOLLIN)
sets[1].poll(0)
print("child", os.getpid(), *(s.fileno() for s in sets), flush=True)
time.sleep(2)
"""
TABLE = f"""
import socket, sys
{USES_A_RING}
s = use(5001)
print("size", *(line.split()[1] for line in open("/proc/self/status") if line.startswith("FDSize")), flush=True)
"""


PORT = 5010
HOW = ("clone-close", "clone-closefrom", "clone-exit", "apart-range", "apart-unshare", "refused", "handler", "start")
# the parent's thread is in a call on the socket at the fork
CLOSES = f"""
import os, socket, sys, threading, time
{USES_A_RING}
inherited = use(5003)
inherited.setblocking(True)
threading.Thread(target=inherited.recv, args=(1,), daemon=True).start()
time.sleep(0.5)
if os.fork() == 0:
    own = use(5004)
    inherited.close()
    print("child", os.getpid(), own.fileno(), flush=True)
    time.sleep(2)
    os._exit(0)
os.wait()
"""


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory, "child_calls.c", "-pthread")


@pytest.fixture(scope="module")
def echo(service: Service) -> Iterator[None]:
    program = service.sandbox.start(service.sandbox.a, [sys.executable, "-S", "-c", tcp_echo(PORT)])
    program.wait_for("ready")
    yield
    program.stop(signal.SIGKILL)


@pytest.mark.parametrize("policy", ["plain", "kernel", "adaptive", "offload"])
@pytest.mark.parametrize("how", HOW)
def test_the_connection_goes_on(service: Service, calls: Path, echo: None, policy: str, how: str) -> None:
    argv = [str(calls), how, service.sandbox.a.address, str(PORT)]
    if how == "handler" and "VMH_SANITIZER_RUNTIME" in os.environ:
        pytest.skip("a sanitizer's malloc() waits for itself in such a handler")
    if policy != "plain":
        argv = service.run_argv(argv, "none", VMA_HYBRID_TCP=policy, VMA_HYBRID_TCP_ROUNDS="16", VMA_TRACELEVEL="warn")
    program = service.sandbox.start(service.sandbox.b, argv, env=service.env)
    assert program.result(20) == "rounds 200\n"


def test_what_a_child_closes_is_gone(service: Service) -> None:
    side = service.sandbox.b
    argv = service.run_argv([sys.executable, "-S", "-c", CLOSES, side.address], "adaptive")
    program = service.sandbox.start(side, argv, env=service.env)
    pid, own = (int(word) for word in program.wait_for(r"child (\d+) (\d+)").groups())
    until(lambda: [at["fd"] for at in Api(service).call("GET", f"/v1/stats/{pid}")[1]["sockets"]] == [own], 1)
    program.stop(signal.SIGKILL)


def test_sets_of_a_child_are_shown_once(service: Service) -> None:
    side = service.sandbox.b
    argv = service.run_argv([sys.executable, "-S", "-c", FORKS, side.address], "adaptive")
    program = service.sandbox.start(side, argv, env=service.env)
    pid, *sets = (int(word) for word in program.wait_for(r"child (\d+) (\d+) (\d+) (\d+)").groups())
    shown = Api(service).call("GET", f"/v1/stats/{pid}")[1]
    assert sorted(one["epfd"] for one in shown["iomux"] if one["kind"] == "epoll") == sorted(sets)
    assert [one["counters"]["timeouts"] for one in shown["iomux"] if one["epfd"] == sets[1]] == [1]
    assert len(shown["rings"]) == 1
    program.result(10)


def test_the_table_of_descriptors_stays_small(service: Service) -> None:
    """Each fork copies it, and each close_range(2) and exec walks it."""
    limit = min(20000, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    side = service.sandbox.b
    argv = service.run_argv([sys.executable, "-S", "-c", TABLE, side.address], "adaptive")
    program = service.sandbox.start(side, ["prlimit", f"--nofile={limit}", *argv], env=service.env)
    assert int(program.result(10).split()[-1]) <= 4096
