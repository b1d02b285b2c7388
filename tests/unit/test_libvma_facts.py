"""The catalogue against facts of libvma's source (data/libvma.json; see libvma_facts.py): labels, defaults, ranges."""

import json
from pathlib import Path
from typing import Any

import pytest
from unit import libvma_facts

from vmahybrid.config.catalogue import INT_LIMIT, STRING_SIZE, Parameter, load

RESEARCH = Path("/work/shared/research/libvma.md")
FACTS = json.loads((Path(__file__).parent / "data" / "libvma.json").read_text("utf-8"))
CATALOGUE = {parameter.name: parameter for parameter in load().parameters}

# (parameter, fact): why ours is another one on purpose
# (least, most) where neither the research nor the manual states any, or one of them only, and which is not "from 0"
OWN_LIMITS = {
    "VMA_TX_WRE": (1, 2097152),  # more than any device has
    "VMA_RX_WRE": (1, INT_LIMIT),
    "VMA_TIMER_RESOLUTION_MSEC": (1, INT_LIMIT),  # a timer of 0 ms would spin
    "VMA_TCP_TIMER_RESOLUTION_MSEC": (1, INT_LIMIT),
    "VMA_MTU": (0, 65535),  # of an IPv4 packet
    "VMA_MSS": (88, 65495),  # the kernel's least, and what such a packet carries
}
NO_LINE = "it has no line of its own in the peer's banner, or one in some builds"
DIFFERENT = {
    ("VMA_SPEC", "label"): "the text says when the line is there",
    ("VMA_VMAD_NOTIFY_DIR", "label"): "the manual's label, not the source's",
    ("VMA_VMAD_NOTIFY_DIR", "default"): "the manual's, which ends with a slash",
    ("VMA_TX_BUF_SIZE", "label"): "gone in the source, the manual's here",
    ("VMA_TX_WRE", "range"): "the device's limit, or that of AF_XDP rings, counts: docs/parameters.md",
    ("VMA_SOCKETXTREME", "label"): "the manual's label, not the source's",
    ("VMA_SELECT_POLL_OS_FORCE", "label"): NO_LINE,
    ("VMA_NETLINK_TIMER", "label"): NO_LINE,
    ("VMA_TSO", "label"): NO_LINE,
    ("VMA_TIME_MEASURE_NUM_SAMPLES", "label"): NO_LINE,
    ("VMA_TIME_MEASURE_DUMP_FILE", "label"): NO_LINE,
}


def limits(parameter: Parameter) -> tuple[int | None, int | None]:
    if parameter.type == "string":
        return None, parameter.max_length
    if parameter.choices:
        return min(c.value for c in parameter.choices), max(c.value for c in parameter.choices)
    return parameter.minimum, parameter.maximum


def differences(facts: dict[str, Any]) -> set[tuple[str, str]]:
    found = set()
    for name, fact in facts.items():
        if fact["default"] is None:  # not read any more
            continue
        parameter = CATALOGUE.get(name)
        if parameter is None:
            found.add((name, "missing"))
            continue
        if fact["label"] != parameter.label:
            found.add((name, "label"))
        if fact["default"] != str(parameter.default):
            found.add((name, "default"))
        ours = limits(parameter)
        if any(theirs not in (None, own) for theirs, own in zip(fact.get("range", ()), ours, strict=False)):
            found.add((name, "range"))
        for kind, bound in (("floor", parameter.floor), ("ceiling", parameter.ceiling)):
            if fact.get(kind) != ([bound.other, bound.times, bound.divisor] if bound else None):
                found.add((name, kind))
    return found


def test_limits_that_nobody_states_are_listed() -> None:
    """From 0, without a limit above; texts as long as there is room for; the rest is listed with what it is."""
    manual = json.loads((Path(__file__).parent / "data" / "manual.json").read_text("utf-8"))["described"]
    found = {}
    for name, parameter in CATALOGUE.items():
        low, high = FACTS.get(name, {}).get("range", (None, None))
        if (name, "range") in DIFFERENT:
            low = high = None
        if parameter.type not in ("int", "string") or name.startswith("VMA_HYBRID_") or "range" in manual.get(name, {}):
            continue
        usual = (None, STRING_SIZE - 1) if parameter.type == "string" else (0, INT_LIMIT)
        ours = tuple(None if stated is not None else own
                     for stated, own in zip((low, high), limits(parameter), strict=True))
        if any(own not in (None, other) for own, other in zip(ours, usual, strict=True)):
            found[name] = ours
    assert found == OWN_LIMITS


def test_catalogue_is_libvma_s_but_for_the_listed_differences() -> None:
    assert differences(FACTS) == set(DIFFERENT)


def test_every_parameter_of_libvma_has_facts() -> None:
    assert len(FACTS) == 102 and sum("range" in fact for fact in FACTS.values()) >= 24
    assert sum(len(fact.keys() & {"floor", "ceiling"}) for fact in FACTS.values()) == 6


@pytest.mark.skipif(not RESEARCH.exists(), reason="the research is not on this machine; its facts are tested above")
def test_the_facts_are_the_research_s() -> None:
    assert libvma_facts.facts(RESEARCH.read_text("utf-8")) == FACTS


@pytest.mark.parametrize(("name", "change"), [
    ("VMA_RX_POLL", {"default": "7"}), ("VMA_RX_POLL", {"label": "Rx"}), ("VMA_TX_WRE_BATCHING", {"range": [1, 65]}),
    ("VMA_NEW", {"label": "New", "default": "1"})])  # fmt: skip
def test_a_difference_is_found(name: str, change: dict[str, Any]) -> None:
    facts = {**FACTS, name: {**FACTS.get(name, {}), **change}}
    assert len(differences(facts) - set(DIFFERENT)) == 1
