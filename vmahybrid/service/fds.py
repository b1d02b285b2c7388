"""Descriptors of a program that are no sockets of the shim's: what they are, and who has a TCP or IPv6 socket.

The kernel says what a socket is in an extended attribute of its file (system.sockprotoname); whoever may read
/proc/PID/fd may read that.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import socket
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from vmahybrid.contracts import lib
from vmahybrid.errors import NotFound
from vmahybrid.net import sockdiag
from vmahybrid.service.core import Core
from vmahybrid.service.view import ExplainStep
from vmahybrid.steering.keys import ANY_ADDR
from vmahybrid.steering.reasons import Reason

PROTOCOL_NAME = "system.sockprotoname"
DESCRIPTORS_READ = 4096  # of one program: it is done on the event loop
FDS_SHOWN = 8
IPPROTO_UDPLITE = 136
PROTOCOLS = (socket.IPPROTO_TCP, socket.IPPROTO_UDP, IPPROTO_UDPLITE)
# By the kernel's name (struct proto). IPv4 would not help TCP, so its reason is the type in both families.
KINDS = {
    "TCP": ("a TCP socket", Reason.TYPE),
    "TCPv6": ("a TCP socket over IPv6", Reason.TYPE),
    "MPTCP": ("an MPTCP socket", Reason.TYPE),
    "MPTCPv6": ("an MPTCP socket over IPv6", Reason.TYPE),
    "SCTP": ("an SCTP socket", Reason.TYPE),
    "SCTPv6": ("an SCTP socket over IPv6", Reason.TYPE),
    "UDPv6": ("a UDP socket over IPv6", Reason.FAMILY),
    "UDP-Lite": ("a UDP-Lite socket", Reason.TYPE),
    "UDPLITEv6": ("a UDP-Lite socket over IPv6", Reason.TYPE),
    "RAW": ("a raw socket", Reason.TYPE),
    "RAWv6": ("a raw socket over IPv6", Reason.TYPE),
    "PING": ("an ICMP socket", Reason.TYPE),
    "PINGv6": ("an ICMP socket over IPv6", Reason.TYPE),
    "UNIX": ("a Unix socket", Reason.FAMILY),
    "UNIX-STREAM": ("a Unix socket", Reason.FAMILY),
    "NETLINK": ("a netlink socket", Reason.FAMILY),
    "PACKET": ("a packet socket", Reason.FAMILY),
}
TCP = ("TCP", "TCPv6")
NO_SLOT = "it found no slot in the statistics page, which is full: whether it is on a ring is not known"
MORE_SLOTS = "raise VMA_STATS_FD_NUM to see it"
LOCAL_KINDS = ("UNIX", "UNIX-STREAM", "NETLINK", "XDP", "UDP")  # the shim has such ones; UDP is in the page


@dataclass(frozen=True, slots=True)
class Descriptor:
    fd: int
    target: str     # as readlink says: "socket:[4711]", "anon_inode:[eventpoll]"
    protocol: str   # the kernel's name, "" if it is no socket

    @property
    def inode(self) -> int:
        """Of a socket; else 0."""
        number = self.target.removeprefix("socket:[").removesuffix("]")
        return int(number) if number.isdigit() else 0

    @property
    def what(self) -> str:
        if self.protocol:
            return KINDS.get(self.protocol, (f"a socket of type {self.protocol}", Reason.FAMILY))[0]
        return "an epoll set, no socket" if self.target == "anon_inode:[eventpoll]" else f"no socket ({self.target})"

    @property
    def reason(self) -> Reason:
        return KINDS.get(self.protocol, ("", Reason.FAMILY))[1]


def look(pid: int, fd: int) -> Descriptor:
    """Raises NotFound if the process has no such descriptor, OSError if the service may not look."""
    path = f"/proc/{pid}/fd/{fd}"
    try:
        target = os.readlink(path)
    except FileNotFoundError:
        raise NotFound(f"socket {pid}:{fd}", f"process {pid} has no file descriptor {fd}",
                       f"vmahybrid explain {pid} lists its sockets") from None
    protocol = ""
    if target.startswith("socket:"):
        with contextlib.suppress(OSError):  # closed meanwhile
            protocol = os.getxattr(path, PROTOCOL_NAME).rstrip(b"\0").decode("ascii", "replace")
    return Descriptor(fd, target, protocol)


def of_process(pid: int) -> Iterator[Descriptor]:
    """Its sockets, the first descriptors only; none if the service may not look."""
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in itertools.islice(entries, DESCRIPTORS_READ):
            with contextlib.suppress(OSError, NotFound):
                found = look(pid, int(entry.name))
                if found.protocol:
                    yield found


def explain_one(pid: int, fd: int, over: bool) -> ExplainStep:
    """Why a descriptor that the shim does not know is on the kernel; ``over``: its page had no slot for some sockets.

    Raises NotFound."""
    try:
        found = look(pid, fd)
    except OSError as error:
        return ExplainStep("family", False, f"fd {fd} is no socket that could be offloaded, and the service may not "
                           f"look what it is: {error.strerror}")
    if over and found.protocol in TCP:
        return ExplainStep("family", True, f"fd {fd} is {found.what}, but {NO_SLOT}", MORE_SLOTS)
    if found.protocol == "UDP":
        why = NO_SLOT if over else ("the shim has not seen how it came to be (made before exec, received from another "
                                    "process)")  # fmt: skip
        return ExplainStep("family", over, f"fd {fd} is a UDP socket over IPv4, but {why}",
                           MORE_SLOTS if over else "open the socket in the program itself")
    if not found.protocol:
        remedy = f"vmahybrid explain {pid} lists the sockets, which are explained one by one"
        return ExplainStep("family", False, f"fd {fd} is {found.what}", remedy)
    return ExplainStep("family", False, f"fd {fd} is {found.what}: {found.reason.text}", found.reason.remedy,
                       found.reason.slug)


def _first_hidden(pid: int) -> int:
    """The shim and the software verbs device keep their descriptors from here on."""
    with contextlib.suppress(OSError):
        soft = resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]
        own, table = int(lib.VMH_FDS_OWN), int(lib.VMH_FDS_TABLE)
        top = table if soft == resource.RLIM_INFINITY else min(soft, table)
        return top - own if top > 2 * own else top // 2  # as vmh_fd_hide
    return 0


def explain_others(pid: int, own: Collection[str], known: Collection[int], over: bool) -> Iterator[ExplainStep]:
    """A step for each kind of socket that the shim leaves alone, or that its page has no slot for (``over``: there are
    some). ``own``: protocols of which the shim, or the software verbs device, has some itself. ``known``: inodes of
    those that the page has."""
    own_from = _first_hidden(pid)
    kinds: defaultdict[str, list[int]] = defaultdict(list)
    for found in of_process(pid):
        hidden = found.protocol in own and found.fd >= own_from
        if found.protocol not in LOCAL_KINDS and not hidden and found.inode not in known:
            kinds[found.protocol].append(found.fd)
    for protocol, fds in kinds.items():
        names = ", ".join(f"{pid}:{fd}" for fd in sorted(fds)[:FDS_SHOWN])
        more = f" and {len(fds) - FDS_SHOWN} more" if len(fds) > FDS_SHOWN else ""
        example = Descriptor(fds[0], "", protocol)
        each = "each " if len(fds) > 1 else ""
        if over and protocol in TCP:
            yield ExplainStep("family", True, f"{names}{more}: {each}{example.what}: {NO_SLOT}", MORE_SLOTS)
            continue
        yield ExplainStep("family", False, f"{names}{more}: {each}{example.what}: on the kernel: {example.reason.text}",
                          example.reason.remedy, example.reason.slug)


def at(core: Core, address: bytes, port: int, known: Collection[int]) -> list[tuple[int, int]]:
    """(pid, fd) of the sockets of programs under the shim that are bound there, but those whose inodes are known."""
    inodes: set[int] = set()
    for namespace in list(core.namespaces.all.values()) if port else ():
        for proto in PROTOCOLS:
            with contextlib.suppress(OSError, RuntimeError):
                bound = namespace.quick.call(sockdiag.bound_sockets, port, proto)
                inodes |= {b.inode for b in bound if b.inode and _meets(b.local, address)}
    if not inodes:
        return []
    return [(pid, found.fd) for pid in _programs(core) for found in of_process(pid)
            if found.inode in inodes and found.inode not in known and found.protocol != "UDP"]


def _meets(local: bytes, address: bytes) -> bool:
    return ANY_ADDR in (local, address) or local == address


def _programs(core: Core) -> Iterable[int]:
    return sorted({session.pid for session in core.sessions.values()})
