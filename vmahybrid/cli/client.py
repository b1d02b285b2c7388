"""A client of the API on its Unix socket, for vmahybrid and vma_stats. Errors come back as vmahybrid.errors.

http.client rather than httpx: a third of the start-up time, the exact errno of a failed connect, and httpcore leaves
the socket of a failed connect open.
"""

import grp
import http.client
import json
import socket
import struct
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

from vmahybrid.cli.foreign import Pids
from vmahybrid.cli.paths import api_socket
from vmahybrid.errors import NotFound, NotPossibleHere, Refused, ServiceUnreachable, UsageError, VmahybridError
from vmahybrid.net import pidns
from vmahybrid.steering.reasons import Reason

TIMEOUT = 10.0  # seconds; the service answers from memory
_ERRORS: dict[str, type[VmahybridError]] = {
    "usage": UsageError,
    "not-found": NotFound,
    "not-possible-here": NotPossibleHere,
    "unreachable": ServiceUnreachable,
}


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("vmahybrid", timeout=TIMEOUT)
        self._path = path
        self.asked = False  # something, on this connection

    def connect(self) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(TIMEOUT)
            sock.connect(str(self._path))
        except BaseException:
            sock.close()
            raise
        self.sock = sock
        self.asked = False


class Client:
    """``with Client() as client: client.get("v1", "status")``. Raises VmahybridError of the fitting kind."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or api_socket()
        self._http = _UnixConnection(self.path)
        self._namespace: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._http.close()

    def get(self, *path: str | int) -> Any:
        """JSON of ``/part/part``; the parts are quoted."""
        return self._ask("GET", path)

    def post(self, *path: str | int, body: Any = None) -> Any:
        return self._ask("POST", path, body)

    def patch(self, *path: str | int, body: Any) -> Any:
        return self._ask("PATCH", path, body)

    def delete(self, *path: str | int) -> Any:
        return self._ask("DELETE", path)

    def _ask(self, method: str, parts: tuple[str | int, ...], body: Any = None) -> Any:
        namespace = self._foreign()
        if not namespace:
            return self._ask_as_is(method, parts, body)
        pids = Pids(self._ask_as_is("GET", ("v1", "processes")), namespace)
        return pids.answer(parts, self._ask_as_is(method, pids.request(parts), body))

    def _foreign(self) -> int:
        """Our PID namespace where the service is not seen in it, else 0."""
        if self._namespace is not None:
            return self._namespace
        try:
            self._http.connect()
            pid = struct.unpack("=iII", self._http.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        except OSError as error:
            self._http.close()
            raise self._unreachable(error) from error
        self._namespace = 0 if pid else pidns.current()
        return self._namespace

    def _ask_as_is(self, method: str, parts: tuple[str | int, ...], body: Any = None) -> Any:
        path = "/" + "/".join(quote(str(part), safe=":") for part in parts)
        data = None if body is None else json.dumps(body).encode()
        try:
            status, content = self._exchange(method, path, data)
        except (OSError, http.client.HTTPException) as error:
            self._http.close()
            raise self._unreachable(error) from error
        if 200 <= status < 300:
            return json.loads(content) if content else None
        raise _failed(status, content, f"{method} {path}")

    def _exchange(self, method: str, path: str, data: bytes | None) -> tuple[int, bytes]:
        headers = {} if data is None else {"Content-Type": "application/json"}
        if method != "GET" and self._http.asked:
            # Only what is safe to repeat may meet a connection that the server has closed meanwhile.
            self._http.close()
        kept = self._http.sock is not None and self._http.asked
        try:
            self._http.request(method, path, data, headers)
            self._http.asked = True
            response = self._http.getresponse()
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
            if not kept:  # the server closes connections that idle, between two cycles of vma_stats say
                raise
            self._http.close()
            self._http.request(method, path, data, headers)
            self._http.asked = True
            response = self._http.getresponse()
        return response.status, response.read()

    def _unreachable(self, error: Exception) -> ServiceUnreachable:
        what = f"service at {self.path}"
        match error:
            case FileNotFoundError():
                return ServiceUnreachable(what, "no such socket", "start it: vmahybrid start")
            case PermissionError():
                return ServiceUnreachable(what, "permission denied", _who_may(self.path))
            case TimeoutError():
                return ServiceUnreachable(what, f"no answer within {TIMEOUT:g} s", "look at its log, or start it again")
            case OSError(strerror=str(why)) if why:
                return ServiceUnreachable(what, why.lower(), "start it: vmahybrid start")
        return ServiceUnreachable(what, str(error) or "it hung up", "start it: vmahybrid start")


def _who_may(path: Path) -> str:
    """Who is not let in hears who is; the group is root's own unless somebody has changed it."""
    try:
        held = path.stat()
        group = grp.getgrgid(held.st_gid).gr_name if held.st_mode & 0o020 and held.st_gid else ""
    except (OSError, KeyError):
        group = ""
    return f"ask as root, or join the group {group}" if group else "ask as root, or set api.mode of the service"


def _failed(status: int, content: bytes, request: str) -> VmahybridError:
    try:
        problem = json.loads(content)
        kind = problem["type"].rpartition(":")[2]
        what, _, why = problem["detail"].partition(": ")
        remedy = problem["remedy"]
        reason = Reason.from_slug(problem.get("reason") or "none")
    except (ValueError, KeyError, TypeError, AttributeError):
        return VmahybridError(request, f"HTTP {status}", "is this the API of vmahybrid?")
    if kind == "refused":
        return Refused(what, why, remedy, int(reason))
    return _ERRORS.get(kind, VmahybridError)(what, why, remedy)
