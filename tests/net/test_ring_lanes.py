"""VMA_RING_ALLOCATION_LOGIC_TX and _RX, VMA_RING_MIGRATION_RATIO_* and VMA_RING_LIMIT_PER_INTERFACE: how many rings a
program has, which socket is on which, and that every datagram comes back whatever the rings are."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from net.service_lab import Api, tcp_echo, until, xdp_only

from vmahybrid.bench.sandbox import Program, Sandbox
from vmahybrid.bench.served import Service, run_words, tool

pytestmark = pytest.mark.root
SECOND = "10.77.0.11"  # one more address of side a
ROUNDS = 40

# THREADS of what argv[1] lists, [[address, port], ...] each: binds them, and echoes ROUNDS datagrams of each in turn
ECHO = """
import json, os, socket, sys, threading, time
told, kept = threading.Lock(), []
def serve(number, places):
    if PIN:
        os.sched_setaffinity(0, {sorted(CPUS)[number % len(CPUS)]})
    sockets = []
    for address, port in places:
        s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        s.bind((address, port))
        sockets.append(s)
    kept.extend(sockets)
    with told:
        print(json.dumps({"thread": number, "cpus": sorted(os.sched_getaffinity(0))}), flush=True)
    for _ in range(ROUNDS):
        for s in sockets:
            data, peer = s.recvfrom(100)
            s.sendto(data, peer)
