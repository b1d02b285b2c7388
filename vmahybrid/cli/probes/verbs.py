"""RDMA devices and their raw packet QPs, the software device, and what nobody has run."""

import os
from collections.abc import Iterator

from vmahybrid.cli.probes import Check, Verdict
from vmahybrid.cli.probes.kernel import effective_capabilities
from vmahybrid.errors import NotPossibleHere, VmahybridError
from vmahybrid.steering.reasons import Reason
from vmahybrid.verbs import caps, discovery, library

TOPIC = "verbs"
# one run of `make bench`, parts latency and throughput; 2026-11-21, Linux 6.18, 2 cores shared with other work
SPEED = ("make bench, over veth on 2 cores, 64 bytes, both spinning, had half round trips (p50) of 3.3 us with it, "
         "4.3 us on the kernel's UDP, 1.9 us on AF_XDP, and 279,000, 181,000, 372,000 messages/s one way: faster than "
         "the kernel there, slower than AF_XDP. On this machine nothing was measured: run make bench")
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
                f"there to run and test verbs anywhere. {SPEED}", data={"path": str(path)})  # fmt: skip


PROBES = (bindings, devices, net_raw, softverbs)


def selftest(interface: str) -> Iterator[Check]:
    """Of ``doctor --verbs-selftest IF``: each step on this interface."""
    from vmahybrid.verbs.selftest import run

    for step in run(interface):
        yield Check(TOPIC, step.name, step.verdict, step.text, step.remedy)
