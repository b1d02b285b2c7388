"""One guest per kernel for all tests of this directory; a test reads what the guest recorded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import boot
import image

BOOT_S = 400  # 80 s on an idle machine; Python and bcc's compiler are slow under emulation

Record = Callable[[str], dict[str, Any]]


def must_be_ready() -> None:
    if not image.ready():
        pytest.fail(f"the guest's image is not in {image.CACHE}. Run: make test-vm")


def reader(guest: boot.Ran) -> Record:
    """Gives a record of the guest by its name; fails the test with what the guest said when there is none."""

    def read(name: str) -> dict[str, Any]:
        found = guest.records.get(name)
        if found is None:
            pytest.fail(f"no record {name!r}. {guest.ended}. Console:\n{guest.console[-3000:]}")
        if "error" in found:
            pytest.fail(f"{name}: {found['error']}")
        assert isinstance(found, dict)
        return found

    return read


@pytest.fixture(scope="session", params=list(image.KERNELS))
def guest(request: pytest.FixtureRequest) -> boot.Ran:
    must_be_ready()
    program = [sys.executable, str(Path(__file__).with_name("guest.py"))]
    return boot.boot(request.param, program, BOOT_S)


@pytest.fixture
def kernel(request: pytest.FixtureRequest, guest: boot.Ran) -> str:
    """Which of image.KERNELS the guest runs."""
    name: str = request.node.callspec.params["guest"]
    return name


@pytest.fixture
def record(guest: boot.Ran) -> Record:
    return reader(guest)
