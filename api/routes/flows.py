"""/v1/flows: the steering table, and the operator's rules in it."""

from typing import Annotated

from fastapi import APIRouter, Path, Response

from api.deps import View
from api.models import Flow, NewFlow
from api.problems import responses
from vmahybrid.service.view import FlowView

router = APIRouter(prefix="/v1/flows", tags=["flows"])
FlowId = Annotated[
    int,
    Path(description="the service's number of the flow", ge=0, le=2**63 - 1,
         json_schema_extra={"x-identifier": True}),
]  # fmt: skip


@router.get("", response_model=list[Flow])
async def flows(view: View) -> list[FlowView]:
    """The steering table as mirrored into XDP, with owner, ring, reason and hit counters."""
    return view.flows()


@router.post("", response_model=Flow, status_code=201, responses=responses(409))
async def add_flow(view: View, new: NewFlow, response: Response) -> FlowView:
    """Adds an operator's rule; the flows that it covers go home to the kernel."""
    made = await view.add_flow(**new.model_dump())
    response.headers["Location"] = f"/v1/flows/{made.flow_id}"
    return made


@router.get("/{flow_id}", response_model=Flow, responses=responses(404))
async def flow(view: View, flow_id: FlowId) -> FlowView:
    """One row of the steering table."""
    return view.flow(flow_id)


@router.delete("/{flow_id}", status_code=204, responses=responses(404))
async def delete_flow(view: View, flow_id: FlowId) -> None:
    """Removes an operator's rule, or sends a socket's flow home to the kernel."""
    await view.delete_flow(flow_id)
