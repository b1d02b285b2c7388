"""vma_stats against complete expected outputs (tests/unit/golden) and against the printf formats of libvma 9.8.84.

``VMA_STATS_GOLDEN=write pytest tests/unit/test_vma_stats_views.py`` writes the expected outputs anew; read them.
"""

# ruff: noqa: UP031  (printf formats, on purpose)

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from fake_view import FakeView, iomux, process, ring, serve, sock
from hypothesis import given, settings
from hypothesis import strategies as st

from vmahybrid.service.view import ProcessStats
from vmahybrid.stats.counters import SOCKET
from vmahybrid.vma_stats import full, lists, tables
from vmahybrid.vma_stats.delta import delta
from vmahybrid.vma_stats.main import main

GOLDEN = Path(__file__).with_name("golden")
KB = 1024


def manual_example_1() -> list[ProcessStats]:
    """140479898 packets and 274374 Kbyte received on fd 14, without a missed poll."""
    counters = {
        "rx_packets": 140479898, "rx_bytes": 274374 * KB, "rx_poll_hit": 140479898,
        "tx_packets": 140479902, "tx_bytes": 274502 * KB,
    }  # fmt: skip
    return [ProcessStats(process(), 10.0, [sock(14, counters=counters)], [], [ring()])]


def manual_example_2() -> list[ProcessStats]:
    """Two readings 2.5 s apart: per second 15186 packets on fds 15 and 19, 15185 through the kernel on fd 23."""
    offloaded = {"rx_packets": 15186, "rx_bytes": 29 * KB, "tx_packets": 15186, "tx_bytes": 29 * KB}
    kernel = {"rx_os_packets": 15185, "rx_os_bytes": 22 * KB, "tx_os_packets": 15185, "tx_os_bytes": 22 * KB}
    wait = {"os_rx_ready": 15185, "rx_ready": 30372, "poll_hit": 4}

    def at(seconds: float) -> ProcessStats:
        def grown(values: dict[str, int]) -> dict[str, int]:
            return {name: 1000 * KB + int(value * seconds) for name, value in values.items()}

        socks = [sock(15, counters=grown(offloaded)), sock(19, counters=grown(offloaded)),
                 sock(23, counters=grown(kernel), offloaded=False)]  # fmt: skip
        select = iomux("select", polling_percent=70, **grown(wait))
        return ProcessStats(process(), 100.0 + seconds, socks, [iomux("poll"), select], [ring()])

    return [at(0), at(2.5)]


def manual_example_3() -> list[ProcessStats]:
    """Example 3 as one second's deltas, and everything else that a block may show on a second socket."""
    first = {"rx_limit": 16777216, "rx_ready_bytes": 1470, "rx_ready_bytes_max": 23520, "rx_ready_packets": 1,
             "rx_ready_packets_max": 16}  # fmt: skip
    grown = first | {"rx_bytes": 1128530 * KB, "rx_packets": 786133, "rx_poll_miss": 10, "rx_poll_hit": 276077}
    ring_now = {"drained_max": 511, "pool_rx_free": 168000, "pool_tx_free": 199488, "rx_bytes": 1192953 * KB,
                "rx_packets": 786133, "interrupts_requested": 786137, "interrupts_received": 78613}  # fmt: skip
    everything = {counter.name: 3 * KB if "bytes" in counter.name else 7 for counter in SOCKET}
    multicast = {"local": "0.0.0.0:11111", "groups": ["224.7.7.7"], "blocking": True}
    connected = {"local": "10.0.0.1:5", "remote": "22.0.0.3:6666", "mc_loop": False, "mc_if": "10.77.1.1",
                 "blocking": False, "thread_rx": 1234, "thread_tx": 99999}  # fmt: skip
    tcp = sock(16, proto="tcp", state="ESTABLISHED", local="0.0.0.0:*")
    epoll = iomux("epoll", 8, 4711, rx_ready=5, os_rx_ready=1, poll_hit=3, poll_miss=1, timeouts=2, errors=1)

    def reading(seconds: float, one: dict[str, int], two: dict[str, int], frames: dict[str, int]) -> ProcessStats:
        socks = [sock(14, counters=one, **multicast), sock(15, counters=two, **connected), tcp]
        waits = [iomux("poll"), iomux("select"), epoll if seconds else iomux("epoll", 8)]
        second = ring(3, stats={"rx_no_socket": 1, "rx_bad": 2, "rx_dropped": 4, "queue_len": 9, "pool_rx_empty": 6})
        return ProcessStats(process(), 50.0 + seconds, socks, waits, [ring(2, stats=frames), second])

    return [reading(0, first, {}, {}), reading(1, grown, everything, ring_now)]


