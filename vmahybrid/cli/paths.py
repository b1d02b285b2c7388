"""Where the service and the shim library are: the run directory and libvmahybrid.so."""

import os
from pathlib import Path

DEFAULT_RUNDIR = Path("/run/vmahybrid")


def rundir() -> Path:
    """``VMAHYBRID_RUNDIR``, or /run/vmahybrid; holds api.sock and control.sock."""
    return Path(os.environ.get("VMAHYBRID_RUNDIR") or DEFAULT_RUNDIR).absolute()


def api_socket() -> Path:
    return rundir() / "api.sock"


def control_socket() -> Path:
    return rundir() / "control.sock"
