"""Every step of a raw packet QP on one interface, each with what came of it: for a person with a new NIC.

The frames go to the interface's own MAC address, between addresses of documentation (192.0.2.0/24, RFC 5737): a device
that loops them back shows them, another one sends them to its switch, which drops them.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from vmahybrid.contracts import addr_to_bytes
from vmahybrid.errors import VmahybridError
from vmahybrid.steering.keys import Act, Action, FlowKey
from vmahybrid.steering.mirror import mirror
from vmahybrid.steering.reasons import Reason
from vmahybrid.verbs import caps, discovery, library
from vmahybrid.verbs.qp import RawQp, attempt
from vmahybrid.verbs.rules import FlowRules
from vmahybrid.xdp.probe import probe

SOURCE, DESTINATION, PORT = "192.0.2.1", "192.0.2.2", 9
OTHER_PORT = 10
LOOP_SECONDS = 1.0
_IPV4, _UDP = struct.Struct("!BBHHHBBH4s4s"), struct.Struct("!HHHH")

_REMEDIES = {
    "library": library.PYVERBS,
    "device": "apt-get install ibverbs-providers; ls -l /dev/infiniband; dmesg | grep -i infiniband",
    "memory": "ulimit -l unlimited",
    "port": "ip link set IF up; is its cable in, and the other end up? ibv_devinfo",
    "ready to send": "is the port up? ip link set IF up; ibv_devinfo",
    "flow rule": "flow steering may be off: ConnectX-3 wants mlx4_core log_num_mgm_entry_size=-1; ethtool -k IF has "
                 "ntuple-filters on; dmesg",
    "send": "is the port up? ip link set IF up; ibv_devinfo",
}


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    verdict: Literal["ok", "warn", "fail"]
    text: str
    remedy: str = ""


@dataclass(slots=True)
class _Found:
    """What the steps hand on."""

    device: str = ""
    port: int = 1
    mac: bytes = b""
    qp: RawQp | None = None
    rules: FlowRules | None = None
    kept: list[Step] = field(default_factory=list)


def run(ifname: str) -> Iterator[Step]:
    """The steps on an interface of this namespace, up to the first that fails. Raises OSError if it is gone."""
    found = _Found(mac=probe(ifname).mac)
    try:
        for step in _steps(ifname, found):
            yield step
            if step.verdict == "fail":
                return
    finally:
        ending = list(_close(found))
    yield from ending


def _steps(ifname: str, found: _Found) -> Iterator[Step]:
    yield _library()
    yield _device(ifname, found)
    yield _capabilities(found)
    found.qp = qp = RawQp(found.device, found.port)
    for name, action in qp.steps:
        try:
            attempt(f"{name} of {qp.device}", action)
        except VmahybridError as error:
            yield _failed(name, error, ifname)
            return
        yield Step(name, "ok", _said(name, qp))
        if name == "device":
            yield _port(qp, ifname)
    yield from _traffic(ifname, found, qp)


def _failed(name: str, error: VmahybridError, ifname: str) -> Step:
    remedy = error.remedy or _REMEDIES.get(name, "dmesg | tail; report it with the output of ibv_devinfo -v")
    return Step(name, "fail", f"{error.what}: {error.why}", remedy.replace("IF", ifname))


def _library() -> Step:
    try:
        library.need_pyverbs()
    except VmahybridError as error:
        return _failed("library", error, "")
    return Step("library", "ok", f"pyverbs on {library.loaded() or 'libibverbs'}")


def _device(ifname: str, found: _Found) -> Step:
    listed, links = caps.devices(), discovery.scan()
    match = discovery.device_of(ifname, listed, links)
    if match is None:
        there = ", ".join(sorted({*listed, *discovery.names()})) or "none"
        return Step("device of the interface", "fail", f"{Reason.NO_VERBS_DEVICE.text}; devices here: {there}",
                    f"{Reason.NO_VERBS_DEVICE.remedy}; try the steps with vmahybrid softverbs -- vmahybrid doctor "
                    f"--verbs-selftest {ifname}")
    found.device, found.port = match
    if found.device not in listed:
        return Step("device of the interface", "fail", f"{found.device} has the interface, but libibverbs has no "
                    "driver for it", "apt-get install ibverbs-providers; ls -l /dev/infiniband")
    return Step("device of the interface", "ok", f"{found.device} port {found.port}")


def _capabilities(found: _Found) -> Step:
    try:
        able = caps.capabilities(found.device, found.port)
    except VmahybridError as error:
        return _failed("device", error, "")
    if not able.raw_packet:
        reason = Reason.from_slug(able.reason)
        return Step("raw packet QPs", "fail", f"{found.device}: {reason.text} ({able.detail})", reason.remedy)
    raw = ", ".join(able.raw_caps) or "no offloads"
    return Step("raw packet QPs", "ok", f"{raw}; {able.max_qp_wr} work requests, {able.max_cqe} completions, "
                f"{able.max_sge} segments, {able.max_inline} bytes inline; link layer {able.link_layer}")


def _port(qp: RawQp, ifname: str) -> Step:
    """A QP becomes ready on a port that is down, and sends complete there: nothing of what follows would be noticed."""
    import pyverbs.enums as e

    where = f"{qp.device} port {qp.port}"
    try:
        state = attempt(where, qp.context.query_port, qp.port).state
    except VmahybridError as error:
        return _failed("port", error, ifname)
    if state != e.IBV_PORT_ACTIVE:
        return _failed("port", VmahybridError(where, "it is not active: no frame would leave or come"), ifname)
    return Step("port", "ok", f"{where} is active")


def _said(name: str, qp: RawQp) -> str:
    texts = {"device": "opened, with a protection domain", "memory": "registered", "completion queues": "made",
             "ready to send": "INIT, RTR, RTS", "receive requests": "posted"}
    return texts.get(name, f"number {qp.number:#x}" if name == "raw packet QP" else "done")


def _traffic(ifname: str, found: _Found, qp: RawQp) -> Iterator[Step]:
    found.rules = rules = FlowRules(qp, found.mac)
    key = FlowKey(addr_to_bytes(DESTINATION), PORT)
    changes = mirror(rules, {key: Action(Act.RING)})
    if changes.failed:
        error = changes.failed[0][1]
        yield _failed("flow rule", error if isinstance(error, VmahybridError) else VmahybridError("rule", str(error)),
                      ifname)
        return
    yield Step("flow rule", "ok", f"UDP to {DESTINATION}:{PORT}")
    wanted, other = (frame(found.mac, port, b"vmahybrid selftest") for port in (PORT, OTHER_PORT))
    try:
        qp.send(other)
        qp.send(wanted)
        yield Step("send", "ok", "two frames to the interface's own MAC address, completed")
        got = qp.receive(LOOP_SECONDS)
        more = qp.receive(0.1) if got is not None else None
    except VmahybridError as error:
        yield _failed("send", error, ifname)
        return
    yield _loop(got, more, wanted)


def _loop(got: bytes | None, more: bytes | None, wanted: bytes) -> Step:
    if got is None:
        return Step("loopback", "warn", f"no frame came back within {LOOP_SECONDS:g} s: not every device loops what it "
                    "sends to itself; receiving is not tested", f"send UDP to {DESTINATION}:{PORT} at this MAC address "
                    "from another host")
    if got[:len(wanted)] != wanted or more is not None:
        what = "more than the one frame that the rule names" if more is not None else "another frame than the one sent"
        return Step("loopback", "fail", f"the QP received {what}", "report it with the output of ibv_devinfo -v")
    return Step("loopback", "ok", f"the frame to port {PORT} came back, the one to port {OTHER_PORT} did not")


def _close(found: _Found) -> Iterator[Step]:
    """Rules before the QP, the QP before its queues."""
    try:
        if found.rules is not None:
            found.rules.close()
        if found.qp is not None:
            found.qp.close()
    except VmahybridError as error:
        yield _failed("close", error, "")
        return
    if found.rules is not None:
        yield Step("close", "ok", "rule, QP, queues, memory, device")


def frame(mac: bytes, port: int, payload: bytes) -> bytes:
    """Ethernet, IPv4 and UDP to DESTINATION:``port``, from ``mac`` to itself; UDP without a checksum."""
    head = _IPV4.pack(0x45, 0, 28 + len(payload), 0, 0x4000, 64, socket.IPPROTO_UDP, 0, socket.inet_aton(SOURCE),
                      socket.inet_aton(DESTINATION))
    total = sum(struct.unpack("!10H", head))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    head = head[:10] + struct.pack("!H", ~total & 0xFFFF) + head[12:]
    whole = mac + mac + b"\x08\x00" + head + _UDP.pack(PORT, port, 8 + len(payload), 0) + payload
    return whole.ljust(60, b"\0")
