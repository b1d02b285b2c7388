"""An unmodified UDP server: sends back every datagram. udp_echo.py ADDRESS PORT"""

import socket
import sys

with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
    server.bind((sys.argv[1], int(sys.argv[2])))
    print("ready", flush=True)
    while True:
        data, sender = server.recvfrom(2048)
        server.sendto(data, sender)
