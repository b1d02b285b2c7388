"""A client of the control socket in Python: what a program under the shim says, for tests of the service.

Run as a program it says what its standard input tells it, one JSON object per line, in the namespace and with the
identity of its process; each answer is one line of JSON.
"""

from __future__ import annotations

import array
import ctypes
import functools
import json
import os
import select
import socket
import struct
import sys
import time
from typing import Any, Self

from vmahybrid import contracts
from vmahybrid.contracts import addr_to_bytes, ffi, htons, lib
from vmahybrid.steering.reasons import Reason

HEADER = "struct vmh_msg_hdr"
REPLIES = {lib.VMH_MSG_HELLO: "struct vmh_msg_hello_reply", lib.VMH_MSG_RING: "struct vmh_msg_ring_reply",
           lib.VMH_MSG_ATTACH: "struct vmh_msg_attach_reply",
           lib.VMH_MSG_RING_MAPPED: "struct vmh_msg_ring_mapped_reply",
           lib.VMH_MSG_TCP_TAKE: "struct vmh_msg_tcp_take_reply",
           lib.VMH_MSG_TCP_SHOW: "struct vmh_msg_tcp_show_reply"}
SO_NETNS_COOKIE = 71  # asm-generic/socket.h
REINJECT_HEAD = ffi.offsetof("struct vmh_msg_reinject", "data")
KINDS = {"5t": lib.VMH_FLOW_5T, "3t": lib.VMH_FLOW_3T, "mc": lib.VMH_FLOW_MC}


class Closed(Exception):
    """The service closed the connection."""


