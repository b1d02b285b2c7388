"""service/tickets.py: what is kept is given to who accepted its ticket, and reset when that ends otherwise."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from vmahybrid.errors import Refused
from vmahybrid.service.tickets import Tickets


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


def pair(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    client = socket.create_connection(listener.getsockname())
    return client, listener.accept()[0]


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
        tickets = Tickets()
        client, connection = pair(listener)
        ticket, accepted = pair(listener)
        tickets.keep(connection.detach(), ticket.detach())
        with pytest.raises(Refused):
            tickets.fetch(os.dup(client.fileno()))      # nothing is known of it
        with tickets.fetch(os.dup(accepted.fileno())) as got:
            client.sendall(b"question")
            assert got.recv(100) == b"question"
        with pytest.raises(Refused):
            tickets.fetch(accepted.detach())            # once
        client.close()

    asyncio.run(play())


@pytest.mark.parametrize("how", ["closed", "written to", "the service stops"])
def test_it_is_reset(listener: socket.socket, how: str) -> None:
    async def play() -> None:
        tickets = Tickets()
        client, connection = pair(listener)
        ticket, accepted = pair(listener)
        tickets.keep(connection.detach(), ticket.detach())
        if how == "closed":
            accepted.close()
        elif how == "written to":
            accepted.sendall(b"who is there?")
        else:
            tickets.close()
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
            tickets.fetch(os.dup(client.fileno() if how == "closed" else accepted.fileno()))
        client.close()
        accepted.close()

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
                Tickets().keep(*fds)
            await until(lambda fds=fds: all(map(closed, fds)))  # type: ignore[misc]
            os.close(other)
        fds = [os.dup(connection.fileno()), socket.socket().detach()]   # a ticket that goes nowhere
        with pytest.raises(Refused):
            Tickets().keep(*fds)
        await until(lambda: all(map(closed, fds)))
        client.close()
        connection.close()

    asyncio.run(play())
