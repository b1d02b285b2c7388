"""Which rung is taken, and what is said of the others."""

from __future__ import annotations

import pytest

from vmahybrid.contracts import lib, pack, unpack
from vmahybrid.errors import Refused
from vmahybrid.service.backend_verbs import VerbsRingHandle
from vmahybrid.service.ladder import (
    KERNEL,
    VERBS,
    XDP,
    Asked,
    Rung,
    bottom,
    on_kernel,
    verbs_rung,
    xdp_forbidden,
    xdp_refused,
)
from vmahybrid.steering.keys import Act
from vmahybrid.steering.reasons import Reason

USABLE = Asked(True, Reason.NONE, "mlx5_0")
RXE = Asked(False, Reason.NO_RAW_PACKET_QP, "rxe0")


def asked(**fields: object) -> Asked:
    return Asked.of(unpack("struct vmh_msg_ring", pack("struct vmh_msg_ring", **fields)))


def test_what_a_program_says() -> None:
    assert asked(verbs=lib.VMH_VERBS_USABLE, verbs_device=b"mlx5_0") == USABLE
    assert asked(verbs_reason=int(Reason.NO_RAW_PACKET_QP), verbs_device=b"rxe0") == RXE
    assert asked(verbs=lib.VMH_VERBS_USABLE, verbs_reason=int(Reason.NO_VERBS_DEVICE)).usable


@pytest.mark.parametrize("code", [0, int(Reason.RULE), 65535, 7])
def test_a_reason_that_is_none_of_verbs(code: int) -> None:
    assert asked(verbs=7, verbs_reason=code) == Asked(False, Reason.VERBS_FAILED, "")


def test_a_device_name_is_text_for_a_terminal() -> None:
    assert asked(verbs_device=b"x\x1b[31m\n").device == "x?[31m?"


@pytest.mark.parametrize(("backend", "says", "first", "second"), [
    ("auto", USABLE, Reason.NONE, None),
    ("auto", RXE, Reason.NO_RAW_PACKET_QP, None),
    ("verbs", USABLE, Reason.NONE, Reason.BACKEND_CONFIG),
    ("verbs", RXE, Reason.NO_RAW_PACKET_QP, Reason.BACKEND_CONFIG),
    ("xdp", USABLE, Reason.BACKEND_CONFIG, None),
    ("xdp", RXE, Reason.BACKEND_CONFIG, None),
    ("kernel", USABLE, Reason.BACKEND_CONFIG, Reason.BACKEND_CONFIG),
])
def test_what_the_configuration_allows(backend: str, says: Asked, first: Reason, second: Reason | None) -> None:
    assert verbs_rung(backend, says).reason is first
    forbidden = xdp_forbidden(backend)
    assert (forbidden.reason if forbidden else None) is second


def test_sentences() -> None:
    assert verbs_rung("auto", USABLE).sentence == "verbs: taken, device mlx5_0"
    assert verbs_rung("auto", RXE).sentence == "verbs: rxe0: the interface's RDMA device has no raw packet QPs"
    assert verbs_rung("xdp", RXE).sentence == 'verbs: the configuration says backend = "xdp"'
    refused = xdp_refused(Refused("eth0", "held by x", "", int(Reason.IF_BUSY)))
    assert (refused.reason, refused.sentence) == (Reason.IF_BUSY, "AF_XDP: held by x")


def test_why_a_ladder_ended_at_the_kernel() -> None:
    config = Rung(XDP, Reason.BACKEND_CONFIG)
    ladder = on_kernel((verbs_rung("verbs", RXE), config))
    assert (ladder[-1].backend, ladder[-1].taken) == (KERNEL, True)
    assert bottom(ladder) is Reason.NO_RAW_PACKET_QP
    assert bottom(on_kernel((Rung(VERBS, Reason.BACKEND_CONFIG), config))) is Reason.BACKEND_CONFIG
    assert bottom(on_kernel((verbs_rung("auto", RXE), Rung(XDP, Reason.IF_BUSY)))) is Reason.IF_BUSY


def test_a_grant_has_no_geometry_and_no_descriptors() -> None:
    handle = VerbsRingHandle(5, 1500, b"\x02\0\0\0\0\x01", "mlx5_0")
    reply = unpack("struct vmh_msg_ring_reply", pack("struct vmh_msg_ring_reply", ring_id=3, **handle.reply_fields()))
    assert (reply.kind, reply.nqueues, reply.ifindex, reply.mtu, bytes(reply.mac)) == (
        lib.VMH_RING_VERBS, 0, 5, 1500, b"\x02\0\0\0\0\x01")
    assert (reply.frames, reply.frame_size, reply.rx_size, reply.tx_size, reply.fill_size, reply.comp_size) == (0,) * 6
    assert (handle.xsk_fds, handle.umem_fd, handle.act, handle.zerocopy) == ([], -1, Act.PASS, True)
    assert not VerbsRingHandle(5, 1500, bytes(6), "sv_eth0").zerocopy
