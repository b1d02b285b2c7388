"""vma_stats: options, error texts and exit codes, choice of the process, actions, and the loop."""

import contextlib
import json
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_view import FakeView, flow, process, serve, sock
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.test_stats_page import fill_socket, page_bytes

from vmahybrid.cli.run import library
from vmahybrid.contracts import lib, pack
from vmahybrid.service.view import ProcessStats
from vmahybrid.stats.page import header, read_page
from vmahybrid.vma_stats import directory
from vmahybrid.vma_stats.delta import delta
from vmahybrid.vma_stats.main import main
from vmahybrid.vma_stats.options import OptionError, parse
from vmahybrid.vma_stats.passthrough import sockets_of

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def view() -> FakeView:
    return FakeView()


@pytest.fixture
def run(
    view: FakeView, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Run]:
    """vma_stats in this process, against the real API over a Unix socket; the pauses are recorded, not made."""
    monkeypatch.setenv("VMAHYBRID_RUNDIR", str(tmp_path))
    with serve(view, tmp_path / "api.sock"):
        monkeypatch.setattr("vmahybrid.vma_stats.main.time.sleep", lambda _seconds: None)
        monkeypatch.setattr("vmahybrid.vma_stats.passthrough.sockets_of", lambda _pid, _known: [])

        def call(*argv: str) -> tuple[int, str, str]:
            code = main(["-F", *argv])
            found = capsys.readouterr()
            return code, found.out, found.err

        yield call


def test_a_name_steers_no_terminal(view: FakeView, run: Run) -> None:
    name = "e\x1b]0;PWN\a\x1b[31mX\n"
    view.readings = {4711: [ProcessStats(process(comm=name), 100.0, [sock(comm=name)], [], [])]}
    for argv in (["-v", "1"], ["-v", "2"], ["-v", "3"], ["-v", "5"], ["-S", "14"], ["--top"]):
        code, out, err = run("--once", *argv)
        assert code == 0
        assert {c for c in out + err if not c.isprintable()} <= {"\n", "\t"}, argv
        assert "e?]0;PWN??[31mX?" in out or argv == ["--top"]


