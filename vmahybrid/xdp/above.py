"""The kernel attaches XDP programs from below upwards: an interface gets none while one above it (a VLAN interface over
it, a bridge it is part of) has one. Where that is ours, it steps aside for a moment, in which frames for its rings go
to the kernel."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING

from vmahybrid.net.netns import NetnsWorker
from vmahybrid.net.page import LinkInfo
from vmahybrid.net.rtnl import RequestSocket
from vmahybrid.xdp.attach import Attachment, HeldAbove, attach
from vmahybrid.xdp.bpf import BpfProgram
from vmahybrid.xdp.holder import attached

if TYPE_CHECKING:
    from vmahybrid.xdp.port import XdpPort


class Stack:
    """The ports of one owner, of which some may lie above others."""

    def __init__(self) -> None:
        self._ports: weakref.WeakSet[XdpPort] = weakref.WeakSet()

    def add(self, port: XdpPort) -> None:
        self._ports.add(port)

    def attach(self, worker: NetnsWorker, prog: BpfProgram, ifindex: int, mode: str, driver: str) -> Attachment:
        """As attach(), with our own programs above out of the way. In the worker. Raises what that does."""
        try:
            return attach(prog, ifindex, mode, driver=driver)
        except HeldAbove as error:
            above = above_of(ifindex)
            ours = [port for link in above for port in self._ports
                    if port.worker is worker and port.ifindex == link.ifindex and port.switch.in_xdp]
            if not ours:
                raise HeldAbove(error.what, [link.name for link in above if _has_program(link.ifindex)]) from None
        for port in ours:
            port.switch.step_aside()
        try:
            return attach(prog, ifindex, mode, driver=driver)
        finally:
            for port in ours:  # from below upwards
                port.switch.to_xdp()


def above_of(ifindex: int) -> list[LinkInfo]:
    """The interfaces above one, in the namespace of the caller; those nearest to it first. Raises OSError."""
    with contextlib.closing(RequestSocket()) as netlink:
        links = netlink.links()
    master = {link.ifindex: link.master for link in links}
    found, reached = [], [ifindex]
    for below in reached:
        for link in links:
            if link.ifindex not in reached and below in (link.lower, *_parts(link.ifindex, master)):
                reached.append(link.ifindex)
                found.append(link)
    return found


def _parts(ifindex: int, master: dict[int, int]) -> list[int]:
    return [part for part, owner in master.items() if owner == ifindex]


def _has_program(ifindex: int) -> bool:
    try:
        return bool(attached(ifindex))
    except OSError:
        return False
