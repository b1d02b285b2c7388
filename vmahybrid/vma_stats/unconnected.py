"""Programs under the shim that the service does not know: they have made no socket and accepted no connection, but have
sockets from another process. Such is the child that a server forks for a connection, to which a session would cost more
than many a connection does.

They are found in /proc, by their environment: as far as the user may look, their own ones or as root.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from vmahybrid.cli.paths import DEFAULT_RUNDIR, control_socket
from vmahybrid.printable import clean
from vmahybrid.vma_stats.passthrough import sockets_of

_SHIM = b"libvmahybrid"


def programs(known: set[int]) -> Iterator[dict[str, Any]]:
    """``pid``, ``comm``, ``cmdline`` and ``sockets`` (as passthrough.sockets_of()) of each that has IP sockets, in
    order; ``known`` are the processes with a session."""
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isascii() and name.isdigit()):
        if pid in known:
            continue
        with suppress(OSError):  # another user's, or it has ended
            if _under_shim(Path(f"/proc/{pid}")) and (sockets := sockets_of(pid, set())):
                yield {"pid": pid, "comm": _text(pid, "comm"), "cmdline": _text(pid, "cmdline"), "sockets": sockets}


def _under_shim(process: Path) -> bool:
    """And of this service, as far as the program left its environment where the kernel shows it (nginx does not)."""
    if _SHIM not in (process / "maps").read_bytes():
        return False
    words = (process / "environ").read_bytes().split(b"\0")
    variables = {name: value for name, _, value in (word.partition(b"=") for word in words)}
    service = variables.get(b"VMA_HYBRID_SOCKET") or os.fsencode(DEFAULT_RUNDIR / control_socket().name)
    return b"LD_PRELOAD" not in variables or service == os.fsencode(control_socket())


def _text(pid: int, name: str) -> str:
    words = Path(f"/proc/{pid}/{name}").read_bytes().replace(b"\0", b" ")
    return clean(words.decode("utf-8", "replace").strip())
