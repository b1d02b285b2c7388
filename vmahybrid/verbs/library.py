"""pyverbs, the libibverbs that it got, and the software one of this package."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path

import vmahybrid
from vmahybrid.errors import NotPossibleHere

LIBRARY = "libibverbs.so.1"
SOFTVERBS_VARIABLE = "VMAHYBRID_SOFTVERBS"
SOFTWARE_PREFIX = "sv_"  # device names of softverbs: sv_IFNAME
PYVERBS = "apt-get install python3-pyverbs"


def have_pyverbs() -> bool:
    return find_spec("pyverbs") is not None


def need_pyverbs() -> None:
    """Raises NotPossibleHere when pyverbs is not there or can't be loaded."""
    try:
        import pyverbs.device  # noqa: F401
    except ModuleNotFoundError:
        raise NotPossibleHere("pyverbs", "the Python module pyverbs is not there", PYVERBS) from None
    except ImportError as error:  # one of its libraries
        raise NotPossibleHere("pyverbs", str(error), f"{PYVERBS} libibverbs1") from None


def loaded() -> str:
    """Path of the libibverbs that this process has loaded, "" if none."""
    found = re.search(r"\s(/\S*libibverbs\.so\S*)$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return found[1] if found else ""


def softverbs_directory() -> Path:
    """Where the software libibverbs.so.1 is: $VMAHYBRID_SOFTVERBS, or the package. Raises NotPossibleHere."""
    package = Path(vmahybrid.__file__).resolve().parent
    asked = os.environ.get(SOFTVERBS_VARIABLE)
    path = Path(asked).absolute() if asked else package / "verbs/softverbs/lib"
    if not (path / LIBRARY).is_file():
        raise NotPossibleHere("softverbs", f"the software verbs device is not built: there is no {path / LIBRARY}",
                              f"make build, or set {SOFTVERBS_VARIABLE} to its directory")
    if set(str(path)) & {":", ";"}:
        raise NotPossibleHere("softverbs", f"LD_LIBRARY_PATH can't hold {path}: it has a colon or semicolon", "move it")
    return path


def softverbs_environment() -> dict[str, str]:
    """LD_LIBRARY_PATH with the software verbs device first, once. Raises NotPossibleHere."""
    first = str(softverbs_directory())
    others = [part for part in os.environ.get("LD_LIBRARY_PATH", "").split(":") if part and part != first]
    return {"LD_LIBRARY_PATH": ":".join([first, *others])}
