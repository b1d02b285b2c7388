"""Loaded programs with their maps, and what one frame did to them."""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from bpf.frames import OWN_MAC, UDP, endpoint, mac
from vmahybrid.contracts import action, flow_key, grant_key, lib, pack
from vmahybrid.xdp.bpf import (
    TCX_DROP,
    TCX_NEXT,
    TCX_REDIRECT,
    XDP_DROP,
    XDP_PASS,
    XDP_REDIRECT,
    BpfError,
    BpfMap,
    ProgramSet,
    TestRun,
    load_set,
)
from vmahybrid.xdp.image import Image

AF_XDP = 44
MTU = 1500
VERDICTS = {XDP_DROP: "drop", XDP_PASS: "pass", XDP_REDIRECT: "redirect"}
TC_VERDICTS = {TCX_DROP: "drop", TCX_NEXT: "pass", TCX_REDIRECT: "redirect"}

RING, DEV, DROP, KERNEL = lib.VMH_ACT_RING, lib.VMH_ACT_DEV, lib.VMH_ACT_DROP, lib.VMH_ACT_PASS


def index(number: int) -> bytes:
    """Key of an array-like map."""
    return struct.pack("=I", number)


def hits(table: BpfMap, number: int) -> tuple[int, int]:
    """(packets, bytes) over all CPUs."""
    pairs = [struct.unpack("=QQ", value) for value in table.lookup_percpu(index(number))]
    return sum(p for p, _ in pairs), sum(b for _, b in pairs)


def way_names(prefix: str) -> dict[int, str]:
    """Number -> name of the ways out, as "pass-miss"."""
    return {getattr(lib, name): name.removeprefix(prefix).lower().replace("_", "-") for name in dir(lib)
            if name.startswith(prefix) and name != f"{prefix}COUNT"}


@dataclass(frozen=True)
class Outcome:
    """What a frame met: the verdict, the one way out that counted it, the rule that counted it (None: no rule)."""

    verdict: str
    out: str
    rule: int | None = None


def headers(frame: bytes) -> int:
    """Up to the options of TCP, of a frame without them and without IP options."""
    at = 12
    while frame[at:at + 2] in (b"\x81\x00", b"\x88\xa8"):
        at += 4
    return at + 2 + (20 if frame[at:at + 2] == b"\x08\x00" else 40) + 20


class Harness:
    """One program. ``run`` checks what holds for every frame: one way out counts it once with its length, and the
    frame is not changed, but for one of TCP that is too long for its ring: that gets the headers."""

    program = ""
    outs_map = ""
    outs_prefix = ""
    verdicts: Mapping[int, str] = VERDICTS

    def __init__(self, image: Image, *, frags: bool = False) -> None:
        with contextlib.ExitStack() as stack:
            self.loaded: ProgramSet = stack.enter_context(load_set(image, [self.program], frags=frags))
            self._sockets: contextlib.ExitStack = stack.enter_context(contextlib.ExitStack())
            self._open = stack.pop_all()
        self.maps: Mapping[str, BpfMap] = self.loaded.maps
        self._outs = way_names(self.outs_prefix)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._open.close()

    def xsk(self, table: str, slot: int) -> None:
        """Fill a slot of an XSKMAP. The socket need not be bound: a test run does not deliver."""
        ring = self._sockets.enter_context(socket.socket(AF_XDP, socket.SOCK_RAW))
        self.maps[table].update(index(slot), index(ring.fileno()))

    def _counted(self) -> dict[str, tuple[int, int]]:
        return {name: hits(self.maps[self.outs_map], number) for number, name in self._outs.items()}

    def test_run(self, frame: bytes, *, ifindex: int = 0, queue: int = 0, linear: int | None = None) -> TestRun:
        return self.loaded.programs[self.program].test_run(frame, ifindex=ifindex, queue=queue, linear=linear)

    def run(self, frame: bytes, *, ifindex: int = 0, queue: int = 0, linear: int | None = None) -> Outcome:
        before = self._counted()
        result = self.test_run(frame, ifindex=ifindex, queue=queue, linear=linear)
        ways = [name for name, counted in self._counted().items() if counted != before[name]]
        assert len(ways) == 1, f"counted as {ways}"
        packets, size = (new - old for new, old in zip(self._counted()[ways[0]], before[ways[0]], strict=True))
        assert (packets, size) == (1, len(frame))
        assert result.data == (frame[:headers(frame)] if ways[0] == "ring-too-long" else frame)
        return Outcome(self.verdicts[result.retval], ways[0])


