"""What the program remembers of frames that hit: the same as the rules say, until these have another generation."""

from __future__ import annotations

import pytest

from bpf.frames import LOCAL, REMOTE, TCP, UDP, endpoint, tcp4, udp4, vlan
from bpf.harness import DROP, KERNEL, Outcome, Steer
from vmahybrid.contracts import flow_key, lib

pytestmark = pytest.mark.root

MISS = Outcome("pass", "pass-miss")


@pytest.fixture(autouse=True)
def rings(steer: Steer) -> None:
    for slot in (0, 64):
        steer.xsk("xsks", slot)


def forget(steer: Steer, table: str, src: str = "", proto: int = UDP) -> None:
    """Take the rule out of its table behind the program's back."""
    assert steer.maps[table].delete(flow_key(*endpoint(LOCAL), *(endpoint(src) if src else ()), proto=proto))


@pytest.mark.parametrize(("frame", "table", "src", "proto"), [
    (udp4(), "rules3", "", UDP), (udp4(), "rules5", REMOTE, UDP), (tcp4(), "rules5", REMOTE, TCP),
])
def test_a_hit_is_remembered_until_the_next_generation(steer: Steer, frame: bytes, table: str, src: str,
                                                       proto: int) -> None:
    hit = Outcome("redirect", "ring", steer.rule(LOCAL, src, proto=proto))
    assert steer.run(frame) == hit
    forget(steer, table, src, proto)
    assert steer.run(frame) == hit
    steer.configure(lib.VMH_PORT_F_5T)
    assert steer.run(frame) == MISS


def test_nothing_is_remembered_without_a_generation(steer: Steer) -> None:
    steer.rule(LOCAL)
    steer.configure(remember=False)
    assert steer.run(udp4()).out == "ring"
    forget(steer, "rules3")
    assert steer.run(udp4()) == MISS


def test_a_port_of_tcp_is_asked_for_each_time(steer: Steer) -> None:
    """Whether the kernel has the connection may be another answer for the next segment."""
    steer.rule(LOCAL, proto=TCP)
    assert steer.run(tcp4()).out == "ring"
    forget(steer, "rules3", proto=TCP)
    assert steer.run(tcp4()) == MISS


def test_a_new_rule_goes_before_what_is_remembered(steer: Steer) -> None:
    wide = steer.rule(LOCAL)
    assert steer.run(udp4()) == Outcome("redirect", "ring", wide)
    narrow = steer.rule(LOCAL, REMOTE, kind=KERNEL)
    assert steer.run(udp4()) == Outcome("pass", "pass-rule", narrow)


def test_another_action_for_the_same_key(steer: Steer) -> None:
    assert steer.run(udp4()) == MISS
    first = steer.rule(LOCAL, target=64)
    assert steer.run(udp4()) == Outcome("redirect", "ring", first)
    second = steer.rule(LOCAL, kind=DROP)
    assert steer.run(udp4()) == Outcome("drop", "drop", second)


def test_a_miss_is_not_remembered(steer: Steer) -> None:
    steer.rule("10.9.9.9:9")
    assert steer.run(udp4()) == MISS
    steer.maps["rules3"].update(flow_key(*endpoint(LOCAL), proto=UDP), bytes(16))
    assert steer.run(udp4()).out == "pass-rule"


def test_more_flows_than_slots(steer: Steer) -> None:
    """Flows of one slot drive each other out; each gets its own rule all the same."""
    host, _, _ = REMOTE.partition(":")
    verdicts = {}
    for port in range(20000, 20000 + 3 * lib.VMH_MEMOS // 2):
        steer.rule(LOCAL, f"{host}:{port}", kind=DROP if port % 2 else KERNEL)
        verdicts[f"{host}:{port}"] = "drop" if port % 2 else "pass"
    for _ in range(2):
        assert {src: steer.verdicts[steer.test_run(udp4(src=src)).retval] for src in verdicts} == verdicts


def test_a_tagged_frame_is_another_flow(steer: Steer) -> None:
    plain = steer.rule(LOCAL)
    assert steer.run(udp4()) == Outcome("redirect", "ring", plain)
    assert steer.run(vlan(udp4(), 5)) == MISS


@pytest.mark.parametrize(("frame", "src", "proto"), [(udp4(), "", UDP), (udp4(), REMOTE, UDP), (tcp4(), REMOTE, TCP)])
def test_a_port_that_has_no_rules_is_not_looked_at(steer: Steer, frame: bytes, src: str, proto: int) -> None:
    """That is what makes an interface without rules cheap: the flags say which tables may hold something."""
    steer.rule(LOCAL, src, proto=proto)
    steer.configure(none=True)
    assert steer.run(frame) == MISS
