"""What test_verbs_pyverbs.py runs under `vmahybrid softverbs`, in a namespace: one check by name, JSON out."""

from __future__ import annotations

import dataclasses
import json
import socket
import sys
from collections.abc import Callable
from typing import Any

from vmahybrid.contracts import addr_to_bytes
from vmahybrid.errors import VmahybridError
from vmahybrid.steering.keys import Act, Action, FlowKey
from vmahybrid.steering.mirror import mirror
from vmahybrid.verbs import caps
from vmahybrid.verbs.qp import RawQp
from vmahybrid.verbs.rules import FlowRules
from vmahybrid.xdp.probe import probe

RING, PASS = Action(Act.RING), Action(Act.PASS)
OWN, PEER = "10.77.0.1", "10.77.0.2"


def udp_of(frame: bytes) -> list[Any]:
    """[source, source port, destination port, text] of an untagged IPv4 frame without options."""
    length = int.from_bytes(frame[38:40], "big")
    return [socket.inet_ntoa(frame[26:30]), int.from_bytes(frame[34:36], "big"), int.from_bytes(frame[36:38], "big"),
            frame[42:34 + length].decode()]


def listed() -> Any:
    return {"devices": caps.devices(), "able": dataclasses.asdict(caps.capabilities("sv_va"))}


def unknown() -> Any:
    try:
        caps.capabilities("sv_none")
    except VmahybridError as error:
        return str(error)
    return "no error"


def steer(*ports: str) -> Any:
    """Rules for the ports, then a kernel socket on each and on 7000; prints `ready`, receives until a line comes."""
    mac = probe("va").mac
    kernel = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in (*ports, 7000)]
    for sock, port in zip(kernel, (*map(int, ports), 7000), strict=True):
        sock.bind((OWN, port))
        sock.setblocking(False)
    with RawQp.made("sv_va") as qp:
        rules = FlowRules(qp, mac)
        wanted = {FlowKey(addr_to_bytes(OWN), int(port)): RING for port in ports}
        assert not mirror(rules, wanted).failed
        rounds = []
        for change in ("none", "first passes", "all gone"):
            if change == "first passes":
                assert mirror(rules, wanted | {next(iter(wanted)): PASS}).put == 1
            if change == "all gone":
                assert mirror(rules, {}).deleted == len(wanted)
            print("ready", flush=True)
            sys.stdin.readline()
            got = []
            while (frame := qp.receive(0.2)) is not None:
                got.append(udp_of(frame))
            rounds.append({"qp": sorted(got), "kernel": sorted(text for sock in kernel for text in _drain(sock))})
        rules.close()
    return rounds


def _drain(sock: socket.socket) -> list[str]:
    found = []
    while True:
        try:
            found.append(sock.recv(2048).decode())
        except BlockingIOError:
            return found


def connected() -> Any:
    """A 3-tuple rule on one QP, a 5-tuple rule for one peer port on another: the more specific one wins."""
    mac = probe("va").mac
    with RawQp.made("sv_va") as broad, RawQp.made("sv_va") as narrow:
        everybody, one = FlowRules(broad, mac), FlowRules(narrow, mac)
        everybody.put(FlowKey(addr_to_bytes(OWN), 5000), RING)
        one.put(FlowKey(addr_to_bytes(OWN), 5000, addr_to_bytes(PEER), 4242), RING)
        print("ready", flush=True)
        sys.stdin.readline()
        found = {}
        for name, qp in (("broad", broad), ("narrow", narrow)):
            found[name] = []
            while (frame := qp.receive(0.2)) is not None:
                found[name].append(udp_of(frame)[1])
        everybody.close()
        one.close()
    return found


def send(mac: str, port: str) -> Any:
    """One frame to a kernel socket of the other side, its checksums left to the device."""
    text = b"from a queue pair"
    ip = bytes.fromhex("4500") + (28 + len(text)).to_bytes(2, "big") + bytes.fromhex("0000400040110000")
    ip += socket.inet_aton(OWN) + socket.inet_aton(PEER)
    udp = (1234).to_bytes(2, "big") + int(port).to_bytes(2, "big") + (8 + len(text)).to_bytes(2, "big") + bytes(2)
    with RawQp.made("sv_va") as qp:
        qp.send(bytes.fromhex(mac) + probe("va").mac + b"\x08\x00" + ip + udp + text, checksums=True)
    return "sent"


CHECKS: dict[str, Callable[..., Any]] = {"listed": listed, "unknown": unknown, "steer": steer, "connected": connected,
                                         "send": send}

if __name__ == "__main__":
    print(json.dumps(CHECKS[sys.argv[1]](*sys.argv[2:])))
