"""What happened: a bounded backlog and live followers (the source of the API's SSE stream)."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from vmahybrid.service.view import EventView

BACKLOG = 1000   # events kept
FOLLOWER = 1000  # events that a follower may lag behind before it loses the oldest


class EventLog:
    """Runs on the event loop. ``serial`` of the first event is 1."""

    def __init__(self) -> None:
        self._backlog: deque[EventView] = deque(maxlen=BACKLOG)
        self._followers: set[asyncio.Queue[EventView | None]] = set()
        self._serial = 0
        self._closed = False

    def add(self, kind: str, text: str, **data: Any) -> EventView:
        self._serial += 1
        event = EventView(self._serial, time.time(), kind, text, data)
        self._backlog.append(event)
        for queue in self._followers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(event)
        return event

    async def follow(self, since: int = 0) -> AsyncIterator[EventView]:
        """Events after serial ``since`` as far as they are kept, then live ones until ``close``."""
        queue: asyncio.Queue[EventView | None] = asyncio.Queue(FOLLOWER)
        for event in list(self._backlog):
            if event.serial > since:
                queue.put_nowait(event)
        if self._closed:
            queue.put_nowait(None)
        self._followers.add(queue)
        try:
            while (following := await queue.get()) is not None:
                yield following
        finally:
            self._followers.discard(queue)

    def close(self) -> None:
        """End all followers."""
        self._closed = True
        for queue in self._followers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(None)
