"""iperf, a Python asyncio echo, socat, dnsmasq with dig: unmodified, on rings."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from apps.shimmed import SIDES, Stage, stop

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.apps

ECHO = """
import asyncio, socket, sys
class Echo(asyncio.DatagramProtocol):
    def connection_made(self, transport): self.transport = transport
    def datagram_received(self, data, address): self.transport.sendto(data, address)
async def main():
    loop = asyncio.get_running_loop()
    await loop.create_datagram_endpoint(Echo, local_addr=(sys.argv[1], 7777))
    print("listening", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
ASK = """
import asyncio, sys
class Ask(asyncio.DatagramProtocol):
    def __init__(self): self.left, self.done, self.bad = 2000, asyncio.get_running_loop().create_future(), 0
    def connection_made(self, transport):
        self.transport = transport
        for _ in range(4): self.ask()
    def ask(self):
        self.left -= 1
        self.transport.sendto(b"%d" % self.left + b"x" * (self.left % 1000))
    def datagram_received(self, data, address):
        head = data.rstrip(b"x")
        self.bad += data != head + b"x" * (int(head) % 1000)
        if self.left > 0: self.ask()
        elif int(head) == 0: self.done.set_result(None)
    def error_received(self, error): print("error", error, flush=True)
async def main():
    loop = asyncio.get_running_loop()
    transport, ask = await loop.create_datagram_endpoint(Ask, remote_addr=(sys.argv[1], 7777))
    await asyncio.wait_for(ask.done, 20)
    print("answered", 2000 - ask.left, "bad", ask.bad)
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def served(softverbs: bool) -> Iterator[tuple[Sandbox, Service]]:
    with Sandbox("programs") as sandbox, Service(sandbox, softverbs=softverbs) as service:
        yield sandbox, service


@pytest.fixture
def stage(served: tuple[Sandbox, Service], request: pytest.FixtureRequest) -> Stage:
    return Stage(*served, shimmed=getattr(request, "param", "both"))


@pytest.mark.parametrize("stage", SIDES, indirect=True)
def test_asyncio_echo(stage: Stage) -> None:
    serving = stage.serve(sys.executable, "-c", ECHO, stage.sandbox.b.address)
    serving.wait_for("listening")
    stage.require_rings(serving, None)
    said = stage.client(sys.executable, "-c", ASK, stage.sandbox.b.address).result(40)
    assert "answered 2000 bad 0" in said
    stop(serving)


@pytest.mark.parametrize("stage", SIDES, indirect=True)
def test_iperf_udp(stage: Stage) -> None:
    serving = stage.serve("iperf", "-s", "-u", "-B", stage.sandbox.b.address, "-p", "5501")
    stage.wait_bound(stage.sandbox.b, 5501)
    stage.require_rings(serving, None)  # it is bound before it has its ring, and does not read until then
    asking = stage.client("iperf", "-u", "-c", stage.sandbox.b.address, "-p", "5501", "-b", "50M", "-t", "1")
    said = asking.result(30)
    report = re.search(r"(\d+)/\s*(\d+) \(([\d.e+-]+)%\)", said)
    assert report, said + serving.output
    assert int(report[2]) > 2500
    assert float(report[3]) < 10, said  # a receiver that does not get the processor for 60 ms overruns its buffer
    stop(serving)


def test_iperf_multicast(stage: Stage) -> None:
    group = "239.3.3.3"
    serving = stage.serve("iperf", "-s", "-u", "-B", f"{group}%vb", "-p", "5502", "-i", "1")
    stage.wait_bound(stage.sandbox.b, 5502)
    stage.require_rings(serving, None)
    argv = ["iperf", "-u", "-c", group, "-B", stage.sandbox.a.address, "-T", "2", "-p", "5502", "-b", "20M", "-t", "2"]
    stage.client(*argv).wait(30)
    time.sleep(0.5)
    stop(serving)
    received = [int(total) for total in re.findall(r"\d+/\s*(\d+) \(", serving.output)]
    assert received and max(received) > 500, serving.output


@pytest.mark.parametrize("stage", SIDES, indirect=True)
def test_socat(stage: Stage, tmp_path: Path) -> None:
    got = tmp_path / "got"
    sent = tmp_path / "sent"
    sent.write_bytes(bytes(range(256)) * 4000)
    serving = stage.serve("socat", "-u", "-b1000", "-T3", "UDP4-RECV:6660,rcvbuf=2000000", f"CREATE:{got}")
    stage.wait_bound(stage.sandbox.b, 6660)
    stage.require_rings(serving, None)
    stage.client("socat", "-u", "-b1000", f"OPEN:{sent}", f"UDP4-SENDTO:{stage.sandbox.b.address}:6660").result(20)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and got.stat().st_size < sent.stat().st_size * 0.9:
        time.sleep(0.05)
    # datagrams may be lost to a full buffer; those that arrive are whole and in order
    whole, received = sent.read_bytes(), got.read_bytes()
    assert len(received) > len(whole) * 0.1
    pieces = [received[i : i + 1000] for i in range(0, len(received), 1000)]
    assert all(piece in whole for piece in pieces)
    stop(serving)


@pytest.mark.parametrize("stage", SIDES, indirect=True)
def test_dnsmasq_and_dig(stage: Stage) -> None:
    address = stage.sandbox.b.address
    numbers = range(1, 7)
    names = [f"--address=/host{n}.test/10.1.2.{n}" for n in numbers]
    options = ["--no-daemon", "--no-resolv", "--no-hosts", "--conf-file=/dev/null", "--user=root", "--port=5353"]
    serving = stage.serve("dnsmasq", *options, f"--listen-address={address}", "--bind-interfaces", *names)
    stage.wait_bound(stage.sandbox.b, 5353)
    for n in numbers:
        argv = ["dig", "+short", "+tries=1", "+time=3", "-p", "5353", f"@{address}", f"host{n}.test"]
        assert stage.client(*argv).result(10).split() == [f"10.1.2.{n}"]
    stop(serving)


def test_socat_forks_with_an_unread_datagram(stage: Stage) -> None:
    """It peeks at the first datagram, forks, and leaves the reading to the child."""
    address = stage.sandbox.b.address
    serving = stage.serve("socat", "UDP4-LISTEN:6662,fork,reuseaddr", "EXEC:cat")
    stage.wait_bound(stage.sandbox.b, 6662)
    for n in range(3):
        asking = stage.client("sh", "-c", f"echo hello{n} | socat -t3 - UDP4:{address}:6662")
        asking.wait_for(f"hello{n}", 8)
    stop(serving)


def test_a_program_that_may_write_no_file(stage: Stage) -> None:
    """SIGXFSZ would end it for our own log or statistics, at its first socket."""
    address = stage.sandbox.b.address
    serving = stage.serve("prlimit", "--fsize=0", "socat", "UDP4-LISTEN:6663,reuseaddr", "PIPE")
    stage.wait_bound(stage.sandbox.b, 6663)
    stage.require_rings(serving, None)
    asking = stage.client("sh", "-c", f"echo unharmed | socat -t3 - UDP4:{address}:6663")
    asking.wait_for("unharmed", 8)
    stop(serving)
