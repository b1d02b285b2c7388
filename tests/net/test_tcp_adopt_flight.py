"""What the peer sends while a connection of the kernel is adopted is for that connection: not for a listener of its
port, nor late for one that went home before."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from net.service_lab import Api, under_shim
from net.test_tcp_shim import introduce, without_offloads

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

PORT, ROUNDS = 7470, 3
# The first connection has a thread, which looks at the ring all the time.
SERVER = f"""
import json, os, socket, sys, threading, time
listener = socket.create_server((sys.argv[1], {PORT}), backlog=64)
print("ready", flush=True)
while not os.path.exists(sys.argv[3]):
    time.sleep(0.01)
quiet = listener.accept()[0]
threading.Thread(target=quiet.recv, args=(1,)).start()
peers = [listener.accept()[0] for _ in range(int(sys.argv[2]))]
print("fd", peers[0].fileno(), flush=True)
for s in peers:
    got, longest, last = bytearray(), 0, time.monotonic()
    try:
        while data := s.recv(1 << 16):
            now = time.monotonic()
            got += data
            longest, last = max(longest, now - last), now
        end = ""
    except OSError as error:
        end = str(error)
    s.close()
    print(json.dumps({{"whole": got == bytes(i % 251 for i in range(len(got))), "bytes": len(got), "longest": longest,
                       "end": end}}), flush=True)
"""
# To each of the others a byte is on its way all the time. The kernel has all of them: the server's ring has not begun.
CLIENT = f"""
import pathlib, socket, sys, time
socks = [socket.create_connection((sys.argv[1], {PORT})) for _ in range(int(sys.argv[2]) + 1)]
for s in socks:
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
go, i = pathlib.Path(sys.argv[3]), 0
go.touch()
while go.exists():
    for s in socks[1:]:
        s.send(bytes([i % 251]))
    i += 1
    time.sleep(3e-4)
for s in socks[1:]:
    s.shutdown(socket.SHUT_WR)
for s in socks[1:]:
    s.recv(1)
print(i, flush=True)
"""


@pytest.fixture(scope="module")
def service(softverbs: bool) -> Iterator[Service]:
    with Sandbox("adopt") as sandbox, Service(without_offloads(sandbox), softverbs=softverbs) as running:
        introduce(sandbox)
        yield running


class Pair:
    """The server under the shim, and a client of the kernel, which sends until the end."""

    def __init__(self, service: Service, go: Path, peers: int) -> None:
        box, self.go = service.sandbox, go
        args = [box.b.address, str(peers), str(go)]
        server = under_shim(service, [sys.executable, "-S", "-c", SERVER, *args], VMA_HYBRID_TCP="offload",
                            VMA_HYBRID_TCP_BUDGET="100")
        self.server = box.start(box.b, server, env=service.env)
        self.server.wait_for("ready")
        self.client = box.start(box.a, [sys.executable, "-S", "-c", CLIENT, *args])
        self.first_fd = self.server.wait_for(r"fd (\d+)\n")[1]

    def end(self) -> list[dict[str, Any]]:
        """Of each connection; all of it was there."""
        self.go.unlink()
        seen = [json.loads(line) for line in self.server.result(30).splitlines() if line.startswith("{")]
        assert [s["end"] for s in seen] == [""] * len(seen)
        sent = int(self.client.result(30))
        assert all(s["whole"] and s["bytes"] == sent for s in seen), (sent, seen)
        return seen


def taken(service: Service) -> int:
    return int(Api(service).status()["counters"].get("tcp_taken_total", 0))


def test_a_listener_of_the_same_port(service: Service, tmp_path: Path) -> None:
    before = taken(service)
    assert len(Pair(service, tmp_path / "go", 16).end()) == 16
    assert taken(service) - before >= 16


def test_again_and_again(service: Service, tmp_path: Path) -> None:
    """Nothing waits until it is sent again."""
    before = taken(service)
    pair = Pair(service, tmp_path / "go", 1)
    name = f"{pair.server.pid}:{pair.first_fd}"
    for _ in range(ROUNDS):
        service.ask("home", name)
        service.ask("adopt", name)
    assert pair.end()[0]["longest"] < 0.15
    assert taken(service) - before > ROUNDS
