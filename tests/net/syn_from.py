"""`python syn_from.py DEVICE MAC ADDRESS PORT SOURCE...`: a SYN from each, in a frame of ours; says those that are
answered on the same wire, one a line."""

import random
import select
import socket
import sys
import time

from syn_flood import syn

device, mac, address, port, *sources = sys.argv[1:]
family = socket.AF_INET6 if ":" in address else socket.AF_INET
target, names = socket.inet_pton(family, address), {socket.inet_pton(family, source): source for source in sources}
at, tcp = ((22, 54) if family == socket.AF_INET6 else (26, 34))
answered = set()
with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3)) as sock:
    sock.bind((device, 3))
    for name in names:
        sock.send(syn(bytes.fromhex(mac.replace(":", "")), name, target, int(port), random.Random(name)))
    end = time.monotonic() + 1.0
    while (left := end - time.monotonic()) > 0:
        if select.select([sock], [], [], left)[0]:
            frame = sock.recv(2048)
            size = len(target)
            if len(frame) > tcp + 13 and frame[at:at + size] == target and frame[tcp + 13] == 0x12:
                answered.add(frame[at + size:at + 2 * size])
print(*(names[name] for name in names if name in answered), sep="\n")
