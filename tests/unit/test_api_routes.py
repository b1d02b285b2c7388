"""Every route over the real ASGI stack: bodies, status codes, errors, and who may ask."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_view import FakeView, serve

from api import create_app
from api.events import stream
from vmahybrid.config.catalogue import load
from vmahybrid.service.view import EventView

UNIX, TCP = ("/run/api.sock", None), ("127.0.0.1", 8080)


def ask(
    view: FakeView,
    method: str,
    path: str,
    *,
    server: tuple[str, int | None] = UNIX,
    token: str | None = None,
    **more: Any,
) -> httpx.Response:
    """One request with the scope that uvicorn would make for a Unix or TCP listener."""
    app = create_app(view, token=token, version="0.1.0")

    async def with_server(scope: Any, receive: Any, send: Any) -> None:
        await app(scope | {"server": server}, receive, send)

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app=with_server, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            return await client.request(method, path, **more)

    return asyncio.run(run())


@pytest.fixture
def view() -> FakeView:
    return FakeView()


def problem(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    assert {"type", "title", "status", "detail", "remedy"} <= body.keys()
    assert body["status"] == status
    assert body["remedy"]
    return body


@pytest.mark.parametrize(("path", "check"), [
    ("/v1/status", lambda b: b["ready"] and b["processes"][0]["pid"] == 4711 and b["counters"]["grants_total"] == 2),
    ("/v1/interfaces", lambda b: b[0]["outs"] == {"redirect": 10, "pass-miss": 5} and b[0]["mode"] == "generic"),
    ("/v1/rings", lambda b: b[0]["frames"] == 4096 and b[0]["stats"]["rx_packets"] == 0),
    ("/v1/flows", lambda b: b[0]["packets"] == 100),
    ("/v1/flows/9", lambda b: b["flow_id"] == 9),
    ("/v1/processes", lambda b: b[0]["comm"] == "sockperf"),
    ("/v1/processes/4711", lambda b: b["profile"] == "latency"),
    ("/v1/sockets", lambda b: b[0]["counters"]["rx_packets"] == 5),
    ("/v1/sockets?pid=4711", lambda b: b[0]["socket_id"] == "4711:14"),
    ("/v1/sockets/4711:14/explain", lambda b: b["socket"] == "4711:14" and b["steps"][1]["remedy"] == "doctor"),
    ("/v1/sockets/10.0.0.1:53/explain", lambda b: b["socket"] == "10.0.0.1:53"),
    ("/v1/stats", lambda b: len(b) == 1 and b[0]["read_at"] == 100.0),
    ("/v1/stats/4711", lambda b: b["iomux"][0]["kind"] == "select" and b["rings"][0]["ring_id"] == 2),
    ("/v1/config", lambda b: b["limits.rules"]["value"] == 1024 and b["control.mode"]["live"] is False),
    ("/v1/config/schema", lambda b: b["properties"]["limits.rules"] == {
        "type": "integer", "minimum": 0, "maximum": 16384, "default": 1024, "description": "rules in all",
        "readOnly": False, "x-unit": "rules"} and b["$schema"].startswith("https://json-schema.org/")
     and b["additionalProperties"] is False and b["properties"]["control.mode"]["readOnly"]),
    ("/v1/parameters", lambda b: {p["name"]: (p["minimum"], p["maximum"], len(p["choices"])) for p in b["parameters"]
                                  if p["name"] in ("VMA_RX_POLL", "VMA_TRACELEVEL")}
     == {"VMA_RX_POLL": (-1, 100000000, 0), "VMA_TRACELEVEL": (None, None, 10)}),
    ("/v1/parameters", lambda b: any(p["name"] == "VMA_RX_POLL" and p["default"] for p in b["parameters"])
     and any(p["name"] == "latency" for p in b["profiles"])),
    ("/healthz", lambda b: b["status"] == "ok"),
    ("/readyz", lambda b: b["status"] == "ok"),
])  # fmt: skip
def test_get(view: FakeView, path: str, check: Any) -> None:
    response = ask(view, "GET", path)
    assert response.status_code == 200, response.text
    assert check(response.json()), response.text


def takes(schema: dict[str, Any], value: Any) -> bool:
    """As a validator of JSON Schema would say, of the words that the parameters' schema has."""
    if "anyOf" in schema:
        return any(takes(part, value) for part in schema["anyOf"])
    kinds = {"integer": int, "boolean": bool, "string": str}
    right = type(value) is kinds[schema["type"]] if "type" in schema else True
    return (right and schema.get("minimum", value) <= value <= schema.get("maximum", value)
            and value in schema.get("enum", [value])
            and ("maxLength" not in schema or len(value) <= schema["maxLength"])
            and ("pattern" not in schema or re.search(schema["pattern"], value) is not None))


