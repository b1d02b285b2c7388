"""Puts the application together: routes, errors, security, and an OpenAPI document that leaves nothing out."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry

from api import problems
from api.metrics import ServiceCollector
from api.models import Problem
from api.routes import config, flows, metrics, processes, service
from api.security import TokenRequired
from vmahybrid.service.view import ServiceView

DESCRIPTION = """Management of vmahybrid. Quantities carry their unit as `x-unit`; numbers that are none (pids, ports,
handles) carry `x-identifier`. Errors are `application/problem+json` with a `remedy`. On the Unix socket nothing else
is needed; over TCP every request carries `Authorization: Bearer TOKEN`."""


def create_app(view: ServiceView, *, token: str | None = None, version: str) -> FastAPI:
    """The application for the Unix socket and, with ``token``, for TCP; without one every TCP request is refused.

    Serve it with uvicorn: the security looks at uvicorn's ``scope["server"]``. All calls of ``view`` are made on the
    event loop that serves.
    """
    app = FastAPI(
        title="vmahybrid",
        version=version,
        description=DESCRIPTION,
        generate_unique_id_function=_operation_id,
        responses=problems.responses(400, 401, 422, 500),
        docs_url=None,  # both would load scripts from another host
        redoc_url=None,
    )
    app.state.view = view
    app.state.registry = CollectorRegistry()
    app.state.registry.register(ServiceCollector(view, version))
    problems.install(app)
    for part in (service, flows, processes, config, metrics):
        app.include_router(part.router)
    app.add_middleware(TokenRequired, token=token)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _operation_id(route: APIRoute) -> str:
    return route.name


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document, and the schema of errors, which no route names as its model."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        components = document.setdefault("components", {})
        components["schemas"]["Problem"] = Problem.model_json_schema()
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer", "description": "over TCP only; the token of the service"}
        }
        document["security"] = [{}, {"bearer": []}]
        app.openapi_schema = document
    return app.openapi_schema
