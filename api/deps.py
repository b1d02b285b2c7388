"""What the routes get: the view of the service, and the ids in their paths."""

from typing import Annotated

from fastapi import Depends, Path, Request

from vmahybrid.service.view import ServiceView


def _view(request: Request) -> ServiceView:
    view: ServiceView = request.app.state.view
    return view


View = Annotated[ServiceView, Depends(_view)]
Pid = Annotated[
    int,
    Path(description="process id in the service's namespace", ge=1, le=2**31 - 1,
         json_schema_extra={"x-identifier": True}),
]  # fmt: skip
