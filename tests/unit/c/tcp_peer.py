"""The kernel side of tcp_ring_peer.c: ADDRESS server, or ADDRESS, a mode (echo, sink, generate, opens), a number."""

import socket
import struct
import sys
import threading
import zlib

PORT = 7000
CHUNK = 60000


def pattern(at: int, length: int) -> bytes:
    return bytes(((at + i) * 2654435761) >> 13 & 255 for i in range(length))


def read_exactly(conn: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        part = conn.recv(length - len(data))
        if not part:
            break
        data += part
    return data


def serve(conn: socket.socket) -> None:
    conn.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with conn:
        op = conn.recv(1)
        if op == b"E":
            while data := conn.recv(CHUNK):
                conn.sendall(data)
        elif op == b"S":
            crc = 0
            while data := conn.recv(1 << 20):
                crc = zlib.crc32(data, crc)
            conn.sendall(struct.pack("=I", crc))
        elif op == b"G":
            (length,) = struct.unpack("=Q", read_exactly(conn, 8))
            conn.sendall(pattern(0, length))


def server(address: str) -> None:
    with socket.create_server((address, PORT), backlog=512) as listener:
        print("ready", flush=True)
        while True:
            conn, _ = listener.accept()
            threading.Thread(target=serve, args=(conn,), daemon=True).start()


def client(address: str, mode: str, number: int) -> None:
    if mode == "opens":
        for _ in range(number):
            with socket.create_connection((address, PORT), 10) as conn:
                conn.sendall(b"E" + b"x" * 64)
                assert read_exactly(conn, 64) == b"x" * 64
                conn.shutdown(socket.SHUT_WR)
                assert conn.recv(1) == b""
    with socket.create_connection((address, PORT), 10) as conn:
        conn.settimeout(30)
        if mode == "echo":
            conn.sendall(b"E")
            for i in range(number):
                message = pattern(i, 64)
                conn.sendall(message)
                assert read_exactly(conn, 64) == message
        elif mode == "sink":
            data = pattern(0, number)
            conn.sendall(b"S" + data)
            conn.shutdown(socket.SHUT_WR)
            assert struct.unpack("=I", read_exactly(conn, 4))[0] == zlib.crc32(data)
        elif mode == "generate":
            conn.sendall(b"G" + struct.pack("=Q", number))
            assert read_exactly(conn, number) == pattern(0, number)
            assert conn.recv(1) == b""
    print("done", mode, number)


if sys.argv[2] == "server":
    server(sys.argv[1])
else:
    client(sys.argv[1], sys.argv[2], int(sys.argv[3]))
