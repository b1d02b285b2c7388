"""Whatever is sent, the API answers with what its OpenAPI document allows, and never with an unexpected error."""

import asyncio
import json
import re
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
from fake_view import FakeView, serve
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from api import create_app
from vmahybrid.service.view import EventView

PATHS = list(create_app(FakeView(), version="0").openapi()["paths"])
METHODS = ["GET", "POST", "PATCH", "DELETE", "PUT", "HEAD", "OPTIONS"]
words = st.one_of(
    st.sampled_from(["4711", "0", "-1", "9", "4711:14", "1:1", "x", "10.0.0.1:53", "1e9", "٣", "99999999999999999999"]),
    st.text(max_size=20),
)
leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20),
                   st.text(alphabet=st.characters(categories=["Cs", "Cc"]), max_size=3),
                   st.sampled_from(["kernel", "drop", "udp", "*:53", "bad"]))  # fmt: skip
names = st.one_of(st.sampled_from(["action", "proto", "local", "remote", "netns", "interface", "fd", "level", "details",
                                   "limits.rules"]), st.text(max_size=10),
                  st.text(alphabet=st.characters(categories=["Cs"]), max_size=2))  # fmt: skip
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=6))
bodies = st.one_of(st.none(), st.binary(max_size=50), values.map(lambda value: json.dumps(value).encode()))


def ask(method: str, path: str, body: bytes | None, headers: dict[str, str]) -> httpx.Response:
    view = FakeView()

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app=create_app(view, version="0"), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            return await client.request(method, path, content=body, headers=headers)

    return asyncio.run(run())


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(METHODS), st.sampled_from([*PATHS, "/{x}", "/v1/{x}"]), words, words, bodies, st.booleans())
@example("POST", "/v1/flows", "", "", b'{"action": "drop", "local": "*:1", "\\ud800": 1}', True)
@example("POST", "/v1/flows", "", "", b'{"action": "\\udfff"}', True)
@example("PATCH", "/v1/config", "", "", b'{"a": NaN, "limits.rules": 1e999}', True)
@example("PATCH", "/v1/config", "", "", b'{"limits.rules": NaN}', True)
@example("GET", "/v1/sockets/{socket_id}/explain", "%ff", "", None, True)
@example("POST", "/v1/processes/{pid}/log", "4711", "", b"[" * 2000, True)
def test_every_answer_is_one_of_ours(
    method: str, path: str, word: str, query: str, body: bytes | None, typed: bool
) -> None:
    from urllib.parse import quote

    url = re.sub(r"\{\w+\}", lambda _: quote(word, safe="%"), path)
    url += f"?pid={quote(query)}&since={quote(query)}" if query else ""
    response = ask(method, url, body, {"content-type": "application/json"} if typed else {})
    assert response.status_code in {200, 201, 204, 307, 400, 404, 405, 409, 422}, (method, url, response.text)
    if response.status_code >= 400 and method != "HEAD":
        assert response.headers["content-type"] == "application/problem+json"
        assert response.json()["remedy"]


def test_a_client_that_goes_away_ends_its_stream(tmp_path: Path) -> None:
    closed: list[bool] = []

    class Endless(FakeView):
        async def events(self, since: int = 0) -> AsyncIterator[EventView]:
            try:
                serial = since
                while True:
                    serial += 1
                    yield EventView(serial, 0.0, "tick", "", dict[str, Any]())
                    await asyncio.sleep(0.01)
            finally:
                closed.append(True)

    with serve(Endless(), tmp_path / "s") as path:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(10)
            client.connect(str(path))
            client.sendall(b"GET /v1/events?since=5 HTTP/1.1\r\nHost: x\r\n\r\n")
            seen = b""
            while b"id: 8" not in seen:
                seen += client.recv(65536)
            assert b"id: 5" not in seen
        deadline = time.monotonic() + 5
        while not closed and time.monotonic() < deadline:
            time.sleep(0.01)
    assert closed == [True]
