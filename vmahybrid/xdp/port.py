"""One served interface: its XDP program, the rules in it, and the slots that rings take.

The steering table is mirrored into a port by ``present``, ``install`` and ``remove``; rings are made by
:func:`vmahybrid.xdp.ring.open_ring`. Everything may be called from any thread; what opens and closes
things waits for the worker of the interface's namespace.
"""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import socket
import struct
import threading
from socket import IPPROTO_TCP
from typing import TYPE_CHECKING, Self

from vmahybrid.contracts import lib, pack, unpack
from vmahybrid.errors import Refused
from vmahybrid.net.netns import NetnsWorker
from vmahybrid.steering.reasons import Reason
from vmahybrid.xdp.above import Stack
from vmahybrid.xdp.attach import Attachment
from vmahybrid.xdp.bpf import BpfMap, ProgramSet, load_set
from vmahybrid.xdp.counters import Watched, read_hits, read_outs
from vmahybrid.xdp.image import Image
from vmahybrid.xdp.probe import InterfaceInfo, probe
from vmahybrid.xdp.stamped import Unstamped, attach_stamped
from vmahybrid.xdp.switch import CALM_TICKS, BulkWatch, Switch

if TYPE_CHECKING:
    from vmahybrid.xdp.ring import Ring
    from vmahybrid.xdp.ringveth import RingVeth

ETH_HEADER = 14
RING_SLOTS: int = lib.VMH_MAX_XSK // lib.VMH_QUEUES
GENERATIONS = 2**32 - 1  # of rules; 0 is none
# The program reads the generation before the rules and needs the processor to keep that order; BPF has no read barrier.
REMEMBERS = platform.machine() in ("x86_64", "i386", "i686")


class _Slots:
    """Numbers 0..size-1, lowest free first."""

    def __init__(self, size: int, what: str) -> None:
        self._size, self._what = size, what
        self._used: set[int] = set()
        self._lock = threading.Lock()

    def take(self) -> int:
        with self._lock:
            slot = next((n for n in range(self._size) if n not in self._used), None)
            if slot is None:
                raise Refused(self._what, f"all {self._size} are in use", Reason.RING_LIMIT.remedy, Reason.RING_LIMIT)
            self._used.add(slot)
            return slot

    def free(self, slot: int) -> None:
        with self._lock:
            self._used.discard(slot)


