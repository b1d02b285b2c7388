"""The command vmahybrid against the real API over a Unix socket: texts, JSON, exit codes, errors."""

import configparser
import glob
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_view import FakeView, flow, interface, process, serve, sock
from terminal import Terminal

from vmahybrid.cli import output
from vmahybrid.cli.completion import script
from vmahybrid.cli.main import COMMANDS, build_parser, main
from vmahybrid.cli.unit import quoted
from vmahybrid.service.view import ExplainStep, ProcessStats, SocketView
from vmahybrid.vma_stats.options import LONG, SHORT

ROOT = Path(__file__).parents[2]
Run = Callable[..., tuple[int, str, str]]
MINE = str(os.getpid())
STATS_OPTIONS = {f"-{letter}" for letter in SHORT if letter.isalpha()} | {f"--{name.rstrip('=')}" for name in LONG}


@pytest.fixture
def view() -> FakeView:
    return FakeView()


@pytest.fixture
def run(
    view: FakeView, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Run]:
    monkeypatch.setenv("VMAHYBRID_RUNDIR", str(tmp_path))

    def call(*argv: str) -> tuple[int, str, str]:
        code = main(list(argv))
        found = capsys.readouterr()
        return code, found.out, found.err

    with serve(view, tmp_path / "api.sock"):
        yield call


def test_status(view: FakeView, run: Run) -> None:
    code, out, err = run()
    assert (code, err) == (0, "")
    assert out == run("status")[1]
    for text in ("vmahybrid 0.1.0: ready, pid 42", "veth0", "generic XDP on a virtual driver", "sockperf", "latency",
                 "10.0.0.1:11111", "ring 2", "4711:14 sockperf", "all is well"):  # fmt: skip
        assert text in out, text
    assert "\x1b" not in out


@pytest.mark.parametrize("words", [
    "cli.main status", "cli.main flows", "cli.main explain 4711", "cli.main config", "cli.main run nope-日本",
    "vma_stats.main -v 1 --once", "vma_stats.main -v 3 --once", "vma_stats.main -v 5", "vma_stats.main --top -c 1",
    "vma_stats.main -n 日本 --once", "vma_stats.main -p 日本",
])
def test_names_that_the_locale_has_no_characters_for(view: FakeView, tmp_path: Path, words: str) -> None:
    view.flow_list = [flow(comm="日本")]
    view.explain_steps = [ExplainStep("日本", True, "… 日本")]
    view.settings["limits.rules"]["description"] = "日本 …"
    view.readings = {4711: [ProcessStats(process(comm="日本"), 100.0, [sock(comm="日本")], [], [])]}
    module, *argv = words.split()
    with serve(view, tmp_path / "api.sock"):
        env = {**os.environ, "PYTHONIOENCODING": "iso-8859-1:strict", "VMAHYBRID_RUNDIR": str(tmp_path)}
        done = subprocess.run([sys.executable, "-P", "-m", f"vmahybrid.{module}", *argv], env=env, capture_output=True,
                              timeout=20, check=False)
    assert b"Traceback" not in done.stderr, done.stderr.decode("latin-1")
    assert b"??" in done.stdout + done.stderr


def test_status_says_what_is_wrong(view: FakeView, run: Run) -> None:
    view.health = ["interface eth9 does not exist"]
    code, out, _ = run()
    assert (code, out.splitlines()[-1]) == (1, "! interface eth9 does not exist")
    view.health, view.ready = [], False
    code, out, _ = run()
    assert code == 1
    assert "not ready" in out


def test_status_of_what_is_not_attached(view: FakeView, run: Run) -> None:
    """Without a rule it is off, which is no fault; what can't be attached for its rules has a reason."""
    off = {"attached": False, "hook": "generic XDP, off: no rule", "reason": "none", "reason_text": "", "remedy": ""}
    held = {"attached": False, "hook": "generic XDP, off: held by 1", "backend": "kernel", "mode": "none",
            "reason": "interface-busy", "reason_text": "held by 1", "remedy": "stop 1"}
    view.interface_list = [interface(name="veth1", **off), interface(name="veth2", **held),
                           interface(name="veth3", attached=False, backend="kernel", mode="none", reason="none",
                                     reason_text="not asked for", remedy="")]
    lines = run()[1].splitlines()
    rows = {line.split()[0]: line for line in lines if line.startswith("veth")}
    assert "  generic, off  " in rows["veth1"]
    assert rows["veth2"].split()[2:4] == rows["veth3"].split()[2:4] == ["kernel", "none"]
    assert [line.strip() for line in lines if line.startswith("  veth")] == [
        "veth1: generic XDP, off: no rule", "veth2: held by 1. To change it: stop 1", "veth3: not asked for"]


