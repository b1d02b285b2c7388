"""A peer of TCP connections that is made of frames, at an address that is nobody's (IPv4)."""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

FIN, SYN, RST, PSH, ACK = 1, 2, 4, 8, 16


def checksum(data: bytes) -> int:
    total = sum(struct.unpack(f"!{(len(data) + 1) // 2}H", data + b"\0" * (len(data) % 2)))
    while total >> 16:
        total = (total & 0xffff) + (total >> 16)
    return ~total & 0xffff


class Segment(NamedTuple):
    flags: int
    seq: int
    ack: int
    data: bytes
    port: int


class FramePeer:
    """``sock``: an AF_PACKET socket, bound to an interface. ``port`` is the other side's, 0: of who speaks first."""

    def __init__(self, sock: socket.socket, macs: tuple[str, str], addresses: tuple[str, str], own_port: int,
                 port: int = 0) -> None:
        self.sock, self.own_port, self.port = sock, own_port, port
        self.ethernet = bytes.fromhex("".join(reversed(macs)).replace(":", "")) + b"\x08\x00"
        self.own, self.peer = map(socket.inet_aton, addresses)

    def send(self, flags: int, seq: int, ack: int = 0, data: bytes = b"", wrong: int = 0,
             window: int = 8192) -> None:
        """``wrong``: what its checksum is beside the right one."""
        tcp = struct.pack("!HHIIBBHHH", self.own_port, self.port, seq % 2**32, ack % 2**32, 5 << 4, flags, window, 0, 0)
        tcp += data
        summed = checksum(self.own + self.peer + struct.pack("!HH", socket.IPPROTO_TCP, len(tcp)) + tcp)
        ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(tcp), 0, 0, 64, socket.IPPROTO_TCP, 0, self.own, self.peer)
        ip = ip[:10] + struct.pack("!H", checksum(ip)) + ip[12:]
        self.sock.send(self.ethernet + ip + tcp[:16] + struct.pack("!H", summed ^ wrong) + tcp[18:])

    def receive(self) -> Segment:
        """The next one to this port. TimeoutError as the socket has it."""
        while True:
            frame, where = self.sock.recvfrom(2048)
            if where[2] == socket.PACKET_OUTGOING or len(frame) < 54 or frame[23] != socket.IPPROTO_TCP or \
                    frame[30:34] != self.own or struct.unpack_from("!H", frame, 36)[0] != self.own_port:
                continue
            length, tcp = struct.unpack_from("!H", frame, 16)[0], frame[34:]
            port, _, seq, ack = struct.unpack_from("!HHII", tcp)
            return Segment(tcp[13], seq, ack, tcp[(tcp[12] >> 4) * 4:length - 20], port)
