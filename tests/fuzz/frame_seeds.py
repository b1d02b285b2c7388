"""Writes the seed corpus of fuzz_frame: one valid frame per shape, so that the fuzzer starts behind the checksums.

Usage: frame_seeds.py DIRECTORY
"""

import struct
import sys
from itertools import product
from pathlib import Path

MACS = bytes.fromhex("02766d680002 02766d680001")


def internet_sum(data: bytes) -> int:
    """RFC 1071 checksum of data, as it is put into a header."""
    padded = data + b"\0" * (len(data) % 2)
    total: int = sum(struct.unpack(f"!{len(padded) // 2}H", padded))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def frame(
    payload: bytes, tags: int = 0, options: int = 0, target: bytes = bytes([10, 77, 0, 2]), pad: int = 0
) -> bytes:
    """An Ethernet frame of one UDP datagram; tags VLAN tags, options 32-bit words of IP options, pad bytes behind."""
    source = bytes([10, 77, 0, 1])
    udp = struct.pack("!4H", 40000, 11111, 8 + len(payload), 0) + payload
    pseudo = source + target + struct.pack("!2H", 17, len(udp))
    udp = udp[:6] + struct.pack("!H", internet_sum(pseudo + udp) or 0xFFFF) + udp[8:]
    length = 20 + options * 4 + len(udp)
    header = struct.pack("!2B3H2BH", 0x45 + options, 0, length, 1, 0x4000, 64, 17, 0) + source + target
    header += b"\x01" * (options * 4)
    header = header[:10] + struct.pack("!H", internet_sum(header)) + header[12:]
    vlan = b"".join(struct.pack("!2H", 0x88A8 if i + 1 < tags else 0x8100, 0xE000) for i in range(tags))
    return MACS + vlan + b"\x08\x00" + header + udp + b"\0" * pad


def seeds() -> dict[str, bytes]:
    """Name and input of every seed; the first byte tells the target whether to verify."""
    shapes = {
        f"tags{tags}-options{options}-payload{size}": frame(bytes(range(size)), tags, options)
        for tags, options, size in product((0, 1, 2, 3), (0, 1, 10), (0, 1, 22))
    }
    shapes["padded"] = frame(b"x", pad=17)
    shapes["multicast"] = frame(b"feed", target=bytes([239, 1, 2, 3]))
    shapes["fragment"] = frame(b"y" * 30)[:20] + b"\x20\x00" + frame(b"y" * 30)[22:]
    shapes["short"] = frame(b"")[:41]
    return {f"{name}-{verify}": bytes([verify]) + data for name, data in shapes.items() for verify in (0, 1)}


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in seeds().items():
        (directory / name).write_bytes(data)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
