"""BPF maps as targets of the mirror, with typed keys and values."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Protocol

from vmahybrid.contracts import lib
from vmahybrid.steering.keys import ANY_ADDR, Action, FlowKey, GrantKey, is_multicast


class ByteMap(Protocol):
    """What is used of vmahybrid.xdp.bpf.BpfMap."""

    def update(self, key: bytes, value: bytes) -> None: ...
    def delete(self, key: bytes) -> bool: ...
    def lookup(self, key: bytes) -> bytes | None: ...
    def lookup_percpu(self, key: bytes) -> list[bytes]: ...
    def zero(self, key: bytes) -> None: ...
    def keys(self) -> list[bytes]: ...


class RulesTarget:
    """The rules of one interface, in the three hashes of its XDP program."""

    def __init__(self, maps: Mapping[str, ByteMap]) -> None:
        self._five, self._three, self._multicast = maps["rules5"], maps["rules3"], maps["rulesmc"]

    def _map(self, key: FlowKey) -> ByteMap:
        if is_multicast(key.dst):
            return self._multicast
        return self._three if (key.src, key.sport) == (ANY_ADDR, 0) else self._five

    def present(self) -> Mapping[FlowKey, Action]:
        found: dict[FlowKey, Action] = {}
        for table in (self._five, self._three, self._multicast):
            for raw in table.keys():
                value = table.lookup(raw)
                if value is not None:
                    found[FlowKey.from_bytes(raw)] = Action.from_bytes(value)
        return found

    def put(self, key: FlowKey, value: Action) -> None:
        self._map(key).update(key.to_bytes(), value.to_bytes())

    def delete(self, key: FlowKey) -> None:
        self._map(key).delete(key.to_bytes())


class GrantsTarget:
    """The sources that the guard of one ring veth lets out."""

    def __init__(self, granted: ByteMap) -> None:
        self._granted = granted

    def present(self) -> Mapping[GrantKey, int]:
        found: dict[GrantKey, int] = {}
        for raw in self._granted.keys():
            value = self._granted.lookup(raw)
            if value is not None:
                found[GrantKey.from_bytes(raw)] = struct.unpack("=I", value)[0]
        return found

    def put(self, key: GrantKey, value: int) -> None:
        self._granted.update(key.to_bytes(), struct.pack("=I", value))

    def delete(self, key: GrantKey) -> None:
        self._granted.delete(key.to_bytes())


def sum_hits(values: list[bytes]) -> tuple[int, int]:
    """(packets, bytes) over all CPUs of a struct vmh_hits."""
    pairs = [struct.unpack("=QQ", value) for value in values]
    return sum(p for p, _ in pairs), sum(b for _, b in pairs)


def slot(index: int) -> bytes:
    """Key of an array map."""
    return struct.pack("=I", index)


def outs_by_name(table: ByteMap, prefix: str) -> dict[str, int]:
    """Packets per way out by its name: ``VMH_OUT_PASS_MISS`` with prefix ``VMH_OUT_`` is "pass_miss"."""
    names = {getattr(lib, name): name.removeprefix(prefix).lower() for name in dir(lib)
             if name.startswith(prefix) and name != f"{prefix}COUNT"}
    return {names[index]: sum_hits(table.lookup_percpu(slot(index)))[0] for index in sorted(names)}
