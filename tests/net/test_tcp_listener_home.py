"""A listener on rings goes home, before a fork and when the service stops: no peer of it notices."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

import pytest
from net.service_lab import counter
from net.test_tcp_shim import bare_pair, without_offloads  # noqa: F401
from net.test_tcp_show import talk
from net.test_tcp_syn import Calls, know, listening, nobody

from vmahybrid.bench.sandbox import Program, Sandbox, run_command
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

SLOW = Path(__file__).with_name("slow_handshake.py")

SERVER = """
import socket, sys, threading

def answer(connection):
    while data := connection.recv(1000):
        connection.sendall(data)
    connection.close()

listener = socket.create_server((sys.argv[1], int(sys.argv[2])), backlog=200)
print("ready", flush=True)
while True:
    threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()
"""

CLIENT = """
import collections, json, socket, sys, threading, time

seen, end = collections.Counter(), time.monotonic() + float(sys.argv[3])

def visit():
    while time.monotonic() < end:
        try:
            with socket.create_connection((sys.argv[1], int(sys.argv[2])), 5) as connection:
                for _ in range(3):
                    connection.sendall(b"question")
                    assert len(connection.recv(1000)) == 8
            seen["answered"] += 1
        except Exception as error:
            seen[repr(error)] += 1

threads = [threading.Thread(target=visit) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(json.dumps(seen))
"""


@pytest.mark.parametrize(("seconds", "cookies"), [("0.06", 1), ("0.5", 1), ("2", 1), ("0.5", 2)])
def test_a_fork_in_the_middle_of_a_handshake(seconds: str, cookies: int) -> None:
    """The peer has our SYN-ACK, or a cookie, and answers while the listener goes home, or later: nobody waits."""
    with Sandbox("slow") as sandbox, Service(without_offloads(sandbox)) as service:
        run_command(*sandbox.b.command(["sysctl", "-qw", f"net.ipv4.tcp_syncookies={cookies}"]))
        know(sandbox, "4")
        ghost = nobody(sandbox.a, 77)
        for ip in ghost, nobody(sandbox.a, 78):
            sandbox.b.ip("neigh", "replace", ip, "lladdr", sandbox.a.mac, "dev", sandbox.b.device, "nud", "permanent")
        with Calls(service, sandbox.b, True) as b:
            port = listening(b, sandbox.b)
            b.call("l", "setblocking", False)
            assert b.do("accept", name="l", new="none") == "EAGAIN"   # from here on its rings listen

            def start(ip: str, pause: str) -> Program:
                where = [sandbox.a.device, sandbox.a.mac, sandbox.b.mac, ip, sandbox.b.address, str(port), pause]
                return sandbox.start(sandbox.a, [sys.executable, "-S", str(SLOW), *where])

            silent = start(nobody(sandbox.a, 78), "60")
            while "syn-ack" not in silent.output:
                b.do("accept", name="l", new="none")
            slow = start(ghost, seconds)
            while "syn-ack" not in slow.output:   # the program looks, else its internal thread answers
                b.do("accept", name="l", new="none")
            begun = time.monotonic()
            assert b.do("fork", name="l", method="getsockname")[1] == port
            assert time.monotonic() - begun < 0.3
            b.call("l", "setblocking", True)
            assert b.do("accept", name="l", new="s") == ghost
            assert time.monotonic() - begun < float(seconds) + 0.5
            assert b.call("s", "recv", 9) == "late" and b.call("s", "send", "answer") == 6
            assert slow.result(5).split() == ["syn-ack", "answer"]
            silent.stop(signal.SIGKILL)


def test_a_server_that_forks_for_each_connection() -> None:
    """To adopt what the child gets would cost each of its clients 20 ms. What the server uses much is adopted."""
    with Sandbox("forks") as sandbox, Service(without_offloads(sandbox)) as service:
        know(sandbox, "4")
        with Calls(service, sandbox.b, True) as b, Calls(service, sandbox.a, False) as a:
            port = listening(b, sandbox.b)

            def visit() -> None:
                a.do("new", name="c")
                assert a.call("c", "connect", [sandbox.b.address, port]) is None
                assert b.do("accept", name="l", new="s") == sandbox.a.address

            def taken() -> int:
                return int(counter(service, "tcp_taken_total"))

            for _ in range(8):
                visit()
                assert b.do("fork", name="s", method="send", arguments=["x"]) == 1
                assert a.call("c", "recv", 1) == "x"
                b.do("close", name="s")
                assert a.call("c", "recv", 1) == ""
            before = taken()
            assert before <= 2
            visit()
            assert taken() == before
            for more in (1, 2):
                end = time.monotonic() + 10   # VMA_HYBRID_TCP_BUDGET
                while taken() < before + more and time.monotonic() < end:
                    talk(a, b)
                assert taken() == before + more
                visit()
                assert taken() == before + more
            talk(a, b)


@pytest.mark.parametrize("who", ["server", "both"])
def test_visits_while_the_service_stops(who: str) -> None:
    """None is refused or reset, when it stops and when the next one begins."""
    with Sandbox("visits") as sandbox, Service(without_offloads(sandbox)) as service:
        know(sandbox, "4")
        server, client = ([sys.executable, "-c", program] for program in (SERVER, CLIENT))
        shim = {"VMA_HYBRID_TCP": "offload", "VMA_RX_POLL": "200", "VMA_TRACELEVEL": "warning"}
        b = sandbox.start(sandbox.b, service.run_argv([*server, sandbox.b.address, "7100"], **shim), env=service.env)
        b.wait_for("ready")
        argv = [*client, sandbox.b.address, "7100", "6"]
        a = sandbox.start(sandbox.a, service.run_argv(argv, **shim) if who == "both" else argv, env=service.env)
        for _ in range(2):
            time.sleep(1.5)
            service.program.stop(signal.SIGTERM, 15)
            service.start()
        seen = json.loads(a.result(30).splitlines()[-1])
        b.stop(signal.SIGKILL)
        assert list(seen) == ["answered"], seen
        assert "could not go home" not in b.errors
