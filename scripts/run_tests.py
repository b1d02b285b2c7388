"""Runs the whole test suite, `make test`: three pytest sessions side by side, which takes half the time of one.

The tests that need root work with namespaces, rings and real programs; they wait a lot. Those that look at the clock,
or spin, run in front. Those in CALM only compare what is said, done or left, whenever it comes: they run beside, at a
lower priority. The others compile and compute, at the lowest. The output of the two follows. Arguments go to all.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRIVILEGED = "(root or apps) and not vm"
OTHERS = "not root and not apps and not vm"
LAST = "tests/test_zz_leftovers.py"  # of each session
CALM = (
    "tests/apps/test_tcp_programs.py", "tests/apps/test_tcp_servers.py", "tests/bpf", "tests/compare", "tests/fuzz",
    "tests/net/test_cli_service.py", "tests/net/test_explain_kinds.py", "tests/net/test_service_reinject.py",
    "tests/net/test_service_sessions.py", "tests/net/test_tcp_show.py", "tests/net/test_tcp_syn.py",
    "tests/net/test_tcp_wire.py", "tests/net/test_tcpmove.py", "tests/net/test_tcprepair.py",
    "tests/net/test_verbs_fallback.py", "tests/net/test_verbs_ladder.py", "tests/net/test_verbs_shared.py",
    "tests/net/test_vma_stats_options.py", "tests/net/test_xdp_rings.py", "tests/net/test_xdp_switch.py",
    "tests/sanitize/test_asan.py", "tests/softverbs", LAST,
)
NOTHING_COLLECTED = 5


def start(arguments: list[str], nice: int = 0, **options: object) -> subprocess.Popen[str]:
    command = ["nice", "-n", str(nice), sys.executable, "-P", "-m", "pytest", *arguments]
    return subprocess.Popen(command, cwd=ROOT, text=True, **options)  # type: ignore[call-overload,no-any-return]


def beside(stack: ExitStack, name: str, nice: int, arguments: list[str]) -> tuple[Path, subprocess.Popen[str]]:
    """Its log and the session, which ends with ``stack``."""
    log = ROOT / "build" / f"test-{name}.log"
    output = stack.enter_context(log.open("w"))
    session = start(arguments, nice, stdout=output, stderr=subprocess.STDOUT)
    stack.callback(session.wait)
    stack.callback(session.terminate)  # nothing to one that has ended
    return log, session


def main(arguments: list[str]) -> int:
    begun = time.monotonic()
    ignored = [f"--ignore={path}" for path in CALM if path != LAST]
    with ExitStack() as stack:
        sessions = [beside(stack, "calm", 5, [*CALM, "-m", PRIVILEGED, *arguments]),
                    beside(stack, "others", 19, ["-m", OTHERS, *arguments])]
        codes = [start([*ignored, "-m", PRIVILEGED, *arguments]).wait()]
        for log, session in sessions:
            codes.append(session.wait())
            print(f"\nBeside ran ({log.name}):", flush=True)
            print(log.read_text(), end="", flush=True)
    print(f"All in {time.monotonic() - begun:.0f} s", flush=True)
    failed = [code for code in codes if code not in (0, NOTHING_COLLECTED)]
    return failed[0] if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
