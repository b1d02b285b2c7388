"""Bonds of a real kernel, in the emulated machine: what carries their flows, a failover, and what is refused how."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bonds
import boot
import lab
import pytest
from conftest import BOOT_S, must_be_ready, reader

pytestmark = [pytest.mark.vm, pytest.mark.timeout(600)]

Record = Callable[[str], dict[str, Any]]
OFFLOADED = ("bond1", "bond2", "bond4", "bond1.11")
MODE_BOX = """\
VMA doesn't support current bonding configuration of bond3.
The only supported bonding mode is "802.3ad(#4)" or "active-backup(#1)"
with "fail_over_mac=1" or "fail_over_mac=0".
The effect of working in unsupported bonding mode is undefined.
Read more about Bonding in the VMA's User Manual"""
REFUSED = {
    "bond3": ("bond-mode", MODE_BOX),
    "bond4.10": ("bond-vlan", "bond4.10: vlan over bond while fail_over_mac=1 is not offloaded"),
}


@pytest.fixture(scope="session")
def bonded() -> boot.Ran:
    """One kernel is enough: bonds are the same on both."""
    must_be_ready()
    return boot.boot("6.12", [sys.executable, str(Path(__file__).with_name("bonds.py"))], BOOT_S)


@pytest.fixture
def record(bonded: boot.Ran) -> Record:
    return reader(bonded)


def warnings(found: dict[str, Any]) -> list[str]:
    return [line.rpartition("VMA WARNING: ")[2] for line in found["log"].splitlines() if "VMA WARNING: " in line]


def test_the_kernel_has_these_bonds(record: Record) -> None:
    wired = record("wire")
    for name, mode in (("bond1", "active-backup"), ("bond2", "802.3ad"), ("bond3", "round-robin"),
                       ("bond4", "active-backup")):  # fmt: skip
        assert re.search(f"^Bonding Mode: .*{mode}", wired[name], re.MULTILINE), wired[name]
        assert wired[name].count("Slave Interface:") == bonds.PAIRS
    assert "Number of ports: 2" in wired["bond2"]


@pytest.mark.parametrize("name", OFFLOADED)
def test_a_bond_that_carries_a_flow(record: Record, name: str) -> None:
    found = record(f"echo {name}")
    assert found["answered"] == lab.DATAGRAMS
    assert [(flow["action"], flow["backend"], flow["packets"]) for flow in found["flows"]] == [
        ("ring", "xdp", lab.DATAGRAMS)]
    assert "bond" not in " ".join(warnings(found))


@pytest.mark.parametrize("name", REFUSED)
def test_a_bond_that_is_refused_as_in_the_manual(record: Record, name: str) -> None:
    """The kernel carries it, the program is told in the peer's words, the service in its own."""
    found = record(f"echo {name}")
    reason, box = REFUSED[name]
    assert found["answered"] == lab.DATAGRAMS
    assert found["flows"] == []
    assert reason in str(found["explain"])
    said = warnings(found)[-box.count("\n") - 3:]
    assert set(said[0]) == set(said[-1]) == {"*"}
    assert "\n".join(said[1:-1]) == box


def test_a_failover_loses_nothing_for_long(record: Record) -> None:
    found = record("failover")
    assert set(found["slaves"]) == {"n10", "n11"}
    assert found["answered"] == [lab.DATAGRAMS] * 3
    assert [[flow["packets"] for flow in flows if flow["action"] == "ring"] for flows in found["flows"]] == [
        [lab.DATAGRAMS], [2 * lab.DATAGRAMS], [3 * lab.DATAGRAMS]], [step["text"] for step in found["explain"]]


def test_a_bond_is_used_again_while_a_vlan_over_it_is(record: Record) -> None:
    """The kernel attaches from below upwards only: the program of the VLAN interface steps aside."""
    found = record("below_a_vlan")
    assert found["answered"] == [lab.DATAGRAMS] * 3
    assert (found["before"], found["after"]) == ([False, True], [True, True])
    assert [(flow["interface"], flow["action"], flow["packets"]) for flow in found["flows"]] == [
        ("bond1", "ring", lab.DATAGRAMS), ("bond1.11", "ring", 2 * lab.DATAGRAMS)]


def test_service_leaves_no_program_on_a_bond(record: Record) -> None:
    stopped = record("stopped")
    assert (stopped["code"], stopped["xdp"]) == (0, []), stopped["log"]