def manual_examples_4_and_5() -> list[ProcessStats]:
    socks = [
        sock(15, groups=["224.4.1.3"], local="0.0.0.0:44522", inode=733679757),
        sock(19, groups=["224.4.1.2", "224.4.1.3"], local="255.255.255.255:65535", remote="255.255.255.254:65534",
             offloaded=False, counters={"rx_ready_bytes": 1470, "tx_ready_bytes": 12}),
        sock(20, proto="tcp", state="LISTEN", local="0.0.0.0:11111", inode=733679919),
        sock(21, inode=0),
    ]  # fmt: skip
    return [ProcessStats(process(), 1.0, socks, [], [])]


def long_lives() -> list[ProcessStats]:
    """Every counter is wider than its column."""
    counters = {counter.name: (1 << 44) + 12345 for counter in SOCKET}
    wide = dict.fromkeys(("rx_ready", "os_rx_ready", "timeouts", "errors", "poll_hit", "poll_miss"), 1 << 40)
    waits = [iomux("epoll", 12345, 7, **wide)]
    return [ProcessStats(process(), 1.0, [sock(1023, counters=counters)], waits, [ring(stats={"rx_bytes": 1 << 60})])]


def raw_packet_qp() -> list[ProcessStats]:
    counters = {"mod_count": 48, "mod_usec": 50, "dm_size": 4096, "dm_bytes": 1 << 20, "dm_packets": 900, "dm_full": 3,
                "rx_packets": 7, "rx_bytes": 7 << 10, "tx_packets": 5, "tx_bytes": 5 << 10}  # fmt: skip
    verbs = ring(stats=counters, kind="verbs", mode="none", backend="verbs", device="mlx5_0")
    return [ProcessStats(process(), 1.0, [], [], [verbs])]


CASES = {
    "view1-totals": (manual_example_1, ["-c1"]),
    "view1-deltas": (manual_example_2, ["-d2", "-c1"]),
    "view1-totals-iomux": (lambda: manual_example_2()[1:], ["-c1"]),
    "view1-sockets": (manual_example_2, ["-d2", "-c1", "-s", "19-16,23"]),
    "view2-totals": (lambda: manual_example_3()[1:], ["-v2", "-c1"]),
    "view2-deltas": (manual_example_3, ["-v2", "-d2", "-c1"]),
    "view3-totals": (lambda: manual_example_3()[1:], ["-v3", "-c1"]),
    "view3-deltas": (manual_example_3, ["-v3", "-d2", "-c1"]),
    "view3-no-rings": (manual_examples_4_and_5, ["-v3", "-c1", "-s20"]),
    "view3-verbs": (raw_packet_qp, ["-v3", "-c1"]),
    "view4": (manual_examples_4_and_5, ["-v4"]),
    "view4-deltas-prints-once": (manual_examples_4_and_5, ["-v4", "-d2", "-c", "3"]),
    "view4-no-groups": (manual_example_1, ["-v4"]),
    "view5": (manual_examples_4_and_5, ["-v5"]),
    "view1-wide": (long_lives, ["-c1"]),
    "view2-wide": (long_lives, ["-v2", "-c1"]),
    "view3-wide": (long_lives, ["-v3", "-c1"]),
}


