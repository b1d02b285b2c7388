"""Runs the whole test suite, `make test`: four pytest sessions side by side, which takes half the time of one.

The tests that need root work with namespaces, rings and real programs; they wait a lot. Those that look at the clock,
or spin, run in front. Those in CALM, QUIET and LATER only compare what is said, done or left, whenever it comes: they
run beside, at a lower priority. The others compile and compute, at the lowest. Which of the four is through first
depends on the machine: LATER is cut in pieces, and who is through takes the next. Each names the tests that took it
longest. The output of all that ran beside follows. Arguments go to all.

With CI=true in the environment, what failed runs once more at the end, alone: side by side on two busy cores a test may
be late. A test that fails alone has failed; the others are named.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
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
    "tests/apps/test_make_run.py", "tests/apps/test_tcp_programs.py", "tests/apps/test_tcp_servers.py", "tests/bpf",
    "tests/fuzz", "tests/net/test_cli_service.py", "tests/net/test_explain_kinds.py",
    "tests/net/test_service_reinject.py", "tests/net/test_service_sessions.py", "tests/net/test_tcp_every_state.py",
    "tests/net/test_tcp_listener_home.py",
    "tests/net/test_tcp_pieces.py", "tests/net/test_tcp_small_stack.py", "tests/net/test_tcp_syn.py",
    "tests/net/test_tcp_wire.py", "tests/net/test_tcpmove.py", "tests/net/test_tcprepair.py",
    "tests/net/test_verbs_fallback.py", "tests/net/test_verbs_ladder.py", "tests/net/test_verbs_shared.py",
    "tests/net/test_vma_stats_options.py", "tests/net/test_xdp_rings.py", "tests/net/test_xdp_switch.py",
    "tests/softverbs", LAST,
)
QUIET = (
    "tests/apps/test_programs.py", "tests/compare", "tests/net/test_badinput_shim.py", "tests/net/test_counters.py",
    "tests/net/test_death_interface.py", "tests/net/test_death_program.py", "tests/net/test_death_service.py",
    "tests/net/test_net_page.py", "tests/net/test_parameters_act.py", "tests/net/test_receive_seen.py",
    "tests/net/test_service_input.py", "tests/net/test_service_life.py", "tests/net/test_stamps_xdp.py",
    "tests/net/test_tcp_chains.py", "tests/net/test_tcp_conf.py", "tests/net/test_tcp_counters.py",
    "tests/net/test_tcp_fastopen.py", "tests/net/test_tcp_params.py", "tests/net/test_tcp_relay.py",
    "tests/net/test_tcp_seen.py", "tests/net/test_tcp_show.py", "tests/net/test_tcp_trouble.py",
    "tests/sanitize/test_asan.py", LAST,
)
LATER = (
    "tests/apps/test_path_mtu.py", "tests/net/test_address_gone.py", "tests/net/test_arp_flux.py",
    "tests/net/test_death_life.py", "tests/net/test_death_refused.py", "tests/net/test_groups_seen.py",
    "tests/net/test_libvma_conf.py", "tests/net/test_many_sleepers.py", "tests/net/test_nat.py",
    "tests/net/test_parting.py", "tests/net/test_passthrough_seen.py", "tests/net/test_receive_waits.py",
    "tests/net/test_sandbox.py",
    "tests/net/test_splice_udp.py",
    "tests/net/test_tcp_another_mac.py", "tests/net/test_tcp_asked.py", "tests/net/test_tcp_astray.py",
    "tests/net/test_tcp_begun_calls.py", "tests/net/test_tcp_borrowed.py", "tests/net/test_tcp_death.py",
    "tests/net/test_tcp_ended.py", "tests/net/test_tcp_explained.py", "tests/net/test_tcp_extensions.py",
    "tests/net/test_tcp_fork_handlers.py",
    "tests/net/test_tcp_gone_members.py",
    "tests/net/test_tcp_kept_listener.py", "tests/net/test_tcp_kernels_options.py",
    "tests/net/test_tcp_killed_midway.py", "tests/net/test_tcp_last_words.py", "tests/net/test_tcp_late.py",
    "tests/net/test_tcp_listener_seen.py", "tests/net/test_tcp_many_at_the_end.py", "tests/net/test_tcp_many_sets.py",
    "tests/net/test_tcp_move_commands.py", "tests/net/test_tcp_no_descriptors.py", "tests/net/test_tcp_no_memory.py",
    "tests/net/test_tcp_nofile.py", "tests/net/test_tcp_past_the_shim.py",
    "tests/net/test_tcp_path.py", "tests/net/test_tcp_port_range.py", "tests/net/test_tcp_raw_calls.py",
    "tests/net/test_tcp_reasons.py", "tests/net/test_tcp_seccomp.py", "tests/net/test_tcp_spare.py",
    "tests/net/test_tcp_sysctls.py", "tests/net/test_tcp_takeover.py", "tests/net/test_tcp_tickets.py",
    "tests/net/test_tcp_unshare.py", "tests/net/test_tcp_uring.py", "tests/net/test_two_steps.py",
    "tests/net/test_verbs_mc_params.py", "tests/net/test_verbs_params.py", "tests/net/test_verbs_pyverbs.py",
    "tests/net/test_verbs_ring.py", "tests/sanitize/test_concurrency.py", "tests/sanitize/test_tcp_concurrency.py",
)
PIECES = 5
NOTHING_COLLECTED = 5
TESTS_FAILED = 1
SESSIONS = ("calm", "quiet", "others", *(f"later-{n}" for n in range(1, PIECES + 1)), "front")


def cache(name: str) -> Path:
    """pytest's memory of a session; one for all would hold what the last of them wrote."""
    return ROOT / "build" / f"test-cache-{name}"


