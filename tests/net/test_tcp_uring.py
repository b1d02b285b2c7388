"""io_uring by libc's syscall(), as libuv uses it: epoll_ctl for connections that are on rings and come to them, data of
connections that go home for it, and the ring's own life. uring_calls.c says what each request answered: what the
kernel does."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest
from net.service_lab import compiled, until
from net.test_tcp_raw_calls import HELLO, begin, reasons, server, service  # noqa: F401
from net.test_tcp_shim import offloaded

from vmahybrid.bench.sandbox import Program
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

POLICIES = ["offload", "adaptive"]
ANSWERS = """DEL none -2
MOD none -2
ADD 0
ADD again -17
MOD 0
MOD EXCLUSIVE -22
op -22
no event -14
fd -1 -9
set -1 -9
no set -22
itself -22
file -1
DEL 0
ADD ONESHOT EXCLUSIVE -22
ADD EXCLUSIVE 0
DEL 0
first 0
second 0
first -17
second -125
DEL 0
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory, "uring_calls.c", "-pthread")


def done(service: Service, program: Path, case: str, policy: str | None) -> Program:  # noqa: F811
    """The program, which waits; its connection is adopted while it works where the policy says so."""
    variables = {"VMA_HYBRID_TCP": policy, "VMA_HYBRID_TCP_ROUNDS": "16"} if policy else {}
    running = begin(service, program, case, policy is not None, **variables)
    if "no io_uring" in running.wait_for("done|line .*|no io_uring|listens", 60)[0]:
        pytest.skip("the kernel has no io_uring, or does not give it to this process")
    return running


@pytest.mark.parametrize("policy", [None, *POLICIES])
@pytest.mark.parametrize("case", ["epoll", "epoll_no_array", "epoll_long"])
def test_epoll_ctl(service: Service, server: Program, program: Path, case: str, policy: str | None) -> None:  # noqa: F811
    running = done(service, program, case, policy)
    assert running.output == ANSWERS * 2 + "done\n"
    if policy:
        until(lambda: [s["pid"] for s in offloaded(service)] == [running.pid],
              what=lambda: str(reasons(service, running.pid)))
    running.close()


@pytest.mark.parametrize("policy", [None, *POLICIES])
def test_data_goes_home(service: Service, server: Program, program: Path, policy: str | None) -> None:  # noqa: F811
    running = done(service, program, "data", policy)
    assert running.output == "done\n"
    if policy:
        assert "io-uring" in reasons(service, running.pid)
        assert not offloaded(service)
    running.close()
    until(lambda: "ended " in server.output, what=lambda: server.output + server.errors)


def test_data_fails_where_that_was_asked_for(service: Service, server: Program, program: Path) -> None:  # noqa: F811
    running = begin(service, program, "data", VMA_EXCEPTION_HANDLING="2")
    assert "Invalid argument" in running.wait_for("done|line .*", 20)[0]
    running.close()


@pytest.mark.parametrize(("case", "reason", "policy"), [
    ("datagrams", "io-uring", None), ("datagrams", "io-uring", "offload"),
    *(("polls_set", "nested-epoll", policy) for policy in (None, *POLICIES)),
])  # fmt: skip
def test_explained(service: Service, server: Program, program: Path, case: str, reason: str,  # noqa: F811
                   policy: str | None) -> None:  # fmt: skip
    """Datagrams, and a set that is itself polled."""
    running = done(service, program, case, policy)
    assert running.output == "done\n"
    if policy:
        assert reason in reasons(service, running.pid)
    running.close()


@pytest.mark.parametrize("policy", [None, *POLICIES])
def test_close(service: Service, server: Program, program: Path, policy: str | None) -> None:  # noqa: F811
    running = done(service, program, "closes", policy)
    assert running.output == "done\n"
    one = f"ended 1 {hashlib.sha256(b'x').hexdigest()[:16]}\n"
    until(lambda: server.output == "ready\n" + one * 3, what=lambda: server.output)
    running.close()


@pytest.mark.parametrize("policy", [None, *POLICIES])
@pytest.mark.parametrize("case", ["accepts", "accepts_waiting", "polls_listener"])
def test_accept(service: Service, server: Program, program: Path, case: str, policy: str | None) -> None:  # noqa: F811
    box = service.sandbox
    running = done(service, program, case, policy)
    client = box.start(box.b, [sys.executable, "-c", HELLO, box.a.address, "7420"])
    assert client.result(20) == "there\n"
    running.wait_for("done|line .*")
    assert running.output == "listens\ndone\n"
    running.close()


@pytest.mark.parametrize("policy", [None, *POLICIES])
@pytest.mark.parametrize(("case", "says"), [
    ("written_only", ""), ("cancelled_close", ""), ("unreadable", "event -14\nfiles -14\nmany -22\n")])
def test_what_is_not_done(service: Service, server: Program, program: Path, case: str, says: str,  # noqa: F811
                          policy: str | None) -> None:  # fmt: skip
    """What was written and not handed in, what the kernel cancels, and what it can't read."""
    running = done(service, program, case, policy)
    assert running.output == says + "done\n"
    running.close()


@pytest.mark.parametrize("policy", [None, *POLICIES])
@pytest.mark.parametrize("case", ["ends", "threads"])
def test_ring(service: Service, server: Program, program: Path, case: str, policy: str | None) -> None:  # noqa: F811
    """Its end, and its inheritance; threads that enter it at the same time."""
    running = done(service, program, case, policy)
    assert running.output == "done\n"
    running.close()