def test_parameters_are_configuration(view: FakeView) -> None:
    """/v1/config has every VMA_* parameter, with a schema that takes its default and nothing out of its range."""
    listed = ask(view, "GET", "/v1/config/parameters").json()
    assert listed == ask(view, "GET", "/v1/parameters").json()
    schema = ask(view, "GET", "/v1/config/parameters/schema").json()
    assert schema["$schema"].startswith("https://json-schema.org/") and schema["additionalProperties"] is False
    known, described = load(), schema["properties"]
    assert [p["name"] for p in listed["parameters"]] == list(described) == [p.name for p in known.parameters]
    for p in known.parameters:
        assert described[p.name]["description"] == p.text
        assert takes(described[p.name], described[p.name]["default"]), p.name
        wrong = {"bool": [2, "x"], "enum": ["4711", 4711], "string": ["x" * (p.max_length + 1)], "int": ["7"]}
        bad: list[Any] = [*wrong[p.type]]
        if p.minimum is not None and p.maximum is not None:
            bad += [value for value in (p.minimum - 1, p.maximum + 1) if value not in p.also]
            assert all(takes(described[p.name], value) for value in (p.minimum, p.maximum, *p.also))
        assert not [value for value in bad if takes(described[p.name], value)], p.name
    assert not takes(described["VMA_INTERNAL_THREAD_AFFINITY"], "zz")
    assert described["VMA_RX_POLL"] == {
        "type": "integer", "minimum": -1, "maximum": 100000000, "default": 100000, "title": "Rx Poll Loops",
        "description": known["VMA_RX_POLL"].text, "readOnly": True, "x-unit": "loops"}  # fmt: skip


def test_every_field_of_the_views_reaches_the_client(view: FakeView) -> None:
    import dataclasses

    status = json.loads(json.dumps(dataclasses.asdict(view.status())))
    assert ask(view, "GET", "/v1/status").json() == status
    assert ask(view, "GET", "/v1/stats/4711").json() == json.loads(json.dumps(dataclasses.asdict(view.stats(4711))))


def test_not_ready(view: FakeView) -> None:
    view.ready, view.health = False, ["no interface is served"]
    response = ask(view, "GET", "/readyz")
    assert response.status_code == 503
    assert response.json() == {"status": "unavailable", "health": ["no interface is served"]}
    assert ask(view, "GET", "/healthz").status_code == 200


def test_add_and_delete_a_flow(view: FakeView) -> None:
    response = ask(view, "POST", "/v1/flows", json={"action": "kernel", "local": "*:53"})
    assert response.status_code == 201
    assert response.headers["location"] == "/v1/flows/10"
    assert view.calls == [("add_flow", "kernel", "udp", "*:53", "*:*", "*", "*")]
    assert ask(view, "DELETE", "/v1/flows/10").status_code == 204
    problem(ask(view, "DELETE", "/v1/flows/10"), 404)


