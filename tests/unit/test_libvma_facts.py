"""The catalogue against facts of libvma's source (data/libvma.json; see libvma_facts.py): labels, defaults, ranges."""

import json
from pathlib import Path
from typing import Any

import pytest
from unit import libvma_facts

from vmahybrid.config.catalogue import Parameter, load

RESEARCH = Path("/work/shared/research/libvma.md")
FACTS = json.loads((Path(__file__).parent / "data" / "libvma.json").read_text("utf-8"))
CATALOGUE = {parameter.name: parameter for parameter in load().parameters}

# (parameter, fact): why ours is another one on purpose
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
    return found


def test_catalogue_is_libvma_s_but_for_the_listed_differences() -> None:
    assert differences(FACTS) == set(DIFFERENT)


def test_every_parameter_of_libvma_has_facts() -> None:
    assert len(FACTS) == 102 and sum("range" in fact for fact in FACTS.values()) >= 19


@pytest.mark.skipif(not RESEARCH.exists(), reason="the research is not on this machine; its facts are tested above")
def test_the_facts_are_the_research_s() -> None:
    assert libvma_facts.facts(RESEARCH.read_text("utf-8")) == FACTS


@pytest.mark.parametrize(("name", "change"), [
    ("VMA_RX_POLL", {"default": "7"}), ("VMA_RX_POLL", {"label": "Rx"}), ("VMA_TX_WRE_BATCHING", {"range": [1, 65]}),
    ("VMA_NEW", {"label": "New", "default": "1"})])  # fmt: skip
def test_a_difference_is_found(name: str, change: dict[str, Any]) -> None:
    facts = {**FACTS, name: {**FACTS.get(name, {}), **change}}
    assert len(differences(facts) - set(DIFFERENT)) == 1
