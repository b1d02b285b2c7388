"""Peers that vanish and peers that do not exist, with connections on rings from the SYN."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
from net.service_lab import assert_same_files, module_service, open_files, resident_mib  # noqa: F401
from net.test_tcp_shim import bare_pair  # noqa: F401
from net.test_tcp_syn import Calls, Stage, known, listening, opened, stage  # noqa: F401

from vmahybrid.bench.sandbox import Side

pytestmark = pytest.mark.root

FLOOD = Path(__file__).with_name("syn_flood.py")
SYNS = 15000


@pytest.mark.parametrize("who", ["client", "server"])
def test_half_open(stage: Stage, who: str) -> None:  # noqa: F811
    """The peer has lost the connection without a word: it is reset when something is sent."""
    def scenario(a: Calls, b: Calls, to: Side) -> Any:
        opened(a, b, to)
        gone, there = ((b, "s"), (a, "c")) if who == "client" else ((a, "c"), (b, "s"))
        gone[0].do("vanish", name=gone[1])
        time.sleep(0.1)
        seen = [there[0].do("poll", name=there[1]), there[0].call(there[1], "send", "x")]
        seen += [there[0].do("until", name=there[1], wanted="POLLERR"), there[0].call(there[1], "send", "x")]
        return [*seen, there[0].call(there[1], "recv", 1), there[0].call(there[1], "send", "x")]

    stage.compare(scenario, who)


def test_a_name_that_is_used_again(stage: Stage) -> None:  # noqa: F811
    """The client comes back with the same port, while the server still has the connection that it lost."""
    def scenario(a: Calls, b: Calls, to: Side) -> Any:
        port = opened(a, b, to)
        own = a.call("c", "getsockname")
        a.do("vanish", name="c")
        a.do("new", name="d")
        seen = [a.call("d", "setsockopt", 1, 2, 1), a.call("d", "bind", own)]   # SO_REUSEADDR
        seen += [a.call("d", "connect", [to.address, port]), b.do("accept", name="l", new="t") == a.side.address]
        seen += [b.do("poll", name="s"), b.call("s", "recv", 1)]
        return [*seen, a.call("d", "send", "again"), b.call("t", "recv", 9)]

    stage.compare(scenario, "server")


def test_syn_flood(stage: Stage) -> None:  # noqa: F811
    """Connections that are there go on meanwhile, an honest one comes in afterwards, and nothing of the flood stays."""
    sandbox = stage.sandbox
    with Calls(stage.service, sandbox.b, True) as b, Calls(stage.service, sandbox.a, False) as a:
        port = opened(a, b, sandbox.b)
        b.call("s", "settimeout", 0.02)
        b.call("s", "recv", 1)   # a thread's first sleep makes an eventfd, which stays
        b.call("s", "settimeout", None)
        memory, files = resident_mib(b.pid), open_files(b.pid)
        to = [sandbox.a.device, sandbox.b.mac, sandbox.b.address, str(port), str(SYNS)]
        flood = sandbox.start(sandbox.a, [sys.executable, "-S", str(FLOOD), *to])
        talked = 0
        b.call("l", "setblocking", False)
        while flood.running or not talked:
            assert a.call("c", "send", "ping") == 4 and b.call("s", "recv", 4) == "ping"
            assert b.call("s", "send", "pong") == 4 and a.call("c", "recv", 4) == "pong"
            assert b.do("accept", name="l", new="x") == "EAGAIN"
            talked += 1
        assert flood.result() == f"sent {SYNS}\n"
        assert talked > 10
        b.call("l", "setblocking", True)
        begun = time.monotonic()
        a.do("new", name="d")
        assert a.call("d", "connect", [sandbox.b.address, port]) is None
        assert b.do("accept", name="l", new="t") == sandbox.a.address
        assert time.monotonic() - begun < 4
        assert a.call("d", "send", "honest") == 6 and b.call("t", "recv", 9) == "honest"
        assert b.do("close", name="t") is None
        assert_same_files(b.pid, files)
        assert resident_mib(b.pid) < memory + 4
