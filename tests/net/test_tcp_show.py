"""Connections that began on a ring, in the kernel's list: `ss` shows those that have lived for a moment, with their
owner, and nothing else changes."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from net.service_lab import Api, counter, until
from net.test_tcp_shim import introduce, without_offloads
from net.test_tcp_syn import Calls, listening, opened

from vmahybrid.bench.sandbox import Sandbox, Side
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Sandbox("test") as sandbox, Service(without_offloads(sandbox)) as running:
        introduce(sandbox)
        yield running


def ss(side: Side) -> list[tuple[str, str, int]]:
    """(local, peer, pid) of established connections, as `ss` has them."""
    argv = side.command(["ss", "-Htnp", "state", "established"])
    output = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=10).stdout
    return [(words[2], words[3], int(pid[1]) if (pid := re.search(r"pid=(\d+)", line)) else 0)
            for line in output.splitlines() if (words := line.split())]


def flows(service: Service, pid: int) -> list[dict[str, Any]]:
    found = Api(service).status()["flows"]
    return [flow for flow in found if flow["pid"] == pid and flow["kind"] == "5-tuple"]


def name_of(calls: Calls, name: str, method: str) -> str:
    address, port = calls.call(name, method)
    return f"{address}:{port}"


def shown(service: Service, calls: Calls, name: str) -> None:
    ends = name_of(calls, name, "getsockname"), name_of(calls, name, "getpeername")
    until(lambda: (*ends, calls.pid) in ss(calls.side), 5, lambda: f"{ends}: {ss(calls.side)}")


def talk(a: Calls, b: Calls, count: int = 20) -> None:
    for number in range(count):
        assert a.call("c", "send", f"question {number}") == len(f"question {number}")
        assert b.call("s", "recv", 100) == f"question {number}"
        assert b.call("s", "send", f"answer {number}") == len(f"answer {number}")
        assert a.call("c", "recv", 100) == f"answer {number}"


@pytest.fixture
def both(service: Service) -> Iterator[tuple[Calls, Calls]]:
    """Two programs under the shim; "c" of the first and "s" of the second are connected, and in the kernel's lists."""
    a_side, b_side = service.sandbox.sides
    with Calls(service, b_side, True) as b, Calls(service, a_side, True) as a:
        opened(a, b, b_side)
        talk(a, b)
        shown(service, a, "c")
        shown(service, b, "s")
        yield a, b


def test_ss_and_flows_show_it_and_it_goes_on_by_the_ring(service: Service, both: tuple[Calls, Calls]) -> None:
    a, b = both
    ring, homed = counter(service, "tcp_taken_total"), counter(service, "tcp_homed_total")
    for calls, name in ((a, "c"), (b, "s")):
        [flow] = flows(service, calls.pid)
        assert (flow["action"], flow["proto"]) == ("ring", "tcp")
        assert (flow["local"], flow["remote"]) == (name_of(calls, name, "getsockname"),
                                                   name_of(calls, name, "getpeername"))
    before = flows(service, a.pid)[0]["packets"]
    talk(a, b, 50)
    assert flows(service, a.pid)[0]["packets"] >= before + 50
    assert a.do("option", name="c", level="SOL_SOCKET", option="SO_REUSEADDR") == 0
    assert a.do("state", name="c") == b.do("state", name="s") == 1
    assert a.do("poll", name="c") == b.do("poll", name="s") == ["POLLOUT"]
    assert (counter(service, "tcp_taken_total"), counter(service, "tcp_homed_total")) == (ring, homed)
    assert a.do("close", name="c") is None
    assert ss(a.side) == []
    assert b.call("s", "recv", 10) == ""
    assert b.do("close", name="s") is None
    assert ss(b.side) == []
    until(lambda: not flows(service, a.pid) and not flows(service, b.pid))


def test_where_there_are_few_it_is_soon(service: Service) -> None:
    a_side, b_side = service.sandbox.sides
    took = []
    for _ in range(4):
        with Calls(service, b_side, True) as b, Calls(service, a_side, True) as a:
            begun = time.monotonic()
            opened(a, b, b_side)
            shown(service, a, "c")
            took.append(time.monotonic() - begun)
    assert min(took) < 0.8      # the machine may be busy


def test_one_that_was_opened_without_blocking(service: Service) -> None:
    """Its program may never call connect() a second time; if it does, it hears what the kernel's says."""
    a_side, b_side = service.sandbox.sides

    def scenario(shim: bool) -> list[Any]:
        with Calls(service, b_side, shim) as b, Calls(service, a_side, shim) as a:
            to = [b_side.address, listening(b, b_side)]
            a.do("new", name="c", blocking=False)
            seen = [a.call("c", "connect", to), a.do("until", name="c", wanted="POLLOUT")]
            b.do("accept", name="l", new="s")
            shown(service, a, "c")
            seen += [a.call("c", "connect", to), a.call("c", "connect", to)]
            return [*seen, a.call("c", "send", "x"), b.call("s", "recv", 10)]

    assert scenario(True) == scenario(False)


