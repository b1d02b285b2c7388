"""Kernel features, by doing the thing in a private network namespace rather than by the version."""

import errno
import os
import resource
import socket
import struct
from collections.abc import Iterator
from ctypes.util import find_library
from importlib.util import find_spec
from pathlib import Path

from vmahybrid.cli.probes import Check
from vmahybrid.errors import VmahybridError

TOPIC = "kernel"
AF_XDP = 44
PASS_INSNS = struct.pack("=BBhiBBhi", 0xB7, 0, 0, 2, 0x95, 0, 0, 0)  # r0 = XDP_PASS; exit
AS_ROOT = "run as root: sudo vmahybrid doctor"
UMEM_BYTES = 8 << 20  # of a default ring: 4096 frames of 2048 bytes

CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_NET_RAW": 13, "CAP_SYS_ADMIN": 21, "CAP_IPC_LOCK": 14, "CAP_BPF": 39,
                "CAP_PERFMON": 38}  # fmt: skip
# what each is for; without the first two there is no service at all
_NEEDED = {
    "CAP_NET_ADMIN": "attach XDP programs", "CAP_NET_RAW": "open AF_XDP sockets", "CAP_BPF": "load XDP programs",
    "CAP_IPC_LOCK": "lock packet memory", "CAP_SYS_ADMIN": "serve other network namespaces",
    "CAP_PERFMON": "load XDP programs that read packet pointers",
}  # fmt: skip


def effective_capabilities(status: str | None = None) -> set[str]:
    """Names of CAPABILITIES that this process has (proc(5), CapEff)."""
    text = Path("/proc/self/status").read_text("ascii", "replace") if status is None else status
    mask = int(next(line.split()[1] for line in text.splitlines() if line.startswith("CapEff:")), 16)
    return {name for name, bit in CAPABILITIES.items() if mask >> bit & 1}


def capabilities() -> Iterator[Check]:
    missing = set(CAPABILITIES) - effective_capabilities()
    if not missing:
        yield Check(TOPIC, "capabilities", "ok", "all that the service uses")
        return
    for name in sorted(missing):
        yield Check(TOPIC, "capabilities", "warn", f"{name} is missing here; the service needs it to {_NEEDED[name]}",
                    "sudo vmahybrid start")  # fmt: skip


def af_xdp_socket() -> Iterator[Check]:
    try:
        with socket.socket(AF_XDP, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0):
            yield Check(TOPIC, "AF_XDP", "ok", "the kernel has AF_XDP sockets")
    except PermissionError:
        yield Check(TOPIC, "AF_XDP", "warn", "not known: opening an AF_XDP socket needs CAP_NET_RAW", AS_ROOT)
    except OSError as error:
        if error.errno != errno.EAFNOSUPPORT:
            raise
        yield Check(TOPIC, "AF_XDP", "fail", "the kernel has no AF_XDP sockets",
                    "boot a kernel with CONFIG_XDP_SOCKETS=y (Debian's have it)")  # fmt: skip


def map_bound_xsk() -> Iterator[Check]:
    """As the service does when it starts (vmahybrid.xdp.latebind)."""
    from vmahybrid.xdp.latebind import bound_can_be_mapped

    name = "map bound AF_XDP"
    try:
        if bound_can_be_mapped():
            yield Check(TOPIC, name, "ok", "bound AF_XDP sockets can be mapped: rings are granted in one step")
            return
    except OSError as error:
        yield Check(TOPIC, name, "warn", f"not known: {error.strerror or error}", AS_ROOT)
        return
    yield Check(TOPIC, name, "warn", "bound AF_XDP sockets can't be mapped: rings are granted in two steps, and a "
                "program with a direct ring could bind its sockets to other interfaces of its namespace",
                "boot kernel 6.4 or newer, or: vmahybrid config set ring.direct=never")


def tcp_repair() -> Iterator[Check]:
    """As each move of a TCP connection begins (vmahybrid.net.tcpsock), on a socket that is not connected."""
    from vmahybrid.net.tcpsock import enter

    name = "TCP_REPAIR"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            enter(sock)
        yield Check(TOPIC, name, "ok", "TCP connections can be moved between the kernel and rings")
    except PermissionError:
        yield Check(TOPIC, name, "warn", "not known: moving a TCP connection needs CAP_NET_ADMIN", AS_ROOT)
    except OSError as error:
        yield Check(TOPIC, name, "fail", "TCP connections can't be moved between the kernel and rings: "
                    f"{error.strerror or error}", "VMA_HYBRID_TCP = kernel in /etc/vmahybrid/policy.conf")  # fmt: skip


