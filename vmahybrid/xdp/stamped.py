"""`steer_stamped` in the place of `steer`: the program that has the adapter's time of arrival from the driver.

The kernel binds such a program to its device and takes it in native mode only. Whatever stands against it, `steer` is
attached as ever: time stamps never cost the steering.
"""

from __future__ import annotations

from dataclasses import dataclass

from vmahybrid.errors import VmahybridError
from vmahybrid.net.netns import NetnsWorker
from vmahybrid.xdp.above import Stack
from vmahybrid.xdp.attach import VIRTUAL_DRIVERS, Attachment, InterfaceBusy
from vmahybrid.xdp.bpf import ProgramSet, load_set
from vmahybrid.xdp.image import Image
from vmahybrid.xdp.netdev import rx_metadata
from vmahybrid.xdp.probe import InterfaceInfo

PROGRAM = "steer_stamped"


@dataclass(frozen=True, slots=True)
class Unstamped:
    """Why frames come without the adapter's time. ``tried``: the driver has it to give."""

    why: str
    tried: bool = False


def obstacle(ifindex: int, driver: str, mode: str) -> str:
    """Why there is no use in trying, "" if there is some. In the interface's namespace."""
    if mode == "generic" or (mode == "auto" and driver in VIRTUAL_DRIVERS):
        return "generic XDP has no metadata"
    try:
        told = rx_metadata(ifindex)
    except OSError as error:
        return f"the kernel can't say what the driver gives to XDP: {error}"
    if told is None:
        return "the kernel can't say what the driver gives to XDP"
    return "" if "timestamp" in told else "the driver gives XDP no time stamps"


def attach_stamped(image: Image, info: InterfaceInfo, mode: str, loaded: ProgramSet, stack: Stack,
                   worker: NetnsWorker) -> Attachment | Unstamped:
    """With the maps of ``loaded``, which gets the program as well. In the interface's namespace, that of ``worker``;
    raises nothing of its own: then nothing has changed."""
    why = obstacle(info.ifindex, info.driver, mode)
    if why:
        return Unstamped(why)
    try:
        found = load_set(image, [PROGRAM], share=loaded.maps, device=info.ifindex)
    except VmahybridError as error:
        return Unstamped(error.why, tried=True)
    try:
        attachment = stack.attach(worker, found.programs[PROGRAM], info.ifindex, "native", info.driver)
    except (OSError, VmahybridError) as error:
        found.close()
        # who holds the interface is told by the attempt with `steer`
        return Unstamped("the interface is held" if isinstance(error, InterfaceBusy) else str(error), tried=True)
    loaded.programs.update(found.programs)
    return attachment
