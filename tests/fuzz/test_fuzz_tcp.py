"""The TCP stack under libFuzzer with ASan, UBSan and lwIP's assertions, over IPv4 and IPv6, each for VMH_FUZZ_SECONDS
(default 12)."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from tcp_build import FLAGS, FUZZ, PROGRAMS, STACK, STRICT, cores

HERE = Path(__file__).resolve().parent
SYN, ACK, FIN, PSH, MORE = 2, 16, 1, 8, 64   # MORE: the next segment is of the same look at the ring


def seconds() -> int:
    return int(os.environ.get("VMH_FUZZ_SECONDS", "12"))


def build(target: Path) -> None:
    # the core without the fuzzer's main(), but with its counters
    core = cores(["clang-14", "-g", "-O1", "-fsanitize=fuzzer-no-link,address,undefined",
                  "-fno-sanitize-recover=all", *STRICT])
    sources = [HERE / "fuzz_tcp.c", PROGRAMS / "tcp_wire.c", *STACK, core]
    subprocess.run([*FUZZ, *STRICT, *FLAGS, *map(str, sources), "-o", str(target)], check=True, timeout=120)


def segment(flags: int, shape: int = 0, options: bytes = b"") -> bytes:
    """In place, with the options that shape announces."""
    assert len(options) == (shape >> 4) * 4
    return bytes([0, flags, shape, 0, 0]) + options + b"\0"


def seeds(directory: Path) -> None:
    directory.mkdir()
    syn_options = bytes([2, 4, 5, 0xB4, 4, 2, 8, 10, 0, 0, 0, 1, 0, 0, 0, 0, 1, 3, 3, 7])
    handshakes = {
        "plain": segment(SYN) + segment(ACK),
        "options": segment(SYN, 5 << 4, syn_options) + segment(ACK),
    }
    write, read, close, move, wait = b"\6\0\xff", b"\6\1\xff", b"\6\4\1", b"\6\7\0", b"\4\xff\xff"
    talks = {
        "data": segment(ACK | PSH, 6) + read + write + segment(ACK),
        "looks": (segment(ACK | MORE, 6) * 5 + segment(ACK | PSH, 4) + read) * 3 + segment(ACK | MORE, 6) * 2
        + segment(FIN | ACK) + close,
        "holes": segment(ACK | MORE, 6) * 2 + bytes([0, ACK | MORE, 6, 5, 0, 0]) + segment(ACK | MORE, 6) * 3 + write
        + segment(ACK, 6) + read,
        "silence": write * 20 + wait * 6,
        "close": write + segment(ACK) + close + segment(ACK) + segment(FIN | ACK) + wait,
        "moves": write + move + segment(ACK | PSH, 4) + move + segment(FIN | ACK) + move,
        "sack": write * 10 + segment(ACK, 3 << 4, bytes([1, 1, 5, 10, 0, 0, 4, 0, 0, 0, 8, 0])) + wait,
    }
    for start in (0, 1, 9, 0x3D, 0x41, 0x78):
        for opened, handshake in handshakes.items():
            for said, talk in talks.items():
                (directory / f"{opened}_{said}_{start}").write_bytes(bytes([start]) + handshake + talk)


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("fuzz") / "fuzz_tcp"
    build(target)
    return target


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ip", ["4", "6"])
def test_no_peer_breaks_the_stack(fuzzer: Path, tmp_path: Path, ip: str) -> None:
    seeds(tmp_path / "seeds")
    (tmp_path / "corpus").mkdir()
    command = [str(fuzzer), f"-max_total_time={seconds()}", "-max_len=2000", "-seed=0", "-timeout=20"]
    command += [f"-artifact_prefix={tmp_path}/", "-print_final_stats=1", f"{tmp_path}/corpus", f"{tmp_path}/seeds"]
    env = {**os.environ, "WIRE_IPV6": "1"} if ip == "6" else None
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds() + 60, check=False, env=env)
    assert done.returncode == 0, done.stderr[-6000:]
    executed = re.search(r"number_of_executed_units: (\d+)", done.stderr)
    assert executed, done.stderr[-2000:]
    assert int(executed[1]) > 200, "the fuzzer hardly ran"
    coverage = max(int(found) for found in re.findall(r"cov: (\d+)", done.stderr))
    assert coverage > 1000, f"only {coverage} edges covered"
