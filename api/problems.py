"""Every error of the API is application/problem+json (RFC 9457) with the remedy; nothing of a traceback leaves."""

import json
import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from api.models import Problem
from vmahybrid.errors import NotFound, NotPossibleHere, Refused, ServiceUnreachable, UsageError, VmahybridError
from vmahybrid.steering.reasons import Reason

log = logging.getLogger(__name__)
MEDIA_TYPE = "application/problem+json"
_STATUS: list[tuple[type[VmahybridError], int, str, str]] = [
    (UsageError, 422, "usage", "The request can't be understood"),
    (NotFound, 404, "not-found", "No such object"),
    (Refused, 409, "refused", "The service refuses"),
    (NotPossibleHere, 501, "not-possible-here", "This machine lacks something"),
    (ServiceUnreachable, 503, "unreachable", "The service does not answer"),
    (VmahybridError, 500, "failed", "The request failed"),
]
_HTTP = {
    400: ("bad-request", "The request is malformed", "see GET /openapi.json for what may be sent"),
    401: ("unauthorized", "The bearer token is missing or wrong", "send the header Authorization: Bearer TOKEN"),
    404: ("not-found", "No such resource", "see GET /openapi.json for the paths"),
    405: ("method-not-allowed", "The method is not allowed here", "see GET /openapi.json for the methods of this path"),
}


class ProblemResponse(JSONResponse):
    media_type = MEDIA_TYPE


def problem(status: int, slug: str, title: str, detail: str, remedy: str, reason: str | None = None) -> ProblemResponse:
    body = Problem(
        type=f"urn:vmahybrid:problem:{slug}", title=title, status=status, detail=detail, remedy=remedy, reason=reason
    )
    return ProblemResponse(body.model_dump(exclude_none=True), status_code=status)


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI entries for the errors of a route; the application adds 401, 422 and 500 to all."""
    titles = {status: title for _, status, _, title in _STATUS} | {code: text[1] for code, text in _HTTP.items()}
    schema = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {code: {"description": titles[code], "content": schema} for code in statuses}


def from_error(error: VmahybridError) -> ProblemResponse:
    _, status, slug, title = next(row for row in _STATUS if isinstance(error, row[0]))
    reason = Reason.from_code(error.reason).slug if isinstance(error, Refused) else None
    return problem(status, slug, title, f"{error.what}: {error.why}", error.remedy, reason)


def from_validation(error: RequestValidationError) -> ProblemResponse:
    """Names every wrong field and its value; the value is shortened, it may be anything."""
    details = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"])
        value = "" if item["type"] in {"missing", "json_invalid"} else f" (got {_shown(item.get('input'))})"
        details.append(f"{where}: {item['msg']}{value}")
    return problem(422, "usage", "The request can't be understood", "; ".join(details), "correct the field named")


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def install(app: FastAPI) -> None:
    @app.exception_handler(VmahybridError)
    async def known(_request: Request, error: VmahybridError) -> ProblemResponse:
        return from_error(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> ProblemResponse:
        return from_validation(error)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> ProblemResponse:
        slug, title, remedy = _HTTP.get(error.status_code, ("http", "The request failed", ""))
        answer = problem(error.status_code, slug, title, f"{request.method} {request.url.path}: {error.detail}", remedy)
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> ProblemResponse:
        log.error("%s %s failed: %r", request.method, request.url.path, error)
        return problem(
            500,
            "failed",
            "The request failed",
            f"{request.method} {request.url.path}: an unexpected error in the service",
            "see the log of the service, and report it",
        )
