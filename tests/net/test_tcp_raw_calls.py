"""libc's syscall() on sockets that are on rings: as the kernel does it, whether the shim serves it or sends them home.

raw_calls.c makes the calls, and says "done" where each returned what it should."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from net.service_lab import Api, compiled, under_shim, until
from net.test_tcp_shim import introduce, offloaded, without_offloads

from vmahybrid.bench.sandbox import Program, Sandbox
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

PORT = 7410
# echoes; of each connection that has ended it tells how much came
ECHO = """
import hashlib, socket, sys, threading
def serve(sock):
    whole = b""
    with sock:
        try:
            while data := sock.recv(65536):
                whole += data
                sock.sendall(data)
            how = "ended"
        except OSError as error:
            how = type(error).__name__
    print(f"{how} {len(whole)} {hashlib.sha256(whole).hexdigest()[:16]}\\n", end="", flush=True)  # in one piece
def datagrams(sock):
    while True:
        data, peer = sock.recvfrom(65536)
        sock.sendto(data, peer)
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind((sys.argv[1], int(sys.argv[2])))
threading.Thread(target=datagrams, args=(udp,), daemon=True).start()
with socket.create_server((sys.argv[1], int(sys.argv[2])), backlog=64) as listener:
    print("ready", flush=True)
    while True:
        threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""
HELLO = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10) as sock:
    sock.sendall(b"there")
    print(sock.recv(5, socket.MSG_WAITALL).decode())
