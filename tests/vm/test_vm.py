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

pytestmark = [pytest.mark.vm, pytest.mark.timeout(600)]

Record = Callable[[str], dict[str, Any]]
WITH_RXE, WITHOUT = lab.LINKS
BOTH = pytest.mark.parametrize("link", lab.LINKS, ids=lambda link: link.device)
# mmap(2) of a bound AF_XDP socket is EBUSY before Linux 6.4: the program stays on the kernel, and says why
NO_MAP_OF_BOUND_SOCKETS = ("6.1",)
# as tests/leftovers.py: what a broken kernel says
COMPLAINT = re.compile(r"\bBUG:|\bWARNING:|\bOops\b|general protection fault|KASAN|refcount_t|unregister_netdevice")


def test_rxe_is_a_device_of_the_first_interface(record: Record, kernel: str) -> None:
    wired = record("wire")
    assert wired["release"].startswith(f"{kernel}.")
    assert [(link["ifname"], link["netdev"], link["state"]) for link in wired["links"]] == [
        (lab.RDMA_DEVICE, WITH_RXE.device, "ACTIVE")]


def test_uverbs_are_the_kernels(record: Record) -> None:
    assert record("sysfs")["uverbs"] == ["uverbs0"]


def test_rxe_names_its_netdev_by_gid_only(record: Record) -> None:
    """Why discovery may not stop at device/net, which hardware has."""
    assert record("sysfs") == {"device_net": False, "gid_netdev": WITH_RXE.device, "uverbs": ["uverbs0"]}


def test_pyverbs_discovers_it(record: Record) -> None:
    found = record("pyverbs")
    assert found["devices"] == [lab.RDMA_DEVICE]
    assert found["gid_ifindex"] == found["ifindex"]


def test_raw_packet_qp_is_refused_and_others_are_not(record: Record) -> None:
    found = record("pyverbs")
    assert found["qp_errno"] == {"UD": 0, "RC": 0, "RAW_PACKET": errno.EOPNOTSUPP}
    assert found["raw_packet_caps"] == 0


def test_doctor_finds_no_fault(record: Record) -> None:
    answer = record("doctor")
    assert answer["code"] == 0
    assert [check for check in answer["answer"]["checks"] if check["verdict"] == "fail"] == []


@BOTH
def test_every_datagram_comes_back_once(record: Record, link: lab.Link) -> None:
    assert record(f"echo {link.device}")["answered"] == lab.DATAGRAMS


@BOTH
def test_rung_that_carries_the_flow(record: Record, kernel: str, link: lab.Link) -> None:
    """Not by its own word only: the interface's XDP program counted the datagrams."""
    echo = record(f"echo {link.device}")
    interfaces = {interface["name"]: interface for interface in record("status")["answer"]["interfaces"]}
    outs = interfaces[link.device]["outs"]
    if kernel in NO_MAP_OF_BOUND_SOCKETS:
        assert "could not be mapped: Device or resource busy" in echo["log"]
        assert echo["flows"] == []
        assert (outs["ring"], outs["pass-miss"]) == (0, lab.DATAGRAMS)
    else:
        assert [(flow["action"], flow["interface"], flow["packets"]) for flow in echo["flows"]] == [
            ("ring", link.device, lab.DATAGRAMS)]
        assert (outs["ring"], outs["pass-miss"]) == (lab.DATAGRAMS, 0)


def test_service_leaves_nothing(record: Record) -> None:
    stopped = record("stopped")
    assert stopped["code"] == 0, stopped["log"]
    assert stopped["links"] == ["lo", *(link.device for link in lab.LINKS)]
    assert stopped["xdp"] == []


def test_the_kernel_did_not_complain(record: Record) -> None:
    assert [line for line in record("kernel_log")["lines"] if COMPLAINT.search(line)] == []
