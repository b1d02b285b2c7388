"""Processor settings that cost latency: sleep states, clock frequency, and cores that others use too."""

import os
from collections.abc import Iterator
from pathlib import Path

from vmahybrid.cli.probes import Check

TOPIC = "host"
CPU = Path("/sys/devices/system/cpu")
DEEP_MICROSECONDS = 10  # waking from a state that takes longer shows in a half-RTT of 2 us


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def sleep_states(cpu: Path = CPU) -> Iterator[Check]:
    driver, governor = _read(cpu / "cpuidle/current_driver"), _read(cpu / "cpuidle/current_governor")
    if driver in {"", "none"}:
        yield Check(TOPIC, "C-states", "ok", "no idle driver: the cores do not sleep deeply, or the hypervisor decides")
        return
    states = {_read(s / "name"): int(_read(s / "latency") or 0)
              for s in sorted((cpu / "cpu0/cpuidle").glob("state*")) if _read(s / "disable") != "1"}  # fmt: skip
    deep = {name: latency for name, latency in states.items() if latency > DEEP_MICROSECONDS}
    data = {"driver": driver, "governor": governor, "latency_microseconds": states}
    if not deep:
        yield Check(TOPIC, "C-states", "ok", f"{driver}/{governor}: every state is left in {DEEP_MICROSECONDS} us",
                    data=data)  # fmt: skip
        return
    slowest = max(deep, key=lambda name: deep[name])
    yield Check(TOPIC, "C-states", "warn", f"{driver}/{governor}: {slowest} takes {deep[slowest]} us to leave, which a "
                "sleeping receiver pays (a spinning one does not)",
                f"cpupower idle-set -D {DEEP_MICROSECONDS}", data)  # fmt: skip


def frequency(cpu: Path = CPU) -> Iterator[Check]:
    governors = {_read(path) for path in cpu.glob("cpu[0-9]*/cpufreq/scaling_governor")} - {""}
    if not governors:
        yield Check(TOPIC, "CPU frequency", "ok", "not scaled here (fixed, or the hypervisor decides)")
    elif governors == {"performance"}:
        yield Check(TOPIC, "CPU frequency", "ok", "governor performance")
    else:
        yield Check(TOPIC, "CPU frequency", "warn", f"governor {', '.join(sorted(governors))}: slow after idling",
                    "cpupower frequency-set -g performance")  # fmt: skip


def isolation(cpu: Path = CPU) -> Iterator[Check]:
    isolated, count = _read(cpu / "isolated"), os.cpu_count() or 1
    if isolated:
        yield Check(TOPIC, "isolated cores", "ok", f"cores {isolated}: pin a spinning program there with taskset -c")
    elif count < 2:
        yield Check(TOPIC, "isolated cores", "warn", "one core: a spinning program starves its peer",
                    "vmahybrid run without a latency profile")  # fmt: skip
    else:
        yield Check(TOPIC, "isolated cores", "warn", "none: other work may share the core of a spinning program "
                    "(tail latency)", f"boot with isolcpus={count - 1} nohz_full={count - 1}")  # fmt: skip


PROBES = (sleep_states, frequency, isolation)
