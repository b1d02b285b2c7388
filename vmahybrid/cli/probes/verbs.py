"""RDMA devices and their raw packet QPs, the software device, and what nobody has run."""

import dataclasses
import os
from collections.abc import Iterator

from vmahybrid.bench import beside
from vmahybrid.bench.sandbox import SandboxError
from vmahybrid.bench.sockperf import MESSAGE
from vmahybrid.cli.probes import Check, Verdict
from vmahybrid.cli.probes.kernel import effective_capabilities
from vmahybrid.errors import NotPossibleHere, VmahybridError
from vmahybrid.steering.reasons import Reason
from vmahybrid.verbs import caps, discovery, library

TOPIC = "verbs"
MEASURE = "vmahybrid softverbs -- vmahybrid doctor"
UNVERIFIED = "nothing of it was verified on a ConnectX NIC: docs/verbs.md has a checklist"


def bindings() -> Iterator[Check]:
    if not library.have_pyverbs():
        yield Check(TOPIC, "pyverbs", "warn", "the Python module pyverbs is not there: devices can't be looked at, "
                    "programs use them all the same", library.PYVERBS)  # fmt: skip
        return
    try:
        library.need_pyverbs()
    except NotPossibleHere as error:
        yield Check(TOPIC, "pyverbs", "warn", error.why, error.remedy)
        return
    path = library.loaded()
    software = " (the software device)" if _software(path) else ""
    yield Check(TOPIC, "libibverbs", "ok", f"{path}{software}", data={"path": path})


def _software(path: str) -> bool:
    try:
        return os.path.realpath(path) == os.path.realpath(library.softverbs_directory() / library.LIBRARY)
    except NotPossibleHere:
        return False


def devices() -> Iterator[Check]:
    """One line per device; with the service's own eyes: what a program may do depends on the program."""
    links = {link.device: link.ifname for link in discovery.scan()}
    try:
        listed = caps.devices()
    except NotPossibleHere:
        listed = []
    found = sorted({*listed, *discovery.names()})
    if not found:
        yield Check(TOPIC, "verbs", "ok", "no RDMA device: AF_XDP carries the rings. Of raw packet QPs on a NIC: "
                    + UNVERIFIED, data={"devices": []})  # fmt: skip
        return
    yield Check(TOPIC, "verbs", "ok", f"RDMA devices {', '.join(found)}", data={"devices": found})
    for name in found:
        yield _device(name, links.get(name, name.removeprefix(library.SOFTWARE_PREFIX)), name in listed)


def _device(name: str, interface: str, listed: bool) -> Check:
    if not listed:
        return Check(TOPIC, name, "warn", f"interface {interface}: libibverbs does not list it",
                     "apt-get install ibverbs-providers; ls -l /dev/infiniband")  # fmt: skip
    try:
        able = caps.capabilities(name)
    except VmahybridError as error:
        return Check(TOPIC, name, "warn", f"interface {interface}: {error.why}", error.remedy)
    reason = Reason.from_slug(able.reason)
    data = {"interface": interface, "raw_packet": able.raw_packet, "reason": able.reason, "raw_caps": able.raw_caps,
            "max_qp_wr": able.max_qp_wr, "max_inline_bytes": able.max_inline}  # fmt: skip
    if reason is not Reason.NONE:
        verdict: Verdict = "warn" if reason is Reason.NO_CAP_NET_RAW else "ok"
        return Check(TOPIC, name, verdict, f"interface {interface}: {reason.text} ({reason.slug}): AF_XDP carries its "
                     "rings", reason.remedy, data)  # fmt: skip
    text = f"interface {interface}: raw packet QPs, {', '.join(able.raw_caps) or 'no offloads'}"
    if name.startswith(library.SOFTWARE_PREFIX):
        return Check(TOPIC, name, "ok", f"{text}; a software device", data=data)
    return Check(TOPIC, name, "warn", f"{text}; {UNVERIFIED}", f"vmahybrid doctor --verbs-selftest {interface}", data)


def net_raw() -> Iterator[Check]:
    if "CAP_NET_RAW" in effective_capabilities():
        yield Check(TOPIC, "CAP_NET_RAW", "ok", "here; each program needs it for its raw packet QP, as with VMA, else "
                    "AF_XDP carries its rings")  # fmt: skip
    else:
        yield Check(TOPIC, "CAP_NET_RAW", "warn", "missing: programs of this user have no raw packet QPs, AF_XDP "
                    "carries their rings", "run the program as root, or with the ambient capability: setpriv "
                    "--inh-caps +net_raw --ambient-caps +net_raw COMMAND")  # fmt: skip


def softverbs() -> Iterator[Check]:
    try:
        path = library.softverbs_directory()
    except NotPossibleHere as error:
        yield Check(TOPIC, "softverbs", "warn", error.why, error.remedy)
        return
    yield Check(TOPIC, "softverbs", "ok", f"{path}, by vmahybrid run --softverbs or vmahybrid softverbs. It is "
                f"there to run and test verbs anywhere, and may be slower than the kernel's UDP: {MEASURE} measures it "
                "here (as root, 20 s), make bench beside AF_XDP", data={"path": str(path)})  # fmt: skip


def speed() -> Iterator[Check]:
    """Where this process is itself on the software device: that one beside the kernel's UDP. It takes two processors
    for some seconds, which nobody who does not use the device should pay."""
    if not library.have_pyverbs() or not _software(library.loaded()):
        return
    why, remedy = beside.obstacle()
    if why:
        yield Check(TOPIC, "speed", "warn", f"softverbs was not measured: {why}", remedy)
        return
    try:
        found = beside.measure()
    except SandboxError as error:
        yield Check(TOPIC, "speed", "warn", f"softverbs could not be measured: {error}", "make bench")
        return
    text = (f"sockperf, {MESSAGE} bytes over veth, both ends spinning, half round trip (p50) and one way: "
            f"softverbs {found.softverbs}, the kernel's UDP {found.kernel}")
    data = dataclasses.asdict(found)
    if found.slower:
        what = " and ".join(found.slower)
        yield Check(TOPIC, "speed", "warn", f"softverbs is slower than the kernel's UDP here: {what}. {text}",
                    "for tests only: without --softverbs programs are on AF_XDP or the kernel", data)
    else:
        yield Check(TOPIC, "speed", "ok", text, data=data)


PROBES = (bindings, devices, net_raw, softverbs, speed)


def selftest(interface: str) -> Iterator[Check]:
    """Of ``doctor --verbs-selftest IF``: each step on this interface."""
    from vmahybrid.verbs.selftest import run

    for step in run(interface):
        yield Check(TOPIC, step.name, step.verdict, step.text, step.remedy)
