"""The packet parser of the shim under libFuzzer with ASan and UBSan, for VMH_FUZZ_SECONDS (default 10)."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SHIM = ROOT / "vmahybrid" / "shim"
INCLUDES = [f"-I{ROOT / path}" for path in ("bpf", "vmahybrid/contracts", "vmahybrid/shim")]


def seconds() -> int:
    return int(os.environ.get("VMH_FUZZ_SECONDS", "10"))


def build(target: Path, *defines: str) -> None:
    command = ["clang-14", "-g", "-O1", "-std=gnu11",
               "-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all"]
    sources = [str(HERE / "fuzz_frame.c"), str(SHIM / "frame.c")]
    subprocess.run([*command, *defines, *INCLUDES, *sources, "-o", str(target)], check=True, timeout=120)


@pytest.mark.timeout(1200)
def test_no_input_breaks_the_parser(tmp_path: Path) -> None:
    build(tmp_path / "fuzz_frame")
    subprocess.run([sys.executable, HERE / "frame_seeds.py", tmp_path / "seeds"], check=True, timeout=30)
    (tmp_path / "corpus").mkdir()
    command = [f"{tmp_path}/fuzz_frame", f"-max_total_time={seconds()}", "-max_len=1600", "-seed=0"]
    command += [f"-artifact_prefix={tmp_path}/", "-print_final_stats=1", f"{tmp_path}/corpus", f"{tmp_path}/seeds"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=seconds() + 60,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    executed = re.search(r"number_of_executed_units: (\d+)", done.stderr)
    assert executed, done.stderr[-2000:]
    assert int(executed[1]) > 1000, "the fuzzer hardly ran"
    # the seeds reach the end of the parser: fewer edges would mean that they are refused at the door
    coverage = max(int(found) for found in re.findall(r"cov: (\d+)", done.stderr))
    assert coverage > 40, f"only {coverage} edges covered"