CPUS = os.sched_getaffinity(0)
threads = [threading.Thread(target=serve, args=one) for one in enumerate(json.loads(sys.argv[1]))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
with told:
    print('"done"', flush=True)
time.sleep(30)
"""
# One datagram and its echo after the other, ROUNDS times over all places
ASK = """
import json, socket, sys
places, rounds = json.loads(sys.argv[1]), int(sys.argv[2])
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(5)
lost = 0
for number in range(rounds):
    for address, port in places:
        said = f"{number} {port}".encode()
        s.sendto(said, (address, port))
        data, peer = s.recvfrom(100)
        assert (data, peer) == (said, (address, port)), (said, data, peer)
print("all")
"""
Places = list[list[Any]]


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    with Sandbox("lanes") as sandbox:
        sandbox.a.ip("address", "add", f"{SECOND}/24", "dev", "va")
        yield sandbox


@pytest.fixture(scope="module")
def service(box: Sandbox, softverbs: bool) -> Iterator[Service]:
    with Service(box, softverbs=softverbs) as running:
        yield running


@pytest.fixture
def start(box: Sandbox, service: Service) -> Iterator[Callable[..., Program]]:
    """Starts a Python text under the shim on side a; ended with the test."""
    begun: list[Program] = []

    def run(text: str, *arguments: str, **parameters: str) -> Program:
        chosen = [word for name, value in parameters.items() for word in ("-e", f"{name}={value}")]
        own = ["--softverbs"] if service.softverbs else []
        argv = [*run_words(*own, *chosen), "--", sys.executable, "-S", "-E", "-c", text, *arguments]
        begun.append(box.start(box.a, argv, env=service.env))
        return begun[-1]

    yield run
    for program in begun:
        program.stop(signal.SIGKILL)
    until(lambda: not Api(service).status()["processes"])


def ask(box: Sandbox, places: Places, rounds: int = ROUNDS) -> None:
    argv = [sys.executable, "-S", "-E", "-c", ASK, json.dumps(places), str(rounds)]
    assert box.start(box.b, argv).result(30) == "all\n"


def echo(start: Callable[..., Program], box: Sandbox, threads: list[Places], pin: bool = False,
         **parameters: str) -> Program:
    """The program after ROUNDS datagrams of each socket came back."""
    text = f"PIN, ROUNDS = {pin}, {ROUNDS}{ECHO}"
    program = start(text, json.dumps(threads), **parameters)
    for number in range(len(threads)):
        program.wait_for(f'"thread": {number}')
    ask(box, [place for places in threads for place in places])
    program.wait_for('"done"')
    return program


def rings(service: Service) -> list[dict[str, Any]]:
    """Of the one program that runs."""
    found: list[dict[str, Any]] = Api(service).call("GET", "/v1/rings")[1]
    return found


def lanes(service: Service) -> list[int]:
    return sorted(ring["lane"] for ring in rings(service))


def sockets(service: Service) -> dict[str, dict[str, Any]]:
    """By local address and port."""
    return {found["local"]: found for found in Api(service).call("GET", "/v1/sockets")[1]}


def ring_ids(service: Service, threads: list[Places]) -> list[list[int]]:
    """The ring of each socket; none has received by another way, or has sent by the kernel but before its neighbour was
    known."""
    known = sockets(service)
    for at in known.values():
        assert at["counters"]["rx_packets"] >= ROUNDS - 5, at
    return [[known[f"{address}:{port}"]["ring_id"] for address, port in places] for places in threads]


def two_by_two(address: str) -> list[Places]:
    return [[[address, 6001], [address, 6002]], [[address, 6003], [address, 6004]]]


def logic(value: int) -> dict[str, str]:
    return {"VMA_RING_ALLOCATION_LOGIC_RX": str(value), "VMA_RING_ALLOCATION_LOGIC_TX": str(value)}


def test_one_ring_for_all_by_default(service: Service, box: Sandbox, start: Callable[..., Program]) -> None:
    threads = two_by_two(box.a.address)
    echo(start, box, threads)
    assert lanes(service) == [0]
    assert len({ring for places in ring_ids(service, threads) for ring in places}) == 1


def test_ring_per_address(service: Service, box: Sandbox, start: Callable[..., Program]) -> None:
    threads: list[Places] = [[[box.a.address, 6001], [SECOND, 6001], [box.a.address, 6002], [SECOND, 6002]]]
    echo(start, box, threads, **logic(1))
    assert lanes(service) == [0, 1]
    (one, two, three, four), = ring_ids(service, threads)
    assert (one, two) == (three, four)
    assert one != two


def test_ring_per_socket(service: Service, box: Sandbox, start: Callable[..., Program]) -> None:
    threads = two_by_two(box.a.address)
    program = echo(start, box, threads, **logic(10))
    assert lanes(service) == [0, 1, 2, 3]
    assert len({ring for places in ring_ids(service, threads) for ring in places}) == 4
    flows = {flow["local"].rpartition(":")[2]: flow["ring_id"] for flow in Api(service).socket_flows()}
    assert len(set(flows.values())) == 4
    steps = Api(service).call("GET", f"/v1/sockets/{program.pid}/explain")[1]["steps"]
    assert not [step for step in steps if not step["ok"]]
    argv = [tool("vma_stats"), "-p", str(program.pid), "-v", "3", "--once"]
    shown = subprocess.run(argv, env={**os.environ, "VMAHYBRID_RUNDIR": str(service.rundir)}, capture_output=True,
                           text=True, timeout=10, check=True)
    assert re.findall(r"^\tRING_ETH=\[(\d)\]$", shown.stdout, re.M) == ["0", "1", "2", "3"]
    kinds = sorted(ring["kind"] for ring in rings(service))
    assert kinds == (["verbs"] * 4 if service.softverbs else ["direct", "veth", "veth", "veth"])


def test_each_ring_is_counted(service: Service, box: Sandbox, start: Callable[..., Program]) -> None:
    """More than the 16 that libvma has room for; on QPs as many as the memory that may be locked has buffers for, and
    then sockets share them."""
    threads: list[Places] = [[[box.a.address, 6001 + number] for number in range(18)]]
    echo(start, box, threads, **logic(10))
    found = rings(service)
    assert len(found) == 18 or service.softverbs
    assert len(found) > 4
    assert sum(ring["stats"]["rx_packets"] for ring in found) >= 18 * (ROUNDS - 5)
    assert all(ring["stats"]["rx_packets"] >= ROUNDS - 5 and ring["stats"]["pool_rx_free"] for ring in found)


@pytest.mark.parametrize(("value", "pin"), [(20, False), (30, True), (31, False)])
def test_ring_per_thread_or_core(
    service: Service, box: Sandbox, start: Callable[..., Program], value: int, pin: bool
) -> None:
    threads = two_by_two(box.a.address)
    program = echo(start, box, threads, pin, **logic(value))
    assert lanes(service) == [0, 1]
    (one, two), (three, four) = ring_ids(service, threads)
    assert (one, three) == (two, four)
    assert one != three
    if value == 31:  # bind() had come before it looked
        said = [json.loads(line)["cpus"] for line in program.output.splitlines() if line.startswith("{")]
        assert sorted(map(len, said)) == [1, 1]
        assert said[0] != said[1]


@pytest.mark.parametrize(("limit", "wanted"), [("1", [0]), ("2", [0, 1]), ("9", [0, 1, 2, 3])])
def test_limit_of_rings(
    service: Service, box: Sandbox, start: Callable[..., Program], limit: str, wanted: list[int]
) -> None:
    threads = two_by_two(box.a.address)
    echo(start, box, threads, **logic(10), VMA_RING_LIMIT_PER_INTERFACE=limit)
    assert lanes(service) == wanted
    found = [ring for places in ring_ids(service, threads) for ring in places]
    assert sorted(found.count(ring) for ring in set(found)) == [4 // len(wanted)] * len(wanted)


def test_sending_by_other_rings_than_receiving(service: Service, box: Sandbox, start: Callable[..., Program]) -> None:
    threads: list[Places] = [[[box.a.address, 6001], [box.a.address, 6002]]]
    echo(start, box, threads, VMA_RING_ALLOCATION_LOGIC_RX="0", VMA_RING_ALLOCATION_LOGIC_TX="10")
    counted = {ring["lane"]: ring["stats"] for ring in rings(service)}
    received = sorted(stats["rx_packets"] for stats in counted.values())
    assert received[:2] == [0, 0]
    assert received[2] >= 2 * ROUNDS - 10
    assert sum(stats["tx_packets"] > 0 for stats in counted.values()) == 2


def test_where_the_service_gives_no_more(service: Service, box: Sandbox, start: Callable[..., Program]) -> None:
    """Sockets share what is there; the reason is said at level details."""
    api = Api(service)
    assert api.call("PATCH", "/v1/config", {"limits.rings": 2})[0] == 200
    try:
        threads = two_by_two(box.a.address)
        program = echo(start, box, threads, **logic(10), VMA_TRACELEVEL="details")
        assert len(lanes(service)) == 2
        assert len({ring for places in ring_ids(service, threads) for ring in places}) == 2
        assert program.errors.count(" VMA DETAILS: no further ring on va: ") == 1, program.errors
        assert "sockets share those that are there" in program.errors
    finally:
        assert api.call("PATCH", "/v1/config", {"limits.rings": 256})[0] == 200


MANY = """
import socket, sys, time
sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(160)]
for number, s in enumerate(sockets):
    s.bind((sys.argv[1], 6100 + number))