"""
STAYS = ["stream", "names", "waits", "closes_all", "clones", "others", "cancel"]
HOME = {"mmsg": "unknown-call", "dups": "dup", "gives_to_itself": "dup", "files": "sendfile", "forks": "fork",
        "uring": "io-uring", "aio": "io-uring"}  # fmt: skip


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory, "raw_calls.c", "-pthread")


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Sandbox("raw") as sandbox, Service(without_offloads(sandbox)) as running:
        introduce(sandbox)
        yield running


@pytest.fixture
def server(service: Service) -> Iterator[Program]:
    box = service.sandbox
    echo = box.start(box.b, [sys.executable, "-uc", ECHO, box.b.address, str(PORT)])
    echo.wait_for("ready")
    yield echo
    echo.close()


def begin(service: Service, program: Path, case: str, shim: bool = True, **variables: str) -> Program:
    box = service.sandbox
    argv = [str(program), case, box.b.address, str(PORT)]
    if shim:
        argv = under_shim(service, argv, profile="none", VMA_RX_POLL="100", VMA_SELECT_POLL="100",
                          VMA_TRACELEVEL="warn", **{"VMA_HYBRID_TCP": "offload", **variables})
    return box.start(box.a, argv, env=service.env if shim else None)


def reasons(service: Service, pid: int) -> list[str]:
    listed = Api(service).call("GET", "/v1/sockets")[1]
    return [s["reason"] for s in listed if s["pid"] == pid]


@pytest.mark.parametrize("shim", [False, True], ids=["kernel", "shim"])
@pytest.mark.parametrize("case", STAYS)
def test_what_stays_on_the_ring(service: Service, server: Program, program: Path, case: str, shim: bool) -> None:
    running = begin(service, program, case, shim)
    running.wait_for("done|line .*", 40)
    assert running.output == "done\n"
    if shim:
        until(lambda: [s["pid"] for s in offloaded(service)] == [running.pid],
              what=lambda: str(reasons(service, running.pid)))
    running.close()
    until(lambda: not offloaded(service))


@pytest.mark.parametrize("shim", [False, True], ids=["kernel", "shim"])
@pytest.mark.parametrize("case", HOME)
def test_what_goes_home(service: Service, server: Program, program: Path, case: str, shim: bool) -> None:
    running = begin(service, program, case, shim)
    running.wait_for("done|line .*", 40)
    assert running.output == "done\n"
    if shim:
        assert HOME[case] in reasons(service, running.pid)
        assert not offloaded(service)
    running.close()


@pytest.mark.parametrize("case", ["dups", "files", "uring", "aio"])
def test_calls_fail_where_that_was_asked_for(service: Service, server: Program, program: Path, case: str) -> None:
    running = begin(service, program, case, VMA_EXCEPTION_HANDLING="2")
    assert "Invalid argument" in running.wait_for("done|line .*", 20)[0]
    running.close()


@pytest.mark.parametrize("shim", [False, True], ids=["kernel", "shim"])
def test_datagrams(service: Service, server: Program, program: Path, shim: bool) -> None:
    running = begin(service, program, "udp", shim)
    running.wait_for("done|line .*", 40)
    assert running.output == "done\n"
    if shim:
        assert any(flow["pid"] == running.pid and flow["packets"] >= 120 for flow in Api(service).socket_flows())
    running.close()


@pytest.mark.parametrize("shim", [False, True], ids=["kernel", "shim"])
def test_close_and_the_number_again(service: Service, server: Program, program: Path, shim: bool) -> None:
    running = begin(service, program, "closes", shim)
    running.wait_for("done|line .*", 40)
    assert running.output == "done\n"
    for text in (b"again", b"once more"):
        server.wait_for(f"ended {len(text)} {hashlib.sha256(text).hexdigest()[:16]}")
    # the first was closed with an echo under way that nobody reads
    server.wait_for(r"(ended|Conn\w+) 4 " + hashlib.sha256(b"last").hexdigest()[:16])
    running.close()


@pytest.mark.parametrize("policy", [None, "offload", "adaptive"])
def test_what_is_closed_unseen_takes_no_other_along(
    service: Service, server: Program, program: Path, policy: str | None
) -> None:
    """By the instruction itself, as Go does: the other connections go home at a fork, and their peers see no end."""
    more = {"VMA_HYBRID_TCP": policy} if policy else {}
    running = begin(service, program, "unseen", policy is not None, **more)
    running.wait_for("done|line .*", 40)
    assert running.output == "done\n"
    assert "does not answer" not in running.errors
    if policy == "offload":
        assert reasons(service, running.pid).count("fork") == 2
    until(lambda: sorted(line.split()[:2] for line in server.output.splitlines()[1:]) == [
        ["ended", "0"], ["ended", "6"], ["ended", "6"]], what=lambda: server.output)
    running.close()


@pytest.mark.parametrize("shim", [False, True], ids=["kernel", "shim"])
def test_accept(service: Service, server: Program, program: Path, shim: bool) -> None:
    box = service.sandbox
    running = begin(service, program, "accepts", shim)
    port = running.wait_for(r"port (\d+)|line .*")[1]
    client = box.start(box.b, [sys.executable, "-c", HELLO, box.a.address, port])
    assert client.result(20) == "there\n"
    running.wait_for("done|line .*")
    assert running.output == f"port {port}\ndone\n"
    if shim:
        assert any(flow["local"].endswith(f":{port}") and flow["packets"] for flow in Api(service).socket_flows())
    running.close()


@pytest.mark.parametrize("shim", [False, True], ids=["kernel", "shim"])
@pytest.mark.parametrize(("case", "code", "sent"), [("exits", 5, 1000), ("exits_thread", 6, 6), ("leaves", 0, 6),
                                                    ("leaves_by_c11", 0, 6), ("leaves_cancelled", 0, 6),
                                                    ("leaves_by_number", 0, 6)])  # fmt: skip
def test_the_end(
    service: Service, server: Program, program: Path, case: str, code: int, sent: int, shim: bool
) -> None:
    running = begin(service, program, case, shim)
    assert running.wait(30) == code, running.output
    assert running.output == "done\n"
    server.wait_for(rf"\w+ {sent} ")
    until(lambda: not offloaded(service))


@pytest.mark.parametrize("shim", [False, True], ids=["kernel", "shim"])
def test_exec(service: Service, server: Program, program: Path, shim: bool) -> None:
    running = begin(service, program, "executes", shim)
    running.wait_for("done|line .*", 20)
    running.close()
    server.wait_for(r"\w+ 14 " + hashlib.sha256(b"beforeexecuted").hexdigest()[:16])
