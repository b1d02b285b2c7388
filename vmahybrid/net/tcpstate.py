"""A whole TCP connection at rest, as it passes between the kernel and a user-space stack.

The bytes are ``struct vmh_tcp_state`` of vmahybrid/shim/tcp/tcp_state.h and the two queues; the rules written there
hold here too. The most important one: **a FIN is never counted** in a sequence number, the flags tell of it.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Self

from vmahybrid.contracts import addr_to_bytes, addr_to_text, family_of

SEQ_MASK = 0xFFFFFFFF

MAGIC = 0x53435456
VERSION = 2
MAX_QUEUE = 64 << 20
MAX_WINDOW = 65535 << 14    # RFC 7323, 2.3
MIN_MSS = 88                # TCP_MIN_MSS of the kernel: it takes no smaller one back

# tcp_state.h, where the ports are 2H: network order makes them 2s here
_HEAD = struct.Struct("<IHHI4B16s16s2s2s10I4B18I2Q4I")
HEADER_LEN = _HEAD.size


def seq(value: int) -> int:
    """Modulo 2^32."""
    return value & SEQ_MASK


def after(one: int, other: int) -> bool:
    """Is sequence number ``one`` later than ``other``? (RFC 9293, 3.4)"""
    return 0 < seq(one - other) < 1 << 31


class TcpPhase(IntEnum):
    """States of a connection, by the numbers of linux/tcp_states.h."""

    ESTABLISHED = 1
    SYN_SENT = 2
    SYN_RECV = 3
    FIN_WAIT1 = 4
    FIN_WAIT2 = 5
    TIME_WAIT = 6
    CLOSE = 7
    CLOSE_WAIT = 8
    LAST_ACK = 9
    LISTEN = 10
    CLOSING = 11
    NEW_SYN_RECV = 12


class TcpFlag(IntFlag):
    """VMH_TCP_F_*."""

    WSCALE = 0x1
    SACK = 0x2
    TIMESTAMPS = 0x4
    FIN_WANTED = 0x10
    FIN_SENT = 0x20
    FIN_ACKED = 0x40
    PEER_FIN = 0x80
    SHUT_RD = 0x100
    NODELAY = 0x1000
    CORK = 0x2000
    QUICKACK = 0x4000
    KEEPALIVE = 0x8000
    LINGER = 0x10000


_ALL_FLAGS = sum(TcpFlag)
_U32 = (
    "snd_una", "snd_nxt", "rcv_nxt", "snd_wl1", "snd_wnd", "max_window", "rcv_wnd", "rcv_wup",
)
_U8 = ("keep_cnt", "ttl", "tos", "retries")
_MORE_U32 = (
    "mss", "snd_mss", "rcv_mss", "pmtu", "tsval_now", "ts_recent", "srtt_us", "rttvar_us", "rto_us", "cwnd", "ssthresh",
    "keep_idle_s", "keep_intvl_s", "user_timeout_ms", "linger_s", "sndbuf", "rcvbuf", "error",
)
_COUNTS = ("bytes_acked", "bytes_received", "segs_out", "segs_in", "retransmits", "tsval_idle")


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpState:
    """See tcp_state.h. Addresses are 16 bytes (IPv4 mapped), ports in host order, windows and queues in bytes.

    ``send`` begins at ``snd_una``; what is behind ``snd_nxt`` was never sent. ``receive`` ends at ``rcv_nxt``. Numbers
    of the round-trip time, of congestion and the counts are hints: a kernel socket starts anew.
    """

    phase: TcpPhase = TcpPhase.ESTABLISHED
    flags: TcpFlag
    laddr: bytes
    lport: int
    raddr: bytes
    rport: int
    snd_wscale: int = 0
    rcv_wscale: int = 0

    snd_una: int
    snd_nxt: int
    rcv_nxt: int
    snd_wl1: int
    snd_wnd: int
    max_window: int
    rcv_wnd: int
    rcv_wup: int
    send: bytes = b""
    receive: bytes = b""

    keep_cnt: int = 0
    ttl: int = 0
    tos: int = 0
    retries: int = 0
    mss: int
    snd_mss: int = 0
    rcv_mss: int = 0
    pmtu: int = 0
    tsval_now: int = 0
    ts_recent: int = 0
    srtt_us: int = 0
    rttvar_us: int = 0
    rto_us: int = 0
    cwnd: int = 0
    ssthresh: int = 0
    keep_idle_s: int = 0
    keep_intvl_s: int = 0
    user_timeout_ms: int = 0
    linger_s: int = 0
    sndbuf: int = 0
    rcvbuf: int = 0
    error: int = 0
    bytes_acked: int = 0
    bytes_received: int = 0
    segs_out: int = 0
    segs_in: int = 0
    retransmits: int = 0
    tsval_idle: int = 0

    def __str__(self) -> str:
        """For logs: no contents."""
        ends = " -> ".join(f"{addr_to_text(a)}:{p}" for a, p in ((self.laddr, self.lport), (self.raddr, self.rport)))
        return f"{ends} {self.phase.name}, {len(self.send)} bytes to send ({self.unsent} unsent), " \
               f"{len(self.receive)} to read"

    @property
    def write_seq(self) -> int:
        """Of the byte that the program writes next."""
        return seq(self.snd_una + len(self.send))

    @property
    def unsent(self) -> int:
        """Bytes at the end of ``send`` that were never sent."""
        return seq(self.write_seq - self.snd_nxt)

    @property
    def copied_seq(self) -> int:
        """Of the byte that the program reads next."""
        return seq(self.rcv_nxt - len(self.receive))

    def check(self) -> Self:
        """Raises ValueError for what no connection can be: states come from unprivileged processes."""
        flags = self.flags
        if self.unsent > len(self.send):
            raise ValueError("snd_nxt is not between snd_una and the end of the send queue")
        if flags & TcpFlag.FIN_ACKED and (self.send or not flags & TcpFlag.FIN_SENT):
            raise ValueError("an acknowledged FIN, but data to send, or never sent")
        if flags & TcpFlag.FIN_SENT and (self.unsent or not flags & TcpFlag.FIN_WANTED):
            raise ValueError("a FIN was sent before the data, or without being wanted")
        if after(self.rcv_wup, self.rcv_nxt):
            raise ValueError("rcv_wup is later than rcv_nxt")
        if max(self.snd_wnd, self.max_window, self.rcv_wnd) > MAX_WINDOW or max(self.snd_wscale, self.rcv_wscale) > 14:
            raise ValueError("a window larger than any")
        if not MIN_MSS <= self.mss <= 0xFFFF:
            raise ValueError(f"an MSS of {self.mss}")
        if not (0 < self.lport < 1 << 16 and 0 < self.rport < 1 << 16):
            raise ValueError("port 0")
        if family_of(self.laddr) != family_of(self.raddr):
            raise ValueError("addresses of two families")
        return self

    def pack(self) -> bytes:
        """Struct and queues. Raises ValueError by check() and for a queue longer than MAX_QUEUE."""
        self.check()
        if max(len(self.send), len(self.receive)) > MAX_QUEUE:
            raise ValueError(f"a queue of more than {MAX_QUEUE} bytes")
        four = family_of(self.laddr) == 4
        laddr, raddr = ((a[12:] if four else a) for a in (self.laddr, self.raddr))
        ports = (port.to_bytes(2, "big") for port in (self.lport, self.rport))
        head = _HEAD.pack(
            MAGIC, VERSION, HEADER_LEN, self.flags, socket.AF_INET if four else socket.AF_INET6, self.phase,
            self.snd_wscale, self.rcv_wscale, laddr, raddr, *ports,
            *self._values(_U32), len(self.send), len(self.receive), *self._values(_U8), *self._values(_MORE_U32),
            *self._values(_COUNTS))
        return head + self.send + self.receive

    def _values(self, names: tuple[str, ...]) -> list[int]:
        return [getattr(self, name) for name in names]

    @staticmethod
    def length_of(head: bytes) -> int:
        """Bytes of the state that begins so. Raises ValueError for less than a header."""
        if len(head) < HEADER_LEN:
            raise ValueError(f"a TCP state has at least {HEADER_LEN} bytes, got {len(head)}")
        at = 12 + len(_U32)
        send_len, receive_len = _HEAD.unpack_from(head)[at:at + 2]
        return HEADER_LEN + min(int(send_len) + int(receive_len), 2 * MAX_QUEUE)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Raises ValueError for anything that tcp_state.h does not allow."""
        if len(data) < HEADER_LEN:
            raise ValueError(f"a TCP state has at least {HEADER_LEN} bytes, got {len(data)}")
        (magic, version, length, flags, family, phase, snd_wscale, rcv_wscale, laddr, raddr, lport, rport,
         *numbers) = _HEAD.unpack_from(data)
        if (magic, version, length) != (MAGIC, VERSION, HEADER_LEN):
            raise ValueError(f"magic {magic:#x}, version {version}, length {length}: no TCP state of version {VERSION}")
        if family not in (socket.AF_INET, socket.AF_INET6) or flags & ~_ALL_FLAGS:
            raise ValueError("an unknown family or flag")
        send_len, receive_len = numbers[len(_U32):len(_U32) + 2]
        del numbers[len(_U32):len(_U32) + 2]
        if max(send_len, receive_len) > MAX_QUEUE or len(data) != HEADER_LEN + send_len + receive_len:
            raise ValueError("lengths that do not add up")
        used = 4 if family == socket.AF_INET else 16
        if any(laddr[used:]) or any(raddr[used:]):
            raise ValueError("bytes behind an IPv4 address")
        fields = dict(zip(_U32 + _U8 + _MORE_U32 + _COUNTS, numbers, strict=True))
        middle = HEADER_LEN + send_len
        return cls(phase=TcpPhase(phase), flags=TcpFlag(flags), snd_wscale=snd_wscale, rcv_wscale=rcv_wscale,
                   laddr=addr_to_bytes(laddr[:used]), raddr=addr_to_bytes(raddr[:used]),
                   lport=int.from_bytes(lport, "big"), rport=int.from_bytes(rport, "big"),
                   send=data[HEADER_LEN:middle], receive=data[middle:], **fields).check()
