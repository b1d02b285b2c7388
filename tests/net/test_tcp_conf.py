"""tcp_client and tcp_server rules of libvma.conf: what each keeps on the kernel; a change while the program runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from net.service_lab import module_service  # noqa: F401
from net.test_tcp_shim import bare_pair  # noqa: F401

from vmahybrid.bench.sandbox import Program, Sandbox
from vmahybrid.bench.served import Service
from vmahybrid.cli.client import Client

pytestmark = [pytest.mark.root, pytest.mark.timeout(60)]

PORTS = range(7400, 7410)
# answers on every port, and connects where it is told to
PEER = """
import select, socket, sys
here, there, first, last = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
listeners = [socket.create_server((here, port)) for port in range(first, last)]
six = "fd77::" + here.rpartition(".")[2]
listeners += [socket.create_server((six, port), family=socket.AF_INET6) for port in range(first, last)]
print("ready", flush=True)
kept = []
while True:
    for ready in select.select([sys.stdin, *listeners, *kept], [], [])[0]:
        if ready is sys.stdin:
            address, port = sys.stdin.readline().split()
            kept.append(socket.create_connection((address, int(port))))
            kept[-1].send(b"x")
            print("connected", flush=True)
        elif ready in listeners:
            kept.append(ready.accept()[0])
        elif data := ready.recv(4096):
            ready.send(data)
        else:
            kept.remove(ready)
"""
PROGRAM = """
import os, socket, sys
here, there = sys.argv[1:]
kept = []
def rounds(s, n=40):
    for _ in range(n):
        s.send(b"x" * 10)
        s.recv(100)
    kept.append(s)
    return s.fileno()
def client(port, bound=0):
    s = socket.socket()
    if bound:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind((here, bound))
    s.connect((there, port))
    return rounds(s)
def client6(address, port):
    s = socket.socket(socket.AF_INET6)
    s.connect((address, port))
    return rounds(s)
listeners = {}
def server(port, address=here):
    global listener
    listener = socket.create_server((address, port))
    listener.settimeout(0.05)
    try:
        listener.accept()
    except TimeoutError:
        listener.settimeout(5)
    kept.append(listener)
    return listener.fileno()
def accepted():
    s = listener.accept()[0]
    s.recv(1)
    return rounds(s)
for line in sys.stdin:
    print(os.getpid(), "fd", eval(line), flush=True)
