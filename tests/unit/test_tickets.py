"""service/tickets.py: what is kept is given to who brings its ticket, carried to who uses it, and reset with it."""

from __future__ import annotations

import asyncio
import fcntl
import os
import select
import socket
import struct
import termios
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from vmahybrid.errors import Refused
from vmahybrid.net.netns import NetnsWorker
from vmahybrid.service.reaper import RESET_ON_CLOSE
from vmahybrid.service.tickets import Tickets


class Here:
    """A worker of this namespace."""

    async def call_async(self, fn: Callable[..., Any], *args: Any) -> Any:
        return fn(*args)


HERE = cast(NetnsWorker, Here())


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


def pair(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    client = socket.create_connection(listener.getsockname())
    return client, listener.accept()[0]


def kept() -> tuple[Tickets, list[str]]:
    """And what was carried."""
    said: list[str] = []
    return Tickets(said.append), said


def over(tickets: Tickets) -> None:
    """Nothing is left to be carried."""
    tickets.close()
    assert tickets.relays.process is not None
    assert tickets.relays.process.wait(3) == 0


async def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 3
    while not done():
        assert time.monotonic() < end
        await asyncio.sleep(0.005)


def closed(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return True
    return False


def test_it_is_given_for_its_ticket(listener: socket.socket) -> None:
    async def play() -> None:
        tickets, _ = kept()
        client, connection = pair(listener)
        ticket, accepted = pair(listener)
        tickets.keep(connection.detach(), ticket.detach(), HERE)
        with pytest.raises(Refused):
            tickets.fetch(os.dup(client.fileno()), 1)      # nothing is known of it
        number = tickets.fetch(os.dup(accepted.fileno()), 1)
        with pytest.raises(Refused):
            tickets.hand(number, 2)         # it was another one's question
        with tickets.hand(number, 1) as got:
            client.sendall(b"question")
            assert got.recv(100) == b"question"
        with pytest.raises(Refused):
            tickets.fetch(accepted.detach(), 1)            # once
        client.close()

    asyncio.run(play())


def test_it_is_reset_with_its_ticket(listener: socket.socket) -> None:
    async def play() -> None:
        tickets, said = kept()
        client, connection = pair(listener)
        ticket, accepted = pair(listener)
        tickets.keep(connection.detach(), ticket.detach(), HERE)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        accepted.close()
        client.setblocking(False)

        def reset() -> bool:
            try:
                return not client.recv(1)
            except BlockingIOError:
                return False
            except ConnectionResetError:
                return True

        await until(reset)
        with pytest.raises(Refused):
            tickets.fetch(os.dup(client.fileno()), 1)
        client.close()
        assert not said

    asyncio.run(play())


@pytest.mark.parametrize("first", ["it writes", "it waits", "it ends", "the service stops"])
def test_who_does_not_bring_it_uses_it(listener: socket.socket, first: str) -> None:
    async def play() -> None:
        tickets, said = kept()
        client, connection = pair(listener)
        client.sendall(b"question")
        ticket, accepted = pair(listener)
        tickets.keep(connection.detach(), ticket.detach(), HERE)
        accepted.setblocking(False)
        loop = asyncio.get_running_loop()
        assert await loop.sock_recv(accepted, 100) == b"question"   # before anybody knows
        client.setblocking(False)
        if first == "it writes":
            accepted.send(b"answer")
        elif first == "it ends":
            accepted.shutdown(socket.SHUT_WR)
        elif first == "the service stops":
            tickets.close()
        await until(lambda: bool(said))
        if first != "it writes" and first != "it ends":
            accepted.send(b"answer")
        if first != "it ends":
            assert await loop.sock_recv(client, 100) == b"answer"
            accepted.shutdown(socket.SHUT_WR)
        assert await loop.sock_recv(client, 100) == b""
        client.send(b"more")
        client.shutdown(socket.SHUT_WR)
        assert await loop.sock_recv(accepted, 100) == b"more"
        assert await loop.sock_recv(accepted, 100) == b""
        with pytest.raises(Refused):
            tickets.fetch(accepted.detach(), 1)
        client.close()
        over(tickets)

    asyncio.run(play())


@pytest.mark.parametrize("half", [False, True], ids=["amid data", "after a FIN"])
def test_a_reset_comes_after_what_was_acknowledged(listener: socket.socket, half: bool) -> None:
    async def play() -> None:
        tickets, said = kept()
        client, connection = pair(listener)
        ticket, accepted = pair(listener)
        tickets.keep(connection.detach(), ticket.detach(), HERE)
        accepted.sendall(b"hello")
        await until(lambda: bool(said))
        assert client.recv(5, socket.MSG_WAITALL) == b"hello"
        client.sendall(bytes(100000))
        await until(lambda: not struct.unpack("i", fcntl.ioctl(client, termios.TIOCOUTQ, bytes(4)))[0])
        got = 0
        if half:
            client.shutdown(socket.SHUT_WR)
            while data := accepted.recv(65536):
                got += len(data)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        client.close()
        poll = select.poll()
        poll.register(accepted, 0)
        assert poll.poll(3000)[0][1] & select.POLLERR
        while not half and got < 100000:
            got += len(accepted.recv(65536))
        assert got == 100000
        with pytest.raises(BrokenPipeError if half else ConnectionResetError):
            accepted.sendall(b"x" if half else accepted.recv(1))
        accepted.close()
        over(tickets)

    asyncio.run(play())


@pytest.mark.parametrize("which", [0, 1])
def test_what_is_no_tcp_socket_is_refused_and_closed(listener: socket.socket, which: int) -> None:
    async def play() -> None:
        client, connection = pair(listener)
        others = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM).detach(), socket.socket(socket.AF_UNIX).detach(),
                  os.open("/dev/null", os.O_RDONLY)]
        for other in others:
            fds = [os.dup(connection.fileno()), os.dup(connection.fileno())]
            os.dup2(other, fds[which])
            with pytest.raises(Refused):
                kept()[0].keep(*fds, HERE)
            await until(lambda fds=fds: all(map(closed, fds)))  # type: ignore[misc]
            os.close(other)
        fds = [os.dup(connection.fileno()), socket.socket().detach()]   # a ticket that goes nowhere
        with pytest.raises(Refused):
            kept()[0].keep(*fds, HERE)
        await until(lambda: all(map(closed, fds)))
        client.close()
        connection.close()

    asyncio.run(play())
