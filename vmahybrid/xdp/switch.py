"""Which program steers on an interface in generic mode: `steer` in XDP, `tc_steer` at tcx while bulk traffic comes, or
none while there is no rule.

Generic XDP linearises every super-packet of the kernel's TCP (GSO, GRO) before the program sees it, which costs a fifth
of the rate; tcx leaves them whole, but is slower for a ring. So XDP is the normal state, and tcx the one for bulk
traffic. The new program is attached before the old one goes: no frame is unguarded, none is steered twice (XDP comes
first and keeps what it steers). tcx reaches a ring by `ring_in` on a veth's far end: a ring veth has one; a direct ring
gets one more socket, on the far end that the port keeps. Where there is nothing to steer, not even looking at the
frames is cheaper still: the state "off", which a native attachment never has, because a NIC resets its queues for it.
"""

from __future__ import annotations

import time

from vmahybrid.errors import Refused, VmahybridError
from vmahybrid.net.netns import NetnsWorker
from vmahybrid.steering.reasons import Reason
from vmahybrid.xdp.above import Stack
from vmahybrid.xdp.attach import Attachment, InterfaceBusy, attach_tcx, tcx_missing
from vmahybrid.xdp.bpf import BpfMap, BpfProgram, ProgramSet, load_set
from vmahybrid.xdp.holder import attached
from vmahybrid.xdp.image import Image
from vmahybrid.xdp.probe import InterfaceInfo
from vmahybrid.xdp.ringveth import FAR_PREFIX, RingVeth

TICK = 0.25          # seconds between looks
BULK = 250           # super-packets or other overlong frames per tick that are bulk: about 0.5 Gbit/s
CALM = 50            # so few per tick are none
CALM_TICKS = 12      # in a row, until XDP is attached again: 3 s; and without a rule, until nothing is attached
RETRY_SECONDS = 5.0  # after a switch that failed
FAR_MTU = 4096       # of the far end, whatever the interface's: larger than any frame for a ring


class BulkWatch:
    """Is bulk traffic going on? Fed with the count of overlong frames, once per tick."""

    def __init__(self) -> None:
        self.bulk = False
        self._last: int | None = None
        self._calm = 0

    def feed(self, count: int) -> bool:
        rise = 0 if self._last is None else count - self._last
        self._last = count
        if rise > BULK:
            self.bulk, self._calm = True, 0
        elif self.bulk:
            self._calm = self._calm + 1 if rise <= CALM else 0
            self.bulk = self._calm < CALM_TICKS
        return self.bulk


