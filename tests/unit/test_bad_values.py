"""Every parameter of the catalogue with values that it cannot have: never a crash, never a silent change. Where the
peer has a text for it, it is the peer's; else the warning names parameter, value, range and what is used."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.test_shim_params import params_driver, run  # noqa: F401

from vmahybrid.config import effective
from vmahybrid.config.catalogue import Parameter, load

# research of libvma 9.8.84, its texts word by word; {} is the value
PEERS = {
    "VMA_STATS_FD_NUM": " Can only monitor maximum 1024 sockets in statistics ",
    "VMA_RING_ALLOCATION_LOGIC_TX": "VMA_RING_ALLOCATION_LOGIC_TX = {} is not valid, setting logic to default = 0",
    "VMA_RING_ALLOCATION_LOGIC_RX": "VMA_RING_ALLOCATION_LOGIC_RX = {} is not valid, setting logic to default = 0",
    "VMA_TX_MAX_INLINE": "VMA_TX_MAX_INLINE  must be smaller or equal to 884 [{}]",
    "VMA_RX_POLL": " Rx Poll loops should be between -1 and 100000000 [{}]",
    "VMA_RX_POLL_INIT": " Rx Poll loops should be between -1 and 100000000 [{}]",
    "VMA_HW_TS_CONVERSION": "HW TS conversion size out of range [{}] (min=0, max=4). using default [3]",
    "VMA_SELECT_POLL": " Select Poll loops can not be below zero [{}]",
}
CATALOGUE = load().parameters
NUMBERS = [p for p in CATALOGUE if p.type == "int"]
SPECIAL = ("VMA_SPEC", "VMA_HYBRID_POLICY", "VMA_HYBRID_PROFILE_DIR")


def outcome(driver: Path, name: str, text: str) -> tuple[str, str, list[str]]:
    """(origin, value) of the parameter, and the warnings; the command line has to say the same."""
    # the log level is left alone, so that the level's own bad values are seen
    shown, log = run(driver, "all", **{name: text})
    origin, _, value = shown[name].partition(" ")
    held = effective.resolve({name: text}, "test_params", 4711).values[name]
    assert (str(held.origin), str(held.value)) == (origin, value)
    return origin, value, [line.removeprefix(" VMA WARNING: ") for line in log.splitlines() if "VMA WARNING: " in line]


def own(warnings: list[str]) -> list[str]:
    """But for those that follow from another parameter's bound."""
    return [line for line in warnings if "does not go with" not in line]


def outside(p: Parameter) -> list[tuple[int, int]]:
    """(value out of range, what is used then)"""
    found = []
    for bad, nearest in ((p.minimum - 1 if p.minimum is not None else None, p.minimum),
                         (p.maximum + 1 if p.maximum is not None else None, p.maximum)):
        if bad is None or bad in p.also:
            continue
        used = nearest if p.clamps else p.default
        assert isinstance(used, int)
        found.append((bad, used))
    return found


@pytest.mark.parametrize("p", NUMBERS, ids=lambda p: p.name)
def test_out_of_range(driver: Path, p: Parameter) -> None:
    assert outside(p)
    for bad, used in outside(p):
        _, value, warnings = outcome(driver, p.name, str(bad))
        warning, *more = own(warnings)
        acts = f"{p.name} = {used} acts as {p.cap}: more makes no difference"
        assert [line.strip() for line in more] == ([acts] if p.cap is not None and p.clamps and used > p.cap else [])
        if p.name in PEERS and not (p.warns_above and used == p.minimum):
            assert warning == PEERS[p.name].format(bad)
        else:
            for part in (p.name, f" {bad} ", str(p.minimum), str(p.maximum), f"[{used}]"):
                assert part in warning
        if p.floor is None and p.ceiling is None:
            assert value == str(used)


@pytest.mark.parametrize("text", ["abc", "10ms", "0x10", "99999999999999999999"])
@pytest.mark.parametrize("p", [p for p in CATALOGUE if p.type != "string"], ids=lambda p: p.name)
def test_not_a_number(driver: Path, p: Parameter, text: str) -> None:
    origin, value, warnings = outcome(driver, p.name, text)
    (warning,) = own(warnings)
    for part in (p.name, f" {text} ", p.expected(), f"[{p.show(p.default)}]"):
        assert part in warning
    if p.floor is None and p.ceiling is None and p.name != "VMA_LOG_DETAILS":
        assert (origin, value) == ("0", str(p.default))


@pytest.mark.parametrize("p", [p for p in CATALOGUE if p.choices], ids=lambda p: p.name)
def test_a_number_that_is_no_choice(driver: Path, p: Parameter) -> None:
    for bad in (str(min(c.value for c in p.choices) - 1), "4711"):
        origin, value, warnings = outcome(driver, p.name, bad)
        (warning,) = own(warnings)
        if p.name in PEERS:
            assert warning == PEERS[p.name].format(bad)
        else:
            assert all(part in warning for part in (p.name, f" {bad} ", p.expected(), f"[{p.show(p.default)}]"))
        assert (origin, value) == ("0", str(p.default))


@pytest.mark.parametrize("text", ["", " "])
@pytest.mark.parametrize("p", [p for p in CATALOGUE if p.type != "string"], ids=lambda p: p.name)
def test_empty_is_not_set(driver: Path, p: Parameter, text: str) -> None:
    origin, _, warnings = outcome(driver, p.name, text)
    assert origin in (str(effective.DEFAULT), str(effective.DERIVED)) and own(warnings) == []


@pytest.mark.parametrize("p", [p for p in CATALOGUE if p.type == "string" and p.name not in SPECIAL],
                         ids=lambda p: p.name)
def test_too_long_a_text(driver: Path, p: Parameter) -> None:
    origin, value, warnings = outcome(driver, p.name, "/" + "x" * p.max_length)
    (warning,) = own(warnings)
    assert all(part in warning for part in (f"{p.name} = /xxxx", f"longer than {p.max_length} bytes", f"[{p.default}]"))
    assert (origin, value) == ("0", str(p.default))
    free = p.syntax is None or p.syntax.instead is None
    longest = "/" + "x" * (p.max_length - 1) if free else f"0x{1:0{p.max_length - 2}}"
    origin, value, _ = outcome(driver, p.name, longest)
    assert (origin, value) == (str(effective.ENVIRONMENT), longest)
