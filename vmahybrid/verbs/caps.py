"""What an RDMA device can do: raw packet QPs above all.

Run as a program (``python -m vmahybrid.verbs.caps DEVICE``) it prints :class:`Capabilities` as JSON: the service asks a
child, in the device's network namespace, and so never loads drivers into itself.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vmahybrid.config import catalogue
from vmahybrid.errors import NotPossibleHere, VmahybridError
from vmahybrid.steering.reasons import Reason
from vmahybrid.verbs.library import need_pyverbs

CHILD_SECONDS = 10.0
INLINE = int(catalogue.load()["VMA_TX_MAX_INLINE"].default)
_RAW_CAPS = {1: "cvlan-stripping", 2: "scatter-fcs", 4: "ip-csum", 8: "delay-drop"}  # IBV_RAW_PACKET_CAP_*
_REFUSALS = {errno.EPERM: Reason.NO_CAP_NET_RAW, errno.EACCES: Reason.NO_CAP_NET_RAW,
             errno.EOPNOTSUPP: Reason.NO_RAW_PACKET_QP, errno.ENOSYS: Reason.NO_RAW_PACKET_QP,
             errno.EINVAL: Reason.NO_RAW_PACKET_QP}


class VerbsError(VmahybridError):
    """A call of libibverbs failed: ``errno`` is its error, 0 if it named none."""

    def __init__(self, what: str, error: Exception, remedy: str = "") -> None:
        code = getattr(error, "error_code", -1)
        self.errno = code if isinstance(code, int) and code > 0 else 0
        super().__init__(what, os.strerror(self.errno) if self.errno else str(error).rstrip(".") or repr(error), remedy)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Of a device and the calling process. ``reason`` says why it has no raw packet QP: a slug, "none" if it has."""

    device: str
    reason: str
    detail: str = ""                # the library's words
    raw_caps: list[str] = field(default_factory=list)
    max_qp_wr: int = 0              # work requests per queue
    max_sge: int = 0
    max_cqe: int = 0
    max_inline: int = 0             # bytes, of the QP that was made for trying
    link_layer: str = ""

    @property
    def raw_packet(self) -> bool:
        return self.reason == Reason.NONE.slug


def devices() -> list[str]:
    """Names of the devices that libibverbs lists here; empty where the kernel has no RDMA. Raises NotPossibleHere."""
    need_pyverbs()
    import pyverbs.device
    from pyverbs.pyverbs_error import PyverbsError

    try:
        return [device.name.decode("utf-8", "replace") for device in pyverbs.device.get_device_list()]
    except PyverbsError:  # ENOSYS without the uverbs modules; pyverbs keeps no errno
        return []


def capabilities(device: str, port: int = 1) -> Capabilities:
    """Open the device, ask it, and try to make a raw packet QP. Raises NotPossibleHere, VerbsError (opening failed).

    A refusal of the QP is no error: rxe and siw say EOPNOTSUPP, a process without CAP_NET_RAW gets EPERM."""
    need_pyverbs()
    import pyverbs.device
    from pyverbs.pyverbs_error import PyverbsError

    try:
        context = pyverbs.device.Context(name=device)
    except PyverbsError as error:
        raise VerbsError(f"device {device}", error, f"ls -l /dev/infiniband: {device}'s uverbs file must be readable "
                         "and writable") from error
    with context:
        asked = context.query_device_ex()
        limits = asked.orig_attr
        layer = {1: "InfiniBand", 2: "Ethernet"}.get(context.query_port(port).link_layer, "unspecified")
        reason, detail, inline = _try_qp(context)
        if reason is Reason.NO_CAP_NET_RAW and not asked.raw_packet_caps:
            reason = Reason.NO_RAW_PACKET_QP  # the kernel looks at the capability before the driver says what it can do
        return Capabilities(device, reason.slug, detail,
                            [name for bit, name in _RAW_CAPS.items() if asked.raw_packet_caps & bit],
                            limits.max_qp_wr, limits.max_sge, limits.max_cqe, inline, layer)


def _try_qp(context: Any) -> tuple[Reason, str, int]:
    """(why there is no raw packet QP, in the library's words, inline bytes). As the ring does it asks for all that it
    would use, and for half of that until it is not too much."""
    from pyverbs.pyverbs_error import PyverbsError

    wanted = INLINE
    while True:
        try:
            return Reason.NONE, "", min(_inline_of_qp(context, wanted), wanted)
        except PyverbsError as error:
            failed = VerbsError("raw packet QP", error)
            if not wanted or failed.errno not in (errno.EINVAL, errno.ENOMEM):
                return _REFUSALS.get(failed.errno, Reason.VERBS_FAILED), failed.why, 0
            wanted //= 2


def _inline_of_qp(context: Any, wanted: int) -> int:
    """Inline bytes of a raw packet QP that was asked for so many."""
    import pyverbs.enums as e
    from pyverbs.cq import CQ
    from pyverbs.pd import PD
    from pyverbs.qp import QP, QPCap, QPInitAttr

    with PD(context) as pd, CQ(context, 16) as cq:
        cap = QPCap(max_send_wr=16, max_recv_wr=16, max_send_sge=2, max_recv_sge=1, max_inline_data=wanted)
        with QP(pd, QPInitAttr(qp_type=e.IBV_QPT_RAW_PACKET, scq=cq, rcq=cq, cap=cap)) as qp:
            return int(qp.query(e.IBV_QP_CAP)[1].cap.max_inline_data)


def in_child(device: str, begun: Callable[[subprocess.Popen[str]], None] | None = None) -> Capabilities:
    """:func:`capabilities` by a child process in the calling thread's network namespace; blocks for some 0.2 s, at most
    CHILD_SECONDS. Whoever is told the child by ``begun`` may kill it to end that.

    Raises VmahybridError."""
    command = [sys.executable, "-P", "-m", "vmahybrid.verbs.caps", device]
    try:
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True) as child:
            if begun is not None:
                begun(child)
            try:
                out, err = child.communicate(timeout=CHILD_SECONDS)
            finally:
                child.kill()
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotPossibleHere(f"device {device}", f"it can't be looked at: {error}", "vmahybrid doctor") from None
    if child.returncode:
        said = err.strip().splitlines()
        raise VmahybridError(f"device {device}", said[-1] if said else f"exit {child.returncode}", "vmahybrid doctor")
    return Capabilities(**json.loads(out))


def main(argv: list[str]) -> int:
    try:
        print(json.dumps(dataclasses.asdict(capabilities(argv[0]))))
    except VmahybridError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
