"""Runs the whole test suite, `make test`: two pytest sessions side by side, which takes less time than one.

The tests that need root work with namespaces, rings and real programs; they wait a lot. The others compile and compute:
they run beside, at the lowest priority, and their output follows. Arguments go to both sessions.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRIVILEGED = "(root or apps) and not vm"
OTHERS = "not root and not apps and not vm"
NOTHING_COLLECTED = 5


def start(arguments: list[str], **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "pytest", *arguments]
    return subprocess.Popen(command, cwd=ROOT, text=True, **options)  # type: ignore[call-overload,no-any-return]


def main(arguments: list[str]) -> int:
    log = ROOT / "build" / "test-others.log"
    with log.open("w") as output:
        others = start(["-m", OTHERS, *arguments], stdout=output, stderr=subprocess.STDOUT,
                       preexec_fn=lambda: os.nice(19))
        try:
            codes = [start(["-m", PRIVILEGED, *arguments]).wait()]
            print("\nThe tests that ran beside:", flush=True)
            codes.append(others.wait())
        finally:
            if others.poll() is None:
                others.terminate()
                others.wait()
    print(log.read_text(), end="", flush=True)
    failed = [code for code in codes if code not in (0, NOTHING_COLLECTED)]
    return failed[0] if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
