"""Proof of ownership: the kernel socket that a program passes must be what its request says.

Who holds a socket bound to an address has it from the kernel, with all its checks; so the socket itself is the proof
and nobody can have another's port steered. The caller closes the descriptor after the check: kept, it would keep the
port bound after the program's end.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from vmahybrid.contracts import addr_to_bytes, addr_to_text
from vmahybrid.errors import Refused
from vmahybrid.service.reaper import close_foreign, closing
from vmahybrid.steering.flow import Flow, Kind, endpoint
from vmahybrid.steering.keys import ANY_ADDR, is_multicast
from vmahybrid.steering.reasons import Reason
from vmahybrid.steering.table import refuse

SO_NETNS_COOKIE = 71    # asm-generic/socket.h, kernel 5.14
SO_BINDTOIFINDEX = 62   # asm-generic/socket.h, kernel 5.0
FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}
ZEROS = addr_to_bytes("0.0.0.0"), addr_to_bytes("::")
TYPES = {17: socket.SOCK_DGRAM, 6: socket.SOCK_STREAM}
CLOSING = 0.1   # seconds: a program's SO_LINGER does not keep its answer back for longer


@dataclass(frozen=True, slots=True)
class Proof:
    """What the socket tells beyond what was asked. ``device``: ifindex of SO_BINDTODEVICE, 0 for none. ``only_v6``:
    IPV6_V6ONLY of an AF_INET6 socket."""

    inode: int
    device: int
    reuse_addr: bool
    reuse_port: bool
    only_v6: bool = False


def netns_cookie() -> int:
    """The kernel's number of the calling thread's network namespace, never used twice. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return netns_cookie_of(probe)


def netns_cookie_of(sock: socket.socket) -> int:
    """Of the network namespace of a socket. Raises OSError."""
    return int(struct.unpack("Q", sock.getsockopt(socket.SOL_SOCKET, SO_NETNS_COOKIE, 8))[0])


def is_plain_udp(fd: int) -> bool:
    """A UDP socket: one whose close never blocks."""
    try:
        with borrowed(fd) as sock:
            return sock.family in FAMILIES.values() and sock.type == socket.SOCK_DGRAM
    except OSError:
        return False


def family_of(fd: int) -> int:
    """4 or 6: of a socket, whatever it is connected over. 0 for what is none."""
    try:
        with borrowed(fd) as sock:
            return next((version for version, family in FAMILIES.items() if family == sock.family), 0)
    except OSError:
        return 0


@contextlib.contextmanager
def borrowed(fd: int) -> Iterator[socket.socket]:
    """The descriptor as a socket object; no duplicate, as closing one may block like closing ``fd``. Raises OSError."""
    sock = socket.socket(fileno=fd)
    try:
        yield sock
    finally:
        sock.detach()


def close(fd: int) -> None:
    """Close what a program passed, without blocking."""
    if is_plain_udp(fd):
        os.close(fd)
    else:
        close_slowly(fd)


@contextlib.asynccontextmanager
async def closed(fd: int) -> AsyncIterator[None]:
    """The same, to begin with; and it is closed in the end, unless that takes CLOSING seconds: a program that is
    answered may close its own and bind the port anew."""
    if is_plain_udp(fd):
        os.close(fd)
        yield
        return
    future = closing([fd])
    try:
        yield
    finally:
        await _in_time(future)


async def closed_in_time(fds: list[int]) -> None:
    """Close what a program passed, and its copies, off the event loop."""
    await _in_time(closing(fds))


async def _in_time(future: Future[None]) -> None:
    await asyncio.wait([asyncio.wrap_future(future)], timeout=CLOSING)


def close_slowly(fd: int) -> None:
    """Close what may not be a UDP socket, off the event loop."""
    close_foreign([fd])


def check(fd: int, flow: Flow, cookie: int) -> Proof:
    """Compare the socket with ``flow`` and the namespace of the session. Borrows ``fd``.

    Raises Refused: NOT_OWNER naming what differs, PORT_SHARED for an unconnected SO_REUSEPORT socket."""
    try:
        with borrowed(fd) as sock:
            return _check(sock, flow, cookie)
    except OSError as error:
        if error.errno == errno.ENOTSOCK:
            raise not_owner("the file descriptor is not a socket") from None
        raise not_owner(f"asking the socket: {error.strerror}") from None


