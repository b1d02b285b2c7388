"""The mirror: bring what is in a map to what the table wants, by the difference.

A restarted service finds entries of its predecessor and converges the same way, so nothing needs to know what was
there before. Entries are taken out before others are put in: a map that is full of the old has room for the new, and a
frame meets the kernel in between, never a wrong ring.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from vmahybrid.errors import VmahybridError

K = TypeVar("K")
V = TypeVar("V")


class MirrorTarget(Protocol[K, V]):
    """A map in the kernel, a table in a NIC, or a dict in a test."""

    def present(self) -> Mapping[K, V]:
        """All entries, as they are now. Raises OSError or BpfError."""
        ...

    def put(self, key: K, value: V) -> None:
        """Add or replace. Raises OSError or BpfError."""
        ...

    def delete(self, key: K) -> None:
        """An absent key is no error. Raises OSError or BpfError."""
        ...


@dataclass(slots=True)
class Changes(Generic[K]):
    put: int = 0
    deleted: int = 0
    failed: list[tuple[K, Exception]] = field(default_factory=list)


def mirror(target: MirrorTarget[K, V], wanted: Mapping[K, V], only: Collection[K] | None = None) -> Changes[K]:
    """Apply the difference between ``wanted`` and what is present; returns what was done.

    ``only`` limits the work to these keys, without reading the target: for the small changes between two full mirrors.
    One entry that can't be changed does not stop the others; it is in ``failed``.
    """
    changes: Changes[K] = Changes()
    present = target.present() if only is None else None
    candidates = present.keys() if present is not None else only or ()
    for key in [key for key in candidates if key not in wanted]:
        try:
            target.delete(key)
            changes.deleted += 1
        except (OSError, VmahybridError) as error:
            changes.failed.append((key, error))
    for key in wanted if only is None else [key for key in only if key in wanted]:
        if present is not None and present.get(key) == wanted[key]:
            continue
        try:
            target.put(key, wanted[key])
            changes.put += 1
        except (OSError, VmahybridError) as error:
            changes.failed.append((key, error))
    return changes
