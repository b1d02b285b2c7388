"""`python stamp_program.py ADDRESS PORT COUNT FLAGS`: receives with SO_TIMESTAMPING, prints a line of JSON: of each
datagram the three times in ns, and the clocks when it was read."""

import json
import socket
import struct
import sys
import time

SO_TIMESTAMPING = 37
address, port, count, flags = sys.argv[1], *map(int, sys.argv[2:])
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPING, flags)
sock.bind((address, port))
sock.settimeout(5)
print("bound", flush=True)
seen = []
for _ in range(count):
    _, controls, _, _ = sock.recvmsg(100, 400)
    times = [(a * 10**9 + b, c * 10**9 + d, e * 10**9 + f)
             for level, kind, data in controls if (level, kind) == (socket.SOL_SOCKET, SO_TIMESTAMPING)
             for a, b, c, d, e, f in [struct.unpack("6q", data)]]
    seen.append({"times": times, "real": time.time_ns(), "monotonic": time.monotonic_ns()})
print(json.dumps(seen), flush=True)
time.sleep(30)
