"""What the bench reads and how it judges."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from vmahybrid.bench import bench, figures, sockperf, tcp_bulk, tcp_servers, turns, ways
from vmahybrid.bench.sandbox import Program, Sandbox, SandboxError

PING_PONG = """\
sockperf: [Total Run] RunTime=1.001 sec; Warm up time=400 msec; SentMessages=12587; ReceivedMessages=12586
sockperf: [Valid Duration] RunTime=0.550 sec; SentMessages=6939; ReceivedMessages=6939
sockperf: # dropped messages = 0; # duplicated messages = 0; # out-of-order messages = 0
sockperf: ---> percentile 99.999 = 1586.964
sockperf: ---> percentile 99.000 =   59.563
sockperf: ---> percentile 50.000 =   38.857
"""


def test_latency_of_sockperf() -> None:
    assert sockperf.parse_latency(PING_PONG) == sockperf.Latency(38.857, 59.563, 6939)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("sockperf: ERROR: No messages were received from the server", "no percentiles"),
        (PING_PONG.replace("dropped messages = 0", "dropped messages = 12"), "lost 12"),
    ],
)
def test_bad_latency_is_refused(text: str, what: str) -> None:
    with pytest.raises(SandboxError, match=what):
        sockperf.parse_latency(text)


def test_rate_of_sockperf_is_over_the_time_of_the_sender() -> None:
    client = "sockperf: Total of 400000 messages sent in 2.000 sec"
    server = "sockperf: Total 300000 messages received and handled"
    assert sockperf.parse_rate(client, server) == sockperf.Rate(200000, 150000)


@pytest.mark.parametrize(
    ("value", "target", "passed"),
    [(1.5, {"at_most": 1.3}, False), (1.3, {"at_most": 1.3}, True), (1.5, {"at_least": 1.6}, False), (1.5, {}, None)],
)
def test_verdict(value: float, target: dict[str, float], passed: bool | None) -> None:
    figure = figures.Figure("part", "name", value, "x", target.get("at_least"), target.get("at_most"))
    assert figure.passed is passed
    assert ("MISS" in bench.table([figure])) is (passed is False)


def test_a_miss_shows_what_raw_af_xdp_reaches() -> None:
    part = figures.Part([figures.Figure("mmsg", "kernel", 10, "msg/s")])
    limit = figures.beside([19, 20, 40], [10, 10, 10])
    part.ratio("shim / kernel", [18, 19, 18], [10, 10, 10], at_least=2.3, limit=limit)
    part.ratio("absent / kernel", [], [10], at_least=2.3)
    assert len(part.figures) == 2
    assert part.figures[1].verdict == "MISS (raw AF_XDP: 2)"
    assert part.figures[1].as_json()["limit"] == 2


def test_a_ratio_is_of_neighbours() -> None:
    """Of a machine that is slow in some of the runs, others of each variant."""
    assert figures.beside([2, 4, 4, 8], [1, 2, 2, 4]) == 2
    assert figures.beside([20, 20, 40, 40, 40], [10, 10, 20, 20, 10]) == 2
    assert figures.beside([1, 2], [0, 1]) == 2
    assert figures.beside([], [1]) is figures.beside([1], [0]) is None


def test_interleave_turns_round_and_keeps_going_after_a_failure() -> None:
    order: list[str] = []

    def run(name: str) -> float:
        order.append(name)
        if name == "bad":
            raise SandboxError("does not work")
        return float(len(order))

    variants = {name: lambda name=name: run(name) for name in ("first", "bad", "last")}
    shown: list[str] = []
    runs = figures.interleave(variants, 3, shown.append)
    assert order == ["first", "bad", "last", "last", "first", "first", "last"]
    assert runs.failures == {"bad": "does not work"}
    assert runs.of("last", float) == [3, 4, 7]
    assert runs.of("bad", float) == []


def test_a_failed_program_says_what_it_said() -> None:
    program = Program(["sh", "-c", "echo no luck >&2; exit 3"])
    try:
        with pytest.raises(SandboxError, match="exit 3: no luck"):
            program.result()
    finally:
        program.close()


def test_stop_ends_with_sigkill_when_the_signal_is_ignored() -> None:
    program = Program(["sh", "-c", "trap '' INT; echo up; while :; do sleep 0.05; done"])
    try:
        program.wait_for("up")
        assert program.stop(signal.SIGINT, timeout=0.2) == -signal.SIGKILL
    finally:
        program.close()


@pytest.mark.parametrize("argv", [["--only", "speed"], ["--repeats", "0"], ["--repeats", "many"]])
def test_a_wrong_argument_is_named(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.parse_arguments(argv)
    assert argv[1] in capsys.readouterr().err


def test_parts_can_be_selected() -> None:
    chosen = bench.parse_arguments(["--only", "toll", "--only", "mmsg", "--json"])
    assert chosen == bench.Options(["toll", "mmsg"], 5, True)
    assert bench.parse_arguments([]).only == list(bench.PARTS)


def test_share_on_ring_of_a_statistics_file() -> None:
    text = ("VMA: [fd=4] Tx Offload: 2 / 30 / 0 [kilobytes/packets/errors]\n"
            "VMA: [fd=4] Rx OS info: 0 / 10 / 0 [kilobytes/packets/errors]\n")
    assert ways.ring_share(text) == 0.75
    assert ways.ring_share("") == 0


def test_load_generators() -> None:
    csv = '"test","rps","avg_latency_ms","min","p50_latency_ms"\n"GET","5000.50","0.2","0.1","0.023"\n'
    assert tcp_servers.parse_redis(csv) == tcp_servers.Load(5000.5, 23)
    assert tcp_servers.parse_wrk("  50%   1.50ms\nRequests/sec:  20.5\n") == tcp_servers.Load(20.5, 1500)
    said = "Time to get           40000 keys by    8 threads:     1.640 seconds.\n"
    assert tcp_servers.parse_memcslap(said, 41000) == tcp_servers.Load(25000)
    # 4, 3 and 1 of 16 to 31, 32 to 63, 128 to 255 us
    said = ("Get Statistics (7 events)\n   Log2 Dist:\n       4:       9     9    9   9\n\n"
            "Total Statistics (8 events)\n   Min:        17\n   Log2 Dist:\n       4:      0   4   3   0\n"
            "       8:    1\n\ncmd_get: 8\n\nRun time: 2.0s Ops: 5000 TPS: 2500 Net_rate: 123.8M/s\n")
    assert tcp_servers.parse_memcaslap(said) == tcp_servers.Load(2500, 32)
    for parse in (tcp_servers.parse_redis, tcp_servers.parse_wrk, tcp_servers.parse_memcaslap, tcp_bulk.parse_stream):
        with pytest.raises(SandboxError, match="measured nothing"):
            parse("")


def test_iperf3_without_its_beginning() -> None:
    text = '{"intervals": [{"sum": {"bytes": 9, "seconds": 0.1}}, {"sum": {"bytes": 125000000, "seconds": 0.5}}]}'
    assert tcp_bulk.parse_stream(text) == pytest.approx(2.0)


def _states(pid: int) -> set[str]:
    return {Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()[0] for one in turns.family(pid)}


def test_a_pair_is_stopped_and_goes_on_with_its_children() -> None:
    programs = [Program(["sh", "-c", "sleep 30 & sleep 30"]) for _ in range(2)]
    pair = turns.Pair(ways.Started(programs[0], None), ways.Started(programs[1], None), Sandbox().a)
    try:
        for program in programs:
            while len(list(turns.family(program.pid))) < 3 or _states(program.pid) != {"S"}:  # D: in vfork()
                time.sleep(0.01)
        for signum, seen in ((signal.SIGSTOP, {"T"}), (signal.SIGCONT, {"S"})):
            pair.signal(signum)
            end = time.monotonic() + 5
            while (states := [_states(program.pid) for program in programs]) != [seen, seen]:
                assert time.monotonic() < end, states
                time.sleep(0.01)
    finally:
        pair.signal(signal.SIGKILL)
        for program in programs:
            program.close()
