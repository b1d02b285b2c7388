"""Calls of kernel functions (kfuncs), which a program names by their number in the kernel's BTF
(Documentation/bpf/btf.rst)."""

from __future__ import annotations

import functools
import struct
from pathlib import Path

from vmahybrid.errors import NotPossibleHere
from vmahybrid.xdp.image import INSN_SIZE, ProgramImage

RX_TIMESTAMP = "bpf_xdp_metadata_rx_timestamp"  # kernel 6.3

_BTF = Path("/sys/kernel/btf/vmlinux")
_MAGIC = 0xEB9F
_KIND_FUNC = 12
# bytes behind struct btf_type, by kind, and those of each of its vlen members
_BEHIND = {1: 4, 3: 12, 14: 4, 17: 4}
_MEMBER = {4: 12, 5: 12, 6: 8, 13: 8, 15: 12, 19: 12}

_INSN = struct.Struct("=BBhi")
_PSEUDO_KFUNC_CALL = 2


def function_number(btf: bytes, name: str) -> int:
    """Number of the function in this BTF, 0 if it has none of this name. Raises ValueError, struct.error for what is no
    BTF of this machine."""
    magic, _version, _flags, header, types, types_size, strings, strings_size = struct.unpack_from("=HBBIIIII", btf)
    if magic != _MAGIC:
        raise ValueError("not BTF")
    names = header + strings
    at = btf.find(b"\0" + name.encode("ascii") + b"\0", names, names + strings_size)
    if at < 0:
        return 0
    wanted, number = at + 1 - names, 1
    at, end = header + types, header + types + types_size
    while at < end:
        offset, info = struct.unpack_from("=II", btf, at)
        kind, members = info >> 24 & 0x1F, info & 0xFFFF
        if kind == _KIND_FUNC and offset == wanted:
            return number
        at += 12 + _BEHIND.get(kind, 0) + _MEMBER.get(kind, 0) * members
        number += 1
    return 0


@functools.cache
def _rx_timestamp() -> int:
    """Raises NotPossibleHere."""
    try:
        number = function_number(_BTF.read_bytes(), RX_TIMESTAMP)
    except (OSError, ValueError, struct.error) as error:
        raise NotPossibleHere("time stamps of the adapter", f"{_BTF}: {error}",
                              "use a kernel with CONFIG_DEBUG_INFO_BTF") from error
    if not number:
        raise NotPossibleHere("time stamps of the adapter", f"this kernel has no {RX_TIMESTAMP}",
                              "use kernel 6.3 or newer")
    return number


def missing() -> str:
    """Why this kernel has no call for the time of arrival, "" if it has one."""
    try:
        _rx_timestamp()
    except NotPossibleHere as error:
        return error.why
    return ""


def with_calls(image: ProgramImage) -> ProgramImage:
    """The program with its ``calls`` as this kernel numbers them. Raises NotPossibleHere."""
    if not image.calls:
        return image
    insns, number = bytearray(image.insns), _rx_timestamp()
    for call in image.calls:
        opcode = insns[call * INSN_SIZE]
        _INSN.pack_into(insns, call * INSN_SIZE, opcode, _PSEUDO_KFUNC_CALL << 4, 0, number)
    return ProgramImage(image.name, bytes(insns), image.relocs)
