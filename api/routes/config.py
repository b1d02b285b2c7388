"""/v1/config and /v1/parameters: what can be set, where a value came from, and the shim's VMA_* variables."""

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Body

from api.deps import View
from api.models import Parameter, Parameters, Profile, Setting
from vmahybrid.config import catalogue

router = APIRouter(prefix="/v1", tags=["configuration"])


@router.get("/config", response_model=dict[str, Setting])
async def config(view: View) -> Mapping[str, Any]:
    """Every configuration key with value, default, origin and whether it can be changed live."""
    return view.config()


@router.patch("/config", response_model=dict[str, Setting])
async def patch_config(
    view: View,
    changes: Annotated[
        dict[str, Any],
        Body(description="new values by key; all are taken or none", examples=[{"limits.rules": 2048}]),
    ],
) -> Mapping[str, Any]:
    """Changes values of the running service. An unknown key, a wrong type or a key that is not live is refused."""
    return await view.patch_config(changes)


@router.get("/parameters", response_model=Parameters)
async def parameters() -> Parameters:
    """The catalogue of VMA_* parameters and profiles of the shim."""
    known = catalogue.load()
    return Parameters(
        parameters=[
            Parameter(
                name=p.name,
                label=p.label,
                type=p.type,
                default=p.show(p.default),
                unit=p.unit,
                expected=p.expected(),
                acts=p.acts,
                backends=list(p.backends),
                live=p.live,
                text=p.text,
            )
            for p in known.parameters
        ],
        profiles=[
            Profile(
                name=p.name,
                title=p.title,
                text=p.text,
                values={name: known[name].show(value) for name, value in p.values.items()},
            )
            for p in known.profiles
        ],
    )
