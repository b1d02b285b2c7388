"""Processes whose TCP sockets came from another one are shown, whatever the policy: by fork, by accept, by exec."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from net.counter_lab import Program
from net.service_lab import Api, until

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service
from vmahybrid.net.netns import NetnsWorker
from vmahybrid.vma_stats.main import main

pytestmark = pytest.mark.root
POLICIES = ("kernel", "adaptive", "offload")
LISTEN = "import os\nl = socket.socket()\nl.bind(('127.0.0.1', 0))\nl.listen()\nl.getsockname()[1]"
# the connection is accepted by the child, or by its parent as by most servers that fork
ACCEPTS = """
pid = os.fork()
if not pid:
    kept = []
    while len(kept) < 9:
        kept.append(l.accept()[0])
    os._exit(0)
pid
"""
INHERITS = """
c = l.accept()[0]
pid = os.fork()
if not pid:
    l.close()
    c.recv(9)   # nobody sends
    os._exit(0)
c.close()
pid
"""
ACTIVATED = "import socket, sys; l = socket.socket(fileno=int(sys.argv[1])); c = l.accept()[0]; c.recv(9)"


@pytest.fixture(scope="module", name="service")
def one_service() -> Iterator[Service]:
    with Sandbox("test") as sandbox, Service(sandbox, [sandbox.b]) as running:
        yield running


@pytest.fixture(scope="module", name="near")
def on_its_side(service: Service) -> Iterator[NetnsWorker]:
    worker = NetnsWorker.open_path(service.sandbox.b.netns)
    yield worker
    worker.close()


def rows(capsys: pytest.CaptureFixture[str], *argv: str) -> list[list[str]]:
    """The words of view 5, without the header."""
    assert main(["-F", "-v", "5", "--once", *argv]) == 0
    return [line.split() for line in capsys.readouterr().out.splitlines()[1:]]


def of(pid: int, found: list[list[str]]) -> list[list[str]]:
    return [row for row in found if row[-2].startswith(f"{pid}/")]


def connect(near: NetnsWorker, port: int) -> socket.socket:
    made = near.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.connect(("127.0.0.1", port))
    return made


def known(service: Service) -> set[int]:
    return {process["pid"] for process in Api(service).call("GET", "/v1/processes")[1]}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("how", ["accepts", "inherits"])
def test_child(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, service: Service,
               near: NetnsWorker, how: str, policy: str) -> None:
    monkeypatch.setenv("VMAHYBRID_RUNDIR", str(service.rundir))
    with Program(service.sandbox, service, VMA_HYBRID_TCP=policy) as program:
        port = program.do(LISTEN)
        if how == "accepts":
            child = program.do(ACCEPTS)
            peer = connect(near, port)
        else:
            peer = connect(near, port)
            child = program.do(INHERITS)
        try:
            wanted = [("No", "ESTABLISHED"), *([("No", "LISTEN")] if how == "accepts" else [])]
            until(lambda: sorted((row[1], row[6]) for row in of(child, rows(capsys))) == wanted, 3)
            mine = of(child, rows(capsys))
            assert rows(capsys, "-p", str(child)) == mine
            assert str(child) in service.ask("status")
            if how == "accepts":  # more than one connection, and it lives on: worth a session
                time.sleep(0.15)
                with connect(near, port):
                    until(lambda: child in known(service), 3)
                    assert len(of(child, rows(capsys))) == 3
            else:
                assert main(["-F", "-p", str(child), "--once"]) == 1
                assert f"vma_stats -v 5 -p {child} lists them" in capsys.readouterr().err
                told = json.loads(service.ask("status", "--json"))["without_session"]
                assert [(p["pid"], len(p["sockets"])) for p in told] == [(child, 1)]
        finally:
            program.do(f"os.kill({child}, 9)\nos.waitpid({child}, 0)[0]")
            peer.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_activated_by_its_socket(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
                                 service: Service, near: NetnsWorker, policy: str) -> None:
    """The listener was there before exec: seen from its first connection on, also by the service."""
    monkeypatch.setenv("VMAHYBRID_RUNDIR", str(service.rundir))
    with near.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        argv = service.run_argv([sys.executable, "-S", "-c", ACTIVATED, str(listener.fileno())], profile="none",
                                VMA_HYBRID_TCP=policy)
        program = subprocess.Popen(service.sandbox.b.command(argv), pass_fds=[listener.fileno()],
                                   env={**os.environ, **service.env})
        try:
            with connect(near, listener.getsockname()[1]):
                until(lambda: program.pid in known(service), 5)
                found = of(program.pid, rows(capsys))
                assert {row[6] for row in found} == {"LISTEN", "ESTABLISHED"}
                if policy != "kernel":
                    assert len(Api(service).call("GET", f"/v1/stats/{program.pid}")[1]["sockets"]) == 1
        finally:
            program.kill()
            program.wait()