class Steer(Harness):
    """Program `steer` on an interface of MTU 1500."""

    program, outs_map, outs_prefix = "steer", "outs", "VMH_OUT_"
    mtu = MTU

    def __init__(self, image: Image, *, frags: bool = False) -> None:
        super().__init__(image, frags=frags)
        self._flags = int(lib.VMH_PORT_F_FRAGS) if frags else 0
        self._generation = 0
        self._five_tuples = False
        self.configure()
        self._rules = 0

    def configure(self, flags: int = 0, *, remember: bool = True, none: bool = False) -> None:
        """With the next generation of rules, or none: without memos. ``none``: there are no rules."""
        self._generation += 1
        flags |= self._flags | (0 if none else lib.VMH_PORT_F_3T)
        config = pack("struct vmh_port_config", max_frame=self.mtu + 14, flags=flags,
                      generation=self._generation if remember else 0)
        self.maps["port"].update(index(0), config)

    def rule(self, dst: str, src: str = "", *, kind: int = RING, target: int = 0, proto: int = UDP, vlan: int = 0,
             vlan2: int = 0, multicast: bool = False, flags: int = 0) -> int:
        """A 5-tuple rule if ``src`` is given, else a 3-tuple or multicast one. Returns the number of its counter."""
        self._rules += 1
        key = flow_key(*endpoint(dst), *(endpoint(src) if src else ()), proto=proto, vlan=vlan, vlan2=vlan2)
        table = "rulesmc" if multicast else "rules5" if src else "rules3"
        self.maps[table].update(key, action(kind, target, self._rules, flags))
        self._five_tuples |= bool(src)
        self.configure(lib.VMH_PORT_F_5T if self._five_tuples else 0)
        return self._rules

    def run(self, frame: bytes, *, ifindex: int = 0, queue: int = 0, linear: int | None = None) -> Outcome:
        """Twice: what the program remembers of the first frame must not make a difference."""
        first, second = (self._run_once(frame, ifindex=ifindex, queue=queue, linear=linear) for _ in range(2))
        assert first == second
        return first

    def _run_once(self, frame: bytes, *, ifindex: int, queue: int, linear: int | None) -> Outcome:
        numbers = range(self._rules + 1)
        before = [hits(self.maps["rule_hits"], number) for number in numbers]
        outcome = super().run(frame, ifindex=ifindex, queue=queue, linear=linear)
        after = [hits(self.maps["rule_hits"], number) for number in numbers]
        counted = [number for number in numbers if after[number] != before[number]]
        assert len(counted) <= 1, f"rules {counted} counted one frame"
        for number in counted:
            assert (after[number][0] - before[number][0], after[number][1] - before[number][1]) == (1, len(frame))
        return Outcome(outcome.verdict, outcome.out, counted[0] if counted else None)


class TcSteer(Steer):
    """Program `tc_steer`; ``gso`` of ``run_gso`` makes a super-packet of the frame."""

    program = "tc_steer"
    verdicts = TC_VERDICTS
    gso = 0

    def near(self, slot: int, ifindex: int = 1) -> None:
        """Fill a slot of `nears`. The interface is not looked for in a test run."""
        self.maps["nears"].update(index(slot), index(ifindex))

    def test_run(self, frame: bytes, *, ifindex: int = 0, queue: int = 0, linear: int | None = None) -> TestRun:
        return self.loaded.programs[self.program].test_run_tc(frame, gso_size=self.gso)

    def run_gso(self, frame: bytes, size: int) -> Outcome:
        self.gso = size
        try:
            return self.run(frame)
        finally:
            self.gso = 0


class Guard(Harness):
    """Program `guard` of a ring veth whose process has OWN_MAC; the interface is lo, since nothing is sent."""

    program, outs_map, outs_prefix = "guard", "guard_outs", "VMH_GUARD_"

    def __init__(self, image: Image, *, frags: bool = False) -> None:
        super().__init__(image, frags=frags)
        self.maps["guard"].update(index(0), pack("struct vmh_guard_config", mac=mac(OWN_MAC)))
        self.maps["guard_dev"].update(index(0), index(socket.if_nametoindex("lo")))

    def grant(self, source: str, *, proto: int = UDP) -> None:
        """Let the process send as "ADDR:PORT"; "*:PORT" and "[*]:PORT" are any IPv4 and IPv6 address."""
        address, port = endpoint(source)
        key = grant_key("" if address == "*" else address, port, proto=proto)
        self.maps["granted"].update(key[:-1] + bytes([6]) if source.startswith("[") else key, index(1))


class RingIn(Harness):
    program, outs_map, outs_prefix = "ring_in", "rin_outs", "VMH_RIN_"


def kernel_cuts(harness: Harness) -> bool:
    """Whether test runs can leave less than an Ethernet header to the program (kernel 6.18): then SHORT_ETH is
    reachable, else the kernel refuses such frames itself."""
    try:
        harness.test_run(bytes(64), linear=4)
    except BpfError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True