@pytest.mark.parametrize(("argv", "text"), [
    (["-v", "6"], "'-v' Invalid view val: 6"),
    (["-v", "0"], "'-v' Invalid view val: 0"),
    (["--view=x"], "'-v' Invalid view val: x"),
    (["-d", "3"], "'-d' Invalid details val: 3"),
    (["-i", "0"], "'-i' Invalid interval val: 0"),
    (["-i", "-1"], "'-i' Invalid interval val: -1"),
    (["-i", "1.5"], "'-i' Invalid interval val: 1.5"),
    (["-c", "x"], "'-c' Invalid cycles val: x"),
    (["-p", "abc"], "'-p' Invalid pid val: abc"),
    (["-p", "0"], "'-p' Invalid pid val: 0"),
    (["-p", "12x"], "'-p' Invalid pid val: 12x"),
    (["-p", "٣"], "'-p' Invalid pid val: ٣"),
    (["-l", "loud"], "'-l' Invalid log level val: loud"),
    (["-l", "9"], "'-l' Invalid log level val: 9"),
    (["-l", "0"], "'-l' Invalid log level val: 0"),
    (["-l", "00"], "'-l' Invalid log level val: 00"),
    (["-l", "8"], "'-l' Invalid log level val: 8"),
    (["--log_level=-1"], "'-l' Invalid log level val: -1"),
    (["-S", "1", "0"], "'-S' Invalid log level val: 0"),
    (["-D", "4"], "'-D' Invalid details level val: 4"),
    (["-S", "x"], "'-S' Invalid fd val: x"),
    (["-S", "1", "loud"], "'-S' Invalid log level val: loud"),
    (["-s", "1,x"], "Invalid fd val: x"),
    (["-s", "4-"], "Invalid fd val: 4-"),
    (["-s", ","], "Invalid fd val: ,"),
    (["-s", "1," * 51], "Invalid fd val size : 102, cannot exceed 100"),
    (["-s", "99999999"], "Invalid fd val: 99999999"),
    (["-q"], "option -q not recognized"),
    (["--nope"], "option --nope not recognized"),
    (["stray"], "unexpected argument 'stray'"),
    (["-S", "1", "info", "stray"], "unexpected argument 'stray'"),
    (["-p"], "option -p requires argument"),
    (["-v", "6\n7"], "'-v' Invalid view val: 6?7"),
    (["-s", "\x1b[2J"], "Invalid fd val: ?[2J"),
])  # fmt: skip
def test_wrong_options(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    found = capsys.readouterr()
    assert found.err == f"vmastat: {text}\n"
    assert found.out.startswith("\nVMA Statistics\nUsage:\n\tvma_stats [-p pid]")


@pytest.mark.parametrize("argv", [["-h"], ["--help"], ["-?"], ["--hel"]])
def test_help(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    text = capsys.readouterr().out
    for option in ("-p, --pid=<pid>", "-k, --directory=<directory>", "-S, --fd_dump=<fd> [<level>]", "-s, --sockets",
                   "-F, --forbid_clean", "--json", "--once"):  # fmt: skip
        assert option in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-V"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("vmastat: Linked with VMA version: vmahybrid ")
    assert second.startswith("vmastat: Build Date: ")


def test_options() -> None:
    options = parse(["-s", "4-16,1,9-7", "-d2", "-i", "5", "-l", "debug", "-S", "17", "fine", "-n", "app"])
    assert [fd for fd in range(20) if options.shows(fd)] == [1, 4, *range(5, 17)]
    assert (options.deltas, options.interval, options.log_level, options.name) == (True, 5, 5, "app")
    assert (options.dump_fd, options.dump_level) == (17, 6)
    assert parse([]).shows(12345)
    assert [parse(["-l", level]).log_level for level in "1234567"] == [1, 2, 3, 5, 6, 7, 8]
    assert [parse(["-l", level]).log_level for level in ("none", "panic", "all")] == [-1, 0, 8]
    assert (parse(["-p", "1", "-n", "x"]).pid, parse(["-n", "x", "-p", "1"]).name) == (None, None)
    assert parse(["-n", "x", "-f"]).name is None


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(["-p", "-s", "-S", "-v", "-d", "--once", "1", "4-9", "-l", "7"]), st.text())))
def test_any_command_line_is_options_or_one_error(argv: list[str]) -> None:
    with contextlib.suppress(OptionError):
        parse(argv)


def test_no_process(view: FakeView, run: Run) -> None:
    view.readings.clear()
    code, out, err = run()
    assert (code, err) == (1, "vmastat: Failed to identify process...\n")
    assert "Usage:" in out
    assert run("--json") == (1, "", "vmastat: Failed to identify process...\n")
    code, out, err = run("-v5")
    assert (code, err) == (0, "")
    assert out.startswith("Proto Offloaded")
    assert out.count("\n") == 1


def test_choice_of_the_process(view: FakeView, run: Run) -> None:
    mine = os.getpid()
    view.readings[mine] = [ProcessStats(process(mine, comm="worker", cmdline="/opt/app/feed --x"), 1.0, [], [], [])]
    assert run("--once")[1].startswith("vmastat: stats for application: sockperf with pid: 4711\n")
    for argv in (["-p", str(mine)], ["-n", "worker"], ["-n", "feed"], ["-n", Path(os.readlink("/proc/self/exe")).name]):
        assert run("--once", *argv)[1].startswith(f"vmastat: stats for application: worker with pid: {mine}\n"), argv
    assert run("-n", "nope")[::2] == (1, "vmastat: Failed to identify process...\n")
    assert run("-p", "99")[::2] == (1, "vmastat: VMA statistics data for process id 99 not found\n")