def run(
    readings: list[ProcessStats], argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> int:
    view = FakeView()
    view.readings = {4711: readings}
    monkeypatch.setenv("VMAHYBRID_RUNDIR", str(tmp_path))
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    monkeypatch.setattr("vmahybrid.vma_stats.passthrough.sockets_of", lambda _pid, _known: [])
    with serve(view, tmp_path / "api.sock"):
        return main(["-F", *argv])


@pytest.mark.parametrize("name", CASES)
def test_complete_output(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make, argv = CASES[name]
    assert run(make(), argv, tmp_path, monkeypatch) == 0
    found = capsys.readouterr()
    assert found.err == ""
    path = GOLDEN / f"vma_stats-{name}.txt"
    if os.environ.get("VMA_STATS_GOLDEN") == "write":
        path.write_text(found.out)
    assert found.out == path.read_text()


def test_the_numbers_of_the_manual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where manual and source have one layout, the manual's own lines."""
    run(manual_example_1(), ["-c1"], tmp_path, monkeypatch)
    out = capsys.readouterr().out
    assert "14  Rx:  140479898  274374        0       0  100.0       0       0" in out
    assert "    Tx:  140479902  274502        0       0              0       0" in out
    run(manual_example_2(), ["-d2", "-c1"], tmp_path, monkeypatch)
    out = capsys.readouterr().out
    for line in (" 15  Rx:      15186      29        0       0    0.0       0       0",
                 " 23  Rx:          0       0        0       0    0.0   15185      22",
                 "     Tx:          0       0        0       0          15185      22"):  # fmt: skip
        assert line in out
    assert "select  /s Rx Ready:15185/30372 [os/offload] Timeouts:0" in out
    run(manual_example_3(), ["-v3", "-d2", "-c1"], tmp_path, monkeypatch)
    out = capsys.readouterr().out.splitlines()
    for line in ("\tFd=[14]", "- Member of = [224.7.7.7]",
                 "Rx Offload: 1128530 / 786133 / 0 / 0 [kilobytes/packets/eagains/errors]/s",
                 "Rx byte: cur 1470 / max 23520 / dropped/s 0 / limit 16777216",
                 "Rx pkt : cur 1 / max 16 / dropped/s 0", "Rx poll: 10 / 276077 (100.00%) [miss/hit]"):  # fmt: skip
        assert line in out


counts = st.integers(0, 1 << 50)
socks = st.builds(
    lambda fd, values: {"fd": fd, "counters": dict(zip((c.name for c in SOCKET), values, strict=True))},
    st.integers(0, 99999),
    st.lists(counts, min_size=len(SOCKET), max_size=len(SOCKET)),
)


def fields(sock: dict[str, Any], way: str, prefix: str) -> tuple[int, ...]:
    c = sock["counters"]
    size = c[f"{way}{prefix}_bytes"] // KB
    return c[f"{way}{prefix}_packets"], size, c[f"{way}{prefix}_eagain"], c[f"{way}{prefix}_errors"]


@settings(max_examples=100, deadline=None)
@given(socks)
def test_rows_are_those_of_printf(sock: dict[str, Any]) -> None:
    """The formats are copied from research/libvma.md 1e; Python's % is C's printf here."""
    c = sock["counters"]
    percent = c["rx_poll_hit"] / (c["rx_poll_hit"] + c["rx_poll_miss"]) * 100 if c["rx_poll_hit"] else 0.0
    queue = (c["rx_ready_packets"], c["rx_ready_packets_max"], c["rx_drop_packets"])
    rx, rx_os, tx, tx_os = (fields(sock, way, p) for way, p in (("rx", ""), ("rx", "_os"), ("tx", ""), ("tx", "_os")))
    assert tables.basic_rows(sock) == [
        " %-3d %-3s %10u %7u %8u %7u %6.1f %7u %7u %7u %7u" % (sock["fd"], "Rx:", *rx, percent, *rx_os),
        " %-3s %-3s %10u %7u %8u %7u %-6s %7u %7u %7u %7u" % (" ", "Tx:", *tx, " ", *tx_os),
    ]
    assert tables.extra_rows(sock) == [
        " %-3d %-3s %10u %7u %8u %7u %6.1f %6u  %6u  %6u %7u %7u %7u %7u"
        % (sock["fd"], "Rx:", *rx, percent, *queue, *rx_os),
        " %-3s %-3s %10u %7u %8u %7u %29s %7u %7u %7u %7u" % (" ", "Tx:", *tx, " ", *tx_os),
    ]


@pytest.mark.parametrize("deltas", [False, True])
def test_headers_are_those_of_printf(deltas: bool) -> None:
    rate = "/s" if deltas else ""
    names = [f"{name}{rate}" for name in ("pkt", "Kbyte", "eagain", "error")]
    over = ("--------------- offloaded ----------------", "---------- os ---------") if deltas else (
        "------------ total offloaded -------------", "--------- total os ----------")  # fmt: skip
    assert tables.basic_header(deltas) == [
        " %-7s %42s %31s" % ("fd", *over),
        " %-7s %10s %7s %8s %7s %6s %7s %7s %7s %7s" % (" ", *names, "poll%", *names),
    ]
    middle = "----- queue pkt ------" if deltas else "---- queue pkt -----"
    over = ("---------------------------- offloaded --------------------------", over[1]) if deltas else (
        "----------------------- total offloaded -------------------------", over[1])  # fmt: skip
    assert tables.extra_header(deltas) == [
        " %-7s %65s %31s" % ("fd", *over),
        " %-7s %10s %7s %8s %7s %6s%23s %7s %7s %7s %7s" % (" ", *names, "poll%", middle, *names),
        " %50s %6s  %6s  %6s " % (" ", "cur", "max", f"drop{rate}"),
    ]


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(["select", "poll", "epoll"]), st.booleans(), st.tuples(*[counts] * 7))
def test_iomux_row_is_that_of_printf(kind: str, deltas: bool, values: tuple[int, ...]) -> None:
    os_ready, ready, timeouts, errors, hit, miss, cpu = values
    row = {"kind": kind, "epfd": 5, "counters": {
        "os_rx_ready": os_ready, "rx_ready": ready, "timeouts": timeouts, "errors": errors, "poll_hit": hit,
        "poll_miss": miss, "polling_percent": cpu}}  # fmt: skip
    percent = hit / (hit + miss) * 100 if hit else 0.0
    name = "epoll[5]" if kind == "epoll" else kind
    expected = "%-8s%-2s %-9s%u%-1s%u %-12s %-9s%-5u %-7s%-4u %-5s%-2.2f%-3s %-5s%d%-1s" % (
        name, "/s" if deltas else "", "Rx Ready:", os_ready, "/", ready, "[os/offload]", "Timeouts:", timeouts,
        "Errors:", errors, "Poll:", percent, "%", "Polling CPU:", cpu, "%")  # fmt: skip
    assert tables.iomux_row(row, deltas) == expected


def test_netstat_columns_line_up() -> None:
    row = lists.netstat_row({"proto": "udp", "offloaded": True, "local": "255.255.255.255:65535", "pid": 1,
                             "remote": "255.255.255.255:65535", "state": "ESTABLISHED", "inode": 1, "comm": "x",
                             "counters": {counter.name: 0 for counter in SOCKET}})  # fmt: skip
    for title, text in (("Local Address", "255."), ("State", "ESTABLISHED"), ("Inode", "1 "), ("PID/", "1/x"),
                        ("Sent by", "-")):
        assert row.startswith(text, lists.NETSTAT_HEADER.index(title)), title


def test_what_the_kernel_dropped_before_the_ring() -> None:
    """As totals, and as a rate per second of two readings that are 2 s apart."""
    def reading(seconds: float, **kernel: int) -> dict[str, Any]:
        one = ring(stats={"rx_bad": 3, "pool_rx_empty": 5}, kernel=kernel)
        return asdict(ProcessStats(process(), seconds, [], [], [one]))

    before = reading(10, rx_dropped=10, rx_ring_full=0, rx_fill_ring_empty_descs=10)
    now = reading(12, rx_dropped=50, rx_ring_full=6, rx_fill_ring_empty_descs=50)

    def lines(what: dict[str, Any], deltas: bool) -> list[str]:
        return [" ".join(line.split()) for line in full.full_view(what, [], deltas)]

    for line in ("Packets dropped: 59", "HW RX Packets dropped: 56", "No buffers error: 55"):
        assert line in lines(now, deltas=False)
    rates = lines(delta(before, now, 1), deltas=True)
    assert "Packets dropped: 23 /s" in rates
    assert "HW RX Packets dropped: 23 /s" in rates
    assert "No buffers error: 20" in rates
    assert "HW RX" not in str(lines(reading(10, rx_dropped=0), deltas=False))


@pytest.mark.parametrize(("offloaded", "ring_sent", "kernel_sent", "says", "sender"), [
    (True, 0, 0, "Yes", "-"), (True, 1, 5, "Yes", "both"), (True, 2, 0, "Yes", "ring"), (True, 0, 5, "Yes", "kernel"),
    (False, 0, 5, "No", "kernel")])
def test_a_socket_that_sends_by_the_kernel_alone(offloaded: bool, ring_sent: int, kernel_sent: int, says: str,
                                                 sender: str) -> None:
    """The manual's column has one word, so that fields can be counted; who sent comes behind all of its columns."""
    row = sock(offloaded=offloaded, counters={"tx_packets": ring_sent, "tx_os_packets": kernel_sent})
    words = lists.netstat_row(asdict(row)).split()
    assert (words[1], words[-1]) == (says, sender)
    assert lists.NETSTAT_HEADER.endswith(" Sent by")
