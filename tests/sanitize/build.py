"""The shim with sanitizers, and what they reported. Reports go to files: a program's own stderr may be closed."""

from __future__ import annotations

import fcntl
import functools
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
# halt at the first error: what comes after it says little
ASAN = "detect_leaks=0:handle_segv=0:handle_abort=0:alloc_dealloc_mismatch=0:halt_on_error=1"
UBSAN = "print_stacktrace=1:halt_on_error=1"


@contextmanager
def alone() -> Iterator[None]:
    """Another session of `make test` may want the same build at the same time."""
    with (ROOT / "build" / "sanitizers.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@functools.cache
def variables() -> dict[str, str]:
    """VMAHYBRID_LIB and VMH_SANITIZER_RUNTIME for build-asan/, which is made or brought up to date here."""
    with alone():
        done = subprocess.run([ROOT / "scripts" / "asan"], capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return dict(word.split("=", 1) for word in done.stdout.split())


@functools.cache
def tsan_library() -> Path:
    """libvmahybrid.so with ThreadSanitizer, in build-tsan/. The program needs -fsanitize=thread as well."""
    directory = ROOT / "build-tsan"
    # fences are not followed, which the compiler would refuse: none of them orders plain data here
    options = ["-Dshim_only=true", "-Db_sanitize=thread", "-Db_lundef=false", "-Dc_args=-Wno-tsan"]
    reconfigure = ["--reconfigure"] if (directory / "build.ninja").exists() else []
    env = os.environ | {"CC": "gcc"}
    with alone():
        for command in (["meson", "setup", *reconfigure, *options, str(directory)], ["ninja", "-C", str(directory)]):
            done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=900)
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    return directory / "vmahybrid" / "shim" / "libvmahybrid.so"


def tsan_softverbs() -> Path:
    """The directory of the software verbs device with ThreadSanitizer, made beside ``tsan_library``."""
    return tsan_library().parents[1] / "verbs" / "softverbs"


@contextmanager
def sanitized(reports: Path) -> Iterator[None]:
    """Programs started inside run on the sanitizers' shim and report to files in ``reports``."""
    reports.chmod(0o1777)
    wanted = {**variables(), "ASAN_OPTIONS": f"{ASAN}:log_path={reports}/asan",
              "UBSAN_OPTIONS": f"{UBSAN}:log_path={reports}/ubsan"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# Of a thread that closes what another uses: TSan's suppressions go by stacks, and it has not always kept them.
CLOSED_IN_USE = "Location is file descriptor"


def ours(reports: Path, excused: str = "") -> list[str]:
    """The reports that name a source of ours; a third-party program's own errors are its own. ``excused``: none that
    says this."""
    texts = [path.read_text(errors="replace") for path in sorted(reports.iterdir())]
    # the thread sanitizer writes all of a process into one file
    each = [report for text in texts for report in re.split(r"^={18}$", text, flags=re.MULTILINE)]
    source = re.compile(r"/vmahybrid/(shim|contracts|verbs/softverbs)/\w+\.[ch]\b")
    return [report[:6000] for report in each if source.search(report) and not (excused and excused in report)]


def compile_program(source: str, target: Path, *flags: str) -> Path:
    command = ["cc", "-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-o", str(target), str(HERE / source)]
    subprocess.run([*command, "-lpthread", *flags], check=True, timeout=60)
    return target


if __name__ == "__main__":  # ahead of the tests (scripts/run_tests.py)
    variables()
    tsan_library()
