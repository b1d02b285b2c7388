"""vmahybrid config show, diff, check, import, profiles, set: parameters, profiles and the policy file."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from vmahybrid.cli.main import main
from vmahybrid.cli.run import environment
from vmahybrid.config import catalogue, effective, paramfile, profiles
from vmahybrid.errors import UsageError
from vmahybrid.stats.page import SOCKET_SIZE

OWN = "# Own: for tests\nVMA_SPEC = latency\nVMA_RX_POLL = 50  # loops\n"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in list(os.environ):
        if name.startswith("VMA"):
            monkeypatch.delenv(name)
    (tmp_path / "profiles").mkdir()
    (tmp_path / "own.conf").write_text(OWN)
    monkeypatch.setenv("VMA_HYBRID_PROFILE_DIR", str(tmp_path / "profiles"))
    monkeypatch.setenv("VMA_HYBRID_POLICY", str(tmp_path / "policy.conf"))
    monkeypatch.setenv("VMAHYBRID_RUNDIR", str(tmp_path))
    return tmp_path


def body(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> dict[str, Any]:
    assert main(["config", *argv, "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == 1
    return dict(found)


def test_every_origin_is_shown(place: Path, capsys: pytest.CaptureFixture[str],
                               monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    (place / "policy.conf").write_text("VMA_RX_POLL = 9\nVMA_STATS_FD_NUM = 7\n[program ping]\nVMA_RX_WRE = 512\n")
    for name, value in (("VMA_SPEC", "latency"), ("VMA_STATS_FD_NUM", "8"), ("VMA_TX_WRE", "1024"),
                        (effective.RUN_E, "VMA_TX_WRE")):  # fmt: skip
        monkeypatch.setenv(name, value)
    shown = body(capsys, "show", "--program", "ping")["parameters"]
    assert len(shown) == len(catalogue.load().parameters)
    found = {name: (shown[name]["value"], shown[name]["origin"]) for name in shown}
    assert found["VMA_RX_BYTES_MIN"] == ("65536", "default")
    assert found["VMA_SELECT_POLL"] == ("-1", "profile latency")
    assert found["VMA_RX_POLL"] == ("9", f"{place}/policy.conf:1")
    assert found["VMA_RX_WRE"] == ("512", f"{place}/policy.conf:4")
    assert found["VMA_STATS_FD_NUM"] == ("8", "environment")
    assert found["VMA_TX_WRE"] == ("1024", "-e")
    assert found["VMA_CQ_MODERATION_ENABLE"] == ("0", "profile latency")


def test_effects(capsys: pytest.CaptureFixture[str]) -> None:
    shown = body(capsys, "show", "VMA_BF", "RX_POLL", "VMA_CLOSE_ON_DUP2", "vma_tx_prefetch_bytes",
                 "TCP_MAX_SYN_RATE")["parameters"]
    assert {name: row["effect"] for name, row in shown.items()} == {
        "VMA_BF": "no effect on xdp", "VMA_RX_POLL": "", "VMA_CLOSE_ON_DUP2": "no effect",
        "VMA_TX_PREFETCH_BYTES": "no effect on xdp", "VMA_TCP_MAX_SYN_RATE": "no effect on verbs"}  # fmt: skip
    shown = body(capsys, "show", "VMA_TCP_TIMER_RESOLUTION_MSEC", "TIMER_RESOLUTION_MSEC")["parameters"]
    assert {row["value"]: row["effect"] for row in shown.values()} == {"100": "acts as 40", "10": ""}
    assert main(["config", "show", "VMA_BF"]) == 0
    assert "VMA_BF     1      default  no effect on xdp" in capsys.readouterr().out
    assert main(["config", "show", "VMA_BFF"]) == 2
    assert "VMA_BFF: no such parameter" in capsys.readouterr().err


def test_a_running_program(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    env = {**os.environ, "VMA_SPEC": str(place / "own.conf"), "VMA_TX_WRE": "99", "VMA_LOG_FILE": "/x.%d",
           "VMA_STATS_SHMEM_DIR": str(place)}  # fmt: skip
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, env=env) as program:
        shown = body(capsys, "show", str(program.pid), "--changed")
        assert program.stdin is not None
        program.stdin.close()
    found = {name: (row["value"], row["origin"]) for name, row in shown["parameters"].items()}
    assert found["VMA_RX_POLL"] == ("50", f"profile {place}/own.conf:3")
    assert found["VMA_TX_WRE"] == ("99", "environment")
    assert found["VMA_LOG_FILE"] == (f"/x.{program.pid}", "environment")
    assert "VMA_RX_BYTES_MIN" not in found
    assert any("no statistics file" in warning for warning in shown["warnings"])
    assert any("runs without the shim" in warning for warning in shown["warnings"])
    assert main(["config", "show", str(program.pid)]) == 2
    assert f"process {program.pid}: no such process" in capsys.readouterr().err


def test_a_policy_that_was_edited_while_the_program_runs(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file has the new value, the program the old one: that is said."""
    policy = place / "policy.conf"
    policy.write_text("VMA_RX_POLL = 77\n")
    time.sleep(0.1)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, env=dict(os.environ)) as program:
        shown = body(capsys, "show", str(program.pid), "RX_POLL")
        assert shown["parameters"]["VMA_RX_POLL"]["origin"] == f"{policy}:1"
        assert not any("was changed after" in warning for warning in shown["warnings"])
        time.sleep(0.1)
        policy.write_text("VMA_RX_POLL = 99\n")
        shown = body(capsys, "show", str(program.pid), "RX_POLL")
        assert program.stdin is not None
        program.stdin.close()
    row = shown["parameters"]["VMA_RX_POLL"]
    assert (row["value"], row["origin"]) == ("99", f"{policy}:1 (changed since)")
    assert any(f"{policy} was changed after process {program.pid} had read it" in text for text in shown["warnings"])


