"""Turns a BPF object into a C header: instructions of each program and where they name a map.

Usage: embed.py OBJECT HEADER. The library loads the programs with bpf(2) itself: no ELF at run time, no libbpf. Only
relocations of 64-bit loads against symbols of the section "maps" are allowed; anything else ends the build.
"""

import struct
import sys
from pathlib import Path

R_BPF_64_64 = 1
SHT_SYMTAB, SHT_REL = 2, 9
PROGRAMS = ("ingress", "egress")


class Object:
    """Sections of a 64-bit ELF file of this machine's byte order."""

    def __init__(self, data: bytes) -> None:
        if data[:5] != b"\x7fELF\x02":
            raise SystemExit("embed.py: not a 64-bit ELF file")
        (offset,) = struct.unpack_from("=Q", data, 40)
        size, count, names = struct.unpack_from("=HHH", data, 58)
        headers = [struct.unpack_from("=IIQQQQIIQQ", data, offset + i * size) for i in range(count)]
        self.bodies = [data[h[4] : h[4] + h[5]] if h[1] != 8 else b"" for h in headers]
        self.types = [h[1] for h in headers]
        self.infos = [h[7] for h in headers]
        self.links = [h[6] for h in headers]
        self.names = [self.text(names, h[0]) for h in headers]

    def text(self, section: int, at: int) -> str:
        body = self.bodies[section]
        return body[at : body.index(0, at)].decode()

    def symbol(self, table: int, index: int) -> tuple[str, int, int]:
        """Name, section and value."""
        name, _info, _other, section, value, _size = struct.unpack_from("=IBBHQQ", self.bodies[table], index * 24)
        return self.text(self.links[table], name), section, value


def relocations(elf: Object, section: int) -> list[tuple[int, str]]:
    """(index of the instruction, map) in a program's section."""
    found = []
    for index, kind in enumerate(elf.types):
        if kind != SHT_REL or elf.infos[index] != section:
            continue
        for offset, info in struct.iter_unpack("=QQ", elf.bodies[index]):
            name, home, _value = elf.symbol(elf.links[index], info >> 32)
            if info & 0xFFFFFFFF != R_BPF_64_64 or elf.names[home] != "maps":
                raise SystemExit(f"embed.py: {elf.names[section]}+{offset}: cannot relocate {name or elf.names[home]}")
            found.append((offset // 8, name))
    return found


def map_constant(symbol: str) -> str:
    return symbol.upper().replace("SV_", "SV_MAP_")


def program(elf: Object, name: str) -> str:
    section = elf.names.index(name)
    lines = [f"static const struct bpf_insn sv_{name}_code[] = {{"]
    for code, registers, jump, value in struct.iter_unpack("=BBhi", elf.bodies[section]):
        lines.append(f"\t{{ {code:#04x}, {registers & 15}, {registers >> 4}, {jump}, {value} }},")
    lines += ["};", f"static const struct sv_reloc sv_{name}_relocs[] = {{"]
    lines += [f"\t{{ {index}, {map_constant(symbol)} }}," for index, symbol in relocations(elf, section)]
    return "\n".join([*lines, "};", ""])


def main() -> None:
    elf = Object(Path(sys.argv[1]).read_bytes())
    header = "/* made by embed.py */\nstruct sv_reloc {\n\tunsigned int insn;\n\tint map;\n};\n"
    Path(sys.argv[2]).write_text(header + "\n".join(program(elf, name) for name in PROGRAMS))


if __name__ == "__main__":
    main()
