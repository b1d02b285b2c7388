"""Flows of hosts that translate addresses or track connections for a firewall: as the kernel's, moved or not."""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Iterator

import pytest
from net.service_lab import Api, udp_echo
from net.test_tcp_shim import introduce, without_offloads
from pyroute2 import NFCTSocket
from pyroute2.netlink.nfnetlink.nfctsocket import TCP_CONNTRACK_ESTABLISHED

from vmahybrid.bench.sandbox import Program, Sandbox, run_command
from vmahybrid.bench.served import Service
from vmahybrid.net.netns import NetnsWorker

pytestmark = pytest.mark.root

PORT, SEEN_PORT, VIRTUAL = 7450, 80, "10.96.0.1"
FIREWALL = f"""table inet fw {{
 chain in {{
  type filter hook input priority 0; policy drop
  ct state established,related accept
  ct state invalid drop
  tcp dport {PORT} ct state new accept
  icmp type echo-request accept
 }}
 chain out {{
  type filter hook output priority 0; policy accept
  ct state invalid drop
 }}
}}
"""
NAT = """table ip n {{
 chain c {{
  type nat hook {hook} priority {priority}
  {rule}
 }}
}}
"""
ECHO = f"""
import socket, sys
with socket.create_server((sys.argv[1], {PORT}), backlog=16) as listener:
    print("ready", flush=True)
    while True:
        with listener.accept()[0] as s:
            s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data := s.recv(65536):
                s.sendall(data)
                s = s.dup() if len(data) > 1 else s
"""
# a connection becomes busy, carries some, goes home, and goes on; then another one
CLIENT = """
import socket, sys
def rounds(s, n, size=1):
    for _ in range(n):
        s.sendall(b"x" * size)
        got = 0
        while got < size:
            got += len(s.recv(65536))
for visit in range(2):
    s = socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    rounds(s, 3000)
    rounds(s, 100, 1000)
    s = s.dup()
    rounds(s, 100)
    s.close()
print("done", flush=True)
"""
# side, rules, address, port
HOSTS = {
    "firewall of the client": ("a", FIREWALL, "", PORT),
    "firewall of the server": ("b", FIREWALL, "", PORT),
    "virtual address": ("a", NAT.format(
        hook="output", priority=-100, rule=f"ip daddr {VIRTUAL} tcp dport {SEEN_PORT} dnat to {{b}}:{PORT}"),
        VIRTUAL, SEEN_PORT),
    "source": ("a", NAT.format(hook="postrouting", priority=100, rule="ip daddr {b} snat to {other}"), "", PORT),
    "published port": ("b", NAT.format(hook="prerouting", priority=-100,
                                       rule=f"tcp dport {SEEN_PORT} redirect to :{PORT}"), "", SEEN_PORT),
}


RESETS = ECHO.replace("s = s.dup() if len(data) > 1 else s", """if len(data) > 1:
                    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    break""").replace("import socket", "import socket, struct")
ENDS = {
    "closed": "    s.close()\n",
    "reset by the peer": "    s.sendall(b'xx')\n    try:\n        while s.recv(9):\n            pass\n"
                         "    except ConnectionResetError:\n        pass\n    s.close()\n",
    "killed": "    if visit:\n        print('done', flush=True)\n        import time\n        time.sleep(60)\n",
}


DATAGRAM_CLIENT = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(5)
s.connect((sys.argv[1], int(sys.argv[2])))
for n in range(50):
    s.send(str(n).encode())
    assert s.recv(2048) == str(n).encode()