def test_directory(view: FakeView, run: Run, tmp_path: Path) -> None:
    view.readings[1] = [ProcessStats(process(1, comm="init"), 1.0, [], [], [])]
    missing = tmp_path / "nope"
    assert run("-k", str(missing)) == (
        1, "", f"vmastat: opendir {missing} failed (errno=2 No such file or directory)\n"
    )  # fmt: skip
    assert run("-k", "") == (1, "", "vmastat: opendir  failed (errno=2 No such file or directory)\n")
    assert run("-k", str(tmp_path), "--once")[2] == "vmastat: Failed to identify process...\n"
    elsewhere = f"process id 1 not found in {tmp_path}: the program's VMA_STATS_SHMEM_DIR is another directory\n"
    assert run("-k", str(tmp_path), "-p", "1", "--once")[::2] == (1, f"vmastat: VMA statistics data for {elsewhere}")
    (tmp_path / "vmastat.1").write_bytes(b"VMS1")
    assert "with pid: 1\n" in run("-k", str(tmp_path), "--once")[1]


@contextlib.contextmanager
def mapped(path: Path) -> Iterator[None]:
    """By this process, as a program has its own."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        yield


def test_stale_files(tmp_path: Path) -> None:
    dead = int(Path("/proc/sys/kernel/pid_max").read_text()) + 5
    ours, other, link, fifo = (tmp_path / f"vmastat.{dead + n}" for n in range(4))
    alive = tmp_path / f"vmastat.{os.getpid()}"
    ours.write_bytes(b"VMS1....")
    alive.write_bytes(b"VMS1....")
    other.write_bytes(b"libvma's own")
    (tmp_path / "target").write_bytes(b"VMS1")
    link.symlink_to(tmp_path / "target")
    os.mkfifo(fifo)
    with mapped(alive):
        assert directory.remove_stale(str(tmp_path)) == [dead]
    assert sorted(os.listdir(tmp_path)) == sorted(["target", *(p.name for p in (other, link, fifo, alive))])


def page_started(when: float) -> bytes:
    return bytes(pack("struct vmh_stats_page", magic=lib.VMH_STATS_MAGIC, started_ns=int(when * 1e9)))


def test_a_file_of_somebody_who_had_the_pid_before_is_stale(tmp_path: Path) -> None:
    (tmp_path / f"vmastat.{os.getpid()}").write_bytes(page_started(directory.began(os.getpid()) - 10))
    with mapped(tmp_path / f"vmastat.{os.getpid()}"):
        assert directory.remove_stale(str(tmp_path)) == [os.getpid()]


OWNER = """import fcntl, mmap, os, sys
path, page = f"{sys.argv[1]}/vmastat.{os.getpid()}", bytes.fromhex(sys.argv[2])
with open(path, "xb") as file:
    file.write(page)
fd = os.open(path, os.O_RDWR)
fcntl.flock(fd, fcntl.LOCK_SH)
mapping = mmap.mmap(fd, 0)
fcntl.flock(fd, fcntl.LOCK_UN)  # the mapping has the same open file: closing the descriptor would not be enough
print(flush=True)
if sys.argv[3] == "leader":
    import threading
    threading.Thread(target=input).start()
    import ctypes
    ctypes.CDLL(None).syscall(93 if os.uname().machine == "aarch64" else 60, 0)  # exit(2)
input()
if sys.argv[3] == "exec":
    os.execv("/bin/sh", ["sh", "-c", "echo; read line"])
