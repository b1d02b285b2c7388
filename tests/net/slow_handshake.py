"""A peer made of frames, at an address that is nobody's: says when the SYN-ACK is there, answers it late, sends "late",
and says what became of it: slow_handshake.py INTERFACE OWN-MAC MAC OWN-ADDRESS ADDRESS PORT SECONDS."""

from __future__ import annotations

import socket
import struct
import sys
import time

FIN, SYN, RST, PSH, ACK = 1, 2, 4, 8, 16
OWN_PORT = 4242


def checksum(data: bytes) -> int:
    total = sum(struct.unpack(f"!{(len(data) + 1) // 2}H", data + b"\0" * (len(data) % 2)))
    while total >> 16:
        total = (total & 0xffff) + (total >> 16)
    return ~total & 0xffff


class Peer:
    def __init__(self, interface: str, own_mac: str, mac: str, own: str, address: str, port: str) -> None:
        self.sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x800))
        self.sock.bind((interface, 0x800))
        self.ethernet = bytes.fromhex((mac + own_mac).replace(":", "")) + b"\x08\x00"
        self.own, self.peer, self.port = socket.inet_aton(own), socket.inet_aton(address), int(port)

    def send(self, flags: int, seq: int, ack: int = 0, data: bytes = b"") -> None:
        tcp = struct.pack("!HHIIBBHHH", OWN_PORT, self.port, seq, ack, 5 << 4, flags, 8192, 0, 0) + data
        summed = checksum(self.own + self.peer + struct.pack("!HH", socket.IPPROTO_TCP, len(tcp)) + tcp)
        ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(tcp), 0, 0, 64, socket.IPPROTO_TCP, 0, self.own, self.peer)
        ip = ip[:10] + struct.pack("!H", checksum(ip)) + ip[12:]
        self.sock.send(self.ethernet + ip + tcp[:16] + struct.pack("!H", summed) + tcp[18:])

    def receive(self) -> tuple[int, int, bytes]:
        """Flags, sequence number and data of the next segment."""
        while True:
            frame = self.sock.recv(2048)
            if len(frame) < 54 or frame[23] != socket.IPPROTO_TCP or frame[30:34] != self.own:
                continue
            length, tcp = struct.unpack_from("!H", frame, 16)[0], frame[34:]
            return tcp[13], struct.unpack_from("!I", tcp, 4)[0], tcp[(tcp[12] >> 4) * 4:length - 20]


def main(argv: list[str]) -> None:
    peer = Peer(*argv[:6])
    peer.sock.settimeout(5)
    peer.send(SYN, 1000)
    while (got := peer.receive())[0] != SYN | ACK:
        pass
    print("syn-ack", flush=True)
    time.sleep(float(argv[6]))
    peer.send(ACK, 1001, got[1] + 1)
    peer.send(ACK | PSH, 1001, got[1] + 1, b"late")
    while True:
        flags, _seq, data = peer.receive()
        if flags & RST or data:
            print("reset" if flags & RST else data.decode(), flush=True)
            return


main(sys.argv[1:])
