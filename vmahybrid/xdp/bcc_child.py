"""The compiler's process: C text on stdin, an image (JSON) on stdout, the compiler's messages on stderr.

bcc with its clang takes 145 MiB; a process of its own gives them back. Started by :mod:`vmahybrid.xdp.compile` with
BCC_KERNEL_SOURCE set; never imported by the service. bcc creates the maps of the text while it compiles: they and
their descriptors end with this process, only their shapes are kept. Exit: 0, EXIT_NO_BCC or EXIT_COMPILE.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from typing import Any

from vmahybrid.contracts import lib as contracts
from vmahybrid.xdp.image import INSN_SIZE, Image, MapSpec, ProgramImage, Relocation

EXIT_NO_BCC = 3
EXIT_COMPILE = 4

PREFIX = "xdp_"  # of the C functions that are programs: a map and a program may have one name, C knows one name space
# (those for the tcx hook are `tc_*` and keep that)

_LD_IMM64 = 0x18  # BPF_LD | BPF_DW | BPF_IMM
_PSEUDO_MAP_FD = 1
_CALL = 0x85  # BPF_JMP | BPF_CALL
_INSN = struct.Struct("=BBhi")


def _relocate(name: str, code: bytes, names: dict[int, str]) -> ProgramImage:
    """Replace the descriptors of this process in ld_imm64 instructions by zero, and note where they were. Note the
    calls that bcc could not name."""
    insns = bytearray(code)
    relocs, calls = [], []
    index = 0
    while index < len(insns) // INSN_SIZE:
        opcode, registers, offset, imm = _INSN.unpack_from(insns, index * INSN_SIZE)
        if opcode == _LD_IMM64:
            if registers >> 4 == _PSEUDO_MAP_FD:
                relocs.append(Relocation(index, names[imm]))
                _INSN.pack_into(insns, index * INSN_SIZE, opcode, registers, offset, 0)
            index += 1
        elif opcode == _CALL and imm == contracts.VMH_CALL_RX_TIMESTAMP:
            calls.append(index)
        index += 1
    return ProgramImage(name, bytes(insns), tuple(relocs), tuple(calls))


def _image(lib: Any, module: ctypes.c_void_p) -> Image:
    maps = {}
    names = {}
    for table in range(lib.bpf_num_tables(module)):
        name = lib.bpf_table_name(module, table).decode("ascii")
        names[lib.bpf_table_fd_id(module, table)] = name
        maps[name] = MapSpec(
            name=name,
            type=lib.bpf_table_type_id(module, table),
            key_size=lib.bpf_table_key_size_id(module, table),
            value_size=lib.bpf_table_leaf_size_id(module, table),
            max_entries=lib.bpf_table_max_entries_id(module, table),
            flags=lib.bpf_table_flags_id(module, table),
        )
    programs = {}
    for index in range(lib.bpf_num_functions(module)):
        function = lib.bpf_function_name(module, index)
        code = ctypes.string_at(lib.bpf_function_start(module, function), lib.bpf_function_size(module, function))
        name = function.decode("ascii").removeprefix(PREFIX)
        programs[name] = _relocate(name, code, names)
    return Image(programs, maps)


def _declare(lib: Any) -> None:
    """bcc_common.h, as far as the bcc package leaves it undeclared."""
    lib.bpf_num_tables.argtypes = [ctypes.c_void_p]
    lib.bpf_num_tables.restype = ctypes.c_size_t
    for getter, result in (("name", ctypes.c_char_p), ("fd_id", ctypes.c_int), ("key_size_id", ctypes.c_size_t),
                           ("leaf_size_id", ctypes.c_size_t)):
        function = getattr(lib, f"bpf_table_{getter}")
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        function.restype = result


def main() -> int:
    try:
        from bcc import BPF, lib
    except (ImportError, OSError) as error:
        print(f"cannot import bcc: {error}", file=sys.stderr)
        return EXIT_NO_BCC
    _declare(lib)
    try:
        # -w: bcc's own header warns about itself
        module = BPF(text=sys.stdin.read(), cflags=["-w"])
    except Exception as error:  # bcc raises plain Exception; clang's own words are on stderr already
        print(error, file=sys.stderr)
        return EXIT_COMPILE
    print(_image(lib, module.module).to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