@pytest.mark.parametrize("asked", ["at once", "later"])
def test_a_reset_of_one_that_was_opened_without_blocking(service: Service, asked: str) -> None:
    """connect() says it, if that comes first, and does not open another."""
    a_side, b_side = service.sandbox.sides
    with Calls(service, b_side, True) as b, Calls(service, a_side, True) as a:
        to = [b_side.address, listening(b, b_side)]
        a.do("new", name="c", blocking=False)
        assert a.call("c", "connect", to) == "EINPROGRESS"
        b.do("accept", name="l", new="s")
        shown(service, a, "c")
        b.do("linger", name="s", seconds=0)
        b.do("close", name="s")
        assert a.do("until", name="c", wanted="POLLERR")
        if asked == "later":
            until(lambda: ss(a_side) == [], 5)
        said = a.call("c", "connect", to)
        assert said == "EISCONN" or (asked, said) == ("at once", "ECONNRESET")  # or ended already
        assert a.call("c", "connect", to) == "EISCONN"
        assert a.call("c", "send", "x") == ("EPIPE" if said == "ECONNRESET" else "ECONNRESET")


def test_short_ones_are_not_shown(service: Service) -> None:
    a_side, b_side = service.sandbox.sides
    before = counter(service, "tcp_shown_total")
    with Calls(service, b_side, True) as b, Calls(service, a_side, True) as a:
        port = int(b.do("listen", name="l", address=b_side.address))
        b.do("serve", name="l")
        assert a.do("visits", 20, address=b_side.address, port=port, count=300) == 300
        time.sleep(1.2)
        assert counter(service, "tcp_shown_total") == before


def test_as_many_as_the_parameter_says(service: Service) -> None:
    a_side, b_side = service.sandbox.sides
    with Calls(service, b_side, True, VMA_HYBRID_TCP_SHOW="0") as b, Calls(service, a_side, False) as a:
        opened(a, b, b_side)
        time.sleep(2.5)
        assert ss(b_side) == []


def test_those_with_traffic_come_first(service: Service) -> None:
    """Of 100 connections some are shown, a batch at a time: the ones that exchange messages among them."""
    a_side, b_side = service.sandbox.sides
    with Calls(service, b_side, True, VMA_HYBRID_TCP_SHOW="1") as b, Calls(service, a_side, False) as a:
        port = int(b.do("listen", name="l", address=b_side.address, backlog=200))
        assert b.do("poll", name="l") == []
        a.do("many", 20, address=b_side.address, port=port, count=100)
        for number in range(100):
            b.do("accept", name="l", new=f"s{number}")
        busy = (3, 50, 97)
        ends = {number: b.call(f"s{number}", "getpeername") for number in busy}
        deadline = time.monotonic() + 10
        while not (listed := ss(b_side)) and time.monotonic() < deadline:
            for number in busy:
                assert a.call(f"many{number}", "send", "x") == 1
                assert b.call(f"s{number}", "recv", 1) == "x"
        assert 3 <= len(listed) < 50
        assert {f"{address}:{port}" for address, port in ends.values()} <= {peer for _, peer, _ in listed}


@pytest.mark.parametrize("home", [False, True])
@pytest.mark.parametrize("who", ["c", "s"])
def test_half_closed_before_it_is_shown(service: Service, who: str, home: bool) -> None:
    """Its other direction goes on, at home as well; when that has ended, too, the kernel's list forgets it."""
    a_side, b_side = service.sandbox.sides
    with Calls(service, b_side, True) as b, Calls(service, a_side, True) as a:
        opened(a, b, b_side)
        (one, own), (other, its) = ((a, "c"), (b, "s"))[::1 if who == "c" else -1]
        assert one.call(own, "shutdown", 1) is None
        assert other.call(its, "recv", 1) == ""
        for calls, name in ((a, "c"), (b, "s")):
            shown(service, calls, name)
            if home:
                calls.do("dup", name=name, new="other")
        for number in range(5):
            assert other.call(its, "send", f"more {number}") == 6
            assert one.call(own, "recv", 100) == f"more {number}"
        assert other.do("state", name=its) == 8 and one.do("state", name=own) == 5
        assert other.call(its, "shutdown", 1) is None
        assert one.call(own, "recv", 1) == ""
        until(lambda: not ss(a_side) and not ss(b_side), 5, lambda: f"{ss(a_side)} {ss(b_side)}")


