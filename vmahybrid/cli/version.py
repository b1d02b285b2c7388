"""Version and build date of this installation."""

import time
from importlib import metadata
from pathlib import Path


def version() -> str:
    try:
        return metadata.version("vmahybrid")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"


def build_date() -> str:
    """When the compiled contracts were built, as the C macros __DATE__ __TIME__ write it."""
    import vmahybrid._contracts

    built = Path(vmahybrid._contracts.__file__).stat().st_mtime
    return time.strftime("%b %d %Y %H:%M:%S", time.localtime(built))