def test_controls_of_a_process(view: FakeView) -> None:
    assert ask(view, "POST", "/v1/processes/4711/zero").status_code == 204
    assert ask(view, "POST", "/v1/processes/4711/log", json={"level": 5}).status_code == 204
    assert ask(view, "POST", "/v1/processes/4711/dump-fd", json={"fd": 0, "level": 4}).status_code == 204
    assert ask(view, "POST", "/v1/processes/4711/move", json={"to": "ring"}).status_code == 204
    assert ask(view, "POST", "/v1/processes/4711/move", json={"to": "kernel", "fd": 7}).status_code == 204
    assert view.calls == [("zero", 4711), ("set_log", 4711, 5, None), ("dump_fd", 4711, 0, 4),
                          ("move", 4711, None, "ring"), ("move", 4711, 7, "kernel")]
    for route in ("zero", "log", "dump-fd"):
        problem(ask(view, "POST", f"/v1/processes/1/{route}", json={"fd": 1} if route == "dump-fd" else {}), 404)


def test_patch_config(view: FakeView) -> None:
    body = ask(view, "PATCH", "/v1/config", json={"limits.rules": 7}).json()
    assert (body["limits.rules"]["value"], body["limits.rules"]["origin"]) == (7, "api")
    assert "limits.rulez" in problem(ask(view, "PATCH", "/v1/config", json={"limits.rulez": 7}), 422)["detail"]


@pytest.mark.parametrize(("method", "path", "body", "tokens"), [
    ("POST", "/v1/flows", {"action": "fly", "local": "*:53"}, ["body.action", '"fly"']),
    ("POST", "/v1/flows", {"action": "drop"}, ["body.local", "required"]),
    ("POST", "/v1/flows", {"action": "drop", "local": "*:1", "lokal": 1}, ["body.lokal"]),
    ("POST", "/v1/flows", {"action": "drop", "local": "bad"}, ["'bad' is not ADDR:PORT"]),
    ("POST", "/v1/flows", [1], ["body"]),
    ("POST", "/v1/processes/4711/log", {"level": 99}, ["body.level", "99"]),
    ("POST", "/v1/processes/4711/dump-fd", {"fd": -1}, ["body.fd", "-1"]),
    ("GET", "/v1/processes/abc", None, ["path.pid", '"abc"']),
    ("GET", "/v1/processes/0", None, ["path.pid", "0"]),
    ("GET", "/v1/stats/99999999999999999999", None, ["path.pid"]),
    ("GET", "/v1/sockets?pid=-1", None, ["query.pid", "-1"]),
    ("GET", "/v1/events?since=x", None, ["query.since", '"x"']),
    ("GET", "/v1/sockets/x/explain", None, ["'x' is none of"]),
    ("PATCH", "/v1/config", "text", ["body", '"text"']),
])  # fmt: skip
def test_wrong_input_names_the_field_and_the_value(
    view: FakeView, method: str, path: str, body: Any, tokens: list[str]
) -> None:
    detail = problem(ask(view, method, path, json=body), 422)["detail"]
    for token in tokens:
        assert token in detail, detail


def test_broken_json(view: FakeView) -> None:
    assert "JSON" in problem(ask(view, "POST", "/v1/flows", content=b"{", headers={"content-type": "application/json"}),
                             422)["detail"]  # fmt: skip


def test_unknown_objects_paths_and_methods(view: FakeView) -> None:
    assert "process 5" in problem(ask(view, "GET", "/v1/stats/5"), 404)["detail"]
    assert problem(ask(view, "GET", "/v1/sockets/1:1/explain"), 404)["type"] == "urn:vmahybrid:problem:not-found"
    assert "/nope" in problem(ask(view, "GET", "/nope"), 404)["detail"]
    response = ask(view, "DELETE", "/v1/status")
    assert problem(response, 405)["type"] == "urn:vmahybrid:problem:method-not-allowed"
    assert response.headers["allow"] == "GET"


def test_refused_carries_the_reason(view: FakeView) -> None:
    body = problem(ask(view, "POST", "/v1/flows", json={"action": "drop", "local": "*:1"}), 409)
    assert (body["reason"], body["remedy"]) == ("rule-limit", "raise limits.rules")


def test_an_unexpected_exception_leaks_nothing(view: FakeView) -> None:
    response = ask(view, "POST", "/v1/flows", json={"action": "drop", "local": "*:2"})
    problem(response, 500)
    assert "secret" not in response.text
    assert "Traceback" not in response.text


