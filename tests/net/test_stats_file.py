"""VMA_STATS_FILE and VMA_STATS_SHMEM_DIR, of programs that end with their sockets open, fork, and are many."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from vmahybrid.bench.served import run_words

TALK = """
import os, socket, sys
def talk(count):
    a, b = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
    b.bind(("127.0.0.1", 0))
    for _ in range(count):
        a.sendto(b"x" * 1024, b.getsockname())
        b.recv(2048)
    return a, b
"""


def run(tmp_path: Path, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The code under the shim, without a service."""
    settings = {"VMA_STATS_SHMEM_DIR": str(tmp_path), "VMA_TRACELEVEL": "warn",
                "VMA_HYBRID_SOCKET": str(tmp_path / "none")} | variables
    words = [word for name, value in settings.items() for word in ("-e", f"{name}={value}")]
    program = [sys.executable, "-S", "-c", TALK + code]
    argv = [*run_words("-p", "none", *words), "--", *program]
    return subprocess.run(argv, capture_output=True, text=True, timeout=30, env=dict(os.environ), check=False)


def blocks(path: Path) -> list[tuple[int, int, int]]:
    """(fd, sent, received) through the kernel, of each block of the manual's example 6."""
    text = path.read_text()
    found = re.findall(
        r"VMA: \[fd=(\d+)\] Tx Offload: 0 / 0 / 0 \[kilobytes/packets/errors\]\n"
        r"VMA: \[fd=\1\] Tx OS info: (\d+) / \2 / 0 \[kilobytes/packets/errors\]\n"
        r"VMA: \[fd=\1\] Rx Offload: 0 / 0 / 0 \[kilobytes/packets/errors\]\n"
        r"VMA: \[fd=\1\] Rx OS info: (\d+) / \3 / 0 \[kilobytes/packets/errors\]\n"
        r"VMA: \[fd=\1\] Rx byte: max 0 / dropped 0 \(0\.00%\) / limit \d+\n"
        r"VMA: \[fd=\1\] Rx pkt : max 0 / dropped 0 \(0\.00%\)\n"
        r"VMA: \[fd=\1\] Rx poll: 0 / 0 \(0\.00%\) \[miss/hit\]\n", text)
    assert len(found) * 7 == text.count("\n"), text
    return [(int(fd), int(sent), int(received)) for fd, sent, received in found]


def test_sockets_that_are_closed_and_such_that_are_open_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "stats"
    path.write_text("of another run\n")
    code = "a, b = talk(5)\na.close()\nc, d = talk(3)\nunused = socket.socket(2, 2)"
    done = run(tmp_path, code, VMA_STATS_FILE=str(path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert sorted((sent, received) for _, sent, received in blocks(path)) == [(0, 3), (0, 5), (3, 0), (5, 0)]


def test_tcp_of_the_kernel(tmp_path: Path) -> None:
    """It is counted where the file is asked for."""
    path = tmp_path / "stats"
    code = """
l = socket.create_server(("127.0.0.1", 0))
c = socket.create_connection(l.getsockname())
s = l.accept()[0]
for _ in range(3):
    c.sendall(b"x" * 1024)
    assert len(s.recv(1024, socket.MSG_WAITALL)) == 1024
"""
    done = run(tmp_path, code, VMA_STATS_FILE=str(path), VMA_HYBRID_TCP="kernel")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    text = path.read_text()
    assert re.findall(r"(Tx|Rx) OS info: (\d+ / \d+) / 0 ", text) == [("Tx", "3 / 3"), ("Rx", "0 / 0"), ("Tx", "0 / 0"),
                                                                     ("Rx", "3 / 3")]


def test_sockets_that_found_no_slot(tmp_path: Path) -> None:
    """Of VMA_STATS_FD_NUM: the file has them all the same, closed or not, each once, and with what is theirs."""
    path = tmp_path / "stats"
    code = "pairs = [talk(n) for n in range(1, 6)]\nfor a, b in pairs[1:3]: a.close(), b.close()\nc, d = talk(9)"
    done = run(tmp_path, code + "\nif not os.fork(): d.recv\nelse: os.wait()", VMA_STATS_FILE=str(path),
               VMA_STATS_FD_NUM="3")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert sorted((sent, received) for _, sent, received in blocks(path)) == sorted(
        [(0, n) for n in (1, 2, 3, 4, 5, 9)] + [(n, 0) for n in (1, 2, 3, 4, 5, 9)])  # fmt: skip


def test_a_child_of_a_fork(tmp_path: Path) -> None:
    """Its own file where the name has %d; else both write to one. Nothing is lost, and nothing told twice."""
    code = "talk(2)\na, b = talk(5)\nif not os.fork(): talk(3); sys.exit()\nos.wait()\n"
    one = tmp_path / "one"
    assert run(tmp_path, code, VMA_STATS_FILE=str(one)).returncode == 0
    assert sorted(max(block[1:]) for block in blocks(one)) == [2, 2, 3, 3, 5, 5]
    assert run(tmp_path, code, VMA_STATS_FILE=str(tmp_path / "each.%d")).returncode == 0
    child, parent = sorted((blocks(path) for path in tmp_path.glob("each.*")), key=len)
    assert sorted(max(block[1:]) for block in child) == [3, 3]
    assert sorted(max(block[1:]) for block in parent) == [2, 2, 5, 5]


def test_no_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for place, why in ((str(tmp_path), f"FAILED to create VMA statistics file. {tmp_path} is not a regular file."),
                       (str(tmp_path / "fifo"), "/fifo is not a regular file."),
                       ("/dev/null", "FAILED to create VMA statistics file. /dev/null is not a regular file."),
                       (str(tmp_path / "no" / "file"), "(ENOENT)")):
        done = run(tmp_path, "talk(2)", VMA_STATS_FILE=place)
        assert (done.returncode, done.stdout) == (0, "")
        assert " VMA WARNING: " in done.stderr and why in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1


def test_a_program_that_closes_every_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "stats"
    done = run(tmp_path, "a, b = talk(5)\nos.closerange(3, 1 << 16)\nkeep = talk(2)", VMA_STATS_FILE=str(path))
    assert done.returncode == 0
    assert sorted(max(block[1:]) for block in blocks(path)) == [2, 2, 5, 5]
