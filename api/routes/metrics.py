"""/metrics: the Prometheus text format."""

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

router = APIRouter(tags=["probes"])
_FORMAT = {"schema": {"type": "string", "description": "Prometheus text format"}}


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"description": "metrics", "content": {"text/plain": _FORMAT}}},
)
async def metrics(request: Request) -> Response:
    """Metrics of the service, its interfaces and the programs under the shim."""
    return Response(generate_latest(request.app.state.registry), media_type=CONTENT_TYPE_LATEST)
