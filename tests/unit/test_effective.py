"""The parameters of a program that runs."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from vmahybrid.config import effective


def test_relative_files_are_found_where_the_program_is(tmp_path: Path) -> None:
    (tmp_path / "mine.conf").write_text("VMA_RX_POLL = 66\n")
    (tmp_path / "policy.conf").write_text("VMA_SELECT_POLL = 77\n")
    environ = {"VMA_SPEC": "./mine.conf", "VMA_HYBRID_POLICY": "policy.conf"}
    program = subprocess.Popen(["/bin/sleep", "30"], cwd=tmp_path, env=environ)
    try:
        while not Path(f"/proc/{program.pid}/environ").read_bytes():  # exec() fills it in last
            time.sleep(0.01)
        found = effective.of_process(program.pid)
    finally:
        program.kill()
        program.wait()
    assert not found.warnings
    assert (found["VMA_RX_POLL"], found["VMA_SELECT_POLL"]) == (66, 77)
