"""What runs inside the guest: each step is a function (lab.recording). Nothing is judged here; test_vm.py does."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lab

# no capability is left, CAP_NET_RAW least of all
NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all")


def _run(*argv: str, timeout_s: float = 60) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: exit {done.returncode}: {done.stderr}{done.stdout}")
    return done.stdout


def wire() -> dict[str, Any]:
    """Veths to a peer namespace, and rxe on those that have an RDMA device."""
    _run("ip", "netns", "add", lab.PEER)
    for link in lab.LINKS:
        _run("ip", "link", "add", link.device, "type", "veth", "peer", "name", link.peer_device, "netns", lab.PEER)
        _run("ip", "address", "add", f"{link.address}/24", "dev", link.device)
        _run("ip", "link", "set", link.device, "up")
        _run("ip", "-n", lab.PEER, "address", "add", f"{link.peer_address}/24", "dev", link.peer_device)
        _run("ip", "-n", lab.PEER, "link", "set", link.peer_device, "up")
        if link.rdma:
            _run("rdma", "link", "add", link.rdma, "type", "rxe", "netdev", link.device)
    vlan, over = lab.VLAN, lab.VLAN_LOWER
    tag = ("type", "vlan", "id", str(lab.VLAN_ID))
    egress = [f"{priority}:{pcp}" for priority, pcp in lab.PCP_OF.items()]
    _run("ip", "link", "add", "link", over.device, "name", vlan.device, *tag, "egress-qos-map", *egress)
    _run("ip", "address", "add", f"{vlan.address}/24", "dev", vlan.device)
    _run("ip", "link", "set", vlan.device, "up")
    _run("ip", "-n", lab.PEER, "link", "add", "link", over.peer_device, "name", vlan.peer_device, *tag)
    _run("ip", "-n", lab.PEER, "address", "add", f"{vlan.peer_address}/24", "dev", vlan.peer_device)
    _run("ip", "-n", lab.PEER, "link", "set", vlan.peer_device, "up")
    return {"release": os.uname().release, "links": json.loads(_run("rdma", "-j", "link"))}


def sysfs() -> dict[str, Any]:
    """What discovery can read: a hardware device has device/net, rxe has none and names its netdev per GID."""
    device = Path("/sys/class/infiniband") / lab.LINKS[0].rdma
    return {
        "device_net": (device / "device/net").exists(),
        "gid_netdev": (device / "ports/1/gid_attrs/ndevs/0").read_text().strip(),
        "uverbs": sorted(path.name for path in Path("/dev/infiniband").iterdir()),
    }


def pyverbs() -> dict[str, Any]:
    """Debian's pyverbs on the kernel's own uverbs: discovery, and which queue pairs can be made."""
    from pyverbs import enums
    from pyverbs.cq import CQ
    from pyverbs.device import Context, get_device_list
    from pyverbs.pd import PD
    from pyverbs.pyverbs_error import PyverbsRDMAError
    from pyverbs.qp import QP, QPCap, QPInitAttr

    made: dict[str, int] = {}
    with Context(name=lab.LINKS[0].rdma) as context, PD(context) as pd, CQ(context, 16) as cq:
        for kind in ("UD", "RC", "RAW_PACKET"):
            attributes = QPInitAttr(qp_type=getattr(enums, f"IBV_QPT_{kind}"), scq=cq, rcq=cq, cap=QPCap())
            try:
                QP(pd, attributes).close()
                made[kind] = 0
            except PyverbsRDMAError as error:
                made[kind] = error.error_code
        return {
            "devices": [device.name.decode() for device in get_device_list()],
            "raw_packet_caps": context.query_device_ex().raw_packet_caps,
            "gid_ifindex": context.query_gid_ex(1, 0).ndev_ifindex,
            "ifindex": int(Path(f"/sys/class/net/{lab.LINKS[0].device}/ifindex").read_text()),
            "qp_errno": made,
        }


def discovery() -> dict[str, Any]:
    """vmahybrid.verbs here, and in a namespace whose only interface has the name of ours, but not the device.

    RDMA devices are seen in every namespace (`rdma system`: shared), and rxe names its netdev without saying whose.
    """
    _run("ip", "netns", "add", "other")
    _run("ip", "-n", "other", "link", "add", lab.LINKS[0].device, "type", "veth", "peer", "name", "end")
    discover = [sys.executable, str(Path(__file__).with_name("discover.py"))]
    return {
        "here": json.loads(_run(*discover)),
        "other": json.loads(_run("nsenter", "--net=/run/netns/other", *discover)),
    }


def doctor(*arguments: str) -> dict[str, Any]:
    command = [lab.VMAHYBRID, "doctor", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return {"code": done.returncode, "answer": json.loads(done.stdout)}


def kernel_log() -> dict[str, Any]:
    return {"lines": _run("dmesg").splitlines()}


def main() -> None:
    with lab.recording() as step:
        for function in (wire, sysfs, pyverbs, discovery, doctor):
            step(function)
        step(functools.partial(doctor, "--verbs-selftest", lab.LINKS[0].device), "selftest")
        with lab.Service() as service:
            step(service.started, "service")
            for link in lab.LINKS:
                step(functools.partial(lab.echo, link), f"echo {link.device}")
            step(functools.partial(lab.echo, lab.LINKS[0], prefix=NOBODY), "echo as nobody")
            step(functools.partial(lab.echo, lab.LINKS[1], second=True), "echo by a ring veth")
            step(functools.partial(lab.echo, lab.LINKS[1], options=("--softverbs",)), "echo on softverbs")
            step(functools.partial(lab.echo, lab.VLAN), "echo on a VLAN")
            step(functools.partial(lab.priorities, False), "priorities of the kernel")
            step(lab.priorities)
            step(functools.partial(lab.priorities, second=True), "priorities by a ring veth")
        step(service.stopped, "stopped")
        step(kernel_log)


if __name__ == "__main__":
    main()
