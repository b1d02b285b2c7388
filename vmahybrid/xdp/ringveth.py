"""A ring veth: the way of a process's packets in and out when it may not have the interface's queue itself.

The near end ``vmhrN`` is in the interface's namespace: `steer` redirects the process's flows into it, and `guard` lets
out only what carries the granted source. The far end, with `ring_in` and the AF_XDP socket, is in a namespace of the
service that all ring veths share. Without the guard (the service died) the near end takes nothing: strict reverse
path filter without addresses or routes, no IPv6, no ARP.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import struct
import threading
from pathlib import Path
from typing import Any, Self

from vmahybrid.contracts import pack
from vmahybrid.net.netns import NetnsWorker
from vmahybrid.xdp.attach import Attachment, attach
from vmahybrid.xdp.bpf import ProgramSet, load_set
from vmahybrid.xdp.counters import read_outs
from vmahybrid.xdp.image import Image

ALIAS = "vmahybrid ring"
PREFIX = "vmhr"
FAR_PREFIX = "vmhf"  # of the pair that a port has for its direct ring, see switch.py
LONG_MTU = 65535  # the longest frame of the kernel passes; a native program allows some 3.5 kB only
_NAMES = 4096  # names tried before giving up: leftovers of a dead service hold some
_IFF_NOARP = 0x80
_ADDR_GEN_MODE_NONE = 1  # IFLA_INET6_ADDR_GEN_MODE: no link-local address

_numbers = itertools.count()


class RingNamespace:
    """The private namespace of the far ends: made with the first ring veth, gone with the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: NetnsWorker | None = None
        self._users = 0

    def acquire(self) -> NetnsWorker:
        with self._lock:
            if self._worker is None:
                self._worker = NetnsWorker.open_private()
            self._users += 1
            return self._worker

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._worker is not None:
                self._worker.close()
                self._worker = None


_shared = RingNamespace()


