"""In place of the kernel function that asks the driver for a frame's time of arrival, since no device here has a time:
another expression, normally CLOCK_MONOTONIC."""

from __future__ import annotations

from pathlib import Path

from vmahybrid.xdp.compile import compile_text, source_text
from vmahybrid.xdp.image import Image

ASKED = "vmh_rx_timestamp(ctx, &ns)"
MONOTONIC = "!(ns = bpf_ktime_get_ns())"


def image_with(answer: str) -> Image:
    """All programs; ``answer`` is C: it sets ``ns``, and is 0 or an error."""
    text = source_text()
    assert text.count(ASKED) == 1
    return compile_text(text.replace(ASKED, answer))


def python_path(directory: Path) -> str:
    """For a service: with a sitecustomize, which Python runs at its start, that has it compile with MONOTONIC."""
    (directory / "sitecustomize.py").write_text(f"""\
from vmahybrid.xdp import compile

original = compile.source_text
compile.source_text = lambda directory=None: original(directory).replace({ASKED!r}, {MONOTONIC!r})
""")
    return str(directory)
