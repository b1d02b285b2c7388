"""Runs the whole test suite, `make test`: four pytest sessions side by side, which takes half the time of one.

The tests that need root work with namespaces, rings and real programs; they wait a lot. Those that look at the clock,
or spin, run in front. Those in CALM and QUIET only compare what is said, done or left, whenever it comes: they run
beside, at a lower priority. The others compile and compute, at the lowest. The output of all that ran beside follows.
Arguments go to all.

With CI=true in the environment, what failed runs once more at the end, alone: side by side on two busy cores a test may
be late. A test that fails alone has failed; the others are named.
"""

from __future__ import annotations

import json
import os
import shutil
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
    "tests/apps/test_tcp_programs.py", "tests/apps/test_tcp_servers.py", "tests/bpf", "tests/fuzz",
    "tests/net/test_cli_service.py", "tests/net/test_explain_kinds.py", "tests/net/test_service_reinject.py",
    "tests/net/test_service_sessions.py", "tests/net/test_tcp_show.py", "tests/net/test_tcp_syn.py",
    "tests/net/test_tcp_wire.py", "tests/net/test_tcpmove.py", "tests/net/test_tcprepair.py",
    "tests/net/test_verbs_fallback.py", "tests/net/test_verbs_ladder.py", "tests/net/test_verbs_shared.py",
    "tests/net/test_vma_stats_options.py", "tests/net/test_xdp_rings.py", "tests/net/test_xdp_switch.py",
    "tests/softverbs", LAST,
)
QUIET = (
    "tests/apps/test_make_run.py", "tests/apps/test_path_mtu.py", "tests/apps/test_programs.py", "tests/compare",
    "tests/net/test_death_interface.py", "tests/net/test_death_program.py", "tests/net/test_death_service.py",
    "tests/net/test_nat.py", "tests/net/test_parameters_act.py", "tests/net/test_receive_seen.py",
    "tests/net/test_service_life.py", "tests/net/test_stamps_xdp.py", "tests/net/test_tcp_chains.py",
    "tests/net/test_tcp_conf.py", "tests/net/test_tcp_listener_home.py", "tests/sanitize/test_asan.py", LAST,
)
NOTHING_COLLECTED = 5
TESTS_FAILED = 1
SESSIONS = ("calm", "quiet", "others", "front")


def cache(name: str) -> Path:
    """pytest's memory of a session; one for all would hold what the last of them wrote."""
    return ROOT / "build" / f"test-cache-{name}"


def failed_tests(name: str) -> list[str]:
    """Their ids, of the session that ended last under this name."""
    path = cache(name) / "v" / "cache" / "lastfailed"
    return list(json.loads(path.read_text())) if path.is_file() else []


def start(name: str, arguments: list[str], nice: int = 0, **options: object) -> subprocess.Popen[str]:
    shutil.rmtree(cache(name), ignore_errors=True)
    command = ["nice", "-n", str(nice), sys.executable, "-P", "-m", "pytest", "-o", f"cache_dir={cache(name)}",
               *arguments]
    return subprocess.Popen(command, cwd=ROOT, text=True, **options)  # type: ignore[call-overload,no-any-return]


def beside(stack: ExitStack, name: str, nice: int, arguments: list[str]) -> tuple[Path, subprocess.Popen[str]]:
    """Its log and the session, which ends with ``stack``."""
    log = ROOT / "build" / f"test-{name}.log"
    output = stack.enter_context(log.open("w"))
    session = start(name, arguments, nice, stdout=output, stderr=subprocess.STDOUT)
    stack.callback(session.wait)
    stack.callback(session.terminate)  # nothing to one that has ended
    return log, session


def run_again(arguments: list[str]) -> int:
    """What failed in the sessions, alone. The exit code of that."""
    tests = [test for name in SESSIONS for test in failed_tests(name)]
    if not tests:
        return TESTS_FAILED     # pytest remembers none
    print(f"\nOnce more, alone ({len(tests)} failed beside others):", *tests, sep="\n  ", flush=True)
    return start("again", [*tests, "-m", "", *arguments]).wait()


def main(arguments: list[str]) -> int:
    begun = time.monotonic()
    ignored = [f"--ignore={path}" for path in (*CALM, *QUIET) if path != LAST]
    with ExitStack() as stack:
        sessions = [beside(stack, "calm", 5, [*CALM, "-m", PRIVILEGED, *arguments]),
                    beside(stack, "quiet", 5, [*QUIET, "-m", PRIVILEGED, *arguments]),
                    beside(stack, "others", 19, ["-m", OTHERS, *arguments])]
        codes = [start("front", [*ignored, "-m", PRIVILEGED, *arguments]).wait()]
        for log, session in sessions:
            codes.append(session.wait())
            print(f"\nBeside ran ({log.name}):", flush=True)
            print(log.read_text(), end="", flush=True)
    failed = [code for code in codes if code not in (0, NOTHING_COLLECTED)]
    code = failed[0] if failed else 0
    if set(failed) == {TESTS_FAILED} and os.environ.get("CI") == "true":
        code = run_again(arguments)
    print(f"All in {time.monotonic() - begun:.0f} s", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
