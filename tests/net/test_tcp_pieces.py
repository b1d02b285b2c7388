"""Requests and answers that are written in pieces, without TCP_NODELAY: where the kernel's Nagle and delayed ACKs wait
for nothing, those of a connection on a ring do not either, in a new connection and later."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator

import pytest
from net.test_tcp_shim import introduce

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

PORT = 7779
LONGER_MS = 25  # a delayed ACK takes 40
HEAD = 64       # of a request: what it and the answer consist of
REQUESTS = [[64], [64, 100], [70, 3000], [3000, 70], [1000, 1000, 1000], [20000]]
ANSWERS = [[1], [100, 200], [3000, 1], [1, 3000], [1000, 1000, 1000], [20000, 100]]

SERVER = f"""
import json, socket, threading
listener = socket.create_server(("0.0.0.0", {PORT}), backlog=64)
print("ready", flush=True)
def serve(connection):
    with connection:
        while head := connection.recv({HEAD}, socket.MSG_WAITALL):
            request, answer = json.loads(head)
            connection.recv(sum(request) - {HEAD}, socket.MSG_WAITALL) if sum(request) > {HEAD} else None
            for piece in answer:
                connection.send(bytes(piece))
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""

CLIENT = f"""
import json, socket, sys, time
took = {{}}
for request in {REQUESTS}:
    for answer in {ANSWERS}:
        best = [float("inf")] * 3
        for _ in range(3):
            with socket.create_connection((sys.argv[1], {PORT})) as connection:
                for turn in range(len(best)):
                    head = json.dumps([request, answer]).encode().ljust({HEAD})
                    began = time.monotonic()
                    connection.send(head + bytes(request[0] - {HEAD}))
                    for piece in request[1:]:
                        connection.send(bytes(piece))
                    left = sum(answer)
                    while left:
                        left -= len(connection.recv(left))
                    best[turn] = min(best[turn], (time.monotonic() - began) * 1e3)
        took[f"{{request}} {{answer}}"] = best
print(json.dumps(took))
"""


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Sandbox("test") as sandbox, Service(sandbox) as running:
        introduce(sandbox)
        yield running


def exchanges(service: Service, server: str, client: str) -> dict[str, list[float]]:
    """Milliseconds of the first, second and third one of a connection, by what was written."""
    def with_policy(argv: list[str], policy: str) -> list[str]:
        return service.run_argv(argv, "none", VMA_HYBRID_TCP=policy) if policy != "kernel" else argv

    sandbox = service.sandbox
    serving = sandbox.start(sandbox.b, with_policy([sys.executable, "-c", SERVER], server), env=service.env)
    try:
        serving.wait_for("ready")
        argv = with_policy([sys.executable, "-c", CLIENT, sandbox.b.address], client)
        said = sandbox.start(sandbox.a, argv, env=service.env).result(60)
    finally:
        serving.stop(signal.SIGKILL)
    took: dict[str, list[float]] = json.loads(said.splitlines()[-1])
    return took


@pytest.fixture(scope="module")
def usual(service: Service) -> dict[str, list[float]]:
    return exchanges(service, "kernel", "kernel")


@pytest.mark.parametrize(("server", "client"), [("kernel", "offload"), ("offload", "kernel"), ("offload", "offload")])
def test_nobody_waits_longer(service: Service, usual: dict[str, list[float]], server: str, client: str) -> None:
    took = exchanges(service, server, client)
    late = {what: (ms, usual[what]) for what, ms in took.items()
            if any(here > there + LONGER_MS for here, there in zip(ms, usual[what], strict=True))}
    assert len(took) == len(REQUESTS) * len(ANSWERS) and not late
