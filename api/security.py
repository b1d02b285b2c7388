"""Who may talk to the API: on the Unix socket whoever its file mode lets in, over TCP only who holds the token."""

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from api.problems import problem


def over_unix(scope: Scope) -> bool:
    """uvicorn gives a Unix listener as ``(path, None)`` in ``server``.

    ``client`` would not do: it is None for a TCP peer that has already hung up, too.
    """
    server = scope.get("server")
    return server is not None and server[1] is None


class TokenRequired:
    """Lets a request of a Unix socket through; any other must carry the bearer token, and fails if none is set."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in {"http", "websocket"} or over_unix(scope) or self._admits(scope):
            await self._app(scope, receive, send)
            return
        answer = problem(
            401,
            "unauthorized",
            "The bearer token is missing or wrong",
            f"{scope.get('method', 'CONNECT')} {scope['path']}: every request over TCP needs the bearer token",
            "send the header Authorization: Bearer TOKEN, or use the Unix socket",
        )
        answer.headers["WWW-Authenticate"] = 'Bearer realm="vmahybrid"'
        await answer(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        if not self._token:
            return False
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, token = given[0].partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._token.encode())
