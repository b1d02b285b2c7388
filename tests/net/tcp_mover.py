"""A kernel socket lends its connection to tcp_ring_peer and takes it back: ADDRESS FILE ROUNDS PROGRAM ARGUMENTS."""

import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path

tcprepair = import_module("vmahybrid.net.tcprepair")
TcpState = import_module("vmahybrid.net.tcpstate").TcpState
MESSAGE = 64


def pattern(at: int) -> bytes:
    return bytes(((at + i) * 2654435761) >> 13 & 255 for i in range(MESSAGE))


def read(sock: socket.socket) -> bytes:
    return sock.recv(MESSAGE, socket.MSG_WAITALL)


def main(address: str, file: str, rounds: int, program: list[str]) -> None:
    with socket.create_connection((address, 7000), 10) as sock:
        sock.settimeout(10)
        sock.sendall(b"E")
        for i in range(rounds):
            sock.sendall(pattern(i))
            assert read(sock) == pattern(i)
        sock.sendall(pattern(0))  # its answer is unread, or not here yet, when the connection goes
        sock.setblocking(False)
        state, kept = tcprepair.freeze(sock)
        Path(file).write_bytes(state.pack())
        tcprepair.park(sock, state, kept)
        subprocess.run([*program, "adopt", str(rounds), file], check=True, timeout=60)
        state = TcpState.unpack(Path(file).read_bytes())
        tcprepair.rebuild(sock, state, kept)
        tcprepair.nudge(sock, kept)
        sock.settimeout(10)
        assert read(sock) == pattern(0), "what the stack asked for"
        for i in range(rounds):
            sock.sendall(pattern(i))
            assert read(sock) == pattern(i)
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b"", "an orderly end"
    print("there and back", rounds)


main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:])
