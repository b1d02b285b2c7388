#!/usr/bin/env python3
"""Echo a UDP port by AF_XDP, with vmahybrid.xdp as a library: no service, no shim.

    afxdp_echo.py                     try it: makes two namespaces joined by a veth, sends 1000 datagrams, and cleans up
    afxdp_echo.py IF ADDRESS PORT     echo UDP ADDRESS:PORT arriving on IF, until Ctrl-C

Needs root (CAP_NET_ADMIN, CAP_NET_RAW, CAP_BPF, CAP_SYS_ADMIN for namespaces) and bcc (apt install python3-bpfcc).
Nothing but that one address and port is taken from the kernel, and that too only while this runs.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import threading
import time

from vmahybrid.contracts import addr_to_bytes, flow_key, htons
from vmahybrid.errors import VmahybridError
from vmahybrid.xdp import NetnsWorker, RingView, XdpPort, compile_image, open_ring

OURS, PEER, PORT, COUNT = "10.0.0.2", "10.0.0.1", 7, 1000


def turn(frame: bytes) -> bytes:
    """An Ethernet/IPv4/UDP frame (no VLAN tag, no options) sent back to where it came from.

    The IP header's sum stays right when the addresses change places; a UDP sum of 0 means "none" (RFC 768).
    """
    eth, ip, udp, data = frame[:14], frame[14:34], frame[34:42], frame[42:]
    return (eth[6:12] + eth[:6] + eth[12:] + ip[:12] + ip[16:] + ip[12:16]
            + udp[2:4] + udp[:2] + udp[4:6] + b"\0\0" + data)


def echo(worker: NetnsWorker, interface: str, address: str, port: int, ready: threading.Event,
         stop: threading.Event) -> None:
    """Serve until ``stop``; ``ready`` is set when packets arrive. Raises VmahybridError with a remedy, OSError."""
    with XdpPort.open(worker, compile_image(), interface) as served:
        ring = open_ring(served)  # direct: we are the first on this interface
        with RingView(ring.umem_fd, ring.xsk_fds, **ring.geometry) as view:
            ring.grant_source(addr_to_bytes(address), htons(port), socket.IPPROTO_UDP, 4, flow_id=1)
            served.install(flow_key(address, port), ring.action(rule_id=1))
            print(f"echoing udp {address}:{port} on {interface}: {served.mode} XDP on "
                  f"{served.info.driver or 'an unnamed driver'}, {ring.kind} ring of {len(ring.xsk_fds)} queue(s), "
                  f"zero-copy {ring.zerocopy}", flush=True)
            ready.set()
            try:
                while not stop.is_set():
                    if not view.wait(0.1):
                        continue
                    for queue in range(len(ring.xsk_fds)):
                        view.send([turn(frame) for frame in view.receive(queue=queue)], queue)
            finally:
                packets, size = served.hits(1)
                print(f"steered to the ring: {packets} frames, {size} bytes; dropped by the sockets: "
                      f"{ring.stats()['rx_dropped'] + ring.stats()['rx_ring_full']}", flush=True)


def sandbox() -> tuple[NetnsWorker, NetnsWorker]:
    """Two namespaces without names, joined by va (10.0.0.1) and vb (10.0.0.2); they end with their workers."""
    from pyroute2 import IPRoute

    left, right = NetnsWorker.open_private(), NetnsWorker.open_private()
    target = right.namespace_fd()

    def join() -> None:
        with IPRoute() as ipr:
            ipr.link("add", ifname="va", kind="veth", num_rx_queues=1, num_tx_queues=1,
                     peer={"ifname": "vb", "net_ns_fd": target, "num_rx_queues": 1, "num_tx_queues": 1})

    def address(name: str, own: str) -> None:
        with IPRoute() as ipr:
            index = ipr.link_lookup(ifname=name)[0]
            ipr.addr("add", index=index, address=own, prefixlen=24)
            ipr.link("set", index=index, state="up")

    left.call(join)
    os.close(target)
    left.call(address, "va", PEER)
    right.call(address, "vb", OURS)
    return left, right


def ask(worker: NetnsWorker) -> list[float]:
    """Round trips in microseconds of COUNT datagrams from an ordinary kernel socket."""
    times = []
    with worker.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(5)
        sock.connect((OURS, PORT))
        for number in range(COUNT):
            text = b"datagram %d" % number
            begun = time.perf_counter()
            sock.send(text)
            if sock.recv(100) != text:
                raise SystemExit("the echo is not what was sent")
            times.append((time.perf_counter() - begun) * 1e6)
    return times


def demonstrate() -> None:
    left, right = sandbox()
    ready, stop, failed = threading.Event(), threading.Event(), []

    def serve() -> None:
        try:
            echo(right, "vb", OURS, PORT, ready, stop)
        except Exception as error:
            failed.append(error)
            ready.set()

    server = threading.Thread(target=serve)
    server.start()
    try:
        ready.wait()
        if not failed:
            times = ask(left)
            print(f"{COUNT} datagrams echoed, median round trip {statistics.median(times):.0f} us (Python, asleep)")
    finally:
        stop.set()
        server.join()
        left.close()
        right.close()
    if failed:
        raise failed[0]


def main() -> int:
    try:
        if len(sys.argv) == 1:
            demonstrate()
        elif len(sys.argv) == 4:
            with NetnsWorker.open_current() as worker:
                echo(worker, sys.argv[1], sys.argv[2], int(sys.argv[3]), threading.Event(), threading.Event())
        else:
            print(__doc__, file=sys.stderr)
            return 2
    except KeyboardInterrupt:
        return 0
    except (VmahybridError, OSError) as error:
        print(f"afxdp_echo: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