def _check(sock: socket.socket, flow: Flow, cookie: int) -> Proof:
    if (sock.family, sock.type, sock.proto) != (FAMILIES.get(flow.family), TYPES.get(flow.proto), flow.proto):
        raise not_owner(f"a socket of family {int(sock.family)}, type {int(sock.type)}, protocol {sock.proto}")
    _check_names(sock, flow)
    if netns_cookie_of(sock) != cookie:
        raise not_owner("it lives in another network namespace")
    device = sock.getsockopt(socket.SOL_SOCKET, SO_BINDTOIFINDEX)
    if device and flow.ifindex not in (0, device):
        raise not_owner(f"bound to interface {device}, not {flow.ifindex}")
    reuse_port = bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT))
    reuse_addr = bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR))
    # A connected one wants its whole port: not where others may have it, whom the kernel would give what is theirs.
    if flow.kind is Kind.THREE and (reuse_port or (reuse_addr and flow.peer[1])):
        raise refuse(f"flow {flow.local_text}", Reason.PORT_SHARED)
    if flow.listens and not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        raise not_owner("the socket does not listen")
    only_v6 = sock.family == socket.AF_INET6 and bool(sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY))
    return Proof(os.fstat(sock.fileno()).st_ino, device, reuse_addr, reuse_port, only_v6)


def own_port(flow: Flow) -> int:
    """A TCP socket of the calling thread's namespace, bound to a free port of ``flow``'s local address, which ``flow``
    gets. The caller's to close. Raises Refused (NOT_OFFLOADABLE_ADDR), OSError."""
    family = FAMILIES[flow.family]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.bind((addr_to_text(flow.local), 0))
    except OSError as error:
        sock.close()
        raise refuse(f"a port of {flow.local_text}: {error.strerror}", Reason.NOT_OFFLOADABLE_ADDR) from None
    flow.local_port = sock.getsockname()[1]
    return sock.detach()


def check_new(fd: int, cookie: int) -> None:
    """Is it a TCP socket of the namespace, and neither connected nor listening? Borrows ``fd``. Raises Refused.

    It may have a local name: Linux leaves it one when connect() was refused. Whether it is bound to another one than
    it should have is seen when it is to get that (tcprepair)."""
    try:
        with borrowed(fd) as sock:
            if sock.family not in FAMILIES.values() or (sock.type, sock.proto) != (TYPES[6], socket.IPPROTO_TCP):
                raise not_owner(f"a socket of family {int(sock.family)}, type {int(sock.type)}, protocol {sock.proto}")
            if netns_cookie_of(sock) != cookie:
                raise not_owner("it lives in another network namespace")
            used = bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
            with contextlib.suppress(OSError):
                sock.getpeername()
                used = True
            if used:
                raise not_owner("the socket is in use")
    except OSError as error:
        raise not_owner(f"asking the socket: {error.strerror}") from None


def _check_names(sock: socket.socket, flow: Flow) -> None:
    local, local_port = _name(sock.getsockname())
    if local_port == 0 or local_port != flow.local_port:
        raise not_owner(f"bound to port {local_port}, not {flow.local_port}")
    if flow.kind is Kind.MULTICAST:
        if not is_multicast(flow.local):
            raise not_owner(f"{endpoint(flow.local, flow.local_port)} is no multicast group")
        if local not in (ANY_ADDR, flow.local):
            raise not_owner(f"bound to {endpoint(local, local_port)}, not to the group or any address")
        return
    if local != flow.local or is_multicast(local):
        raise not_owner(f"bound to {endpoint(local, local_port)}, not {endpoint(flow.local, flow.local_port)}")
    try:
        remote, remote_port = _name(sock.getpeername())
    except OSError:
        remote, remote_port = ANY_ADDR, 0
    wanted = (flow.remote, flow.remote_port) if flow.kind is Kind.FIVE else flow.peer
    if (remote, remote_port) != wanted or (flow.kind is Kind.FIVE and ANY_ADDR in (remote, local)):
        raise not_owner(f"connected to {endpoint(remote, remote_port)}, not {endpoint(*wanted)}")


def _name(name: tuple[str, int]) -> tuple[bytes, int]:
    address = addr_to_bytes(name[0].partition("%")[0])
    return (ANY_ADDR if address in ZEROS else address), name[1]


def not_owner(why: str) -> Refused:
    return Refused("proof", f"{Reason.NOT_OWNER.text}: {why}", Reason.NOT_OWNER.remedy, int(Reason.NOT_OWNER))
