"""What `vmahybrid doctor` looks at. A probe tries the thing itself where it can; it changes nothing on the host."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """One line: ``fail`` means that nothing will be offloaded, ``warn`` that it will be slower or is not certain."""

    topic: str
    name: str
    verdict: Verdict
    text: str
    remedy: str = ""                # the command that mends it
    data: dict[str, Any] = field(default_factory=dict)


Probe = Callable[[], Iterable[Check]]


def guarded(topic: str, name: str, probe: Probe) -> list[Check]:
    """A probe that breaks is a warning that names it, not the end of the others."""
    try:
        return list(probe())
    except Exception as error:  # a machine may be odd in ways that no probe foresees
        return [Check(topic, name, "warn", f"the probe broke: {error!r}", "report it")]