def test_status_of_a_program_that_has_a_name(view: FakeView, run: Run) -> None:
    view.readings[99] = [ProcessStats(process(99, application_id="feed7"), 1.0, [], [], [])]
    rows = [line.split() for line in run()[1].splitlines()]
    assert ["99", "sockperf", "(feed7)", "latency"] in [row[:4] for row in rows]
    assert ["4711", "sockperf", "latency"] in [row[:3] for row in rows]


def test_status_json(run: Run) -> None:
    body = json.loads(run("--json")[1])
    assert (body["schema"], body["pid"], body["flows"][0]["flow_id"]) == (1, 42, 9)


def test_one_line_for_equal_remedies(view: FakeView, run: Run) -> None:
    view.interface_list = [interface(name=f"dummy{n}", remedy="ip link set IF up") for n in range(3)]
    assert run()[1].count("ip link set IF up") == 1


def test_foreign_text_is_harmless_and_everything_fits(view: FakeView, run: Run) -> None:
    odd = process(99, comm="a\x1b[2J\n", profile="x" * 31, netns="n" * 64)
    view.readings[99] = [ProcessStats(odd, 1.0, [], [], [])]
    long = "255.255.255.255:65535"
    wide = {"comm": "abcdefghijklmno", "pid": 4194304, "fd": 1023, "interface": "enp129s0f1np1", "packets": 10**15,
            "reason": "destination"}  # fmt: skip
    view.flow_list = [flow(123456 + n, local=long, remote=long, **wide) for n in range(30)]
    view.interface_list = [interface(name="enp129s0f1np1", netns="n" * 64, reason_text="word " * 60, remedy="do " * 90)]
    for argv in ([], ["flows"], ["config"]):
        _, out, _ = run(*argv)
        assert max(map(len, out.splitlines())) <= 100, argv
        assert "\x1b" not in out
    assert "and 10 more: vmahybrid flows" in run()[1]
    assert run("flows")[1].count("1234") == 30


def test_flows(view: FakeView, run: Run) -> None:
    assert "10.0.0.1:11111  *:*" in run("flows")[1]
    assert json.loads(run("flows", "--json")[1])["schema"] == 1
    code, out, _ = run("flows", "add", "kernel", "*:53", "--remote", "10.0.0.9:*", "--proto", "tcp", "--interface", "e")
    assert code == 0
    assert "operator" in out
    assert view.calls[:1] == [("add_flow", "kernel", "tcp", "*:53", "10.0.0.9:*", "*", "e")]
    for argv in (("--json", "add"), ("add", "--json")):
        assert json.loads(run("flows", *argv, "drop", "*:9")[1])["flows"][0]["action"] == "drop"
    view.flow_list = view.flow_list[:2]
    assert run("flows", "delete", "10") == (0, "flow 10 deleted\n", "")
    assert run("flows", "delete", "10")[0] == 1
    view.flow_list.clear()
    assert run("flows")[1] == "no flows\n"


