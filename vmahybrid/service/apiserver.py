"""The REST API in the service's own event loop: uvicorn on sockets that we bind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn

from vmahybrid.config.service import ServiceConfig
from vmahybrid.errors import UsageError, VmahybridError
from vmahybrid.service.instance import listener, refuse_other_files, remove_socket
from vmahybrid.service.view import ServiceView

GRACE_SECONDS = 1  # for requests under way when the service stops
TOKEN_MIN = 16     # characters


def _worth_telling(record: logging.LogRecord) -> bool:
    """Not that a request was ended by the end of the service."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ended = asyncio.Event()

    def end(self) -> None:
        self.should_exit = True
        self._ended.set()

    async def main_loop(self) -> None:
        """Once a second, for the date in answers: uvicorn's own, ten times a second, is half an idle service's work."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), 1)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the service's."""
        yield


class ApiServer:
    """``open`` binds and serves, ``close`` ends it and removes the Unix socket."""

    def __init__(self, config: ServiceConfig, view: ServiceView, version: str,
                 make_directory: Callable[[Path], None]) -> None:
        self._config, self._view, self._version, self._make_directory = config, view, version, make_directory
        self._sockets: list[socket.socket] = []
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None
        self.addresses: list[str] = []

    async def open(self) -> None:
        """Returns when requests are answered. Raises VmahybridError, OSError."""
        from api.app import create_app

        token = read_token(self._config["api.token_file"]) if self._config["api.tcp"] else None
        self._bind_unix(Path(self._config["api.unix"]))
        if self._config["api.tcp"]:
            self._bind_tcp(self._config["api.tcp"])
        app: Any = create_app(self._view, token=token, version=self._version)
        settings = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", http="h11", ws="none",
                                  server_header=False, timeout_graceful_shutdown=GRACE_SECONDS)
        logging.getLogger("uvicorn.error").addFilter(_worth_telling)
        self._server = _Server(settings)
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets=self._sockets), name="api")
        while not self._server.started:
            if self._task.done():
                await self._task
                raise VmahybridError("api", "the HTTP server ended at once", "see the log")
            await asyncio.sleep(0.005)

    def _bind_unix(self, path: Path) -> None:
        refuse_other_files("api.unix", path)
        try:
            self._make_directory(path)
        except OSError as error:
            raise VmahybridError("api.unix", f"{error.filename}: {error.strerror}", "choose another path") from None
        if (pid := listener(path)) is not None:
            raise VmahybridError(f"api socket {path}", f"process {pid} listens there", "set api.unix to another path")
        remove_socket(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sockets.append(sock)
        old = os.umask(0o777)
        try:
            sock.bind(str(path))
        finally:
            os.umask(old)
        sock.listen(128)
        os.chmod(path, self._config["api.mode"])
        self.addresses.append(f"unix:{path}")

    def _bind_tcp(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        try:
            found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            sock = socket.socket(found[0], socket.SOCK_STREAM)
            self._sockets.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(found[4])
        except OSError as error:
            raise VmahybridError(f"api.tcp {address}", error.strerror or str(error), "choose another address") from None
        sock.listen(128)
        self.addresses.append(f"http://{address}")

    async def close(self) -> None:
        """Idempotent."""
        server, task, self._task = self._server, self._task, None
        if server is not None and task is not None:
            server.end()
            done, _ = await asyncio.wait([task], timeout=GRACE_SECONDS)
            if not done:
                server.force_exit = True
                task.cancel()
                await asyncio.wait([task], timeout=0.2)
        for sock in self._sockets:
            sock.close()
        if self._sockets:
            remove_socket(Path(self._config["api.unix"]))
        self._sockets.clear()


def read_token(file: str) -> str:
    """The bearer token of a file: its first line. Raises UsageError, also for one that others may read."""
    try:
        mode = os.stat(file).st_mode
        if not stat.S_ISREG(mode):
            raise UsageError("api.token_file", f"{file} is no regular file", "openssl rand -hex 32 > FILE")
        token = Path(file).read_text("ascii").strip()
    except OSError as error:
        raise UsageError("api.token_file", f"{file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError("api.token_file", f"{file} is not ASCII text", "openssl rand -hex 32 > FILE") from None
    if mode & 0o077:
        raise UsageError("api.token_file", f"{file} may be read by others (mode {mode & 0o777:04o})",
                         f"chmod 600 {file}")
    if len(token) < TOKEN_MIN or len(token.split()) != 1:
        raise UsageError("api.token_file", f"{file} holds no token of at least {TOKEN_MIN} characters",
                         f"openssl rand -hex 32 > {file}")
    return token
