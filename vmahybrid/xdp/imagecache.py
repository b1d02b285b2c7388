"""The compiled XDP programs, kept from one start of the service to the next: a compilation takes a second of CPU and
145 MiB, for which the interfaces would wait each time.

A file is used if it is this user's alone, and what it was made of is the same: sources, compiler, headers, kernel.
Whatever is wrong with it, or keeps it from being written, means a compilation.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import platform
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from vmahybrid.xdp.compile import compile_image, source_text
from vmahybrid.xdp.image import IMAGE_VERSION, Image

log = logging.getLogger("vmahybrid.service")

DIRECTORY = "/var/cache/vmahybrid"
KEPT = 4  # the newest; the host may have several versions, or kernels by turns
_SIZE_MAX = 4 << 20  # bytes
_HEADERS = Path("/usr/include/linux")   # a package that brings others writes them anew, and so its directory
_OURS = ("headers.py", "bcc_child.py")  # what is compiled in, and how, beside the sources
_STALE = 60.0  # seconds: a temporary file of a service that was killed


def directory() -> Path:
    """Of systemd (CacheDirectory=), or our own."""
    return Path(os.environ.get("CACHE_DIRECTORY", "").partition(":")[0] or DIRECTORY)


def kept_image() -> Image:
    """As :func:`vmahybrid.xdp.compile.compile_image`, from the cache if it is there."""
    path = directory() / f"xdp-{_key()}.json"
    try:
        return Image.from_json(_read(path))
    except (OSError, ValueError) as why:
        log.debug("XDP programs are compiled: %s", why)
    image = compile_image()
    try:
        _write(path, image.to_json())
    except OSError as error:
        log.debug("the compiled XDP programs are not kept: %s", error)
    return image


def _key() -> str:
    parts = [source_text(), *(Path(__file__).with_name(name).read_text("utf-8") for name in _OURS),
             str(IMAGE_VERSION), platform.machine(), platform.release(), platform.version(),
             *(f"{path} {found.st_size} {found.st_mtime_ns}" for path, found in _made_by())]  # fmt: skip
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _made_by() -> Iterator[tuple[Path, os.stat_result]]:
    bcc = importlib.util.find_spec("bcc")
    compiler = [Path(bcc.origin)] if bcc and bcc.origin else []
    for path in (*compiler, *sorted(Path("/usr/lib").glob("*/libbcc.so.0")), _HEADERS, _HEADERS / "version.h"):
        with contextlib.suppress(OSError):
            yield path, path.stat()


def _read(path: Path) -> bytes:
    """Raises OSError; ValueError for a file that others may have written."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise ValueError(f"{path} is not this user's alone")
        if found.st_size > _SIZE_MAX:
            raise ValueError(f"{path} is too large")
        return file.read()


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".xdp-", delete=False) as file:
        try:
            file.write(text)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
    for left in path.parent.glob(".xdp-*"):
        if time.time() - left.stat().st_mtime > _STALE:
            left.unlink(missing_ok=True)
    images = sorted(path.parent.glob("xdp-*.json"), key=lambda found: found.stat().st_mtime)
    for old in images[:-KEPT]:
        old.unlink(missing_ok=True)