mapping.close()
print(flush=True)
input()
"""


@pytest.mark.parametrize("how", ["exec", "unmapped"])
def test_a_file_that_its_process_has_no_longer_is_stale(tmp_path: Path, how: str) -> None:
    """Its lock is gone, and the process lives: what it has mapped says whether it still counts there."""
    argv = [sys.executable, "-c", OWNER, str(tmp_path), page_started(time.time())[:4096].hex(), how]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdin is not None and program.stdout is not None
        assert program.stdout.readline() == b"\n"
        assert directory.remove_stale(str(tmp_path)) == []
        program.stdin.write(b"\n")
        program.stdin.flush()
        assert program.stdout.readline() == b"\n"
        assert directory.remove_stale(str(tmp_path)) == [program.pid]
        program.kill()


def test_where_nobody_can_tell_what_is_mapped_the_file_stays(tmp_path: Path) -> None:
    """Its first thread has ended: /proc/PID/maps is empty."""
    argv = [sys.executable, "-c", OWNER, str(tmp_path), page_started(time.time())[:4096].hex(), "leader"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None and program.stdout.readline() == b"\n"
        deadline = time.monotonic() + 10
        while Path(f"/proc/{program.pid}/maps").read_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert directory.remove_stale(str(tmp_path)) == []
        program.kill()


def test_a_living_program_s_file_is_not_stale_whatever_its_pid_is_here(tmp_path: Path) -> None:
    """As in a container with process ids of its own. A kill ends that."""
    use = "import socket, time; s = socket.socket(2, 2); print(1, flush=True); time.sleep(60)"
    runtime = [name for name in os.environ.get("LD_PRELOAD", "").split(":") if name]
    env = {**os.environ, "LD_PRELOAD": ":".join([*runtime, str(library())]), "VMA_HYBRID_SOCKET": "/nonexistent",
           "VMA_STATS_SHMEM_DIR": str(tmp_path), "VMA_TRACELEVEL": "none"}
    foreign = tmp_path / f"vmastat.{int(Path('/proc/sys/kernel/pid_max').read_text()) + 5}"
    with subprocess.Popen([sys.executable, "-S", "-E", "-c", use], env=env, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None and program.stdout.readline() == b"1\n"
        (tmp_path / f"vmastat.{program.pid}").rename(foreign)
        assert directory.remove_stale(str(tmp_path)) == []
        program.kill()
        program.wait()
    assert len(directory.remove_stale(str(tmp_path))) == 1


def test_forbid_clean(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stale = tmp_path / f"vmastat.{int(Path('/proc/sys/kernel/pid_max').read_text()) + 5}"
    stale.write_bytes(b"VMS1")
    run("-k", str(tmp_path), "--once")  # the fixture gives -F
    assert stale.exists()
    main(["-k", str(tmp_path), "--once"])
    capsys.readouterr()
    assert not stale.exists()


def test_actions(view: FakeView, run: Run) -> None:
    assert "vmastat: Zero counters...\n fd" in run("-z", "--once")[1]
    run("-l", "debug", "-D", "2", "--once")
    code, out, _ = run("-S", "17", "info")
    assert code == 0
    assert out.splitlines()[1:] == ["vmastat: Dumping Fd 17 to VMA using log level = INFO..."]
    assert run("-S", "14", "info")[1].splitlines()[2:] == ["vmastat: Fd 14, udp 10.0.0.1:11111: on a ring"]
    assert run("-S", "14", "info", "--json")[1] == ""
    view.calls[-2:] = []
    assert "Dumping all Fd's to VMA using log level = INFO..." in run("-S", "0")[1]
    assert view.calls == [("zero", 4711), ("set_log", 4711, 5, 2), ("dump_fd", 4711, 17, 3), ("dump_fd", 4711, 0, 3)]


def test_cycles_and_headers(view: FakeView, run: Run) -> None:
    """2 header lines, 3 per cycle: the header comes again when 24 lines have been printed."""
    _, out, _ = run("-c", "20")
    lines = out.splitlines()[1:]
    headers = [number for number, line in enumerate(lines) if line.startswith(" fd")]
    assert headers == [0, 26, 52]
    assert sum(line.startswith(" 14  Rx:") for line in lines) == 20


def test_the_process_ends(view: FakeView, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = view.stats

    def once(pid: int) -> ProcessStats:
        reading = real(pid)
        del view.readings[pid]
        return reading

    monkeypatch.setattr(view, "stats", once)
    code, out, err = run()
    assert (code, err) == (0, "")
    assert out.endswith("vmastat: Proccess 4711 ended - exiting\n")


def test_passthrough_sockets(view: FakeView, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of our own process, from /proc; where it has sockets over the limit, its flows say which are on a ring."""
    monkeypatch.setattr("vmahybrid.vma_stats.passthrough.sockets_of", sockets_of)
    mine = os.getpid()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client, \
            socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as six, server.accept()[0] as accepted:
        six.bind(("::1", 0))
        client.send(b"x" * 5)
        known = sock(50, mine, inode=os.fstat(client.fileno()).st_ino)
        view.readings[mine] = [ProcessStats(process(mine, comm="me", sockets_over=1), 1.0, [known], [], [])]
        view.flow_list.append(flow(11, pid=mine, fd=six.fileno()))
        _, out, err = run("-v5", "-p", str(mine), "-s", f"{server.fileno()},{six.fileno()},{accepted.fileno()}")
        here, there = (":".join(map(str, side.getsockname())) for side in (server, client))
        rows = [line.split() for line in out.splitlines()[1:]]
        wanted = [
            ["tcp", "No", "0", "0", here, "0.0.0.0:*", "LISTEN", str(os.fstat(server.fileno()).st_ino), f"{mine}/me"],
            ["tcp", "No", "5", "0", here, there, "ESTABLISHED", str(os.fstat(accepted.fileno()).st_ino), f"{mine}/me"],
            ["udp", "Yes", "0", "0", f"[::1]:{six.getsockname()[1]}", "[::]:*", str(os.fstat(six.fileno()).st_ino),
             f"{mine}/me"],
        ]
        assert sorted(rows) == sorted([*row, "-"] for row in wanted), out
        assert err == ""
        body = json.loads(run("-v5", "-p", str(mine), "-s", str(server.fileno()), "--json")[1])
        assert [(row["fd"], row["state"], row["offloaded"]) for row in body["passthrough"]] == [
            (server.fileno(), "LISTEN", False)]