@pytest.mark.parametrize(("server", "token", "header", "status"), [
    (UNIX, None, None, 200),
    (UNIX, "s3cret", None, 200),
    (TCP, "s3cret", "Bearer s3cret", 200),
    (TCP, "s3cret", "bearer s3cret", 200),
    (TCP, "s3cret", None, 401),
    (TCP, "s3cret", "Bearer s3cre", 401),
    (TCP, "s3cret", "Bearer s3cret2", 401),
    (TCP, "s3cret", "Basic s3cret", 401),
    (TCP, "s3cret", "s3cret", 401),
    (TCP, None, None, 401),
    (TCP, None, "Bearer ", 401),
    (TCP, "", "Bearer ", 401),
    (None, "s3cret", None, 401),
])  # fmt: skip
def test_who_may_ask(view: FakeView, server: Any, token: str | None, header: str | None, status: int) -> None:
    headers = {"authorization": header} if header else {}
    for path in ("/v1/status", "/healthz", "/metrics", "/openapi.json"):
        response = ask(view, "GET", path, server=server, token=token, headers=headers)
        assert response.status_code == status, path
        if status == 401:
            assert problem(response, 401)["type"] == "urn:vmahybrid:problem:unauthorized"
            assert response.headers["www-authenticate"].startswith("Bearer")
    assert not view.calls


def test_two_authorization_headers_are_refused(view: FakeView) -> None:
    headers = [("authorization", "Bearer wrong"), ("authorization", "Bearer s3cret")]
    assert ask(view, "GET", "/healthz", server=TCP, token="s3cret", headers=headers).status_code == 401


def test_events_since_and_last_event_id(view: FakeView) -> None:
    text = ask(view, "GET", "/v1/events").text
    assert text.count("event: flow-added") == 3
    assert [json.loads(line[6:])["serial"] for line in text.splitlines() if line.startswith("data: ")] == [1, 2, 3]
    assert ask(view, "GET", "/v1/events?since=2").text.count("data: ") == 1
    again = ask(view, "GET", "/v1/events?since=0", headers={"last-event-id": "1"})
    assert again.text.count("data: ") == 2
    assert again.headers["content-type"].startswith("text/event-stream")
    assert ask(view, "GET", "/v1/events", headers={"last-event-id": "junk"}).text.count("data: ") == 3


def test_an_idle_stream_is_kept_alive_and_closes_its_source() -> None:
    closed = []

    class Idle(FakeView):
        async def events(self, since: int = 0) -> Any:
            try:
                await asyncio.Event().wait()
                yield EventView(1, 0, "", "", {})
            finally:
                closed.append(True)

    async def run() -> list[str]:
        source = stream(Idle(), 0, keepalive=0.01)
        lines = [await anext(source) for _ in range(3)]
        await source.aclose()  # type: ignore[attr-defined]
        return lines

    assert asyncio.run(run()) == [": vmahybrid events\n\n", ": alive\n\n", ": alive\n\n"]
    assert closed == [True]


def test_over_a_real_unix_socket(view: FakeView, tmp_path: Path) -> None:
    with serve(view, tmp_path / "api.sock") as path, httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as http:
        assert http.get("http://service/v1/status").json()["pid"] == 42
        assert http.get("http://service/nope").status_code == 404


def test_over_real_tcp_only_the_token_opens(view: FakeView) -> None:
    """That uvicorn's scope really tells TCP from Unix."""
    import socket
    import threading
    import time

    import uvicorn

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/processes/4711/zero"
        app = create_app(view, token="s3cret-token", version="0.1.0")
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off", ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        deadline = time.monotonic() + 20
        while not server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        try:
            problem(httpx.post(url), 401)
            problem(httpx.post(url, headers={"authorization": "Bearer wrong"}), 401)
            assert view.calls == []
            assert httpx.post(url, headers={"authorization": "Bearer s3cret-token"}).status_code == 204
            assert view.calls == [("zero", 4711)]
        finally:
            server.should_exit = True
            thread.join(20)
