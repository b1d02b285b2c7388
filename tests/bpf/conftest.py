from __future__ import annotations

from collections.abc import Iterator

import pytest

from bpf.harness import Guard, RingIn, Steer, TcSteer
from vmahybrid.xdp.compile import compile_image
from vmahybrid.xdp.image import Image


def pytest_make_parametrize_id(config: pytest.Config, val: object) -> str | None:
    """A frame in a test's name is its length, not its bytes."""
    return f"{len(val)}B" if isinstance(val, bytes) else None


@pytest.fixture(scope="session")
def image() -> Image:
    return compile_image()


@pytest.fixture
def steer(image: Image) -> Iterator[Steer]:
    """Without a rule."""
    with Steer(image) as loaded:
        yield loaded


@pytest.fixture
def tc_steer(image: Image) -> Iterator[TcSteer]:
    """Without a rule."""
    with TcSteer(image) as loaded:
        yield loaded


@pytest.fixture
def guard(image: Image) -> Iterator[Guard]:
    """Without a grant."""
    with Guard(image) as loaded:
        yield loaded


@pytest.fixture
def ring_in(image: Image) -> Iterator[RingIn]:
    with RingIn(image) as loaded:
        yield loaded