def test_tcp_connections(view: FakeView, run: Run) -> None:
    def tcp(fd: int, **changes: Any) -> SocketView:
        return sock(fd, proto="tcp", local="10.0.0.1:80", **changes)

    assert run("flows", "--tcp")[1] == "no TCP connections\n"
    view.readings[4711][0].sockets[:] = [
        tcp(5, remote="10.0.0.2:4000", state="ESTABLISHED", counters={"rx_bytes": 1000, "rx_os_bytes": 234}),
        tcp(6, remote="10.0.0.2:4001", offloaded=False, reason="tcp-bulk"), tcp(7), tcp(8, offloaded=False),
        sock(9, remote="10.0.0.2:53")]
    rows = [line.split() for line in run("flows", "--tcp")[1].splitlines()]
    assert rows[1] == ["4711:5", "sockperf", "10.0.0.1:80", "10.0.0.2:4000", "ESTABLISHED", "ring", "2", "1234", "0"]
    assert rows[2] == ["4711:6", "sockperf", "10.0.0.1:80", "10.0.0.2:4001", "kernel", "0", "0", "tcp-bulk"]
    assert rows[3] == ["4711:7", "sockperf", "10.0.0.1:80", "*:*", "LISTEN", "kernel", "and", "rings", "0", "0"]
    assert len(rows) == 4
    body = json.loads(run("flows", "--tcp", "--json")[1])
    assert [s["fd"] for s in body["connections"]] == [5, 6, 7]
    assert body["without_slot"] == []


def test_tcp_connections_that_are_not_listed(view: FakeView, run: Run) -> None:
    """The page has room for some; those beyond are named with what shows them."""
    view.readings[4711] = [ProcessStats(process(4711, sockets_over=57), 1.0, [], [], [])]
    out = run("flows", "--tcp")[1]
    assert re.sub(r"\s+", " ", out).endswith(
        " 4711: 57 socket(s) more found no slot in its statistics page: raise VMA_STATS_FD_NUM to see them ")
    assert max(map(len, out.splitlines())) <= 100
    assert json.loads(run("flows", "--tcp", "--json")[1])["without_slot"] == [{"pid": 4711, "sockets": 57}]


def test_explain(view: FakeView, run: Run) -> None:
    view.explain_steps.append(ExplainStep("traffic", True, "word " * 50))
    view.explain_steps.append(ExplainStep("ladder", True, "eth0: verbs: none", "run as root", "no-cap-net-raw"))
    code, out, _ = run("explain", "4711:14")
    assert code == 0
    assert out.startswith("socket 4711:14\n  ok  session    connected\n  no  ring       none\n")
    assert "-> doctor" in out
    assert "  ok  ladder     eth0: verbs: none (no-cap-net-raw)\n" in out
    assert max(map(len, out.splitlines())) <= 100
    body = json.loads(run("explain", "10.0.0.1:53", "--json")[1])
    assert (body["schema"], body["socket"]) == (1, "10.0.0.1:53")
    assert [step["reason"] for step in body["steps"]] == ["", "", "", "no-cap-net-raw"]
    run("explain", "../../status")
    assert view.calls[-1] == ("explain", "10.0.0.1:53")  # a slash never gets out of its part of the path


def test_explain_many_sockets(view: FakeView, run: Run) -> None:
    """The same is said once, unless each is asked for."""
    for fd in range(1000):
        text = f"4711:{fd} TCP [fd00::1]:{fd}: on the kernel: a: b"
        view.explain_steps.append(ExplainStep("flow", False, text, "wait", "tcp-kernel"))
    for fd in range(1000, 1003):
        view.explain_steps.append(ExplainStep("flow", True, f"4711:{fd} TCP 10.0.0.1:80: offloaded"))
    out = run("explain", "4711")[1]
    assert "  no  flow       4711:0, 4711:1, 4711:2 and 997 more TCP: each on the kernel: a: b (tcp-kernel)\n" in out
    assert out.count("wait") == 1 and out.count(": offloaded") == 3
    assert run("explain", "4711", "--all")[1].count("on the kernel: a: b") == 1000
    assert len(json.loads(run("explain", "4711", "--json")[1])["steps"]) == len(view.explain_steps)


def test_config(view: FakeView, run: Run) -> None:
    assert "limits.rules  1024 rules  default" in run("config")[1]
    assert run("config", "set", "limits.rules=7", "control.mode=abc")[0] == 0
    assert (view.settings["limits.rules"]["value"], view.settings["control.mode"]["value"]) == (7, "abc")
    assert run("config", "set", "nope=1") == (
        2, "", "vmahybrid: nope: no such configuration key. vmahybrid config lists them\n"
    )  # fmt: skip


