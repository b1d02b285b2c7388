"""A measured figure beside its target, and the order in which variants are measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, TypeVar

from vmahybrid.bench.sandbox import SandboxError

T = TypeVar("T")


@dataclass(frozen=True)
class Figure:
    """One line of the bench. ``at_least`` or ``at_most`` is the target, in the figure's unit; None: shown only.

    ``limit`` is what raw AF_XDP reaches in the same run, without the shim: a target beyond it is beyond this machine.
    """

    part: str
    name: str
    value: float
    unit: str
    at_least: float | None = None
    at_most: float | None = None
    samples: list[float] = field(default_factory=list)
    limit: float | None = None

    @property
    def passed(self) -> bool | None:
        if self.at_least is not None:
            return self.value >= self.at_least
        if self.at_most is not None:
            return self.value <= self.at_most
        return None

    @property
    def target(self) -> str:
        if self.at_least is not None:
            return f">= {self.at_least:g}"
        return "" if self.at_most is None else f"<= {self.at_most:g}"

    @property
    def verdict(self) -> str:
        if self.passed is False and self.limit is not None:
            return f"MISS (raw AF_XDP: {self.limit:.3g})"
        return {True: "pass", False: "MISS", None: ""}[self.passed]

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


def median_figure(part: str, name: str, samples: list[float], unit: str, at_most: float | None = None) -> Figure:
    return Figure(part, name, statistics.median(samples), unit, at_most=at_most, samples=samples)


def neighbours(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """The ratio of each run to its neighbour, as interleave() gives them, less those to nothing at all; none when one
    of the two failed.

    A shared machine changes its speed by half within seconds: a median of one may be of a fast spell, and that of the
    other of a slow one.
    """
    return [a / b for a, b in zip(over, under, strict=True) if b] if over and under else []


def beside(over: Sequence[float], under: Sequence[float]) -> float | None:
    """The median of neighbours(); None when there are none."""
    ratios = neighbours(over, under)
    return statistics.median(ratios) if ratios else None


@dataclass
class Runs(Generic[T]):
    """Results of every variant, and what went wrong with those that failed."""

    results: dict[str, list[T]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def of(self, name: str, value: Callable[[T], float]) -> list[float]:
        """The value of each run of a variant; empty when it failed."""
        return [] if name in self.failures else [value(result) for result in self.results[name]]


def interleave(variants: Mapping[str, Callable[[], T]], repeats: int, say: Callable[[str], None]) -> Runs[T]:
    """Measures all variants in turn, `repeats` times, backwards every other time: drift of the machine hits all alike.

    A variant that fails is not tried again; the others go on.
    """
    runs: Runs[T] = Runs({name: [] for name in variants})
    for turn in range(repeats):
        for name in sorted(variants, key=list(variants).index, reverse=bool(turn % 2)):
            if name in runs.failures:
                continue
            say(f"{name} ({turn + 1} of {repeats})")
            try:
                runs.results[name].append(variants[name]())
            except SandboxError as error:
                runs.failures[name] = str(error)
    return runs


@dataclass
class Part:
    """What a part of the bench measured."""

    figures: list[Figure] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    def ratio(
        self,
        name: str,
        over: list[float],
        under: list[float],
        at_least: float | None = None,
        at_most: float | None = None,
        limit: float | None = None,
    ) -> None:
        """Adds beside(over, under) unless one of them failed."""
        value = beside(over, under)
        if value is not None:
            self.figures.append(Figure(self.figures[0].part, name, value, "x", at_least, at_most, limit=limit))
