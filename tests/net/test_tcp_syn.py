"""Connections from the SYN on the ring (VMA_HYBRID_TCP=offload): each scenario is played by two programs on the kernel,
then with the client, the server or both under the shim, and what they see must be the same."""

from __future__ import annotations

import inspect
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from net.service_lab import Api, Peer, under_shim, until
from net.test_tcp_shim import bare_pair, offloaded, over, served, with_ipv6, without_offloads  # noqa: F401

from vmahybrid.bench.sandbox import Sandbox, Side, run_command
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

PROGRAM = Path(__file__).with_name("tcp_calls.py")
WHO = ["client", "server", "both"]
TCP_CLOSE = 7


class Calls(Peer):
    """tcp_calls.py, under the shim or not."""

    def __init__(self, service: Service, side: Side, shim: bool, **variables: str) -> None:
        argv, env = [sys.executable, str(PROGRAM), "6" if ":" in side.address else "4"], dict(service.env)
        if shim:
            argv = under_shim(service, argv, VMA_HYBRID_TCP="offload", VMA_RX_POLL="200", VMA_TRACELEVEL="warning",
                              **variables)
        self.process = subprocess.Popen(side.command(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        bufsize=1, env={**os.environ, **env})
        self.side = side

    def call(self, name: str, method: str, *arguments: Any) -> Any:
        return self.do("call", name=name, method=method, arguments=list(arguments))


def know(sandbox: Sandbox, *ips: str) -> None:
    """The neighbours: what is not resolved yet is the kernel's to connect."""
    for side, other in (sandbox.sides, sandbox.sides[::-1]):
        for ip in ips:
            side.ip("neigh", "replace", over(other, ip).address, "lladdr", other.mac, "dev", side.device,
                    "nud", "permanent")
    time.sleep(0.3)


@pytest.fixture(scope="module", autouse=True)
def known(service: Service, netns_pair: Sandbox) -> None:
    know(netns_pair, "4", "6")


Scenario = Callable[[Calls, Calls, Side], Any]
ON_KERNEL: dict[tuple[object, ...], Any] = {}   # what two programs on it saw, by scenario and what it depends on


def depends_on(scenario: Scenario, *conditions: object) -> tuple[object, ...]:
    """Its name, its parameters (not the objects that it is played with), and the conditions around it."""
    given = inspect.getclosurevars(scenario).nonlocals
    return scenario.__qualname__, *conditions, *((name, value) for name, value in sorted(given.items())
                                                 if isinstance(value, str | int | float))


class Stage:
    def __init__(self, service: Service, sandbox: Sandbox, ip: str = "4", cookies: bool = False) -> None:
        self.service, self.sandbox, self.ip, self.cookies = service, sandbox, ip, cookies
        self.a, self.b = (over(side, ip) for side in sandbox.sides)

    def play(self, scenario: Scenario, who: str) -> Any:
        with Calls(self.service, self.b, who in ("server", "both")) as b, \
                Calls(self.service, self.a, who in ("client", "both")) as a:
            return scenario(a, b, self.b)

    def compare(self, scenario: Scenario, who: str) -> None:
        """The kernel plays it once, for all who and for both kinds of rings: it knows of neither."""
        seen = self.play(scenario, who)
        case = depends_on(scenario, self.ip, self.cookies)
        if seen != ON_KERNEL.get(case):     # the first to ask, or a difference: as on the same machine as busy as now
            ON_KERNEL[case] = self.play(scenario, "nobody")
        assert seen == ON_KERNEL[case]


@pytest.fixture
def stage(service: Service, netns_pair: Sandbox) -> Stage:
    return Stage(service, netns_pair)


def nobody(side: Side, number: int) -> str:
    """An address of nobody in the network of ``side``, with a neighbour that does not exist."""
    near = side.address[:-1] + str(number)
    side.ip("neigh", "replace", near.removeprefix("::ffff:"), "lladdr", f"02:00:00:00:00:{number}", "dev", side.device,
            "nud", "permanent")
    time.sleep(0.3)
    return near


def wildcard(side: Side) -> str:
    return "::" if ":" in side.address else "0.0.0.0"


def listening(b: Calls, to: Side, name: str = "l", **options: Any) -> int:
    """``name`` listens, also on rings: these begin when the program waits for connections."""
    port = int(b.do("listen", name=name, **{"address": to.address, **options}))
    assert b.do("poll", name=name) == []
    return port


def opened(a: Calls, b: Calls, to: Side) -> int:
    """"l" listens, "c" is connected to "s"."""
    port = listening(b, to)
    a.do("new", name="c")
    assert a.call("c", "connect", [to.address, port]) is None
    assert b.do("accept", name="l", new="s") == a.side.address
    return port


@pytest.mark.parametrize("who", WHO)
def test_a_connection(stage: Stage, who: str) -> None:
    def scenario(a: Calls, b: Calls, to: Side) -> Any:
        opened(a, b, to)
        seen = [a.do("poll", name="c"), b.do("poll", name="s"), b.do("poll", name="l"), a.do("state", name="c")]
        seen += [a.call("c", "getpeername") == b.call("s", "getsockname"),
                 a.call("c", "getsockname") == b.call("s", "getpeername")]
        seen += [a.call("c", "send", "question"), b.call("s", "recv", 100), b.call("s", "send", "answer")]
        seen += [a.do("until", name="c", wanted="POLLIN"), a.call("c", "recv", 100), a.do("select", name="c")]
        seen += [b.call("s", "shutdown", 1), a.do("until", name="c", wanted="POLLRDHUP"), a.call("c", "recv", 1)]
        seen += [a.call("c", "send", "more"), b.call("s", "recv", 100)]
        seen += [a.do("except", name="c", seconds=0.05), a.call("c", "shutdown", 1), b.call("s", "recv", 1),
                 a.do("until", name="c", wanted="POLLHUP"), a.do("except", name="c", seconds=0.05)]
        seen += [a.do("close", name="c")]
        return [*seen, b.do("close", name="s"), b.do("close", name="l")]

    stage.compare(scenario, who)
    until(lambda: not offloaded(stage.service))


@pytest.mark.parametrize("who", WHO)
def test_it_is_on_the_ring_without_a_move(stage: Stage, who: str) -> None:
    def scenario(a: Calls, b: Calls, to: Side) -> None:
        before = Api(stage.service).status()["counters"]
        opened(a, b, to)
        pids = {socket["pid"] for socket in until(lambda: offloaded(stage.service))}
        assert pids == {p.pid for p, name in ((a, "client"), (b, "server")) if who in (name, "both")}
        a.call("c", "send", "x")
        assert b.call("s", "recv", 1) == "x"
        after = Api(stage.service).status()["counters"]
        adopted = stage.service.softverbs and who != "client"     # there the kernel listens
        for counter, more in (("tcp_taken_total", int(adopted)), ("tcp_homed_total", 0)):
            assert after.get(counter, 0) == before.get(counter, 0) + more

    stage.play(scenario, who)


@pytest.mark.parametrize("who", WHO)
def test_the_bits_of_congestion_notification_are_not_the_programs(stage: Stage, who: str) -> None:
    def scenario(a: Calls, b: Calls, to: Side) -> Any:
        opened(a, b, to)
        level, option = ("IPPROTO_IPV6", "IPV6_TCLASS") if ":" in to.address else ("IPPROTO_IP", "IP_TOS")
        seen = [a.do("option", name="c", level=level, option=option, value=0xFF),
                b.do("option", name="s", level=level, option=option, value=0xFF)]
        seen += [a.call("c", "send", "x"), b.call("s", "recv", 1), b.call("s", "send", "y"), a.call("c", "recv", 1)]
        return [*seen, a.do("ecn_seen", name="c"), b.do("ecn_seen", name="s")]

    stage.compare(scenario, who)


@pytest.mark.parametrize("who", WHO)
def test_refused(stage: Stage, who: str) -> None:
    def scenario(a: Calls, b: Calls, to: Side) -> Any:
        port = opened(a, b, to)
        b.do("close", name="l")
        a.do("new", name="d")
        seen = [a.call("d", "connect", [to.address, port]), a.call("d", "send", "x") in ("EPIPE", "ENOTCONN")]
        a.do("new", name="n", blocking=False)
        seen += [a.call("n", "connect", [to.address, port]), a.do("until", name="n", wanted="POLLERR"),
                 a.do("option", name="n", level="SOL_SOCKET", option="SO_ERROR"),
                 a.do("option", name="n", level="SOL_SOCKET", option="SO_ERROR")]
        a.do("new", name="n", blocking=False)
        seen += [a.call("n", "connect", [to.address, port]), a.do("until", name="n", wanted="POLLERR"),
                 a.do("option", name="n", level="SOL_SOCKET", option="SO_ERROR", room=1),
                 a.do("option", name="n", level="SOL_SOCKET", option="SO_ERROR")]
        seen += [a.call("n", "connect", [to.address, port])]
        again = listening(b, to)
        seen += [a.call("d", "connect", [to.address, again]), b.do("accept", name="l", new="s2")]
        seen += [a.call("c", "send", "still"), b.call("s", "recv", 9)]
        return seen

    stage.compare(scenario, who)


@pytest.mark.parametrize("who", WHO)
def test_without_blocking(stage: Stage, who: str) -> None:
    def scenario(a: Calls, b: Calls, to: Side) -> Any:
        port = listening(b, to)
        b.call("l", "setblocking", False)
        seen = [b.do("accept", name="l", new="s"), b.do("poll", name="l"), b.do("select", name="l"),
                b.do("epoll", name="l", milliseconds=0)]
        a.do("new", name="c", blocking=False)
        seen += [a.call("c", "connect", [to.address, port]), a.do("until", name="c", wanted="POLLOUT"),
                 a.do("option", name="c", level="SOL_SOCKET", option="SO_ERROR")]
        seen += [a.call("c", "connect", [to.address, port]), a.call("c", "connect", [to.address, port])]
        seen += [b.do("until", name="l", wanted="POLLIN"), b.do("select", name="l"),
                 b.do("epoll", name="l", milliseconds=1000), b.do("accept", name="l", new="s"),
                 b.do("accept", name="l", new="s2"), b.do("poll", name="l")]
        seen += [a.call("c", "recv", 1), a.call("c", "send", "abc"), b.call("s", "recv", 3)]
        return seen

    stage.compare(scenario, who)


@pytest.mark.parametrize("who", WHO)
def test_a_listener_wakes_who_waits(stage: Stage, who: str) -> None:
    def scenario(a: Calls, b: Calls, to: Side) -> Any:
        port = listening(b, to)
        seen = []
        for number, waiting in enumerate(({"what": "accept", "new": "s"}, {"what": "poll", "milliseconds": 3000},
                                          {"what": "epoll", "milliseconds": 3000}, {"what": "select", "seconds": 3})):
            b.do("start", thread="t", name="l", **waiting)
            time.sleep(0.1)
            a.do("new", name="c")
            seen += [a.call("c", "connect", [to.address, port]), b.do("end", thread="t")]
            if number:
                seen.append(b.do("accept", name="l", new="s"))
        return seen

    stage.compare(scenario, who)


@pytest.mark.parametrize("who", ["client", "both"])
def test_nobody_answers(stage: Stage, who: str) -> None:
    """A name that is taken by nobody: a permanent neighbour that does not exist."""
    def scenario(a: Calls, b: Calls, to: Side) -> Any:
        at = [nobody(a.side, 99), 4000]
        a.do("new", name="c")
        seen = [a.do("option", name="c", level="IPPROTO_TCP", option="TCP_SYNCNT", value=1)]
        a.do("start", thread="t", name="c", method="connect", arguments=[at], what="call")
        until(lambda: a.do("state", name="c") != TCP_CLOSE)
        seen += [a.do("state", name="c"), a.do("poll", name="c"), a.call("c", "getpeername")]
        a.do("new", name="n", blocking=False)
        seen += [a.call("n", "connect", at), a.call("n", "connect", at)]
        seen += [a.call("n", "send", "x"), a.call("n", "recv", 1)]
        seen += [a.call("n", "shutdown", 2), a.do("close", name="n")]
        a.do("new", name="d")
        seen += [a.do("timeout", name="d", which="SO_SNDTIMEO", seconds=0.3), a.call("d", "connect", at)]
        a.do("new", name="i")
        seen += [a.do("interrupted", name="i", method="connect", arguments=[at], restart=False, after=0.2)]
        a.do("new", name="u", blocking=False)
        seen += [a.call("u", "connect", at), a.do("connect_unspec", name="u")]
        a.do("new", name="g", blocking=False)
        seen += [a.call("g", "connect", at), a.call("g", "setblocking", True)]
        seen += [a.do("timeout", name="g", which="SO_SNDTIMEO", seconds=0.3), a.call("g", "connect", at)]
        begun = time.monotonic()
        seen += [a.do("linger", name="g", seconds=2), a.do("close", name="g"), time.monotonic() - begun < 1]
        seen += [a.do("end", thread="t", seconds=6)]
        return seen

    stage.compare(scenario, who)


@pytest.mark.parametrize("who", ["client", "both"])
@pytest.mark.parametrize("how", ["shutdown", "close"])
def test_given_up_by_another_thread(stage: Stage, who: str, how: str) -> None:
    def scenario(a: Calls, b: Calls, to: Side) -> Any:
        at = [nobody(a.side, 98), 4000]
        a.do("new", name="c")
        a.do("timeout", name="c", which="SO_SNDTIMEO", seconds=1)
        a.do("start", thread="t", name="c", method="connect", arguments=[at], what="call")
        until(lambda: a.do("state", name="c") != TCP_CLOSE)
        if how == "shutdown":
            return [a.call("c", "shutdown", 2), a.do("end", thread="t")]
        return [a.do("close", name="c"), a.do("end", thread="t", seconds=4)]    # it goes on

    stage.compare(scenario, who)


@pytest.mark.parametrize("who", WHO)
def test_given_up_and_tried_again(stage: Stage, who: str) -> None:
    """The name may be the same: a peer that has the first SYN refuses one of another number."""
    def scenario(a: Calls, b: Calls, to: Side) -> Any:
        port, seen = listening(b, to, backlog=100), []
        for _ in range(10):
            a.do("new", name="n", blocking=False)
            a.call("n", "connect", [to.address, port])
            a.do("close", name="n")
            a.do("new", name="c")
            seen.append(a.call("c", "connect", [to.address, port]))
            a.do("close", name="c")
        return seen

    stage.compare(scenario, who)


@pytest.mark.parametrize("who", WHO)
def test_addresses_in_use(stage: Stage, who: str) -> None:
    def scenario(a: Calls, b: Calls, to: Side) -> Any:
        port = opened(a, b, to)
        seen = [b.do("listen", name="l2", address=to.address, port=port), b.do("listen", name="l3",
                                                                                address=wildcard(to), port=port)]
        own = a.call("c", "getsockname")
        seen += [a.do("listen", name="x", address=own[0], port=own[1], reuse=False)]
        b.do("close", name="l")
        seen += [b.do("listen", name="l", address=to.address, port=port) == port]
        a.do("new", name="d")
        seen += [a.call("d", "connect", [to.address, port]), b.do("accept", name="l", new="s2")]
        seen += [a.call("c", "send", "x"), b.call("s", "recv", 1)]
        return [*seen, a.call("d", "send", "y"), b.call("s2", "recv", 1)]

    stage.compare(scenario, who)


@pytest.mark.parametrize("who", WHO)
def test_resets(stage: Stage, who: str) -> None:
    def scenario(a: Calls, b: Calls, to: Side) -> Any:
        port = opened(a, b, to)
        seen = [a.do("linger", name="c", seconds=0), a.do("close", name="c"), b.do("until", name="s", wanted="POLLHUP"),
                b.call("s", "recv", 1), b.call("s", "recv", 1), b.call("s", "send", "x")]
        a.do("new", name="c")
        seen += [a.call("c", "connect", [to.address, port]), b.do("accept", name="l", new="s")]
        seen += [b.call("s", "send", "unread"), a.do("until", name="c", wanted="POLLIN"), a.do("close", name="c")]
        seen += [b.do("until", name="s", wanted="POLLHUP"), b.call("s", "recv", 1)]
        a.do("new", name="c")
        seen += [a.call("c", "connect", [to.address, port])]
        b.do("until", name="l", wanted="POLLIN")
        seen += [b.do("close", name="l"), a.do("until", name="c", wanted="POLLHUP"), a.call("c", "recv", 1)]
        return seen

    stage.compare(scenario, who)


@pytest.mark.parametrize("who", WHO)
def test_lingering(stage: Stage, who: str) -> None:
    """Close waits until the peer has everything: here it does not read, and its window is small."""
    def scenario(a: Calls, b: Calls, to: Side) -> Any:
        port = listening(b, to)
        b.do("option", name="l", level="SOL_SOCKET", option="SO_RCVBUF", value=4096)
        a.do("new", name="c")
        a.call("c", "connect", [to.address, port])
        b.do("accept", name="l", new="s")
        a.do("linger", name="c", seconds=1)
        a.call("c", "send", "x" * 40000)    # what the kernel's send buffer holds in any case
        a.do("start", thread="t", name="c", what="close")
        slow = [a.do("end", thread="t", seconds=3), 0.8 < a.do("took", thread="t") < 1.6]
        a.do("new", name="c")
        a.call("c", "connect", [to.address, port])
        b.do("accept", name="l", new="s")
        a.do("linger", name="c", seconds=2)
        a.call("c", "send", "x" * 100)
        a.do("start", thread="t", name="c", what="close")
        return [*slow, a.do("end", thread="t", seconds=3), a.do("took", thread="t") < 1, b.call("s", "recv", 200)]

    stage.compare(scenario, who)


@pytest.mark.parametrize("who", WHO)
def test_options(stage: Stage, who: str) -> None:
    def scenario(a: Calls, b: Calls, to: Side) -> Any:
        opened(a, b, to)
        seen = []
        for p, name in ((a, "c"), (b, "s")):
            for level, option, value in (("IPPROTO_TCP", "TCP_NODELAY", 1), ("SOL_SOCKET", "SO_KEEPALIVE", 1),
                                         ("IPPROTO_TCP", "TCP_KEEPIDLE", 7), ("IPPROTO_IP", "IP_TOS", 16),
                                         ("IPPROTO_IPV6", "IPV6_TCLASS", 32), ("IPPROTO_IPV6", "IPV6_UNICAST_HOPS", 9),
                                         ("IPPROTO_IPV6", "IPV6_V6ONLY", 0)):
                p.do("option", name=name, level=level, option=option, value=value)
                seen.append(p.do("option", name=name, level=level, option=option))
            seen.append(p.do("option", name=name, level="SOL_SOCKET", option="SO_TYPE"))
            seen.append(p.do("option", name=name, level="SOL_SOCKET", option="SO_ERROR"))
            seen.append(p.do("state", name=name))
        return [*seen, b.do("timeout", name="s", which="SO_RCVTIMEO", seconds=0.2), b.call("s", "recv", 1),
                b.do("timeout", name="l", which="SO_RCVTIMEO", seconds=0.2), b.do("accept", name="l", new="x")]

    stage.compare(scenario, who)


INHERITED = [("IPPROTO_TCP", "TCP_NODELAY", 1), ("SOL_SOCKET", "SO_KEEPALIVE", 1), ("IPPROTO_TCP", "TCP_KEEPIDLE", 33),
             ("IPPROTO_TCP", "TCP_KEEPINTVL", 3), ("IPPROTO_TCP", "TCP_KEEPCNT", 4),
             ("IPPROTO_TCP", "TCP_USER_TIMEOUT", 3300), ("IPPROTO_TCP", "TCP_SYNCNT", 3),
             ("SOL_SOCKET", "SO_RCVBUF", 33333), ("SOL_SOCKET", "SO_SNDBUF", 44444), ("SOL_SOCKET", "SO_BROADCAST", 1),
             ("SOL_SOCKET", "SO_PRIORITY", 3), ("IPPROTO_IP", "IP_TOS", 16), ("IPPROTO_IP", "IP_TTL", 9),
             ("IPPROTO_IPV6", "IPV6_TCLASS", 32), ("IPPROTO_IPV6", "IPV6_UNICAST_HOPS", 9)]


@pytest.mark.parametrize("late", [False, True], ids=["before", "while it listens on rings"])
@pytest.mark.parametrize("ip", ["4", "6", "mapped"])
def test_options_of_the_listener(service: Service, netns_pair: Sandbox, ip: str, late: bool) -> None:
    """A connection has them, on the ring and at home."""
    def scenario(a: Calls, b: Calls, to: Side) -> Any:
        def give() -> None:
            for level, option, value in INHERITED:
                b.do("option", name="l", level=level, option=option, value=value)
            b.do("linger", name="l", seconds=3)
            b.do("timeout", name="l", which="SO_RCVTIMEO", seconds=0.08)
            b.do("timeout", name="l", which="SO_SNDTIMEO", seconds=0.12)

        def has() -> list[Any]:
            names = [(level, option) for level, option, _ in INHERITED]
            names += [("SOL_SOCKET", "SO_LINGER"), ("SOL_SOCKET", "SO_RCVTIMEO"), ("SOL_SOCKET", "SO_SNDTIMEO"),
                      ("SOL_SOCKET", "SO_REUSEADDR"), ("IPPROTO_IPV6", "IPV6_V6ONLY")]
            return [(option, b.do("option", name="s", level=level, option=option)) for level, option in names]

        port = int(b.do("listen", name="l", address=to.address))
        if not late:
            give()
        b.do("poll", name="l")
        if late:
            give()
        a.do("new", name="c")
        a.call("c", "connect", [to.address, port])
        b.do("accept", name="l", new="s")
        here = has()
        b.do("dup", name="s", new="home")
        return here, has(), b.call("s", "recv", 1)

    Stage(service, netns_pair, ip).compare(scenario, "server")


@pytest.mark.parametrize("who", WHO)
def test_interrupted_accept(stage: Stage, who: str) -> None:
    def scenario(a: Calls, b: Calls, to: Side) -> Any:
        b.do("listen", name="l", address=to.address)
        return b.do("interrupted", name="l", method="accept", arguments=[], restart=False, after=0.2)

    stage.compare(scenario, who)


@pytest.mark.parametrize("who", WHO)
def test_backlog(stage: Stage, who: str) -> None:
    """More connections than are accepted: those beyond the backlog do not come to be until there is room."""
    def scenario(a: Calls, b: Calls, to: Side) -> Any:
        port = listening(b, to, backlog=2)
        for i in range(6):
            a.do("new", name=f"c{i}", blocking=False)
            a.call(f"c{i}", "connect", [to.address, port])
            time.sleep(0.05)
        time.sleep(0.3)
        b.call("l", "setblocking", False)
        accepted = [b.do("accept", name="l", new=f"s{i}") for i in range(4)]
        return [a.do("poll", name=f"c{i}") for i in range(3)], accepted

    stage.compare(scenario, who)


SYNS = """
import socket, struct, sys, time
device, mac, to, *ports = sys.argv[1], bytes.fromhex(sys.argv[2].replace(":", "")), *sys.argv[3:]
own, us, them = bytes.fromhex("020000000009"), *(socket.inet_aton(a) for a in (to[:-1] + "99", to))
wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x800))
wire.bind((device, 0))
wire.settimeout(0.1)
wire.setsockopt(socket.SOL_SOCKET, 33, 1 << 22)   # SO_RCVBUFFORCE
def sum16(data):
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total & 0xffff) + (total >> 16)
    return struct.pack("!H", ~(total + (total >> 16)) & 0xffff)
for port in ports:
    for number in range(40):
        tcp = struct.pack("!HHIIBBHHHBBH", 3000 + number, int(port), 1000, 0, 6 << 4, 2, 65535, 0, 0, 2, 4, 1460)
        tcp = tcp[:16] + sum16(us + them + struct.pack("!HH", 6, len(tcp)) + tcp) + tcp[18:]
        head = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(tcp), number, 0, 64, 6, 0, us, them)
        wire.send(mac + own + b"\\x08\\0" + head[:10] + sum16(head) + head[12:] + tcp)
answered, end = {port: set() for port in ports}, time.monotonic() + 0.5
while time.monotonic() < end:
    try:
        frame = wire.recv(2000)
    except TimeoutError:
        continue
    port, number = (str(of) for of in struct.unpack("!HH", frame[34:38]))
    if frame[23] == 6 and frame[47] == 0x12 and port in answered:
        answered[port].add(number)
print(*(len(numbers) for numbers in answered.values()))
"""


@pytest.mark.parametrize("cookies", [0, 1])
def test_so_many_are_half_open(stage: Stage, cookies: int) -> None:
    """40 SYNs at once, of peers that go no further: without cookies one more than the backlog is answered, else all."""
    def scenario(a: Calls, b: Calls, to: Side) -> Any:
        ports = [str(listening(b, to, name=f"l{backlog}", backlog=backlog)) for backlog in (0, 1, 2, 5, 20)]
        nobody(b.side, 99)
        argv = [sys.executable, "-c", SYNS, a.side.device, to.mac, to.address, *ports]
        return run_command(*a.side.command(argv)).split()

    run_command(*stage.sandbox.b.command(["sysctl", "-qw", f"net.ipv4.tcp_syncookies={cookies}"]))
    try:
        stage.compare(scenario, "server")
    finally:
        run_command(*stage.sandbox.b.command(["sysctl", "-qw", "net.ipv4.tcp_syncookies=1"]))


def ring_and_kernel(stage: Stage, who: str, own: bool) -> None:
    def scenario(a: Calls, b: Calls, to: Side) -> Any:
        port = listening(b, to, address=wildcard(to))
        b.side.ip("link", "set", "lo", "up")
        here = to.address[:-len("10.77.0.2")] + "127.0.0.1" if "." in to.address else "::1"
        here = to.address if own else here
        b.do("new", name="local")
        a.do("new", name="far")
        seen = [b.call("local", "connect", [here, port]), b.do("accept", name="l", new="s1")]
        seen += [a.call("far", "connect", [to.address, port]), b.do("accept", name="l", new="s2") == a.side.address]
        seen += [b.call("local", "send", "near"), b.call("s1", "recv", 9), a.call("far", "send", "far"),
                 b.call("s2", "recv", 9)]
        return seen

    stage.compare(scenario, who)


@pytest.mark.parametrize("who", WHO)
def test_a_listener_of_ring_and_kernel(stage: Stage, who: str) -> None:
    """A wildcard listener gets connections by the ring and by the loopback interface."""
    ring_and_kernel(stage, who, False)


@pytest.mark.parametrize("who", WHO)
def test_to_its_own_address(stage: Stage, who: str) -> None:
    """The kernel has what goes from an address of the ring's to itself."""
    ring_and_kernel(stage, who, True)


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("what", ["dup", "fork"])
def test_going_home(stage: Stage, who: str, what: str) -> None:
    """With unread and unacknowledged bytes; a connection that waits to be accepted as well."""
    def scenario(a: Calls, b: Calls, to: Side) -> Any:
        port = opened(a, b, to)
        a.do("new", name="waiting")
        seen = [a.call("waiting", "connect", [to.address, port]), a.call("waiting", "send", "early")]
        seen += [a.call("c", "send", "to b"), b.call("s", "send", "to a"), a.do("until", name="c", wanted="POLLIN")]
        for p, name in ((a, "c"), (b, "s")):
            if what == "dup":
                p.do("dup", name=name, new="d")
            else:
                seen.append(p.do("fork", name=name, method="getpeername") == p.call(name, "getpeername"))
        seen += [a.call("c", "recv", 9), b.call("s", "recv", 9), a.call("c", "send", "x"), b.call("s", "recv", 1)]
        seen += [b.call("s", "send", "y"), a.call("c", "recv", 1), b.do("accept", name="l", new="w")]
        seen += [b.call("w", "recv", 9), b.call("w", "send", "late"), a.call("waiting", "recv", 9)]
        a.do("new", name="n")
        seen += [a.call("n", "connect", [to.address, port]), b.do("accept", name="l", new="m")]
        seen += [a.call("n", "send", "z"), b.call("m", "recv", 1)]
        return seen

    stage.compare(scenario, who)


@pytest.mark.parametrize("who", WHO)
def test_nothing_is_left_to_send(stage: Stage, who: str) -> None:
    """Where the end goes with data that was held back."""
    def scenario(a: Calls, b: Calls, to: Side) -> Any:
        opened(a, b, to)
        seen = [a.do("option", name="c", level="IPPROTO_TCP", option="TCP_NODELAY", value=0)]
        seen += [a.call("c", "send", "x"), a.call("c", "send", "y"), a.call("c", "send", "z")]
        seen += [a.call("c", "shutdown", 1), b.call("s", "recv", 3, socket.MSG_WAITALL), b.call("s", "recv", 1)]
        time.sleep(0.2)
        seen += [a.do("outq", name="c"), b.do("close", name="s"), a.do("until", name="c", wanted="POLLHUP")]
        return [*seen, a.do("outq", name="c")]

    stage.compare(scenario, who)


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("what", ["fork", "dup", "unspec"])
def test_going_home_after_a_refusal(stage: Stage, who: str, what: str) -> None:
    """The kernel socket has a name that connect() has left there."""
    def scenario(a: Calls, b: Calls, to: Side) -> Any:
        port, seen = listening(b, to), []
        own = {"4": "127.0.0.1", "6": "::1", "mapped": "::ffff:127.0.0.1"}[stage.ip]
        for name, first in (("c", [own, 9]), ("d", [to.address, 9])):
            a.do("new", name=name)
            seen += [a.call(name, "connect", first), a.call(name, "connect", first)]
            seen += [a.call(name, "connect", [to.address, port]), b.do("accept", name="l", new="s")]
            seen += [a.call(name, "send", "x"), b.call("s", "recv", 1)]
            if what == "fork":
                seen += [a.do("fork", name=name, method="send", arguments=["of the child"]), b.call("s", "recv", 20)]
            elif what == "dup":
                a.do("dup", name=name, new="other")
                seen += [a.call("other", "send", "of the other"), b.call("s", "recv", 20)]
            else:
                seen += [a.do("connect_unspec", name=name), a.call(name, "connect", [to.address, port]),
                         b.do("accept", name="l", new="s")]
            seen += [b.call("s", "send", "y"), a.call(name, "recv", 1)]
        return seen

    stage.compare(scenario, who)


# where a socket may be bound, and IPV6_V6ONLY, -1: as it is
OTHERS = {"4": [("0.0.0.0", -1), ("127.0.0.1", -1)],
          "6": [("::", 0), ("::", 1), ("::ffff:0.0.0.0", 0), ("::1", -1), ("::ffff:127.0.0.1", -1)]}


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("state", ["established", "peer closed", "FIN_WAIT", "TIME_WAIT"])
@pytest.mark.parametrize("reuse", [False, True], ids=["without", "SO_REUSEADDR"])
def test_the_port_of_connections(stage: Stage, who: str, state: str, reuse: bool) -> None:
    """Of a listener that is closed. A socket may be bound there if both have SO_REUSEADDR, or by another address."""
    def scenario(a: Calls, b: Calls, to: Side) -> Any:
        port = listening(b, to, reuse=reuse)
        a.do("new", name="c")
        seen = [a.call("c", "connect", [to.address, port]), b.do("accept", name="l", new="s"), b.do("close", name="l")]
        if state == "peer closed":
            seen += [a.do("close", name="c"), b.call("s", "recv", 1)]
        elif state != "established":
            seen += [b.do("close", name="s"), a.call("c", "recv", 1)]
        if state == "TIME_WAIT":
            seen += [a.do("close", name="c")]
        time.sleep(0.2)
        for address, only_v6 in OTHERS["4" if stage.ip == "4" else "6"] + [(to.address, -1)]:
            for own in (False, True):
                got = b.do("listen", name="x", address=address, port=port, reuse=own, only_v6=only_v6)
                seen += [(address, only_v6, own, got == port or got), b.do("close", name="x")]
        return seen

    stage.compare(scenario, who)


@pytest.mark.parametrize("who", ["server", "both"])
def test_a_server_that_is_started_again(stage: Stage, who: str) -> None:
    """It has SO_REUSEADDR, and so have its connections: one that went home and is in TIME_WAIT is not in the way."""
    def scenario(a: Calls, b: Calls, to: Side) -> Any:
        port = opened(a, b, to)
        seen = [b.do("option", name="s", level="SOL_SOCKET", option="SO_REUSEADDR")]
        b.do("fork", name="s", method="getpeername")
        seen += [b.do("close", name="s"), a.call("c", "recv", 1), a.do("close", name="c"), b.do("close", name="l")]
        time.sleep(0.1)
        return [*seen, b.do("listen", name="l", address=to.address, port=port) == port]

    stage.compare(scenario, who)


@pytest.mark.parametrize("who", WHO)
def test_visits(stage: Stage, who: str) -> None:
    """Connections one after another, closed by the client, without a leak of descriptors."""
    def scenario(a: Calls, b: Calls, to: Side) -> Any:
        port = listening(b, to, backlog=128)
        b.do("serve", name="l")
        count = 100 if stage.service.softverbs and who != "client" else 1500     # each one is adopted, and goes home
        a.do("visits", address=to.address, port=port, count=50)
        time.sleep(2.5)  # kernel sockets that were kept for the next connection are closed
        before = a.do("fds"), b.do("fds")
        assert a.do("visits", 40, address=to.address, port=port, count=count) == count
        time.sleep(2.5)
        assert max(now - then for now, then in zip((a.do("fds"), b.do("fds")), before, strict=True)) < 3

    stage.play(scenario, who)


def test_connect_again_while_the_kernel_connects(stage: Stage) -> None:
    """It began there since the neighbour was not known; that it is known meanwhile changes nothing."""
    def scenario(a: Calls, b: Calls, to: Side) -> Any:
        near = to.address[:-1] + "77"
        a.side.ip("neigh", "flush", "to", near)
        a.do("new", name="c", blocking=False)
        seen = [a.call("c", "connect", [near, 4000])]
        assert nobody(a.side, 77) == near
        seen += [a.call("c", "connect", [near, 4000]) for _ in range(3)]
        seen += [a.do("state", name="c"), a.call("c", "connect", [near, 4000])]
        a.side.ip("neigh", "del", near, "dev", a.side.device)
        return seen

    stage.compare(scenario, "client")


@pytest.mark.parametrize("who", WHO)
def test_many_at_a_time(stage: Stage, who: str) -> None:
    def scenario(a: Calls, b: Calls, to: Side) -> Any:
        port = listening(b, to, backlog=256)
        seen = [a.do("many", 20, address=to.address, port=port, count=150)]
        for i in range(150):
            b.do("accept", name="l", new=f"s{i}")
            seen.append(b.call(f"s{i}", "send", f"{i}"))
        return seen, [a.call(f"many{i}", "recv", 9) for i in range(150)]

    stage.compare(scenario, who)


def test_more_at_a_time_than_ports_are_held_ahead(stage: Stage) -> None:
    """Each from its SYN still: a rule for its local port."""
    count = 300

    def scenario(a: Calls, b: Calls, to: Side) -> Any:
        port = listening(b, to, backlog=512)
        a.do("many", 20, address=to.address, port=port, count=count)
        rules = [flow for flow in stage.service.ring_flows(a.pid) if flow["kind"] == "3-tuple"]
        for i in range(count):
            b.do("accept", name="l", new=f"s{i}")
            b.call(f"s{i}", "send", f"{i}")
        return len(rules), [a.call(f"many{i}", "recv", 9) for i in range(count)]

    rules, answers = stage.play(scenario, "client")
    assert rules >= count
    assert answers == [str(i) for i in range(count)]


@pytest.mark.parametrize("who", WHO)
def test_bulk(stage: Stage, who: str) -> None:
    def scenario(a: Calls, b: Calls, to: Side) -> Any:
        opened(a, b, to)
        b.do("start", thread="t", name="s", what="echo")
        seen = a.do("bulk", 30, name="c", size=2_000_000), a.call("c", "shutdown", 1)
        return *seen, b.do("end", thread="t", seconds=5)

    stage.compare(scenario, who)


@pytest.mark.parametrize("who", WHO)
def test_the_program_ends(stage: Stage, who: str) -> None:
    """What was sent arrives, and an end of the stream, as the kernel does it."""
    def scenario(a: Calls, b: Calls, to: Side) -> Any:
        opened(a, b, to)
        a.call("c", "send", "last words")
        a.close()
        return b.call("s", "recv", 10), b.call("s", "recv", 1)

    stage.compare(scenario, who)


@pytest.mark.parametrize("who", WHO)
def test_the_server_ends(stage: Stage, who: str) -> None:
    def scenario(a: Calls, b: Calls, to: Side) -> Any:
        opened(a, b, to)
        b.call("s", "send", "last words")
        b.close()
        return a.call("c", "recv", 10), a.call("c", "recv", 1)

    stage.compare(scenario, who)


@pytest.mark.parametrize("who", WHO)
def test_it_closes_with_the_peer_still_sending(stage: Stage, who: str) -> None:
    def scenario(a: Calls, b: Calls, to: Side) -> Any:
        opened(a, b, to)
        a.call("c", "shutdown", 1)
        seen = [b.call("s", "recv", 1), b.call("s", "send", "half"), a.call("c", "recv", 4)]
        a.do("close", name="c")
        b.call("s", "send", "nobody reads it")
        return [*seen, b.do("until", name="s", wanted="POLLERR")]

    stage.compare(scenario, who)


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("how", ["waits", "uncorked", "shutdown", "nodelay", "more"])
def test_the_rest_of_a_cork(stage: Stage, who: str, how: str) -> None:
    """Less than a segment stays for 200 ms, though all before it is acknowledged; after MSG_MORE it goes with that."""
    def scenario(a: Calls, b: Calls, to: Side) -> Any:
        opened(a, b, to)
        if how != "more":
            a.do("option", name="c", level="IPPROTO_TCP", option="TCP_CORK", value=1)
        seen = [a.call("c", "send", "x" * 2000, int(socket.MSG_MORE) if how == "more" else 0)]
        time.sleep(0.1)
        seen += [len(b.call("s", "recv", 5000, socket.MSG_DONTWAIT)) == 2000]
        if how in ("uncorked", "nodelay"):
            a.do("option", name="c", level="IPPROTO_TCP", option="TCP_CORK" if how == "uncorked" else "TCP_NODELAY",
                 value=int(how == "nodelay"))
        elif how == "shutdown":
            a.call("c", "shutdown", socket.SHUT_WR)
        begin = time.monotonic()
        if how != "more":
            seen += [len(b.call("s", "recv", 5000)) < 2000]
        return [*seen, time.monotonic() - begin < 0.05]

    stage.compare(scenario, who)


@pytest.mark.parametrize("who", WHO)
def test_an_orphan_asks_nothing(stage: Stage, who: str) -> None:
    """It has closed, the peer has not: no keepalive, whatever the socket had."""
    def scenario(a: Calls, b: Calls, to: Side) -> Any:
        opened(a, b, to)
        for option in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT"):
            a.do("option", name="c", level="IPPROTO_TCP", option=option, value=1)
        a.do("option", name="c", level="SOL_SOCKET", option="SO_KEEPALIVE", value=1)
        a.do("close", name="c")
        seen = [b.call("s", "recv", 10)]
        time.sleep(0.3)
        before = b.do("segments_in", name="s")
        time.sleep(2.5)
        return [*seen, b.do("segments_in", name="s") - before]

    stage.compare(scenario, who)


@pytest.mark.parametrize("who", WHO)
def test_a_program_that_leaves_by_exit(stage: Stage, who: str) -> None:
    """_exit(2) runs no destructor; the peer gets all, and the end."""
    def scenario(a: Calls, b: Calls, to: Side) -> Any:
        opened(a, b, to)
        a.do("start", thread="t", name="c", data="x" * 5000, what="leave")
        got = 0
        while part := b.call("s", "recv", 10000):
            assert part.strip("x") == ""
            got += len(part)
        return got

    stage.compare(scenario, who)


SAME = [test_a_connection, test_it_is_on_the_ring_without_a_move, test_refused, test_without_blocking,
        test_a_listener_wakes_who_waits, test_addresses_in_use, test_resets, test_options,
        test_a_listener_of_ring_and_kernel, test_many_at_a_time, test_bulk, test_the_program_ends,
        test_it_closes_with_the_peer_still_sending]


@pytest.mark.parametrize(("ip", "who"), [*(("6", who) for who in WHO), ("mapped", "both")])
@pytest.mark.parametrize("test", SAME, ids=lambda test: str(test.__name__))
def test_over_ipv6(service: Service, netns_pair: Sandbox, test: Callable[[Stage, str], None], ip: str,
                   who: str) -> None:
    test(Stage(service, netns_pair, ip), who)


def test_visits_over_ipv6(service: Service, netns_pair: Sandbox) -> None:
    test_visits(Stage(service, netns_pair, "6"), "both")


@pytest.fixture
def cookies_always(netns_pair: Sandbox) -> Iterator[None]:
    for value in (2, 1):
        for side in netns_pair.sides:
            run_command(*side.command(["sysctl", "-qw", f"net.ipv4.tcp_syncookies={value}"]))
        if value == 2:
            yield


@pytest.mark.usefixtures("cookies_always")
@pytest.mark.parametrize(("ip", "who"), [*(("4", who) for who in WHO), ("6", "both")])
@pytest.mark.parametrize("test", [test_addresses_in_use, test_a_listener_of_ring_and_kernel, test_many_at_a_time],
                         ids=lambda test: str(test.__name__))
def test_with_a_cookie_for_each(service: Service, netns_pair: Sandbox, test: Callable[[Stage, str], None], ip: str,
                                who: str) -> None:
    """The kernel's are answered when its port has come to a ring, and the ring's when it is the kernel's again."""
    test(Stage(service, netns_pair, ip, cookies=True), who)


@pytest.mark.parametrize("state", ["established", "TIME_WAIT"])
@pytest.mark.parametrize("ip", ["6", "mapped"])
def test_the_port_of_connections_over_ipv6(service: Service, netns_pair: Sandbox, ip: str, state: str) -> None:
    test_the_port_of_connections(Stage(service, netns_pair, ip), "server", state, False)
    test_the_port_of_connections(Stage(service, netns_pair, ip), "server", state, True)


@pytest.mark.parametrize("what", ["dup", "fork"])
@pytest.mark.parametrize("ip", ["6", "mapped"])
def test_going_home_over_ipv6(service: Service, netns_pair: Sandbox, ip: str, what: str) -> None:
    test_going_home(Stage(service, netns_pair, ip), "both", what)


@pytest.mark.parametrize("what", ["fork", "dup", "unspec"])
@pytest.mark.parametrize("ip", ["6", "mapped"])
def test_going_home_after_a_refusal_over_ipv6(service: Service, netns_pair: Sandbox, ip: str, what: str) -> None:
    test_going_home_after_a_refusal(Stage(service, netns_pair, ip), "both", what)


@pytest.mark.parametrize("who", ["client", "both"])
def test_nobody_answers_over_ipv6(service: Service, netns_pair: Sandbox, who: str) -> None:
    test_nobody_answers(Stage(service, netns_pair, "6"), who)


@pytest.mark.parametrize("only", [0, 1])
@pytest.mark.parametrize("who", WHO)
def test_a_listener_of_both_families(service: Service, netns_pair: Sandbox, who: str, only: int) -> None:
    """On ::, with and without IPV6_V6ONLY: an IPv4 client is let in, or refused."""
    four = netns_pair.b

    def scenario(a: Calls, b: Calls, to: Side) -> Any:
        seen = [b.do("listen", name="l", address="::", only_v6=only) > 0, b.do("poll", name="l")]
        port = b.call("l", "getsockname")[1]
        with Calls(service, netns_pair.a, who != "server") as old:
            old.do("new", name="c")
            seen += [old.call("c", "connect", [four.address, port])]
            if not only:
                seen += [b.do("accept", name="l", new="s"), b.call("s", "getsockname")[0]]
                seen += [old.call("c", "send", "four"), b.call("s", "recv", 9)]
        a.do("new", name="c")
        seen += [a.call("c", "connect", [to.address, port]), b.do("accept", name="l", new="s6")]
        return [*seen, a.call("c", "send", "six"), b.call("s6", "recv", 9)]

    Stage(service, netns_pair, "6").compare(scenario, who)


@pytest.mark.parametrize("only", [0, 1])
@pytest.mark.parametrize("bound", [False, True], ids=["from the SYN", "adopted"])
def test_only_v6_stays(service: Service, netns_pair: Sandbox, bound: bool, only: int) -> None:
    """The service binds the kernel socket on the way home, and that sets IPV6_V6ONLY."""
    def scenario(a: Calls, b: Calls, to: Side) -> Any:
        def is_only() -> Any:
            return [p.do("option", name=name, level="IPPROTO_IPV6", option="IPV6_V6ONLY")
                    for p, name in ((a, "c"), (b, "s"))]

        port = listening(b, to, address="::", only_v6=only)
        a.do("new", name="c")
        a.do("option", name="c", level="IPPROTO_IPV6", option="IPV6_V6ONLY", value=only)
        if bound:
            a.call("c", "bind", ["::", 0])
        seen = [a.call("c", "connect", [to.address, port]), b.do("accept", name="l", new="s"), is_only()]
        a.do("dup", name="c", new="d")
        b.do("dup", name="s", new="d")
        return [*seen, is_only()]

    Stage(service, netns_pair, "6").compare(scenario, "both")


@pytest.mark.parametrize("who", WHO)
def test_link_local_addresses_are_the_kernels(service: Service, netns_pair: Sandbox, who: str) -> None:
    def link_local(side: Side) -> str:
        found = until(lambda: [word for word in side.ip("-6", "address", "show", "dev", side.device, "scope", "link",
                                                        "-tentative").split() if word.startswith("fe80:")])
        return str(found[0]).partition("/")[0]

    def scenario(a: Calls, b: Calls, to: Side) -> Any:
        scope = [int(p.side.ip("-o", "link", "show", "dev", p.side.device).partition(":")[0]) for p in (a, b)]
        port = listening(b, to, address="::")
        a.do("new", name="c")
        seen = [a.call("c", "connect", [link_local(to), port, 0, scope[0]]),
                b.do("accept", name="l", new="s").partition("%")[0] == link_local(a.side)]
        seen += [a.call("c", "getpeername")[3] == scope[0], b.call("s", "getpeername")[3] == scope[1]]
        return [*seen, a.call("c", "send", "x"), b.call("s", "recv", 1), len(offloaded(service))]

    Stage(service, netns_pair, "6").compare(scenario, who)


def test_a_killed_service() -> None:
    """What began on a ring is lost with the rules, and says so; new connections are the kernel's."""
    with Sandbox("kill") as sandbox, Service(without_offloads(sandbox)) as service:
        know(sandbox, "4")
        with Calls(service, sandbox.b, True) as b, Calls(service, sandbox.a, True) as a:
            port = opened(a, b, sandbox.b)
            until(lambda: len(offloaded(service)) == 2)
            service.program.process.kill()
            assert a.do("until", name="c", wanted="POLLERR") and a.call("c", "recv", 1) == "ECONNRESET"
            assert b.do("until", name="s", wanted="POLLERR") and b.call("s", "send", "x") == "ECONNRESET"
            a.do("new", name="d")
            assert a.call("d", "connect", [sandbox.b.address, port]) is None
            assert b.do("accept", name="l", new="s2") == sandbox.a.address
            assert a.call("d", "send", "x") == 1
            assert b.call("s2", "recv", 1) == "x"
            service.start()


def test_a_service_that_stops(softverbs: bool) -> None:
    """All go home before: nothing is lost, also of a connection that nobody has accepted."""
    with Sandbox("stop") as sandbox, Service(without_offloads(sandbox), softverbs=softverbs) as service:
        know(sandbox, "4")
        with Calls(service, sandbox.b, True) as b, Calls(service, sandbox.a, True) as a:
            port = opened(a, b, sandbox.b)
            a.do("new", name="w")
            assert a.call("w", "connect", [sandbox.b.address, port]) is None
            assert a.call("w", "send", "early") == 5
            assert a.call("c", "send", "before") == 6
            until(lambda: len(offloaded(service)) == 3)
            service.stop()
            assert b.call("s", "recv", 9) == "before"
            assert b.do("accept", name="l", new="x") == sandbox.a.address
            assert b.call("x", "recv", 9) == "early"
            assert b.call("s", "send", "after") == 5
            assert a.call("c", "recv", 9) == "after"
            assert a.do("close", name="c") is None
            assert b.call("s", "recv", 1) == ""
