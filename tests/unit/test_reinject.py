"""A TCP segment on its way to the kernel: only one of the connection whose socket was proved."""

from __future__ import annotations

import socket
import struct

import pytest

from vmahybrid.contracts import addr_to_bytes
from vmahybrid.errors import Refused
from vmahybrid.service.reinject import packets_in, segment_frame
from vmahybrid.steering.flow import Flow, FlowAction, Kind, Source
from vmahybrid.xdp.bpf import LIVE_FRAME_MAX

MAC = bytes(range(6))
OURS = {"4": ("10.0.0.1", "10.0.0.2"), "6": ("fd00::1", "fd00::2")}


def flow(ip: str) -> Flow:
    local, remote = (addr_to_bytes(text) for text in OURS[ip])
    return Flow(action=FlowAction.RING, source=Source.SOCKET, kind=Kind.FIVE, proto=socket.IPPROTO_TCP, local=local,
                local_port=80, remote=remote, remote_port=4000)


def packet(ip: str, source: str = "", to: str = "", sport: int = 4000, dport: int = 80, proto: int = 6,
           data: bytes = b"text") -> bytes:
    family = socket.AF_INET if ip == "4" else socket.AF_INET6
    ours = OURS[ip]
    ends = socket.inet_pton(family, source or ours[1]) + socket.inet_pton(family, to or ours[0])
    tcp = struct.pack("!HH", sport, dport) + bytes(16) + data
    if ip == "4":
        return struct.pack("!BBHIBBH", 0x45, 0, 20 + len(tcp), 0, 64, proto, 0) + ends + tcp
    return struct.pack("!IHBB", 6 << 28, len(tcp), proto, 64) + ends + tcp


@pytest.mark.parametrize("ip", OURS)
def test_a_segment_of_the_connection(ip: str) -> None:
    whole = packet(ip)
    frame = segment_frame(whole, flow(ip), MAC)
    assert frame[:6] == MAC
    assert frame[12:14] == {"4": b"\x08\x00", "6": b"\x86\xdd"}[ip]
    assert frame[14:] == whole


@pytest.mark.parametrize("ip", OURS)
@pytest.mark.parametrize("other", [{"sport": 4001}, {"dport": 81}, {"proto": 17}, {"source": True}, {"to": True}])
def test_any_other_is_refused(ip: str, other: dict[str, object]) -> None:
    stranger = {"4": "10.0.0.9", "6": "fd00::9"}[ip]
    changes = {name: stranger if value is True else value for name, value in other.items()}
    with pytest.raises(Refused):
        segment_frame(packet(ip, **changes), flow(ip), MAC)  # type: ignore[arg-type]


@pytest.mark.parametrize("ip", OURS)
def test_what_is_cut_is_refused(ip: str) -> None:
    whole = packet(ip)
    head = len(whole) - len(b"text") - 20
    for length in range(head + 4):
        with pytest.raises(Refused):
            segment_frame(whole[:length], flow(ip), MAC)
    with pytest.raises(Refused):
        segment_frame(packet({"4": "6", "6": "4"}[ip]), flow(ip), MAC)


def record(data: bytes, length: int | None = None) -> bytes:
    """A struct vmh_tcp_frame."""
    whole = struct.pack("=I", len(data) if length is None else length) + data
    return whole.ljust(len(whole) + 7 & ~7, b"\0")


@pytest.mark.parametrize(("data", "found"), [
    (b"", []), (b"\1\0\0", []), (record(b"one") + record(b"") + record(b"three!!!!"), [b"one", b"", b"three!!!!"]),
    (record(b"one") + record(b"cut", 30), [b"one"]), (record(b"one") + record(b"x", 2**32 - 1), [b"one"]),
    (record(bytes(LIVE_FRAME_MAX)) + record(b"two"), [b"two"]),  # as if the wire had lost it
])
def test_frames_of_a_ring_in_a_memory_file(data: bytes, found: list[bytes]) -> None:
    assert list(packets_in(data)) == found
