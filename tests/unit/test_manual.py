"""The catalogue against the facts of the README manual (data/manual.json; see manual_facts.py)."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from unit import manual_facts

from vmahybrid.config.catalogue import Parameter, load

MANUAL = Path("/work/shared/reference/vma-readme.txt")
FACTS = json.loads((Path(__file__).parent / "data" / "manual.json").read_text("utf-8"))
CATALOGUE = load()
MTU_LIMITS = {"VMA_TX_PREFETCH_BYTES": 65535, "VMA_RX_PREFETCH_BYTES": 2044}  # what "MTU size" is as a number

# (parameter, fact): why ours is another one on purpose
DIFFERENT = {
    ("VMA_TRACELEVEL", "banner"): "the manual's example runs at DETAILS; its text and we say info",
    ("VMA_FORK", "default"): "the manual's text says 0, its banner Enabled: the banner is what the peer does",
    ("VMA_TX_BUF_SIZE", "default"): "the text says calculated, the banner 0: 0 is what stands for calculated",
    ("VMA_LOG_DETAILS", "choices"): "a range from 0 to 3 here, the same values",
    ("VMA_HW_TS_CONVERSION", "choices"): "a range from 0 to 4 here, the same values",
    ("VMA_TCP_TIMESTAMP_OPTION", "choices"): "a range from 0 to 2 here, the same values",
}
# parameters of ours that the manual does not know
NOT_IN_MANUAL = {
    "VMA_SPEC_PARAM1": "read by the peer",
    "VMA_SPEC_PARAM2": "read by the peer",
    "VMA_NETLINK_TIMER": "read by the peer",
    "VMA_DEFERRED_CLOSE": "read by the peer",
    "VMA_TIME_MEASURE_NUM_SAMPLES": "read by instrumentation builds of the peer",
    "VMA_TIME_MEASURE_DUMP_FILE": "read by instrumentation builds of the peer",
    "VMA_LOG_CB_FUNC_PTR": "read by the peer",
    "VMA_DBG_SEND_MCPKT_COUNTER": "read by the peer",
    "VMA_DBG_SEND_MCPKT_MCGROUP": "read by the peer",
}
# in the manual, and no parameter of ours
ALIASES = {alias for parameter in CATALOGUE.parameters for alias in parameter.aliases}


def same(parameter: Parameter, text: str, value: int | str) -> bool:
    """Is a value written as in the manual (Enable, Single, 1 (Contig Pages), true) this one?"""
    if parameter.type == "string":
        return text == value
    words = {text.lower(), text.split(" ", maxsplit=1)[0].lower()}
    if parameter.choices:
        texts = {choice.value: {choice.text.strip("()").lower(), *choice.words} for choice in parameter.choices}
        words |= {"0"} if "disabled" in words else set()
        return bool(words & texts[int(value)])
    word = (words & {"enable", "enabled", "true"} and "1") or (words & {"disable", "disabled", "false"} and "0")
    return (word or text) == str(value)


def allows(parameter: Parameter, value: int) -> bool:
    if parameter.type == "string":
        return parameter.syntax is not None and parameter.syntax.takes(str(value))
    ours = {choice.value for choice in parameter.choices} | set(parameter.also)
    return value in ours or (parameter.minimum is not None and parameter.minimum <= value)


SENTENCES = {
    "most": lambda parameter, fact: parameter.maximum == int(fact, 16),
    "floor": lambda parameter, fact: parameter.floor is not None and parameter.floor.other == fact,
    "older name": lambda parameter, fact: fact in {*parameter.aliases, *(old.name for old in CATALOGUE.obsolete)},
    "also": lambda parameter, fact: allows(parameter, int(fact)),
}


def differences(facts: dict[str, Any]) -> set[tuple[str, str]]:
    known = {parameter.name: parameter for parameter in CATALOGUE.parameters}
    found = {(name, "missing") for name in facts["described"].keys() - known.keys() - ALIASES}
    order = [parameter.name for parameter in CATALOGUE.parameters]
    names = [name for name, _, _ in facts["banner"]]
    found |= {(name, "order") for a, name in pairwise(names) if order.index(a) > order.index(name)}
    for name, label, shown in facts["banner"]:
        if (label, shown) != known[name].banner_value(known[name].default):
            found.add((name, "banner"))
    for name, fact in facts["described"].items():
        if name in known:
            found |= {(name, what) for what in fact if not agrees(known[name], what, fact[what])}
    for profile, changes in facts["profiles"].items():
        values = {name: value for name, value in CATALOGUE.profile(profile).values.items()
                  if not name.startswith("VMA_HYBRID_")}
        found |= {(name, f"profile {profile}") for name in values.keys() ^ changes.keys()}
        for name in values.keys() & changes.keys():
            value, default = changes[name]
            if not same(known[name], value, values[name]):
                found.add((name, f"profile {profile}"))
            if not same(known[name], default, known[name].default):
                found.add((name, f"default in profile {profile}"))
    return found


def agrees(parameter: Parameter, what: str, fact: Any) -> bool:
    if what == "default":
        return same(parameter, fact, parameter.default)
    if what == "choices":
        ours = {choice.value for choice in parameter.choices} or {0, 1}
        if set(fact) == {0}:  # only what 0 means is said
            return parameter.minimum == 0 or 0 in ours
        return ours == set(fact)
    if what in SENTENCES:
        return SENTENCES[what](parameter, fact)
    low, high = fact
    high = MTU_LIMITS[parameter.name] if high == "MTU" else high
    if parameter.type == "bool":
        return (low, high) == (0, 1)
    return (parameter.minimum, parameter.maximum) == (low, high)


def test_catalogue_is_the_manual_s_but_for_the_listed_differences() -> None:
    assert differences(FACTS) == set(DIFFERENT)


def test_what_the_manual_does_not_know_is_listed() -> None:
    names = {parameter.name for parameter in CATALOGUE.parameters}
    ours = {name for name in names if name.startswith("VMA_HYBRID_")}
    in_manual = FACTS["described"].keys() | {name for name, _, _ in FACTS["banner"]}
    assert names - ours - in_manual == set(NOT_IN_MANUAL)


def test_every_parameter_of_the_manual_has_facts() -> None:
    assert len(FACTS["banner"]) == 93 and len(FACTS["described"]) == 93
    assert sum("default" in fact for fact in FACTS["described"].values()) > 85


@pytest.mark.skipif(not MANUAL.exists(), reason="the manual is not on this machine; its facts are tested above")
def test_the_facts_are_the_manual_s() -> None:
    assert manual_facts.facts(MANUAL.read_text("utf-8")) == FACTS


@pytest.mark.parametrize(
    ("where", "name", "change"),
    [("banner", 3, ["VMA_LOG_FILE", "Log File", "x"]), ("described", "VMA_RX_POLL", {"default": "7"}),
     ("described", "VMA_STATS_FD_NUM", {"range": [0, 1023]}), ("described", "VMA_NEW", {"default": "7"}),
     ("described", "VMA_THREAD_MODE", {"choices": [0, 1, 2]}), ("described", "VMA_TX_BUF_SIZE", {"most": "0xFF01"}),
     ("described", "VMA_TCP_TIMER_RESOLUTION_MSEC", {"floor": "VMA_RX_POLL"}), ("described", "VMA_MTU", {"also": "-1"}),
     ("described", "VMA_TX_MAX_INLINE", {"older name": "VMA_INLINE"}),
     ("described", "VMA_SELECT_POLL_OS_FORCE", {"choices": [0, 2]})],
)  # fmt: skip
def test_a_difference_is_found(where: str, name: str | int, change: Any) -> None:
    facts = json.loads(json.dumps(FACTS))
    facts[where][name] = change
    assert len(differences(facts) - set(DIFFERENT)) == 1