print("done", flush=True)
"""


@pytest.fixture
def running() -> Iterator[Service]:
    with Sandbox("nat") as sandbox, Service(without_offloads(sandbox)) as service:
        introduce(sandbox)
        yield service


def load_rules(box: Sandbox, side: str, rules: str) -> None:
    other = box.a.address.rsplit(".", 1)[0] + ".77"
    box.a.ip("address", "add", f"{other}/24", "dev", box.a.device)
    box.a.ip("route", "add", f"{VIRTUAL}/32", "via", box.b.address)
    with tempfile.NamedTemporaryFile("w", suffix=".nft") as file:
        file.write(rules.replace("{b}", box.b.address).replace("{other}", other))
        file.flush()
        run_command(*getattr(box, side).command(["nft", "-f", file.name]))


def start(service: Service, side: str, policy: str, *argv: str) -> Program:
    """On a side, under the shim if there is a policy."""
    box = service.sandbox
    command = [sys.executable, "-S", "-c", *argv]
    if not policy:
        return box.start(getattr(box, side), command)
    return box.start(getattr(box, side), service.run_argv(
        command, "none", VMA_HYBRID_TCP=policy, VMA_RX_POLL="200", VMA_HYBRID_TCP_ROUNDS="8",
        VMA_HYBRID_TCP_BUDGET="100"), env=service.env)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize(("client", "server"), [("adaptive", ""), ("offload", ""), ("", "adaptive"), ("", "offload")])
def test_as_without(running: Service, host: str, client: str, server: str) -> None:
    box = running.sandbox
    side, rules, address, port = HOSTS[host]
    load_rules(box, side, rules)
    echo = start(running, "b", server, ECHO, box.b.address)
    echo.wait_for("ready")
    program = start(running, "a", client, CLIENT, address or box.b.address, str(port))
    assert program.result(30).split() == ["done"]
    counters = Api(running).status()["counters"]
    translated = not host.startswith("firewall") and (side == "a") == bool(client)
    if translated:
        assert not counters.get("tcp_taken_total") and not counters.get("tcp_homed_total")
    else:
        assert counters["tcp_homed_total"] >= 1
    echo.stop()


@pytest.mark.parametrize("host", [host for host in HOSTS if not host.startswith("firewall")])
@pytest.mark.parametrize("shim", ["a", "b"])
def test_datagrams(running: Service, host: str, shim: str) -> None:
    box = running.sandbox
    side, rules, address, port = HOSTS[host]
    load_rules(box, side, rules.replace("tcp dport", "udp dport"))
    echo = start(running, "b", "kernel" if shim == "b" else "", udp_echo(PORT), box.b.address)
    echo.wait_for("ready")
    program = start(running, "a", "kernel" if shim == "a" else "", DATAGRAM_CLIENT, address or box.b.address, str(port))
    assert program.result(20).split() == ["done"]
    echo.stop()


def established(box: Sandbox, side: str) -> int:
    """Entries of connection tracking that stay for days."""
    def count() -> int:
        with NFCTSocket() as netlink:
            infos = [entry.get_attr("CTA_PROTOINFO") for entry in netlink.dump()]
        return sum(info.get_attr("CTA_PROTOINFO_TCP").get_attr("CTA_PROTOINFO_TCP_STATE") == TCP_CONNTRACK_ESTABLISHED
                   for info in infos if info is not None)

    with NetnsWorker.open_path(getattr(box, side).netns) as worker:
        return worker.call(count)


@pytest.mark.parametrize("how", ["closed", "reset by the peer", "killed"])
def test_none_is_tracked_for_days_after_its_end(running: Service, how: str) -> None:
    box = running.sandbox
    load_rules(box, "a", FIREWALL)
    echo = start(running, "b", "", RESETS if how.startswith("reset") else ECHO, box.b.address)
    echo.wait_for("ready")
    visits = CLIENT.replace("    rounds(s, 100, 1000)\n    s = s.dup()\n    rounds(s, 100)\n    s.close()\n", ENDS[how])
    program = start(running, "a", "adaptive", visits, box.b.address, str(PORT))
    program.wait_for("done", 30)
    assert Api(running).status()["counters"]["tcp_taken_total"]
    if how == "killed":
        assert established(box, "a")
        program.stop(signal.SIGKILL)
    else:
        program.result(10)
    until = time.monotonic() + 3
    while (left := established(box, "a")) and time.monotonic() < until:
        time.sleep(0.05)
    assert not left
    echo.stop()
