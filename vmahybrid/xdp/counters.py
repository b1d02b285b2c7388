"""Counters of the programs: ways out, packets and bytes, summed over the CPUs."""

from __future__ import annotations

import struct

from vmahybrid.contracts import lib
from vmahybrid.xdp.bpf import BpfMap


def out_names(prefix: str) -> dict[int, str]:
    """Ways out of a program by index, named as in bpf/vmh_flow.h: ``out_names("VMH_OUT_")[3] == "pass-miss"``."""
    return {getattr(lib, name): name.removeprefix(prefix).lower().replace("_", "-")
            for name in dir(lib) if name.startswith(prefix) and not name.endswith("_COUNT")}


def read_hits(counters: BpfMap, index: int) -> tuple[int, int]:
    """(packets, bytes) of one entry of a per-CPU array of struct vmh_hits, summed."""
    values = [struct.unpack("QQ", value) for value in counters.lookup_percpu(struct.pack("I", index))]
    return sum(v[0] for v in values), sum(v[1] for v in values)


class Watched:
    """The packets of one entry of a per-CPU array of struct vmh_hits, to be read often: ``read`` is one system call."""

    def __init__(self, counters: BpfMap, index: int) -> None:
        self._read = counters.reader(struct.pack("I", index))
        self._raw = b""
        self._packets = 0

    def read(self) -> int:
        raw = self._read()
        if raw != self._raw:
            self._raw, self._packets = raw, sum(packets for packets, _ in struct.iter_unpack("QQ", raw))
        return self._packets


def read_outs(counters: BpfMap, prefix: str) -> dict[str, int]:
    """Packets per way out, by name."""
    return {name: read_hits(counters, index)[0] for index, name in sorted(out_names(prefix).items())}
