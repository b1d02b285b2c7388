"""Server-sent events (WHATWG HTML, 9.2) of what happens in the service."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from contextlib import suppress

from vmahybrid.service.view import EventView, ServiceView

MEDIA_TYPE = "text/event-stream"
KEEPALIVE = 15.0  # seconds; a comment line shows proxies and clients that the stream lives


def encode(event: EventView) -> str:
    """json.dumps escapes line ends, so data is always one line."""
    kind = event.kind.replace("\n", " ").replace("\r", " ")
    return f"id: {event.serial}\nevent: {kind}\ndata: {json.dumps(dataclasses.asdict(event), default=str)}\n\n"


async def stream(view: ServiceView, since: int, keepalive: float = KEEPALIVE) -> AsyncIterator[str]:
    """Ends when the service's own stream ends, or when the client goes (the server then closes this generator)."""
    source = aiter(view.events(since))
    pending: asyncio.Task[EventView | None] | None = None
    yield ": vmahybrid events\n\n"
    try:
        while True:
            if pending is None:
                pending = asyncio.ensure_future(_next(source))
            done, _ = await asyncio.wait({pending}, timeout=keepalive)
            if not done:
                yield ": alive\n\n"
                continue
            event, pending = pending.result(), None
            if event is None:
                return
            yield encode(event)
    finally:
        if pending is not None:
            pending.cancel()
            with suppress(asyncio.CancelledError):
                await pending
        if (close := getattr(source, "aclose", None)) is not None:
            await close()


async def _next(source: AsyncIterator[EventView]) -> EventView | None:
    """None at the end. A coroutine, because ensure_future does not take what anext gives."""
    return await anext(source, None)
