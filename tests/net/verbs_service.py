"""An honest service that grants raw packet QPs and nothing else: what tests of the shim's verbs ring talk to.

It answers every request, remembers what it was asked, and mirrors no rule anywhere: a frame that no QP takes goes to
the kernel's socket. Where a program offers no usable device it refuses the ring with the reason that the program gave.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from vmahybrid import contracts
from vmahybrid.bench.sandbox import Sandbox, Side
from vmahybrid.contracts import addr_to_bytes, lib
from vmahybrid.net.page import AddressInfo, LinkInfo, NeighbourInfo, NetPage, RouteInfo

STRUCTS = {
    lib.VMH_MSG_HELLO: ("hello", "struct vmh_msg_hello", "struct vmh_msg_hello_reply"),
    lib.VMH_MSG_RING: ("ring", "struct vmh_msg_ring", "struct vmh_msg_ring_reply"),
    lib.VMH_MSG_ATTACH: ("attach", "struct vmh_msg_attach", "struct vmh_msg_attach_reply"),
    lib.VMH_MSG_DETACH: ("detach", "struct vmh_msg_detach", "struct vmh_msg_hdr"),
    lib.VMH_MSG_NEIGH: ("neigh", "struct vmh_msg_neigh", "struct vmh_msg_hdr"),
    lib.VMH_MSG_RELEASE: ("release", "struct vmh_msg_release", "struct vmh_msg_hdr"),
    lib.VMH_MSG_REINJECT: ("reinject", "struct vmh_msg_reinject", "struct vmh_msg_hdr"),
}


@dataclass
class Said:
    """A request: its name and its fields (contracts.as_dict), ``fields["hdr"]`` included."""

    what: str
    fields: dict[str, Any]


class VerbsService:
    """Serves the programs of one side of a sandbox on the socket ``path``. ``said`` is what they asked, in order."""

    def __init__(self, sandbox: Sandbox, side: Side, path: Path, mtu: int = 1500) -> None:
        self.side, self.path, self.mtu = side, path, mtu
        self.peer = next(other for other in sandbox.sides if other is not side)
        self.ifindex = int(side.ip("-o", "link", "show", "dev", side.device).split(":")[0])
        self.said: list[Said] = []
        self.ring_seconds = 0   # that a ring takes to be made, of which programs hear each second
        self.silent = False     # they do not
        self._numbers = {"ring": 0, "flow": 0}
        self._connections: list[socket.socket] = []
        self._stop = threading.Event()
        self._page = NetPage("verbs-test")
        self._fill_page()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen(16)
        self._listener.settimeout(0.1)
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(10)
        self._listener.close()
        self._page.close()
        self.path.unlink(missing_ok=True)

    @property
    def mac(self) -> bytes:
        return bytes.fromhex(self.side.mac.replace(":", ""))

    def asked(self, what: str) -> list[dict[str, Any]]:
        return [said.fields for said in list(self.said) if said.what == what]

    def wait(self, condition: Callable[[], Any], timeout: float = 5.0) -> Any:
        """The first true value of ``condition``; AssertionError with what was said after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while not (value := condition()):
            assert time.monotonic() < deadline, [said.what for said in self.said]
            time.sleep(0.01)
        return value

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """The addresses that the programs see on the page."""
        self._page.set_addresses([AddressInfo(self.ifindex, 4, 24, addr_to_bytes(a), addr_to_bytes("10.77.0.255"))
                                  for a in addresses])

    def event(self, event: int, a: int = 0, reason: int = 0) -> None:
        """To every program."""
        header = self._header(lib.VMH_MSG_EVENT, contracts.size_of("struct vmh_msg_event"), 0, reason=reason)
        for connection in self._connections:
            connection.send(contracts.pack("struct vmh_msg_event", hdr=header, event=event, a=a))

    def _fill_page(self) -> None:
        mine, net = addr_to_bytes(self.side.address), addr_to_bytes("10.77.0.0")
        peer = addr_to_bytes(self.peer.address)
        index = self.ifindex
        self._page.set_links([LinkInfo(index, self.side.device, self.mtu, self.mac, True, False, 1)])
        self.set_addresses([self.side.address])
        self._page.set_routes([
            RouteInfo(4, 32, lib.VMH_ROUTE_LOCAL, False, index, 0, 0, mine, bytes(16), mine),
            RouteInfo(4, 24, lib.VMH_ROUTE_UNICAST, False, index, 0, 0, net, bytes(16), mine),
            RouteInfo(4, 4, lib.VMH_ROUTE_UNICAST, False, index, 0, 0, addr_to_bytes("224.0.0.0"), bytes(16), mine)])
        self._page.set_neighbours([
            NeighbourInfo(index, 4, peer, bytes.fromhex(self.peer.mac.replace(":", "")), True)])

    def _accept(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                connection, _ = self._listener.accept()
                connection.settimeout(0.1)
                self._connections.append(connection)
                self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
                self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while not self._stop.is_set():
                try:
                    data, fds, _, _ = socket.recv_fds(connection, lib.VMH_MSG_MAX, 8)
                except TimeoutError:
                    continue
                for fd in fds:
                    os.close(fd)
                if not data:
                    break
                self._answer(connection, data)
        self._connections.remove(connection)

    def _header(self, type_: int, size: int, seq: int, **more: int) -> dict[str, int]:
        return {"magic": lib.VMH_CTL_MAGIC, "version": lib.VMH_CTL_VERSION, "type": type_, "len": size, "seq": seq,
                **more}

    def _answer(self, connection: socket.socket, data: bytes) -> None:
        asked = contracts.unpack("struct vmh_msg_hdr", data)
        what, request, reply = STRUCTS[asked.type]
        fields = contracts.as_dict(contracts.unpack(request, data.ljust(contracts.size_of(request), b"\0")))
        self.said.append(Said(what, fields))
        fds: list[int] = []
        body: dict[str, Any] = {}
        refusal = 0
        if what == "hello":
            body, fds = {"session": 7, "net_page_size": self._page.size}, [self._page.fd]
        elif what == "ring":
            for _ in range(self.ring_seconds):
                time.sleep(1)
                if not self.silent:
                    self.event(lib.VMH_EV_MAKING)
            refusal = 0 if fields["verbs"] == lib.VMH_VERBS_USABLE else fields["verbs_reason"]
            body = {"ring_id": self._next("ring"), "ifindex": fields["ifindex"], "kind": lib.VMH_RING_VERBS,
                    "mtu": self.mtu, "mac": self.mac}
        elif what == "attach":
            body = {"flow_id": self._next("flow"), "rules": 1}
        if refusal:
            reply, body = "struct vmh_msg_hdr", {}
        header = self._header(asked.type | lib.VMH_MSG_REPLY, contracts.size_of(reply), asked.seq,
                              status=-95 if refusal else 0, reason=refusal)
        message = contracts.pack(reply, **header) if reply == "struct vmh_msg_hdr" else \
            contracts.pack(reply, hdr=header, **body)
        socket.send_fds(connection, [message], fds)

    def _next(self, what: str) -> int:
        self._numbers[what] += 1
        return self._numbers[what]
