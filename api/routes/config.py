"""/v1/config: what can be set, where a value came from, and the shim's VMA_* variables (also as /v1/parameters)."""

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


@router.get("/config/parameters/schema", response_model=ConfigSchema, response_model_by_alias=True)
async def parameters_schema() -> ConfigSchema:
    """What each VMA_* parameter takes, as one JSON Schema: an object of names and values."""
    return ConfigSchema.model_validate({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "VMA_* parameters of programs under libvmahybrid.so",
        "type": "object",
        "additionalProperties": False,
        "properties": {p.name: parameter_schema(p) for p in catalogue.load().parameters},
    })


def parameter_schema(p: catalogue.Parameter) -> dict[str, Any]:
    default: Any = bool(p.default) if p.type == "bool" else p.show(p.default) if p.choices else p.default
    accepts: dict[str, Any]
    if p.type == "int":
        accepts = {"type": "integer", "minimum": p.minimum, "maximum": p.maximum}
        if p.also:
            accepts = {"anyOf": [accepts, {"enum": list(p.also)}]}
    elif p.type == "bool":
        accepts = {"type": "boolean"}
    elif p.type == "enum":
        accepts = {"type": "string", "enum": [word for choice in p.choices for word in choice.words]}
    else:
        accepts = {"type": "string", "maxLength": p.max_length, **({"pattern": p.syntax.pattern} if p.syntax else {})}
    more = {"title": p.label, "description": p.text, "default": default, "readOnly": not p.live}
    return {**accepts, **more, **({"x-unit": p.unit} if p.unit else {})}


@router.get("/parameters", response_model=Parameters)
async def parameters() -> Parameters:
    """The same as GET /v1/config/parameters."""
    return await config_parameters()


@router.get("/config/parameters", response_model=Parameters)
async def config_parameters() -> Parameters:
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
