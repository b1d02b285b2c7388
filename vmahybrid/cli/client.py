"""A client of the API on its Unix socket, for vmahybrid and vma_stats. Errors come back as vmahybrid.errors.

httpx is imported with this module, which the CLIs import only when they have something to ask.
"""

from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx

from vmahybrid.cli.paths import api_socket
from vmahybrid.errors import NotFound, NotPossibleHere, Refused, ServiceUnreachable, UsageError, VmahybridError
from vmahybrid.steering.reasons import Reason

TIMEOUT = 10.0  # seconds; the service answers from memory
_ERRORS: dict[str, type[VmahybridError]] = {
    "usage": UsageError,
    "not-found": NotFound,
    "not-possible-here": NotPossibleHere,
    "unreachable": ServiceUnreachable,
}


class Client:
    """``with Client() as client: client.get("/v1/status")``. Raises VmahybridError of the fitting kind."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or api_socket()
        transport = httpx.HTTPTransport(uds=str(self.path))
        self._http = httpx.Client(transport=transport, base_url="http://vmahybrid", timeout=TIMEOUT)

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
        path = "/" + "/".join(quote(str(part), safe=":") for part in parts)
        try:
            response = self._http.request(method, path, json=body)
        except httpx.TimeoutException as error:
            raise ServiceUnreachable(
                f"service at {self.path}", f"no answer within {TIMEOUT:g} s", "look at its log, or start it again"
            ) from error
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        if response.is_success:
            return response.json() if response.content else None
        raise _failed(response, f"{method} {path}")

    def _unreachable(self, error: Exception) -> ServiceUnreachable:
        try:
            self.path.stat()
        except FileNotFoundError:
            return ServiceUnreachable(f"service at {self.path}", "no such socket", "start it: vmahybrid start")
        except OSError as why:
            return ServiceUnreachable(f"service at {self.path}", str(why.strerror), "ask as root: sudo vmahybrid")
        if "Permission denied" in str(error):
            return ServiceUnreachable(
                f"service at {self.path}", "permission denied",
                "ask as root, or join the group of the socket",
            )  # fmt: skip
        return ServiceUnreachable(f"service at {self.path}", str(error) or "hung up", "start it: vmahybrid start")


def _failed(response: httpx.Response, request: str) -> VmahybridError:
    try:
        problem = response.json()
        kind = problem["type"].rpartition(":")[2]
        what, _, why = problem["detail"].partition(": ")
        remedy = problem["remedy"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return VmahybridError(request, f"HTTP {response.status_code}", "is this the API of vmahybrid?")
    if kind == "refused":
        return Refused(what, why, remedy, int(Reason.from_slug(problem.get("reason", "none"))))
    return _ERRORS.get(kind, VmahybridError)(what, why, remedy)
