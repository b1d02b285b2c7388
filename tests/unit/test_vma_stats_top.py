"""vma_stats --top: on an emulated terminal of any size, by its keys, and as lines where there is no terminal."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_view import FakeView, iomux, process, ring, serve, sock
from hypothesis import given, settings
from hypothesis import strategies as st
from terminal import ROOT, Terminal

from vmahybrid.service.view import ProcessStats
from vmahybrid.vma_stats.top_model import COLUMNS, Top
from vmahybrid.vma_stats.top_screen import screen

RATES = {14: (1000, 200), 15: (3000, 0), 23: (0, 0)}  # received and sent a second, by fd of the first program


class Growing(FakeView):
    """Two programs whose counters grow with the time."""

    def __init__(self) -> None:
        super().__init__()
        self.started = time.monotonic() - 100
        self.gone = False

    def processes(self) -> list[Any]:
        return [process(4711, comm="sockperf"), process(4712, comm="feed\x1b[31mx")]

    def stats(self, pid: int) -> ProcessStats:
        now = time.monotonic()
        age = now - self.started
        if pid == 4712:
            other = sock(5, 4712, {"rx_os_packets": int(age * 77)}, comm="feed\x1b[31mx", offloaded=False,
                         reason="loopback", reason_text="loopback is the kernel's", remedy="none needed",
                         local="127.0.0.1:9", flow_id=0, ring_id=0)
            return ProcessStats(self.processes()[1], now, [other], [], [])
        socks = [sock(fd, 4711, {"rx_packets": int(rx * age), "rx_bytes": int(rx * age * 100),
                                 "tx_packets": int(tx * age), "rx_poll_hit": int(rx * age)},
                      local=f"10.0.0.1:{fd}") for fd, (rx, tx) in RATES.items()]
        waits = [iomux("poll"), iomux("select", rx_ready=int(age * 50), poll_hit=int(age * 50))]
        return ProcessStats(self.processes()[0], now, socks, waits, [ring(stats={"rx_packets": int(4000 * age)})])


ARGV = [sys.executable, "-m", "vmahybrid.vma_stats.main", "-F", "--top"]
UP, DOWN, RIGHT, END, ENTER, ESC = "\x1b[A", "\x1b[B", "\x1b[C", "\x1b[4~", "\r", "\x1b"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    made: list[Terminal] = []

    def make(*argv: str, **more: Any) -> Terminal:
        made.append(Terminal([*ARGV, *argv], VMAHYBRID_RUNDIR=str(tmp_path), **more))
        return made[-1]

    try:
        with serve(Growing(), tmp_path / "api.sock"):
            yield make
    finally:
        for terminal in made:
            terminal.close()


def table(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()[3:-1] if line and line.split()[0] in {"4711", "4712"}]


def number(text: str) -> float:
    return float(text[:-1]) * {"k": 1e3, "M": 1e6}[text[-1]] if text[-1] in "kM" else float(text)


def has_rates(text: str) -> bool:
    """All of the screen is drawn, and not the first one."""
    rows = table(text)
    return len(rows) == 4 and all(sum(map(number, row[5:8])) > 0 for row in rows if row[2] != "23")


def test_80_by_24(start: Callable[..., Terminal]) -> None:
    terminal = start()
    text = terminal.until(has_rates)
    lines = text.splitlines()
    assert lines[0].startswith("vma_stats ") and ", every 1 s: 2 programs, 4 sockets, 3 on rings" in lines[0]
    assert lines[1].startswith("rx ") and "poll 100.0%" in lines[1]
    assert lines[2].split() == ["PID", "PROGRAM", "FD", "OFFL", "LOCAL", "RX/sv", "TX/sv", "OS/s", "ERR/s"]
    assert lines[-1].startswith("? help  q quit")
    rows = table(text)
    assert [row[2] for row in rows][:2] == ["15", "14"], "by the rates of receiving and sending, the highest first"
    assert rows[0][:5] == ["4711", "sockperf", "15", "Yes", "10.0.0.1:15"]
    assert 2500 < number(rows[0][5]) < 3500
    assert 150 <= number(rows[1][6]) <= 250
    (feed,) = [row for row in rows if row[0] == "4712"]
    assert feed[1] == "feed?[31…"
    assert feed[3] == "No"
    assert 60 <= number(feed[7]) <= 95
    terminal.keys("q")
    assert terminal.ended() == 0


def test_keys(start: Callable[..., Terminal]) -> None:
    terminal = start()
    terminal.until(has_rates)
    terminal.keys(RIGHT)
    terminal.until(lambda text: "TX/sv" in text and table(text)[0][2] == "14")
    terminal.keys("r")
    terminal.until(lambda text: "TX/s^" in text and table(text)[-1][2] == "14")
    terminal.keys("r", "<", DOWN, ENTER)
    terminal.until(lambda text: "---- fd 14 of sockperf (4711), inode 733679771" in text)
    terminal.until(lambda text: "[kilobytes/packets/eagains/errors]/s" in text)
    shown = ("- UDP, Blocked, MC Loop Enabled", "- Local Address   = [10.0.0.1:14]", "Ring 2: veth0, xdp generic",
             "select  /s Rx Ready:0/")
    terminal.until(lambda text: all(part in text for part in shown))
    assert len(table(terminal.text)) == 4, "the table is still there"
    terminal.keys(UP)
    terminal.until(lambda text: "---- fd 15 of" in text)
    terminal.keys(END)
    terminal.until(lambda text: "---- fd 23 of" in text or "---- fd 5 of" in text)
    terminal.keys(ESC)
    terminal.until(lambda text: "----" not in text)
    terminal.keys("d")
    terminal.until(lambda text: "RXv" in text and table(text) and number(table(text)[0][5]) > 250_000)
    terminal.keys("d", "/", "127.", ENTER)
    terminal.until(lambda text: len(table(text)) == 1 and "1 sockets, 0 on rings, with '127.'" in text)
    terminal.keys(ENTER)
    terminal.until(lambda text: "loopback: loopback is the kernel's. none needed" in text)
    terminal.keys(ESC, ESC)
    terminal.until(lambda text: len(table(text)) == 4)
    terminal.keys("+", "+")
    terminal.until(lambda text: "every 3 s" in text)
    terminal.keys("-", "p")
    terminal.until(lambda text: "paused, every 2 s" in text)
    for key in "?h":
        terminal.keys(key)
        parts = ("any key goes back", "choose a socket", "Esc not", "by the next column", "reverse the order",
                 "OFFL on a ring")
        terminal.until(lambda text: all(part in text for part in parts))  # noqa: B023
        terminal.keys("x")
        terminal.until(lambda text: "? help" in text)
    terminal.keys("\x03")
    assert terminal.ended() == 0


def test_sizes(start: Callable[..., Terminal]) -> None:
    """More room shows more columns; no size is too small to go on."""
    terminal = start()
    terminal.until(has_rates)
    terminal.resize(160, 40)
    text = terminal.until(lambda text: "POLL%" in text and "? help" in text.splitlines()[-1])
    assert {"RXB/s", "TXB/s", "DROP/s", "REMOTE"} <= set(text.splitlines()[2].split())
    assert text.splitlines()[-1].startswith("? help") and len(text.splitlines()) == 40
    terminal.keys(ENTER)
    terminal.until(lambda text: "---- fd" in text)
    for columns, lines in ((40, 12), (20, 5), (8, 3), (1, 1), (5, 2)):
        terminal.resize(columns, lines)
        for _ in range(3):
            terminal.read(0.1)
        terminal.keys(DOWN, RIGHT, "?", "x")
    terminal.resize(80, 24)
    terminal.until(lambda text: len(text.splitlines()) == 24 and "? help  q quit" in text and "sockperf" in text)
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.ended() == 128 + signal.SIGTERM


def test_the_service_goes_away(tmp_path: Path) -> None:
    view = Growing()
    terminal = None
    try:
        with serve(view, tmp_path / "api.sock"):
            terminal = Terminal(ARGV, VMAHYBRID_RUNDIR=str(tmp_path))
            terminal.until(has_rates)
        (tmp_path / "api.sock").unlink(missing_ok=True)
        terminal.until(lambda text: "start it: vmahybrid start" in text)
        with serve(view, tmp_path / "api.sock"):
            terminal.until(lambda text: "start it" not in text and has_rates(text))
            terminal.keys("q")
            assert terminal.ended() == 0
    finally:
        if terminal is not None:
            terminal.close()


@pytest.mark.parametrize("kind", ["dumb", "no-such-terminal", ""])
def test_a_terminal_without_a_cursor(start: Callable[..., Terminal], kind: str) -> None:
    terminal = start("-c", "2", TERM=kind)
    terminal.until(lambda text: text.count("-" * 79) == 2)
    assert terminal.ended() == 0
    assert b"\x1b" not in terminal.raw
    assert len(table(terminal.text)) == 8, "no line is wider than the terminal"


def test_no_terminal(start: Callable[..., Terminal], tmp_path: Path) -> None:
    done = subprocess.run([*ARGV, "--once"], stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=ROOT,
                          timeout=30, env=os.environ | {"VMAHYBRID_RUNDIR": str(tmp_path), "TERM": "xterm"})
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[2].split()[:3] == ["PID", "PROGRAM", "FD"]
    assert lines[-1] == "-" * 79
    assert "\x1b" not in done.stdout


def test_cycles_on_a_terminal(start: Callable[..., Terminal]) -> None:
    assert start("-c", "1").ended() == 0


def test_one_process(start: Callable[..., Terminal]) -> None:
    terminal = start("-p", "4712")
    terminal.until(lambda text: "1 programs, 1 sockets, 0 on rings" in text and len(table(text)) == 1)


# ---- the model, without a terminal


def reading(count: int) -> Any:
    socks = [{"pid": 1 + n % 3, "fd": n, "inode": n, "comm": "x" * (n % 20), "proto": "udp", "offloaded": bool(n % 2),
              "local": f"10.0.0.1:{n}", "remote": "0.0.0.0:*", "reason": "none", "reason_text": "", "remedy": "",
              "ring_id": 0, "blocking": True, "mc_loop": True, "mc_if": "", "groups": [], "thread_rx": 0,
              "thread_tx": 0, "counters": sock(counters={"rx_packets": n * n}).counters} for n in range(count)]
    return {"process": {"pid": 1}, "read_at": 1.0, "sockets": socks, "iomux": [], "rings": []}


NAMES = ["up", "down", "pgup", "pgdn", "home", "end", "left", "right", "enter", "esc", "backspace", *"?hq<>rdp/+- kjx1"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(NAMES), max_size=30), st.integers(0, 60), st.integers(1, 200), st.integers(1, 60))
def test_any_keys_on_any_size(keys: list[str], count: int, width: int, height: int) -> None:
    top = Top(totals=True)
    top.refresh([reading(count)])
    for key in keys:
        top.key(key)
        lines = screen(top, width, height, "12:00:00")
        assert len(lines) == height
        assert max(len(line.text) for line in lines) <= width
        if count and height > 5 and not top.help and top.rows():
            text = "\n".join(line.text for line in lines)
            assert not top.detail or height < 10 or width < 80 or "---- fd" in text
            assert any(line.look == "reverse" for line in lines[3:-1]), "the chosen row is seen"


def test_a_program_that_only_sends_is_busy() -> None:
    """Before a column is chosen."""
    top = Top(totals=True)
    now = reading(3)
    for row, (received, sent) in zip(now["sockets"], ((5, 0), (0, 475), (6, 1)), strict=True):
        row["counters"] |= {"rx_packets": received, "tx_packets": sent}
    top.refresh([now])
    assert [row["fd"] for row in top.rows()] == [now["sockets"][n]["fd"] for n in (1, 2, 0)]
    top.key("right")
    assert COLUMNS[top.sort].title == "TX"


@pytest.mark.parametrize("column", range(len(COLUMNS)))
def test_every_column_sorts_and_is_seen(column: int) -> None:
    top = Top(totals=True, sort=column)
    top.refresh([reading(20)])
    values = [COLUMNS[column].value(row) for row in top.rows()]
    assert values == sorted(values, reverse=True)  # type: ignore[type-var]
    assert COLUMNS[column].title + "v" in screen(top, 80, 24, "")[2].text.replace(" ", "")
    top.key("r")
    assert [COLUMNS[column].value(row) for row in top.rows()] == sorted(values)  # type: ignore[type-var]


def test_the_chosen_socket_stays_chosen_when_the_order_changes() -> None:
    top = Top(totals=True)
    top.refresh([reading(20)])
    top.key("end")
    chosen = top.chosen
    top.key("r")
    assert top.chosen == chosen
    assert top.selected(top.rows()) == 0
