"""Who holds an interface: the XDP programs on it, by rtnetlink, and the processes that keep them.

The interface is looked up in the network namespace of the calling thread.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vmahybrid.printable import clean
from vmahybrid.xdp.bpf import BpfError, object_info, open_program

# uapi linux/rtnetlink.h, if_link.h
_RTM_GETLINK = 18
_NLMSG_ERROR = 2
_NLM_F_REQUEST = 1
_IFLA_XDP = 43
_MODES = {5: "native", 6: "generic", 7: "offloaded"}  # IFLA_XDP_{DRV,SKB,HW}_PROG_ID
_NESTED = 0x7FFF  # without NLA_F_NESTED

_PROG_INFO_NAME = 64  # offset of name in struct bpf_prog_info
_NAME_LENGTH = 16


@dataclass(frozen=True, slots=True)
class Holder:
    """A program attached to an interface. ``name`` is "" when the kernel would not say; ``pids`` hold its program or
    link, and are empty when it was attached by netlink (it then outlives its maker) or lives in another pid namespace.
    """

    program: int
    name: str
    mode: str
    pids: tuple[int, ...]

    def __str__(self) -> str:
        name = f" '{self.name}'" if self.name else ""
        who = ", ".join(f"{pid} ({_command(pid)})" for pid in self.pids)
        return f"XDP program {self.program}{name} ({self.mode}), held by {f'process {who}' if who else 'no process'}"


def _command(pid: int) -> str:
    try:
        return clean(Path(f"/proc/{pid}/comm").read_text("utf-8", "replace").strip())
    except OSError:
        return "gone"


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, at)
        if length < 4:
            return
        yield kind & _NESTED, data[at + 4:at + length]
        at += (length + 3) & ~3


def _get_link(ifindex: int) -> bytes:
    """The attributes of the interface. Raises OSError: ENODEV."""
    request = struct.pack("=IHHII BxHiII", 32, _RTM_GETLINK, _NLM_F_REQUEST, 1, 0, socket.AF_UNSPEC, 0, ifindex, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE) as netlink:
        netlink.settimeout(5)
        netlink.send(request)
        answer = netlink.recv(1 << 16)
    length, kind = struct.unpack_from("=IH", answer)
    if kind == _NLMSG_ERROR:
        number = -struct.unpack_from("=i", answer, 16)[0]
        raise OSError(number, os.strerror(number))
    return answer[32:length]


def attached(ifindex: int) -> dict[str, int]:
    """Ids of the programs on the interface by mode ("native", "generic", "offloaded"). Raises OSError."""
    xdp = next((value for kind, value in _attributes(_get_link(ifindex)) if kind == _IFLA_XDP), b"")
    return {_MODES[kind]: struct.unpack("=I", value)[0] for kind, value in _attributes(xdp) if kind in _MODES}


def program_name(program: int) -> str:
    """As the kernel keeps it (15 characters), "" if the program is gone or we may not look."""
    try:
        with open_program(program) as opened:
            info = object_info(opened.fd, _PROG_INFO_NAME + _NAME_LENGTH)
    except BpfError:
        return ""
    return info[_PROG_INFO_NAME:].split(b"\0")[0].decode("utf-8", "replace")


def keepers(program: int) -> tuple[int, ...]:
    """Processes with a descriptor of the program, or of a link to it. Reads all of /proc: tens of milliseconds."""
    wanted = re.compile(rf"^prog_id:\s*{program}$", re.MULTILINE)
    found = set()
    for file in Path("/proc").glob("[0-9]*/fdinfo/*"):
        try:
            if wanted.search(file.read_text("utf-8", "replace")):
                found.add(int(file.parts[2]))
        except OSError:  # gone meanwhile
            continue
    return tuple(sorted(found))


def holders(ifindex: int) -> list[Holder]:
    """All programs on the interface. Raises OSError when it is gone."""
    return [Holder(program, program_name(program), mode, keepers(program)) for mode, program in
            attached(ifindex).items()]
