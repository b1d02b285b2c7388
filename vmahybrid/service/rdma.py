"""The RDMA devices of one namespace as the service finds them: for status and explain, before and beside what programs
say. Nothing is decided by it: a program finds its device by itself, and may have a software one that we don't see."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import threading
from dataclasses import dataclass

from vmahybrid.errors import VmahybridError
from vmahybrid.net.netns import NetnsWorker
from vmahybrid.service.ladder import VERBS, Ladder, Rung
from vmahybrid.steering.reasons import Reason
from vmahybrid.verbs import caps, discovery

log = logging.getLogger("vmahybrid.service")

LOOK_SECONDS = 5.0  # between two looks: devices come without an event of rtnetlink


@dataclass(frozen=True, slots=True)
class Device:
    """An RDMA device and why it has no raw packet QP: NONE if it has, NOT_TRIED while it is being asked."""

    name: str
    port: int
    driver: str
    reason: Reason
    detail: str = ""

    @property
    def ladder(self) -> Ladder:
        """What is known of an interface's ladder before a program asked: only what stops the first rung."""
        if self.reason in (Reason.NONE, Reason.NOT_TRIED):
            return ()
        return (Rung(VERBS, self.reason, f"{self.name}: {self.reason.text}"),)


class RdmaDevices:
    """By ifindex. Looking is a task of its own, one at a time; opening devices blocks a thread beside it."""

    def __init__(self, worker: NetnsWorker) -> None:
        self._worker = worker
        self._links: dict[int, discovery.RdmaLink] = {}
        self._known: dict[tuple[str, int], tuple[Reason, str]] = {}
        self._looked = float("-inf")
        self._task: asyncio.Task[None] | None = None
        self._children = Children()

    def of(self, ifindex: int) -> Device | None:
        link = self._links.get(ifindex)
        if link is None:
            return None
        reason, detail = self._known.get((link.device, link.port), (Reason.NOT_TRIED, ""))
        return Device(link.device, link.port, link.driver, reason, detail)

    def look(self) -> None:
        """Begin to read the devices and to open those that are new, unless that goes on or was done just now."""
        now = asyncio.get_running_loop().time()
        if (self._task is None or self._task.done()) and now >= self._looked + LOOK_SECONDS:
            self._looked = now
            self._task = asyncio.create_task(self._look(), name="RDMA devices")

    async def close(self) -> None:
        """End a look that goes on; nothing uses the worker afterwards. Idempotent."""
        self._looked = float("inf")
        self._children.end()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _look(self) -> None:
        try:
            links = await self._worker.call_async(discovery.scan_here)
        except (OSError, RuntimeError) as error:  # the worker is closed
            log.debug("RDMA devices: %s", error)
            return
        self._links = {link.ifindex: link for link in links}
        present = {(link.device, link.port) for link in links}
        self._known = {key: value for key, value in self._known.items() if key in present}
        for name, port in sorted(present - self._known.keys()):
            reason, detail = await asyncio.to_thread(_ask, self._worker, name, self._children)
            if self._children.ended:
                return
            self._known[name, port] = reason, detail
            log.info("RDMA device %s port %d: %s", name, port, detail or "raw packet QPs")


class Children:
    """The processes that open devices, which may take CHILD_SECONDS. Any thread."""

    def __init__(self) -> None:
        self.ended = False
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None

    def begun(self, child: subprocess.Popen[str]) -> None:
        with self._lock:
            self._child = child
            if self.ended:
                child.kill()

    def end(self) -> None:
        """Kill the one that runs, and each that follows. Idempotent."""
        with self._lock:
            self.ended = True
            if self._child is not None:
                self._child.kill()


def _ask(worker: NetnsWorker, name: str, children: Children) -> tuple[Reason, str]:
    """In a child of a thread of its own inside the namespace: the worker has other work."""
    try:
        with NetnsWorker.open_netns_of(worker) as own:
            found = own.call(caps.in_child, name, children.begun)
    except (OSError, RuntimeError, VmahybridError) as error:
        return Reason.VERBS_FAILED, str(error)
    return Reason.from_slug(found.reason), found.detail
