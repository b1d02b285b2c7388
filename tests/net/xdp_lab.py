"""Two unnamed namespaces joined by a veth, with what the AF_XDP tests need around them.

``a`` (10.0.0.1, interface va) is the kernel's side, ``b`` (10.0.0.2, interface vb) carries the rings. Both vanish with
the lab, whatever happens.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import vmahybrid
from vmahybrid.contracts import addr_to_bytes, flow_key, htons
from vmahybrid.net.netns import NetnsWorker
from vmahybrid.xdp.compile import compile_image
from vmahybrid.xdp.image import Image
from vmahybrid.xdp.port import XdpPort
from vmahybrid.xdp.ring import Ring
from vmahybrid.xdp.ringview import RingView

A, B = "10.0.0.1", "10.0.0.2"
USER = Path(__file__).with_name("xdp_user.py")
TESTS = Path(__file__).resolve().parents[1]

# The same vmahybrid as here, installed or in the tree, for `python -P`.
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{Path(vmahybrid.__file__).resolve().parents[1]}:{TESTS}"}


@functools.cache
def image() -> Image:
    return compile_image()


def run(worker: NetnsWorker, *argv: str) -> str:
    done = worker.call(subprocess.run, argv, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 0, f"{argv}: {done.stderr}"
    return done.stdout


class Lab:
    def __init__(self, queues: int = 1, active: int | None = None, mtu: int = 1500) -> None:
        self.a, self.b = NetnsWorker.open_private(), NetnsWorker.open_private()
        try:
            self._join(queues, queues if active is None else active, mtu)
        except BaseException:
            self.close()
            raise

    def _join(self, queues: int, active: int, mtu: int) -> None:
        from pyroute2 import IPRoute

        both = {"num_rx_queues": queues, "num_tx_queues": queues, "mtu": mtu}
        target = self.b.namespace_fd()

        def add() -> None:
            with IPRoute() as ipr:
                ipr.link("add", ifname="va", kind="veth", **both, peer={"ifname": "vb", "net_ns_fd": target, **both})

        try:
            self.a.call(add)
        finally:
            os.close(target)
        for worker, name, address in ((self.a, "va", A), (self.b, "vb", B)):
            run(worker, "sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1")  # its chatter would spoil the counts
            if queues > 1:
                run(worker, "ethtool", "-L", name, "rx", str(active), "tx", str(active))
            run(worker, "ip", "address", "add", f"{address}/24", "dev", name)
            run(worker, "ip", "link", "set", name, "up")
        # known neighbours: no ARP among the frames that tests count
        run(self.a, "ip", "neigh", "replace", B, "lladdr", self.mac("vb"), "dev", "va", "nud", "permanent")
        run(self.b, "ip", "neigh", "replace", A, "lladdr", self.mac("va"), "dev", "vb", "nud", "permanent")

    def mac(self, name: str) -> str:
        worker = self.a if name == "va" else self.b
        return str(json.loads(run(worker, "ip", "-j", "link", "show", name))[0]["address"])

    def port(self, mode: str = "auto", *, switch: bool = False, detach: bool = False) -> XdpPort:
        return XdpPort.open(self.b, image(), "vb", mode, switch=switch, detach=detach)

    def kernel_socket(self, port: int = 0, side: str = "a") -> socket.socket:
        worker, address = (self.a, A) if side == "a" else (self.b, B)
        sock = worker.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.bind((address, port))
        sock.settimeout(2)
        return sock

    def links(self) -> list[str]:
        """Names in the namespace of the rings."""
        return sorted(link["ifname"] for link in json.loads(run(self.b, "ip", "-j", "link")))

    def close(self) -> None:
        self.a.close()
        self.b.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()


def steer(port: XdpPort, ring: Ring, udp_port: int, rule: int = 1) -> None:
    """What the service does for a flow: UDP to 10.0.0.2:``udp_port`` goes to the ring, which may send as that."""
    ring.grant_source(addr_to_bytes(B), htons(udp_port), socket.IPPROTO_UDP, 4, rule)
    port.zero_hits(rule)
    port.install(flow_key(B, udp_port), ring.action(rule))


def view(ring: Ring) -> RingView:
    return RingView(ring.umem_fd, ring.xsk_fds, **ring.geometry)


def receive(ring: RingView, count: int, seconds: float = 2.0) -> list[bytes]:
    """``count`` frames, or fewer when none came for ``seconds``."""
    frames: list[bytes] = []
    while len(frames) < count and ring.wait(seconds):
        frames += ring.receive()
    return frames


def answer(frame: bytes, *, source_port: int | None = None, source_mac: bytes | None = None) -> bytes:
    """The frame sent back: addresses and ports swapped, UDP sum 0; the source forged where one is given."""
    ip, udp = frame[14:34], frame[34:42]
    sport = udp[2:4] if source_port is None else source_port.to_bytes(2, "big")
    return (frame[6:12] + (source_mac or frame[:6]) + frame[12:14] + ip[:12] + ip[16:20] + ip[12:16]
            + sport + udp[:2] + udp[4:6] + b"\0\0" + frame[42:])


def payload(frame: bytes) -> bytes:
    return frame[42:14 + int.from_bytes(frame[16:18], "big")]


def datagrams(sock: socket.socket, count: int) -> list[tuple[bytes, Any]]:
    return [sock.recvfrom(2048) for _ in range(count)]


def nothing_comes(sock: socket.socket, seconds: float = 0.2) -> bool:
    before = sock.gettimeout()
    sock.settimeout(seconds)
    try:
        sock.recvfrom(2048)
    except TimeoutError:
        return True
    finally:
        sock.settimeout(before)
    return False


class User:
    """Another process that got a ring's fds, without any privilege; see xdp_user.py."""

    def __init__(self, ring: Ring, uid: int = 65534, orphan: bool = False) -> None:
        """``orphan``: it lives on when its starter dies, for a minute at most."""
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.settimeout(20)
        with theirs:
            arguments = [str(number) for number in (theirs.fileno(), uid, int(orphan))]
            self.process = subprocess.Popen([sys.executable, "-P", str(USER), *arguments],
                                            pass_fds=[theirs.fileno()], env=ENVIRONMENT)
        socket.send_fds(self.control, [json.dumps(ring.geometry).encode()], [ring.umem_fd, *ring.xsk_fds])
        self.report = json.loads(self.control.recv(4096) or b"{}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        self.control.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()
