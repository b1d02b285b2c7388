"""An address that a socket is bound to is taken away and comes back: its sends say what the kernel's would."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from net.service_lab import Api, module_pair, module_services  # noqa: F401

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service

pytestmark = [pytest.mark.root, pytest.mark.timeout(60)]

SECOND = "10.77.0.77"
SINK = "import socket, sys, time; s = socket.socket(type=socket.SOCK_DGRAM); s.bind((sys.argv[1], 9)); time.sleep(60)"
# a line of the fifo: one send; what came of it is printed
PROGRAM = """
import socket, sys
s = socket.socket(type=socket.SOCK_DGRAM)
s.bind((sys.argv[1], 0))
if sys.argv[3] == "connected":
    s.connect((sys.argv[2], 9))
for line in open(sys.argv[4]):
    try:
        print(s.send(b"x") if sys.argv[3] == "connected" else s.sendto(b"x", (sys.argv[2], 9)), flush=True)
    except OSError as error:
        print(error.errno, flush=True)
"""


def answers(box: Sandbox, how: str, service: Service | None, fifo: str) -> list[str]:
    """Of sends with the address, without it, and with it again."""
    argv = [sys.executable, "-c", PROGRAM, SECOND, box.b.address, how, fifo]
    env = service.env if service else {}
    box.a.ip("address", "add", f"{SECOND}/24", "dev", box.a.device)
    program = box.start(box.a, service.run_argv(argv, "none") if service else argv, env=env)
    try:
        with open(fifo, "w", buffering=1) as orders:
            for count, verb in enumerate(("", "del", "add"), 1):
                if verb:
                    box.a.ip("address", verb, f"{SECOND}/24", "dev", box.a.device)
                    time.sleep(0.15)  # what a change may take, and a little
                print("send", file=orders)
                program.wait_for(rf"(?s)\A(\d+\n){{{count}}}")
                if service and verb != "del":
                    assert any(f["pid"] == program.pid for f in Api(service).socket_flows()), "not on a ring"
        return program.result(10).split()
    finally:
        box.a.ip("address", "del", f"{SECOND}/24", "dev", box.a.device)


@pytest.mark.parametrize("how", ["connected", "bound"])
def test_as_the_kernel(service: Service, netns_pair: Sandbox, tmp_path: Path, how: str) -> None:
    fifo = str(tmp_path / "orders")
    os.mkfifo(fifo)
    netns_pair.start(netns_pair.b, [sys.executable, "-c", SINK, netns_pair.b.address])
    kernel = answers(netns_pair, how, None, fifo)
    assert kernel[0] == kernel[2] == "1" and kernel[1] not in ("1", "0")
    assert answers(netns_pair, how, service, fifo) == kernel
