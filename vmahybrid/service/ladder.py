"""Which backend carries a ring: verbs, then AF_XDP, then the kernel; rung by rung, each with why it was passed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vmahybrid.contracts import c_text, lib
from vmahybrid.errors import Refused
from vmahybrid.steering.reasons import Reason

VERBS, XDP, KERNEL = "verbs", "xdp", "kernel"
TITLES = {VERBS: "verbs", XDP: "AF_XDP", KERNEL: "kernel"}
VERBS_REASONS = (Reason.NO_VERBS_LIBRARY, Reason.NO_VERBS_DEVICE, Reason.NO_RAW_PACKET_QP, Reason.NO_CAP_NET_RAW,
                 Reason.VERBS_FAILED, Reason.DISABLED)


@dataclass(frozen=True, slots=True)
class Rung:
    """A backend and what became of it: ``reason`` NONE if it was taken, ``text`` says more than the reason or is empty.
    """

    backend: str
    reason: Reason
    text: str = ""

    @property
    def taken(self) -> bool:
        return self.reason is Reason.NONE

    @property
    def sentence(self) -> str:
        """"verbs: the interface has no RDMA device", "AF_XDP: taken, generic mode"."""
        if self.taken:
            return f"{TITLES[self.backend]}: taken" + (f", {self.text}" if self.text else "")
        return f"{TITLES[self.backend]}: {self.text or self.reason.text}"


Ladder = tuple[Rung, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a program says in its RING request of its interface's RDMA device. A claim: nothing is decided by it but
    whether the program may try, with the capability that the kernel asks of it."""

    usable: bool
    reason: Reason      # NONE if usable
    device: str         # printable, "" without one

    @classmethod
    def of(cls, body: Any) -> Asked:
        """Of struct vmh_msg_ring."""
        device = c_text(body.verbs_device)
        if body.verbs == lib.VMH_VERBS_USABLE:
            return cls(True, Reason.NONE, device)
        reason = Reason.from_code(body.verbs_reason)
        return cls(False, reason if reason in VERBS_REASONS else Reason.VERBS_FAILED, device)


def verbs_rung(backend: str, asked: Asked) -> Rung:
    """The first rung. ``backend`` is the configuration's word for the interface."""
    if backend not in ("auto", VERBS):
        return Rung(VERBS, Reason.BACKEND_CONFIG, f'the configuration says backend = "{backend}"')
    if asked.usable:
        return Rung(VERBS, Reason.NONE, f"device {asked.device}" if asked.device else "")
    return Rung(VERBS, asked.reason, f"{asked.device}: {asked.reason.text}" if asked.device else "")


def xdp_forbidden(backend: str) -> Rung | None:
    """The second rung, where the configuration rules it out."""
    if backend in ("auto", XDP):
        return None
    return Rung(XDP, Reason.BACKEND_CONFIG, f'the configuration says backend = "{backend}"')


def forced_home(backend: str) -> Ladder:
    """Where the configuration alone decides, and no program gets to ask; empty where one may."""
    forbidden = xdp_forbidden(backend)
    if backend != KERNEL or forbidden is None:
        return ()
    return on_kernel((verbs_rung(backend, Asked(False, Reason.BACKEND_CONFIG, "")), forbidden))


def xdp_refused(error: Refused) -> Rung:
    reason = Reason.from_code(error.reason)
    return Rung(XDP, reason if reason is not Reason.NONE else Reason.RING_FAILED, error.why)


def bottom(ladder: Ladder) -> Reason:
    """Why a program whose ladder ended at the kernel has no ring: of the configured backend, else of the last rung."""
    named = [rung for rung in ladder if rung.reason is not Reason.BACKEND_CONFIG and not rung.taken]
    return named[-1].reason if named else Reason.BACKEND_CONFIG


def on_kernel(ladder: Ladder) -> Ladder:
    """With the last rung, which always carries."""
    return (*ladder, Rung(KERNEL, Reason.NONE, "the program's sockets stay there on this interface"))
