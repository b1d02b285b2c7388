"""Frames into the kernel's receive path of an interface, as if the wire had brought them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Self

from vmahybrid.xdp.bpf import XDP_DROP, XDP_PASS, BpfError, BpfProgram
from vmahybrid.xdp.image import ProgramImage

_PROBE = bytes(12) + b"\x88\xb5" + bytes(50)  # local experimental ethertype (IEEE 802); the probe drops it


def _always(name: str, verdict: int) -> ProgramImage:
    """``return verdict``: BPF_ALU64|BPF_MOV|BPF_K to r0, BPF_JMP|BPF_EXIT."""
    return ProgramImage(name, struct.pack("=BBhiBBhi", 0xB7, 0, 0, verdict, 0x95, 0, 0, 0), ())


class Injector:
    """One loaded program that passes everything, for all interfaces and namespaces."""

    def __init__(self, program: BpfProgram) -> None:
        self._program = program

    @classmethod
    def open(cls) -> Self | None:
        """None where the kernel runs no program on live frames (before 5.18). Raises BpfError."""
        with BpfProgram.load(_always("vmh_probe", XDP_DROP), {}) as probe:
            try:
                probe.test_run_live(_PROBE)
            except BpfError:
                return None
        return cls(BpfProgram.load(_always("vmh_inject", XDP_PASS), {}))

    def inject(self, ifindex: int, frames: Sequence[bytes]) -> None:
        """In order, in the calling thread's namespace. Frames have at most LIVE_FRAME_MAX bytes. Raises BpfError."""
        for frame in frames:
            self._program.test_run_live(frame, ifindex=ifindex)