@pytest.mark.parametrize(("argv", "code", "tokens"), [
    (["statsu"], 2, ["statsu", "did you mean status?"]),
    (["frobnicate"], 2, ["frobnicate", "the commands are status, flows"]),
    (["flows", "--jso"], 2, ["--jso"]),
    (["--bogus"], 2, ["--bogus"]),
    (["flows", "add", "fly", "*:1"], 2, ["flows add", "'fly'"]),
    (["flows", "add", "drop", "*:1"], 1, ["flow *:1", "the table is full", "raise limits.rules"]),
    (["flows", "add", "drop", "bad"], 2, ["'bad' is not ADDR:PORT"]),
    (["flows", "delete", "x"], 2, ["'x'", "not a number"]),
    (["flows", "explode"], 2, ["'explode'"]),
    (["explain"], 2, ["explain", "PID[:FD]|ADDR:PORT"]),
    (["explain", ""], 2, ["socket ''", "neither PID:FD, PID nor ADDR:PORT"]),
    (["explain", "x"], 2, ["'x' is none of"]),
    (["explain", "1:1"], 1, ["socket 1:1", "no such socket"]),
    (["config", "set", "x"], 2, ["'x'", "not KEY=VALUE"]),
    (["doctor", "nope0"], 2, ["'nope0'", "no such interface"]),
    (["completion", "fish"], 2, ["'fish'"]),
    (["run"], 2, ["no command is given"]),
])  # fmt: skip
def test_errors_are_one_line_that_names_the_token(run: Run, argv: list[str], code: int, tokens: list[str]) -> None:
    found, out, err = run(*argv)
    assert (found, out) == (code, "")
    assert err.startswith("vmahybrid: ")
    assert err.count("\n") == 1
    for token in tokens:
        assert token in err


def test_no_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("VMAHYBRID_RUNDIR", str(tmp_path))
    assert main([]) == 1
    assert capsys.readouterr().err == (
        f"vmahybrid: service at {tmp_path}/api.sock: no such socket. start it: vmahybrid start\n"
    )
    (tmp_path / "api.sock").write_text("")
    assert main([]) == 1
    assert capsys.readouterr().err.endswith("start it: vmahybrid start\n")


def test_not_our_api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import socket
    import threading

    monkeypatch.setenv("VMAHYBRID_RUNDIR", str(tmp_path))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "api.sock"))
        server.listen()

        def answer() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(4096)
                peer.sendall(b"HTTP/1.1 500 No\r\ncontent-length: 2\r\nconnection: close\r\n\r\n[]")

        thread = threading.Thread(target=answer)
        thread.start()
        assert main([]) == 1
        thread.join()
    assert capsys.readouterr().err == "vmahybrid: GET /v1/status: HTTP 500. is this the API of vmahybrid?\n"


