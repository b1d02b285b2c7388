"""An interface goes down or away while programs use it by rings: the kernel's behaviour, said why, and back again."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from net.death_lab import Lab, count, longest_gap, progresses, reports, summary, until
from net.service_lab import lost_at_once

from vmahybrid.bench.sandbox import Program, Sandbox, Side
from vmahybrid.bench.served import Service, tool

pytestmark = [pytest.mark.root, pytest.mark.slow]

PORT = 7300


@pytest.fixture
def lab(netns_pair: Sandbox, softverbs: bool) -> Iterator[Lab]:
    with Service(netns_pair, softverbs=softverbs) as service:
        yield Lab(netns_pair, lost_at_once(service))


def start_pair(lab: Lab) -> tuple[Program, Program]:
    a, b = lab.sandbox.sides
    server = lab.role(b, "serve", b.address, PORT, "poll")
    lab.on_ring(server)
    asker = lab.role(a, "ask", b.address, PORT, "block", 0.002)
    lab.on_ring(asker)
    progresses(asker)
    return server, asker


def interface(lab: Lab, side: Any) -> dict[str, Any]:
    return next((i for i in lab.api.status()["interfaces"] if (i["netns"], i["name"]) == (side.netns, side.device)), {})


def recreate(lab: Lab) -> None:
    a, b = lab.sandbox.sides
    a.ip("link", "add", a.device, "address", a.mac, "type", "veth", "peer", "name", b.device, "address", b.mac, "netns",
         b.netns)
    for side in (a, b):
        side.ip("address", "add", f"{side.address}/24", "dev", side.device)
        side.ip("link", "set", side.device, "up")


def status(lab: Lab, code: int) -> str:
    """Output of `vmahybrid status`; its exit code is 1 when something is wrong."""
    program = lab.sandbox.start(None, [tool("vmahybrid"), "status"], env=lab.service.env)
    assert program.wait() == code, program.output
    return program.output


def test_down_and_up(lab: Lab) -> None:
    _, b = lab.sandbox.sides
    server, asker = start_pair(lab)
    for _ in range(3):
        b.ip("link", "set", b.device, "down")
        until(lambda: not lab.flows(server.pid) and not lab.flows(asker.pid), 2, f"flows are left: {lab.flows()}")
        assert interface(lab, b)["up"] is False
        assert not lab.ring_kinds(server.pid)
        said = lab.why(server)
        assert "down" in said, said
        lost = count(asker, "lost")
        time.sleep(0.5)
        b.ip("link", "set", b.device, "up")
        up = time.monotonic()
        progresses(asker, 3)
        # no carrier is silence, as on the kernel
        assert count(asker, "lost") > lost
        lab.on_ring(server, asker)
        print(f"back on rings {time.monotonic() - up:.2f} s after the interface came up")
        progresses(asker)
    assert server.running
    assert lab.service.program.running


def test_down_for_a_moment(lab: Lab) -> None:
    """The rings stay, and are the same when it is up."""
    lab.service.ask("config", "set", "ring.down_seconds=10")
    _, b = lab.sandbox.sides
    server, asker = start_pair(lab)
    rings = {ring["ring_id"] for ring in lab.api.call("GET", "/v1/rings")[1]}
    b.ip("link", "set", b.device, "down")
    until(lambda: "its rings wait for it" in status(lab, 1), 2)
    assert lab.flows(server.pid)
    assert "ip link set" in lab.service.ask("explain", f"{server.pid}")
    b.ip("link", "set", b.device, "up")
    progresses(asker, 3)
    lab.on_ring(server, asker)
    assert {ring["ring_id"] for ring in lab.api.call("GET", "/v1/rings")[1]} == rings


def test_deleted_and_made_again(lab: Lab) -> None:
    a, b = lab.sandbox.sides
    server, asker = start_pair(lab)
    for _ in range(3):
        deleted = time.monotonic()
        a.ip("link", "del", a.device)
        until(lambda: not lab.flows(server.pid) and not lab.flows(asker.pid), 2, f"flows are left: {lab.flows()}")
        assert interface(lab, b) == {}
        assert not lab.api.call("GET", "/v1/rings")[1]
        said = lab.why(server) + lab.why(asker)
        assert "disappeared" in said or "address" in said, said
        until(lambda: count(asker, "ENETUNREACH"), 2, f"what the kernel says is missing: {reports(asker)[-3:]}")
        recreate(lab)
        made = time.monotonic()
        progresses(asker, 3)
        lab.on_ring(server, asker)
        print(f"back on rings {time.monotonic() - made:.2f} s after the interface was made again")
        progresses(asker)
        assert longest_gap(server, made + 1.5) < 0.5
    summary("since the first deletion", [time.monotonic() - deleted], "s")
    # and for programs that are new
    other = lab.role(b, "sink", b.address, PORT + 1)
    lab.on_ring(other)
    assert lab.service.program.running
    health = " ".join(lab.api.status()["health"])
    assert "internal" not in health


def test_status_and_explain_say_it(lab: Lab) -> None:
    a, b = lab.sandbox.sides
    server, asker = start_pair(lab)
    b.ip("link", "set", b.device, "down")
    until(lambda: not lab.flows(server.pid), 2)
    health = status(lab, 1)
    assert b.device in health and "down" in health, health
    explained = lab.service.ask("explain", f"{server.pid}")
    assert "down" in explained and "ip link set" in explained, explained
    assert asker.running
    b.ip("link", "set", b.device, "up")
    lab.on_ring(server, asker)
    assert "all is well" in status(lab, 0)
    a.ip("link", "del", a.device)
    until(lambda: not lab.flows(server.pid) and not lab.flows(asker.pid), 2)
    said = " ".join(status(lab, 1).split())
    assert f"{a.netns}:{a.device} disappeared" in said and f"{b.netns}:{b.device} disappeared" in said, said
    recreate(lab)
    lab.on_ring(server, asker)
    assert "all is well" in status(lab, 0)


def test_another_mac_address(lab: Lab) -> None:
    """Rings are made anew, and what is sent has the new address."""
    a, b = lab.sandbox.sides
    server = lab.role(b, "serve", b.address, PORT)
    lab.on_ring(server)
    asker = lab.plain(a, "ask", b.address, PORT)
    progresses(asker)
    mac = "02:76:6d:68:00:77"
    rings = ring_ids(lab)
    b.ip("link", "set", b.device, "address", mac)
    a.ip("neigh", "replace", b.address, "lladdr", mac, "dev", a.device)
    until(lambda: not rings & ring_ids(lab), 5, "the old ring stays")
    lab.on_ring(server)
    progresses(asker)
    assert source_of_replies(a, PORT) == mac
    sent = lab.flows(server.pid)[0]["packets"]
    progresses(asker)
    assert lab.flows(server.pid)[0]["packets"] > sent


def ring_ids(lab: Lab) -> set[int]:
    return {ring["ring_id"] for ring in lab.api.call("GET", "/v1/rings")[1]}


def source_of_replies(side: Side, port: int) -> str:
    """Who sent the next datagram from the port that the kernel of the side receives."""
    sniffer = f"""
import socket
with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x800)) as sock:
    sock.bind(("{side.device}", 0))
    sock.settimeout(5)
    while True:
        frame, where = sock.recvfrom(2000)
        if where[2] != socket.PACKET_OUTGOING and frame[23] == 17 and int.from_bytes(frame[34:36]) == {port}:
            print(frame[6:12].hex(":"))
            break
"""
    done = subprocess.run(side.command([sys.executable, "-S", "-E", "-c", sniffer]), capture_output=True, text=True,
                          timeout=20, check=True)
    return done.stdout.strip()
