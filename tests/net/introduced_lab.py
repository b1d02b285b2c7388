"""A sandbox without offloads whose sides know each other, and a service in it, for TCP programs on rings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from net.test_tcp_shim import introduce, without_offloads

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service


@pytest.fixture(scope="module", name="service")
def introduced(softverbs: bool) -> Iterator[Service]:
    """One for the file that imports this; programs get AF_XDP rings, or raw packet QPs."""
    with Sandbox("test") as sandbox, Service(without_offloads(sandbox), softverbs=softverbs) as running:
        introduce(sandbox)
        yield running
