"""`steer_stamped`: the adapter's time of arrival before frames of flows that want it, and `steer` where that can't be.

The real program is bound to a veth, which answers that there is no time; what it does with one is seen with a stand-in.
"""

from __future__ import annotations

import dataclasses
import re
import socket
import time
from collections.abc import Iterator

import pytest
from net.xdp_lab import Lab
from stamp_stand_in import MONOTONIC, image_with

from bpf.frames import LOCAL, TCP, tcp4, udp4, udp6, vlan
from bpf.harness import DEV, DROP, Outcome, Steer, index
from vmahybrid.contracts import lib, unpack
from vmahybrid.errors import Refused
from vmahybrid.steering.reasons import Reason
from vmahybrid.xdp import kfunc, stamped
from vmahybrid.xdp.attach import attach
from vmahybrid.xdp.bpf import BpfError, load_set
from vmahybrid.xdp.image import Image, ProgramImage
from vmahybrid.xdp.port import XdpPort

pytestmark = pytest.mark.root

STAMP = int(lib.VMH_ACT_F_STAMP)
SIZE = 16  # struct vmh_stamp
EMPTY = bytes.fromhex("b7000000000000009500000000000000")  # r0 = 0; exit


class Stamped(Steer):
    program = "steer_stamped"

    def left(self, frame: bytes) -> bytes:
        """Metadata and frame as the program leaves them."""
        return self.test_run(frame).data


@pytest.fixture(scope="module")
def told() -> Image:
    return image_with(MONOTONIC)


@pytest.fixture
def steer(told: Image) -> Iterator[Stamped]:
    with Stamped(told) as loaded:
        loaded.xsk("xsks", 0)
        loaded.maps["devs"].update(index(0), index(socket.if_nametoindex("lo")))
        yield loaded


@pytest.mark.parametrize("frame", [udp4(), udp4(payload=bytes(1400)), vlan(udp4(), 5)])
@pytest.mark.parametrize("kind", [lib.VMH_ACT_RING, DEV])
def test_a_flow_that_wants_it_gets_the_time(steer: Stamped, kind: int, frame: bytes) -> None:
    steer.rule(LOCAL, kind=kind, flags=STAMP, vlan=5 if frame[12:14] == b"\x81\x00" else 0)
    before = time.monotonic_ns()
    seen = [steer.left(frame) for _ in range(2)]  # the second one remembers the rule
    for left in seen:
        stamp = unpack("struct vmh_stamp", left[:SIZE])
        assert (stamp.magic, left[SIZE:]) == (lib.VMH_STAMP_MAGIC, frame)
        assert before < stamp.ns < time.monotonic_ns()


@pytest.mark.parametrize(("flags", "kind"), [(0, lib.VMH_ACT_RING), (0, DEV), (lib.VMH_ACT_F_LISTEN, DEV)])
def test_others_get_nothing(steer: Stamped, flags: int, kind: int) -> None:
    steer.rule(LOCAL, kind=kind, flags=flags)
    steer.rule(LOCAL, kind=DROP, proto=TCP)
    for frame in (udp4(), tcp4(), udp6()):
        assert steer.left(frame) == frame


def test_otherwise_it_is_as_steer(steer: Stamped) -> None:
    number = steer.rule(LOCAL)
    assert steer.run(udp4()) == Outcome("redirect", "ring", number)
    assert steer.run(udp6()) == Outcome("pass", "pass-miss")
    assert steer.run(bytes(60)) == Outcome("pass", "pass-not-ip")


@pytest.mark.parametrize("answer", ["-61", "-95", "(ns = 5, -61)", "(ns = 0)"])
def test_no_time_no_stamp(answer: str) -> None:
    """ENODATA, EOPNOTSUPP; and 0, as veth says it."""
    with Stamped(image_with(answer)) as steer:
        steer.xsk("xsks", 0)
        steer.rule(LOCAL, flags=STAMP)
        assert steer.left(udp4()) == udp4()


def test_steer_knows_nothing_of_it(image: Image, told: Image) -> None:
    assert len(image.programs["steer_stamped"].calls) == 1
    assert [p.name for p in image.programs.values() if p.calls] == ["steer_stamped"]
    assert image.programs["steer"] == told.programs["steer"]
    with Steer(image) as plain:
        plain.xsk("xsks", 0)
        plain.rule(LOCAL, flags=STAMP)
        assert plain.test_run(udp4()).data == udp4()


def test_bound_to_its_device(image: Image) -> None:
    with Lab() as lab, load_set(image, ["steer"]) as plain:
        ifindex = lab.b.call(socket.if_nametoindex, "vb")
        with pytest.raises(BpfError, match="metadata kfuncs require device-bound program"):
            load_set(image, ["steer_stamped"], share=plain.maps)
        with lab.b.call(load_set, image, ["steer_stamped"], share=plain.maps, device=ifindex) as bound:
            program = bound.programs["steer_stamped"]
            with pytest.raises(Refused, match="refused the XDP program"):
                lab.b.call(attach, program, ifindex, "generic")
            lab.b.call(attach, program, ifindex, "native").close()


def test_a_port_in_native_mode_has_it(image: Image) -> None:
    with Lab() as lab:
        with lab.port("native") as port:
            assert (port.mode, port.unstamped, port.hook) == (
                "native", None, "native XDP with the adapter's time stamps")
        with lab.port() as port:
            assert (port.mode, port.unstamped) == ("generic", stamped.Unstamped("generic XDP has no metadata"))
            assert port.hook == "generic XDP"


def _broken(image: Image, insns: bytes) -> Image:
    program = ProgramImage("steer_stamped", insns, ())
    return dataclasses.replace(image, programs={**image.programs, "steer_stamped": program})


@pytest.mark.parametrize("failure", ["verifier", "no kernel function"])
def test_steering_goes_on_without(image: Image, failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if failure == "verifier":
        image = _broken(image, EMPTY[8:])  # r0 is not set
    else:
        kfunc._rx_timestamp.cache_clear()
        monkeypatch.setattr(kfunc, "RX_TIMESTAMP", "no_such_function_here")
    try:
        with Lab() as lab, XdpPort.open(lab.b, image, "vb", "native") as port:
            assert port.unstamped is not None and port.unstamped.tried
            assert re.match("native XDP without the adapter's time stamps: .*(R0|no_such_function)", port.hook, re.S)
            assert (port.mode, port.reason, port.attached) == ("native", Reason.NONE, True)
    finally:
        kfunc._rx_timestamp.cache_clear()


def test_a_driver_that_gives_none(image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    for told, why in ((None, "the kernel can't say what the driver gives to XDP"),
                      ({"hash"}, "the driver gives XDP no time stamps")):
        monkeypatch.setattr(stamped, "rx_metadata", lambda _ifindex, told=told: told)
        with Lab() as lab, lab.port("native") as port:
            assert (port.unstamped, port.hook) == (stamped.Unstamped(why), "native XDP")
