"""select, poll, epoll, sleeping and signals of the shim, in C, over a fake ring: tests/unit/c/test_iomux*.c."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHIM = ROOT / "vmahybrid" / "shim"
DRIVERS = Path(__file__).parent / "c"
SHIM_SOURCES = (
    "wait",
    "scratch",
    "poll_few",
    "stats_alone",
    "iomux",
    "iomux_loop",
    "iomux_select",
    "sleep",
    "watch",
    "epoll",
    "epoll_item",
    "epoll_set",
    "epoll_wait",
    "epoll_kick",
    "epoll_plain",
    "tcps_batch",
    "signal",
    "lock",
    "fd",
    "obj",
    "real",
)
# what each build can't run is said in test_iomux.c
BUILDS: dict[str, tuple[list[str], set[str]]] = {
    "plain": (["gcc", "-O2"], set()),
    "address": (
        ["clang-14", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
        {"cancellation"},
    ),
    "thread": (["clang-14", "-O1", "-fsanitize=thread"], {"eintr"}),
}
TESTS = {
    "level",
    "edge",
    "oneshot",
    "oneshot_shared_data",
    "masks",
    "errors",
    "many_sets",
    "nested",
    "fairness",
    "kernel_not_starved",
    "os_ratio",
    "cpu_usage",
    "timeouts",
    "kernel_only_set",
    "offloaded_later",
    "wake_races",
    "churn",
    "cancellation",
    "os_forced", "put_off",
    "eintr",
    "mask_ready_first",
    "handlers",
    "poll_exact",
    "select_exact",
    "budget",
    "after_fork",
    "model",
    "link_closed",
    "signal_before_sleep",
}


def slow(build: str, races: int) -> object:
    return pytest.param(build, races, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("build", "races"), [("plain", 3000), slow("plain", 20000), slow("address", 3000), slow("thread", 3000)]
)
def test_iomux(build: str, races: int, tmp_path: Path) -> None:
    command, excluded = BUILDS[build]
    generator = ROOT / "vmahybrid" / "config" / "gen_params.py"
    subprocess.run(
        [sys.executable, generator, generator.with_name("parameters.toml"), tmp_path / "params_gen.h"], check=True
    )
    includes = [f"-I{path}" for path in (SHIM, ROOT / "vmahybrid" / "contracts", ROOT / "bpf", DRIVERS, tmp_path)]
    flags = ["-std=gnu11", "-g", "-Wall", "-Wextra", "-Werror", "-Wno-deprecated-declarations"]
    sources = [*sorted(DRIVERS.glob("test_iomux*.c")), DRIVERS / "iomux_fake.c"]
    sources += [SHIM / f"{name}.c" for name in SHIM_SOURCES]
    target = tmp_path / "test_iomux"
    subprocess.run([*command, *flags, *includes, "-o", target, *sources, "-ldl", "-lpthread"], check=True)
    result = subprocess.run([target, str(races)], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    assert {line.removeprefix("ok ") for line in result.stdout.splitlines()} == TESTS - excluded