"""
CONF = """\
use os tcp_client {there}:7400-7401
use vma tcp_client {net}/24:7402
use os tcp_client *:7402
use os tcp_client *:7403:{here}:6100-6200
use os tcp_server {here}/32:5100-5109
use os tcp_server {net}/16:5111
application-id python* special
use os tcp_client *:*
"""


@pytest.fixture(scope="module")
def peer(netns_pair: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], None]:
    path = tmp_path_factory.mktemp("peer") / "in"
    path.touch()
    argv = [sys.executable, "-uc", PEER, netns_pair.b.address, netns_pair.a.address, str(PORTS[0]), str(PORTS[-1] + 1)]
    script = 'tail -f --pid=$$ -n +1 "$0" | exec "$@"'
    program = netns_pair.start(netns_pair.b, ["sh", "-c", script, str(path), *argv])
    program.wait_for("ready")
    told = 0

    def connect(where: str) -> None:
        nonlocal told
        with path.open("a") as lines:
            lines.write(where + "\n")
        told += 1
        program.wait_for(rf"(?:.*connected\n){{{told}}}")

    return connect


Ask = Callable[[str], dict[str, Any]]


@contextlib.contextmanager
def asked(service: Service, box: Sandbox, directory: Path, policy: str, **variables: str) -> Iterator[Ask]:
    """Runs a line in a program; the socket that it made, as the service sees it."""
    (directory / "in").write_text("")
    argv = service.run_argv([sys.executable, "-uc", PROGRAM, box.a.address, box.b.address], "none",
                            VMA_CONFIG_FILE=str(directory / "conf"), VMA_HYBRID_TCP=policy, VMA_HYBRID_TCP_ROUNDS="8",
                            VMA_HYBRID_TCP_BUDGET="100", VMA_TRACELEVEL="warn", **variables)
    script = 'tail -f --pid=$$ -n +1 "$0" | exec "$@"'
    program: Program = box.start(box.a, ["sh", "-c", script, str(directory / "in"), *argv], env=service.env)
    answered = 0

    def run(line: str) -> dict[str, Any]:
        nonlocal answered
        with (directory / "in").open("a") as lines:
            lines.write(line + "\n")
        answered += 1
        pid, fd = map(int, program.wait_for(rf"(?:\d+ fd \d+\n){{{answered - 1}}}(\d+) fd (\d+)\n").groups())
        with Client(service.rundir / "api.sock") as client:
            (found,) = [s for s in client.get("v1", "sockets") if (s["pid"], s["fd"]) == (pid, fd)]
        return found

    yield run
    program.stop()


@pytest.fixture
def conf(netns_pair: Sandbox, tmp_path: Path) -> Path:
    here, there = netns_pair.a.address, netns_pair.b.address
    path = tmp_path / "conf"
    path.write_text(CONF.format(here=here, there=there, net=here.rpartition(".")[0] + ".0"))
    return path


ON_RING, KEPT = ("none", True), ("libvma-conf", False)


def verdict(found: dict[str, Any]) -> tuple[str, bool]:
    return found["reason"], found["offloaded"]


@pytest.mark.parametrize(("policy", "inside", "outside"), [("offload", 6150, 6201), ("adaptive", 6151, 6202)])
def test_clients(service: Service, netns_pair: Sandbox, peer: object, conf: Path, policy: str, inside: int,
                 outside: int) -> None:
    """Each run has local ports of its own: the kernel keeps those of the other in TIME_WAIT."""
    with asked(service, netns_pair, conf.parent, policy) as ask:
        ask("client(7409)")  # the first one may be too early for a ring
        assert verdict(ask("client(7409)")) == ON_RING
        assert verdict(ask("client(7400)")) == KEPT
        assert verdict(ask("client(7401)")) == KEPT
        assert verdict(ask("client(7402)")) == ON_RING  # the rule before it says vma
        assert verdict(ask("client(7403)")) == ON_RING  # from any port
        assert verdict(ask(f"client(7403, bound={inside})")) == KEPT
        assert verdict(ask(f"client(7403, bound={outside})")) == ON_RING
        conf.write_text("use os tcp_client *:7409\n")
        assert verdict(ask("client(7409)")) == KEPT
        assert verdict(ask("client(7400)")) == ON_RING
        conf.write_text("use os tcp_client *:7408\nuse os tcp_clint *:*\n")
        assert verdict(ask("client(7408)")) == ON_RING, "a wrong file changes nothing"


def test_clients_over_ipv6(service: Service, netns_pair: Sandbox, peer: object, conf: Path) -> None:
    """IPv4 on an AF_INET6 socket is IPv4; an IPv6 address is 0.0.0.0 to the rules: that is, *."""
    there = netns_pair.b.address
    six, mapped = "fd77::" + there.rpartition(".")[2], f"::ffff:{there}"
    with asked(service, netns_pair, conf.parent, "offload") as ask:
        for address in (six, mapped):
            ask(f"client6({address!r}, 7409)")  # the first one may be too early for a ring
            assert verdict(ask(f"client6({address!r}, 7409)")) == ON_RING
        assert verdict(ask(f"client6({mapped!r}, 7400)")) == KEPT
        assert verdict(ask(f"client6({six!r}, 7400)")) == ON_RING
        assert verdict(ask(f"client6({mapped!r}, 7402)")) == ON_RING
        assert verdict(ask(f"client6({six!r}, 7402)")) == KEPT  # not of the net of the first rule, but of *


def test_the_application_id_chooses_the_group(service: Service, netns_pair: Sandbox, peer: object, conf: Path) -> None:
    rules = conf.read_text().splitlines()
    conf.write_text("\n".join(rules[-2:]) + "\n")
    with asked(service, netns_pair, conf.parent, "offload", VMA_APPLICATION_ID="special") as ask:
        assert verdict(ask("client(7409)")) == KEPT
    with asked(service, netns_pair, conf.parent, "offload") as ask:
        ask("client(7409)")
        assert verdict(ask("client(7409)")) == ON_RING


def test_servers(service: Service, netns_pair: Sandbox, peer: Callable[[str], None], conf: Path) -> None:
    here = netns_pair.a.address
    with asked(service, netns_pair, conf.parent, "offload") as ask:
        assert verdict(ask("server(5110)")) == ON_RING
        peer(f"{here} 5110")
        assert verdict(ask("accepted()")) == ON_RING
        assert verdict(ask("server(5100)")) == KEPT
        peer(f"{here} 5100")
        assert verdict(ask("accepted()")) == KEPT
        assert verdict(ask("server(5111)")) == KEPT
        # bound to all addresses: the one that a connection came to decides
        assert verdict(ask("server(5109, address='')")) == ON_RING
        peer(f"{here} 5109")
        assert verdict(ask("accepted()")) == KEPT
        assert verdict(ask("server(5112, address='')")) == ON_RING
        peer(f"{here} 5112")
        assert verdict(ask("accepted()")) == ON_RING


OWN_POLICIES = """\
use offload tcp_client *:7404
use adaptive tcp_client *:7405
use offload tcp_server *:5120-5129
use adaptive tcp_server *:5130-5139
"""


@pytest.mark.parametrize(("policy", "run"), [("kernel", 0), ("adaptive", 1), ("offload", 2)])
def test_a_rule_has_a_policy_of_its_own(service: Service, netns_pair: Sandbox, peer: Callable[[str], None], conf: Path,
                                        policy: str, run: int) -> None:
    """Of connections and of listeners: from the SYN, or when they are busy; the others follow the program's. Each run
    has ports of its own."""
    opened, busy = "kept.append(socket.create_connection((there, {}))) or kept[-1].fileno()", "rounds(kept[-1])"
    conf.write_text(OWN_POLICIES)
    with asked(service, netns_pair, conf.parent, policy) as ask:
        def rings(port: int) -> tuple[bool, bool]:
            """At once, and when it was busy."""
            return ask(opened.format(port))["offloaded"], ask(busy)["offloaded"]

        ask(opened.format(7404))  # the first one may be too early for a ring
        assert rings(7404) == (True, True)
        assert rings(7405) == (False, True)
        assert rings(7406) == {"kernel": (False, False), "adaptive": (False, True), "offload": (True, True)}[policy]
        for port, at_once in ((5120 + run, True), (5130 + run, False)):
            assert ask(f"server({port})")["offloaded"] == at_once
            peer(f"{netns_pair.a.address} {port}")
            assert ask("kept.append(listener.accept()[0]) or kept[-1].fileno()")["offloaded"] == at_once
            assert ask("kept[-1].recv(1) and rounds(kept[-1])")["offloaded"]
