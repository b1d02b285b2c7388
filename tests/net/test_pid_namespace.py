"""A caller with process ids of its own, as in a container, finds its programs by them, and nobody else's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from net.counter_lab import Program
from net.service_lab import Api, until

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service, tool

pytestmark = pytest.mark.root

# a program under the shim, what commands say of it and of a stranger, then its number and that of its socket
INSIDE = """
import os, subprocess, sys, time
program = subprocess.Popen(sys.argv[3:], stdout=subprocess.PIPE, text=True)
fd = program.stdout.readline().strip()
stats, cli = sys.argv[1:3]
def ask(*argv):
    done = subprocess.run(argv, capture_output=True, text=True)
    print(done.returncode, repr(done.stdout + done.stderr), flush=True)
pid = str(program.pid)
ask(stats, "-F", "-p", pid, "--once")
ask(stats, "-F", "-p", pid, "-v", "5")
ask(stats, "-k", os.environ["PAGES"], "--once")
ask(stats, "-F", "-p", pid, "-z", "-l", "debug", "-S", fd)
ask(cli, "explain", pid + ":" + fd)
ask(stats, "-F", "-p", os.environ["STRANGER"], "-z", "--once")
ask(cli, "explain", os.environ["STRANGER"])
print(pid, fd, flush=True)
program.kill()
"""
SOCKET = "import socket, time; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('127.0.0.1', 0)); " \
         "print(s.fileno(), flush=True); time.sleep(30)"


def test_a_container(tmp_path: Path) -> None:
    with Sandbox("test") as sandbox, Service(sandbox, [sandbox.b]) as service, Program(sandbox, service) as stranger:
        stranger.do("s = udp('127.0.0.1')")
        until(lambda: Api(service).call("GET", "/v1/processes")[1], 3)
        program = service.run_argv([sys.executable, "-S", "-c", SOCKET], profile="none",
                                   VMA_STATS_SHMEM_DIR=str(tmp_path))
        argv = ["unshare", "-p", "-f", "--mount-proc", sys.executable, "-c", INSIDE, tool("vma_stats"),
                tool("vmahybrid"), *program]
        done = subprocess.run(sandbox.b.command(argv), capture_output=True, text=True, timeout=40,
                              env={**os.environ, **service.env, "PAGES": str(tmp_path), "STRANGER": str(stranger.pid),
                                   "VMAHYBRID_RUNDIR": str(service.rundir)})
        *said, last = done.stdout.splitlines()
        assert len(said) == 7, done
        pid, fd = last.split()
        stats, netstat, pages, act, explain, other, explained = said
        assert stats.startswith("0 ") and f"with pid: {pid}\\n" in stats
        assert netstat.startswith("0 ") and f" {pid}/python" in netstat
        assert pages.startswith("0 ") and f"with pid: {pid}\\n" in pages
        assert act.startswith("0 ") and f"Fd {fd}, udp 127.0.0.1:" in act
        assert explain.startswith(("0 ", "1 ")) and f"process {pid} (python" in explain and "is connected" in explain
        assert other.startswith("1 ") and f"process id {stranger.pid} not found" in other
        assert explained.startswith("1 ") and "in this PID namespace" in explained and "ask on the host" in explained