class Client:
    """Requests in lock step; events that come in between are in ``events`` as (event, a, b, reason)."""

    def __init__(self, path: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(5)
        self.sock.connect(path)
        self.events: list[tuple[int, int, int, int]] = []
        self.fds: list[int] = []
        self._seq = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        self.sock.close()
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()

    def pack(self, type_: int, ctype: str, **fields: Any) -> bytes:
        self._seq += 1
        header = {"magic": lib.VMH_CTL_MAGIC, "version": lib.VMH_CTL_VERSION, "type": type_,
                  "len": contracts.size_of(ctype), "seq": self._seq, **fields.pop("hdr", {})}
        return contracts.pack(ctype, hdr=header, **fields)

    def send(self, data: bytes, *fds: int) -> None:
        socket.send_fds(self.sock, [data], list(fds))

    def receive(self) -> bytes:
        """The next message of any kind; its descriptors are appended to ``fds``. Raises Closed."""
        try:
            data, control, _flags, _ = self.sock.recvmsg(lib.VMH_MSG_MAX, socket.CMSG_SPACE(17 * 4))
        except ConnectionResetError:
            raise Closed from None
        for _level, _kind, payload in control:
            fds = array.array("i")
            fds.frombytes(payload)
            self.fds += fds
        if not data:
            raise Closed
        return data

    def reply(self) -> Any:
        """The next reply; events before it are put aside."""
        while True:
            data = self.receive()
            header = contracts.unpack(HEADER, data)
            if header.type == lib.VMH_MSG_EVENT:
                self._event(data)
                continue
            ctype = REPLIES.get(header.type & ~lib.VMH_MSG_REPLY, HEADER)
            return contracts.unpack(ctype if len(data) >= contracts.size_of(ctype) else HEADER, data)

    def _event(self, data: bytes) -> None:
        event = contracts.unpack("struct vmh_msg_event", data)
        self.events.append((event.event, event.a, event.b, event.hdr.reason))

    def wait_event(self, timeout: float = 3.0) -> tuple[int, int, int, int]:
        """The oldest event that was not taken yet. Raises TimeoutError, Closed."""
        until = time.monotonic() + timeout
        while not self.events:
            if not select.select([self.sock], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError("no event came")
            self._event(self.receive())
        return self.events.pop(0)

    def call(self, type_: int, ctype: str, *fds: int, **fields: Any) -> Any:
        self.send(self.pack(type_, ctype, **fields), *fds)
        return self.reply()

    def hello(self, *fds: int, comm: str = "client") -> Any:
        return self.call(lib.VMH_MSG_HELLO, "struct vmh_msg_hello", *fds, pid=os.getpid(), comm=comm.encode(),
                         cmdline=b"a test")

    def ring(self, ifindex: int, device: str | None = None, why: int = Reason.NO_VERBS_LIBRARY, **sizes: int) -> Any:
        """The reply; ``fds`` grows by the UMEM and the sockets. ``device``: has raw packet QPs; None: ``why`` not."""
        verbs = {"verbs": lib.VMH_VERBS_NONE, "verbs_reason": int(why)} if device is None else {
            "verbs": lib.VMH_VERBS_USABLE, "verbs_device": device.encode()}
        return self.call(lib.VMH_MSG_RING, "struct vmh_msg_ring", ifindex=ifindex, **verbs, **sizes)

    def mapped(self, ring_id: int) -> Any:
        return self.call(lib.VMH_MSG_RING_MAPPED, "struct vmh_msg_ring_mapped", ring_id=ring_id)

    def attach_port(self, address: str, ifindex: int, **more: Any) -> Any:
        """A port of the service's choice."""
        fields = {"kind": KINDS["3t"], "ifindex": ifindex, "proto": socket.IPPROTO_TCP, "family": 4,
                  "local_addr": addr_to_bytes(address), "flags": lib.VMH_ATTACH_F_PORT, **more}
        return self.call(lib.VMH_MSG_ATTACH, "struct vmh_msg_attach", **fields)

    def attach(self, fd: int, kind: str, local: tuple[str, int], remote: tuple[str, int] = ("*", 0), ifindex: int = 0,
               **more: Any) -> Any:
        fields = {"kind": KINDS[kind], "ifindex": ifindex, "fd": fd, "proto": socket.IPPROTO_UDP, "family": 4,
                  "local_addr": addr_to_bytes(local[0]), "local_port": htons(local[1]),
                  "remote_addr": addr_to_bytes(remote[0]), "remote_port": htons(remote[1]), **more}
        return self.call(lib.VMH_MSG_ATTACH, "struct vmh_msg_attach", fd, **fields)

    def tcp_take(self, fd: int, flow_id: int) -> tuple[Any, bytes]:
        """The reply, and the state, empty if it was refused."""
        with open(os.memfd_create("state"), "w+b") as file:
            reply = self.call(lib.VMH_MSG_TCP_TAKE, "struct vmh_msg_tcp_take", fd, file.fileno(), flow_id=flow_id)
            state = file.read()
        assert len(state) == reply.len
        return reply, state

    def tcp_take_all(self, wanted: list[tuple[int, int]], more: int = 0, detach: int = 0) -> list[tuple[Any, bytes]]:
        """(socket, flow) of each, in one go: the replies, in that order, and the states. ``more``: so many are said to
        follow, and don't. ``detach``: a flow that is detached at the same time, of which the reply comes last."""
        room, order = 4096, []
        with open(os.memfd_create("state"), "w+b") as file:
            for i, (fd, flow_id) in enumerate(wanted):
                self.send(self.pack(lib.VMH_MSG_TCP_TAKE, "struct vmh_msg_tcp_take", flow_id=flow_id, at=i * room,
                                    follow=len(wanted) - i - 1 + more), fd, file.fileno())
                order.append(self._seq)
            if detach:
                self.send(self.pack(lib.VMH_MSG_DETACH, "struct vmh_msg_detach", flow_id=detach))
            replies = {getattr(reply, "hdr", reply).seq: reply for reply in (self.reply() for _ in order)}
            taken = [(replies[number], os.pread(file.fileno(), getattr(replies[number], "len", 0), i * room))
                     for i, number in enumerate(order)]
        return [*taken, (self.reply(), b"")] if detach else taken

    def tcp_home(self, fd: int, flow_id: int, state: bytes, ifindex: int = 0) -> Any:
        with open(os.memfd_create("state"), "w+b") as file:
            file.write(state)
            file.flush()
            return self.call(lib.VMH_MSG_TCP_HOME, "struct vmh_msg_tcp_home", fd, file.fileno(), flow_id=flow_id,
                             ifindex=ifindex)

    def tcp_home_all(self, wanted: list[tuple[int, int, bytes]], more: int = 0, room: int = 4096) -> list[Any]:
        """(socket, flow, state) of each, in one go: the replies, in that order. ``more`` as of tcp_take_all(); ``room``
        bytes are between two states."""
        order = []
        with open(os.memfd_create("state"), "w+b") as file:
            for i, (fd, flow_id, state) in enumerate(wanted):
                os.pwrite(file.fileno(), state, i * room)
                self.send(self.pack(lib.VMH_MSG_TCP_HOME, "struct vmh_msg_tcp_home", flow_id=flow_id, at=i * room,
                                    follow=len(wanted) - i - 1 + more), fd, file.fileno())
                order.append(self._seq)
            replies = {reply.seq: reply for reply in (self.reply() for _ in order)}
            return [replies[number] for number in order]

    def tcp_show(self, conns: list[tuple[int, int, tuple[str, int], tuple[str, int]]], ifindex: int, count: int,
                 flags: int) -> Any:
        """(socket, flow of the port, local, remote); ``count``: what the message says."""
        conn = [{"flow_id": flow_id, "ifindex": ifindex, "fd": fd, "local_addr": addr_to_bytes(local[0]),
                 "local_port": htons(local[1]), "remote_addr": addr_to_bytes(remote[0]),
                 "remote_port": htons(remote[1])} for fd, flow_id, local, remote in conns]
        return self.call(lib.VMH_MSG_TCP_SHOW, "struct vmh_msg_tcp_show", *(c[0] for c in conns), n=count, conn=conn,
                         flags=flags)

    def tcp_hide(self, inodes: list[int]) -> Any:
        return self.call(lib.VMH_MSG_TCP_HIDE, "struct vmh_msg_tcp_hide", n=len(inodes), inode=inodes)

    def detach(self, flow_id: int, cause: int = 0) -> Any:
        return self.call(lib.VMH_MSG_DETACH, "struct vmh_msg_detach", flow_id=flow_id, cause=cause)

    def reinject(self, fd: int, kind: str, data: bytes, source: tuple[str, int], local: tuple[str, int],
                 remote: tuple[str, int] = ("*", 0), to: str = "", ifindex: int = 0, **more: Any) -> Any:
        """``to``: the datagram's destination, by default the local address; ``more`` overrides fields."""
        hdr = {"len": REINJECT_HEAD + len(data), **more.pop("hdr", {})}
        size = more.pop("size", REINJECT_HEAD + len(data))
        fields = {"kind": KINDS[kind], "ifindex": ifindex, "len": len(data), "proto": socket.IPPROTO_UDP, "family": 4,
                  "local_addr": addr_to_bytes(local[0]), "local_port": htons(local[1]),
                  "remote_addr": addr_to_bytes(remote[0]), "remote_port": htons(remote[1]),
                  "src_addr": addr_to_bytes(source[0]), "src_port": htons(source[1]),
                  "dst_addr": addr_to_bytes(to or local[0]), "ttl": 64, "data": data, **more}
        whole = self.pack(lib.VMH_MSG_REINJECT, "struct vmh_msg_reinject", hdr=hdr, **fields)
        self.send(whole.ljust(size, b"x")[:size], fd)
        return self.reply()

    def release(self, ring_id: int) -> Any:
        return self.call(lib.VMH_MSG_RELEASE, "struct vmh_msg_release", ring_id=ring_id)

    def neigh(self, ifindex: int, address: str) -> Any:
        return self.call(lib.VMH_MSG_NEIGH, "struct vmh_msg_neigh", ifindex=ifindex, family=4,
                         addr=addr_to_bytes(address))


class Interpreter:
    """The program: commands from standard input to the client and to sockets of its own."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.state = b""
        self.sockets: dict[str, socket.socket] = {}

    @functools.cached_property
    def client(self) -> Client:
        return Client(self._path)

    def run(self, command: dict[str, Any]) -> Any:
        return getattr(self, "do_" + command.pop("do"))(**command)

    def do_hello(self, stats: str = "") -> dict[str, Any]:
        fd = os.open(stats, os.O_RDWR) if stats else -1
        reply = self.client.hello(*([fd] if stats else []))
        if stats:
            os.close(fd)
        return _plain(reply)

    def do_enter(self, path: str) -> None:
        """Another network namespace (os.setns is newer than Python 3.11)."""
        fd = os.open(path, os.O_RDONLY)
        if ctypes.CDLL(None, use_errno=True).setns(fd, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(fd)

    def do_ring(self, ifname: str, device: str | None = None, why: int = Reason.NO_VERBS_LIBRARY, mapped: bool = True,
                **sizes: int) -> dict[str, Any]:
        """With ``fds``: how many descriptors came. The second step, if one is asked for, is done if ``mapped``."""
        before = len(self.client.fds)
        reply = _plain(self.client.ring(socket.if_nametoindex(ifname), device, why, **sizes))
        reply["fds"] = len(self.client.fds) - before
        if mapped and reply.get("flags", 0) & lib.VMH_RING_F_BIND_AFTER:
            reply |= _plain(self.client.mapped(reply["ring_id"]))
        return reply

    def do_mapped(self, ring_id: int) -> dict[str, Any]:
        return _plain(self.client.mapped(ring_id))

    def do_xsk_namespace(self) -> int:
        """SO_NETNS_COOKIE of the last AF_XDP socket that came."""
        fd = os.dup(self.client.fds[-1])
        with socket.socket(44, socket.SOCK_RAW, 0, fileno=fd) as xsk:
            return int.from_bytes(xsk.getsockopt(socket.SOL_SOCKET, SO_NETNS_COOKIE, 8), sys.byteorder)

    def do_bind_xsk(self, ifname: str) -> int:
        """Bind the last AF_XDP socket that came, as only the service should; 0 or -errno."""
        from vmahybrid._xsk import lib as xsk

        return int(xsk.vmh_xsk_bind(self.client.fds[-1], socket.if_nametoindex(ifname), 0, 0, -1))

    def do_socket(self, name: str, bind: list[Any], connect: list[Any] | None = None, reuse: str = "",
                  join: list[str] | None = None, device: str = "") -> int:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        if device:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())
        if reuse:
            sock.setsockopt(socket.SOL_SOCKET, getattr(socket, reuse), 1)
        sock.bind((bind[0], bind[1]))
        if connect:
            sock.connect((connect[0], connect[1]))
        if join:
            membership = socket.inet_aton(join[0]) + socket.inet_aton(join[1])
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
        self.sockets[name] = sock
        return int(sock.getsockname()[1])

    def do_attach(self, name: str, kind: str, local: list[Any], remote: list[Any] | None = None,
                  ifname: str = "", **more: Any) -> dict[str, Any]:
        ifindex = socket.if_nametoindex(ifname) if ifname else 0
        far = (remote[0], remote[1]) if remote else ("*", 0)
        return _plain(self.client.attach(self.sockets[name].fileno(), kind, (local[0], local[1]), far, ifindex,
                                         **more))

    def do_attach_port(self, address: str, ifname: str) -> dict[str, Any]:
        return _plain(self.client.attach_port(address, socket.if_nametoindex(ifname)))

    def do_connect(self, name: str, to: list[Any]) -> list[Any]:
        """A TCP connection; its own address."""
        self.sockets[name] = socket.create_connection((to[0], to[1]), timeout=3)
        return list(self.sockets[name].getsockname())

    def do_take(self, name: str, flow_id: int) -> dict[str, Any]:
        reply, state = self.client.tcp_take(self.sockets[name].fileno(), flow_id)
        self.state = state or self.state
        return _plain(reply) | {"bytes": len(state)}

    def do_take_all(self, wanted: list[list[Any]], more: int = 0, detach: int = 0) -> list[dict[str, Any]]:
        """Of each: name of the socket, flow."""
        taken = self.client.tcp_take_all([(self.sockets[name].fileno(), flow) for name, flow in wanted], more, detach)
        return [_plain(reply) | {"state": state.hex()} for reply, state in taken]

    def do_state(self) -> str:
        return self.state.hex()

    def do_home(self, name: str, flow_id: int, data: str = "", port: int = 0, state: str = "") -> dict[str, Any]:
        """``data``: instead of a state. ``port``: of a peer that it does not have. ``state``: not that of the last
        take."""
        state = data.encode() or bytes.fromhex(state) or self.state
        if port:
            state = state[:50] + port.to_bytes(2, "big") + state[52:]
        return _plain(self.client.tcp_home(self.sockets[name].fileno(), flow_id, state))

    def do_home_all(self, wanted: list[list[Any]], more: int = 0, room: int = 4096) -> list[dict[str, Any]]:
        """Of each: name of the socket, flow, state."""
        homes = [(self.sockets[name].fileno(), flow, bytes.fromhex(state)) for name, flow, state in wanted]
        return [_plain(reply) for reply in self.client.tcp_home_all(homes, more, room)]

    def do_show(self, conns: list[list[Any]], ifname: str, count: int = 0, flags: int = 0) -> dict[str, Any]:
        """Of each: name of the socket, flow of the port, local, remote."""
        wanted = [(self.sockets[name].fileno(), flow, (a[0], a[1]), (b[0], b[1])) for name, flow, a, b in conns]
        reply = self.client.tcp_show(wanted, socket.if_nametoindex(ifname), count or len(wanted), flags)
        return _plain(reply) | {"flow_id": list(getattr(reply, "flow_id", []))[:len(wanted)]}

    def do_hide(self, names: list[str], forget: bool = True) -> dict[str, Any]:
        """``forget``: the kernel forgets the connections first."""
        libc = ctypes.CDLL(None)
        for name in names if forget else ():
            libc.connect(self.sockets[name].fileno(), struct.pack("=H14x", socket.AF_UNSPEC), 16)
        return _plain(self.client.tcp_hide([os.fstat(self.sockets[name].fileno()).st_ino for name in names]))

    def do_stream(self, name: str, bind: list[Any] | None = None) -> list[Any]:
        sock = self.sockets[name] = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if bind:
            sock.bind((bind[0], bind[1]))
        return list(sock.getsockname())

    def do_detach(self, flow_id: int, cause: int = 0) -> dict[str, Any]:
        return _plain(self.client.detach(flow_id, cause))

    def do_reinject(self, name: str, kind: str, data: str, source: list[Any], local: list[Any], ifname: str,
                    remote: list[Any] | None = None, repeat: int = 1, **more: Any) -> dict[str, Any]:
        """``repeat``: that many, numbered; the answer is the last reply, or the first that is a refusal."""
        far = (remote[0], remote[1]) if remote else ("*", 0)
        ifindex, fd = socket.if_nametoindex(ifname), self.sockets[name].fileno()
        for number in range(repeat):
            payload = (data + (str(number) if repeat > 1 else "")).encode()
            answer = _plain(self.client.reinject(fd, kind, payload, (source[0], source[1]), (local[0], local[1]), far,
                                                 ifindex=ifindex, **more))
            if answer["status"]:
                break
        return answer

    def do_option(self, name: str, option: str) -> int:
        return self.sockets[name].getsockopt(socket.SOL_SOCKET, getattr(socket, option))

    def do_recvfrom(self, name: str, timeout: float = 1.0) -> list[Any]:
        """[text, [address, port]] of what the kernel socket gets, [] if nothing."""
        self.sockets[name].settimeout(timeout)
        try:
            data, source = self.sockets[name].recvfrom(65536)
        except TimeoutError:
            return []
        return [data.decode(), list(source)]

    def do_release(self, ring_id: int) -> dict[str, Any]:
        """As a shim does: its own descriptors first."""
        while self.client.fds:
            os.close(self.client.fds.pop())
        return _plain(self.client.release(ring_id))

    def do_neigh(self, ifname: str, address: str) -> dict[str, Any]:
        return _plain(self.client.neigh(socket.if_nametoindex(ifname), address))

    def do_neigh_and_release(self, ifname: str, addresses: list[str]) -> Any:
        """The first reply, and the others, to requests for neighbours and then to release a ring that there is not."""
        index = socket.if_nametoindex(ifname)
        for address in addresses:
            self.client.send(self.client.pack(lib.VMH_MSG_NEIGH, "struct vmh_msg_neigh", ifindex=index, family=4,
                                              addr=addr_to_bytes(address)))
        self.client.send(self.client.pack(lib.VMH_MSG_RELEASE, "struct vmh_msg_release", ring_id=12345))
        first, *rest = [_plain(self.client.reply()) for _ in range(len(addresses) + 1)]
        return first, rest

    def do_event(self, timeout: float = 3.0) -> list[int]:
        return list(self.client.wait_event(timeout))

    def do_closed(self, timeout: float = 3.0) -> bool:
        """Does the service close the connection? Events on the way are dropped."""
        try:
            while True:
                self.client.wait_event(timeout)
        except Closed:
            return True
        except TimeoutError:
            return False

    def do_recv(self, name: str, timeout: float = 1.0) -> str:
        """What the kernel socket gets, "" if nothing."""
        self.sockets[name].settimeout(timeout)
        try:
            return self.sockets[name].recv(2048).decode()
        except TimeoutError:
            return ""

    def do_send(self, name: str, data: str, to: list[Any]) -> int:
        return self.sockets[name].sendto(data.encode(), (to[0], to[1]))

    def do_close(self, name: str) -> None:
        self.sockets.pop(name).close()


def _plain(reply: Any) -> dict[str, Any]:
    fields = contracts.as_dict(reply)
    header = fields.pop("hdr", None) or fields
    flat = {**{k: v for k, v in fields.items() if not isinstance(v, bytes)}, "status": header["status"],
            "reason": header["reason"]}
    return {key: value for key, value in flat.items() if isinstance(value, int)}


def main() -> None:
    interpreter = Interpreter(sys.argv[1])
    for line in sys.stdin:
        try:
            answer = {"ok": interpreter.run(json.loads(line))}
        except Exception as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