class Switch:
    """The attachment of a port. ``attachment`` is of the program that steers; ``tcx``: is it `tc_steer`? ``off``: it is
    closed, or will be in a moment.

    ``enabled``: it may go to tcx; ``detaches``: it may go off. ``switches`` and ``failures`` count; ``problem`` says
    what failed last, "" when nothing did; ``refused`` why it could not come back, None once it has. Everything but the
    attributes runs in the worker of the interface's namespace.
    """

    def __init__(self, worker: NetnsWorker, image: Image, info: InterfaceInfo, programs: ProgramSet,
                 attachment: Attachment, stack: Stack, *, enabled: bool, detaches: bool) -> None:
        generic = attachment.mode == "generic"
        self.attachment = attachment
        self.enabled, self.detaches = enabled and generic, detaches and generic
        self.tcx = self.off = False
        self.switches = self.failures = 0
        self.problem = self._missing = ""
        self.refused: Refused | None = None
        self._holders: set[int] = set()  # programs on the interface when it was refused
        self._worker, self._image, self.info, self._stack = worker, image, info, stack
        self._steer: BpfProgram = programs.programs["steer"]
        self._maps = programs.maps
        self._tc: ProgramSet | None = None
        self._far: RingVeth | None = None
        self._retry_at = 0.0

    @property
    def nears(self) -> BpfMap | None:
        """Map `nears`, once there is a program that reads it."""
        return self._tc.maps["nears"] if self._tc is not None else None

    @property
    def ready(self) -> bool:
        """Can it go to tcx? False before the first ``prepare``."""
        return self.enabled and self._tc is not None

    @property
    def waiting(self) -> bool:
        """Is it too early for another attempt?"""
        return time.monotonic() < self._retry_at

    def prepare(self) -> None:
        """Load `tc_steer`, once. Where that can't be, the port stays in XDP for good, which is no error."""
        if not self.enabled or self._tc is not None:
            return
        try:
            self._tc = load_set(self._image, ["tc_steer"], share=self._maps)
            missing = tcx_missing(self._tc.programs["tc_steer"])
        except VmahybridError as error:
            missing = error.why
        if missing:
            self._give_up(missing)

    def _give_up(self, why: str) -> None:
        self.enabled = False
        self.failures += 1
        self.problem = self._missing = why
        if self._tc is not None:
            self._tc.close()
            self._tc = None

    def far(self) -> RingVeth | None:
        """The far end for the direct ring, made at the first call; None where it can't be made."""
        self.prepare()
        if self.ready and self._far is None:
            try:
                self._far = RingVeth.open(self._worker, self._image, out_ifindex=self.info.ifindex,
                                          mac=self.info.mac, mtu=FAR_MTU, native=False, prefix=FAR_PREFIX)
            except (OSError, VmahybridError) as error:
                self.failed(f"no second way into a direct ring: {error}")
        return self._far

    def failed(self, why: str) -> None:
        """A step failed: counted, shown, and not tried again for a while."""
        self.failures += 1
        self.problem = why
        self._retry_at = time.monotonic() + RETRY_SECONDS

    def to_tcx(self) -> bool:
        """`tc_steer` in the place of `steer`. False: everything is as it was."""
        self.prepare()
        if self.tcx or self.off or not self.ready or self._tc is None:
            return False
        try:
            new = attach_tcx(self._tc.programs["tc_steer"], self.info.ifindex)
        except VmahybridError as error:
            self.failed(f"tcx: {error.why}")
            return False
        return self._turn(new, tcx=True)

    def to_xdp(self) -> bool:
        """`steer` again. False: it is there, or could not be attached."""
        if not self.tcx and not self.off:
            return False
        if self._still_held():
            self._retry_at = time.monotonic() + RETRY_SECONDS
            return False
        try:
            new = self._stack.attach(self._worker, self._steer, self.info.ifindex, "generic", self.info.driver)
        except (OSError, VmahybridError) as error:
            self.failed(f"XDP: {error.why if isinstance(error, VmahybridError) else error}")
            if self.off:
                self.refused = _refusal(self.info.name, error)
                self._holders = {one.program for one in error.holders} if isinstance(error, InterfaceBusy) else set()
            return False
        return self._turn(new, tcx=False)

    def to_off(self) -> bool:
        """Nothing attached. The port has set ``off`` before, with its lock, so that a new rule is not overlooked."""
        self.attachment.close()
        self.tcx = False
        self._turned()
        return True

    @property
    def in_xdp(self) -> bool:
        """Is there a program that keeps interfaces below from getting one, and that can be taken away?"""
        return self.attachment.mode == "generic" and not self.tcx and self.attachment.alive

    def step_aside(self) -> None:
        """Nothing attached until ``to_xdp``, which follows at once; it is tried again if it fails."""
        self.off = True
        self.attachment.close()

    def come_back(self) -> None:
        """XDP again after "off". Raises Refused (IF_BUSY, IF_GONE, ATTACH_FAILED)."""
        if self.off and not self.to_xdp() and self.refused is not None:
            raise _refusal(self.info.name, self.refused)

    def _still_held(self) -> bool:
        """By the programs that were found last: who keeps them need not be asked again, which reads all of /proc."""
        try:
            return bool(self._holders) and self._holders == set(attached(self.info.ifindex).values())
        except OSError:
            return False

    def _turn(self, new: Attachment, *, tcx: bool) -> bool:
        old, self.attachment, self.tcx = self.attachment, new, tcx
        old.close()
        self.off = False
        self._turned()
        return True

    def _turned(self) -> None:
        self.switches += 1
        self.problem, self.refused, self._holders = self._missing, None, set()

    def close(self) -> None:
        """Detach, and delete the far end; before the maps go. Idempotent."""
        self.enabled = self.detaches = False
        try:
            self.attachment.close()
            if self._far is not None:
                self._far.close()
        finally:
            self._far = None

    def unload(self) -> None:
        """The program, when nobody reads ``nears`` any more. Idempotent."""
        if self._tc is not None:
            self._tc.close()


def _refusal(name: str, error: OSError | VmahybridError) -> Refused:
    """Anew each time: one that is raised again would grow by its traceback."""
    if isinstance(error, VmahybridError):
        return Refused(name, error.why, error.remedy, getattr(error, "reason", 0) or int(Reason.ATTACH_FAILED))
    return Refused(name, f"{Reason.ATTACH_FAILED.text}: {error}", Reason.ATTACH_FAILED.remedy, Reason.ATTACH_FAILED)
