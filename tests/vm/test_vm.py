"""Real uverbs without an RDMA NIC: rdma_rxe on Debian's kernels in an emulated machine.

rxe offers no raw packet QPs, so this is the ladder's middle: a device is found, refuses, and AF_XDP carries the flow.
Nothing here says anything about a NIC that has them.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from typing import Any

import lab
import pytest

from vmahybrid.steering.reasons import Reason

pytestmark = [pytest.mark.vm, pytest.mark.timeout(600)]

Record = Callable[[str], dict[str, Any]]
RXE, PLAIN, FORCED = lab.LINKS
ECHOES = pytest.mark.parametrize(("echo", "link"), [
    *((f"echo {link.device}", link) for link in lab.LINKS), ("echo as nobody", RXE)])
# each rung with why it was not taken; "none" was taken
LADDERS = {
    RXE.device: [("verbs", "no-raw-packet-qp"), ("xdp", "none")],
    PLAIN.device: [("verbs", "no-verbs-device"), ("xdp", "none")],
    FORCED.device: [("verbs", "no-raw-packet-qp"), ("xdp", "backend-config"), ("kernel", "none")],
}
# mmap(2) of a bound AF_XDP socket is EBUSY before Linux 6.4: rings are granted in two steps
NO_MAP_OF_BOUND_SOCKETS = ("6.1",)
NO_TCX = ("6.1",)  # Linux 6.6 has it
# as tests/leftovers.py: what a broken kernel says
COMPLAINT = re.compile(r"\bBUG:|\bWARNING:|\bOops\b|general protection fault|KASAN|refcount_t|unregister_netdevice")


def test_rxe_sits_on_its_interfaces(record: Record, kernel: str) -> None:
    wired = record("wire")
    assert wired["release"].startswith(f"{kernel}.")
    assert [(link["ifname"], link["netdev"], link["state"]) for link in wired["links"]] == [
        (link.rdma, link.device, "ACTIVE") for link in (RXE, FORCED)]


def test_rxe_names_its_netdev_by_gid_only(record: Record) -> None:
    """Why discovery may not stop at device/net, which hardware has."""
    assert record("sysfs") == {"device_net": False, "gid_netdev": RXE.device, "uverbs": ["uverbs0", "uverbs1"]}


def test_pyverbs_discovers_it(record: Record) -> None:
    found = record("pyverbs")
    assert found["devices"] == [RXE.rdma, FORCED.rdma]
    assert found["gid_ifindex"] == found["ifindex"]


def test_raw_packet_qp_is_refused_and_others_are_not(record: Record) -> None:
    found = record("pyverbs")
    assert found["qp_errno"] == {"UD": 0, "RC": 0, "RAW_PACKET": errno.EOPNOTSUPP}
    assert found["raw_packet_caps"] == 0


def test_discovery_finds_it(record: Record) -> None:
    here = record("discovery")["here"]
    assert here["listed"] == [RXE.rdma, FORCED.rdma]
    assert here["device_of"] == {
        "lo": None, RXE.device: [RXE.rdma, 1], PLAIN.device: None, FORCED.device: [FORCED.rdma, 1],
        lab.VLAN.device: None}


def test_discovery_says_why_it_is_not_used(record: Record) -> None:
    found = record("discovery")["here"]["capabilities"][RXE.rdma]
    assert (found["reason"], found["raw_caps"], found["link_layer"]) == ("no-raw-packet-qp", [], "Ethernet")


def test_a_device_of_another_namespace_is_not_that_of_an_interface_with_the_same_name(record: Record) -> None:
    assert record("discovery")["other"]["device_of"] == {"lo": None, RXE.device: None, "end": None}


def test_doctor_finds_no_fault(record: Record) -> None:
    answer = record("doctor")
    assert answer["code"] == 0
    assert [check for check in answer["answer"]["checks"] if check["verdict"] == "fail"] == []


def test_doctor_names_the_device_and_the_reason(record: Record) -> None:
    checks = {check["name"]: check for check in record("doctor")["answer"]["checks"] if check["topic"] == "verbs"}
    for link in (RXE, FORCED):
        assert checks[link.rdma]["verdict"] == "ok"
        assert link.device in checks[link.rdma]["text"]
        assert "(no-raw-packet-qp)" in checks[link.rdma]["text"]


def test_selftest_stops_at_the_raw_packet_qp(record: Record) -> None:
    """doctor --verbs-selftest: the device is found and opened, and after the refusal nothing is tried."""
    assert record("selftest")["code"] == 1
    verdicts = [(check["name"], check["verdict"]) for check in record("selftest")["answer"]["checks"]]
    assert verdicts == [("library", "ok"), ("device of the interface", "ok"), ("raw packet QPs", "fail")]


@ECHOES
def test_every_datagram_comes_back_once(record: Record, echo: str, link: lab.Link) -> None:
    assert record(echo)["answered"] == lab.DATAGRAMS


def test_refusal_of_an_unprivileged_program(record: Record) -> None:
    """Without CAP_NET_RAW the kernel says EPERM before the driver is asked: the reason is the device's all the same."""
    assert "no raw packet QP on rxe0: Operation not permitted" in record("echo as nobody")["log"]
    assert "no raw packet QP on rxe0: Operation not supported" in record("echo nic0")["log"]


@ECHOES
def test_ladder(record: Record, echo: str, link: lab.Link) -> None:
    interface = record(echo)["interface"]
    assert (interface["device"], interface["wanted"]) == (link.rdma, link.backend)
    assert [(rung["backend"], rung["reason"]) for rung in interface["ladder"]] == LADDERS[link.device]
    assert [rung["taken"] for rung in interface["ladder"]] == [False] * (len(LADDERS[link.device]) - 1) + [True]


