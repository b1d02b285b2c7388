"""Which interfaces the configuration means: ``[NETNS:]NAME``, both shell patterns."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Self

NAME_LENGTH = 15    # characters of an interface's name (IFNAMSIZ without the end)
TEXT = re.compile(r"([^:\s]+:)?[^:\s/]+")


@dataclass(frozen=True, slots=True)
class InterfaceGlob:
    """Without NETNS in every namespace ("host" is that of process 1, and the service's own if it has no name)."""

    netns: str
    name: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError for what no interface can be called."""
        netns, _, name = text.rpartition(":")
        glob = cls(netns, name)
        if not TEXT.fullmatch(text) or (glob.literal and len(name) > NAME_LENGTH):
            raise ValueError(f"{text!r} is not [NETNS:]INTERFACE")
        return glob

    def matches(self, netns: str, name: str) -> bool:
        return fnmatchcase(name, self.name) and fnmatchcase(netns, self.netns or "*")

    def enters(self, netns: str) -> bool:
        """Is this namespace entered at the start, to attach what was named?"""
        return fnmatchcase(netns, self.netns or "host")

    @property
    def literal(self) -> bool:
        return not any(c in self.name for c in "*?[")