def test_sockets_that_nobody_counts(view: FakeView, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every view says that there are some, and where they are listed."""
    monkeypatch.setattr("vmahybrid.vma_stats.passthrough.sockets_of", sockets_of)
    mine = os.getpid()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        fds = f"{server.fileno()},{client.fileno()}"
        view.readings[mine] = [ProcessStats(process(mine, comm="me"), 1.0, [], [], [])]
        for number in "1234":
            code, out, err = run("-v", number, "-p", str(mine), "-s", fds, "--once")
            assert (code, err) == (0, "vmastat: 2 sockets that the kernel alone serves are not counted: vma_stats -v 5 "
                                      "lists them\n"), out
        local = ":".join(map(str, client.getsockname()))
        _, out, _ = run("-p", str(mine), "-S", str(client.fileno()))
        assert f"Fd {client.fileno()}, tcp {local}: on the kernel alone, nothing is counted (vma_stats -v 5 " in out
        _, out, _ = run("--top", "-p", str(mine), "-s", fds, "--once")
        assert ", every 1 s: 1 programs, 2 sockets, 0 on rings, 2 not counted\n" in out
        row = next(line.split() for line in out.splitlines() if line.split()[2:3] == [str(client.fileno())])
        assert row[:6] == [str(mine), "me", str(client.fileno()), "tcp", "No", local]
        assert set(row[6:15]) == {"-"}
        known = sock(client.fileno(), mine, inode=0)
        view.readings[mine] = [ProcessStats(process(mine, comm="me"), 1.0, [known], [], [])]
        assert "1 sockets that the kernel alone" in run("-p", str(mine), "-s", fds, "--once")[2]


def test_passthrough_of_somebody_else(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_pid: int, _known: set[int]) -> list[dict[str, object]]:
        raise PermissionError

    monkeypatch.setattr("vmahybrid.vma_stats.passthrough.sockets_of", refuse)
    code, out, err = run("-v5")
    assert (code, out.count("\n")) == (0, 2)
    assert err == "vmastat: passthrough sockets of process 4711 are not shown: permission denied, ask as its user\n"


def test_json(view: FakeView, run: Run) -> None:
    socks = [sock(3, counters={"rx_packets": 10}), sock(4)]
    later = [sock(3, counters={"rx_packets": 30}), sock(4)]
    view.readings[4711] = [ProcessStats(process(), 1.0, socks, [], []), ProcessStats(process(), 3.0, later, [], [])]
    _, out, _ = run("--json", "-d2", "-c1", "-s", "3", "-z")
    body = json.loads(out)
    assert (body["schema"], body["details"]) == (1, "deltas")
    assert [(s["fd"], s["counters"]["rx_packets"]) for s in body["sockets"]] == [(3, 10)]
    assert json.loads(run("--json", "-v5")[1])["process"]["pid"] == 4711


def reading(at: float, **counters: int) -> dict[str, object]:
    base = json.loads(json.dumps({"read_at": at, "iomux": [], "rings": [], "sockets": [
        {"fd": 3, "inode": 9, "counters": sock(counters=counters).counters}]}))  # fmt: skip
    return dict(base)


@pytest.mark.parametrize(("before", "now", "rate"), [
    (reading(1, rx_packets=10), reading(3, rx_packets=30), 10),     # the real interval, not -i
    (reading(1, rx_packets=10), reading(1, rx_packets=30), 4),      # a page that was read once: -i
    (reading(1, rx_packets=100), reading(2, rx_packets=7), 7),      # zeroed in between
    (reading(1) | {"sockets": []}, reading(2, rx_packets=7), 7),    # a new socket
    (reading(1, rx_packets=1 << 32), reading(2, rx_packets=(1 << 32) + 5), 5),
])  # fmt: skip
def test_deltas(before: dict[str, object], now: dict[str, object], rate: int) -> None:
    assert delta(before, now, 5)["sockets"][0]["counters"]["rx_packets"] == rate


def test_a_new_socket_with_an_old_fd_is_new() -> None:
    before, now = reading(1, rx_packets=100), reading(2, rx_packets=150)
    now["sockets"][0]["inode"] = 10  # type: ignore[index]
    assert delta(before, now, 1)["sockets"][0]["counters"]["rx_packets"] == 150


def test_gauges_are_not_differenced() -> None:
    before, now = reading(1, rx_ready_packets=5, rx_limit=100), reading(2, rx_ready_packets=7, rx_limit=100)
    counters = delta(before, now, 1)["sockets"][0]["counters"]
    assert (counters["rx_ready_packets"], counters["rx_limit"]) == (7, 100)


def test_no_service(tmp_path: Path) -> None:
    """As a process of its own: what a user sees, and that no traceback comes."""
    done = subprocess.run(
        [sys.executable, "-m", "vmahybrid.vma_stats.main", "-F", "--once"], capture_output=True, text=True,
        env=os.environ | {"VMAHYBRID_RUNDIR": str(tmp_path), "VMA_STATS_SHMEM_DIR": str(tmp_path)},
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"vmastat: service at {tmp_path}/api.sock: no such socket. start it: vmahybrid start\n"
    )


def test_the_files_without_a_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """-k: of processes that run, if the file is their user's; orders stand in the file, for the program."""
    monkeypatch.setenv("VMAHYBRID_RUNDIR", str(tmp_path))
    mine = os.getpid()
    page = page_bytes(fill=fill_socket)
    (tmp_path / f"vmastat.{mine}").write_bytes(page)
    (tmp_path / f"vmastat.{os.getppid()}").symlink_to(tmp_path / f"vmastat.{mine}")
    (tmp_path / "vmastat.1").write_bytes(b"no page")
    note = f"vmastat: no service answers: what is in {tmp_path} is shown\n"

    def run(*argv: str) -> tuple[int, str, str]:
        code = main(["-F", "-k", str(tmp_path), *argv])
        found = capsys.readouterr()
        return code, found.out, found.err

    code, out, err = run("--once", "--json")
    assert (code, err) == (0, note)
    body = json.loads(out)
    assert (body["process"]["pid"], body["process"]["comm"]) == (mine, "sockperf")
    assert body["sockets"][0]["counters"]["rx_packets"] == 1 << 40
    assert set(body["process"]) == set(process().__slots__), "as the service says it"
    assert "with pid: " in run("--once", "-p", str(mine))[1]
    assert run("--once", "-p", "1")[::2] == (1, note + "vmastat: VMA statistics data for process id 1 not found\n")
    code, out, _ = run("-z", "-l", "details", "-D", "3", "-S", "14", "fine")
    assert code == 0 and "Fd 14, udp 10.0.0.1:11111: on a ring" in out
    with (tmp_path / f"vmastat.{mine}").open("rb") as file:
        page, there = header(file.fileno()), read_page(file.fileno())
    assert (there.log_level, there.log_details) == (4, 3)
    assert (page.dump_wanted, page.dump_fd, page.dump_level, page.asked) == (1, 14, 6, 2)
    assert there.sockets[0].counters["rx_packets"] == 0
    # without -k, those of the default directory
    monkeypatch.setattr("vmahybrid.vma_stats.main.DEFAULT_DIRECTORY", str(tmp_path))
    assert main(["-F", "--once"]) == 0
    assert capsys.readouterr().err.startswith(note)
    (tmp_path / f"vmastat.{mine}").unlink()
    assert main(["-F", "--once"]) == 1
    assert capsys.readouterr().err == (
        f"vmastat: service at {tmp_path}/api.sock: no such socket. start it: vmahybrid start\n")


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """Unlike tmp_path it is everybody's."""
    with tempfile.TemporaryDirectory(prefix="vmh-test-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.mark.root
@pytest.mark.parametrize(("group", "mode", "who"), [
    (0, 0o660, "ask as root, or set api.mode of the service"), (1, 0o660, "ask as root, or join the group daemon"),
    (1, 0o600, "ask as root, or set api.mode of the service"), (60999, 0o660, "ask as root, or set api.mode of the "
                                                                              "service")])  # fmt: skip
def test_a_service_that_this_user_may_not_ask(open_directory: Path, view: FakeView, group: int, mode: int,
                                              who: str) -> None:  # fmt: skip
    """It answers, for others: that, and who may, is said; with -k also which files can't be read."""
    mine, rundir = os.getpid(), open_directory
    command = [sys.executable, "-P", "-m", "vmahybrid.vma_stats.main", "-F", "--once"]

    def ask(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *argv], capture_output=True, text=True, user=65534, group=65534,
                              extra_groups=[], env=os.environ | {"VMAHYBRID_RUNDIR": str(rundir)}, cwd="/",
                              timeout=30)  # fmt: skip

    (rundir / f"vmastat.{mine}").write_bytes(page_bytes(fill=fill_socket))
    (rundir / f"vmastat.{mine}").chmod(0o600)
    with serve(view, rundir / "api.sock"):
        os.chown(rundir / "api.sock", 0, group)
        (rundir / "api.sock").chmod(mode)
        refused = f"vmastat: service at {rundir}/api.sock: permission denied"
        for argv in ([], ["-p", str(mine), "-z"], ["-v", "5"]):
            done = ask(*argv)
            assert (done.returncode, done.stdout, done.stderr) == (1, "", f"{refused}. {who}\n")
        note = f"{refused}: what is in {rundir} is shown. {who}\n"
        done = ask("-k", str(rundir))
        assert (done.returncode, done.stderr) == (
            1, f"{note}vmastat: the files of other users' processes there may not be read: {mine}\n"
               "vmastat: Failed to identify process...\n")
        (rundir / f"vmastat.{mine}").chmod(0o644)
        done = ask("-k", str(rundir))
        assert (done.returncode, done.stderr) == (0, note)
        assert f"with pid: {mine}\n" in done.stdout


def test_broken_pipe_and_ctrl_c(view: FakeView, tmp_path: Path) -> None:
    import signal

    command = [sys.executable, "-m", "vmahybrid.vma_stats.main", "-F", "-i", "30"]
    more = {"env": os.environ | {"VMAHYBRID_RUNDIR": str(tmp_path)}, "cwd": Path(__file__).parents[2]}
    with serve(view, tmp_path / "api.sock"):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more) as child:  # type: ignore[call-overload]
            assert child.stdout.readline().startswith("vmastat: stats for application")
            while not child.stdout.readline().startswith("----"):
                pass
            child.send_signal(signal.SIGINT)
            said = child.communicate(timeout=10)
            assert (child.returncode, *said) == (0, "vmastat: Got Ctrl-C (interrupted by user)\n", "")
        with subprocess.Popen([*command[:-1], "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more) as child:  # type: ignore[call-overload]
            child.stdout.close()
            assert (child.wait(20), child.stderr.read()) == (0, b"")


@pytest.mark.parametrize("command", [["vmahybrid", "version"], ["vma_stats", "-V"], ["vma_stats", "-h"]])
def test_a_full_device(command: list[str]) -> None:
    program, *options = command
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([Path(sys.executable).with_name(program), *options], stdout=full, stderr=subprocess.PIPE,
                              text=True, check=False, timeout=20)
    assert done.returncode == 1
    assert done.stderr.endswith("stdout: No space left on device\n") and done.stderr.count("\n") == 1