print("bound", flush=True)
for s in sockets:
    s.sendto(*s.recvfrom(100))
print("answered", flush=True)
time.sleep(30)
"""


@xdp_only("QPs share VMA_RX_BUFS, and have no rings of the kernel's")
def test_many_rings_of_one_program(service: Service, box: Sandbox, start: Callable[..., Program]) -> None:
    """Each takes its time to be made; none of that is taken for a service that hangs."""
    program = start(MANY, box.a.address, VMA_RX_BUFS="128", VMA_TX_BUFS="64", **logic(10))
    program.wait_for("bound", 120)
    assert len(rings(service)) == 160
    ask(box, [[box.a.address, 6100 + number] for number in range(160)], 1)
    program.wait_for("answered")
    assert "WARNING" not in program.errors


MOVES = f"""
import json, socket, sys, threading, time
here, port, there, there_port = sys.argv[1], int(sys.argv[2]), sys.argv[3], 9
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind((here, port))
for _ in range(100):    # until the neighbour is known
    s.sendto(b"x", (there, there_port))
    time.sleep(0.005)
def serve():
    for _ in range({ROUNDS * 4}):
        data, peer = s.recvfrom(100)
        s.sendto(data, peer)
print('"bound"', flush=True)
thread = threading.Thread(target=serve)
thread.start()
thread.join()
print('"done"', flush=True)
time.sleep(30)
"""


@pytest.mark.parametrize(("ratio", "moved"), [("30", True), ("-1", False), ("1000", False)])
def test_migration(
    service: Service, box: Sandbox, start: Callable[..., Program], ratio: str, moved: bool
) -> None:
    """After so many accesses by another thread, and 20 more, the socket is on that thread's ring, in each direction."""
    program = start(MOVES, box.a.address, "6011", box.b.address, **logic(20), VMA_RING_MIGRATION_RATIO_RX=ratio,
                    VMA_RING_MIGRATION_RATIO_TX=ratio)
    program.wait_for('"bound"')
    before = sockets(service)[f"{box.a.address}:6011"]["ring_id"]
    ask(box, [[box.a.address, 6011]], ROUNDS * 4)
    program.wait_for('"done"')
    after = sockets(service)[f"{box.a.address}:6011"]
    assert after["counters"]["rx_migrations"] == moved
    assert after["counters"]["tx_migrations"] == moved
    assert after["counters"]["rx_packets"] >= ROUNDS * 4 - 5
    assert (after["ring_id"] != before) is moved
    found = {ring["ring_id"]: ring["stats"] for ring in rings(service)}
    assert len(found) == 1 + moved
    flow, = Api(service).socket_flows()
    assert flow["ring_id"] == after["ring_id"]
    if moved:
        assert 50 <= found[before]["rx_packets"] < 60
        assert found[after["ring_id"]]["rx_packets"] > 90
        assert found[after["ring_id"]]["tx_packets"] > 90


