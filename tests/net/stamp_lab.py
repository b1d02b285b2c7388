"""A program that receives with SO_TIMESTAMPING (stamp_program.py), and three datagrams for it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from vmahybrid.bench.sandbox import Program, Sandbox
from vmahybrid.bench.served import Service
from vmahybrid.cli.client import Client

PROGRAM = Path(__file__).with_name("stamp_program.py")
TX_SOFTWARE, RX_HARDWARE, RX_SOFTWARE, SOFTWARE, RAW_HARDWARE = 2, 4, 8, 16, 64
ALL = RX_HARDWARE | RX_SOFTWARE | SOFTWARE | RAW_HARDWARE
SECOND = 10**9
SENDER = ("import socket, sys, time\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
          "for _ in range(3): s.sendto(b'x', (sys.argv[1], 7310)); time.sleep(0.02)")


def receiver(box: Sandbox, service: Service, flags: int, conversion: int) -> Program:
    argv = [sys.executable, "-S", "-E", str(PROGRAM), box.b.address, "7310", "3", str(flags)]
    program = box.start(box.b, service.run_argv(argv, "none", VMA_HW_TS_CONVERSION=str(conversion)), env=service.env)
    program.wait_for("bound")
    return program


def received(box: Sandbox, service: Service, program: Program) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What the program saw of three datagrams, and its socket."""
    box.start(box.a, [sys.executable, "-S", "-E", "-c", SENDER, box.b.address]).result(10)
    line = program.wait_for(r"(\[.*\])\n")[1]
    found = socket_of(service, program)
    program.stop()
    return json.loads(line), found


def socket_of(service: Service, program: Program) -> dict[str, Any]:
    """Its only one, as the service sees it."""
    with Client(service.rundir / "api.sock") as client:
        (found,) = [sock for sock in client.get("v1", "sockets") if sock["pid"] == program.pid]
    assert isinstance(found, dict)
    return found