@pytest.mark.parametrize("argv", [["-h"], *([name, "--help"] for name in COMMANDS), ["flows", "add", "-h"]])
def test_help(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    assert capsys.readouterr().out.startswith("usage: vmahybrid")


@pytest.mark.parametrize("argv", [["version"], ["--version"]])
def test_version(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    assert capsys.readouterr().out.startswith("vmahybrid ")


def test_the_unit_of_systemd(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["unit"]) == 0
    path = tmp_path / "vmahybrid.service"
    path.write_text(capsys.readouterr().out)
    unit = configparser.ConfigParser(interpolation=None)
    unit.read(path)
    program, *arguments = shlex.split(unit["Service"]["ExecStart"])
    assert Path(program) == Path(sys.executable).parent / "vmahybrid" and os.access(program, os.X_OK)
    assert build_parser().parse_args(arguments).foreground
    assert unit["Service"]["Type"] == "notify" and unit["Service"]["Restart"] == "on-failure"
    if shutil.which("systemd-analyze"):
        assert subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True).stderr == ""


def test_a_path_in_the_unit() -> None:
    assert [quoted(path) for path in ("/opt/v/bin/vmahybrid", "/my opt/50%", '/a"b$')] == [
        "/opt/v/bin/vmahybrid", '"/my opt/50%%"', '"/a\\"b$$"']


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_is_valid(shell: str) -> None:
    text = script(shell, build_parser(with_start=False))
    for word in (*COMMANDS, "VMA_RX_POLL", "ultra-latency", "--remote", "delete"):
        assert word in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""


@pytest.mark.parametrize(("words", "expected"), [
    (["vmahybrid", "sta"], {"status", "start"}),
    (["vmahybrid", "flows", ""], {"add", "delete", "--json", "--tcp", "-h", "--help"}),
    (["vmahybrid", "flows", "add", "k"], {"kernel"}),
    (["vmahybrid", "run", "-p", "lat"], {"latency"}),
    (["vmahybrid", "run", "-p", "/etc/passw"], {"/etc/passwd", *glob.glob("/etc/passwd?")}),
    (["vmahybrid", "config", "show", "VMA_RX_POLL_"],
     {"VMA_RX_POLL_INIT", "VMA_RX_POLL_ON_TX_TCP", "VMA_RX_POLL_YIELD"}),
    (["vmahybrid", "config", "set", "limits.s"], {"limits.sessions="}),
    (["vmahybrid", "config", "diff", "thr"], {"throughput"}),
    (["vmahybrid", "config", "check", "/etc/passw"], {"/etc/passwd", *glob.glob("/etc/passwd?")}),
    (["vmahybrid", "completion", ""], {"bash", "zsh", "-h", "--help"}),
    (["vmahybrid", "run", "-p", "ow"], {"own-profile"}),
    (["vmahybrid", "run", "--profile", "=", "ow"], {"own-profile"}),
    (["vmahybrid", "run", "-e", "VMA_SPE"], {"VMA_SPEC=", "VMA_SPEC_PARAM1=", "VMA_SPEC_PARAM2="}),
    (["vmahybrid", "run", "-e", "VMA_SPEC", "=", "lat"], {"latency"}),
    (["vmahybrid", "run", "-e", "VMA_SPEC", "=", "ow"], {"own-profile"}),
    (["vmahybrid", "run", "-e", "VMA_SPEC=lat"], {"VMA_SPEC=latency"}),  # as zsh splits
    (["vmahybrid", "run", "-e", "VMA_HYBRID_TCP", "="], {"kernel", "offload", "adaptive"}),
    (["vmahybrid", "run", "-e", "VMA_HYBRID_TCP=o"], {"VMA_HYBRID_TCP=offload"}),
    (["vmahybrid", "run", "-e", "VMA_TRACELEVEL", "=", "d"], {"debug", "details"}),
    (["vmahybrid", "run", "-e", "VMA_TX_MC_LOOPBACK", "="], {"0", "1"}),
    (["vmahybrid", "run", "-e", "VMA_LOG_FILE", "=", "/etc/passw"], {"/etc/passwd", *glob.glob("/etc/passwd?")}),
    (["vmahybrid", "run", "-e", "VMA_RX_POLL", "="], set()),
    (["vmahybrid", "config", "set", "VMA_SPEC", "=", "lat"], {"latency"}),
    (["vmahybrid", "config", "set", "log.level", "=", "w"], {"warning"}),
    (["vmahybrid", "config", "set", "bulk.switch", "="], {"true", "false"}),
    (["vmahybrid", "config", "diff", "own"], {"own-profile"}),
    (["vmahybrid", "explain", MINE[:-1]], {MINE}),
    (["vma_stats", "--v"], {"--view", "--version"}),
    (["vma_stats", "-"], STATS_OPTIONS),
    (["vma_stats", "-v", ""], set("12345")),
    (["vma_stats", "--view", "="], set("12345")),
    (["vma_stats", "--view="], {f"--view={n}" for n in "12345"}),
    (["vma_stats", "-d", ""], {"1", "2"}),
    (["vma_stats", "-D", ""], set("0123")),
    (["vma_stats", "-l", "de"], {"debug", "details"}),
    (["vma_stats", "-k", "/proc/sy"], {"/proc/sys", "/proc/sysvipc"}),
    (["vma_stats", "-k", "@", "-p", ""], {MINE}),
    (["vma_stats", "-k", "@", "--name", ""], {"@comm"}),
    (["vma_stats", "-p", MINE, "-S", "0"], {"0"}),
    (["vma_stats", "-S", "0", "in"], {"info"}),
    (["vma_stats", "-i", ""], set()),
])  # fmt: skip
def test_bash_completes(tmp_path: Path, words: list[str], expected: set[str]) -> None:
    """With a profile of our own, and with the statistics file of a program (this one) and of a dead one; @ is where."""
    (tmp_path / "own-profile.conf").touch()
    (tmp_path / f"vmastat.{MINE}").touch()
    (tmp_path / "vmastat.99999999").touch()
    text = script("bash", build_parser(with_start=False))
    quoted = " ".join(f"'{tmp_path if word == '@' else word}'" for word in words)
    text += f'\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _{words[0]}; printf "%s\\n" "${{COMPREPLY[@]}}"\n'
    env = {**os.environ, "VMA_HYBRID_PROFILE_DIR": str(tmp_path), "VMA_STATS_SHMEM_DIR": str(tmp_path)}
    done = subprocess.run(["bash"], input=text, text=True, capture_output=True, check=True, env=env)
    comm = Path(f"/proc/{MINE}/comm").read_text().split()
    assert set(done.stdout.split()) == (set(comm) if expected == {"@comm"} else expected)
    assert done.stderr == ""


@pytest.mark.parametrize(("typed", "shown"), [
    ("vmahybrid run -e VMA_SPEC=multi_ring_l", "-e VMA_SPEC=multi_ring_latency"),
    ("vmahybrid run -e VMA_HYBRID_TCP=o", "-e VMA_HYBRID_TCP=offload"),
    ("vmahybrid config set log.level=w", "set log.level=warning"),
    ("vma_stats --find", "vma_stats --find_pid"),
])  # fmt: skip
def test_bash_completes_what_is_typed(tmp_path: Path, typed: str, shown: str) -> None:
    """On a terminal, by the shell's own splitting of words."""
    file = tmp_path / "rc"
    file.write_text(script("bash", build_parser(with_start=False)) + "PS1='$ '\n")
    shell = Terminal(["bash", "--noprofile", "--rcfile", str(file), "-i"], HISTFILE="")
    try:
        shell.until(lambda text: "$" in text)
        shell.keys(typed, "\t")
        shell.until(lambda text: shown in text)
    finally:
        shell.close()


def test_colour_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    style = output.Style.of(Terminal())  # type: ignore[arg-type]
    assert style.paint("x", "red") == "\x1b[31mx\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert output.Style.of(Terminal()).paint("x", "red") == "x"  # type: ignore[arg-type]


@pytest.mark.parametrize(("seconds", "text"), [
    (-1, "0 s"), (59, "59 s"), (61, "1 min"), (3600, "1 h"), (3725, "1 h 2 min"), (90061, "1 d 1 h"),
])  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert output.duration(seconds) == text


@pytest.mark.parametrize(("count", "text"), [
    (0, "0"), (999999, "999999"), (1234567, "1.23M"), (999499999, "999M"), (999999999, "1G"), (123456789012, "123G"),
    (10**18, "1E"), (1 << 63, "9.22E"),
])  # fmt: skip
def test_short_numbers(count: int, text: str) -> None:
    assert output.short(count) == text


def test_a_table_shrinks_the_right_columns() -> None:
    columns = [output.Column("A"), output.Column("B", shrink=2), output.Column("C", shrink=1), output.Column("D")]
    lines = output.table(columns, [["a" * 30, "b" * 40, "c" * 40, ""]], 90)
    assert lines[1] == f"{'a' * 30}  {'b' * 15}…  {'c' * 40}"
    assert output.table(columns, []) == []


def test_start_up_time() -> None:
    """What a shell waits for before anything happens; the best of five, this machine is shared."""
    best = 9.0
    for _ in range(5):
        started = time.monotonic()
        subprocess.run([sys.executable, "-m", "vmahybrid.cli.main", "--version"], check=True, capture_output=True,
                       cwd=ROOT, env=os.environ)  # fmt: skip
        best = min(best, time.monotonic() - started)
    assert best < 0.4


def test_slow_modules_are_imported_only_when_needed() -> None:
    code = ("import sys; from vmahybrid.cli.main import main; main(['--version']);"
            "print([m for m in ('httpx', 'fastapi', 'pyroute2', 'bcc', 'asyncio') if m in sys.modules])")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "[]"
