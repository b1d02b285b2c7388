"""The AF_XDP backend: vmahybrid.xdp behind the service's interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vmahybrid.contracts import family_of, htons, lib
from vmahybrid.errors import NotPossibleHere, Refused
from vmahybrid.net.netns import NetnsWorker
from vmahybrid.service.backend import PortHandle, RingHandle, RingSizes
from vmahybrid.steering.keys import Action, FlowKey, GrantKey
from vmahybrid.steering.mirror import MirrorTarget
from vmahybrid.xdp.above import Stack
from vmahybrid.xdp.image import Image
from vmahybrid.xdp.imagecache import kept_image
from vmahybrid.xdp.inject import Injector
from vmahybrid.xdp.latebind import two_steps
from vmahybrid.xdp.port import XdpPort
from vmahybrid.xdp.ring import Ring, open_ring
from vmahybrid.xdp.umem import Pages

PAGES: Mapping[int, Pages] = {lib.VMH_MEMORY_PLAIN: "plain", lib.VMH_MEMORY_MAY_BE_HUGE: "may-be-huge",
                              lib.VMH_MEMORY_HUGE: "huge"}


class RulesTarget:
    """The rules of one interface as a target of the mirror."""

    def __init__(self, port: XdpPort) -> None:
        self._port = port

    def present(self) -> Mapping[FlowKey, Action]:
        return {FlowKey.from_bytes(key): Action.from_bytes(value) for key, value in self._port.present().items()}

    def put(self, key: FlowKey, value: Action) -> None:
        self._port.install(key.to_bytes(), value.to_bytes())

    def delete(self, key: FlowKey) -> None:
        self._port.remove(key.to_bytes())


class GrantsTarget:
    """The sources that the guard of one ring veth lets out."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._known: dict[GrantKey, int] = {}

    def present(self) -> Mapping[GrantKey, int]:
        return self._known

    def put(self, key: GrantKey, value: int) -> None:
        self._ring.grant_source(key.src, htons(key.sport), key.proto, family_of(key.src), value)
        self._known[key] = value

    def delete(self, key: GrantKey) -> None:
        self._ring.revoke_source(key.src, htons(key.sport), key.proto, family_of(key.src))
        self._known.pop(key, None)


class XdpRingHandle:
    """See backend.RingHandle."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self.direct = ring.kind == "direct"
        self._look()
        to_ring = Action.from_bytes(ring.action(0))
        self.act, self.target = to_ring.kind, to_ring.target
        self.umem_fd, self.xsk_fds, self.geometry = ring.umem_fd, ring.xsk_fds, ring.geometry
        self.queues, self.huge_pages = len(ring.xsk_fds) - ring.far, ring.huge_pages
        self.grants: MirrorTarget[GrantKey, int] | None = None if self.direct else GrantsTarget(ring)

    def _look(self) -> None:
        self.reason, self.zerocopy, self.bind_after = self._ring.reason, self._ring.zerocopy, self._ring.bind_after

    def bind(self) -> None:
        self._ring.bind()
        self._look()

    def reply_fields(self) -> dict[str, Any]:
        return self._ring.reply_fields()

    def kernel_stats(self) -> dict[str, int]:
        return self._ring.stats()

    def guard_outs(self) -> dict[str, int]:
        return self._ring.guard_outs()

    def close(self) -> None:
        self._ring.close()


class XdpPortHandle:
    """See backend.PortHandle."""

    def __init__(self, port: XdpPort, bind_after: bool) -> None:
        self._port, self._bind_after = port, bind_after
        self.native, self.reason = port.mode == "native", port.reason
        self.driver, self.queues = port.info.driver, port.info.queues
        self.rules: MirrorTarget[FlowKey, Action] = RulesTarget(port)

    @property
    def hook(self) -> str:
        return self._port.hook

    @property
    def attached(self) -> bool:
        return not self._port.switch.off

    @property
    def refused(self) -> Refused | None:
        return self._port.refused

    @property
    def switches(self) -> int:
        return self._port.switch.switches

    @property
    def switch_failures(self) -> int:
        return self._port.switch.failures

    def watch(self) -> bool:
        return self._port.watch()

    def turn(self) -> bool:
        return self._port.turn()

    def hits(self, index: int) -> tuple[int, int]:
        return self._port.hits(index)

    def zero_hits(self, index: int) -> None:
        self._port.zero_hits(index)

    def outs(self) -> dict[str, int]:
        return self._port.outs()

    def grant(self, sizes: RingSizes, direct: bool) -> RingHandle:
        return XdpRingHandle(open_ring(self._port, frames=sizes.frames, rx_size=sizes.rx, tx_size=sizes.tx,
                                       direct_allowed=direct, bind_after=self._bind_after,
                                       pages=PAGES[sizes.memory]))

    def set_mtu(self, mtu: int) -> None:
        self._port.set_mtu(mtu)

    def set_mac(self, mac: bytes) -> None:
        self._port.set_mac(mac)

    def close(self) -> None:
        self._port.close()


class XdpBackend:
    """See backend.Backend. The image is compiled once, in a child process that ends with the compiler's memory.

    ``switch``: ports in generic mode go to tcx while bulk traffic comes; ``detach``: nothing is attached to them while
    they have no rule.
    """

    def __init__(self, *, switch: bool = False, detach: bool = False) -> None:
        self._switch, self._detach = switch, detach
        self._image: Image | None = None
        self._injector: Injector | None = None
        self._two_steps = False
        self._stack = Stack()

    @property
    def live_frames(self) -> bool:
        return self._injector is not None

    @property
    def maps_bound(self) -> bool:
        return not self._two_steps

    def prepare(self) -> None:
        self._two_steps = two_steps()
        self._injector = Injector.open()
        self._image = kept_image()

    def inject(self, ifindex: int, frames: Sequence[bytes]) -> None:
        if self._injector is None:
            raise NotPossibleHere("datagram", "this kernel runs no XDP program on live frames",
                                  "use kernel 5.18 or newer")
        self._injector.inject(ifindex, frames)

    def open_port(self, worker: NetnsWorker, ifindex: int, name: str, mode: str) -> PortHandle:
        assert self._image is not None, "prepare() comes first"
        port = XdpPort.open(worker, self._image, name, mode, switch=self._switch, detach=self._detach,
                            stack=self._stack)
        return XdpPortHandle(port, self._two_steps)