def bpf_and_link() -> Iterator[Check]:
    """Loads a program of two instructions and attaches it to the loopback of a namespace that nobody else sees."""
    from vmahybrid.xdp.bpf import BpfError, BpfProgram
    from vmahybrid.xdp.image import ProgramImage

    try:
        program = BpfProgram.load(ProgramImage("vmh_doctor", PASS_INSNS, ()), {})
    except BpfError as error:
        if error.errno == errno.EPERM:
            yield Check(TOPIC, "bpf", "warn", "not known: loading a program needs CAP_BPF and CAP_NET_ADMIN", AS_ROOT)
        else:
            yield Check(TOPIC, "bpf", "fail", f"no XDP program can be loaded: {error.why}",
                        "boot a kernel with CONFIG_BPF_SYSCALL=y")  # fmt: skip
        return
    with program:
        yield Check(TOPIC, "bpf", "ok", "XDP programs can be loaded")
        yield _link(program)


def _link(program: object) -> Check:
    from typing import cast

    from vmahybrid.net.netns import NetnsWorker
    from vmahybrid.xdp.attach import attach
    from vmahybrid.xdp.bpf import BpfProgram

    def in_private_namespace() -> None:
        attach(cast(BpfProgram, program), socket.if_nametoindex("lo"), "generic").close()

    try:
        worker = NetnsWorker.open_private()
    except OSError as error:
        return Check(TOPIC, "bpf_link", "warn", f"not known: no private namespace: {error.strerror}", AS_ROOT)
    try:
        worker.call(in_private_namespace)
    except VmahybridError as error:
        return Check(TOPIC, "bpf_link", "fail", f"XDP programs can't be attached by bpf_link: {error.why}",
                     "boot kernel 5.9 or newer")  # fmt: skip
    finally:
        worker.close()
    return Check(TOPIC, "bpf_link", "ok", "XDP programs can be attached by bpf_link")


def jit() -> Iterator[Check]:
    """Absent when the kernel is built with the JIT always on."""
    path = Path("/proc/sys/net/core/bpf_jit_enable")
    if path.exists() and path.read_text().strip() == "0":
        yield Check(TOPIC, "bpf jit", "warn", "BPF programs are interpreted, which is several times slower",
                    "sysctl -w net.core.bpf_jit_enable=1")  # fmt: skip
    else:
        yield Check(TOPIC, "bpf jit", "ok", "BPF programs are compiled")


def memlock() -> Iterator[Check]:
    """Packet memory counts against RLIMIT_MEMLOCK unless the process has CAP_IPC_LOCK (net/xdp/xdp_umem.c)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    data = {"soft_bytes": soft, "hard_bytes": hard}
    if "CAP_IPC_LOCK" in effective_capabilities():
        yield Check(TOPIC, "RLIMIT_MEMLOCK", "ok", "no limit: CAP_IPC_LOCK", data=data)
    elif soft == resource.RLIM_INFINITY:
        yield Check(TOPIC, "RLIMIT_MEMLOCK", "ok", "unlimited", data=data)
    else:
        verdict = "warn" if soft >= UMEM_BYTES else "fail"
        yield Check(TOPIC, "RLIMIT_MEMLOCK", verdict,  # type: ignore[arg-type]
                    f"{soft} bytes; one ring needs {UMEM_BYTES}", "ulimit -l unlimited", data)  # fmt: skip


def compiler() -> Iterator[Check]:
    if find_spec("bcc") is None:
        yield Check(TOPIC, "bcc", "fail", "the Python module bcc is not there", "apt-get install python3-bpfcc")
    else:
        yield Check(TOPIC, "bcc", "ok", "the BPF compiler collection is installed")
    header = Path("/usr/include/linux/bpf.h")
    if header.is_file():
        yield Check(TOPIC, "headers", "ok", "kernel headers for bcc are installed (linux-libc-dev)")
    else:
        yield Check(TOPIC, "headers", "fail", f"{header} is missing: bcc can't compile the XDP program",
                    "apt-get install linux-libc-dev")  # fmt: skip


def libraries() -> Iterator[Check]:
    for name, package in (("xdp", "libxdp1"), ("bpf", "libbpf1")):
        found = find_library(name)
        if found:
            yield Check(TOPIC, f"lib{name}", "ok", found)
        else:
            yield Check(TOPIC, f"lib{name}", "fail", "not found", f"apt-get install {package}")


def shim() -> Iterator[Check]:
    from vmahybrid.cli.run import library

    try:
        path = library()
    except VmahybridError as error:
        yield Check(TOPIC, "shim", "fail", str(error), "make build")
        return
    readable = os.access(path, os.R_OK)
    text = f"{path}" + ("" if readable else " can't be read by this user")
    yield Check(TOPIC, "shim", "ok" if readable else "fail", text, "" if readable else f"chmod a+r {path}")


PROBES = (capabilities, af_xdp_socket, map_bound_xsk, tcp_repair, bpf_and_link, jit, memlock, compiler, libraries, shim)