@ECHOES
def test_explain_shows_each_rung(record: Record, echo: str, link: lab.Link) -> None:
    explained = [step["text"] for step in record(echo)["explain"] if step["step"] == "ladder"]
    rungs = record(echo)["interface"]["ladder"]
    assert explained == [f"{link.device}: {rung['text']}" for rung in rungs]


@ECHOES
def test_what_carries_the_flow(record: Record, echo: str, link: lab.Link) -> None:
    """Not by the ladder's word only: the interface's XDP program counted the datagrams, the peer got each back."""
    found = record(echo)
    outs = {way: found["outs"].get(way, 0) for way in ("ring", "pass-miss", "pass-rule")}
    if link is FORCED:
        assert found["flows"] == []
        assert outs["ring"] == 0
    else:
        assert [(flow["action"], flow["backend"], flow["packets"]) for flow in found["flows"]] == [
            ("ring", "xdp", lab.DATAGRAMS)]
        assert outs == {"ring": lab.DATAGRAMS, "pass-miss": 0, "pass-rule": 0}


def test_a_second_program_has_a_ring_veth(record: Record) -> None:
    found = record("echo by a ring veth")
    assert found["answered"] == lab.DATAGRAMS
    assert sorted(ring["kind"] for ring in found["rings"]) == ["direct", "veth"]
    assert [(flow["action"], flow["backend"], flow["packets"]) for flow in found["flows"]] == [
        ("ring", "xdp", lab.DATAGRAMS)]
    assert found["outs"]["dev"] == lab.DATAGRAMS
    assert [ring["guard"]["sent"] for ring in found["rings"] if ring["kind"] == "veth"] == [lab.DATAGRAMS]


def test_rings_in_as_many_steps_as_this_kernel_needs(record: Record, kernel: str) -> None:
    """The service's probe and doctor's; the echoes above show that either way carries."""
    one = kernel not in NO_MAP_OF_BOUND_SOCKETS
    assert record("service")["features"]["map_bound_xsk"] is one
    said = [check for check in record("doctor")["answer"]["checks"] if check["name"] == "map bound AF_XDP"]
    assert [check["verdict"] for check in said] == ["ok" if one else "warn"]
    assert ("one step" if one else "two steps") in said[0]["text"]


def test_software_device_on_this_kernel(record: Record, kernel: str) -> None:
    """Beside the host's kernel: its flow rules are tcx links. Without them the ring is an AF_XDP one."""
    found = record("echo on softverbs")
    assert found["answered"] == lab.DATAGRAMS
    assert found["interface"]["device"] == ("" if kernel in NO_TCX else f"sv_{PLAIN.device}")
    carried = [(flow["action"], flow["backend"]) for flow in found["flows"]]
    assert carried == [("ring", "xdp" if kernel in NO_TCX else "verbs")], found["log"]
    rungs = [(rung["backend"], rung["reason"]) for rung in found["interface"]["ladder"]]
    assert rungs == ([("verbs", "verbs-failed"), ("xdp", "none")] if kernel in NO_TCX else [("verbs", "none")])
    refused = f"the RDMA device sv_{PLAIN.device} takes no flow rules: Operation not supported"
    assert (refused in found["log"]) == (kernel in NO_TCX)


def test_a_vlan_interface_carries_a_flow(record: Record) -> None:
    found = record("echo on a VLAN")
    assert found["answered"] == lab.DATAGRAMS
    assert [(flow["action"], flow["backend"], flow["packets"]) for flow in found["flows"]] == [
        ("ring", "xdp", lab.DATAGRAMS)]


def test_priorities_become_the_tag_s(record: Record) -> None:
    """SO_PRIORITY and IP_TOS, by the interface's egress map; by a ring veth they would be lost, so the kernel sends."""
    kernel = record("priorities of the kernel")["tags"]
    assert {text: tci >> 13 for text, tci in kernel.items()} == {
        "none": 0, "priority 3": 1, "priority 5": 7, "low delay": 4, "throughput": 2, "none again": 0}
    assert {tci & 0xFFF for tci in kernel.values()} == {lab.VLAN_ID}
    direct, veth = record("priorities"), record("priorities by a ring veth")
    assert direct["tags"] == kernel == veth["tags"]
    ((one,), (other,)) = direct["sockets"], veth["sockets"]
    assert one["counters"]["tx_packets"] >= 6 and one["tx_offloaded"]
    assert [ring["kind"] for ring in direct["rings"]] == ["direct"]
    assert (other["tx_os_reason"], other["counters"]["tx_os_packets"] >= 4) == ("priority", True)


def test_an_interface_without_a_ring(record: Record) -> None:
    """The reason is the ladder's, and no neighbour is looked after there."""
    steps = record(f"echo {FORCED.device}")["explain"]
    assert [step["text"] for step in steps if step["step"] == "ring"] == [Reason.NO_RAW_PACKET_QP.text]
    assert [step for step in steps if step["step"] == "flow"] == []
    assert f"neighbour entry {FORCED.peer_address}" not in record("stopped")["log"]


def test_service_leaves_nothing(record: Record) -> None:
    stopped = record("stopped")
    assert stopped["code"] == 0, stopped["log"]
    assert stopped["links"] == ["lo", *(link.device for link in lab.LINKS), lab.VLAN.device]
    assert stopped["xdp"] == []


def test_the_kernel_did_not_complain(record: Record) -> None:
    assert [line for line in record("kernel_log")["lines"] if COMPLAINT.search(line)] == []
