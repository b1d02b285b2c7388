"""uvloop on connections on rings: its libuv registers what it waits for by io_uring, not by epoll_ctl()."""

from __future__ import annotations

import sys

import pytest
from apps import test_tcp_programs
from apps.shimmed import stop
from apps.test_tcp_programs import TcpStage, served, stage  # noqa: F401

pytestmark = pytest.mark.apps

WAYS = [("offload", "both"), ("offload", "server"), ("offload", "client"), ("adaptive", "both"),
        ("adaptive", "server"), ("adaptive", "client")]  # fmt: skip
ECHO = "import uvloop\nuvloop.install()" + test_tcp_programs.ECHO
# one connection of 2,000 rounds; then several at a time, which begin and end
ASK = """
import asyncio, sys, uvloop
async def ask(rounds, size):
    reader, writer = await asyncio.open_connection(sys.argv[1], 7777)
    for n in range(rounds):
        sent = n.to_bytes(4) * (1 + n * size % 500)
        writer.write(sent)
        assert await reader.readexactly(len(sent)) == sent, n
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()
async def main():
    await asyncio.wait_for(ask(2000, 7), 30)
    for _ in range(3):
        await asyncio.wait_for(asyncio.gather(*(ask(50, n) for n in range(10))), 20)
    print("answered")
uvloop.run(main())
"""


@pytest.mark.parametrize("stage", WAYS, ids=[f"{policy}-{side}" for policy, side in WAYS], indirect=True)
def test_uvloop(stage: TcpStage) -> None:  # noqa: F811
    serving = stage.serve(sys.executable, "-c", ECHO, stage.address)
    serving.wait_for("listening")
    assert "answered" in stage.client(sys.executable, "-c", ASK, stage.address).result(60)
    stop(serving)
    stage.used_rings("server", "client")
