"""What the service does for connections that came home, with a kernel that is made up."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from vmahybrid.contracts import addr_to_bytes
from vmahybrid.net.sockdiag import Found, connections
from vmahybrid.net.tcpstate import TcpFlag, TcpPhase, TcpState
from vmahybrid.service import tcpafter
from vmahybrid.service.tcpafter import Afterwards
from vmahybrid.steering.reasons import Reason

LOCAL, REMOTE = addr_to_bytes("10.0.0.1"), addr_to_bytes("10.0.0.2")
STATE = TcpState(flags=TcpFlag(0), laddr=LOCAL, lport=1, raddr=REMOTE, rport=2, snd_una=100, snd_nxt=100, rcv_nxt=7,
                 snd_wl1=7, snd_wnd=1000, max_window=1000, rcv_wnd=1000, rcv_wup=7, mss=1460)
ENDED = {"flags": TcpFlag.PEER_FIN}
UNDER_WAY = {"snd_nxt": 105, "send": b"hello"}
INODE, IFINDEX = 77, 3
FIN, ICMP = "fin", "icmp"


@dataclass
class Link:
    ifindex: int = IFINDEX
    up: bool = True
    mac: bytes = bytes(6)


@dataclass
class Kernel:
    """As a namespace, its watcher, its worker and the backend. ``found`` tells the next round; the last one stays."""

    found: list[Found | None]
    link: Link = field(default_factory=Link)
    users: int = 0
    given: list[str] = field(default_factory=list)
    rounds: int = 0

    __hash__ = object.__hash__

    @property
    def watcher(self) -> Kernel:
        return self

    quick = watcher

    def device(self, _: int) -> Link:
        return self.link

    def links(self) -> list[Link]:
        return [self.link]

    def addresses(self, _: int) -> list[bytes]:
        return [LOCAL]

    async def call_async(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if call is not connections:
            return call(*arguments)
        self.rounds += 1
        now = self.found.pop(0) if len(self.found) > 1 else self.found[0]
        return [now] * len(arguments[0])

    def inject(self, ifindex: int, frames: Sequence[bytes]) -> None:
        assert ifindex == self.link.ifindex
        self.given += [FIN if frame[14 + 9] == socket.IPPROTO_TCP else ICMP for frame in frames]


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAUSE", "PAUSE_OF_EACH", "LAST_PAUSE"):
        monkeypatch.setattr(tcpafter, name, 0.001)
    monkeypatch.setattr(tcpafter, "AT_FIRST", (0.001,))


def after(kernel: Kernel, reason: Reason = Reason.IF_DOWN, seconds: float = 0.1, hears_errors: bool = False,
          **changes: Any) -> Kernel:
    """A connection came home so; what has been done after ``seconds``, or when nothing was left to do."""
    async def run(sock: socket.socket) -> None:
        afterwards = Afterwards(kernel)     # type: ignore[arg-type]
        afterwards.add(kernel, replace(STATE, **changes), sock.fileno(), INODE, IFINDEX, reason)  # type: ignore[arg-type]
        for _ in range(int(seconds / 0.001)):
            await asyncio.sleep(0.001)
            if not kernel.users:
                break
        await afterwards.close()

    with socket.socket() as sock:
        if hears_errors:
            sock.setsockopt(socket.IPPROTO_IP, 11, 1)   # IP_RECVERR
        asyncio.run(run(sock))
    assert kernel.users == 0
    return kernel


def found(state: TcpPhase = TcpPhase.ESTABLISHED, queued: int = 0, retransmits: int = 0, inode: int = INODE) -> Found:
    return Found(inode, state, queued, 0, retransmits)


def test_the_end_is_given_until_the_kernel_has_it() -> None:
    kernel = after(Kernel([found(), found(), found(TcpPhase.CLOSE_WAIT)]), **ENDED)
    assert kernel.given == [FIN, FIN] and kernel.rounds == 3


@pytest.mark.parametrize("now", [None, found(inode=INODE + 1), found(TcpPhase.LISTEN), found(TcpPhase.CLOSE_WAIT)])
def test_nobody_elses_connection_gets_one(now: Found | None) -> None:
    kernel = after(Kernel([now]), **ENDED)
    assert kernel.given == [] and kernel.rounds == 1


def test_the_last_attempt() -> None:
    """A service that ends does not wait for long."""
    kernel = after(Kernel([found()]), seconds=0, **ENDED)
    assert kernel.given == [FIN]


def test_a_timeout_is_taken_back() -> None:
    told = [found(queued=5), found(queued=5, retransmits=1), found()]
    kernel = after(Kernel(told), **UNDER_WAY)
    assert kernel.given == [ICMP] * tcpafter.DOUBLINGS and kernel.rounds == 3


def test_not_before_the_interface_is_up() -> None:
    kernel = after(Kernel([found(queued=5, retransmits=1)], Link(up=False)), **UNDER_WAY)
    assert kernel.given == [] and kernel.rounds > 3


def test_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcpafter, "HURRY_SECONDS", 0.02)
    kernel = after(Kernel([found(queued=5, retransmits=1)]), seconds=5, **UNDER_WAY)
    assert set(kernel.given) == {ICMP}


@pytest.mark.parametrize(("reason", "hears", "changes"), [
    (Reason.FORK, False, UNDER_WAY), (Reason.IF_DOWN, True, UNDER_WAY), (Reason.IF_DOWN, False, {})])
def test_who_needs_nothing(reason: Reason, hears: bool, changes: dict[str, Any]) -> None:
    kernel = after(Kernel([found(queued=5, retransmits=1)]), reason, hears_errors=hears, **changes)
    assert kernel.given == [] and kernel.rounds == 0
