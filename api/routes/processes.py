"""/v1/processes, sockets and stats: the programs under the shim."""

from typing import Annotated

from fastapi import APIRouter, Path, Query

from api.deps import Pid, View
from api.models import DumpFd, Explanation, LogSettings, Move, Process, ProcessStats, Socket
from api.problems import responses
from vmahybrid.errors import NotFound
from vmahybrid.service import view as service

router = APIRouter(prefix="/v1", tags=["processes"])


@router.get("/processes", response_model=list[Process])
async def processes(view: View) -> list[service.ProcessView]:
    """Processes that said hello to the service."""
    return view.processes()


@router.get("/processes/{pid}", response_model=Process, responses=responses(404))
async def process(view: View, pid: Pid) -> service.ProcessView:
    """One process."""
    return view.process(pid)


@router.post("/processes/{pid}/zero", status_code=204, responses=responses(404))
async def zero(view: View, pid: Pid) -> None:
    """Asks the program to zero its counters."""
    await view.zero(pid)


@router.post("/processes/{pid}/log", status_code=204, responses=responses(404))
async def log_settings(view: View, pid: Pid, wanted: LogSettings) -> None:
    """Changes log level and details of the running program."""
    await view.set_log(pid, wanted.level, wanted.details)


@router.post("/processes/{pid}/dump-fd", status_code=204, responses=responses(404))
async def dump_fd(view: View, pid: Pid, wanted: DumpFd) -> None:
    """Asks the program to write the statistics of a descriptor into its log."""
    await view.dump_fd(pid, wanted.fd, wanted.level)


@router.post("/processes/{pid}/move", status_code=204, responses=responses(404))
async def move(view: View, pid: Pid, wanted: Move) -> None:
    """Asks the program to bring sockets home to the kernel, or TCP connections onto its rings. /v1/sockets tells what
    came of it."""
    await view.move(pid, wanted.fd, wanted.to)


@router.get("/sockets", response_model=list[Socket], responses=responses(404))
async def sockets(
    view: View,
    pid: Annotated[
        int | None,
        Query(description="only those of this process", ge=1, le=2**31 - 1, json_schema_extra={"x-identifier": True}),
    ] = None,
) -> list[service.SocketView]:
    """Sockets of the programs under the shim."""
    return view.sockets(pid)


@router.get("/sockets/{socket_id}/explain", response_model=Explanation, responses=responses(404))
async def explain(
    view: View,
    socket_id: Annotated[
        str, Path(description="PID:FD, PID or ADDR:PORT", max_length=64, examples=["4711:14", "10.0.0.1:11111"])
    ],
) -> Explanation:
    """Why a socket is or is not offloaded, step by step, with the remedy."""
    return Explanation.model_validate({"socket": socket_id, "steps": view.explain(socket_id)})


@router.get("/stats", response_model=list[ProcessStats])
async def all_stats(view: View) -> list[service.ProcessStats]:
    """One reading of every process; one that ends meanwhile is left out."""
    readings = []
    for known in view.processes():
        try:
            readings.append(view.stats(known.pid))
        except NotFound:
            continue
    return readings


@router.get("/stats/{pid}", response_model=ProcessStats, responses=responses(404))
async def stats(view: View, pid: Pid) -> service.ProcessStats:
    """One reading of a process's statistics page."""
    return view.stats(pid)
