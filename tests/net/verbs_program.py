"""UDP programs for tests of the verbs ring: `python -S -E verbs_program.py ROLE ARGUMENTS`, under the shim or not.

Every datagram begins with its number (8 bytes) and goes on with bytes that follow from number and length. Results are
one line of JSON on standard output.

    sink WAITING ADDRESS PORT COUNT SECONDS [GROUP]   receives until COUNT came or SECONDS went by without one
    echo WAITING ADDRESS PORT                         sends everything back, until it is ended
    ask ADDRESS PORT SIZES [FROM]                     one request per size (comma-separated), each answered within 1 s
    send ADDRESS PORT COUNT SIZE [PAUSE-EVERY]        sends numbered datagrams, 1 ms of pause after each PAUSE-EVERY
    hold ADDRESS PORT                                 binds, says "bound", reads nothing
    child ADDRESS PORT COUNT                          binds the next port and forks; the child binds PORT, says
                                                      {"bound": its pid}, and echoes COUNT datagrams
    fork ADDRESS PORT                                 takes one datagram, forks; the child echoes, then the parent

WAITING: block, poll, epoll.
"""

import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections import Counter

_NUMBER = struct.Struct("<Q")


def make(number, size):
    """Datagram of ``size`` bytes, at least 8."""
    body = bytes((number * 7 + i) & 0xFF for i in range(256))
    return _NUMBER.pack(number) + (body * (size // 256 + 1))[: size - 8]


def is_whole(data):
    return data == make(_NUMBER.unpack_from(data)[0], len(data))


def bound(address, port):
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    sock.bind((address, port))
    return sock


def receiver(sock, waiting, timeout):
    """A function that returns (data, peer), or None after ``timeout`` seconds (None: never)."""
    if waiting == "block":
        sock.settimeout(None)
        if timeout is not None:
            whole = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, whole)

        def receive():
            try:
                return sock.recvfrom(65535)
            except BlockingIOError:
                return None
        return receive
    sock.setblocking(False)
    if waiting == "poll":
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        wait = lambda: poll.poll(None if timeout is None else timeout * 1000)  # noqa: E731
    else:
        epoll = select.epoll()
        epoll.register(sock, select.EPOLLIN)
        wait = lambda: epoll.poll(timeout)  # noqa: E731

    def receive():
        while wait():
            try:
                return sock.recvfrom(65535)
            except BlockingIOError:
                continue
        return None
    return receive


def sink(waiting, address, port, count, seconds, group=""):
    sock = bound(address, int(port))
    if group:
        wanted = socket.inet_aton(group) + socket.inet_aton("0.0.0.0")
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, wanted)
    receive = receiver(sock, waiting, float(seconds))
    seen, order, broken, last = Counter(), 0, 0, -1
    print(json.dumps({"bound": True}), flush=True)
    while len(seen) < int(count) and (got := receive()):
        number = _NUMBER.unpack_from(got[0])[0]
        seen[number] += 1
        broken += not is_whole(got[0])
        order += number < last
        last = number
    while got := receiver(sock, "poll", 0.3)():  # what comes too often comes late
        seen[_NUMBER.unpack_from(got[0])[0]] += 1
    print(json.dumps({"distinct": len(seen), "total": sum(seen.values()), "broken": broken, "disorder": order}),
          flush=True)


def echo(waiting, address, port):
    sock = bound(address, int(port))
    receive = receiver(sock, waiting, None)
    print(json.dumps({"bound": True}), flush=True)
    while True:
        data, peer = receive()
        sock.sendto(data, peer)


def ask(address, port, sizes, source=""):
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    if source:
        sock.bind((source, 0))
    sock.connect((address, int(port)))
    sock.settimeout(1.0)
    wrong = {}
    slowest = 0.0
    for number, size in enumerate(map(int, sizes.split(","))):
        begun = time.monotonic()
        try:
            sock.send(make(number, size))
            if sock.recv(65535) != make(number, size):
                wrong[size] = "other bytes"
        except OSError as error:
            wrong[size] = repr(error)
        slowest = max(slowest, time.monotonic() - begun)
    print(json.dumps({"wrong": wrong, "slowest": slowest}), flush=True)


def send(address, port, count, size, every="0"):
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 0)
    sock.connect((address, int(port)))
    for number in range(int(count)):
        sock.send(make(number, int(size)))
        if int(every) and number % int(every) == 0:
            time.sleep(0.001)
    print(json.dumps({"sent": int(count)}), flush=True)


def hold(address, port):
    sock = bound(address, int(port))
    print(json.dumps({"bound": True}), flush=True)
    signal.pause()
    sock.close()


def fork(address, port):
    """The child answers three requests and ends; the parent answers from then on."""
    sock = bound(address, int(port))
    print(json.dumps({"bound": True}), flush=True)
    sock.recvfrom(65535)
    child = os.fork()
    for _ in range(3 if child == 0 else 0):
        data, peer = sock.recvfrom(65535)
        sock.sendto(data, peer)
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    print(json.dumps({"child": "ended"}), flush=True)
    while True:
        data, peer = sock.recvfrom(65535)
        sock.sendto(data, peer)


def child(address, port, count):
    parents = bound(address, int(port) + 1)
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        parents.close()
        return
    signal.alarm(30)  # the parent's is not inherited
    sock = bound(address, int(port))
    print(json.dumps({"bound": os.getpid()}), flush=True)
    for _ in range(int(count)):
        data, peer = sock.recvfrom(65535)
        sock.sendto(data, peer)
    os._exit(0)


if __name__ == "__main__":
    signal.alarm(60)  # whoever started this may be dead
    {"sink": sink, "echo": echo, "ask": ask, "send": send, "hold": hold, "fork": fork,
     "child": child}[sys.argv[1]](*sys.argv[2:])
