"""Compiled XDP programs as plain data: what the compiler's process hands to the service.

An image holds no file descriptor. :mod:`vmahybrid.xdp.bpf` makes the maps, puts their descriptors where the
relocations say, and loads.
"""

from __future__ import annotations

import base64
import json
from dataclasses import asdict, dataclass
from typing import Any, Self

IMAGE_VERSION = 2
INSN_SIZE = 8  # struct bpf_insn
TC_PREFIX = "tc_"  # of programs for the tcx hook (BPF_PROG_TYPE_SCHED_CLS)


@dataclass(frozen=True, slots=True)
class MapSpec:
    """Arguments of BPF_MAP_CREATE (bpf(2)). Sizes are bytes; ``type`` is enum bpf_map_type."""

    name: str
    type: int
    key_size: int
    value_size: int
    max_entries: int
    flags: int


@dataclass(frozen=True, slots=True)
class Relocation:
    """Instruction ``insn`` (an index, not a byte offset) loads the address of map ``map``."""

    insn: int
    map: str


@dataclass(frozen=True, slots=True)
class ProgramImage:
    """One program: instructions (8 bytes each) with the map references zeroed, and where they are. ``calls``: indexes
    of those that are to call the kernel function for the time of arrival."""

    name: str
    insns: bytes
    relocs: tuple[Relocation, ...]
    calls: tuple[int, ...] = ()

    @property
    def tc(self) -> bool:
        """Is it for the tcx hook? Else it is an XDP program."""
        return self.name.startswith(TC_PREFIX)

    @property
    def maps(self) -> list[str]:
        """Names of the maps that the program uses, each once."""
        return list(dict.fromkeys(reloc.map for reloc in self.relocs))


@dataclass(frozen=True, slots=True)
class Image:
    programs: dict[str, ProgramImage]
    maps: dict[str, MapSpec]

    def to_json(self) -> str:
        return json.dumps({
            "version": IMAGE_VERSION,
            "programs": [
                {"name": p.name, "insns": base64.b64encode(p.insns).decode("ascii"),
                 "relocs": [[r.insn, r.map] for r in p.relocs], "calls": p.calls}
                for p in self.programs.values()
            ],
            "maps": [asdict(spec) for spec in self.maps.values()],
        })

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Raises ValueError if the text is no image of this version."""
        try:
            data: dict[str, Any] = json.loads(text)
            if data["version"] != IMAGE_VERSION:
                raise ValueError(f"image version {data['version']}, not {IMAGE_VERSION}")
            maps = {m["name"]: MapSpec(**m) for m in data["maps"]}
            programs = {p["name"]: _program(p, maps) for p in data["programs"]}
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"not an image: {error!r}") from error
        return cls(programs, maps)


def _program(data: dict[str, Any], maps: dict[str, MapSpec]) -> ProgramImage:
    insns = base64.b64decode(data["insns"], validate=True)
    relocs = tuple(Relocation(insn, name) for insn, name in data["relocs"])
    for reloc in relocs:
        # ld_imm64 takes two instructions
        if reloc.map not in maps or not 0 <= reloc.insn < len(insns) // INSN_SIZE - 1:
            raise ValueError(f"program {data['name']}: relocation {reloc} points nowhere")
    calls = tuple(data["calls"])
    if not all(isinstance(call, int) and 0 <= call < len(insns) // INSN_SIZE for call in calls):
        raise ValueError(f"program {data['name']}: a call that is not in it")
    return ProgramImage(data["name"], insns, relocs, calls)
