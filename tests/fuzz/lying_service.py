"""A service that lies: on the control socket it says whatever a seed decides, sometimes the truth.

It grants rings whose AF_XDP sockets are bound to nothing, passes wrong descriptors, wrong pages, too many of them,
answers late, never, twice, for another question, and talks in between.
"""

from __future__ import annotations

import array
import contextlib
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vmahybrid import contracts
from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.contracts import addr_to_bytes, lib
from vmahybrid.net.page import AddressInfo, LinkInfo, NeighbourInfo, NetPage, RouteInfo

AF_XDP, SOL_XDP = 44, 283
RINGS = {2: 512, 3: 512, 5: 1024, 6: 512}  # XDP_RX_RING, TX_RING, UMEM_FILL_RING, UMEM_COMPLETION_RING: descriptors
FRAMES, FRAME_SIZE = 2048, 2048
HEADER = contracts.size_of("struct vmh_msg_hdr")
EVENTS = (lib.VMH_EV_RING_GONE, lib.VMH_EV_FLOW_HOME, lib.VMH_EV_BYE, lib.VMH_EV_ASKED, lib.VMH_EV_TCP_MOVE,
          0, 99, 1 << 31)
NUMBERS = (0, 1, 2, 3, 16, 17, 255, 4096, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
LIES = ("seq", "type", "short", "long", "noise", "magic", "status", "fields", "many", "few", "strange", "empty",
        "twice", "events", "close", "hang", "flood", "late")


class LyingService:
    """Listens on ``path``. ``lies`` is how often a reply is one, 0 to 1; ``only`` restricts what kind.
    ``link_reason`` says why the interface is not served.

    The sandbox's side a is where the program lives. ``told`` counts the messages by what they were.
    """

    def __init__(self, sandbox: Sandbox, path: Path, seed: int, lies: float = 0.3, only: Sequence[str] = LIES,
                 link_reason: int = 0) -> None:
        self.random, self.lies, self.only = random.Random(seed), lies, only
        self.told: dict[str, int] = {}
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._page = _page(sandbox, link_reason)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen(16)
        self._listener.settimeout(0.1)
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(10)
        self._listener.close()
        self._page.close()

    def _accept(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                connection, _ = self._listener.accept()
                connection.settimeout(0.1)
                thread = threading.Thread(target=self._serve, args=(connection,))
                self._threads.append(thread)
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while not self._stop.is_set():
                try:
                    data, fds, _, _ = socket.recv_fds(connection, 2048, 8)
                except TimeoutError:
                    continue
                for fd in fds:
                    os.close(fd)
                if not data:
                    return
                self._reply(connection, data)

    def _reply(self, connection: socket.socket, data: bytes) -> None:
        """One reply, in a lock: the seed's random numbers come in the order of the requests."""
        request = contracts.unpack("struct vmh_msg_hdr", data)
        with self._lock:
            lie = self.random.choice(self.only) if self.random.random() < self.lies else "truth"
            self.told[lie] = self.told.get(lie, 0) + 1
            pause = self.random.choice((0.05, 0.3, 1.5))
        if lie == "hang":
            while not self._stop.wait(0.1):
                pass
        elif lie == "flood":
            end = time.monotonic() + 4
            while not self._stop.is_set() and time.monotonic() < end:
                connection.send(self._event())
        elif lie == "close":
            raise ConnectionAbortedError
        elif lie == "late":
            self._stop.wait(pause)
        message, fds = self._truth(request, data)
        try:
            for text, passed in self._told(lie, message, fds):
                with contextlib.suppress(TimeoutError):
                    _send(connection, text, passed)
        finally:
            for fd in fds:
                os.close(fd)

    def _told(self, lie: str, message: bytes, fds: list[int]) -> list[tuple[bytes, list[int]]]:
        choose = self.random
        edits: dict[str, tuple[int, int]] = {"magic": (0, 4), "type": (6, 2), "seq": (12, 4), "status": (16, 4)}
        if lie in edits:
            at, size = edits[lie]
            message = message[:at] + choose.randbytes(size) + message[at + size :]
        elif lie == "short":
            message = _sized(message[: choose.randrange(len(message) + 1)])
        elif lie == "long":
            message = _sized(message + choose.randbytes(choose.randrange(1, 2000)))
        elif lie == "noise":
            message = choose.randbytes(choose.randrange(1, 1500))
        elif lie == "fields":
            for at in range(HEADER, len(message) - 3, 4):
                if choose.random() < 0.3:
                    message = message[:at] + struct.pack("=I", choose.choice(NUMBERS)) + message[at + 4 :]
        elif lie == "many":
            fds = fds + [self._listener.fileno()] * choose.choice((1, 16, 17, 18, 40))
        elif lie == "few":
            fds = fds[:-1]
        elif lie == "strange":
            fds = [self._listener.fileno()] * len(fds)
        elif lie == "empty":
            return [(b"", [self._listener.fileno()]), (message, fds)]
        elif lie == "twice":
            return [(message, fds), (message, fds)]
        elif lie == "events":
            return [(self._event(), []) for _ in range(choose.choice((1, 10, 600)))] + [(message, fds)]
        return [(message, fds)]

    def _event(self) -> bytes:
        choose = self.random
        header = _header(lib.VMH_MSG_EVENT, contracts.size_of("struct vmh_msg_event"), 0)
        return contracts.pack("struct vmh_msg_event", hdr=header, event=choose.choice(EVENTS), a=choose.choice(NUMBERS),
                              b=choose.choice(NUMBERS))

    def _truth(self, request: Any, data: bytes) -> tuple[bytes, list[int]]:
        """What an honest service would answer, but for the rings: they lead nowhere."""
        fds: list[int] = []
        body: dict[str, Any] = {}
        struct_name = "struct vmh_msg_hdr"
        if request.type == lib.VMH_MSG_HELLO:
            struct_name, body = "struct vmh_msg_hello_reply", {"session": 7, "net_page_size": self._page.size}
            fds = [os.dup(self._page.fd)]
        elif request.type == lib.VMH_MSG_RING:
            asked = contracts.unpack("struct vmh_msg_ring", data)
            struct_name, body, fds = "struct vmh_msg_ring_reply", _grant(asked.ifindex), _ring_fds()
            if self.random.random() < 0.5:
                body["flags"] = lib.VMH_RING_F_BIND_AFTER
        elif request.type == lib.VMH_MSG_RING_MAPPED:
            struct_name, body = "struct vmh_msg_ring_mapped_reply", {"ring_id": 1}
        elif request.type == lib.VMH_MSG_ATTACH:
            struct_name, body = "struct vmh_msg_attach_reply", {"flow_id": self.random.randrange(1, 100), "rules": 1}
        header = _header(request.type | lib.VMH_MSG_REPLY, contracts.size_of(struct_name), request.seq)
        if struct_name == "struct vmh_msg_hdr":
            return contracts.pack(struct_name, **header), fds
        return contracts.pack(struct_name, hdr=header, **body), fds


def _header(type_: int, size: int, seq: int) -> dict[str, int]:
    return {"magic": lib.VMH_CTL_MAGIC, "version": lib.VMH_CTL_VERSION, "type": type_, "len": size, "seq": seq}


def _sized(message: bytes) -> bytes:
    """With the length in the header that the message has, where it is long enough to say one."""
    return message[:8] + struct.pack("=I", len(message)) + message[12:] if len(message) >= 12 else message


def _send(connection: socket.socket, message: bytes, fds: list[int]) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    connection.sendmsg([message], rights)


def _grant(ifindex: int) -> dict[str, Any]:
    return {"ring_id": 1, "ifindex": ifindex, "nqueues": 1, "frame_size": FRAME_SIZE, "frames": FRAMES,
            "rx_size": RINGS[2], "tx_size": RINGS[3],
            "fill_size": RINGS[5], "comp_size": RINGS[6], "mtu": 1500, "mac": b"\x02vmh\0\x01"}


def _ring_fds() -> list[int]:
    memory = os.memfd_create("lie", os.MFD_CLOEXEC)
    os.ftruncate(memory, FRAMES * FRAME_SIZE)
    with socket.socket(AF_XDP, socket.SOCK_RAW) as xsk:
        for option, size in RINGS.items():
            xsk.setsockopt(SOL_XDP, option, size)
        return [memory, xsk.detach()]


def _page(sandbox: Sandbox, link_reason: int) -> NetPage:
    """The page of side a, true but for the reason."""
    a, b = sandbox.sides
    ifindex = int(a.ip("-o", "link", "show", "dev", a.device).split(":")[0])
    mine, net, peer = addr_to_bytes(a.address), addr_to_bytes("10.77.0.0"), addr_to_bytes(b.address)
    page = NetPage("lie")
    mac = bytes.fromhex(a.mac.replace(":", ""))
    page.set_links([LinkInfo(ifindex, a.device, 1500, mac, True, False, 1, reason=link_reason)])
    page.set_addresses([AddressInfo(ifindex, 4, 24, mine, addr_to_bytes("10.77.0.255"))])
    page.set_routes([RouteInfo(4, 24, lib.VMH_ROUTE_UNICAST, False, ifindex, 0, 0, net, bytes(16), mine),
                     RouteInfo(4, 32, lib.VMH_ROUTE_LOCAL, False, ifindex, 0, 0, mine, bytes(16), mine)])
    page.set_neighbours([NeighbourInfo(ifindex, 4, peer, bytes.fromhex(b.mac.replace(":", "")), True)])
    return page
