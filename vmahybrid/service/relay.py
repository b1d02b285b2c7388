"""Bytes carried between two connections, by a process of its own: for programs that have accepted a ticket
(service/tickets.py) and can't bring it here. The process outlives the service, as long as there is a connection left.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable

RESET = struct.pack("ii", 1, 0)
NO_LINGER = struct.pack("ii", 0, 0)
SEND_SECONDS = 1.0
AT_ONCE = 65536     # bytes


class Relays:
    """The service's end: the process begins with the first pair."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def add(self, one: int, other: int) -> None:
        """Two connected TCP sockets; they stay the caller's. Raises OSError."""
        if self.process is None or self.process.poll() is not None:
            self.close()
            self._start()
        assert self._control is not None
        socket.send_fds(self._control, [b"+"], [one, other])

    def _start(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(SEND_SECONDS)
        with theirs:
            command = [sys.executable, "-P", "-m", "vmahybrid.service.relay", str(theirs.fileno())]
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                             pass_fds=[theirs.fileno()], start_new_session=True)

    def close(self) -> None:
        """No more will come."""
        if self._control is not None:
            self._control.close()
            self._control = None


# ---- the process


async def carry(one: socket.socket, other: socket.socket) -> None:
    """Until both have ended, or one is reset: then the other is, too. Takes them over."""
    for sock in (one, other):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
    ends = [await asyncio.open_connection(sock=sock) for sock in (one, other)]
    try:
        async with asyncio.TaskGroup() as group:
            for (reader, _), (_, writer) in (ends, ends[::-1]):
                group.create_task(_pump(reader, writer))
    except* OSError:
        for sock, (_, writer) in zip((one, other), ends, strict=True):
            with contextlib.suppress(OSError):  # it is closed already
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.transport.abort()
    for _, writer in ends:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(AT_ONCE):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


async def serve(control: socket.socket) -> None:
    """What comes by ``control``, until it ends, and then what is left."""
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()

    def receive() -> None:
        word, fds, *_ = socket.recv_fds(control, 1, 2)
        if not word:
            loop.remove_reader(control)
            over.set()
            return
        socks = [socket.socket(fileno=fd) for fd in fds]
        if len(socks) == 2:
            task = loop.create_task(carry(*socks))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        else:   # no descriptor is left
            _reset(socks)

    loop.add_reader(control, receive)
    await over.wait()
    while tasks:
        await asyncio.wait(tasks)


def _reset(socks: Iterable[socket.socket]) -> None:
    for sock in socks:
        with sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


if __name__ == "__main__":
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[1]))))
