"""Boots the guest for one program and gives back what that wrote, line by line, to its second serial port."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import image

MEMORY_MIB = 2048
RESULTS = "/dev/ttyS1"


@dataclass(frozen=True)
class Ran:
    """The records of a run by their names, what the guest's console showed, and how it ended."""

    records: dict[str, Any]
    console: str
    ended: str


def _guest_program(argv: Sequence[str]) -> str:
    """The shell script that the guest runs as its only program. Its last line resets the machine, which ends QEMU."""
    return f"""#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 PYTHONDONTWRITEBYTECODE=1
stty -F {RESULTS} raw
{shlex.join(argv)}
echo "guest: the program ended with $?"
echo b >/proc/sysrq-trigger
sleep 60
"""


def _command(kernel: str, run: Path) -> tuple[list[str], dict[str, str]]:
    emulator, env = image.qemu()
    kernel_arguments = f"console=ttyS0 quiet panic=-1 mitigations=off vmh.run={run}"
    return [
        *["setpriv", "--pdeathsig", "KILL"],  # a killed test run leaves no machine behind
        *emulator,
        *["-nodefaults", "-no-user-config", "-display", "none", "-nic", "none", "-no-reboot"],
        # KVM is not asked for: where /dev/kvm exists it need not run a stock kernel
        *["-machine", "q35,accel=tcg", "-cpu", "max", "-smp", "1", "-m", str(MEMORY_MIB)],
        # its clock counts instructions: on a busy host nothing in it times out that would not on an idle one
        *["-icount", "shift=0"],
        *["-kernel", str(image.CACHE / f"vmlinuz-{kernel}")],
        *["-initrd", str(image.CACHE / f"initrd-{kernel}.gz")],
        *["-append", kernel_arguments],
        *["-serial", f"file:{run}/console", "-serial", f"file:{run}/results"],
        *["-virtfs", "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap"],
    ], env


def _text(path: Path) -> str:
    return path.read_text("utf-8", "replace") if path.exists() else ""


def _records(text: str) -> dict[str, Any]:
    """One JSON object per line with a name; a last line that was cut off is left out."""
    records = {}
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        records[record.pop("name")] = record
    return records


def boot(kernel: str, argv: Sequence[str], timeout_s: float) -> Ran:
    """Runs argv as root in a guest with one of image.KERNELS, by this machine's paths.

    The guest is gone afterwards, however it went.
    """
    with tempfile.TemporaryDirectory(prefix="vmh-run-vm-") as directory:
        run = Path(directory)
        program = run / "guest"
        program.write_text(_guest_program(argv))
        program.chmod(0o755)
        command, env = _command(kernel, run)
        try:
            done = subprocess.run(command, env={**os.environ, **env}, stdin=subprocess.DEVNULL, capture_output=True,
                                  text=True, timeout=timeout_s)
            ended = f"QEMU ended with {done.returncode}. {done.stderr.strip()}"
        except subprocess.TimeoutExpired:
            ended = f"QEMU did not end in {timeout_s:g} s and was killed"
        console, results = (_text(run / name) for name in ("console", "results"))
        return Ran(_records(results), console, ended)


def main() -> None:
    """boot.py KERNEL COMMAND ARG...: by hand; prints the console and the records."""
    ran = boot(sys.argv[1], sys.argv[2:], 300)
    print(ran.console, json.dumps(ran.records, indent=1), ran.ended, sep="\n")


if __name__ == "__main__":
    main()
