"""How the service looks at RDMA devices: one look at a time, and none that outlives the service."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vmahybrid.net.netns import NetnsWorker
from vmahybrid.service import rdma
from vmahybrid.steering.reasons import Reason
from vmahybrid.verbs import discovery
from vmahybrid.verbs.discovery import RdmaLink

pytestmark = pytest.mark.root
ANSWER = '{"device": "dev0", "reason": "no-raw-packet-qp"}'


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Path]:
    """A device whose probe takes this many seconds; the file has a line per probe."""
    def make(seconds: float) -> Path:
        started, program = tmp_path / "started", tmp_path / "python"
        started.touch()
        program.write_text(f"#!{sys.executable} -SE\nimport os, time\n"
                           f"open({str(started)!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
                           f"time.sleep({seconds})\nprint('{ANSWER}')\n")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        return started

    monkeypatch.setattr(discovery, "scan_here", lambda: [RdmaLink("dev0", 1, "lo", 1, "")])
    monkeypatch.setattr(rdma, "LOOK_SECONDS", 0.0)
    return make


@pytest.fixture
def worker() -> Iterator[NetnsWorker]:
    with NetnsWorker.open_current() as worker:
        yield worker


def wait_for_text(path: Path) -> None:
    while not path.read_text():
        time.sleep(0.02)


def test_a_slow_probe_is_not_repeated(slow: Callable[[float], Path], worker: NetnsWorker) -> None:
    started = slow(0.6)

    async def scenario() -> None:
        devices = rdma.RdmaDevices(worker)
        for _ in range(5):
            begun = time.monotonic()
            devices.look()
            assert time.monotonic() - begun < 0.1  # housekeeping goes on
            await asyncio.sleep(0.1)
        found = devices.of(1)
        assert found is not None
        assert found.reason is Reason.NOT_TRIED
        while found.reason is Reason.NOT_TRIED:
            await asyncio.sleep(0.05)
            found = devices.of(1)
            assert found is not None
        assert found.reason is Reason.NO_RAW_PACKET_QP
        devices.look()
        await devices.close()

    asyncio.run(asyncio.wait_for(scenario(), 5.0))
    assert len(started.read_text().split()) == 1


def test_a_probe_ends_with_the_service(slow: Callable[[float], Path], worker: NetnsWorker) -> None:
    started = slow(4.0)

    async def scenario() -> None:
        devices = rdma.RdmaDevices(worker)
        devices.look()
        await asyncio.to_thread(wait_for_text, started)
        begun = time.monotonic()
        await devices.close()
        await devices.close()
        assert time.monotonic() - begun < 0.5
        devices.look()
        assert len(asyncio.all_tasks()) == 2  # this one and wait_for's

    begun = time.monotonic()
    asyncio.run(asyncio.wait_for(scenario(), 5.0))
    assert time.monotonic() - begun < 2.0
    assert not Path(f"/proc/{started.read_text().strip()}").exists()
