"""The OpenAPI document leaves nothing out, and the models nothing of the views."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from fake_view import FakeView

from api import create_app, models
from vmahybrid.service import view as views

DOCUMENT = create_app(FakeView(), version="0.1.0").openapi()
PATHS = {
    "/v1/status", "/v1/interfaces", "/v1/rings", "/v1/flows", "/v1/flows/{flow_id}", "/v1/processes",
    "/v1/processes/{pid}", "/v1/processes/{pid}/zero", "/v1/processes/{pid}/log", "/v1/processes/{pid}/dump-fd",
    "/v1/processes/{pid}/move", "/v1/sockets", "/v1/sockets/{socket_id}/explain", "/v1/stats", "/v1/stats/{pid}",
    "/v1/config", "/v1/config/schema", "/v1/config/parameters", "/v1/config/parameters/schema", "/v1/parameters",
    "/v1/events", "/metrics", "/healthz", "/readyz",
}  # fmt: skip


def operations() -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def properties() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, schema in DOCUMENT["components"]["schemas"].items():
        for field, prop in schema.get("properties", {}).items():
            yield f"{name}.{field}", prop


def types(schema: Any) -> set[str]:
    """Every JSON type inside, but not inside a referenced model, which is looked at on its own."""
    found = {schema["type"]} if isinstance(schema.get("type"), str) else set()
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            found |= types(schema[key])
    for part in schema.get("anyOf", []):
        found |= types(part)
    return found


def lacking(name: str, schema: dict[str, Any], described: dict[str, Any]) -> list[str]:
    out = [] if described.get("description") else [f"{name}: no description"]
    if types(schema) & {"integer", "number"} and not ({"x-unit", "x-identifier"} & schema.keys()):
        out.append(f"{name}: a number without x-unit or x-identifier")
    return out


def test_all_routes_are_there() -> None:
    assert set(DOCUMENT["paths"]) == PATHS


def test_every_field_has_a_description_and_every_quantity_a_unit() -> None:
    assert [line for name, prop in properties() for line in lacking(name, prop, prop)] == []


def test_events_have_a_schema() -> None:
    content = DOCUMENT["paths"]["/v1/events"]["get"]["responses"]["200"]["content"]
    (schema,) = (media["schema"] for media in content.values())
    assert list(content) == ["text/event-stream"]
    assert schema == {"type": "object", "$ref": "#/components/schemas/Event"}
    fields = {name for name, _ in properties() if name.startswith("Event")}
    assert {f"Event.{name}" for name in ("serial", "time", "kind", "text", "data")} < fields
    assert "EventData.flow_id" in fields


def test_every_parameter_has_a_description_and_every_quantity_a_unit() -> None:
    found = 0
    for name, operation in operations():
        for parameter in operation.get("parameters", []):
            found += 1
            schema = parameter["schema"] | {k: v for k, v in parameter.items() if k.startswith("x-")}
            assert lacking(f"{name} {parameter['name']}", schema, parameter) == []
    assert found > 8


def test_the_walk_finds_what_is_missing() -> None:
    assert lacking("a", {"type": "integer"}, {}) == ["a: no description", "a: a number without x-unit or x-identifier"]
    nested = {"description": "d", "anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "number"}}]}
    assert lacking("a", nested, nested) == ["a: a number without x-unit or x-identifier"]
    assert lacking("a", nested | {"x-unit": "bytes"}, nested) == []


def test_every_operation_is_documented_and_its_errors_are_problems() -> None:
    for name, operation in operations():
        assert operation.get("description"), name
        assert operation.get("tags"), name
        for status, response in operation["responses"].items():
            assert response["description"], name
            if int(status) >= 400 and not (name == "GET /readyz" and status == "503"):
                assert list(response["content"]) == ["application/problem+json"], f"{name} {status}"
        assert {"401", "422", "500"} <= operation["responses"].keys(), name
    assert "HTTPValidationError" not in DOCUMENT["components"]["schemas"]


def test_references_resolve() -> None:
    def walk(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            if isinstance(node.get("$ref"), str):
                yield node["$ref"]
            for value in node.values():
                yield from walk(value)
        elif isinstance(node, list):
            for value in node:
                yield from walk(value)

    for reference in walk(DOCUMENT):
        assert reference.removeprefix("#/components/schemas/") in DOCUMENT["components"]["schemas"], reference


def test_operation_ids_are_unique() -> None:
    ids = [operation["operationId"] for _, operation in operations()]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("name", [
    "Interface", "Ring", "Flow", "Socket", "Iomux", "Process", "ProcessStats", "ExplainStep", "Status",
])  # fmt: skip
def test_models_have_the_fields_of_the_views(name: str) -> None:
    view = getattr(views, name if name in {"ProcessStats", "ExplainStep"} else f"{name}View")
    assert list(getattr(models, name).model_fields) == [field.name for field in dataclasses.fields(view)]
