"""Workers inside namespaces, and who is in which."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from vmahybrid.net.netns import Netns, NetnsWorker, netns_fd_of_pidfd, peer_pidfd

pytestmark = pytest.mark.root
NAME = f"vmh-t-{os.getpid()}-n"


@pytest.fixture
def private() -> Iterator[NetnsWorker]:
    with NetnsWorker.open_private() as worker:
        yield worker


@pytest.fixture
def named() -> Iterator[str]:
    subprocess.run(["ip", "netns", "add", NAME], check=True)
    yield NAME
    subprocess.run(["ip", "netns", "del", NAME], check=True)


def interfaces() -> list[str]:
    return sorted(name for _, name in socket.if_nameindex())


def test_work_is_done_inside_and_the_caller_stays_outside(private: NetnsWorker) -> None:
    here, outside = Netns.current(), interfaces()
    assert private.netns != here
    assert private.call(Netns.current) == private.netns
    assert private.call(interfaces) == ["lo"]
    assert (Netns.current(), interfaces()) == (here, outside)
    assert private.netns.name == f"net:[{private.netns.ino}]"
    assert here.name in ("host", NAME)


def test_a_call_raises_what_the_function_raises_and_the_worker_goes_on(private: NetnsWorker) -> None:
    with pytest.raises(ZeroDivisionError):
        private.call(lambda: 1 / 0)
    with pytest.raises(SystemExit):
        private.call(sys.exit)
    assert private.call(lambda: 7) == 7
    assert private.call(lambda: private.call(Netns.current)) == private.netns  # from within: no deadlock


def test_calls_from_the_event_loop_do_not_block_it(private: NetnsWorker) -> None:
    async def both() -> tuple[Netns, bool]:
        gate = threading.Event()
        waiting = asyncio.create_task(private.call_async(gate.wait, 5))
        await asyncio.sleep(0.05)
        gate.set()  # the loop runs while the worker waits
        return await private.call_async(Netns.current), await waiting

    assert asyncio.run(both()) == (private.netns, True)


def test_calls_of_many_threads_are_all_answered(private: NetnsWorker) -> None:
    answers: list[int] = []
    threads = [threading.Thread(target=lambda n=n: answers.append(private.call(lambda: n))) for n in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == list(range(50))


def test_by_name_by_fd_and_by_process(named: str) -> None:
    with NetnsWorker.open_path(named) as worker, subprocess.Popen(
            ["ip", "netns", "exec", named, "sleep", "30"]) as sleeper:
        try:
            assert worker.netns.name == named == str(worker.netns)
            fd = worker.namespace_fd()
            with NetnsWorker.open_fd(fd) as again:
                assert again.netns == worker.netns
            os.close(fd)
            while Netns.of_pid(sleeper.pid) != worker.netns:  # `ip` has not entered yet
                pass
            pidfd = os.pidfd_open(sleeper.pid)
            with NetnsWorker.open_fd(pidfd) as by_process:
                assert by_process.netns == worker.netns
            fd = netns_fd_of_pidfd(pidfd)
            assert Netns.of_fd(fd) == worker.netns
            os.close(fd)
        finally:
            sleeper.kill()
            sleeper.wait()
        with pytest.raises(OSError):  # noqa: PT011 - ESRCH by the ioctl, or by /proc
            netns_fd_of_pidfd(pidfd)
        os.close(pidfd)


def test_the_peer_of_a_socket() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        pidfd = peer_pidfd(ours)
        fd = netns_fd_of_pidfd(pidfd)
        assert Netns.of_fd(fd) == Netns.current()
        os.close(fd)
        os.close(pidfd)


def test_a_namespace_that_is_not_there() -> None:
    before = threading.active_count()
    with pytest.raises(FileNotFoundError):
        NetnsWorker.open_path("vmh-t-nosuch")
    with open("/dev/null") as file, pytest.raises(OSError, match="setns"):
        NetnsWorker.open_fd(file.fileno())
    assert threading.active_count() == before


def test_close_lets_the_namespace_go() -> None:
    worker = NetnsWorker.open_private()
    sock = worker.socket(socket.AF_INET, socket.SOCK_DGRAM)
    worker.close()
    worker.close()
    with pytest.raises(RuntimeError, match="closed"):
        worker.call(interfaces)
    with sock, pytest.raises(OSError, match="unreachable"):  # it works on: it is the namespace's, not the thread's
        sock.connect(("10.0.0.1", 9))
