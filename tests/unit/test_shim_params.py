"""Parameters, log and statistics page of the shim, in C, through the driver tests/unit/c/test_params.c."""

import json
import os
import random
import re
import resource
import socket
import struct
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from vmahybrid.cli.parameters import effect
from vmahybrid.config import effective, profiles
from vmahybrid.config.catalogue import Profile, load

ROOT = Path(__file__).resolve().parents[2]
SHIM = ROOT / "vmahybrid" / "shim"
PARTS = ("params", "paramfile", "log", "fd", "reasons", "stats", "stats_dump", "heap", "lock", "conf", "conf_parse",
         "banner", "boxes", "affinity")  # fmt: skip
SOURCES = [SHIM / f"{name}.c" for name in PARTS]


@pytest.fixture(scope="session", name="driver")
def params_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = tmp_path_factory.mktemp("params")
    generator = ROOT / "vmahybrid" / "config" / "gen_params.py"
    catalogue = generator.with_name("parameters.toml")
    subprocess.run([sys.executable, generator, catalogue, build / "params_gen.h"], check=True)
    warnings = ["-Wall", "-Wextra", "-Werror"]
    flags = ["-std=gnu11", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover", *warnings]
    includes = [f"-I{path}" for path in (SHIM, ROOT / "vmahybrid" / "contracts", build)]
    target = build / "test_params"
    sources = [*SOURCES, Path(__file__).parent / "c" / "test_params.c"]
    subprocess.run(["gcc", *flags, *includes, "-o", target, *sources], check=True)
    return target


def run(driver: Path, *arguments: str, stdin: str = "", **env: str) -> tuple[dict[str, str], str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("VMA_")}
    result = subprocess.run(
        [driver, *arguments], env=clean | env, input=stdin, capture_output=True, text=True, timeout=20, check=True
    )
    return dict(line.split("=", 1) for line in result.stdout.splitlines()), result.stderr


CASES: list[tuple[dict[str, str], dict[str, str], list[str]]] = [
    ({}, {"rx_poll": "100000", "tracelevel": "3", "hybrid_socket": "/run/vmahybrid/control.sock", "spec": ""}, []),
    ({"VMA_RX_POLL": "0"}, {"rx_poll": "1"}, []),
    ({"VMA_RX_POLL": "-1"}, {"rx_poll": "-1", "cq_moderation_enable": "0", "cq_aim_interval_msec": "0"}, []),
    ({"VMA_RX_POLL": "-2"}, {"rx_poll": "100000"}, [" Rx Poll loops should be between -1 and 100000000 [-2]"]),
    ({"VMA_RX_POLL": "abc"}, {"rx_poll": "100000"}, ["VMA_RX_POLL = abc is not a number from -1 to 100000000"]),
    ({"VMA_HANDLE_SIGINTR": "7"}, {}, ["VMA_HANDLE_SIGINTR = 7 is not 0 or 1, using [1]"]),
    ({"VMA_TX_MC_LOOPBACK": "-1"}, {}, ["VMA_TX_MC_LOOPBACK = -1 is not 0 or 1, using [1]"]),
    ({"VMA_RX_POLL": "10ms"}, {"rx_poll": "100000"}, ["VMA_RX_POLL = 10ms is not"]),
    ({"VMA_RX_POLL": "99999999999999999999"}, {"rx_poll": "100000"}, ["VMA_RX_POLL = 99999999999999999999 is not"]),
    ({"VMA_RX_POLL": " 5 "}, {"rx_poll": "5"}, []),
    ({"VMA_RX_POLL": ""}, {"rx_poll": "100000"}, []),
    ({"VMA_SELECT_POLL": "-7"}, {"select_poll": "100000"}, [" Select Poll loops can not be below zero [-7]"]),
    ({"VMA_STATS_FD_NUM": "2000"}, {"stats_fd_num": "1024"}, [" Can only monitor maximum 1024 sockets in statistics "]),
    ({"VMA_SPEC": "latency"}, {"spec": "latency", "rx_poll": "-1", "select_poll_os_ratio": "1", "rx_wre": "256"}, []),
    ({"VMA_SPEC": "LATENCY", "VMA_RX_POLL": "7"}, {"spec": "latency", "rx_poll": "7", "select_poll": "-1"}, []),
    ({"VMA_SPEC": "10"}, {"spec": "ultra-latency", "rx_udp_poll_os_ratio": "0", "select_skip_os": "0"}, []),
    ({"VMA_SPEC": "10", "VMA_SELECT_POLL_OS_FORCE": "1"}, {"select_poll_os_ratio": "1", "select_skip_os": "1"}, []),
    ({"VMA_SPEC": "7750"}, {"tracelevel": "2", "internal_thread_affinity": "0x3", "stats_fd_num": "1024"}, []),
    ({"VMA_SPEC": "mcd-irq"}, {"rx_poll": "1", "select_poll": "0", "ring_allocation_logic_tx": "31"}, []),
    ({"VMA_SPEC": "latencyy"}, {"spec": "", "rx_poll": "100000"}, ["VMA_SPEC = latencyy is no profile"]),
    (
        {"VMA_SELECT_POLL_OS_FORCE": "1", "VMA_SELECT_SKIP_OS": "9"},
        {"select_poll_os_ratio": "1", "select_skip_os": "9"},
        [],
    ),
    ({"VMA_TRACELEVEL": "4"}, {"tracelevel": "5", "log_details": "2"}, ["configured with high log level"]),
    ({"VMA_TRACELEVEL": "DEBUG", "VMA_LOG_DETAILS": "0"}, {"tracelevel": "5", "log_details": "0"}, []),
    (
        {"VMA_SELECT_POLL_OS_FORCE": "1", "VMA_SELECT_SKIP_OS": "zz"},
        {"select_poll_os_ratio": "1", "select_skip_os": "4"},
        ["VMA_SELECT_SKIP_OS = zz is not"],
    ),
    (
        {"VMA_SPEC": "latency", "VMA_SELECT_POLL_OS_RATIO": "zz"},
        {"select_poll_os_ratio": "10"},
        ["VMA_SELECT_POLL_OS_RATIO = zz is not"],
    ),
    (
        {"VMA_RX_POLL": "-1", "VMA_CQ_MODERATION_ENABLE": "zz"},
        {},
        ["VMA_CQ_MODERATION_ENABLE = 1 does not go with VMA_RX_POLL = -1 (only 0), using [0]"],
    ),
    (
        {"VMA_RX_WRE": "300", "VMA_CQ_AIM_MAX_COUNT": "zz"},
        {},
        ["VMA_CQ_AIM_MAX_COUNT = 560 does not go with VMA_RX_WRE = 300 (at most 150), using [150]"],
    ),
    (
        {"VMA_TRACELEVEL": "DEBUG", "VMA_LOG_DETAILS": "4"},
        {"log_details": "0"},
        ["VMA_LOG_DETAILS = 4 is not a number from 0 to 3, using [0]"],
    ),
    ({"VMA_TRACELEVEL": "func+"}, {"tracelevel": "7"}, []),
    ({"VMA_HYBRID_TCP": "bogus"}, {}, [", using the default [adaptive]\n"]),
    ({"VMA_HYBRID_TCP": "9"}, {}, [", using [adaptive]\n"]),
    ({"VMA_TRACELEVEL": "loud"}, {"tracelevel": "3"}, ["VMA_TRACELEVEL = loud is not one of none, panic, error"]),
    ({"VMA_OFFLOADED_SOCKETS": "0"}, {"offloaded_sockets": "0"}, []),
    ({"VMA_OFFLOADED_SOCKETS": "off"}, {"offloaded_sockets": "0"}, []),
    ({"VMA_UDP_3T_RULES": "maybe"}, {"udp_3t_rules": "1"}, ["VMA_UDP_3T_RULES = maybe is not 0 or 1"]),
    (
        {"VMA_RING_ALLOCATION_LOGIC_TX": "5"},
        {"ring_allocation_logic_tx": "0"},
        ["VMA_RING_ALLOCATION_LOGIC_TX = 5 is not valid, setting logic to default = 0"],
    ),
    (
        {"VMA_RX_SKIP_OS": "3"},
        {"rx_udp_poll_os_ratio": "3"},
        ["The parameter VMA_RX_SKIP_OS is no longer in use. Parameter VMA_RX_UDP_POLL_OS_RATIO was set to 3 instead"],
    ),
    ({"VMA_TX_WRE": "16"}, {"tx_wre": "128"}, ["VMA_TX_WRE = 16 does not go with VMA_TX_WRE_BATCHING = 64"]),
    ({"VMA_RX_WRE": "0"}, {"rx_wre": "128", "origin.rx_wre": "5"}, ["VMA_RX_WRE = 0 is not"]),
    ({"VMA_SPEC": "latency"}, {"origin.rx_wre": "1"}, []),
    ({"VMA_RX_WRE": "128"}, {"cq_moderation_count": "48", "rx_wre": "128"}, []),
    ({"VMA_TCP_TIMER_RESOLUTION_MSEC": "5"}, {"tcp_timer_resolution_msec": "10"}, ["VMA_TIMER_RESOLUTION_MSEC = 10"]),
    ({"VMA_RX_PREFETCH_BYTES_BEFORE_POLL": "0"}, {"rx_prefetch_bytes_before_poll": "0"}, []),
    ({"VMA_RX_PREFETCH_BYTES_BEFORE_POLL": "8"}, {"rx_prefetch_bytes_before_poll": "0"}, ["from 32 to 2044 or 0"]),
    ({"VMA_TCP_MAX_SYN_RATE": "200000"}, {"tcp_max_syn_rate": "100000"}, ["VMA_TCP_MAX_SYN_RATE = 200000"]),
    ({"VMA_MSS": "50"}, {"mss": "0"}, ["VMA_MSS = 50 is not a number from 88 to 65495 or 0, using [0]"]),
    ({"VMA_MSS": "88"}, {"mss": "88"}, []),
    ({"VMA_HUGETBL": "1"}, {}, ["The 'VMA_HUGETBL' parameter is no longer supported", "for more info"]),
    ({"VMA_RXPOLL": "1"}, {}, ["VMA_RXPOLL is not a parameter"]),
    ({"VMA_APPLICATION_ID": "x" * 64}, {"application_id": "VMA_DEFAULT_APPLICATION_ID"}, ["longer than 63 bytes"]),
    ({"VMA_APPLICATION_ID": "x" * 63}, {"application_id": "x" * 63}, []),
    ({"VMA_STATS_SHMEM_DIR": ""}, {"stats_shmem_dir": ""}, []),
    ({"VMA_SOCKETXTREME": "1"}, {}, ["VMA_SOCKETXTREME: this version has no SocketXtreme API"]),
]


@pytest.mark.parametrize(("env", "values", "warnings"), CASES, ids=lambda case: str(case)[:60])
def test_environment(driver: Path, env: dict[str, str], values: dict[str, str], warnings: list[str]) -> None:
    shown, log = run(driver, **env)
    assert {key: shown[key] for key in values} == values
    for warning in warnings:
        assert warning in log
    if not warnings:
        assert "is not" not in log and "does not go" not in log


CPUS = ["", " ", "0", "1,", ",1", "1 ", " 1", "0x", "0x0", "0X3", "0xfg", "x3", "3x", "00x3", "0x" + "0" * 40 + "1",
        "-1", "0-1", "1-0", "1-", "-", "0-1:", "0-1:0", "0:2", "0,2-5,8-15:2", "8191", "8192", "0-8191", "0-8192",
        "0-8192:8191", "0-81919:8191", "0-81920:81919", "0-8192:81919", "0-9:81920", "00000000009", "99999999999",
        "1,bogus", "\u0661", "0x" + "f" * 200, "0-1-2", "0-5:2:2", "1,,2"]


def test_lists_of_processors_are_read_as_by_the_shim(driver: Path) -> None:
    parameter, chance = load()["VMA_INTERNAL_THREAD_AFFINITY"], random.Random(1)
    texts = [*CPUS, *("".join(chance.choices("0123789xX,,--::af", k=chance.randrange(1, 9))) for _ in range(20000))]
    shown, _ = run(driver, "cpus", stdin="".join(f"{text}\n" for text in texts))
    assert parameter.syntax is not None and parameter.syntax.takes("-1") and shown["-1"] == "0"
    ours = {text: str(int(parameter.syntax.takes(text))) for text in texts}
    assert ours == shown | {"-1": "1"}
    assert 500 < list(ours.values()).count("1") < 19000


def test_pid_in_names(driver: Path) -> None:
    shown, _ = run(driver, VMA_APPLICATION_ID="app-%d-%d")
    assert re.fullmatch(r"app-\d+-%d", shown["application_id"])


def test_log_lines(driver: Path) -> None:
    shown, log = run(driver, "logs")
    lines = log.splitlines()
    assert lines[0] == " VMA INFO: hello world"
    assert lines[1].startswith(" VMA ERROR: xxx") and len(lines[1]) == 510  # 512 bytes at most, newline included
    assert "hidden" not in log
    assert shown["errno"] == "1"
    assert shown["reason"] == "no-service|unknown|none"


@pytest.mark.parametrize(
    ("details", "pattern"),
    [
        ("1", r" Tid: +\d+ VMA INFO: hello world"),
        ("2", r" Pid: +\d+ Tid: +\d+ VMA INFO: hello world"),
        ("3", r" Time: +\d+\.\d{3} Pid: +\d+ Tid: +\d+ VMA INFO: hello world"),
    ],
)
def test_log_details(driver: Path, details: str, pattern: str) -> None:
    _, log = run(driver, "logs", VMA_LOG_DETAILS=details)
    assert re.fullmatch(pattern, log.splitlines()[0])


def test_log_level_none_is_silent(driver: Path) -> None:
    assert run(driver, "logs", VMA_TRACELEVEL="none")[1] == ""


def test_log_file_survives_closing_all_fds_and_fork(driver: Path, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("old contents\n")
    _, stderr = run(driver, "logs", VMA_LOG_FILE=str(path), CLOSE_ALL="1")
    text = path.read_text()
    assert stderr == ""
    assert "\033" not in text and "old" not in text
    lines = text.splitlines()
    assert lines[-3:] == [" VMA WARNING: before", " VMA WARNING: after", " VMA WARNING: child"]


def test_log_file_with_pid_is_one_per_process(driver: Path, tmp_path: Path) -> None:
    run(driver, "logs", VMA_LOG_FILE=str(tmp_path / "log.%d"))
    texts = sorted(path.read_text() for path in tmp_path.iterdir())
    assert len(texts) == 2
    assert " VMA WARNING: child\n" in texts


def test_log_file_that_cannot_be_opened(driver: Path) -> None:
    _, log = run(driver, "logs", VMA_LOG_FILE="/nonexistent/log")
    assert "Failed to open logfile: /nonexistent/log (ENOENT), logging to stderr" in log
    assert " VMA INFO: hello world" in log


def test_log_file_that_cannot_be_written(driver: Path) -> None:
    """It is said once, where the user may look."""
    _, log = run(driver, "logs", VMA_LOG_FILE="/dev/full")
    assert log == " VMA ERROR: Failed to write logfile: /dev/full (ENOSPC), lines are lost\n"


COMMA = 'LC_NUMERIC\ndecimal_point ","\nthousands_sep ""\ngrouping -1\nEND LC_NUMERIC\n'
ASCII = ["<code_set_name> ASCII", "<escape_char> /", "CHARMAP", *(f"<U{n:04X}> /x{n:02x}" for n in range(128)),
         "END CHARMAP", ""]


@pytest.fixture(scope="module")
def locales(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LOCPATH with a locale xx_XX whose numbers have a comma; machines seldom have one installed."""
    place = tmp_path_factory.mktemp("locales")
    (place / "comma").write_text(COMMA)
    (place / "ascii").write_text("\n".join(ASCII))
    make = ["localedef", "-c", "-f", "./ascii", "-i", "./comma", "./xx_XX"]
    subprocess.run(make, cwd=place, capture_output=True, timeout=20, check=False)  # 1: other categories are missing
    return place


@pytest.mark.parametrize(("numbers", "point"), [("C", "."), ("xx_XX", ",")])
def test_statistics(driver: Path, locales: Path, tmp_path: Path, numbers: str, point: str) -> None:
    """Also of a program that has called setlocale(3): who reads them knows nothing of its numbers."""
    dump = tmp_path / "dump"
    shm = tmp_path / "shm"
    shm.mkdir()
    shown, log = run(driver, "stats", VMA_STATS_SHMEM_DIR=str(shm), VMA_STATS_FILE=str(dump), VMA_STATS_FD_NUM="4",
                     LC_NUMERIC=numbers, LC_ALL="", LOCPATH=str(locales))
    assert shown["locale"] == point
    for key in ("fd", "slots", "reused", "child", "child_fd", "child_orders", "parent_orders",
                "child_named", "child_gone", "nameless",
                "parent"):
        assert shown[key] == "1", key
    assert shown["mode"] == "600 size=1"
    assert shown["named"] == shown["file"], "the service goes by the name of the descriptor"
    assert list(shm.iterdir()) == []
    assert dump.read_text().splitlines() == [
        "VMA: [fd=10] Tx Offload: 455 / 233020 / 0 [kilobytes/packets/errors]",
        "VMA: [fd=10] Tx OS info: 0 / 0 / 0 [kilobytes/packets/errors]",
        "VMA: [fd=10] Rx Offload: 455 / 233020 / 0 [kilobytes/packets/errors]",
        "VMA: [fd=10] Rx OS info: 0 / 0 / 0 [kilobytes/packets/errors]",
        "VMA: [fd=10] Rx byte: max 200 / dropped 0 (0.00%) / limit 2000000",
        "VMA: [fd=10] Rx pkt : max 1 / dropped 0 (0.00%)",
        "VMA: [fd=10] Rx poll: 1000 / 233020 (99.57%) [miss/hit]",
    ]
    assert " VMA INFO: ============ DUMPING FD 10 STATISTICS ============\n" in log
    assert " VMA INFO: Bind info : 10.1.2.3:11111\n" in log
    assert " VMA INFO: Connection info : [fd00:77::2]:7950\n" in log
    assert " VMA INFO: Tx Offload : 455 / 233020 / 0 / 0 [kilobytes/packets/eagains/errors]\n" in log
    assert " VMA INFO: Rx byte : max 200 / dropped 0 (0.00%) / limit 2000000\n" in log
    assert " VMA INFO: Rx pkt : max 1 / dropped 0 (0.00%)\n" in log
    assert " VMA INFO: Rx poll : 1000 / 233020 (99.57%) [miss/hit]\n" in log
    assert "Fd number : 11" not in log


def test_statistics_file_while_running(driver: Path, tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if not key.startswith("VMA_")}
    process = subprocess.Popen(
        [driver, "stats"],
        env=env | {"VMA_STATS_SHMEM_DIR": str(tmp_path), "VMA_TRACELEVEL": "none"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    for line in process.stdout:
        if line.startswith("mode="):
            break
    path = tmp_path / f"vmastat.{process.pid}"
    data = path.read_bytes()
    process.communicate("\n")
    magic, version, size, pid, nsocks = struct.unpack_from("5I", data)
    assert (magic.to_bytes(4, "little"), version, size, pid, nsocks) == (b"VMS1", 9, len(data), process.pid, 100)
    assert not path.exists()


@pytest.mark.parametrize("obstacle", ["symlink", "directory", "missing", "empty"])
def test_statistics_without_a_file(driver: Path, tmp_path: Path, obstacle: str) -> None:
    """Nothing is followed or overwritten; the service still gets an fd."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    where = tmp_path if obstacle in ("symlink", "directory") else tmp_path / "none"
    env = {key: value for key, value in os.environ.items() if not key.startswith("VMA_")}
    env |= {"VMA_STATS_SHMEM_DIR": "" if obstacle == "empty" else str(where)}
    # the name holds the pid: a shell makes the obstacle and becomes the driver
    make = {"symlink": f"ln -s {victim} {where}/vmastat.$$", "directory": f"mkdir {where}/vmastat.$$"}.get(
        obstacle, ":"
    )
    result = subprocess.run(
        ["sh", "-c", f"{make}; exec {driver} stats"], env=env, input="", capture_output=True, text=True, check=True
    )
    assert "fd=1\n" in result.stdout and "child=1\n" in result.stdout
    assert victim.read_text() == "precious"
    assert ("no statistics file" in result.stderr) == (obstacle != "empty")


def test_stale_statistics_file_is_replaced(driver: Path, tmp_path: Path) -> None:
    script = f"echo stale > {tmp_path}/vmastat.$$; exec {driver} many"
    env = {key: value for key, value in os.environ.items() if not key.startswith("VMA_")}
    env |= {"VMA_STATS_SHMEM_DIR": str(tmp_path)}
    result = subprocess.run(["sh", "-c", script], env=env, capture_output=True, text=True, check=True)
    assert "over=930 nsocks=100" in result.stdout
    assert "no statistics file" not in result.stderr
    assert result.stderr.count("increase VMA_STATS_FD_NUM") == 1
    assert list(tmp_path.iterdir()) == []


def test_no_slots_and_all_slots(driver: Path, tmp_path: Path) -> None:
    for number, expected in (("0", "1030 nsocks=0"), ("1024", "6 nsocks=1024")):
        shown, _ = run(driver, "many", VMA_STATS_FD_NUM=number, VMA_STATS_SHMEM_DIR=str(tmp_path))
        assert shown["over"] == expected


POLICY = """\
# values for all
VMA_RX_POLL = 7   # a comment
  VMA_APPLICATION_ID = "a #b"
VMA_SPEC = latency
nonsense
VMA_NOT_THERE = 1
VMA_RX_SKIP_OS = 5
VMA_STATS_FD_NUM=5000
VMA_THREAD_MODE = 9
[program test_par*]
VMA_SELECT_POLL = 33
[program sshd]
VMA_SELECT_POLL = 44
[what]
VMA_SELECT_POLL = 55
"""
PROFILE = "VMA_SPEC = ultra-latency\nVMA_RX_POLL = 12\nVMA_TX_WRE = 3\n"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "policy.conf").write_text(POLICY)
    (tmp_path / "own.conf").write_text(PROFILE)
    (tmp_path / "bad.conf").write_bytes(b"VMA_RX_POLL = 1\0\n")
    return {"VMA_HYBRID_POLICY": f"{tmp_path}/policy.conf", "VMA_HYBRID_PROFILE_DIR": str(tmp_path)}


def test_profile_and_policy_files(driver: Path, files: dict[str, str]) -> None:
    policy, directory = files.values()
    shown, log = run(driver, **files)
    assert (shown["rx_poll"], shown["select_poll"], shown["spec"], shown["rx_wre"]) == ("7", "33", "latency", "256")
    assert (shown["application_id"], shown["rx_udp_poll_os_ratio"], shown["stats_fd_num"]) == ("a #b", "5", "1024")
    for line, text in ((5, 'not NAME = VALUE, ignored: "nonsense"'), (6, "VMA_NOT_THERE is not a parameter"),
                       (8, " Can only monitor"), (9, "VMA_THREAD_MODE = 9 is not one of"),
                       (14, 'not [program GLOB], what follows is ignored: "[what]"')):  # fmt: skip
        assert f"{policy}:{line}: {text}" in log
    shown, log = run(driver, **files, VMA_SPEC="own", VMA_SELECT_POLL="9")
    assert (shown["spec"], shown["rx_poll"], shown["select_poll"]) == ("own", "7", "9")
    shown, log = run(driver, VMA_SPEC=f"{directory}/own.conf")
    assert (shown["spec"], shown["rx_poll"], shown["tx_bufs"]) == (f"{directory}/own.conf", "12", "512")
    assert shown["tx_wre"] == "8"
    shown, log = run(driver, VMA_SPEC=f"{directory}/none.conf")
    assert shown["spec"] == "" and f"VMA_SPEC = {directory}/none.conf can't be read (ENOENT), using none" in log
    assert "can't be read (ENOENT)" in run(driver, VMA_HYBRID_POLICY="/nonexistent")[1]


def same_as_the_shim(driver: Path, env: dict[str, str]) -> None:
    shown, _ = run(driver, "all", **env)
    found = effective.resolve(env, "test_params", 4711)
    ours = {name: f"{held.origin} {held.value}" for name, held in found.values.items()}
    assert ours == shown, env


LEFT_OUT = ("VMA_RX_POLL = 1 2", "VMA_RX_POLL = abc", "VMA_RX_POLL = -2", "VMA_RX_POLL =", "VMA_RX_POLL 1",
            "VMA_HYBRID_TCP = 9", "VMA_HYBRID_TCP = bogus", "VMA_RX_SKIP_OS = x", "VMA_APPLICATION_ID = " + "x" * 64)


@pytest.mark.parametrize("line", LEFT_OUT)
def test_a_wrong_line_of_a_file_is_left_out(driver: Path, tmp_path: Path, line: str) -> None:
    """What the profile and earlier lines say stays; each layer alone, and the environment as before."""
    good = "VMA_RX_POLL = 7\nVMA_HYBRID_TCP = kernel\nVMA_RX_UDP_POLL_OS_RATIO = 8\nVMA_APPLICATION_ID = mine\n"
    files = {"VMA_HYBRID_POLICY": f"{tmp_path}/policy.conf", "VMA_HYBRID_PROFILE_DIR": str(tmp_path)}
    (tmp_path / "own.conf").write_text(f"VMA_SPEC = latency\n{line}\n")
    for policy in ("", good + "[program test_*]\n"):
        (tmp_path / "policy.conf").write_text(policy)
        plain, _ = run(driver, "all", **files, VMA_SPEC="own" if policy else "latency")
        (tmp_path / "policy.conf").write_text(policy + line + "\n")
        env = {**files, "VMA_SPEC": "own"}
        shown, log = run(driver, "all", **env)
        assert {k: v for k, v in shown.items() if k != "VMA_SPEC"} == {
            k: v for k, v in plain.items() if k != "VMA_SPEC"}  # fmt: skip
        same_as_the_shim(driver, env)
        ours = effective.resolve(env, "test_params").warnings
        for says in (log.splitlines(), ours):
            said = [text for text in says if "policy.conf:" in text]
            assert len(said) == 1
            assert all("ignored" in text and "default" not in text for text in said)
            assert not [text for text in says if "was set to" in text]


@pytest.mark.parametrize("text", [
    "VMA_RX_POLL = 5\rVMA_RX_POLL = 6\n", "VMA_RX_POLL = 5\r\n", "\vVMA_RX_POLL = 5\n", "VMA_RX_POLL\v= 5\f\n",
    "VMA_APPLICATION_ID = a\N{NO-BREAK SPACE}#b\n", "VMA_APPLICATION_ID = a\v#b\n", "VMA_APPLICATION_ID = a\" #b\n",
    "VMA_APPLICATION_ID = \N{NO-BREAK SPACE}b\N{NO-BREAK SPACE}\n", "[program\N{NO-BREAK SPACE}x]\nVMA_RX_POLL = 5\n",
    "[program \N{NO-BREAK SPACE}test*]\nVMA_RX_POLL = 5\n", "VMA_APPLICATION_ID = \"a\"b\"  # c\n",
])  # fmt: skip
def test_both_readers_know_the_same_blanks(driver: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "policy.conf").write_bytes(text.encode())
    same_as_the_shim(driver, {"VMA_HYBRID_POLICY": f"{tmp_path}/policy.conf"})


@pytest.mark.parametrize("data", [
    b"# caf\xe9\nVMA_RX_POLL = 77\n", b"VMA_APPLICATION_ID = caf\xe9\xff\n[program \xfe]\nVMA_RX_POLL = 5\n",
    "VMA_APPLICATION_ID = caf\N{LATIN SMALL LETTER E WITH ACUTE}\n".encode(), b"\xef\xbb\xbfVMA_RX_POLL = 5\n",
    b"VMA_APPLICATION_ID = " + b"\xe9" * 63 + b"\n", b"VMA_APPLICATION_ID = " + b"\xe9" * 64 + b"\n",
    b"VMA_RX_POLL = 77\n".ljust(32767, b"#"),
])  # fmt: skip
def test_both_readers_take_any_byte(driver: Path, tmp_path: Path, data: bytes) -> None:
    """Of a policy and of a profile, and say the same about it."""
    (tmp_path / "own.conf").write_bytes(data)
    for name in ("VMA_HYBRID_POLICY", "VMA_SPEC"):
        env = {name: f"{tmp_path}/own.conf"}
        done = subprocess.run([driver, "all"], env=env, capture_output=True, check=True)
        found = effective.resolve(env, "test_params", 4711)
        ours = [f"{key}={held.origin} {held.value}" for key, held in found.values.items()]
        assert sorted(ours) == sorted(os.fsdecode(done.stdout).splitlines())
        assert len(found.warnings) == done.stderr.count(b"WARNING"), found.warnings


@pytest.mark.parametrize(("data", "why"), [
    (b"VMA_RX_POLL = 77\n".ljust(32768, b"#"), "longer than 32767 bytes"),
    (b"VMA_RX_POLL = 77\n".ljust(70000, b"\0"), "longer than 32767 bytes"),
    (b"# \0\nVMA_RX_POLL = 77\n", "a zero byte"), (None, "is not a regular file"),
])  # fmt: skip
def test_both_readers_refuse_the_same_file_and_say_why(driver: Path, tmp_path: Path, data: bytes | None,
                                                       why: str) -> None:
    path = tmp_path / "own.conf"
    if data is None:
        os.mkfifo(path)
    else:
        path.write_bytes(data)
    for name, rest in (("VMA_HYBRID_POLICY", ""), ("VMA_SPEC", ", using none")):
        env = {name: str(path)}
        same_as_the_shim(driver, env)
        assert run(driver, **env)[1].count(f"{name} = {path} can't be read ({why}){rest}\n") == 1
        assert effective.resolve(env, "test_params").warnings == [f"{path} can't be read ({why})"]


@pytest.mark.parametrize(("glob", "meant"), [
    ("test_[[:alpha:]]arams", True), ("test_[![:alpha:]]arams", False), (r"test\_params", True), ("test_[^p]*", False),
    ("test_[!p]*", False), ("test_[]p]arams", True), ("test_[", False), ("TEST_*", False), ("*", True), ("", False),
])  # fmt: skip
def test_both_readers_mean_the_same_programs(driver: Path, tmp_path: Path, glob: str, meant: bool) -> None:
    (tmp_path / "policy.conf").write_text(f"[program {glob}]\nVMA_RX_POLL = 5\n")
    env = {"VMA_HYBRID_POLICY": f"{tmp_path}/policy.conf"}
    assert (run(driver, **env)[0]["rx_poll"] == "5") is meant
    same_as_the_shim(driver, env)


@pytest.mark.parametrize(("newer", "said"), [
    ("5", "Parameter VMA_RX_UDP_POLL_OS_RATIO is set as well, and wins"),
    (" ", "Parameter VMA_RX_UDP_POLL_OS_RATIO was set to 8 instead"),
])
def test_an_older_name_beside_the_present_one(driver: Path, newer: str, said: str) -> None:
    env = {"VMA_RX_SKIP_OS": "8", "VMA_RX_UDP_POLL_OS_RATIO": newer}
    shown, log = run(driver, **env)
    assert shown["rx_udp_poll_os_ratio"] == ("8" if newer == " " else "5")
    same_as_the_shim(driver, env)
    said = f"The parameter VMA_RX_SKIP_OS is no longer in use. {said}"
    assert [line for line in log.splitlines() if "VMA_RX_SKIP_OS" in line] == [f" VMA WARNING: {said}"]
    assert effective.resolve(env).warnings == [said]


@pytest.mark.parametrize("env", [case[0] for case in CASES], ids=lambda env: str(env)[:60])
def test_the_command_line_says_what_the_shim_does(driver: Path, env: dict[str, str]) -> None:
    same_as_the_shim(driver, env)


def test_the_command_line_says_what_the_shim_does_with_files(driver: Path, files: dict[str, str]) -> None:
    same_as_the_shim(driver, files)
    for spec in ("own", "mcd", "nothing", files["VMA_HYBRID_PROFILE_DIR"] + "/own.conf"):
        same_as_the_shim(driver, {**files, "VMA_SPEC": spec, "VMA_RX_WRE_BATCHING": "1000"})


@pytest.mark.parametrize("profile", load().profiles, ids=lambda p: p.name)
def test_every_profile_acts(driver: Path, profile: Profile) -> None:
    """By name, in capitals, by number; its values are those that the catalogue lists, but what they imply."""
    for spec in filter(None, (profile.name, profile.name.upper(), profile.alias and str(profile.alias))):
        shown, log = run(driver, "all", VMA_SPEC=spec)
        same_as_the_shim(driver, {"VMA_SPEC": spec})
        assert "is no profile" not in log
        changed = {name: value for name, value in profile.values.items() if value != load()[name].default}
        for name, value in changed.items():
            assert shown[name] in (f"1 {value}", f"{effective.DERIVED} {value}"), name
            if name == "VMA_CQ_MODERATION_ENABLE":
                continue
            same_as_the_shim(driver, {"VMA_SPEC": spec, name: load()[name].show(load()[name].default)})


LEVELS = ("none", "panic", "error", "warn", "info", "details", "debug", "fine", "finer", "all")


@pytest.mark.parametrize("level", LEVELS)
def test_levels(driver: Path, level: str) -> None:
    """Lines of the level and of those above it, nothing below; never on stdout."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("VMA_")}
    done = subprocess.run([driver, "logs"], env=clean | {"VMA_TRACELEVEL": level, "VMA_LOG_DETAILS": "0"}, text=True,
                          capture_output=True, check=True)  # fmt: skip
    said = {line.split()[1].rstrip(":") for line in done.stderr.splitlines()}
    reached = LEVELS.index(level)
    wanted = {name.upper() for name in ("error", "info", "debug") if LEVELS.index(name) <= reached}
    assert said == wanted | ({"WARNING"} if reached >= LEVELS.index("warn") else set())
    assert "VMA" not in done.stdout


def test_the_command_line_says_what_the_shim_does_at_random(driver: Path, files: dict[str, str]) -> None:
    chance = random.Random(1)
    parameters = [p for p in load().parameters if p.name not in files and p.name not in ("VMA_LOG_FILE",)]
    for _ in range(60):
        env = dict(files) if chance.random() < 0.3 else {}
        for parameter in chance.sample(parameters, 12):
            words = [word for choice in parameter.choices for word in choice.words]
            texts = ["", " ", "-1", "0", "1", "+2", "17 ", "1x", "0x10", "on", "NO", "-99999", "2147483648", "1e3",
                     *words, str(parameter.minimum), str(parameter.maximum), "9" * 25]  # fmt: skip
            env[parameter.name] = chance.choice(texts)
        env.pop("VMA_TRACELEVEL", None)
        same_as_the_shim(driver, env)


MANUAL = json.loads((Path(__file__).parent / "data" / "manual.json").read_text("utf-8"))["banner"]


def test_banner_at_details_is_the_manual_s(driver: Path) -> None:
    lines = run(driver, BANNER="1", VMA_TRACELEVEL="details")[1].splitlines()
    assert [line for line in lines if line.endswith("-" * 75)] == [
        " VMA INFO: " + "-" * 75] * 3  # fmt: skip
    head = lines[1 : lines.index(lines[0], 1)]
    (when,) = re.findall("Current Time: (.*) UTC", "\n".join(head))
    told = datetime.strptime(when, "%a %b %d %H:%M:%S %Y").replace(tzinfo=UTC)
    assert abs((datetime.now(UTC) - told).total_seconds()) < 10
    assert told.strftime("%a %b %e %H:%M:%S %Y") == when
    for line, pattern in zip(head, (
        r"VMA_VERSION: \d\S*-0 Release vmahybrid built on \w{3} [ \d]\d \d{4} \d\d:\d\d:\d\d",
        r"Cmd Line: \S+/test_params", "Current Time: .*", r"Pid: [ \d]{4}\d+",
        rf"Architecture: {os.uname().machine}", rf"Node: {re.escape(os.uname().nodename)}"), strict=True):  # fmt: skip
        assert re.fullmatch(" VMA INFO: " + pattern, line), line
    shown = {line.rpartition("[")[2].rstrip("]"): line for line in lines if line.endswith("]")}
    assert [name for name in shown if name in {n for n, _, _ in MANUAL}] == [name for name, _, _ in MANUAL]
    for name, label, value in MANUAL:
        level = "INFO" if name == "VMA_TRACELEVEL" else "DETAILS"
        assert shown[name] == f" VMA {level}: {label:<30} {value:<26} [{name}]"
    assert "VMA_SPEC" not in shown and "VMA_SPEC_PARAM1" not in shown


def test_banner_at_info_shows_what_is_not_the_default(driver: Path) -> None:
    env = {"VMA_SPEC": "29west", "VMA_TCP_MAX_SYN_RATE": "5", "VMA_RX_CQ_DRAIN_RATE_NSEC": "100", "VMA_LOG_FILE": "",
           "VMA_PROGRESS_ENGINE_INTERVAL": "0", "VMA_CQ_MODERATION_ENABLE": "0", "VMA_TCP_NODELAY": "1",
           "VMA_RING_ALLOCATION_LOGIC_TX": "20", "VMA_THREAD_MODE": "2", "VMA_BF": "0", "VMA_TX_BUFS": "200000"}
    lines = run(driver, BANNER="1", **env)[1].splitlines()
    assert lines[8:-1] == [
        " VMA INFO: VMA Spec                       29West LBM Logic           [VMA_SPEC]",
        " VMA INFO: Param 1:                       5000                       [VMA_SPEC_PARAM1]",
        " VMA INFO: Param 2:                       50                         [VMA_SPEC_PARAM2]",
        " VMA INFO: Log Level                      INFO                       [VMA_TRACELEVEL]",
        " VMA INFO: Ring allocation logic TX       20(Ring per thread)        [VMA_RING_ALLOCATION_LOGIC_TX]",
        " VMA INFO: TCP max syn rate               5 (per sec)                [VMA_TCP_MAX_SYN_RATE]",
        " VMA INFO: Rx Poll Loops                  1                          [VMA_RX_POLL]",
        " VMA INFO: Rx CQ Drain Rate (nsec)        100                        [VMA_RX_CQ_DRAIN_RATE_NSEC]",
        " VMA INFO: Select Poll OS Ratio           100                        [VMA_SELECT_POLL_OS_RATIO]",
        " VMA INFO: Select Skip OS                 50                         [VMA_SELECT_SKIP_OS]",
        " VMA INFO: CQ Drain Thread                Disabled                   [VMA_PROGRESS_ENGINE_INTERVAL]",
        " VMA INFO: CQ Interrupts Moderation       Disabled                   [VMA_CQ_MODERATION_ENABLE]",
        " VMA INFO: CQ Adaptive Moderation         Disabled                   [VMA_CQ_AIM_INTERVAL_MSEC]",
        " VMA INFO: TCP nodelay                    1                          [VMA_TCP_NODELAY]",
        " VMA INFO: Thread mode                    Multi mutex lock           [VMA_THREAD_MODE]",
        " VMA INFO: BF (Blue Flame)                Disabled                   [VMA_BF]"]  # fmt: skip
    late = run(driver, BANNER="1", VMA_TIMER_RESOLUTION_MSEC="1200", VMA_TCP_TIMER_RESOLUTION_MSEC="1200")[1]
    assert [line for line in late.splitlines() if " INFO: " in line and "Timer" in line] == [
        " VMA INFO: Timer Resolution (msec)        1200 (acts as 1000)        [VMA_TIMER_RESOLUTION_MSEC]",
        " VMA INFO: TCP Timer Resolution (msec)    1200 (acts as 40)          [VMA_TCP_TIMER_RESOLUTION_MSEC]"]
    assert run(driver, BANNER="1", VMA_TRACELEVEL="warn")[1] == ""
    log = run(driver, BANNER="1", VMA_SPEC="10", VMA_RX_POLL="x", VMA_TRACELEVEL="debug")[1].splitlines()
    log = [line for line in log if "has no effect" not in line]
    after = log.index(next(line for line in log if "VMA_RX_POLL = x is not" in line))
    assert log[after - 1].endswith("VMA INFO: " + "-" * 75) and "high log level" in log[after + 2]
    assert any("VMA Spec                       Ultra Latency              [VMA_SPEC]" in line for line in log)


def on_a_terminal(driver: Path, **env: str) -> str:
    """The log, where stderr is a terminal."""
    ours, theirs = os.openpty()
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("VMA_", "NO_COLOR"))}
    env = clean | {"TERM": "linux"} | env
    with subprocess.Popen([driver, "logs"], env=env, stdout=subprocess.DEVNULL, stderr=theirs) as process:
        os.close(theirs)
        process.wait(10)
        text = os.read(ours, 65536).decode()
    os.close(ours)
    return text


def test_colours_on_a_terminal_only(driver: Path, tmp_path: Path) -> None:
    text = on_a_terminal(driver)
    assert "\x1b[0;31m VMA ERROR: x" in text and "\x1b[2;35m VMA WARNING: before\x1b[0m\r\n" in text
    assert "\n VMA INFO: " in "\n" + text
    for off in ({"VMA_LOG_COLORS": "0"}, {"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert "WARNING: before" in on_a_terminal(driver, **off) and "\x1b" not in on_a_terminal(driver, **off)
    assert "\x1b" not in run(driver, "logs")[1]
    path = tmp_path / "log"
    run(driver, "logs", VMA_LOG_FILE=str(path))
    assert "WARNING: before" in path.read_text() and "\x1b" not in path.read_text()


def test_what_has_no_effect_is_said_once(driver: Path, files: dict[str, str]) -> None:
    env = {"VMA_TRACELEVEL": "details", "VMA_BF": "0", "VMA_RX_POLL": "7", "VMA_TX_PREFETCH_BYTES": "512",
           "VMA_TCP_MAX_SYN_RATE": "10", "VMA_TSO": "1", "VMA_SPEC": "latency"}
    log = run(driver, "effect", **env)[1]
    lines = [line for line in log.splitlines() if "no effect" in line]
    assert {" VMA DETAILS: VMA_BF has no effect on xdp", " VMA DETAILS: VMA_TCP_MAX_SYN_RATE has no effect on verbs",
            " VMA DETAILS: VMA_TSO has no effect", " VMA DETAILS: VMA_TX_PREFETCH_BYTES has no effect on xdp",
            " VMA DETAILS: VMA_TX_WRE_BATCHING has no effect on xdp"} < set(lines)  # the last: of the profile
    assert len(set(lines)) == len(lines)
    assert run(driver, VMA_TRACELEVEL="details", VMA_TSO="1")[1].count("VMA_TSO has no effect\n") == 1  # without a ring
    assert "no effect" not in run(driver, "effect", VMA_BF="0")[1]
    Path(files["VMA_HYBRID_POLICY"]).write_text("VMA_BF = 0\nVMA_RX_POLL_OS_RATIO = 3\n")
    log = run(driver, "effect", VMA_TRACELEVEL="details", **files)[1]
    assert "VMA_BF has no effect on xdp" in log
    assert "VMA_RX_POLL_OS_RATIO is no longer in use. Parameter VMA_RX_UDP_POLL_OS_RATIO was set to 3 instead" in log


@pytest.mark.parametrize("spec", ["latency", "throughput", "own", "copy", "none"])
def test_what_has_no_effect_is_said_of_a_profile(driver: Path, tmp_path: Path, spec: str) -> None:
    """A built-in one as one that is a file, and as `config show` marks it; not of what follows from its values."""
    (tmp_path / "own.conf").write_text("VMA_SPEC = latency\nVMA_BF = 0\nVMA_TX_WRE_BATCHING = 32\n")
    (tmp_path / "copy.conf").write_text(profiles.text_of("latency"))
    env = {"VMA_HYBRID_PROFILE_DIR": str(tmp_path), "VMA_SPEC": spec}
    found = effective.resolve(env).values.values()
    named = {held.parameter.name for held in found if held.origin in (effective.BUILTIN, effective.PROFILE) and
             effect(held.parameter) in ("no effect", "no effect on xdp")}  # fmt: skip
    log = run(driver, "effect", VMA_TRACELEVEL="details", **env)[1]
    assert set(re.findall("DETAILS: (.*) has no effect(?: on xdp)?\n", log)) == named
    assert ("VMA_TX_WRE_BATCHING" in named) is (spec in ("latency", "own", "copy"))
    assert ("VMA_BF" in named) is (spec == "own")
    assert bool(named) is (spec != "none")


@pytest.mark.parametrize("text", ["foo", "0x0", "8192", "-2147483649", "", "1,bogus"])
def test_a_list_of_processors_that_is_none(driver: Path, tmp_path: Path, text: str) -> None:
    """Said at start, whether or not a thread ever runs; the banner and `config show` have what is used."""
    name, policy = "VMA_INTERNAL_THREAD_AFFINITY", tmp_path / "policy.conf"
    says = f"{name} = {text} is not a hexadecimal mask of processors (0x3), or a list (0,2-5,8-15:2), all below 8192; "\
           "or -1, "  # fmt: skip
    shown, log = run(driver, BANNER="1", **{name: text})
    assert shown["internal_thread_affinity"] == "0"
    peers = f" VMA WARNING:  Failed to set internal thread affinity: {text}...  deferring to cpu-0.\n"
    assert log.count(peers) == log.count("WARNING") == 1
    assert re.search(r"INFO: Internal Thread Affinity +0 +\[", log)
    found = effective.resolve({name: text})
    assert (found[name], found.values[name].source, found.warnings) == ("0", "environment", [f"{says}using [0]"])
    policy.write_text(f"{name} = 1\n{name} = {text}\n")  # in a file what was said before stays
    env = {"VMA_HYBRID_POLICY": str(policy), "VMA_TRACELEVEL": "info"}
    shown, log = run(driver, **env)
    found = effective.resolve(env)
    assert shown["internal_thread_affinity"] == found[name] == "1"
    assert log.count("WARNING") == 1 and f" VMA WARNING: {policy}:2: {says}ignored\n" in log
    assert found.warnings == [f"{policy}:2: {says}ignored"]


def test_each_bad_value_is_named(driver: Path) -> None:
    """All of them at once, and long ones with range and what is used; what is beyond any sense is counted."""
    wrong = {p.name: "x" * 600 for p in load().parameters if p.type != "string" and p.name != "VMA_TRACELEVEL"}
    log = run(driver, **wrong)[1]
    for name in wrong:
        p = load()[name]
        assert f" {name} = {'x' * 64}... is not {p.expected()}, using the default [{p.show(p.default)}]\n" in log
    log = run(driver, **{f"VMA_NOT_{n}": "1" for n in range(2000)})[1]
    named = log.count("is not a parameter")
    assert 500 < named < 2000 and f"{2000 - named} more warnings about parameters" in log


def test_what_a_person_sets_in_a_file_is_set(driver: Path, tmp_path: Path) -> None:
    """What follows from another value does not replace it."""
    policy, profile = tmp_path / "policy.conf", tmp_path / "own.conf"
    policy.write_text("VMA_LOG_DETAILS = 3\nVMA_SELECT_SKIP_OS = 9\n")
    profile.write_text("VMA_LOG_DETAILS = 1\n")
    env = {"VMA_HYBRID_POLICY": str(policy), "VMA_TRACELEVEL": "debug", "VMA_SELECT_POLL_OS_FORCE": "1"}
    shown, _ = run(driver, **env)
    assert (shown["log_details"], shown["select_skip_os"], shown["select_poll_os_ratio"]) == ("3", "9", "1")
    same_as_the_shim(driver, env)
    env = {"VMA_SPEC": str(profile), "VMA_TRACELEVEL": "debug"}
    assert run(driver, **env)[0]["log_details"] == "1"
    same_as_the_shim(driver, env)


PAIRS = [
    ({"VMA_TX_WRE": "16"}, "VMA_TX_WRE = 16 does not go with VMA_TX_WRE_BATCHING = 64 (at least 128), using [128]"),
    ({"VMA_CQ_AIM_MAX_COUNT": "900", "VMA_RX_WRE": "1000"},
     "VMA_CQ_AIM_MAX_COUNT = 900 does not go with VMA_RX_WRE = 1000 (at most 500), using [500]"),
    ({"VMA_PROGRESS_ENGINE_INTERVAL": "77", "VMA_PROGRESS_ENGINE_WCE_MAX": "0"},
     "VMA_PROGRESS_ENGINE_INTERVAL = 77 does not go with VMA_PROGRESS_ENGINE_WCE_MAX = 0 (only 0), using [0]"),
    ({"VMA_CQ_MODERATION_ENABLE": "1", "VMA_RX_POLL": "-1"},
     "VMA_CQ_MODERATION_ENABLE = 1 does not go with VMA_RX_POLL = -1 (only 0), using [0]"),
    ({"VMA_CQ_MODERATION_ENABLE": "1", "VMA_SELECT_POLL": "-1"},
     "VMA_CQ_MODERATION_ENABLE = 1 does not go with VMA_SELECT_POLL = -1 (only 0), using [0]"),
    ({"VMA_CQ_MODERATION_ENABLE": "0", "VMA_CQ_AIM_INTERVAL_MSEC": "9"},
     "VMA_CQ_AIM_INTERVAL_MSEC = 9 does not go with VMA_CQ_MODERATION_ENABLE = 0 (only 0), using [0]"),
    ({"VMA_RX_POLL": "-1", "VMA_PROGRESS_ENGINE_WCE_MAX": "0"}, None),
    ({"VMA_SOCKETXTREME": "1"}, "VMA_SOCKETXTREME: this version has no SocketXtreme API, programs use their sockets"),
    ({"VMA_TCP_TIMER_RESOLUTION_MSEC": "1000"},
     "VMA_TCP_TIMER_RESOLUTION_MSEC = 1000 acts as 40: more makes no difference"),
    ({"VMA_TCP_TIMER_RESOLUTION_MSEC": "40"}, None),
    ({"VMA_RING_LIMIT_PER_INTERFACE": "257"},
     "VMA_RING_LIMIT_PER_INTERFACE = 257 acts as 256: more makes no difference"),
    ({"VMA_RING_LIMIT_PER_INTERFACE": "256"}, None),
    ({"VMA_TX_SEGS_TCP": "50000"}, "VMA_TX_SEGS_TCP = 50000 acts as 32000: more makes no difference"),
    ({"VMA_TIMER_RESOLUTION_MSEC": "200"},
     "VMA_TCP_TIMER_RESOLUTION_MSEC = 100 does not go with VMA_TIMER_RESOLUTION_MSEC = 200 (at least 200), "
     "using [200], which acts as 40"),
    ({"VMA_TIMER_RESOLUTION_MSEC": "200", "VMA_TCP_TIMER_RESOLUTION_MSEC": "150"},
     "VMA_TCP_TIMER_RESOLUTION_MSEC = 150 does not go with VMA_TIMER_RESOLUTION_MSEC = 200 (at least 200), "
     "using [200], which acts as 40"),
    ({"VMA_TIMER_RESOLUTION_MSEC": "30", "VMA_TCP_TIMER_RESOLUTION_MSEC": "20"},
     "VMA_TCP_TIMER_RESOLUTION_MSEC = 20 does not go with VMA_TIMER_RESOLUTION_MSEC = 30 (at least 30), using [30]"),
    ({"VMA_TIMER_RESOLUTION_MSEC": "5000", "VMA_SPEC": "29west"},
     "VMA_TIMER_RESOLUTION_MSEC = 5000 acts as 1000: more makes no difference",
     "VMA_TCP_TIMER_RESOLUTION_MSEC = 100 does not go with VMA_TIMER_RESOLUTION_MSEC = 5000 (at least 5000), "
     "using [5000], which acts as 40"),
    ({"VMA_SPEC": "latency"}, None),
    ({"VMA_MTU": "67"},
     "VMA_MTU = 67 acts as 128 for TCP (as 148 over IPv6): "
     "a segment has room for 88 bytes at least"),
    ({"VMA_MTU": "127"},
     "VMA_MTU = 127 acts as 128 for TCP (as 148 over IPv6): "
     "a segment has room for 88 bytes at least"),
    ({"VMA_MTU": "128"}, "VMA_MTU = 128 acts as 148 for TCP over IPv6: a segment has room for 88 bytes at least"),
    ({"VMA_MTU": "148"}, None),
    ({"VMA_MTU": "0"}, None),
    ({"VMA_MTU": "0", "VMA_MSS": "65495"}, None),
    ({"VMA_MTU": "1000", "VMA_MSS": "0"}, None),
    ({"VMA_MTU": "1000", "VMA_MSS": "940"}, None),
    ({"VMA_MTU": "1000", "VMA_MSS": "941"},
     "VMA_MSS = 941 does not go with VMA_MTU = 1000 over IPv6 (88 to 940), using [940] there"),
    ({"VMA_MTU": "1000", "VMA_MSS": "960"},
     "VMA_MSS = 960 does not go with VMA_MTU = 1000 over IPv6 (88 to 940), using [940] there"),
    ({"VMA_MTU": "1000", "VMA_MSS": "961"},
     "VMA_MSS = 961 does not go with VMA_MTU = 1000 (88 to 960, over IPv6 to 940), using [960]"),
    ({"VMA_MTU": "148", "VMA_MSS": "88"}, None),
    ({"VMA_MTU": "100", "VMA_MSS": "1000"},
     "VMA_MSS = 1000 does not go with VMA_MTU = 100 (88 to 88, over IPv6 to 88), using [88]",
     "VMA_MTU = 100 acts as 128 for TCP (as 148 over IPv6): a segment has room for 88 bytes at least"),
]  # fmt: skip


@pytest.mark.parametrize("case", PAIRS, ids=lambda case: str(case)[:60])
def test_what_does_not_go_together_is_said(driver: Path, case: tuple[Any, ...]) -> None:
    """By the shim and by the command line, in the same words."""
    env, *warnings = case
    log = run(driver, **env)[1]
    found = effective.resolve(env, "test_params", 4711).warnings
    said = [line.removeprefix(" VMA WARNING: ") for line in log.splitlines() if " VMA WARNING: " in line]
    assert said == found == list(filter(None, warnings))


OWN_PROFILE = [
    *[case for case in PAIRS if all(name not in case[0] for name in ("VMA_SPEC", "VMA_SOCKETXTREME"))],
    ({"VMA_GRO_STREAMS_MAX": "100"}, "VMA_GRO_STREAMS_MAX = 100 acts as 64: more makes no difference"),
    ({"VMA_SPEC": "latency", "VMA_CQ_MODERATION_ENABLE": "1"},
     "VMA_CQ_MODERATION_ENABLE = 1 does not go with VMA_RX_POLL = -1 (only 0), using [0]"),
]  # fmt: skip


@pytest.mark.parametrize("case", OWN_PROFILE, ids=lambda case: str(case)[:60])
def test_a_profile_that_is_a_file_is_what_its_user_says(driver: Path, tmp_path: Path, case: tuple[Any, ...]) -> None:
    """What does not go together is said of it, as of the policy file; a built-in profile is ours."""
    values, *warnings = case
    lines = "".join(f"{name} = {value}\n" for name, value in values.items())
    (tmp_path / "own.conf").write_text(lines)
    test_what_does_not_go_together_is_said(driver, ({"VMA_SPEC": f"{tmp_path}/own.conf"}, *warnings))
    same_as_the_shim(driver, {"VMA_SPEC": f"{tmp_path}/own.conf"})
    (tmp_path / "policy.conf").write_text(lines)
    test_what_does_not_go_together_is_said(driver, ({"VMA_HYBRID_POLICY": f"{tmp_path}/policy.conf"}, *warnings))


@pytest.mark.parametrize("name", ["VMA_HYBRID_POLICY", "VMA_HYBRID_PROFILE_DIR"])
def test_where_the_files_are_is_not_said_in_one(driver: Path, tmp_path: Path, name: str) -> None:
    """It would come too late: what acts stays, and is what is shown."""
    policy, own = tmp_path / "policy.conf", tmp_path / "own.conf"
    policy.write_text(f"VMA_SPEC = own\n{name} = /x\n")
    own.write_text(f"\n\n{name} = /y\n")
    env = {"VMA_HYBRID_POLICY": str(policy), "VMA_HYBRID_PROFILE_DIR": str(tmp_path)}
    shown, log = run(driver, "all", **env)
    assert shown[name] == f"{effective.ENVIRONMENT} {env[name]}"
    said = [line.removeprefix(" VMA WARNING: ") for line in log.splitlines() if " VMA WARNING: " in line]
    why = f"{name} says where files are, so it is for the environment, ignored"
    assert said == [f"{own}:3: {why}", f"{policy}:2: {why}"]
    assert [text.removeprefix("profile ") for text in effective.resolve(env, "test_params", 4711).warnings] == said
    same_as_the_shim(driver, env)


def test_a_policy_file_that_is_not_there(driver: Path) -> None:
    env = {"VMA_HYBRID_POLICY": "/nonexistent"}
    assert "/nonexistent can't be read (ENOENT)" in run(driver, **env)[1]
    (warning,) = effective.resolve(env, "test_params", 4711).warnings
    assert warning.startswith("/nonexistent can't be read")


@pytest.mark.parametrize(("name", "rest"), [("VMA_SPEC", ", using none"), ("VMA_HYBRID_POLICY", "")])
def test_a_directory_is_called_one(driver: Path, tmp_path: Path, name: str, rest: str) -> None:
    log = run(driver, **{name: f"{tmp_path}/."})[1]
    assert re.findall(r"VMA WARNING: (.*can't be read.*)", log) == [
        f"{name} = {tmp_path}/. can't be read (EISDIR){rest}"]


SENDER, RECEIVER, CONNECT = 2, 3, 4
CONF_RULE = 59


class Asked:
    """The rules of libvma.conf in a running process."""

    def __init__(self, driver: Path, log: Path, nofile: int = 0, **env: str) -> None:
        """``nofile``: so many descriptors it may have from its start on."""
        limit = ["prlimit", f"--nofile={nofile}:"] if nofile else []
        clean = {key: value for key, value in os.environ.items() if not key.startswith("VMA_")}
        self.log = log
        self.process = subprocess.Popen([*limit, driver, "conf"], env=clean | env | {"VMA_LOG_FILE": str(log)},
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip

    def ask(self, role: int, first: str, second: str = "0.0.0.0 0") -> int:
        assert self.process.stdin and self.process.stdout
        time.sleep(0.002)  # the file is looked at once in a millisecond
        self.process.stdin.write(f"{role} {first} {second}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def close(self) -> list[str]:
        self.process.communicate(timeout=10)
        assert self.process.returncode == 0
        return self.log.read_text().splitlines()


def test_libvma_conf_is_told_at_level_debug(driver: Path, tmp_path: Path) -> None:
    """The lines of libvma: what was read, and what each question is answered."""
    conf = tmp_path / "libvma.conf"
    conf.write_text("""\
application-id test_params *
use os udp_sender 1.2.3.0/24:1-100
use vma udp_sender *:*
use os udp_connect 10.0.0.1:53:*:7
use adaptive tcp_server *:80
application-id other me
use os tcp_client *:*:*:*
""")
    asked = Asked(driver, tmp_path / "log", VMA_CONFIG_FILE=str(conf), VMA_TRACELEVEL="debug")
    assert [asked.ask(SENDER, "1.2.3.4 100"), asked.ask(SENDER, "1.2.4.4 100")] == [CONF_RULE, 0]
    lines = [line.partition(" VMA DEBUG: ")[2] for line in asked.close()]
    at = lines.index("Configuration File:")
    assert lines[at + 1 : -2] == [
        "application-id test_params *:", "\ttcp_server's rules:", "\t\t\tuse adaptive tcp *:80",
        "\ttcp_client's rules:", "\tudp receiver rules:", "\tudp sender rules:",
        "\t\t\tuse os udp 1.2.3.0/24:1-100", "\t\t\tuse vma udp *:*",
        "\tudp connect rules:", "\t\t\tuse os udp 10.0.0.1:53 *:7",
        "application-id other me:", "\ttcp_server's rules:", "\ttcp_client's rules:", "\t\t\tuse os tcp *:* *:*",
        "\tudp receiver rules:", "\tudp sender rules:", "\tudp connect rules:"]  # fmt: skip
    assert lines[-2:] == ["MATCH UDP SENDER: => OS", "MATCH UDP SENDER: => VMA"]


def test_libvma_conf_is_read_again_and_a_wrong_one_changes_nothing(driver: Path, tmp_path: Path) -> None:
    conf = tmp_path / "libvma.conf"
    asked = Asked(driver, tmp_path / "log", VMA_CONFIG_FILE=str(conf), VMA_TRACELEVEL="info")
    assert asked.ask(SENDER, "10.0.0.1 53") == 0
    conf.write_text("use os udp_sender *:53\n")
    assert asked.ask(SENDER, "10.0.0.1 53") == CONF_RULE
    assert asked.ask(SENDER, "10.0.0.1 54") == 0
    conf.write_text("use os udp_sender *:54\nuse os udp_sendr *:53\n")
    assert [asked.ask(SENDER, "10.0.0.1 53") for _ in range(3)] == [CONF_RULE] * 3
    assert asked.ask(SENDER, "10.0.0.1 54") == 0
    conf.write_bytes(b"use os udp_sender *:55\n\0")
    assert asked.ask(SENDER, "10.0.0.1 55") == 0
    conf.write_text("#" * 70000)
    assert asked.ask(SENDER, "10.0.0.1 53") == CONF_RULE
    conf.write_text("use vma udp_sender 10.0.0.0/8:*\nuse os udp_sender *:*\nuse os udp_receiver 239.1.1.1:7\n")
    assert [asked.ask(SENDER, "10.0.0.1 53"), asked.ask(SENDER, "11.0.0.1 53")] == [0, CONF_RULE]
    assert [asked.ask(RECEIVER, "239.1.1.1 7"), asked.ask(CONNECT, "239.1.1.1 7", "10.0.0.1 9")] == [CONF_RULE, 0]
    conf.unlink()
    assert asked.ask(SENDER, "11.0.0.1 53") == 0
    log = asked.close()
    assert [line for line in log if "libvma.conf" in line] == [
        f" VMA WARNING: Configuration file {conf} can't be read: ENOENT. No rules apply",
        f" VMA ERROR: {conf}:2: not a role (tcp_server, tcp_client, udp_sender, udp_receiver, udp_connect): "
        '"udp_sendr". '
        "The rules stay as they were",
        f" VMA WARNING: Configuration file {conf} is no text: there is a zero byte in it. The rules stay as they were",
        f" VMA WARNING: Configuration file {conf} is longer than 65535 bytes. The rules stay as they were",
        f" VMA WARNING: {conf} is gone: no rules of libvma.conf apply"]  # fmt: skip


@pytest.mark.parametrize(("what", "said"), [
    ("directory", "is a directory: give the name of a file in VMA_CONFIG_FILE"), ("null", "is not a regular file"),
    ("zero", "is no text: there is a zero byte in it"), ("long", "is longer than 65535 bytes"),
    ("loop", "can't be read: ELOOP"), ("missing", "can't be read: ENOENT"), ("below", "can't be read: ENOTDIR"),
])  # fmt: skip
def test_a_libvma_conf_that_is_none_is_told_of_once(driver: Path, tmp_path: Path, what: str, said: str) -> None:
    """However often it is looked at, and whatever comes and goes in a directory; a file in its place is read."""
    conf = tmp_path / "libvma.conf"
    {"directory": conf.mkdir, "null": lambda: conf.symlink_to("/dev/null"), "zero": lambda: conf.write_bytes(b"\0"),
     "long": lambda: conf.write_text("#" * 65536), "loop": lambda: conf.symlink_to(conf), "missing": lambda: None,
     "below": lambda: None}[what]()  # fmt: skip
    (tmp_path / "file").write_text("")
    name = tmp_path / "file" / "conf" if what == "below" else conf
    asked = Asked(driver, tmp_path / "log", VMA_CONFIG_FILE=str(name), VMA_TRACELEVEL="warn")
    assert asked.ask(SENDER, "10.0.0.1 53") == 0
    if what == "directory":
        (conf / "something").write_text("")
    assert [asked.ask(SENDER, "10.0.0.1 53") for _ in range(3)] == [0] * 3
    if what == "directory":
        (conf / "something").unlink()
        conf.rmdir()
    if what != "below":
        conf.unlink(missing_ok=True)
        conf.write_text("use os udp_sender *:53\n")
        assert asked.ask(SENDER, "10.0.0.1 53") == CONF_RULE
    assert asked.close() == [f" VMA WARNING: Configuration file {name} {said}. No rules apply"]


def test_a_libvma_conf_that_may_not_be_read_at_first(driver: Path, tmp_path: Path) -> None:
    """What stood in the way may go without a change of the file: programs become other users."""
    conf, log = tmp_path / "libvma.conf", tmp_path / "log"
    conf.write_text("use os udp_sender *:53\n")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    log_is_open = 4     # stdin, stdout, stderr, the log
    asked = Asked(driver, log, log_is_open, VMA_CONFIG_FILE=str(conf), VMA_TRACELEVEL="warn")
    assert [asked.ask(SENDER, "10.0.0.1 53") for _ in range(3)] == [0] * 3
    resource.prlimit(asked.process.pid, resource.RLIMIT_NOFILE, limits)
    assert asked.ask(SENDER, "10.0.0.1 53") == CONF_RULE
    assert asked.close() == [f" VMA WARNING: Configuration file {conf} can't be read: EMFILE. No rules apply"]


@pytest.mark.parametrize(("text", "answer", "said"), [
    (b"# caf\xe9\nuse os udp_sender *:53\n", CONF_RULE, None),
    (b"use os udp_sender *:53\nuse os udp_sender b\xfcro:53\n", 0,
     b"2: not an address (a.b.c.d, a.b.c.d/bits or *): \"b\xfcro\""),
    (b"use os udp_sender *:53\nuse os udp_sender fe80::1:53\n", 0,
     b"2: an IPv6 address: rules have IPv4 addresses, and * is for both: \"fe80::1:53\""),
])  # fmt: skip
def test_libvma_conf_is_judged_by_bytes(driver: Path, tmp_path: Path, text: bytes, answer: int,
                                        said: bytes | None) -> None:
    """As `config check` does, see test_cli_parameters.py."""
    conf = tmp_path / "libvma.conf"
    conf.write_bytes(text)
    asked = Asked(driver, tmp_path / "log", VMA_CONFIG_FILE=str(conf), VMA_TRACELEVEL="warn")
    assert asked.ask(SENDER, "10.0.0.1 53") == answer
    asked.process.communicate(timeout=10)
    log = (tmp_path / "log").read_bytes()
    assert log == (b" VMA ERROR: %s:%s. No rule of it applies\n" % (bytes(conf), said) if said else b"")


def test_application_id_chooses_the_rules(driver: Path, tmp_path: Path) -> None:
    conf = tmp_path / "libvma.conf"
    conf.write_text("application-id test_p* feed\nuse os udp_connect *:53\n"
                    "application-id no *\nuse os udp_connect *:*\n")
    for identity, answer, warned in (("feed", CONF_RULE, False), ("VMA_DEFAULT_APPLICATION_ID", 0, True),
                                     ("*", CONF_RULE, False), ("x", 0, True)):  # fmt: skip
        asked = Asked(driver, tmp_path / "log", VMA_CONFIG_FILE=str(conf), VMA_APPLICATION_ID=identity)
        assert asked.ask(CONNECT, "9.9.9.9 53", "10.0.0.1 99") == answer, identity
        found = any("requested VMA_APPLICATION_ID does not exist in the" in line for line in asked.close())
        assert found == warned
    asked = Asked(driver, tmp_path / "log", VMA_CONFIG_FILE=str(conf))
    assert asked.ask(CONNECT, "9.9.9.9 53") == 0
    assert not any("WARNING" in line for line in asked.close())


def test_a_stderr_that_is_a_connection_now_is_spared(driver: Path) -> None:
    """A program that has closed its stderr gets the number for its next socket."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as mine:
        other = server.accept()[0]
        subprocess.run([driver, "logs"], stdout=subprocess.DEVNULL, stderr=mine, timeout=20, check=True)
        mine.close()
        with other:
            assert other.recv(100) == b""


def test_a_stderr_that_nobody_reads_does_not_kill(driver: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run([driver, "logs"], stdout=subprocess.DEVNULL, stderr=writer, timeout=20)
    finally:
        os.close(writer)
    assert done.returncode == 0


def test_a_log_beyond_the_programs_file_limit_does_not_kill(driver: Path, tmp_path: Path) -> None:
    limited = ["prlimit", "--fsize=0", driver, "logs"]
    with (tmp_path / "stderr").open("w") as stderr:
        for more in ({}, {"VMA_LOG_FILE": str(tmp_path / "log")}):
            done = subprocess.run(limited, stdout=subprocess.DEVNULL, stderr=stderr, env=os.environ | more, timeout=20)
            assert done.returncode == 0