@pytest.mark.parametrize("how", ["dup", "fork", "shutdown", "unspec"])
def test_it_goes_home(service: Service, both: tuple[Calls, Calls], how: str) -> None:
    a, b = both
    assert a.call("c", "send", "unread") == 6
    time.sleep(0.1)
    if how == "dup":
        b.do("dup", name="s", new="other")
        assert b.call("other", "recv", 100) == "unread"
        until(lambda: not flows(service, b.pid))
        talk(a, b)
        shown(service, b, "s")
    elif how == "fork":
        assert b.do("fork", name="s", method="recv", arguments=[100]) == "unread"
        assert b.call("s", "send", "answer") == 6
        assert a.call("c", "recv", 100) == "answer"
    elif how == "shutdown":
        assert b.call("s", "shutdown", 1) is None
        assert a.call("c", "recv", 100) == ""
        assert b.call("s", "recv", 100) == "unread"
        assert a.do("close", name="c") is None
        assert b.call("s", "recv", 100) == ""
        until(lambda: ss(b.side) == [], 5)  # both sides have closed it
    else:
        assert b.do("connect_unspec", name="s") is None
        assert a.do("until", name="c", wanted="POLLERR") and a.call("c", "recv", 1) == "ECONNRESET"
        a.do("listen", name="l2", address=a.side.address, port=47111)
        assert b.call("s", "connect", [a.side.address, 47111]) is None  # the socket can be used again


def test_a_reset_ends_it(service: Service, both: tuple[Calls, Calls]) -> None:
    a, b = both
    assert a.do("linger", name="c", seconds=0) is None
    assert a.do("close", name="c") is None
    assert b.do("until", name="s", wanted="POLLERR")
    until(lambda: ss(b.side) == [], 5)
    assert b.call("s", "recv", 1) == "ECONNRESET"


def test_the_program_is_killed(service: Service, both: tuple[Calls, Calls]) -> None:
    a, b = both
    b.kill()
    until(lambda: not flows(service, b.pid))
    assert ss(b.side) == []
    if (sent := a.call("c", "send", "x")) == 1:    # else it has been told before
        assert a.do("until", name="c", wanted="POLLERR")
        sent = a.call("c", "recv", 1)
    assert sent == "ECONNRESET"


@pytest.mark.parametrize("kill", [False, True])
def test_the_service_goes(service: Service, both: tuple[Calls, Calls], kill: bool) -> None:
    """Stopped: home at once. Killed: the next one brings it home, as an adopted one."""
    a, b = both
    if kill:
        service.program.process.send_signal(signal.SIGKILL)
        service.program.process.wait(5)
    else:
        service.program.stop(signal.SIGTERM)
        talk(a, b, 5)
    service.start()
    until(lambda: Api(service).status()["processes"], 5)
    time.sleep(1)
    talk(a, b)
    assert len(ss(b.side)) == 1


def test_a_listener_that_starts_again(service: Service) -> None:
    """With connections shown that its predecessor had accepted."""
    a_side, b_side = service.sandbox.sides
    with Calls(service, b_side, True) as b, Calls(service, a_side, False) as a:
        port = opened(a, b, b_side)
        shown(service, b, "s")
        b.do("close", name="l")
        assert b.do("listen", name="l", address=b_side.address, port=port) == port
        assert b.do("poll", name="l") == []
        talk(a, b)
        a.do("new", name="c2")
        assert a.call("c2", "connect", [b_side.address, port]) is None
        assert b.do("accept", name="l", new="s2") == a_side.address
        assert a.call("c2", "send", "x") == 1
        assert b.call("s2", "recv", 1) == "x"
        b.do("close", name="s")
        assert a.call("c", "recv", 1) == ""


def test_many(service: Service) -> None:
    a_side, b_side = service.sandbox.sides
    with Calls(service, b_side, True) as b, Calls(service, a_side, False) as a:
        port = int(b.do("listen", name="l", address=b_side.address, backlog=200))
        assert b.do("poll", name="l") == []
        a.do("many", 20, address=b_side.address, port=port, count=100)
        for number in range(100):
            b.do("accept", name="l", new=f"s{number}")
        until(lambda: len(ss(b_side)) == 100, 10, lambda: str(len(ss(b_side))))
        for number in range(100):
            assert a.call(f"many{number}", "send", "x") == 1
        for number in range(100):
            assert b.call(f"s{number}", "recv", 1) == "x"
            assert b.do("close", name=f"s{number}") is None
        assert ss(b_side) == []
        until(lambda: not flows(service, b.pid))
        assert Path(f"/proc/{service.program.process.pid}").exists()
