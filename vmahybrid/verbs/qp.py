"""A raw packet QP of one's own: memory, completion queues, states, frames out and in.

Sizes and order are those of the shim's ring (docs/verbs.md); one process, one thread. pyverbs 44 has neither the file
descriptor of a completion channel nor flow tags nor moderation: what waits here polls, and a fast ring is the shim's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, Self

from vmahybrid.errors import VmahybridError
from vmahybrid.verbs.caps import VerbsError
from vmahybrid.verbs.library import need_pyverbs

FRAME = 2048            # bytes of a buffer
POLL_SECONDS = 0.0005   # between two looks while waiting
_STATUS_OK = 0          # IBV_WC_SUCCESS


class RawQp:
    """A raw packet QP in RTS with ``receives`` buffers posted, until close(). ``context``, ``pd``, ``mr``, ``send_cq``,
    ``receive_cq`` and ``qp`` are pyverbs objects. Made by :meth:`made`, or step by step in the order of ``steps``."""

    def __init__(self, device: str, port: int = 1, *, receives: int = 64, sends: int = 64) -> None:
        self.device, self.port = device, port
        self._receives, self._sends = receives, sends
        self._free = list(range(receives, receives + sends))   # buffers, by number
        self._stack = contextlib.ExitStack()
        self.steps: tuple[tuple[str, Callable[[], None]], ...] = (
            ("device", self.open), ("memory", self.register), ("completion queues", self.make_queues),
            ("raw packet QP", self.make_qp), ("ready to send", self.to_rts), ("receive requests", self.post_receives))

    @classmethod
    def made(cls, device: str, port: int = 1, *, receives: int = 64, sends: int = 64) -> Self:
        """Ready to use. Raises NotPossibleHere without pyverbs, VerbsError naming the step that failed."""
        qp = cls(device, port, receives=receives, sends=sends)
        try:
            for name, step in qp.steps:
                attempt(f"{name} of {device}", step)
        except BaseException:
            qp.close()
            raise
        return qp

    def open(self) -> None:
        need_pyverbs()
        import pyverbs.device
        from pyverbs.pd import PD

        self.context: Any = self._stack.enter_context(pyverbs.device.Context(name=self.device))
        self.pd: Any = self._stack.enter_context(PD(self.context))

    def register(self) -> None:
        import pyverbs.enums as e
        from pyverbs.mr import MR

        size = (self._receives + self._sends) * FRAME
        self.mr: Any = self._stack.enter_context(MR(self.pd, size, e.IBV_ACCESS_LOCAL_WRITE))

    def make_queues(self) -> None:
        from pyverbs.cq import CQ

        self.send_cq: Any = self._stack.enter_context(CQ(self.context, self._sends))
        self.receive_cq: Any = self._stack.enter_context(CQ(self.context, self._receives))

    def make_qp(self) -> None:
        import pyverbs.enums as e
        from pyverbs.qp import QP, QPCap, QPInitAttr

        cap = QPCap(max_send_wr=self._sends, max_recv_wr=self._receives, max_send_sge=1, max_recv_sge=1,
                    max_inline_data=0)
        self.qp: Any = self._stack.enter_context(
            QP(self.pd, QPInitAttr(qp_type=e.IBV_QPT_RAW_PACKET, scq=self.send_cq, rcq=self.receive_cq, cap=cap)))

    def to_rts(self) -> None:
        from pyverbs.qp import QPAttr

        self.qp.to_rts(QPAttr(port_num=self.port))  # by INIT and RTR

    def post_receives(self) -> None:
        for number in range(self._receives):
            self._post(number)

    def _post(self, number: int) -> None:
        from pyverbs.wr import SGE, RecvWR

        sge = SGE(self.mr.buf + number * FRAME, FRAME, self.mr.lkey)
        self.qp.post_recv(RecvWR(wr_id=number, num_sge=1, sg=[sge]))

    @property
    def number(self) -> int:
        return int(self.qp.qp_num)

    def send(self, frame: bytes, *, checksums: bool = False, timeout: float = 1.0) -> None:
        """Put one Ethernet frame onto the wire and wait until the device has it. ``checksums``: the device fills in
        those of IPv4 and UDP. Raises VerbsError, VmahybridError (a completion with an error, none in ``timeout``)."""
        import pyverbs.enums as e
        from pyverbs.wr import SGE, SendWR

        if len(frame) > FRAME:
            raise VmahybridError("frame", f"{len(frame)} bytes, a buffer has {FRAME}")
        number = self._free.pop()
        try:
            self.mr.write(frame, len(frame), number * FRAME)
            sge = SGE(self.mr.buf + number * FRAME, len(frame), self.mr.lkey)
            flags = e.IBV_SEND_SIGNALED | (e.IBV_SEND_IP_CSUM if checksums else 0)
            request = SendWR(wr_id=number, num_sge=1, sg=[sge], opcode=e.IBV_WR_SEND, send_flags=flags)
            attempt(f"send request of {self.device}", self.qp.post_send, request)
            self._completed(self.send_cq, "send", timeout)
        finally:
            self._free.append(number)

    def receive(self, timeout: float = 0.0) -> bytes | None:
        """The next frame that a flow rule brought, None if none came within ``timeout`` seconds. Its buffer is posted
        again. Raises VerbsError, VmahybridError."""
        try:
            done = self._completed(self.receive_cq, "receive", timeout)
        except TimeoutError:
            return None
        frame = bytes(self.mr.read(done.byte_len, done.wr_id * FRAME))
        attempt(f"receive request of {self.device}", self._post, done.wr_id)
        return frame

    def _completed(self, cq: Any, what: str, timeout: float) -> Any:
        deadline = time.monotonic() + timeout
        while True:
            count, found = attempt(f"completion queue of {self.device}", cq.poll, 1)
            if count:
                if found[0].status != _STATUS_OK:
                    raise VmahybridError(f"{what} on {self.device}", f"completed with status {found[0].status} (vendor "
                                         f"{found[0].vendor_err})", "enum ibv_wc_status of infiniband/verbs.h")
                return found[0]
            if time.monotonic() >= deadline:
                if what == "receive":
                    raise TimeoutError
                raise VmahybridError(f"{what} on {self.device}", f"no completion within {timeout:g} s",
                                     "is the port up? ibv_devinfo")
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """Rules must be gone by then. Idempotent. Raises VerbsError."""
        attempt(f"close of {self.device}", self._stack.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def attempt(what: str, step: Any, *arguments: Any) -> Any:
    """The result of ``step``; what libibverbs refuses becomes a VerbsError that names ``what``."""
    from pyverbs.pyverbs_error import PyverbsError

    try:
        return step(*arguments)
    except PyverbsError as error:
        raise VerbsError(what, error) from error
