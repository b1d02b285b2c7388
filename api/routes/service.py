"""/v1/status, interfaces, rings, events and the probes."""

from typing import Annotated

from fastapi import APIRouter, Header, Query, Response
from fastapi.responses import StreamingResponse

from api.deps import View
from api.events import MEDIA_TYPE, stream
from api.models import Event, Health, Interface, Ring, Status
from vmahybrid.service.view import InterfaceView, RingView, StatusView

router = APIRouter()
Serial = {"x-identifier": True}


class EventStream(StreamingResponse):
    media_type = MEDIA_TYPE


@router.get("/v1/status", response_model=Status, tags=["service"])
async def status(view: View) -> StatusView:
    """The whole picture: interfaces, processes, flows, and what is wrong."""
    return view.status()


@router.get("/v1/interfaces", response_model=list[Interface], tags=["service"])
async def interfaces(view: View) -> list[InterfaceView]:
    """Served interfaces, the mode obtained, and why not a better one."""
    return view.interfaces()


@router.get("/v1/rings", response_model=list[Ring], tags=["service"])
async def rings(view: View) -> list[RingView]:
    """Rings granted to processes."""
    return view.rings()


@router.get(
    "/v1/events",
    tags=["service"],
    response_class=EventStream,
    # without the type FastAPI says "string", since the class is none for JSON
    responses={200: {"model": Event, "description": "an endless stream of server-sent events, each with this as data",
                     "content": {MEDIA_TYPE: {"schema": {"type": "object"}}}}},
)
async def events(
    view: View,
    since: Annotated[
        int | None,
        Query(description="first events after this serial; 0 gives the backlog", ge=0, json_schema_extra=Serial),
    ] = None,
    last_event_id: Annotated[
        str | None, Header(description="serial of the last event seen, sent by clients that connect again")
    ] = None,
) -> Response:
    """What happens, as it happens. Last-Event-ID wins over `since`; an empty or odd one counts as none."""
    seen = int(last_event_id) if last_event_id and last_event_id.isascii() and last_event_id.isdigit() else since
    return EventStream(stream(view, seen or 0), headers={"Cache-Control": "no-store"})


@router.get("/healthz", response_model=Health, tags=["probes"])
async def healthz(view: View) -> Health:
    """The service runs and its loop turns."""
    return Health(status="ok", health=view.status().health)


@router.get(
    "/readyz",
    response_model=Health,
    tags=["probes"],
    responses={503: {"model": Health, "description": "programs can't be offloaded (yet)"}},
)
async def readyz(view: View, response: Response) -> Health:
    """Programs may be offloaded."""
    status = view.status()
    if not status.ready:
        response.status_code = 503
    return Health(status="ok" if status.ready else "unavailable", health=status.health)
