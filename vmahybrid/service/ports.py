"""Which interfaces are served, and one served interface."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vmahybrid.config.interface_glob import InterfaceGlob
from vmahybrid.config.service import ServiceConfig
from vmahybrid.errors import Refused
from vmahybrid.net.bond import Layer, refusal
from vmahybrid.net.netns import Netns
from vmahybrid.service.backend import PortHandle
from vmahybrid.service.ladder import Ladder
from vmahybrid.steering.keys import PortId
from vmahybrid.steering.reasons import Reason
from vmahybrid.steering.table import refuse

ARPHRD_ETHER = 1
OWN_VETHS = ("vmhr", "vmhf")  # how the names of our ring veths and far ends begin


class LinkLike(Layer, Protocol):
    """What the policy looks at of an interface."""

    @property
    def name(self) -> str: ...
    @property
    def up(self) -> bool:
        """Administratively up, with carrier."""
        ...
    @property
    def loopback(self) -> bool: ...
    @property
    def arphrd(self) -> int:
        """ARPHRD_* of linux/if_arp.h."""
        ...
    @property
    def master(self) -> int:
        """ifindex of the bridge, bond, team or VRF it is part of, or 0."""
        ...


def named(config: ServiceConfig, netns: str, link: LinkLike) -> bool:
    """Was this interface named, so that it is attached as soon as it is there? A pattern does not mean what can't be
    served, so that "*" does not complain of lo and of our own veths, which come and go."""
    servable = not link.loopback and link.arphrd == ARPHRD_ETHER and not link.master
    globs = [InterfaceGlob.parse(text) for text in config["interfaces"]]
    return not link.name.startswith(OWN_VETHS) and any(
        (glob.enters(netns) or (not glob.netns and netns == _own_namespace())) and glob.matches(netns, link.name)
        and (servable or glob.literal) for glob in globs)  # fmt: skip


@functools.cache
def _own_namespace() -> str:
    """Where the service was started, which may have a name of its own (`ip netns exec`)."""
    return Netns.of_path("/proc/self/ns/net").name


def serving(
    config: ServiceConfig, netns: str, link: LinkLike, has_address: bool, layers: Sequence[Layer] = ()
) -> Reason:
    """NONE if rings may be asked for on this interface of the namespace called ``netns``, else why not.

    ``layers``: it and what it is made on (vmahybrid.net.bond.stack).
    """
    if link.loopback:
        return Reason.LOOPBACK
    if link.arphrd != ARPHRD_ETHER or link.master or link.name.startswith(OWN_VETHS):
        return Reason.IF_UNSUPPORTED
    globs: Sequence[str] = config["interfaces"]
    if globs and not any(InterfaceGlob.parse(g).matches(netns, link.name) for g in globs):
        return Reason.NO_INTERFACE
    if config.mode_of(link.name) == "kernel":
        return Reason.RULE
    if config.backend_of(link.name) == "kernel":
        return Reason.BACKEND_CONFIG
    if not link.up:
        return Reason.IF_DOWN
    bonded = refusal(layers or (link,))
    if bonded is not Reason.NONE:
        return bonded
    if not globs and not has_address:
        return Reason.NOT_OFFLOADABLE_ADDR
    return Reason.NONE


@dataclass(slots=True)
class Port:
    """An interface that is or was asked for. ``handle`` is None while nothing is attached; ``reason`` says why."""

    id: PortId
    name: str
    explicit: bool
    mtu: int
    mac: bytes = b""
    handle: PortHandle | None = None
    reason: Reason = Reason.NOT_TRIED
    error: Refused | None = None
    ring_ids: set[int] = field(default_factory=set)
    ladder: Ladder = ()             # of the ring that was asked for last
    asked_verbs: bool = False       # some program can make a raw packet QP here: no XDP program is needed for that
    mirrored: PortHandle | None = None  # the handle that has been told all rules
    idle_since: float = 0.0
    is_up: bool = True
    waiting: asyncio.TimerHandle | None = None  # since it went down; it may be up again
    switches: int = 0           # of the handle, counted so far
    switch_failures: int = 0    # the same
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def attached(self) -> PortHandle:
        """Raises Refused."""
        if self.handle is None:
            raise self.error or refuse(f"interface {self.name}", self.reason)
        return self.handle
