"""The last test: nothing of all the others is left on the machine."""

from __future__ import annotations

import subprocess
import sys

import leftovers
import pytest

from vmahybrid.bench.sandbox import Sandbox


@pytest.mark.root
def test_the_check_sees_a_process_and_a_namespace(machine_before: tuple[leftovers.Snapshot, str]) -> None:
    before, session = machine_before
    with Sandbox("seen") as sandbox, subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        left = leftovers.compare(before, session, patience=0)
        child.kill()
    assert any(f"process {child.pid}:" in text for text in left)
    assert f"namespace {sandbox.a.netns}" in left


@pytest.mark.root
def test_nothing_is_left(machine_before: tuple[leftovers.Snapshot, str]) -> None:
    before, session = machine_before
    assert leftovers.compare(before, session) == []
