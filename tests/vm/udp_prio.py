"""`udp_prio.py ADDRESS PEER PORT`: sends datagrams "warm N", then one of each priority, named by it."""

import socket
import sys
import time

SO_PRIORITY = 12
address, to = sys.argv[1], (sys.argv[2], int(sys.argv[3]))  # where nobody listens: a connected socket would be told
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    sock.bind((address, 0))
    for number in range(5):
        sock.sendto(b"warm %d" % number, to)
        time.sleep(0.3)
    for name, level, option, value in (
            ("none", socket.SOL_SOCKET, SO_PRIORITY, 0), ("priority 3", socket.SOL_SOCKET, SO_PRIORITY, 3),
            ("priority 5", socket.SOL_SOCKET, SO_PRIORITY, 5), ("low delay", socket.IPPROTO_IP, socket.IP_TOS, 0x10),
            ("throughput", socket.IPPROTO_IP, socket.IP_TOS, 0x08), ("none again", socket.SOL_SOCKET, SO_PRIORITY, 0)):
        sock.setsockopt(level, option, value)
        sock.sendto(name.encode(), to)
    print("sent", flush=True)
    sys.stdin.read()