def test_who_chose_the_profile(place: Path) -> None:
    """`run` says it twice; who sets VMA_SPEC alone is the environment."""
    changes = environment(None, [], Path("/x.so"))
    assert effective.resolve({**os.environ, **changes}).values["VMA_SPEC"].source == "run"
    changes = environment(str(place / "own.conf"), [], Path("/x.so"))
    assert effective.resolve({**os.environ, **changes}).values["VMA_SPEC"].source == "run"
    assert effective.resolve({"VMA_SPEC": "rti"}).values["VMA_SPEC"].source == "environment"
    changes = environment("rti", ["VMA_SPEC=latency"], Path("/x.so"))
    assert effective.resolve({**os.environ, **changes}).values["VMA_SPEC"].source == "-e"


def test_a_name_that_is_no_parameter_any_more(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "set", "VMA_HUGETBL=1"]) == 2
    said = capsys.readouterr().err
    assert "VMA_HUGETBL: no parameter any more" in said and "VMA_MEM_ALLOC_TYPE" in said
    assert "LOG_DETAILS" not in said


@pytest.mark.parametrize(("level", "asked", "shown_as"), [
    (5, 0, ("debug", "changed while it runs")), (5, 1, ("debug", "asked for, not taken yet")),
    (77, 0, ("info", "default"))])  # fmt: skip
def test_what_was_changed_in_a_running_program(place: Path, capsys: pytest.CaptureFixture[str], level: int, asked: int,
                                               shown_as: tuple[str, str]) -> None:  # fmt: skip
    from vmahybrid._contracts import ffi, lib

    page = ffi.new("struct vmh_stats_page *")
    page.magic, page.version, page.sock_size = lib.VMH_STATS_MAGIC, lib.VMH_STATS_VERSION, SOCKET_SIZE
    page.log_level, page.log_details, page.asked = level, 0, asked
    env = {**os.environ, "VMA_STATS_SHMEM_DIR": str(place)}
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, env=env) as program:
        (place / f"vmastat.{program.pid}").write_bytes(bytes(ffi.buffer(page)))
        shown = body(capsys, "show", str(program.pid), "TRACELEVEL", "LOG_DETAILS")
        assert program.stdin is not None
        program.stdin.close()
    rows = shown["parameters"]
    assert (rows["VMA_TRACELEVEL"]["value"], rows["VMA_TRACELEVEL"]["origin"]) == shown_as
    assert (rows["VMA_LOG_DETAILS"]["value"], rows["VMA_LOG_DETAILS"]["origin"]) == ("0", "default")
    assert not any("no statistics file" in warning for warning in shown["warnings"])


@pytest.mark.parametrize("profile", catalogue.load().profiles, ids=lambda p: p.name)
def test_a_built_in_profile_as_a_file_is_the_profile(profile: catalogue.Profile, place: Path) -> None:
    text = profiles.text_of(profile.name)
    assert paramfile.check(text) == []
    lines = text.split("\n")
    assert all(before.startswith("#") for before, line in pairwise(lines) if line.startswith("VMA"))
    (place / "copy.conf").write_text(text)
    found = effective.resolve({"VMA_SPEC": str(place / "copy.conf")})
    original = effective.resolve({"VMA_SPEC": profile.name})
    assert {n: v.value for n, v in found.values.items() if n != "VMA_SPEC"} == {
        n: v.value for n, v in original.values.items() if n != "VMA_SPEC"}  # fmt: skip


def test_import_list_and_use(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "import", str(place / "own.conf"), "mine"]) == 0
    assert (place / "profiles" / "mine.conf").read_text() == OWN
    listed = body(capsys_cleared(capsys), "profiles")["profiles"]
    assert {"profile": "mine", "text": "Own: for tests", "file": f"{place}/profiles/mine.conf"} in listed
    assert len(listed) == len(catalogue.load().profiles) + 1
    shim = Path("/x.so")
    changes = environment("mine", [], shim)
    assert (changes["VMA_SPEC"], changes["VMA_HYBRID_PROFILE"]) == ("mine", "mine")
    changes = environment(str(place / "own.conf"), ["VMA_RX_POLL=1", "VMA_BF=0"], shim)
    assert (changes["VMA_SPEC"], changes["VMA_HYBRID_PROFILE"]) == (f"{place}/own.conf", "own")
    assert changes[effective.RUN_E] == "VMA_RX_POLL,VMA_BF"
    assert environment(None, [], shim)["VMA_SPEC"] == "safe"
    (place / "policy.conf").write_text("[program ping]\nVMA_SPEC = rti\n")
    assert "VMA_SPEC" not in environment(None, [], shim, "ping")
    assert environment(None, [], shim, "pong")["VMA_SPEC"] == "safe"
    (place / "policy.conf").write_text("VMA_SPEC = mine\n")
    assert main(["config", "check", str(place / "policy.conf")]) == 0
    assert main(["config", "check", str(place / "profiles" / "mine.conf")]) == 0
    (place / "profiles" / "next.conf").write_text("VMA_SPEC = mine\n")
    assert main(["config", "check", str(place / "profiles" / "next.conf")]) == 1
    assert 'next.conf:1: VMA_SPEC is no built-in profile: "mine"' in capsys.readouterr().err
    assert effective.resolve(dict(os.environ))["VMA_RX_POLL"] == 50


