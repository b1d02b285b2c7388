"""vma_stats of a TCP connection on a ring: --fd_dump as in the monitoring manual's example 7, and view 5."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from vmahybrid.bench.sandbox import Program, Sandbox, run_command
from vmahybrid.bench.served import Service, tool

pytestmark = pytest.mark.root

PROGRAM = [sys.executable, str(Path(__file__).with_name("tcp_param_program.py"))]

# of example 7, in its order; the two counters of reused buffers are the peer's alone
LINES = [
    r"Fd number : {fd}", r"Bind info : {local}", r"Connection info : {peer}", r"Protocol : PROTO_TCP",
    r"Is closed : false",
    r"Is blocking : true", r"Is offloaded : true",
    r"Tx Offload : \d+ / \d+ / 0 / 0 \[kilobytes/packets/eagains/errors\]",
    r"Rx Offload : \d+ / \d+ / \d+ / 0 \[kilobytes/packets/eagains/errors\]",
    r"Socket state : TCP_SOCK_CONNECTED_RDWR", r"Connection state : TCP_CONN_CONNECTED",
    r"Receive buffer : m_rcvbuff_current 0, m_rcvbuff_max \d+, m_rcvbuff_non_tcp_recved 0",
    r"Rx lists size : m_rx_pkt_ready_list 0, m_rx_ctl_packets_list 0, m_rx_ctl_reuse_list 0",
    r"PCB state : ESTABLISHED", r"PCB flags : 0x[0-9a-f]+", r"Segment size : mss 1460, advtsd_mss 1460",
    r"Window scaling : ENABLED, rcv_scale \d+, snd_scale \d+",
    r"Receive window : rcv_wnd \d+ \(\d+\), rcv_ann_wnd \d+ \(\d+\), rcv_wnd_max \d+ \(\d+\), "
    r"rcv_wnd_max_desired \d+ \(\d+\)",
    r"Send window : snd_wnd \d+ \(\d+\), snd_wnd_max \d+ \(\d+\)", r"Congestion : cwnd \d+",
    r"Receiver data : rcv_nxt \d+, rcv_ann_right_edge \d+", r"Sender data : snd_nxt \d+, snd_wl1 \d+, snd_wl2 \d+",
    r"Send buffer : snd_buf \d+, max_snd_buff \d+", r"Retransmission : rtime 0, rto \d+, nrtx 0",
    r"RTT variables : rttest \d+, rtseq \d+", r"First unsent : NULL", r"First unacked : NULL",
    r"Acknowledge : lastack \d+",
]


class Held(NamedTuple):
    service: Service
    sandbox: Sandbox
    program: Program
    facts: Any

    def vma_stats(self, *argv: str) -> str:
        command = [tool("vma_stats"), "-F", "-p", str(self.program.pid), *argv]
        return self.sandbox.start(None, command, env=self.service.env).result(10)


@pytest.fixture(scope="module")
def held() -> Iterator[Held]:
    with Sandbox("test") as sandbox, Service(sandbox) as service:
        for side in sandbox.sides:
            run_command(*side.command(["ethtool", "-K", side.device, "tso", "off", "gso", "off", "tx", "off"]))
        sandbox.start(sandbox.b, [*PROGRAM, "listen", sandbox.b.address]).wait_for("ready")
        argv = service.run_argv([*PROGRAM, "hold", sandbox.b.address], profile="none", VMA_HYBRID_TCP="offload",
                                VMA_TRACELEVEL="info")
        program = sandbox.start(sandbox.a, argv, env=service.env)
        yield Held(service, sandbox, program, json.loads(program.wait_for(r"\{.*\}")[0]))


def test_dump(held: Held) -> None:
    before = len(held.program.errors)
    held.vma_stats("-S", str(held.facts["fd"]), "info")
    deadline = time.monotonic() + 5
    while "Acknowledge" not in held.program.errors[before:] and time.monotonic() < deadline:
        time.sleep(0.05)
    said = held.program.errors[before:]
    ends = {end: re.escape(":".join(map(str, held.facts[end]))) for end in ("local", "peer")}
    at = 0
    for line in LINES:
        pattern = line.format(fd=held.facts["fd"], **ends) if re.search(r"\{[a-z]", line) else line
        found = re.compile(f"VMA INFO: {pattern}$", re.M).search(said, at)
        assert found, (line, said)
        at = found.end()


def test_state_in_view_5(held: Held) -> None:
    """As netstat: the connection, its ends and its state."""
    local, peer = (":".join(map(str, held.facts[end])) for end in ("local", "peer"))
    rows = [line.split() for line in held.vma_stats("-v", "5", "--once").splitlines() if peer in line]
    assert len(rows) == 1, held.vma_stats("-v", "5", "--once")
    assert local in rows[0] and "ESTABLISHED" in rows[0]
