"""/v1/config and /v1/parameters: what can be set, where a value came from, and the shim's VMA_* variables."""

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Body

from api.deps import View
from api.models import Choice, ConfigSchema, Parameter, Parameters, Profile, Setting
from vmahybrid.config import catalogue

router = APIRouter(prefix="/v1", tags=["configuration"])


@router.get("/config", response_model=dict[str, Setting])
async def config(view: View) -> Mapping[str, Any]:
    """Every configuration key with value, default, origin and whether it can be changed live."""
    return view.config()


@router.get("/config/schema", response_model=ConfigSchema, response_model_by_alias=True)
async def config_schema(view: View) -> ConfigSchema:
    """What each configuration key takes, as one JSON Schema; GET /v1/config has the same key by key."""
    return ConfigSchema.model_validate({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "configuration of the vmahybrid service",
        "type": "object",
        "additionalProperties": False,
        "properties": {name: key_schema(setting) for name, setting in view.config().items()},
    })


def key_schema(setting: Mapping[str, Any]) -> dict[str, Any]:
    more = {"description": setting["description"], "default": setting["default"], "readOnly": not setting["live"]}
    return {**setting["accepts"], **more, **({"x-unit": setting["unit"]} if setting["unit"] else {})}


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
                minimum=p.minimum,
                maximum=p.maximum,
                also=list(p.also),
                choices=[Choice(value=c.value, text=c.text, words=list(c.words)) for c in p.choices],
                max_length=p.max_length if p.type == "string" else None,
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