class XdpPort:
    """The program `steer` on one interface of one namespace.

    ``info`` is the interface as it was when opened; ``mtu`` follows set_mtu(), its ``mac`` set_mac(). ``mode``
    is "native" or "generic", ``reason`` and ``detail`` say why not better. ``rings`` are those open now. ``switch``:
    what is attached just now. ``unstamped``: why the program has not the adapter's time stamps, None if it has them.
    """

    def __init__(self, worker: NetnsWorker, image: Image, info: InterfaceInfo, programs: ProgramSet,
                 attachment: Attachment, stack: Stack, *, switch: bool, detach: bool) -> None:
        """Use :meth:`open`."""
        self.worker, self.image, self.info = worker, image, info
        self.switch = Switch(worker, image, info, programs, attachment, stack, enabled=switch, detaches=detach)
        stack.add(self)
        self._bulk = BulkWatch()
        self._bare = 0  # looks in a row that found no rule
        self._programs = programs
        self._maps = programs.maps
        self._overlong = Watched(self._maps["outs"], lib.VMH_OUT_PASS_TOO_LONG)
        self.ifname, self.ifindex = info.name, info.ifindex
        self.mode, self.reason, self.detail = attachment.mode, attachment.reason, attachment.detail
        self.mtu = info.mtu
        self.unstamped: Unstamped | None = Unstamped("not tried")
        self.rings: list[Ring] = []
        # What opens and closes runs in the worker, one after another. The lock is for the maps, which any thread reads
        # and writes until they are unloaded; it is never held across a call of the worker.
        self._lock = threading.Lock()
        self._unloaded = False
        self._five_tuples: set[bytes] = set()  # keys in rules5: the program looks there only if there are some
        self._ports: set[bytes] = set()  # the same of rules3 and rulesmc
        self._tcp: set[bytes] = set()  # those of TCP in rules5 and rules3
        self._generation = 0  # of the rules, for the program's memos
        self._tagged: set[bytes] = set()  # keys with a VLAN: a ring gets their frames in XDP only
        self._ring_slots = _Slots(RING_SLOTS, f"rings on {info.name}")
        self._dev_slots = _Slots(lib.VMH_MAX_DEV, f"ring veths on {info.name}")
        self.queues_taken_until = 0.0  # time.monotonic(): a direct ring found the queues taken
        self.closed = False

    @classmethod
    def open(cls, worker: NetnsWorker, image: Image, ifname: str, mode: str = "auto", *, switch: bool = False,
             detach: bool = False, stack: Stack | None = None) -> Self:
        """Load the program with maps of its own and attach it. ``worker`` stays the caller's.

        ``mode``: "auto", "native", "generic" (see :func:`vmahybrid.xdp.attach.attach`). ``switch``: in generic mode,
        tcx may take its place while bulk traffic comes, if ``watch`` is called; ``detach``: nothing does while there
        is no rule. ``stack``: of the caller's other ports, which step aside where they lie above this. Raises Refused
        (NO_INTERFACE, IF_UNSUPPORTED, IF_BUSY, ATTACH_FAILED), BpfError.
        """
        return worker.call(cls._open, worker, image, ifname, mode, switch, detach, stack or Stack())

    @classmethod
    def _open(cls, worker: NetnsWorker, image: Image, ifname: str, mode: str, switch: bool, detach: bool,
              stack: Stack) -> Self:
        try:
            info = probe(ifname)
        except OSError as error:
            raise Refused(ifname, f"no such interface in namespace {worker.netns}", "ip link shows them",
                          Reason.NO_INTERFACE) from error
        if not info.ethernet:
            raise Refused(ifname, Reason.IF_UNSUPPORTED.text, Reason.IF_UNSUPPORTED.remedy, Reason.IF_UNSUPPORTED)
        programs = load_set(image, ["steer"])
        try:
            _write_config(programs.maps["port"], info.mtu + ETH_HEADER)
            stamped = attach_stamped(image, info, mode, programs, stack, worker)
            attachment = (stack.attach(worker, programs.programs["steer"], info.ifindex, mode, info.driver)
                          if isinstance(stamped, Unstamped) else stamped)
        except BaseException:
            programs.close()
            raise
        port = cls(worker, image, info, programs, attachment, stack, switch=switch, detach=detach)
        port.unstamped = stamped if isinstance(stamped, Unstamped) else None
        return port

    @property
    def attached(self) -> bool:
        """False when closed, while ``switch.off``, or when the interface is gone."""
        return self.switch.attachment.alive

    # -- the switch between XDP, tcx and nothing

    @property
    def hook(self) -> str:
        """What steers now, for people: "native XDP", "native XDP with the adapter's time stamps", "generic XDP",
        "generic, now tcx (bulk traffic)", "generic XDP, off: no rule", and why not another if that is known."""
        if self.mode == "native":
            return "native XDP" + self._stamps
        if self.switch.off:
            refused = self.refused
            return f"generic XDP, off: {refused.why if refused is not None else 'no rule'}"
        if self.switch.tcx:
            return "generic, now tcx (bulk traffic)" + (f"; {self.switch.problem}" if self.switch.problem else "")
        why = self.switch.problem or (self._obstacle() if self._bulk.bulk else "")
        return f"generic XDP, no tcx for bulk traffic: {why}" if why else "generic XDP"

    @property
    def _stamps(self) -> str:
        if self.unstamped is None:
            return " with the adapter's time stamps"
        return f" without the adapter's time stamps: {self.unstamped.why}" if self.unstamped.tried else ""

    def _obstacle(self) -> str:
        """Why tcx would break a flow, "" if it would not."""
        if self._tagged:
            return "a rule for tagged frames"
        with self._lock:
            return next(("a ring without a second way in" for ring in self.rings if not ring.near_ifindex), "")

    @property
    def refused(self) -> Refused | None:
        """Why nothing can be attached for the rules that are there, or were; None where all is well."""
        return self.switch.refused if self.switch.off else None

    @property
    def _missed(self) -> bool:
        """Is it off, and should not be? Without a rule it is still tried whether what was refused once can be had."""
        return self.switch.off and (self._ruled or self.switch.refused is not None)

    @property
    def _ruled(self) -> bool:
        return bool(self._five_tuples or self._ports)

    @property
    def _idle(self) -> bool:
        """Without a rule for so long that nothing need be attached."""
        return self.switch.detaches and not self.switch.off and not self._ruled and self._bare >= CALM_TICKS

    def watch(self) -> bool:
        """Look at traffic and rules, every switch.TICK seconds: is ``turn`` due? Quick, from any thread."""
        switch = self.switch
        if self.closed or not (switch.enabled or switch.detaches):
            return False
        with self._lock:
            if self._unloaded:
                return False
            bulk = switch.enabled and self._bulk.feed(self._overlong.read())
            self._bare = 0 if self._ruled else self._bare + 1
            off, due = switch.off, self._missed or self._idle
        if off or due:
            return due and not switch.waiting
        if not bulk and not switch.tcx:
            return False
        wanted = bulk and not self._obstacle()
        return wanted != switch.tcx and not switch.waiting

    def turn(self) -> bool:
        """To tcx or back, as the traffic wants, or off. False: not done; ``switch`` has the reason."""
        return self.worker.call(self._turn)

    def _turn(self) -> bool:
        if self.closed:
            return False
        with self._lock:
            idle = self._idle
            self.switch.off |= idle  # the rule that comes next sees it, and waits for this thread
        if idle:
            return self.switch.to_off()
        if self.switch.off:
            return self._missed and self.switch.to_xdp()
        if self._bulk.bulk and not self._obstacle():
            return self.switch.to_tcx()
        return self.switch.to_xdp()

    def wake(self) -> None:
        """Something is attached from now on, for a rule or a ring. In the worker. Raises Refused (IF_GONE when closed,
        IF_BUSY, ATTACH_FAILED)."""
        self.check_open()
        with self._lock:
            self._bare = 0
        self.switch.come_back()

    # -- the mirror target: keys and actions are the structs of bpf/vmh_flow.h as bytes

    def _table(self, key: bytes) -> BpfMap:
        k = unpack("struct vmh_flow_key", key)
        if k.sport or any(k.src):
            return self._maps["rules5"]
        multicast = k.dst[12] & 0xF0 == 0xE0 if k.family == 4 else k.dst[0] == 0xFF
        return self._maps["rulesmc" if multicast else "rules3"]

    def _known(self, table: BpfMap, key: bytes) -> list[set[bytes]]:
        """The keys like this one, of which the program has to be told whether there are some."""
        known = self._five_tuples if table is self._maps["rules5"] else self._ports
        return [known, self._tcp] if unpack("struct vmh_flow_key", key).proto == IPPROTO_TCP else [known]

    def present(self) -> dict[bytes, bytes]:
        """Every rule that the program has now; none when closed."""
        rules: dict[bytes, bytes] = {}
        with self._lock:
            for name in () if self._unloaded else ("rules5", "rules3", "rulesmc"):
                table = self._maps[name]
                for key in table.keys():  # noqa: SIM118 - a map is no dict
                    value = table.lookup(key)
                    if value is not None:
                        rules[key] = value
        return rules

    def install(self, key: bytes, action: bytes) -> None:
        """Add or replace a rule; it steers from now on. Raises BpfError (E2BIG: the table is full); Refused: IF_GONE
        when closed; IF_BUSY, ATTACH_FAILED when nothing was attached and now can't be: the rule steers once it can."""
        if unpack("struct vmh_flow_key", key).vlan:
            self._tagged.add(key)
            if self.switch.tcx:
                self.worker.call(self.switch.to_xdp)
        with self._lock:
            if self._unloaded:
                raise self._gone()
            table = self._table(key)
            table.update(key, action)
            for known in self._known(table, key):
                known.add(key)
            self._apply_config()  # a new generation, or the program goes on with what it remembers
            self._bare = 0
            off = self.switch.off  # decided with the lock: either this is seen here, or the rule there
        if off:
            self.worker.call(self.wake)

    def remove(self, key: bytes) -> None:
        """Take a rule out; its packets go to the kernel from now on. No error if it is not there."""
        self._tagged.discard(key)
        with self._lock:
            if not self._unloaded:
                table = self._table(key)
                table.delete(key)
                for known in self._known(table, key):
                    known.discard(key)
                self._apply_config()

    def hits(self, rule: int) -> tuple[int, int]:
        """(packets, bytes) that rule index ``rule`` has steered since zero_hits()."""
        with self._lock:
            return (0, 0) if self._unloaded else read_hits(self._maps["rule_hits"], rule)

    def zero_hits(self, rule: int) -> None:
        """Before an index is given to a new rule."""
        with self._lock:
            if not self._unloaded:
                self._maps["rule_hits"].zero(struct.pack("I", rule))

    def outs(self) -> dict[str, int]:
        """Packets per way out of the program since it was attached ("ring", "pass-miss", ...); empty when closed."""
        with self._lock:
            return {} if self._unloaded else read_outs(self._maps["outs"], "VMH_OUT_")

    def _gone(self) -> Refused:
        return Refused(self.ifname, "the interface is served no more", "", Reason.IF_GONE)

    # -- what rings take

    def add_ring(self, ring: Ring) -> None:
        with self._lock:
            self.rings.append(ring)
            self._apply_config()
        if self.switch.tcx and not ring.near_ifindex:
            self.switch.to_xdp()

    def ring_bound(self) -> None:
        """A ring that was made unbound is bound now."""
        with self._lock:
            if not self.closed:
                self._apply_config()

    def drop_ring(self, ring: Ring) -> None:
        with self._lock:
            if ring in self.rings:
                self.rings.remove(ring)
            if not self.closed:
                self._apply_config()

    def follow_name(self) -> None:
        """The interface may have been renamed; one that is gone keeps its name."""
        with contextlib.suppress(OSError):
            self.ifname = self.worker.call(socket.if_indextoname, self.ifindex)

    def set_mac(self, mac: bytes) -> None:
        """The interface's MAC address is now ``mac``; rings that are open keep the old one."""
        self.info = self.switch.info = dataclasses.replace(self.info, mac=mac)

    def set_mtu(self, mtu: int) -> None:
        """The interface's MTU has changed to ``mtu`` bytes: longer frames go to the kernel, ring veths follow.

        Raises OSError when a ring veth refuses it.
        """
        self.worker.call(self._set_mtu, mtu)

    def _set_mtu(self, mtu: int) -> None:
        if self.closed:
            return
        with self._lock:
            self.mtu = mtu
            self._apply_config()
        with contextlib.ExitStack() as stack:  # each is tried, even if one fails
            for ring in self.rings:
                stack.callback(ring.set_mtu, mtu)

    def _apply_config(self) -> None:
        # A frame longer than a ring's buffers would be dropped in the socket: the kernel takes it instead.
        limit = min([self.mtu + ETH_HEADER, *(ring.max_frame for ring in self.rings)])
        flags = ((lib.VMH_PORT_F_5T if self._five_tuples else 0) | (lib.VMH_PORT_F_3T if self._ports else 0) |
                 (lib.VMH_PORT_F_TCP if self._tcp else 0) |
                 (lib.VMH_PORT_F_CHAINS if self.rings and all(ring.chains for ring in self.rings) else 0))
        self._generation = self._generation % GENERATIONS + 1
        _write_config(self._maps["port"], limit, flags, self._generation if REMEMBERS else 0)

    def check_open(self) -> None:
        """Raises Refused (IF_GONE) on a closed port."""
        if self.closed:
            raise self._gone()

    def far_end(self) -> RingVeth | None:
        """For one more socket of a direct ring, which tcx reaches; None where there is no switching. In the worker."""
        return self.switch.far()

    def _set_near(self, index: int, ifindex: int) -> None:
        if self.switch.nears is not None:
            self.switch.nears.update(struct.pack("I", index), struct.pack("I", ifindex))

    def take_ring_slot(self, near_ifindex: int = 0) -> int:
        """XSKMAP index of queue 0 of a new ring. ``near_ifindex``: of its way in for tcx. Raises Refused (RING_LIMIT).
        """
        slot = self._ring_slots.take()
        self._set_near(slot, near_ifindex)
        return slot * int(lib.VMH_QUEUES)

    def set_xsk(self, base: int, queue: int, fd: int) -> None:
        """Send what rules steer to ``base`` to this socket, if it came by receive queue ``queue``."""
        self._maps["xsks"].update(struct.pack("I", base + queue), struct.pack("I", fd))

    def free_ring_slot(self, base: int, queues: int) -> None:
        """Empty the slot: its packets go to the kernel. The sockets may be closed after this."""
        for queue in range(queues):
            self._maps["xsks"].delete(struct.pack("I", base + queue))
        self._set_near(base // int(lib.VMH_QUEUES), 0)
        self._ring_slots.free(base // int(lib.VMH_QUEUES))

    def take_dev_slot(self, ifindex: int) -> int:
        """DEVMAP slot that leads to an interface of this namespace. Raises Refused (RING_LIMIT), BpfError."""
        slot = self._dev_slots.take()
        try:
            # the kernel looks the ifindex up in the calling thread's namespace
            self.worker.call(self._maps["devs"].update, struct.pack("I", slot), struct.pack("I", ifindex))
            self._set_near(lib.VMH_NEAR_DEV + slot, ifindex)
        except BaseException:
            self._dev_slots.free(slot)
            raise
        return slot

    def free_dev_slot(self, slot: int) -> None:
        """Empty the slot: its packets go to the kernel."""
        self._maps["devs"].delete(struct.pack("I", slot))
        self._set_near(lib.VMH_NEAR_DEV + slot, 0)
        self._dev_slots.free(slot)

    def close(self) -> None:
        """Close the rings, detach: every packet goes to the kernel. Before its worker is closed. Idempotent."""
        if not self.closed:
            self.worker.call(self._close)

    def _close(self) -> None:
        if self.closed:
            return
        self.closed = True
        with contextlib.ExitStack() as stack:
            stack.callback(self._unload)
            stack.callback(self.switch.close)
            for ring in list(self.rings):
                stack.callback(ring.close)

    def _unload(self) -> None:
        with self._lock:
            self._unloaded = True
            self.switch.unload()
            self._programs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def _write_config(port: BpfMap, max_frame: int, flags: int = 0, generation: int = 0) -> None:
    port.update(bytes(4), pack("struct vmh_port_config", max_frame=max_frame, flags=flags, generation=generation))
