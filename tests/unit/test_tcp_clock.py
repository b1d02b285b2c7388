"""Whose timestamps a connection has when it comes home."""

from __future__ import annotations

import dataclasses
import socket

import pytest

from vmahybrid.net import tcprepair, tcpsock
from vmahybrid.net.tcpstate import TcpFlag, TcpState

STATE = TcpState(flags=TcpFlag.TIMESTAMPS, laddr=b"\1" * 16, lport=1, raddr=b"\2" * 16, rport=2, snd_una=0, snd_nxt=0,
                 rcv_nxt=0, snd_wl1=0, snd_wnd=0, max_window=0, rcv_wnd=0, rcv_wup=0, mss=1460)


@pytest.mark.parametrize(("own", "now", "idle", "wait_ms", "will_do"), [
    (1000, 1004, 4, 0, True),           # the last one was sent when the kernel's clock said the same
    (1000, 1004, 500, 0, True),
    (1000, 1004, 0, 4, True),           # just now: 4 ms ahead of it
    (1000, 1100, 0, 0, False),          # too long to wait for
    (1000, 1100, 95, 5, True),
    (30000, 1000, 0, 0, True),          # it was long on its way
    (90000, 1000, 0, 0, False),         # a clock of its own
    (1000, 0x80000000, 0, 0, False),
    (2, 5, 0, 3, True),
    (0xFFFFFFFE, 1, 0, 3, True),        # over the end
    (1001, 1001, 1, 0, False),          # one of microseconds: the kernel is to have one of milliseconds
])
def test_the_own_clock(monkeypatch: pytest.MonkeyPatch, own: int, now: int, idle: int, wait_ms: int,
                       will_do: bool) -> None:
    waited: list[float] = []
    written: list[int] = []
    monkeypatch.setattr(tcpsock, "get_u32", lambda *_: own)
    monkeypatch.setattr(tcpsock, "set_u32", lambda _sock, _option, value: written.append(value))
    monkeypatch.setattr(tcprepair.time, "sleep", waited.append)
    with socket.socket() as sock:
        tcprepair._set_clock(sock, dataclasses.replace(STATE, tsval_now=now, tsval_idle=idle))
    assert written == ([] if will_do else [(now + 1) % 2**32 & ~1])
    assert sum(waited) == pytest.approx(wait_ms / 1000)
