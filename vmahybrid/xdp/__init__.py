"""AF_XDP from Python: packet memory, sockets, XDP programs, rings. Usable alone, without the service.

From the bottom up:

- :class:`Umem`: packet memory in a sealed memfd. :class:`Xsk`: an AF_XDP socket on one queue, made with libxdp; its
  ``fd`` and the memory's may be handed to an unprivileged process. :class:`RingView`: what the holder of the
  descriptors does: receive and send frames.
- :func:`compile_image` compiles the XDP programs once (bcc, in a child process); :func:`load_set` loads
  them, :func:`vmahybrid.xdp.attach.attach` puts them on an interface by bpf_link.
- :class:`XdpPort`: a served interface: rules that say which flow goes where, counters, and :func:`open_ring`, which
  gives a process the interface's queues (*direct*) or a veth pair of its own with a source filter (*veth*).
- :class:`NetnsWorker`: a thread inside another network namespace, where a port's sockets and programs are made.

Receive UDP port 7 of 10.0.0.2 from eth1 in the present namespace (root; examples/afxdp_echo.py is the whole of it)::

    from vmahybrid.contracts import flow_key
    from vmahybrid.xdp import NetnsWorker, RingView, XdpPort, compile_image, open_ring

    with NetnsWorker.open_current() as worker, XdpPort.open(worker, compile_image(), "eth1") as port:
        ring = open_ring(port)
        with RingView(ring.umem_fd, ring.xsk_fds, **ring.geometry) as view:  # posts frames: before the rule
            port.install(flow_key("10.0.0.2", 7), ring.action(rule_id=1))
            while view.wait(10):
                print(view.receive())

Everything else on the interface goes to the kernel as before, and so does this flow when the program ends, however it
ends. Errors are :class:`vmahybrid.errors.VmahybridError` with a remedy, or OSError from sockets.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vmahybrid.net.netns import Netns, NetnsWorker
    from vmahybrid.xdp.attach import Attachment
    from vmahybrid.xdp.bpf import BpfMap, BpfProgram, ProgramSet, load_set
    from vmahybrid.xdp.compile import compile_image
    from vmahybrid.xdp.image import Image
    from vmahybrid.xdp.port import XdpPort
    from vmahybrid.xdp.probe import InterfaceInfo
    from vmahybrid.xdp.ring import Ring, open_ring
    from vmahybrid.xdp.ringview import RingView
    from vmahybrid.xdp.umem import Umem
    from vmahybrid.xdp.xsk import Xsk

__all__ = [
    "Attachment", "BpfMap", "BpfProgram", "Image", "InterfaceInfo", "Netns", "NetnsWorker", "ProgramSet", "Ring",
    "RingView", "Umem", "XdpPort", "Xsk", "compile_image", "load_set", "open_ring",
]

# Imported at the first use: the compiler's child and the command line need one module each, not libxdp.
_HOME = {
    "Netns": "vmahybrid.net.netns", "NetnsWorker": "vmahybrid.net.netns",
    "Attachment": "vmahybrid.xdp.attach",
    "BpfMap": "vmahybrid.xdp.bpf", "BpfProgram": "vmahybrid.xdp.bpf", "ProgramSet": "vmahybrid.xdp.bpf",
    "load_set": "vmahybrid.xdp.bpf", "compile_image": "vmahybrid.xdp.compile", "Image": "vmahybrid.xdp.image",
    "XdpPort": "vmahybrid.xdp.port", "InterfaceInfo": "vmahybrid.xdp.probe",
    "Ring": "vmahybrid.xdp.ring", "open_ring": "vmahybrid.xdp.ring", "RingView": "vmahybrid.xdp.ringview",
    "Umem": "vmahybrid.xdp.umem", "Xsk": "vmahybrid.xdp.xsk",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
