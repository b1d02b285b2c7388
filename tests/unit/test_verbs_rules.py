"""Keys of the steering table as flow rules of a NIC: what is matched, with which priority, and only the difference."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from vmahybrid.contracts import addr_to_bytes
from vmahybrid.errors import UsageError, VmahybridError
from vmahybrid.steering.keys import Act, Action, FlowKey
from vmahybrid.steering.mirror import mirror
from vmahybrid.verbs import rules
from vmahybrid.verbs.rules import FlowRules, Match, match_of
from vmahybrid.verbs.selftest import frame

MAC = bytes.fromhex("02000000000a")
HOST, PEER, GROUP = (addr_to_bytes(text) for text in ("10.0.0.1", "10.0.0.2", "239.129.2.3"))


def test_a_bound_and_a_connected_socket() -> None:
    assert match_of(FlowKey(HOST, 5000), MAC) == Match(1, "02:00:00:00:00:0a", 17, "10.0.0.1", 5000)
    assert match_of(FlowKey(HOST, 5000, PEER, 7, 6), MAC) == Match(0, "02:00:00:00:00:0a", 6, "10.0.0.1", 5000,
                                                                   "10.0.0.2", 7)


def test_a_group_has_the_lower_23_bits_in_its_mac() -> None:
    assert match_of(FlowKey(GROUP, 5000), MAC) == Match(1, "01:00:5e:01:02:03", 17, "239.129.2.3", 5000)


@pytest.mark.parametrize(("key", "said"), [
    (FlowKey(addr_to_bytes("fe80::1"), 1), "IPv4"),
    (FlowKey(HOST, 1, vlan=5), "untagged"),
    (FlowKey(HOST, 1, proto=132), "protocol 132"),
])
def test_what_has_no_rule(key: FlowKey, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        match_of(key, MAC)


class Device:
    """In place of a QP: rules that were made and are not ended, in order."""

    device, port, qp = "fake0", 1, object()

    def __init__(self) -> None:
        self.log: list[str] = []

    def rules(self, monkeypatch: pytest.MonkeyPatch, full: int = 99) -> FlowRules:
        log = self.log

        class Flow:
            def __init__(self, match: Match) -> None:
                self.name = f"{match.destination}:{match.port}"
                if len([line for line in log if line.startswith("+")]) >= full:
                    raise VmahybridError(self.name, "no room")
                log.append(f"+{self.name}")

            def close(self) -> None:
                log.append(f"-{self.name}")

        def plain(_what: str, step: Any, *arguments: Any) -> Any:
            return step(*arguments)

        monkeypatch.setattr(rules, "attempt", plain)
        monkeypatch.setattr(FlowRules, "_create", lambda _self, match: Flow(match))
        return FlowRules(self, MAC)  # type: ignore[arg-type]


def test_only_the_difference_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    target = device.rules(monkeypatch)
    one, two = FlowKey(HOST, 1), FlowKey(HOST, 2)
    ring, elsewhere = Action(Act.RING, 0, 1), Action(Act.PASS, 0, 2)
    assert mirror(target, {one: ring, two: elsewhere}).put == 2
    assert device.log == ["+10.0.0.1:1"]
    assert mirror(target, {one: ring, two: elsewhere}).put == 0
    changes = mirror(target, {two: ring})
    assert (changes.put, changes.deleted) == (1, 1)
    assert device.log == ["+10.0.0.1:1", "-10.0.0.1:1", "+10.0.0.1:2"]
    assert target.present() == {two: ring}
    target.close()
    target.close()
    assert device.log[-1] == "-10.0.0.1:2"
    assert target.present() == {}


def test_a_rule_that_the_device_refuses_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Device().rules(monkeypatch, full=1)
    changes = mirror(target, {FlowKey(HOST, 1): Action(Act.RING), FlowKey(HOST, 2): Action(Act.RING)})
    assert [key.dport for key, _ in changes.failed] == [2]
    assert set(target.present()) == {FlowKey(HOST, 1)}


def test_the_frame_of_the_selftest() -> None:
    made = frame(MAC, 9, b"hello")
    assert len(made) == 60
    assert made[:14] == MAC + MAC + b"\x08\x00"
    total = sum(struct.unpack("!10H", made[14:34]))
    assert (total & 0xFFFF) + (total >> 16) == 0xFFFF
    assert struct.unpack("!HHHH", made[34:42]) == (9, 9, 13, 0)
    assert made[42:47] == b"hello"
