"""The watcher of a namespace, as the service makes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from vmahybrid.net.netns import NetnsWorker
from vmahybrid.net.watcher import NetWatcher
from vmahybrid.service.namespaces import LinkRow, Watcher
from vmahybrid.steering.reasons import Reason


def make_watcher(worker: NetnsWorker, served: Callable[[LinkRow], Reason],
                 on_change: Callable[[Collection[str]], None]) -> Watcher:
    return NetWatcher(worker, asyncio.get_running_loop(), served, on_change)
