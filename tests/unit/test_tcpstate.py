"""The bytes of a TCP connection: what Python packs is what tcp_state.h says, and nothing else is believed."""

import dataclasses
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmahybrid.contracts import addr_to_bytes
from vmahybrid.net.tcpstate import HEADER_LEN, TcpFlag, TcpPhase, TcpState, after, seq

HEADER = Path(__file__).parents[2] / "vmahybrid/shim/tcp/tcp_state.h"
LAYOUT = "<IHHI4B16s16s2H10I4B18I2Q4I"     # as the header has it

STATE = TcpState(
    flags=TcpFlag.WSCALE | TcpFlag.SACK | TcpFlag.TIMESTAMPS | TcpFlag.NODELAY,
    laddr=addr_to_bytes("10.0.0.2"), lport=40000, raddr=addr_to_bytes("10.0.0.1"), rport=80, snd_wscale=7, rcv_wscale=9,
    snd_una=0xFFFFFFF0, snd_nxt=0xFFFFFFFA, rcv_nxt=3, snd_wl1=1, snd_wnd=65536, max_window=70000, rcv_wnd=131072,
    rcv_wup=0xFFFFFFFF, send=b"x" * 32, receive=b"unread", keep_cnt=9, ttl=64, tos=16, retries=1, mss=1460,
    snd_mss=1448, rcv_mss=1461, pmtu=1500, tsval_now=0x89ABCDEF, cwnd=14480, ssthresh=0xFFFFFFFF, keep_idle_s=7200,
    bytes_acked=1 << 40, bytes_received=1 << 41, segs_out=5, segs_in=6, retransmits=7, tsval_idle=8)

u32 = st.integers(0, 0xFFFFFFFF)
windows = st.integers(0, 65535 << 14)


@st.composite
def states(draw: st.DrawFn) -> TcpState:
    send, receive = draw(st.binary(max_size=300)), draw(st.binary(max_size=300))
    snd_una, rcv_nxt = draw(u32), draw(u32)
    four = draw(st.booleans())
    address = st.binary(min_size=4, max_size=4).map(addr_to_bytes) if four else st.just(addr_to_bytes("2001:db8::7"))
    return TcpState(
        phase=draw(st.sampled_from([TcpPhase.ESTABLISHED, TcpPhase.CLOSE_WAIT])),
        flags=draw(st.sampled_from([TcpFlag(0), TcpFlag.PEER_FIN, TcpFlag.SACK | TcpFlag.FIN_WANTED])),
        laddr=draw(address), lport=draw(st.integers(1, 65535)), raddr=draw(address),
        rport=draw(st.integers(1, 65535)), snd_una=snd_una,
        snd_nxt=seq(snd_una + draw(st.integers(0, len(send)))), rcv_nxt=rcv_nxt, snd_wl1=draw(u32),
        snd_wnd=draw(windows), max_window=draw(windows), rcv_wnd=draw(windows),
        rcv_wup=seq(rcv_nxt - draw(st.integers(0, 1 << 20))), send=send, receive=receive,
        mss=draw(st.integers(88, 65535)), tsval_now=draw(u32), rto_us=draw(u32), error=draw(u32),
        bytes_acked=draw(st.integers(0, (1 << 64) - 1)))


@given(states())
def test_round_trip(state: TcpState) -> None:
    data = state.pack()
    assert len(data) == HEADER_LEN + len(state.send) + len(state.receive)
    assert TcpState.unpack(data) == state


def test_the_layout_of_the_header() -> None:
    data = STATE.pack()
    assert struct.calcsize(LAYOUT) == HEADER_LEN == 200
    fields = struct.unpack_from(LAYOUT, data)
    assert fields[:8] == (0x53435456, 2, 200, 0x1007, 2, 1, 7, 9)
    assert fields[8:10] == (b"\x0a\0\0\x02" + bytes(12), b"\x0a\0\0\x01" + bytes(12))
    assert data[48:52] == b"\x9c\x40\0\x50"     # ports in network order
    assert fields[12:22] == (0xFFFFFFF0, 0xFFFFFFFA, 3, 1, 65536, 70000, 131072, 0xFFFFFFFF, 32, 6)
    assert fields[22:26] == (9, 64, 16, 1)
    assert fields[26:31] == (1460, 1448, 1461, 1500, 0x89ABCDEF)
    assert fields[44:] == (1 << 40, 1 << 41, 5, 6, 7, 8)
    assert data[200:] == b"x" * 32 + b"unread"


@pytest.mark.skipif(not HEADER.exists(), reason="the C stack is not in this tree yet")
def test_the_header_says_the_same_layout() -> None:
    assert f'struct.unpack_from("{LAYOUT}", blob)' in HEADER.read_text("ascii")


def test_positions() -> None:
    assert (STATE.write_seq, STATE.unsent, STATE.copied_seq) == (16, 22, seq(-3))
    assert after(5, 0xFFFFFFFF) and not after(0xFFFFFFFF, 5) and not after(5, 5)
    assert str(STATE) == "10.0.0.2:40000 -> 10.0.0.1:80 ESTABLISHED, 32 bytes to send (22 unsent), 6 to read"


BAD = {
    "snd_nxt before snd_una": {"snd_nxt": 0xFFFFFFEF},
    "snd_nxt behind the queue": {"snd_nxt": 17},
    "a FIN before unsent data": {"flags": TcpFlag.FIN_SENT | TcpFlag.FIN_WANTED},
    "a FIN that nobody wanted": {"flags": TcpFlag.FIN_SENT, "snd_nxt": 16},
    "a FIN acknowledged before data": {"flags": TcpFlag(0x70), "snd_nxt": 16},
    "acknowledged what did not come": {"rcv_wup": 4},
    "a huge window": {"rcv_wnd": 1 << 31},
    "a huge scale": {"snd_wscale": 15},
    "a tiny MSS": {"mss": 87},
    "no port": {"rport": 0},
    "two families": {"raddr": addr_to_bytes("2001:db8::1")},
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
def test_what_no_connection_can_be(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"."):
        dataclasses.replace(STATE, **change).pack()     # type: ignore[arg-type]


def _changed(offset: int, data: bytes) -> bytes:
    good = STATE.pack()
    return good[:offset] + data + good[offset + len(data):]


WRONG = {
    "magic": _changed(0, b"\0"), "version": _changed(4, b"\1"), "header length": _changed(6, b"\xc9"),
    "flag": _changed(11, b"\x80"), "family": _changed(12, b"\3"), "phase": _changed(13, b"\x20"),
    "IPv4 with a tail": _changed(20, b"\1"), "too short": STATE.pack()[:-1],
    "too long": STATE.pack() + b"x", "huge queue": _changed(84, b"\xff\xff\xff\xff"), "empty": b"",
}


@pytest.mark.parametrize("data", WRONG.values(), ids=WRONG)
def test_bytes_that_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        TcpState.unpack(data)


@given(st.binary(max_size=400))
def test_any_bytes(data: bytes) -> None:
    """A clean refusal, or a state that packs to the same bytes."""
    try:
        state = TcpState.unpack(STATE.pack()[:8] + data)
    except ValueError:
        return
    assert state.pack() == STATE.pack()[:8] + data
