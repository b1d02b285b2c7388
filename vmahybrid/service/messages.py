"""The messages of contracts/control.h: strict parsing of requests, packing of replies and events."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Any

from vmahybrid import contracts
from vmahybrid.contracts import ffi, lib
from vmahybrid.steering.reasons import Reason

HEADER = "struct vmh_msg_hdr"
MESSAGE_MAX: int = lib.VMH_MSG_MAX
FDS_MAX = 16  # of a message from a program; more than any request may carry, to be able to close them

# type: (struct of the request, struct of the reply, fewest fds, most fds)
REQUESTS: dict[int, tuple[str, str, int, int]] = {
    lib.VMH_MSG_HELLO: ("struct vmh_msg_hello", "struct vmh_msg_hello_reply", 0, 1),
    lib.VMH_MSG_RING: ("struct vmh_msg_ring", "struct vmh_msg_ring_reply", 0, 0),
    lib.VMH_MSG_ATTACH: ("struct vmh_msg_attach", "struct vmh_msg_attach_reply", 0, 1),
    lib.VMH_MSG_DETACH: ("struct vmh_msg_detach", HEADER, 0, 0),
    lib.VMH_MSG_NEIGH: ("struct vmh_msg_neigh", HEADER, 0, 0),
    lib.VMH_MSG_RELEASE: ("struct vmh_msg_release", HEADER, 0, 0),
    lib.VMH_MSG_REINJECT: ("struct vmh_msg_reinject", HEADER, 1, 1),
    lib.VMH_MSG_RING_MAPPED: ("struct vmh_msg_ring_mapped", "struct vmh_msg_ring_mapped_reply", 0, 0),
    lib.VMH_MSG_TCP_TAKE: ("struct vmh_msg_tcp_take", "struct vmh_msg_tcp_take_reply", 2, 2),
    lib.VMH_MSG_TCP_HOME: ("struct vmh_msg_tcp_home", HEADER, 2, 2),
    lib.VMH_MSG_TCP_SHOW: ("struct vmh_msg_tcp_show", "struct vmh_msg_tcp_show_reply", 1, lib.VMH_TCP_SHOW_MAX),
    lib.VMH_MSG_TCP_HIDE: ("struct vmh_msg_tcp_hide", HEADER, 0, 0),
    lib.VMH_MSG_TCP_FRAMES: ("struct vmh_msg_tcp_frames", HEADER, 2, 2),
    lib.VMH_MSG_TCP_KEEP: ("struct vmh_msg_tcp_keep", HEADER, 2, 2),
    lib.VMH_MSG_TCP_FETCH: ("struct vmh_msg_tcp_fetch", "struct vmh_msg_tcp_fetch_reply", 0, 1),
    lib.VMH_MSG_TCP_RENEW: ("struct vmh_msg_tcp_renew", HEADER, 1, 1),
}
REINJECT_HEAD: int = ffi.offsetof("struct vmh_msg_reinject", "data")


class ProtocolError(Exception):
    """A malformed message: ``reason`` is VERSION or PROTOCOL, ``reply`` is to be sent before closing."""

    def __init__(self, text: str, reason: Reason, type_: int = 0, seq: int = 0) -> None:
        super().__init__(text)
        self.reason = reason
        self.reply = _pack(HEADER, type_ | lib.VMH_MSG_REPLY, seq, -errno.EPROTO, reason)


@dataclass(frozen=True, slots=True)
class Request:
    """``body`` is the struct (cffi), ``type`` one of VMH_MSG_*, ``seq`` the sender's number."""

    type: int
    seq: int
    body: Any

    def reply(self, **fields: Any) -> bytes:
        return _pack(REQUESTS[self.type][1], self.type | lib.VMH_MSG_REPLY, self.seq, 0, Reason.NONE, fields)

    def refusal(self, error: int, reason: int) -> bytes:
        """``error`` is a positive errno. The whole reply struct, zeros behind the header."""
        return _pack(REQUESTS[self.type][1], self.type | lib.VMH_MSG_REPLY, self.seq, -error, reason)


def parse(data: bytes, fds: int, cut: bool) -> Request:
    """The request in one datagram that came with ``fds`` descriptors; ``cut``: data or descriptors were truncated.

    Raises ProtocolError."""
    size = contracts.size_of(HEADER)
    if len(data) < size:
        raise ProtocolError(f"{len(data)} bytes are no header", Reason.PROTOCOL)
    header = contracts.unpack(HEADER, data)
    if header.magic != lib.VMH_CTL_MAGIC:
        raise ProtocolError(f"magic {header.magic:#x}", Reason.PROTOCOL)
    type_, seq = int(header.type), int(header.seq)

    def wrong(text: str, reason: Reason = Reason.PROTOCOL) -> ProtocolError:
        return ProtocolError(text, reason, type_, seq)

    if header.version != lib.VMH_CTL_VERSION:
        raise wrong(f"protocol version {header.version}, this service speaks {lib.VMH_CTL_VERSION}", Reason.VERSION)
    if cut:
        raise wrong(f"longer than {MESSAGE_MAX} bytes or more than {FDS_MAX} file descriptors")
    if type_ not in REQUESTS:
        raise wrong(f"message type {type_}")
    ctype, _, least, most = REQUESTS[type_]
    body = data if type_ != lib.VMH_MSG_REINJECT else data.ljust(contracts.size_of(ctype), b"\0")
    size = _size(type_, ctype, body)
    if not header.len == len(data) == size:
        raise wrong(f"{ctype} of {header.len} bytes in {len(data)}, not {size}")
    if not least <= fds <= most:
        raise wrong(f"{ctype} with {fds} file descriptors, not {least} to {most}")
    return Request(type_, seq, contracts.unpack(ctype, body))


def _size(type_: int, ctype: str, body: bytes) -> int:
    """Bytes that the message must have. ``body`` is at least the struct, if the message is not too short anyway."""
    if type_ != lib.VMH_MSG_REINJECT:
        return contracts.size_of(ctype)
    # What of the struct was not sent reads as zeros here: then the length does not match either.
    return REINJECT_HEAD + min(int(contracts.unpack(ctype, body).len), int(lib.VMH_REINJECT_DATA))


def event(kind: int, a: int = 0, b: int = 0, reason: int = 0) -> bytes:
    """An unasked message of the service: ``kind`` is VMH_EV_*."""
    return _pack("struct vmh_msg_event", lib.VMH_MSG_EVENT, 0, 0, reason, {"event": kind, "a": a, "b": b})


def _pack(ctype: str, type_: int, seq: int, status: int, reason: int, fields: dict[str, Any] | None = None) -> bytes:
    header = {"magic": lib.VMH_CTL_MAGIC, "version": lib.VMH_CTL_VERSION, "type": type_,
              "len": contracts.size_of(ctype), "seq": seq, "status": status, "reason": int(reason)}
    if ctype == HEADER:
        return contracts.pack(ctype, **header)
    return contracts.pack(ctype, hdr=header, **(fields or {}))