def test_a_profile_is_replaced_by_force_only(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = place / "profiles" / "own.conf"
    assert main(["config", "import", str(place / "own.conf")]) == 0
    (place / "own.conf").write_text("VMA_RX_POLL = 51\n")
    capsys.readouterr()
    assert main(["config", "import", str(place / "own.conf")]) == 2
    assert capsys.readouterr().err == (f"vmahybrid: profile name 'own': there is one, {target}. give another name "
                                       "(config import FILE NAME), or --force to replace it\n")
    assert target.read_text() == OWN
    assert main(["config", "import", "--force", str(place / "own.conf")]) == 0
    assert target.read_text() == "VMA_RX_POLL = 51\n"


def capsys_cleared(capsys: pytest.CaptureFixture[str]) -> pytest.CaptureFixture[str]:
    capsys.readouterr()
    return capsys


@pytest.mark.parametrize(("text", "name", "why"), [
    ("VMA_RX_POL = 1\n", "new", 'bad.conf:1: no such parameter: "VMA_RX_POL"'),
    ("\nVMA_RX_POLL = x\n", "new", "bad.conf:2: VMA_RX_POLL: 'x' is not a number from -1 to 100000000"),
    ("VMA_INTERNAL_THREAD_AFFINITY = zz\n", "new", "bad.conf:1: VMA_INTERNAL_THREAD_AFFINITY: 'zz' is not a "),
    ("VMA_RX_POLL 1\n", "new", 'bad.conf:1: not NAME = VALUE, ignored: "VMA_RX_POLL 1"'),
    ("VMA_SPEC = fast\n", "new", 'VMA_SPEC is no built-in profile: "fast"'),
    ("[program x]\nVMA_RX_POLL = 1\n", "new", "a profile has no [program GLOB]"),
    (OWN, "latency", "a built-in profile has it"),
    (OWN, "../x", "not letters"),
])  # fmt: skip
def test_a_wrong_profile_is_not_imported(place: Path, capsys: pytest.CaptureFixture[str], text: str, name: str,
                                         why: str) -> None:  # fmt: skip
    (place / "bad.conf").write_text(text)
    assert main(["config", "import", str(place / "bad.conf"), name]) == 2
    err = capsys.readouterr().err
    assert why in err and err.count("\n") == 1
    assert list((place / "profiles").iterdir()) == []
    if text != OWN and "[" not in text:
        with pytest.raises(UsageError, match="not a profile"):
            environment(str(place / "bad.conf"), [], Path("/x"))


def test_set_writes_the_policy(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = place / "policy.conf"
    assert main(["config", "set", "VMA_RX_POLL=5"]) == 0
    assert capsys.readouterr().out == f"{policy}: VMA_RX_POLL = 5\n"
    assert main(["config", "set", "--program", "ping*", "VMA_RX_POLL=6", "VMA_APPLICATION_ID=a #b"]) == 0
    assert main(["config", "set", "VMA_BF=0"]) == 0
    policy.write_text(policy.read_text().replace("VMA_RX_POLL = 5", "VMA_RX_POLL = 5 # why"))
    assert main(["config", "set", "VMA_RX_POLL=7"]) == 0
    assert policy.read_text().splitlines()[1:] == [
        "VMA_RX_POLL = 7  # why", "VMA_BF = 0", "", "[program ping*]", "VMA_RX_POLL = 6",
        'VMA_APPLICATION_ID = "a #b"']  # fmt: skip
    before = policy.read_text()
    for wrong in ("VMA_RX_POLL=-5", "VMA_RX_POL=5", "limits.rules=2"):
        assert main(["config", "set", "VMA_BF=1", wrong]) == 2
        assert wrong.split("=")[0] in capsys.readouterr().err
    assert policy.read_text() == before
    assert main(["config", "set", "VMA_RX_POLL=1", "--pid", "1"]) == 2
    assert "VMA_RX_POLL: it does not change while a program runs" in capsys.readouterr().err


def test_set_tells_what_else_is_wrong_there(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = place / "policy.conf"
    policy.write_text("garbage here\nVMA_RX_POLL = 5\n")
    assert main(["config", "set", "VMA_RX_POLL=6"]) == 0
    assert policy.read_text() == "garbage here\nVMA_RX_POLL = 6\n"
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith(f"{policy}: VMA_RX_POLL = 6 warning: {policy}:1: ") and '"garbage here"' in said


@pytest.mark.parametrize(("argv", "token"), [
    (["VMA_APPLICATION_ID=a\nVMA_RX_POLL = 1"], r"VMA_APPLICATION_ID: a line of the policy file can't hold 'a\nV"),
    (["VMA_APPLICATION_ID=a\n"], r"VMA_APPLICATION_ID: a line of the policy file can't hold 'a\n'"),
    (["VMA_RX_POLL=5\n"], r"VMA_RX_POLL: a line of the policy file can't hold '5\n'"),
    (["VMA_BF=0", 'VMA_APPLICATION_ID= a" #b'], "VMA_APPLICATION_ID: a line of the policy file can't hold ' a\""),
    (["VMA_TX_BUFS=64", "--program", "x]\n[program *"], r"--program 'x]\n[program *': a line [program GLOB] can't"),
    (["VMA_TX_BUFS=64", "--program", "x\nVMA_TX_BUFS = 1\n[program *"], "--program 'x"),
    (["VMA_TX_BUFS=64", "--program", "x #y"], "--program 'x #y': "),
    (["VMA_TX_BUFS=64", "--program", "x\udcff"], r"--program 'x\udcff': not a text in UTF-8"),
    (["VMA_TX_BUFS=64", "--program", " x"], "--program ' x': "),
])  # fmt: skip
def test_what_would_not_be_read_back_is_not_written(place: Path, capsys: pytest.CaptureFixture[str], argv: list[str],
                                                    token: str) -> None:  # fmt: skip
    (place / "policy.conf").write_text("VMA_RX_POLL = 9\n")
    assert main(["config", "set", *argv]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"vmahybrid: {token}") and err.count("\n") == 1
    assert (place / "policy.conf").read_text() == "VMA_RX_POLL = 9\n"


@pytest.mark.parametrize("value", ['a" #b', 'a"b', '"', '""', '"a"', "", " a ", "a #b", "#", "a\rb", "a=b", "[x]",
                                   "é\u00a0"])  # fmt: skip
@pytest.mark.parametrize("before", ["", "VMA_APPLICATION_ID = old  # why\n", "VMA_APPLICATION_ID = x\n[what]\n"])
def test_what_is_written_is_read_back(place: Path, value: str, before: str) -> None:
    policy = place / "policy.conf"
    policy.write_text(before + "[what]\nVMA_APPLICATION_ID = ignored\n")
    for argv in ([], ["--program", "pi[mn]g"]):
        assert main(["config", "set", f"VMA_APPLICATION_ID={value}", *argv]) == 0
        found = effective.resolve(dict(os.environ), "ping" if argv else "pong")
        assert found["VMA_APPLICATION_ID"] == value
        assert "VMA_APPLICATION_ID = ignored\n" in policy.read_bytes().decode()
    assert policy.read_text().count("# why") == before.count("# why")


def test_a_text_that_says_no_processors(place: Path, capsys: pytest.CaptureFixture[str],
                                        monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    name, policy = "VMA_INTERNAL_THREAD_AFFINITY", place / "policy.conf"
    assert main(["config", "set", f"{name}=zz"]) == 2 and not policy.exists()
    assert capsys.readouterr().err.startswith(f"vmahybrid: {name}: 'zz' is not ")
    policy.write_text(f"{name} = zz\n")
    assert main(["config", "check", str(policy)]) == 1
    assert capsys.readouterr().err.startswith(f"{policy}:1: {name}: 'zz' is not ")
    (warning,) = body(capsys, "show")["warnings"]
    assert warning.startswith(f"{policy}:1: {name} = zz is not ") and warning.endswith(", ignored")
    monkeypatch.setenv(name, "1-0")
    found = body(capsys, "show")
    assert found["parameters"][name]["value"] == "0"
    assert found["warnings"][1].startswith(f"{name} = 1-0 is not ") and found["warnings"][1].endswith(", using [0]")


def test_a_policy_that_begins_with_a_section(place: Path) -> None:
    policy = place / "policy.conf"
    policy.write_text("[program ping]\nVMA_RX_POLL = 6\n")
    assert main(["config", "set", "VMA_RX_POLL=5"]) == 0
    assert policy.read_text() == "VMA_RX_POLL = 5\n[program ping]\nVMA_RX_POLL = 6\n"


def test_an_older_name_in_the_policy_becomes_the_present_one(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = place / "policy.conf"
    policy.write_text("VMA_RX_SKIP_OS = 3  # old\n")
    assert main(["config", "set", "VMA_RX_UDP_POLL_OS_RATIO=4"]) == 0
    assert policy.read_text() == "VMA_RX_UDP_POLL_OS_RATIO = 4  # old\n"
    assert main(["config", "set", "VMA_RX_POLL_OS_RATIO=5"]) == 0
    assert policy.read_text() == "VMA_RX_UDP_POLL_OS_RATIO = 5  # old\n"
    assert "VMA_RX_POLL_OS_RATIO: no longer in use. VMA_RX_UDP_POLL_OS_RATIO is set to 5" in capsys.readouterr().err


def test_the_policy_stays_short_enough_to_be_read(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = place / "policy.conf"
    policy.write_text("#" * (paramfile.LIMIT - 5) + "\n")
    assert main(["config", "set", "VMA_RX_POLL=4"]) == 2
    assert f"{policy}: it would be longer than the {paramfile.LIMIT} bytes" in capsys.readouterr().err
    assert policy.stat().st_size == paramfile.LIMIT - 4


def setting(*changes: str) -> list[str]:
    return [sys.executable, "-P", "-m", "vmahybrid.cli.main", "config", "set", *changes]


def test_nothing_is_lost_where_many_set_values(place: Path) -> None:
    policy = place / "policy.conf"
    policy.write_text("# mine\n")
    names = ("RX_POLL", "SELECT_POLL", "TX_BUFS", "RX_BUFS", "TX_WRE", "RX_WRE", "MTU", "STATS_FD_NUM")
    with contextlib.ExitStack() as all_of_them:
        for name in names:
            all_of_them.enter_context(subprocess.Popen(setting(f"VMA_{name}=1000"), stdout=subprocess.DEVNULL))
    assert sorted(policy.read_text().splitlines()) == sorted(["# mine", *(f"VMA_{name} = 1000" for name in names)])
    assert {path.name for path in place.iterdir()} == {"own.conf", "policy.conf", "profiles"}


def test_set_waits_for_another_but_not_for_ever(place: Path, capsys: pytest.CaptureFixture[str],
                                                monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(paramfile, "PATIENCE", 0.05)
    with paramfile.changing(place / "policy.conf"):
        assert main(["config", "set", "VMA_BF=0"]) == 1
    assert f"{place}/policy.conf: another process holds the lock of {place}" in capsys.readouterr().err
    assert not (place / "policy.conf").exists()
    assert main(["config", "set", "VMA_BF=0"]) == 0


def test_set_keeps_link_owner_and_permissions(place: Path) -> None:
    policy, kept = place / "policy.conf", place / "kept" / "real.conf"
    kept.parent.mkdir()
    policy.symlink_to("kept/real.conf")
    for mode in (None, 0o640, 0o600):
        if mode is not None:
            kept.chmod(mode)
            if os.geteuid() == 0:
                os.chown(kept, 4711, 4712)
        before = kept.stat() if mode else None
        assert main(["config", "set", f"VMA_RX_POLL={mode or 1}"]) == 0
        assert os.readlink(policy) == "kept/real.conf"
        now = kept.stat()
        assert kept.read_text().endswith(f"VMA_RX_POLL = {mode or 1}\n")
        assert before is None or (now.st_mode, now.st_uid, now.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert list(kept.parent.iterdir()) == [kept]


def test_set_at_a_link_that_leads_nowhere(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = place / "policy.conf"
    policy.symlink_to("policy.conf")
    assert main(["config", "set", "VMA_BF=0"]) == 1
    assert "Too many levels of symbolic links" in capsys.readouterr().err
    assert policy.is_symlink()


def test_any_byte_of_a_file_is_kept_and_shown(place: Path, capsys: pytest.CaptureFixture[str],
                                              monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """What programs take, every command takes: a comment in Latin-1 harms nobody."""
    policy, comment = place / "policy.conf", b"# caf\xe9\n"
    policy.write_bytes(comment + b"VMA_RX_POLL = 77\n")
    (place / "profiles" / "old.conf").write_bytes(comment + b"VMA_SELECT_POLL = 66  # \xff\n")
    monkeypatch.setenv("VMA_SPEC", "old")
    found = body(capsys, "show")
    assert found["warnings"] == []
    values = {name: row["value"] for name, row in found["parameters"].items()}
    assert (values["VMA_RX_POLL"], values["VMA_SELECT_POLL"]) == ("77", "66")
    assert main(["config", "check", str(policy), str(place / "profiles" / "old.conf")]) == 0
    assert main(["config", "set", "VMA_RX_POLL=78"]) == 0
    assert policy.read_bytes() == comment + b"VMA_RX_POLL = 78\n"
    assert environment("old", [], Path("/x.so"))["VMA_SPEC"] == "old"
    assert main(["config", "import", str(place / "profiles" / "old.conf"), "new"]) == 0
    assert (place / "profiles" / "new.conf").read_bytes() == (place / "profiles" / "old.conf").read_bytes()
    capsys.readouterr()
    assert [row["profile"] for row in body(capsys, "profiles")["profiles"]][-2:] == ["new", "old"]


@pytest.mark.parametrize(("data", "said"), [
    (b"VMA_RX_POLL = 77\n" + b"#" * 70000, '1: longer than 32767 bytes: ""'),
    (b"\n# x\0\nVMA_RX_POLL = 77\n", '2: a zero byte: "\\0"'),
])  # fmt: skip
def test_what_programs_do_not_read_no_command_does(place: Path, capsys: pytest.CaptureFixture[str],
                                                   monkeypatch: pytest.MonkeyPatch, data: bytes, said: str) -> None:
    policy, why = place / "policy.conf", said.split(": ")[1]
    policy.write_bytes(data)
    found = body(capsys, "show", "RX_POLL")
    assert found["parameters"]["VMA_RX_POLL"]["origin"] == "default"
    assert found["warnings"] == [f"{policy} can't be read ({why})"]
    assert main(["config", "check", str(policy)]) == 1
    assert capsys.readouterr().err == f"{policy}:{said}\n"
    for argv in (["set", "VMA_BF=0"], ["import", str(policy), "mine"], ["diff", "default", str(policy)]):
        assert main(["config", *argv]) == 2
        assert capsys.readouterr().err.startswith(f"vmahybrid: {policy}:{said[0]}: {why}"), argv
    assert policy.read_bytes() == data
    with pytest.raises(UsageError, match=why):
        environment(str(policy), [], Path("/x.so"))
    monkeypatch.setenv("VMA_SPEC", str(policy))
    assert f"{policy} can't be read ({why})" in body(capsys, "show")["warnings"]


def test_diff(place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {name: str(value) for name, value in catalogue.load().profile("rti").values.items()}
    found = body(capsys, "diff", "rti")["differences"]
    assert {n: row["right"] for n, row in found.items() if row["right_origin"] == "profile rti"} == changed
    assert body(capsys, "diff", "latency", str(place / "own.conf"))["differences"].keys() == {"VMA_RX_POLL"}
    monkeypatch.setenv("VMA_TX_BUFS", "12")
    assert body(capsys, "diff")["differences"]["VMA_TX_BUFS"]["right"] == "12"
    for name, policy in (("safe", "kernel"), ("latency", "offload")):
        row = body(capsys, "diff", "default", name)["differences"]["VMA_HYBRID_TCP"]
        assert (row["left"], row["right"], row["right_origin"]) == ("adaptive", policy, f"profile {name}")
    assert main(["config", "diff", "a", "b", "c"]) == 2
    assert main(["config", "diff", "rti", "rti"]) == 0
    assert "profile rti and profile rti: no difference" in capsys.readouterr().out


@pytest.mark.parametrize(("number", "name"), [("15", "latency"), ("7750", "7750"), ("4242", "4242")])
def test_a_number_is_a_pid_to_diff(place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
                                   number: str, name: str) -> None:  # fmt: skip
    """15 is the profile latency to VMA_SPEC, and 7750 has no other name: the error says how they are written."""
    (place / "profiles" / "4242.conf").write_text(OWN)

    def absent(pid: int) -> effective.Effective:
        raise (FileNotFoundError if pid != 7750 else ProcessLookupError)

    with monkeypatch.context() as patch:
        patch.setattr(effective, "of_process", absent)
        assert main(["config", "diff", number]) == 2
        why = "it has no environment: it has ended, or is the kernel's" if number == "7750" else "no such process"
        assert capsys.readouterr().err == (f"vmahybrid: process {number}: {why}; a number is a PID here. "
                                           f"the profile {name} is written profile:{number}\n")
        assert main(["config", "diff", "16"]) == 2
        assert capsys.readouterr().err == (
            "vmahybrid: process 16: no such process; a number is a PID here. "
            "vmahybrid status lists those with the shim, vmahybrid config profiles the profiles\n")
    assert body(capsys, "diff", f"profile:{number}", f"profile:{name}")["differences"] == {}
    assert body(capsys, "diff", f"profile:{number}")["right"] == f"profile {name}"


def test_a_process_that_a_profile_goes_by_as_well(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as program:
        assert program.stdin is not None
        plain = body(capsys, "diff", str(program.pid))["warnings"]
        (place / "profiles" / f"{program.pid}.conf").write_text(OWN)
        found = body(capsys, "diff", str(program.pid))["warnings"]
        program.stdin.close()
    name = f"process {program.pid}"
    assert f"{name}: {name} runs without the shim: these values would be used with it" in plain
    assert [text for text in found if text not in plain] == [
        f"{name}: a number is a PID here: the profile {program.pid} is written profile:{program.pid}"]


def test_digits_that_are_none_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "٣"]) == 2
    assert capsys.readouterr().err == "vmahybrid: ٣: no such parameter. docs/parameters.md lists them\n"


def test_diff_says_what_is_wrong(place: Path, capsys: pytest.CaptureFixture[str],
                                 monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """As `config show` does: a bad value, and a policy that a running program has not read."""
    policy = place / "policy.conf"
    policy.write_text("VMA_SELECT_POLL = 0\n")
    monkeypatch.setenv("VMA_RX_POLL", "abc")
    said = "the environment: VMA_RX_POLL = abc is not a number from -1 to 100000000, using [100000]"
    assert body(capsys, "diff")["warnings"] == [said]
    assert main(["config", "diff"]) == 0
    assert f"warning: {said}" in " ".join(capsys.readouterr().out.split())
    monkeypatch.delenv("VMA_RX_POLL")
    time.sleep(0.1)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, env=dict(os.environ)) as program:
        time.sleep(0.1)
        policy.write_text("VMA_SELECT_POLL = 9\n")
        found = body(capsys, "diff", str(program.pid))
        assert program.stdin is not None
        program.stdin.close()
    assert found["differences"]["VMA_SELECT_POLL"]["right_origin"] == f"{policy}:1 (changed since)"
    assert any(f"{policy} was changed after process {program.pid} had read it" in text for text in found["warnings"])


@pytest.mark.parametrize(("name", "env", "value", "origin"), [
    ("TCP_TIMER_RESOLUTION_MSEC", {"VMA_TIMER_RESOLUTION_MSEC": "200"}, "200", "raised by VMA_TIMER_RESOLUTION_MSEC"),
    ("TCP_TIMER_RESOLUTION_MSEC", {"VMA_TIMER_RESOLUTION_MSEC": "20", "VMA_TCP_TIMER_RESOLUTION_MSEC": "15"}, "20",
     "environment, raised by VMA_TIMER_RESOLUTION_MSEC"),
    ("RX_WRE", {"VMA_RX_WRE_BATCHING": "1024", "VMA_SPEC": "latency"}, "2048",
     "profile latency, raised by VMA_RX_WRE_BATCHING"),
    ("CQ_AIM_MAX_COUNT", {"VMA_RX_WRE": "256"}, "128", "lowered by VMA_RX_WRE"),
    ("CQ_AIM_MAX_COUNT", {"VMA_RX_WRE": "2000"}, "560", "default"),
    ("CQ_MODERATION_ENABLE", {"VMA_RX_POLL": "-1"}, "0", "derived from VMA_RX_POLL"),
    ("MSS", {"VMA_MTU": "1000", "VMA_MSS": "1200"}, "960", "environment, lowered by VMA_MTU"),
    ("MSS", {"VMA_MTU": "1000", "VMA_MSS": "950"}, "950", "environment"),
    ("CQ_MODERATION_ENABLE", {"VMA_RX_POLL": "-1", "VMA_CQ_MODERATION_ENABLE": "0"}, "0", "environment"),
    ("CQ_MODERATION_ENABLE", {"VMA_RX_POLL": "-1", "VMA_CQ_MODERATION_ENABLE": "1"}, "0", "derived from VMA_RX_POLL"),
    ("CQ_AIM_INTERVAL_MSEC", {"VMA_SPEC": "latency"}, "0", "profile latency"),
    ("SELECT_SKIP_OS", {"VMA_SPEC": "latency", "VMA_SELECT_POLL_OS_FORCE": "1"}, "1", "profile latency"),
    ("SELECT_SKIP_OS", {"VMA_SELECT_POLL_OS_FORCE": "1"}, "1", "derived from VMA_SELECT_POLL_OS_FORCE"),
])  # fmt: skip
def test_the_origin_of_what_another_value_bounds(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
                                                 name: str, env: dict[str, str], value: str, origin: str) -> None:
    for key, text in env.items():
        monkeypatch.setenv(key, text)
    (row,) = body(capsys, "show", name)["parameters"].values()
    assert (row["value"], row["origin"]) == (value, origin)
    changed = body(capsys, "show", "--changed")["parameters"]
    assert (f"VMA_{name}" in changed) is (origin != "default")


def test_the_origin_of_a_profile_of_the_policy_has_its_line(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "policy.conf").write_text("# mine\nVMA_SPEC = latency\n")
    (row,) = body(capsys, "show", "VMA_SPEC")["parameters"].values()
    assert (row["value"], row["origin"]) == ("latency", f"{place}/policy.conf:2")


def test_an_origin_is_not_cut_in_a_pipe_and_keeps_its_line_on_a_terminal(place: Path) -> None:
    long = place / ("deep" * 30)
    long.mkdir()
    (long / "policy.conf").write_text("VMA_RX_POLL = 9\n" * 42)
    argv = [sys.executable, "-P", "-m", "vmahybrid.cli.main", "config", "show"]
    env = {**os.environ, "VMA_HYBRID_POLICY": f"{long}/policy.conf", "COLUMNS": "80", "TERM": "dumb"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    assert re.search(rf"^VMA_RX_POLL +9 loops +{long}/policy.conf:42$", done.stdout, re.MULTILINE)
    ours, theirs = os.openpty()
    subprocess.run([*argv, "VMA_RX_POLL"], env=env, stdout=theirs, check=True)
    os.close(theirs)
    shown = os.read(ours, 4096).decode()
    os.close(ours)
    assert re.search(r"^VMA_RX_POLL +9 loops +…\w+/policy.conf:42 *\r$", shown, re.MULTILINE), shown


def test_check_names_file_line_and_token(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "bad.conf").write_text("VMA_RX_POLL = 1\nVMA_MTU = wide\n[program]\n")
    (place / "x.toml").write_text('[ring]\nframes = 3\n[log]\nlevel = "loud"\n')
    (place / "y.toml").write_text("[ring]\nframes = 8192\n")
    names = [str(place / name) for name in ("bad.conf", "own.conf", "x.toml", "y.toml")]
    assert main(["config", "check", *names]) == 1
    out, err = capsys.readouterr()
    assert f"{place}/bad.conf:2: VMA_MTU: 'wide' is not a number from 0 to 65535: \"wide\"\n" in err
    assert f'{place}/bad.conf:3: not [program GLOB], what follows is ignored: "[program]"\n' in err
    assert f"{place}/x.toml:2: ring.frames = 3 is not" in err
    assert f"{place}/x.toml:4: log.level = 'loud' is not one of" in err
    assert f"{place}/own.conf: ok (values of parameters)\n" in out
    assert f"{place}/y.toml: ok (configuration of the service)\n" in out
    assert main(["config", "check", names[1]]) == 0
    (place / "libvma.conf").write_text("application-id * *\nuse os udp_connect *:53\n")
    (place / "rules").write_text("# x\nuse os udp_connect *:53x\n")
    assert main(["config", "check", str(place / "libvma.conf"), str(place / "rules")]) == 1
    out, err = capsys.readouterr()
    assert f"{place}/libvma.conf: ok (libvma.conf: 1 rules in 1 application ids)\n" in out
    assert err == f'{place}/rules:2: not a port (0 to 65535), a range of ports, or *: "53x"\n'
    for text, token in (("aplication-id * *\nuse os udp_connect *:53\n", "aplication-id"),
                        ("us os udp_connect *:53\n", "us"), ("USE os udp_connect *:53\n", "USE"),
                        ("# x\n\nlogg min-level 1\n", "logg")):  # fmt: skip
        (place / "rules").write_text(text)
        assert main(["config", "check", str(place / "rules")]) == 1
        line = next(number for number, row in enumerate(text.split("\n"), 1) if token in row)
        err = capsys.readouterr().err
        assert err.startswith(f"{place}/rules:{line}: not a statement") and err.endswith(f'"{token}"\n'), err
    (place / "rules").write_text("use os udp_connect 10.0.0.0/32:1\nuse vma tcp_client *:2:10.0.0.1/33:*\n")
    assert main(["config", "check", str(place / "rules")]) == 1
    assert capsys.readouterr().err == f'{place}/rules:2: a prefix of more than 32 bits, using 32: "10.0.0.1/33"\n'
    (place / "rules").write_text("# x\nlog\nlog min-level 3\n")
    assert main(["config", "check", str(place / "rules")]) == 0
    assert "; log in line 3 has no effect: VMA_TRACELEVEL and VMA_LOG_FILE have)" in capsys.readouterr().out
    assert main(["config", "check", "/nonexistent"]) == 2


@pytest.mark.parametrize(("data", "said"), [
    (b"# caf\xe9\nuse os udp_connect *:53\n", None),
    (b"application-id caf\xe9 *\nuse os udp_connect *:53\n", None),
    (b"# x\nuse os udp_connect b\xfcro:53\n",
     "2: not an address (a.b.c.d, a.b.c.d/bits or *): \"b\N{REPLACEMENT CHARACTER}ro\""),
    (b"\xff\xfeu\0s\0e\0", "1: a zero byte: \"\\0\""),
    (b"use os tcp_client [fe80::1]:80\n",
     "1: an IPv6 address: rules have IPv4 addresses, and * is for both: \"[fe80::1]:80\""),
])  # fmt: skip
def test_check_judges_libvma_conf_by_bytes_as_the_shim_does(place: Path, capsys: pytest.CaptureFixture[str],
                                                            data: bytes, said: str | None) -> None:
    path = place / "libvma.conf"
    path.write_bytes(data)
    assert main(["config", "check", str(path)]) == (1 if said else 0)
    assert capsys.readouterr().err == (f"{path}:{said}\n" if said else "")


@pytest.mark.parametrize("what", ["FIFO", "/dev/zero"])
@pytest.mark.parametrize("name", ["x.conf", "libvma.conf", "x.toml"])
def test_what_is_no_regular_file_is_not_read(place: Path, capsys: pytest.CaptureFixture[str],
                                             monkeypatch: pytest.MonkeyPatch, what: str, name: str) -> None:
    """It would be waited for, or never end: nobody reads it, as the shim does not."""
    path = place / "profiles" / name
    if what == "FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to(what)
    said = f"vmahybrid: {path}: is not a regular file"
    for argv in (["check", str(path)], ["import", str(path), "mine"], ["diff", "default", str(path)]):
        assert main(["config", *argv]) == 2
        assert capsys.readouterr().err.startswith(said), argv
    if name == "x.conf":
        for argv in (["profiles", "x"], ["profiles"], ["diff", "x"]):
            assert main(["config", *argv]) == 2
            assert capsys.readouterr().err.startswith(said), argv
        monkeypatch.setenv("VMA_SPEC", "x")
        assert f"{path} can't be read (is not a regular file)" in body(capsys, "show")["warnings"]
        monkeypatch.delenv("VMA_SPEC")
    monkeypatch.setenv("VMA_HYBRID_POLICY", str(path))
    assert f"{path} can't be read (is not a regular file)" in body(capsys, "show")["warnings"]
    assert main(["config", "set", "VMA_BF=0"]) == 2
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize("name", ["VMA_HYBRID_POLICY", "VMA_HYBRID_PROFILE_DIR"])
def test_where_files_are_is_for_the_environment(place: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Such a line in a file would be read and forgotten."""
    why = f"{name} says where files are, so it is for the environment"
    assert main(["config", "set", f"{name}=/x"]) == 2
    assert capsys.readouterr().err == (f"vmahybrid: {name}: {why.removeprefix(f'{name} ')}. "
                                       f"export {name}=/x, or vmahybrid run -e {name}=/x\n")
    assert not (place / "policy.conf").exists()
    (place / "policy.conf").write_text(f"\n{name} = /x\n")
    assert main(["config", "check", str(place / "policy.conf")]) == 1
    assert capsys.readouterr().err == f'{place}/policy.conf:2: {why}: "/x"\n'
    assert main(["config", "import", str(place / "policy.conf"), "mine"]) == 2
    assert why in capsys.readouterr().err
    (row,) = body(capsys, "show", name)["parameters"].values()
    assert (row["value"], row["origin"]) == (os.environ[name], "environment")


def test_from_the_command_line(place: Path) -> None:
    argv = [sys.executable, "-m", "vmahybrid.cli.main", "config", "show", "--changed", "--json"]
    env = {**os.environ, "VMA_MTU": "9000"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["parameters"]["VMA_MTU"]["origin"] == "environment"


@pytest.mark.parametrize("name", ["/dev/stdin", "/dev/fd/0"])
def test_what_the_shell_has_opened_is_read(name: str) -> None:
    argv = [sys.executable, "-m", "vmahybrid.cli.main", "config", "check", name]
    done = subprocess.run(argv, input="VMA_BF = 1\nVMA_RX_POLL = x\n", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.startswith(f"{name}:2: VMA_RX_POLL: 'x' is not a number")) == (1, True)


def test_check_of_many_names_those_that_cannot_be_read(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "libvma.conf").write_text("use os udp_connect *:53\n")
    (place / "a.conf").write_text("VMA_RX_POLL = 1\n")
    files = [str(place / name) for name in ("libvma.conf", "none", "a.conf", ".")]
    assert main(["config", "check", *files]) == 1
    out, err = capsys.readouterr()
    assert [line.partition(": ")[0] for line in out.splitlines()] == [files[0], files[2]]
    assert [line.partition(": ")[0] for line in err.splitlines()] == [files[1], files[3]]
    assert main(["config", "check", files[1]]) == 2
