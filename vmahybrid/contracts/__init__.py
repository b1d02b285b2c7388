"""The contracts as Python sees them: layouts and constants come from the C headers through ``vmahybrid._contracts``.

``ffi`` and ``lib`` are the cffi objects (``lib.VMH_ACT_RING``, ``ffi.sizeof("struct vmh_flow_key")``); the functions
here turn structs into bytes and back. Addresses inside the structs are 16 bytes, IPv4 as ``::ffff:a.b.c.d``; ports are
in network order there and in host order in every argument and result of this module.
"""

from __future__ import annotations

import socket
from typing import Any

from vmahybrid._contracts import ffi, lib
from vmahybrid.printable import clean

__all__ = [
    "ANY_ADDR", "action", "addr_to_bytes", "addr_to_text", "as_dict", "c_text", "family_of", "ffi", "flow_key",
    "grant_key", "htons", "lib", "ntohs", "pack", "parse_action", "parse_flow_key", "size_of", "unpack",
]

ANY_ADDR = bytes(16)
_V4_PREFIX = bytes(10) + b"\xff\xff"

htons, ntohs = socket.htons, socket.ntohs


def size_of(ctype: str) -> int:
    """Bytes of a contract struct: ``size_of("struct vmh_msg_hdr")``."""
    return int(ffi.sizeof(ctype))


def pack(ctype: str, /, **fields: Any) -> bytes:
    """The bytes of ``ctype`` with these fields set and the rest zero; a nested struct is given as a dict.

    Raises KeyError for an unknown field, OverflowError or IndexError for a value that does not fit.
    """
    return bytes(ffi.buffer(ffi.new(f"{ctype} *", fields)))


def unpack(ctype: str, data: bytes) -> Any:
    """A private copy of ``data`` as ``ctype``: read its fields by name. Raises ValueError if ``data`` is too short."""
    size = ffi.sizeof(ctype)
    if len(data) < size:
        raise ValueError(f"{ctype} has {size} bytes, got {len(data)}")
    copy = ffi.new(f"{ctype} *")
    ffi.memmove(copy, data, size)
    return copy


def as_dict(struct: Any) -> dict[str, Any]:
    """A struct's fields as a dict: numbers as int, ``char[]`` up to its NUL and byte arrays as bytes, the rest as
    nested dicts and lists. A flexible array at the end is left out."""
    kind = ffi.typeof(struct)
    if kind.kind == "pointer":
        kind = kind.item
    return {name: _plain(getattr(struct, name), field.type)
            for name, field in kind.fields if not _is_flexible(field.type)}


def _is_flexible(kind: Any) -> bool:
    return kind.kind == "array" and kind.length is None


def _plain(value: Any, kind: Any) -> Any:
    if kind.kind == "primitive":
        return value
    if kind.kind == "array":
        if kind.item.cname == "char":
            return ffi.string(value)
        if kind.item.cname == "unsigned char":
            return bytes(value)
        return [_plain(item, kind.item) for item in value]
    return as_dict(value)


def c_text(chars: Any) -> str:
    """Text of a ``char[]`` field up to its NUL, for logs and readers: bytes that are no UTF-8 become backslash escapes,
    and what is not printable ``?``."""
    return clean(bytes(ffi.string(chars)).decode("utf-8", "backslashreplace"))


def addr_to_bytes(address: str | bytes) -> bytes:
    """16 bytes of a text address (IPv4 mapped), of 4 or 16 packed bytes, or zeros for "" and "*". Raises ValueError."""
    if isinstance(address, bytes):
        if len(address) == 16:
            return address
        if len(address) == 4:
            return _V4_PREFIX + address
        raise ValueError(f"an address has 4 or 16 bytes, got {len(address)}")
    if address in ("", "*"):
        return ANY_ADDR
    try:
        if ":" in address:
            return socket.inet_pton(socket.AF_INET6, address)
        return _V4_PREFIX + socket.inet_pton(socket.AF_INET, address)
    except OSError:
        raise ValueError(f"not an IP address: {address!r}") from None


def addr_to_text(address: bytes) -> str:
    """Text of a 16-byte address: dotted for mapped IPv4, "*" for all zeros."""
    packed = bytes(address)
    if packed == ANY_ADDR:
        return "*"
    if packed.startswith(_V4_PREFIX):
        return socket.inet_ntop(socket.AF_INET, packed[12:])
    return socket.inet_ntop(socket.AF_INET6, packed)


def family_of(address: bytes) -> int:
    """4 or 6 for a 16-byte address; the unspecified one counts as 4."""
    return 4 if address == ANY_ADDR or address.startswith(_V4_PREFIX) else 6


def flow_key(dst: str | bytes, dport: int, src: str | bytes = "", sport: int = 0, *,
             proto: int = socket.IPPROTO_UDP, vlan: int = 0, vlan2: int = 0) -> bytes:
    """Key of a rule as it stands in the XDP maps: packets to ``dst:dport``, from ``src:sport`` if given (5-tuple)."""
    to = addr_to_bytes(dst)
    return pack("struct vmh_flow_key", dst=to, src=addr_to_bytes(src), dport=htons(dport), sport=htons(sport),
                proto=proto, family=family_of(to), vlan=vlan, vlan2=vlan2)


def parse_flow_key(key: bytes) -> dict[str, Any]:
    """The fields of a flow key as text addresses and host-order ports."""
    k = unpack("struct vmh_flow_key", key)
    return {"dst": addr_to_text(bytes(k.dst)), "dport": ntohs(k.dport), "src": addr_to_text(bytes(k.src)),
            "sport": ntohs(k.sport), "proto": k.proto, "family": k.family, "vlan": k.vlan, "vlan2": k.vlan2}


def action(kind: int, target: int = 0, rule: int = 0, flags: int = 0) -> bytes:
    """Value of a rule: kind VMH_ACT_*, target XSKMAP base or DEVMAP slot, rule the index of its hit counter, flags
    VMH_ACT_F_*."""
    return pack("struct vmh_action", kind=kind, target=target, rule=rule, flags=flags)


def parse_action(value: bytes) -> tuple[int, int, int, int]:
    """(kind, target, rule, flags) of a rule's value."""
    a = unpack("struct vmh_action", value)
    return a.kind, a.target, a.rule, a.flags


def grant_key(src: str | bytes, port: int, *, proto: int = socket.IPPROTO_UDP) -> bytes:
    """Key of map `granted`: a source that a ring veth may send from."""
    source = addr_to_bytes(src)
    return pack("struct vmh_grant_key", src=source, sport=htons(port), proto=proto, family=family_of(source))
