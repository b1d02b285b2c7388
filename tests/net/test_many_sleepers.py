"""Threads that sleep in recv(), poll() and epoll_wait(), each for an own socket on a ring: a packet wakes the one that
it is for, and perhaps one more, and none misses its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from net.service_lab import Api, compiled, module_pair, module_services, tcp_echo, udp_echo, under_shim, until  # noqa: F401

from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

PORTS = {"udp": 7471, "tcp": 7472}
SLEEPS = {"VMA_RX_POLL": "0", "VMA_SELECT_POLL": "0", "VMA_HYBRID_TCP": "offload"}
CALLS = ("recv", "poll", "epoll")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory, "many_sleepers.c", "-pthread")


@pytest.fixture(scope="module")
def peer(service: Service) -> Iterator[str]:
    """The address of echo servers on the kernel."""
    side = service.sandbox.b
    sources = {"udp": udp_echo(PORTS["udp"]), "tcp": tcp_echo(PORTS["tcp"])}
    servers = [service.sandbox.start(side, [sys.executable, "-c", source, side.address]) for source in sources.values()]
    for server in servers:
        until(lambda server=server: "ready" in server.output, 10.0)
    yield side.address
    for server in servers:
        server.stop()


def run(service: Service, program: Path, peer: str, protocol: str, call: str, threads: int, what: str,
        **variables: str) -> tuple[int, int, float]:
    """Rounds, times that those slept who were not asked for, and the longest wait in ms."""
    argv = [str(program), peer, str(PORTS[protocol]), protocol, call, str(threads), what]
    command = service.sandbox.a.command(under_shim(service, argv, **SLEEPS, **variables))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                          env=os.environ | service.env) as running:
        try:
            assert running.stdout and running.stdout.readline() == "ready\n"
            on_rings = [flow for flow in Api(service).socket_flows() if flow["action"] == "ring"]
            assert len(on_rings) >= threads, on_rings  # those of TCP, and the port of each
            out, _ = running.communicate("\n", timeout=60)
        finally:
            running.kill()
    assert running.returncode == 0
    rounds, slept, longest_us = map(int, out.split())
    return rounds, slept, longest_us / 1000


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("protocol", PORTS)
def test_those_that_wait_sleep_on(service: Service, program: Path, peer: str, protocol: str, call: str) -> None:
    threads = 16
    rounds, slept, longest = run(service, program, peer, protocol, call, threads, "idle")
    own = 2 * (threads - 1)
    # one of them wakes for what comes while the one that asks is awake; of each packet all did
    assert slept - own < 2 * rounds, slept
    assert longest < 1000


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("protocol", PORTS)
def test_all_of_them_ask(service: Service, program: Path, peer: str, protocol: str, call: str) -> None:
    for threads in (2, 3, 24):
        rounds, _, longest = run(service, program, peer, protocol, call, threads, "all")
        assert rounds == threads * 150
        assert longest < 1000


@pytest.mark.parametrize("what", ["idle", "all"])
def test_each_socket_has_its_ring(service: Service, program: Path, peer: str, what: str) -> None:
    """And a receive call looks at that alone, but the deputy is woken by all."""
    for threads in (2, 6):
        _, _, longest = run(service, program, peer, "udp", "recv", threads, what, VMA_RING_ALLOCATION_LOGIC_RX="10")
        assert longest < 100, threads  # the internal thread looks each 100 ms


@pytest.mark.parametrize("what", ["handler", "raw", "longjmp", "cancel"])
@pytest.mark.parametrize("protocol", PORTS)
def test_one_that_is_elsewhere_keeps_nobody_waiting(service: Service, program: Path, peer: str, protocol: str,
                                                    what: str) -> None:
    """The first thread to sleep, which was woken for the others. Of a handler that was installed by a raw system call
    nobody knows: then the internal thread finds what nobody has taken."""
    for call in CALLS:
        for threads in (2, 6):
            _, _, longest = run(service, program, peer, protocol, call, threads, what)
            assert longest < (500 if what == "raw" else 200), (call, threads)  # it is elsewhere for 1 s, or for good


def test_another_priority(service: Service, program: Path, peer: str) -> None:
    """Threads that may have to wait long for a processor look for themselves alone."""
    rounds, slept, _ = run(service, program, peer, "udp", "recv", 16, "nice")
    assert slept > 3 * rounds
