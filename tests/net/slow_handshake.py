"""A peer made of frames, at an address that is nobody's: says when the SYN-ACK is there, answers it late, sends "late",
and says what became of it: slow_handshake.py INTERFACE OWN-MAC MAC OWN-ADDRESS ADDRESS PORT SECONDS."""

from __future__ import annotations

import socket
import sys
import time

from frame_peer import ACK, PSH, RST, SYN, FramePeer

OWN_PORT = 4242


def main(interface: str, own_mac: str, mac: str, own: str, address: str, port: str, seconds: str) -> None:
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x800))
    sock.bind((interface, 0x800))
    sock.settimeout(5)
    peer = FramePeer(sock, (own_mac, mac), (own, address), OWN_PORT, int(port))
    peer.send(SYN, 1000)
    while (got := peer.receive()).flags != SYN | ACK:
        pass
    print("syn-ack", flush=True)
    time.sleep(float(seconds))
    peer.send(ACK, 1001, got.seq + 1)
    peer.send(ACK | PSH, 1001, got.seq + 1, b"late")
    while True:
        got = peer.receive()
        if got.flags & RST or got.data:
            print("reset" if got.flags & RST else got.data.decode(), flush=True)
            return


main(*sys.argv[1:])
