"""The library alone: the example of examples/ runs and leaves nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from net.xdp_lab import ENVIRONMENT

import vmahybrid.xdp

pytestmark = pytest.mark.root
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "afxdp_echo.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-P", str(EXAMPLE), *arguments], capture_output=True, text=True, timeout=60,
                          check=False, env=ENVIRONMENT)


def test_the_example_echoes_a_thousand_datagrams() -> None:
    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    assert "1000 datagrams echoed" in done.stdout
    assert "steered to the ring: 1000 frames" in done.stdout


def test_the_example_names_a_wrong_interface() -> None:
    done = run("nosuch0", "10.0.0.1", "7")
    assert done.returncode == 1
    assert done.stderr.startswith("afxdp_echo: nosuch0: no such interface")


def test_every_public_name_exists() -> None:
    for name in vmahybrid.xdp.__all__:
        assert getattr(vmahybrid.xdp, name).__doc__
    with pytest.raises(AttributeError, match="nosuch"):
        vmahybrid.xdp.nosuch  # noqa: B018