def failed_tests(name: str) -> list[str]:
    """Their ids, of the session that ended last under this name."""
    path = cache(name) / "v" / "cache" / "lastfailed"
    return list(json.loads(path.read_text())) if path.is_file() else []


def session(name: str, arguments: list[str], nice: int = 0) -> list[str]:
    """The command of a pytest session."""
    shutil.rmtree(cache(name), ignore_errors=True)
    return ["nice", "-n", str(nice), sys.executable, "-P", "-m", "pytest", "-o", f"cache_dir={cache(name)}",
            "--durations=30", *arguments]


class Lane:
    """A session and, when it is through, those that wait in ``then`` for whichever lane is. The output of each is in a
    log, but for one that is shown. They end with ``stack``."""

    def __init__(self, stack: ExitStack, name: str, command: list[str], then: dict[str, list[str]] | None = None,
                 shown: bool = False) -> None:  # fmt: skip
        self.codes: dict[str, int] = {}
        self._stack, self._then = stack, then if then is not None else {}
        self._start(name, command, shown)

    def _start(self, name: str, command: list[str], shown: bool = False) -> None:
        self._name = name
        output = None if shown else self._stack.enter_context(log(name).open("w"))
        self._session = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        self._stack.callback(self._session.wait)
        self._stack.callback(self._session.terminate)  # nothing to one that has ended

    def goes_on(self) -> bool:
        """Whether one runs still; to be asked now and then, the next one begins here."""
        code = self._session.poll()
        if code is None:
            return True
        self.codes[self._name] = code
        if self._then:
            name = next(iter(self._then))
            self._start(name, self._then.pop(name))
            return True
        return False


def log(name: str) -> Path:
    return ROOT / "build" / f"test-{name}.log"


def run_again(arguments: list[str]) -> int:
    """What failed in the sessions, alone. The exit code of that."""
    tests = [test for name in SESSIONS for test in failed_tests(name)]
    if not tests:
        return TESTS_FAILED     # pytest remembers none
    print(f"\nOnce more, alone ({len(tests)} failed beside others):", *tests, sep="\n  ", flush=True)
    with ExitStack() as stack:
        lane = Lane(stack, "again", session("again", [*tests, "-m", "", *arguments]), shown=True)
        while lane.goes_on():
            time.sleep(0.2)
    return lane.codes["again"]


def main(arguments: list[str]) -> int:
    begun = time.monotonic()
    ignored = [f"--ignore={path}" for path in (*CALM, *QUIET, *LATER) if path != LAST]
    # three sessions need what the sanitizers build: hardly any waits for it when it is begun at once
    sanitizers = ["nice", "-n", "19", sys.executable, "-P", "tests/sanitize/build.py"]
    later = {
        f"later-{n + 1}": session(f"later-{n + 1}", [*LATER[n::PIECES], LAST, "-m", PRIVILEGED, *arguments], 5)
        for n in range(PIECES)
    }
    with ExitStack() as stack:
        lanes = [
            Lane(stack, "front", session("front", [*ignored, "-m", PRIVILEGED, *arguments]), later, shown=True),
            Lane(stack, "calm", session("calm", [*CALM, "-m", PRIVILEGED, *arguments], 5), later),
            Lane(stack, "quiet", session("quiet", [*QUIET, "-m", PRIVILEGED, *arguments], 5), later),
            Lane(stack, "sanitizers", sanitizers),
            Lane(stack, "others", session("others", ["-m", OTHERS, *arguments], 19), later),
        ]
        while sum(lane.goes_on() for lane in lanes):  # any() would not ask each
            time.sleep(0.2)
    codes = {name: code for lane in lanes for name, code in lane.codes.items()}
    for name in [name for name in codes if name != "front"]:
        print(f"\nBeside ran ({log(name).name}):", flush=True)
        print(log(name).read_text(), end="", flush=True)
    codes.pop("sanitizers")  # the tests that need it say what is wrong
    failed = [code for code in codes.values() if code not in (0, NOTHING_COLLECTED)]
    code = failed[0] if failed else 0
    if set(failed) == {TESTS_FAILED} and os.environ.get("CI") == "true":
        code = run_again(arguments)
    print(f"All in {time.monotonic() - begun:.0f} s", flush=True)
    return code


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))  # with the sessions, which clean up
    sys.exit(main(sys.argv[1:]))
