"""vmahybrid run: what the program gets, what is refused, and the exit codes of env(1)."""

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from vmahybrid.cli.elf import SOFTVERBS, preload_problem
from vmahybrid.cli.run import assignment, environment, library
from vmahybrid.config import catalogue, effective
from vmahybrid.errors import NotPossibleHere, UsageError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def shim(tmp_path: Path) -> Path:
    """A library that may be preloaded: an empty one."""
    path = tmp_path / "libvmahybrid.so"
    source = tmp_path / "empty.c"
    source.write_text("int vmh_test_empty;\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, source], check=True)
    return path


def vmahybrid_run(shim: Path, *argv: str, command: str = "run", **env: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VMA", "LD_"))}
    return subprocess.run([sys.executable, "-m", "vmahybrid.cli.main", command, *argv], text=True, capture_output=True,
                          cwd=ROOT, env=kept | {"VMAHYBRID_LIB": str(shim)} | env)  # fmt: skip


def environment_of(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    assert done.returncode == 0, done.stderr
    return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)


def test_what_the_program_gets(shim: Path) -> None:
    found = environment_of(vmahybrid_run(shim, "-p", "Latency", "-e", "VMA_RX_POLL=-1", "-e", "VMA_TRACELEVEL=debug",
                                         "--", "env", MARK="x"))  # fmt: skip
    assert found["LD_PRELOAD"] == str(shim)
    assert (found["VMA_SPEC"], found["VMA_RX_POLL"], found["VMA_TRACELEVEL"]) == ("latency", "-1", "debug")
    assert found["VMA_HYBRID_PROFILE"] == "latency"
    assert found["MARK"] == "x"
    assert "VMA_HYBRID_SOCKET" not in found


def test_without_options_the_profile_is_safe_unless_one_is_chosen(shim: Path) -> None:
    found = environment_of(vmahybrid_run(shim, "env"))
    assert {name: value for name, value in found.items() if name.startswith("VMA")} == {
        "VMA_SPEC": "safe", "VMA_HYBRID_PROFILE": "safe", "VMAHYBRID_LIB": str(shim)}  # fmt: skip
    found = environment_of(vmahybrid_run(shim, "env", VMA_SPEC="rti"))
    assert found["VMA_SPEC"] == "rti" and "VMA_HYBRID_PROFILE" not in found


@pytest.mark.parametrize(("more", "named"), [(["VMA_SPEC=15"], "latency"), (["VMA_SPEC="], ""),
                                             (["VMA_SPEC=rti", "VMA_HYBRID_PROFILE=mine"], "mine")])  # fmt: skip
def test_the_profile_that_is_named_is_the_one_that_acts(shim: Path, more: list[str], named: str) -> None:
    found = environment_of(vmahybrid_run(shim, "-p", "safe", *(word for text in more for word in ("-e", text)), "env"))
    assert found["VMA_HYBRID_PROFILE"] == named


def test_other_preloads_stay_behind_the_shim(shim: Path) -> None:
    found = environment_of(vmahybrid_run(shim, "env", LD_PRELOAD=f"{shim} libm.so.6:libdl.so.2"))
    assert found["LD_PRELOAD"] == f"{shim}:libm.so.6:libdl.so.2"


def test_a_sanitizer_stays_before_the_shim(shim: Path) -> None:
    runtime = subprocess.run(["gcc", "-print-file-name=libubsan.so"], capture_output=True, text=True, check=True)
    sanitizer = str(Path(runtime.stdout.strip()).resolve())
    found = environment_of(vmahybrid_run(shim, "env", LD_PRELOAD=f"libm.so.6:{sanitizer}"))
    assert found["LD_PRELOAD"] == f"{sanitizer}:{shim}:libm.so.6"


def test_the_control_socket_follows_the_run_directory(shim: Path) -> None:
    assert environment_of(vmahybrid_run(shim, "env", VMAHYBRID_RUNDIR="/x"))["VMA_HYBRID_SOCKET"] == "/x/control.sock"
    found = environment_of(vmahybrid_run(shim, "env", VMAHYBRID_RUNDIR="/x", VMA_HYBRID_SOCKET="/y"))
    assert found["VMA_HYBRID_SOCKET"] == "/y"


def test_arguments_and_exit_code_are_the_programs(shim: Path) -> None:
    done = vmahybrid_run(shim, "--", "sh", "-c", 'printf "%s|" "$@"; exit 42', "sh", "-p", "--json", "--", "a b")
    assert (done.returncode, done.stdout) == (42, "-p|--json|--|a b|")


@pytest.fixture
def software(tmp_path: Path) -> str:
    """A directory with a libibverbs.so.1 that nothing loads."""
    (tmp_path / "libibverbs.so.1").touch()
    return str(tmp_path)


def test_softverbs_beside_the_shim(shim: Path, software: str) -> None:
    found = environment_of(vmahybrid_run(shim, "--softverbs", "--", "env", VMAHYBRID_SOFTVERBS=software,
                                         LD_LIBRARY_PATH=f"/x:{software}"))  # fmt: skip
    assert (found["LD_PRELOAD"], found["LD_LIBRARY_PATH"]) == (str(shim), f"{software}:/x")
    assert "LD_LIBRARY_PATH" not in environment_of(vmahybrid_run(shim, "env", VMAHYBRID_SOFTVERBS=software))


def test_softverbs_without_the_shim(shim: Path, software: str) -> None:
    done = vmahybrid_run(shim, "--", "env", "-u", "PATH", command="softverbs", VMAHYBRID_SOFTVERBS=software)
    found = environment_of(done)
    assert found["LD_LIBRARY_PATH"] == software
    assert "LD_PRELOAD" not in found
    done = vmahybrid_run(shim, "sh", "-c", "exit 5", command="softverbs", VMAHYBRID_SOFTVERBS=software)
    assert done.returncode == 5


@pytest.mark.parametrize(("command", "argv"), [("run", ["--softverbs", "true"]), ("softverbs", ["true"])])
def test_softverbs_that_is_not_built(shim: Path, tmp_path: Path, command: str, argv: list[str]) -> None:
    done = vmahybrid_run(shim, *argv, command=command, VMAHYBRID_SOFTVERBS=str(tmp_path / "none"))
    assert (done.returncode, done.stdout) == (77, "")
    assert done.stderr == (f"vmahybrid: softverbs: the software verbs device is not built: there is no {tmp_path}/none/"
                           "libibverbs.so.1. make build, or set VMAHYBRID_SOFTVERBS to its directory\n")  # fmt: skip


def test_softverbs_without_a_command(shim: Path) -> None:
    done = vmahybrid_run(shim, "--", command="softverbs")
    assert (done.returncode, done.stderr) == (
        2, "vmahybrid: softverbs: no command is given. vmahybrid softverbs -- COMMAND ARG...\n")


@pytest.mark.parametrize("command", ["run", "softverbs"])
def test_signals_are_as_without_us(shim: Path, software: str, command: str) -> None:
    """Python ignores SIGPIPE and SIGXFSZ, which an exec would hand down."""
    done = vmahybrid_run(shim, "--", "grep", "SigIgn", "/proc/self/status", command=command,
                         VMAHYBRID_SOFTVERBS=software)  # fmt: skip
    assert int(done.stdout.split()[1], 16) & (1 << 12 | 1 << 24) == 0


@pytest.mark.parametrize("closed", ["2>&-", ">&-", ">&- 2>&-"])
def test_streams_that_are_closed(shim: Path, tmp_path: Path, closed: str) -> None:
    """The program is started as without us, and what we say of it goes to no other stream."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("VMA", "LD_"))}
    done = tmp_path / "done"
    run = f"{sys.executable} -m vmahybrid.cli.main run -- "
    for command, code in ((f"touch {done}", 0), ("/no/such/program", 127)):
        result = subprocess.run(["sh", "-c", f"{run} {command} {closed}"], cwd=ROOT, capture_output=True, text=True,
                                env=env | {"VMAHYBRID_LIB": str(shim)}, check=False)  # fmt: skip
        assert (result.returncode, result.stdout) == (code, ""), result.stderr
    assert done.exists()


@pytest.mark.parametrize("locale", [{}, {"LC_CTYPE": "C"}, {"LC_CTYPE": "C.UTF-8"}])
def test_the_locale_is_as_without_us(shim: Path, locale: dict[str, str]) -> None:
    """Python sets LC_CTYPE where it finds the C locale."""
    called = {"PATH": os.environ["PATH"], "VMAHYBRID_LIB": str(shim), **locale}
    done = subprocess.run([sys.executable, "-m", "vmahybrid.cli.main", "run", "env"], env=called, cwd=ROOT, text=True,
                          capture_output=True)  # fmt: skip
    assert {name: value for name, value in environment_of(done).items() if name.startswith("LC_")} == locale


@pytest.mark.parametrize(("argv", "code", "text"), [
    (["-p", "lat", "--", "x"], 2, "profile 'lat': unknown. the profiles are none, safe, adaptive, throughput"),
    (["-e", "VMA_RX_POL=1", "--", "x"], 2, "-e VMA_RX_POL: no such parameter. did you mean VMA_RX_POLL?"),
    (["-e", "PATH=/x", "--", "x"], 2, "-e PATH: no such parameter. docs/parameters.md lists them"),
    (["-e", "VMA_NOPE=1", "--", "x"], 2, "-e VMA_NOPE: no such parameter. docs/parameters.md lists them"),
    (["-e", "VMA_RXPOLL=1", "--", "x"], 2, "-e VMA_RXPOLL: no such parameter. did you mean VMA_RX_POLL?"),
    (["-e", "VMA_RX_POLL", "--", "x"], 2, "-e 'VMA_RX_POLL': not VMA_NAME=VALUE"),
    (["-e", "VMA_RX_POLL=fast", "--", "x"], 2, "-e VMA_RX_POLL: 'fast' is not a number from -1"),
    (["-e", "VMA_INTERNAL_THREAD_AFFINITY=zz", "--", "x"], 2,
     "-e VMA_INTERNAL_THREAD_AFFINITY: 'zz' is not a hexadecimal mask of processors (0x3), or a list"),
    (["-e", "VMA_SPEC=lat", "--", "x"], 2, "profile 'lat': unknown"),
    (["-p"], 2, "run: -p/--profile: expected one argument"),
    (["--"], 2, "run: no command is given"),
    (["--", "no-such-program-here"], 127, "no-such-program-here: No such file or directory"),
    (["--", "/etc/passwd"], 126, "/etc/passwd: Permission denied"),
    (["--", "/"], 126, "/: Permission denied"),
])  # fmt: skip
def test_refusals(shim: Path, argv: list[str], code: int, text: str) -> None:
    done = vmahybrid_run(shim, *argv)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(f"vmahybrid: {text}")
    assert done.stderr.count("\n") == 1


def test_no_library(tmp_path: Path) -> None:
    done = vmahybrid_run(tmp_path / "nope.so", "true")
    assert done.returncode == 77
    assert done.stderr.startswith(f"vmahybrid: libvmahybrid.so: not found as {tmp_path}/nope.so. make build")


def test_a_path_that_ld_so_would_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = tmp_path / "a b" / "libvmahybrid.so"
    odd.parent.mkdir()
    odd.write_bytes(b"")
    monkeypatch.setenv("VMAHYBRID_LIB", str(odd))
    with pytest.raises(NotPossibleHere, match="blank or colon"):
        library()


def test_every_parameter_and_profile_is_taken() -> None:
    known = catalogue.load()
    for parameter in known.parameters:
        name, value = assignment(f"{parameter.name}={parameter.show(parameter.default)}")
        assert (name, value) == (parameter.name, parameter.show(parameter.default))
    for profile in known.profiles:
        assert environment(profile.name.upper(), [], Path("/x.so"))["VMA_SPEC"] == profile.name


def test_an_alias_of_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment("15", [], Path("/x.so"))["VMA_SPEC"] == "latency"
    with pytest.raises(UsageError, match="unknown"):
        environment("16", [], Path("/x.so"))


def test_an_older_name_wins_over_the_environment_too(shim: Path) -> None:
    done = vmahybrid_run(shim, "-e", "VMA_RX_SKIP_OS=8", "--", "env", VMA_RX_UDP_POLL_OS_RATIO="5")
    found = environment_of(done)
    assert found["VMA_RX_UDP_POLL_OS_RATIO"] == "8" and "VMA_RX_SKIP_OS" not in found
    assert effective.resolve(found).values["VMA_RX_UDP_POLL_OS_RATIO"].source == "-e"
    assert done.stderr == ("vmahybrid: -e VMA_RX_SKIP_OS: no longer in use. VMA_RX_UDP_POLL_OS_RATIO is set to 8 "
                           "instead\n")  # fmt: skip


@pytest.fixture
def static_program(tmp_path: Path) -> Path:
    source, path = tmp_path / "main.c", tmp_path / "static"
    source.write_text("int main(void) { return 7; }\n")
    subprocess.run(["cc", "-static", "-o", path, source], check=True)
    return path


def test_a_static_program_is_run_with_a_warning(shim: Path, static_program: Path) -> None:
    done = vmahybrid_run(shim, str(static_program))
    assert done.returncode == 7
    assert done.stderr == (
        f"vmahybrid: {static_program}: statically linked: there is no ld.so. The program will run on the kernel\n"
    )


def test_softverbs_warns_of_a_static_program(shim: Path, static_program: Path, tmp_path: Path) -> None:
    (tmp_path / "libibverbs.so.1").touch()
    done = vmahybrid_run(shim, str(static_program), command="softverbs", VMAHYBRID_SOFTVERBS=str(tmp_path))
    assert done.returncode == 7
    assert done.stderr == (f"vmahybrid: {static_program}: statically linked: there is no ld.so. "
                           "The program will not find the software device\n")


def test_programs_that_take_the_shim() -> None:
    assert preload_problem(shutil.which("env") or "") == ""
    assert preload_problem(sys.executable) == ""
    assert preload_problem("/nonexistent") == ""
    assert preload_problem("/etc/passwd") == ""


def test_scripts_are_judged_by_their_interpreter(tmp_path: Path, static_program: Path) -> None:
    script = tmp_path / "script"
    script.write_text(f"#! {static_program} -x\n")
    assert "statically linked" in preload_problem(str(script))
    script.write_text("#!/bin/sh\n")
    assert preload_problem(str(script)) == ""
    script.write_text(f"#!{script}\n")  # its own interpreter
    assert preload_problem(str(script)) == ""


def test_privileged_and_foreign_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program"
    shutil.copy(shutil.which("env") or "", program)
    monkeypatch.setattr(os, "getuid", lambda: program.stat().st_uid + 1)
    assert preload_problem(str(program)) == ""
    program.chmod(0o4755)
    assert "gains privileges, and ld.so then ignores LD_PRELOAD." in preload_problem(str(program))
    assert "gains privileges, and ld.so then ignores LD_LIBRARY_PATH." in preload_problem(str(program), SOFTVERBS)
    monkeypatch.setattr(os, "getuid", lambda: program.stat().st_uid)
    assert preload_problem(str(program)) == ""  # setuid to whom one is already
    program.chmod(0o755)
    program.write_bytes(b"\x7fELF\x01\x01\x01" + bytes(100))
    assert "32-bit" in preload_problem(str(program))


@pytest.mark.parametrize("data", [
    b"", b"\x7fELF", b"\x7fELF\x02" + bytes(10), b"\x7fELF\x02" + b"\xff" * 200, b"#!", b"#!\n", b"#! \x00\n",
    b"\x7fELF\x02" + bytes(27) + struct.pack("<Q", 1 << 60) + bytes(14) + struct.pack("<HH", 65535, 65535) + bytes(64),
])  # fmt: skip
def test_damaged_programs_are_left_to_the_kernel(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "damaged"
    path.write_bytes(data)
    assert preload_problem(str(path)) == ""


@pytest.mark.parametrize("text", ["VMA_STATS_FD_NUM=2000", "VMA_RX_POLL=-2", "VMA_RING_ALLOCATION_LOGIC_TX=11"])
def test_a_number_out_of_range_is_the_shims(text: str) -> None:
    """As in the environment: it uses another one, and says which."""
    assert assignment(text) == tuple(text.split("="))
    with pytest.raises(UsageError):
        assignment(text, "")    # of config set