def test_profile_of_rings_per_thread(service: Service, box: Sandbox, start: Callable[..., Program]) -> None:
    threads = two_by_two(box.a.address)
    echo(start, box, threads, VMA_SPEC="multi_ring_latency", VMA_RX_POLL="1000")
    assert lanes(service) == [0, 1]
    (one, two), (three, four) = ring_ids(service, threads)
    assert (one, three) == (two, four)
    assert one != three


TCP = """
import json, socket, sys, threading, time
kept = []
def serve(number):
    s = socket.create_connection((sys.argv[1], 7011))
    kept.append(s)
    for i in range(200):
        s.sendall(b"%06d" % i)
        assert s.recv(6, socket.MSG_WAITALL) == b"%06d" % i
threads = [threading.Thread(target=serve, args=(n,)) for n in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print('"done"', flush=True)
time.sleep(30)
"""
TCP_SERVER = tcp_echo(7011)


@pytest.mark.parametrize(("value", "wanted"), [(0, 1), (20, 2), (10, 2)])
def test_tcp_connections_of_threads(
    service: Service, box: Sandbox, start: Callable[..., Program], value: int, wanted: int
) -> None:
    """A connection sends and receives by the ring that VMA_RING_ALLOCATION_LOGIC_RX gives it."""
    server = box.start(box.b, [sys.executable, "-S", "-E", "-c", TCP_SERVER])
    server.wait_for("ready")
    program = start(TCP, box.b.address, VMA_HYBRID_TCP="offload", VMA_RING_ALLOCATION_LOGIC_RX=str(value))
    program.wait_for('"done"')
    server.stop(signal.SIGKILL)
    found = [at for at in sockets(service).values() if at["proto"] == "tcp"]
    assert [at["offloaded"] for at in found] == [True, True]
    assert len({at["ring_id"] for at in found}) == wanted
    assert len(lanes(service)) == wanted
    assert all(ring["stats"]["rx_packets"] > 150 for ring in rings(service))