class RingVeth:
    """One pair with its programs. ``near`` and ``far`` are interface names, ``far_worker`` is the far end's thread."""

    def __init__(self, worker: NetnsWorker, far_worker: NetnsWorker, name: str) -> None:
        """Use :meth:`open`."""
        self._worker, self.far_worker = worker, far_worker
        self.near = self.far = name
        self.near_ifindex = self.far_ifindex = 0
        self._stack = contextlib.ExitStack()
        self._closed = False
        self.long = False  # takes super-packets, whatever the interface's MTU
        self._guard: ProgramSet
        self._ring_in: ProgramSet
        self._guard_link: Attachment

    @classmethod
    def open(cls, worker: NetnsWorker, image: Image, *, out_ifindex: int, mac: bytes, mtu: int, native: bool,
             alone: bool = False, prefix: str = PREFIX) -> Self:
        """A pair beside interface ``out_ifindex`` of the worker's namespace, up, letting nothing out yet.

        ``native``: the interface's program is native, and so must `ring_in` be: a native redirect into a veth whose
        peer has neither native XDP nor GRO is dropped silently. ``alone``: the far end has a namespace of its own,
        since the process gets a socket that is not bound yet, and must not find another's far end to bind it to.
        Raises OSError, BpfError, Refused.
        """
        ends = RingNamespace() if alone else _shared
        far_worker = ends.acquire()
        try:
            self = cls(worker, far_worker, _create(worker, far_worker, prefix, mtu if native else LONG_MTU))
            self.long = not native
        except BaseException:
            ends.release()
            raise
        self._stack.callback(ends.release)
        try:
            self._load(image, out_ifindex, mac, native)
        except BaseException:
            self.close()
            raise
        return self

    def _load(self, image: Image, out_ifindex: int, mac: bytes, native: bool) -> None:
        self.near_ifindex = self._worker.call(_quiet, self.near)
        self.far_ifindex = self.far_worker.call(_quiet, self.far)
        self._guard = self._stack.enter_context(load_set(image, ["guard"]))
        self._ring_in = self._stack.enter_context(load_set(image, ["ring_in"]))
        self._guard.maps["guard"].update(bytes(4), pack("struct vmh_guard_config", mac=mac))
        self._worker.call(self._guard.maps["guard_dev"].update, bytes(4), struct.pack("I", out_ifindex))
        guard, ring_in = self._guard.programs["guard"], self._ring_in.programs["ring_in"]
        self._guard_link = self._stack.enter_context(
            self._worker.call(attach, guard, self.near_ifindex, "generic"))
        self._stack.enter_context(
            self.far_worker.call(attach, ring_in, self.far_ifindex, "native" if native else "generic"))
        # last, so that no frame ever meets an end without its program
        self.far_worker.call(_set_link, self.far, state="up")
        self._worker.call(_set_link, self.near, state="up")

    def set_xsk(self, queue: int, fd: int) -> None:
        """Deliver what comes in by this socket of the far end."""
        self._ring_in.maps["rin_xsks"].update(struct.pack("I", queue), struct.pack("I", fd))

    def grant(self, key: bytes, flow_id: int) -> None:
        """Let frames with this source out: struct vmh_grant_key, address zero for any. Raises BpfError (E2BIG)."""
        self._guard.maps["granted"].update(key, struct.pack("I", flow_id))

    def revoke(self, key: bytes) -> None:
        """Undo grant(); no error if it is not there."""
        self._guard.maps["granted"].delete(key)

    def guard_outs(self) -> dict[str, int]:
        """Frames of the process per way out of the guard ("sent", "bad-source", ...)."""
        return read_outs(self._guard.maps["guard_outs"], "VMH_GUARD_")

    def ring_in_outs(self) -> dict[str, int]:
        """Frames to the process: "ring", or "gone" when no socket took them."""
        return read_outs(self._ring_in.maps["rin_outs"], "VMH_RIN_")

    def set_mtu(self, mtu: int) -> None:
        """Both ends, in bytes, unless they take longer frames anyway. Raises OSError."""
        if self.long:
            return
        self.far_worker.call(_set_link, self.far, mtu=mtu)
        self._worker.call(_set_link, self.near, mtu=mtu)

    def close(self) -> None:
        """The pair first, so that nothing passes while the guard goes; a socket that another process still has on the
        far end is cut off by that. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with self._stack:
            self._worker.call(_delete, self.near)


def _ipr() -> Any:
    from pyroute2 import IPRoute

    return IPRoute()


@contextlib.contextmanager
def _as_oserror(what: str) -> Any:
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        yield
    except NetlinkError as error:
        raise OSError(error.code, f"{what}: {error.args[-1]}") from error


def _create(worker: NetnsWorker, far_worker: NetnsWorker, prefix: str, mtu: int) -> str:
    """A pair, down, with one queue each; its name is the same at both ends."""
    far_fd = far_worker.namespace_fd()
    try:
        for _ in range(_NAMES):
            name = f"{prefix}{next(_numbers)}"
            try:
                worker.call(_add_pair, name, far_fd, mtu)
                return name
            except OSError as error:
                if error.errno != errno.EEXIST:
                    raise
    finally:
        os.close(far_fd)
    raise OSError(errno.EEXIST, f"every name {prefix}0..{_NAMES - 1} is taken")


def _add_pair(name: str, far_fd: int, mtu: int) -> None:
    with _as_oserror(f"making ring veth {name}"), _ipr() as ipr:
        queues = {"num_tx_queues": 1, "num_rx_queues": 1}
        ipr.link("add", ifname=name, kind="veth", mtu=mtu, **queues,
                 peer={"ifname": name, "mtu": mtu, "net_ns_fd": far_fd, **queues})


def _quiet(name: str) -> int:
    """Alias, no ARP, no IPv6, nothing received by the kernel itself. The ifindex."""
    with _as_oserror(f"setting up ring veth {name}"), _ipr() as ipr:
        index: int = ipr.link_lookup(ifname=name)[0]
        ipr.link("set", index=index, ifalias=ALIAS, flags=_IFF_NOARP, change=_IFF_NOARP,
                 IFLA_AF_SPEC={"attrs": [
                     ("AF_INET6", {"attrs": [("IFLA_INET6_ADDR_GEN_MODE", _ADDR_GEN_MODE_NONE)]})]})
    # /proc/sys/net shows the namespace of the thread that opens it
    for key, value in (("ipv6/conf/{}/disable_ipv6", "1"), ("ipv4/conf/{}/rp_filter", "1"),
                       ("ipv4/conf/{}/arp_ignore", "8")):
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            Path("/proc/sys/net", key.format(name)).write_text(value)
    return index


def _set_link(name: str, **settings: Any) -> None:
    with _as_oserror(f"setting ring veth {name}"), _ipr() as ipr:
        found = ipr.link_lookup(ifname=name)
        if not found:
            raise OSError(errno.ENODEV, f"ring veth {name} is gone")
        ipr.link("set", index=found[0], **settings)


def _delete(name: str) -> None:
    with _as_oserror(f"deleting ring veth {name}"), _ipr() as ipr:
        for index in ipr.link_lookup(ifname=name):  # none if its namespace or its other end went first
            ipr.link("del", index=index)


def remove_leftovers() -> list[str]:
    """Delete ring veths that a dead service left in the calling thread's namespace; their names.

    Only for a service that is alone on the host: those of a live one look the same.
    """
    with _as_oserror("deleting old ring veths"), _ipr() as ipr:
        old = [(link["index"], link.get_attr("IFLA_IFNAME")) for link in ipr.get_links()
               if link.get_attr("IFLA_IFALIAS") == ALIAS
               and str(link.get_attr("IFLA_IFNAME")).startswith((PREFIX, FAR_PREFIX))]
        for index, _ in old:
            ipr.link("del", index=index)
    return [name for _, name in old]
