"""What vmahybrid costs those who do not profit: the kernel's traffic, a program not offloaded, the idle machine."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from vmahybrid.bench import sockperf
from vmahybrid.bench.figures import Figure, Part, beside, interleave, median_figure
from vmahybrid.bench.latency import bench_program
from vmahybrid.bench.rates import PORT
from vmahybrid.bench.sandbox import Sandbox, SandboxError
from vmahybrid.bench.served import Service

PAIRS, SLICES = 250_000, 8  # times five repeats: 10 million
IDLE_SECONDS = 10.0
MIB = 1024 * 1024


def iperf_tcp(sandbox: Sandbox, seconds: float) -> float:
    """Gbit/s of one TCP stream from side a to side b through the kernel."""
    server = sandbox.start(sandbox.b, ["iperf3", "-s", "-1"], sockperf.SERVER_CPU)
    server.wait_for("listening|^$")
    time.sleep(0.3)
    command = ["iperf3", "-c", sandbox.b.address, "-t", f"{seconds:g}", "-J"]
    said = sandbox.start(sandbox.a, command, sockperf.CLIENT_CPU).result(seconds + 20)
    server.stop()
    return float(json.loads(said)["end"]["sum_received"]["bits_per_second"]) / 1e9


def iperf_with_rules(sandbox: Sandbox, seconds: float) -> float:
    """The same with the service on both ends and a rule of a sleeping program on side b."""
    with ExitStack() as stack:
        service = stack.enter_context(Service(sandbox))
        holder_argv = [bench_program("udp_mmsg"), "recv", sandbox.b.address, str(PORT)]
        # no polling: the holder must not take CPU time from iperf3
        holder_argv = service.run_argv(holder_argv, VMA_RX_POLL="0")
        holder = sandbox.start(sandbox.b, holder_argv, sockperf.SERVER_CPU, service.env)
        stack.callback(holder.stop)
        holder.wait_for("ready")
        service.require_ring(holder)
        return iperf_tcp(sandbox, seconds)


def measure_toll(repeats: int, seconds: float, say: Callable[[str], None]) -> Part:
    """TCP that is not offloaded, through the interface that carries the rules: short runs, twice as many."""
    without, rules = "iperf3 without the service", "iperf3 with rules"
    with Sandbox("bench") as sandbox:
        variants = {
            without: partial(iperf_tcp, sandbox, seconds / 2),
            rules: partial(iperf_with_rules, sandbox, seconds / 2),
        }
        runs = interleave(variants, 2 * repeats, say)
    part = Part(failures=runs.failures)
    rates = {name: runs.of(name, float) for name in variants}
    part.figures += [median_figure("toll", name, rates[name], "Gbit/s") for name in variants if rates[name]]
    part.ratio("with rules / without", rates[rules], rates[without], at_least=0.9)
    return part


def loop_pairs(sandbox: Sandbox, env: dict[str, str]) -> float:
    """Nanoseconds of CPU time per send and recv pair over loopback."""
    program = sandbox.start(sandbox.a, [bench_program("loop_pairs"), str(PAIRS)], sockperf.CLIENT_CPU, env)
    return float(json.loads(program.result(120))["cpu_ns"])


def measure_overhead(repeats: int, seconds: float, say: Callable[[str], None]) -> Part:
    """The shim in a program that has nothing to offload; a run has a fixed count of pairs instead of seconds.

    The target is 3 %: so the runs are short, and each is compared with its neighbour.
    """
    library = Path(__file__).parent.parent / "libvmahybrid.so"
    if not library.exists():
        raise SandboxError(f"{library} does not exist. Run: make build")
    bare, shim = "loopback pair, bare", "loopback pair, LD_PRELOAD"
    with Sandbox("bench") as sandbox, Service(sandbox) as service:
        variants = {
            bare: partial(loop_pairs, sandbox, {}),
            shim: partial(loop_pairs, sandbox, {**service.env, "LD_PRELOAD": str(library)}),
        }
        runs = interleave(variants, repeats * SLICES, say)
    part = Part(failures=runs.failures)
    times = {name: runs.of(name, float) for name in variants}
    part.figures += [median_figure("overhead", name, times[name], "ns") for name in variants if times[name]]
    if ratio := beside(times[shim], times[bare]):
        part.figures.append(Figure("overhead", "added by the shim", 100 * (ratio - 1), "%", at_most=3))
    return part


def _session_processes(leader: int) -> list[int]:
    """Pids of the session that a program was started in: itself and its children."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader:
            found.append(int(path.parent.name))
    return found


def _cpu_seconds(leader: int) -> float:
    """User and system time of a session, the children it has waited for included."""
    ticks = 0
    for pid in _session_processes(leader):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += sum(int(number) for number in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def _resident(leader: int) -> float:
    """MiB resident of a session."""
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in _session_processes(leader))
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


def measure_service(repeats: int, seconds: float, say: Callable[[str], None]) -> Part:
    """Time to READY, CPU when idle, memory."""
    ready = []
    with Sandbox("bench") as sandbox:
        for turn in range(repeats):
            say(f"service ({turn + 1} of {repeats})")
            with Service(sandbox) as service:
                ready.append(service.ready_seconds)
                if turn == repeats - 1:
                    time.sleep(1)
                    before = _cpu_seconds(service.program.pid)
                    time.sleep(IDLE_SECONDS)
                    idle = 100 * (_cpu_seconds(service.program.pid) - before) / IDLE_SECONDS
                    resident = _resident(service.program.pid)
    return Part(
        [
            median_figure("service", "start to READY", ready, "s", at_most=3),
            Figure("service", "CPU when idle, of one core", idle, "%", at_most=0.5),
            Figure("service", "resident", resident, "MiB", at_most=220),
        ]
    )
