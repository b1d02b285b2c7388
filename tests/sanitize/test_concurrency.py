"""Signal handlers that use sockets, and threads that share them: on the kernel, on the shim, on the sanitizers' shim.

VMH_STRESS_SECONDS (1) is for each thread test, VMH_STRESS_SIGNALS (1000) for each signal test.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from compare.programs import build
from sanitize.build import CLOSED_IN_USE, compile_program, ours, sanitized, tsan_library, tsan_softverbs

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service

pytestmark = [pytest.mark.apps, pytest.mark.slow, pytest.mark.timeout(300)]

SECONDS = os.environ.get("VMH_STRESS_SECONDS", "1")
SIGNALS = os.environ.get("VMH_STRESS_SIGNALS", "1000")
PORT = "7001"
# single: the shim with VMA_THREAD_MODE=0, which must be right with several threads, too
ON = [("xdp", on) for on in ("kernel", "shim", "single", "asan")] + [("softverbs", on) for on in ("shim", "asan")]


@pytest.fixture(scope="module")
def served(softverbs: bool) -> Iterator[tuple[Sandbox, Service]]:
    with Sandbox("threads") as sandbox, Service(sandbox, softverbs=softverbs) as service:
        peer = sandbox.start(sandbox.b, [str(build() / "peer"), sandbox.b.address, "3600"])
        peer.wait_for("ready")
        yield sandbox, service


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("programs")
    return {name: compile_program(f"{name}.c", directory / name) for name in ("signals", "threads")}


def counted(served: tuple[Sandbox, Service], on: str, reports: Path, argv: list[str], limit: float) -> dict[str, int]:
    """The numbers that the program printed; fails when it ended badly, hung, or did not run on a ring."""
    sandbox, service = served
    reports.mkdir()
    with sanitized(reports) if on == "asan" else nullcontext():
        command = argv if on == "kernel" else service.run_argv(argv, profile="none")
        env = {**service.env, "VMA_THREAD_MODE": "0"} if on == "single" else service.env
        program = sandbox.start(sandbox.a, command, env=env)
    deadline = time.monotonic() + 10
    while on != "kernel" and program.running and not service.ring_flows(program.pid):
        assert time.monotonic() < deadline, service.ask("explain", str(program.pid))
    said = program.wait(limit), program.output, program.errors[-2000:], ours(reports)
    assert said[0] == 0 and not said[3], said
    return {name: int(value) for name, value in re.findall(r"(\w+) (\d+)", program.output)}


@pytest.mark.parametrize(("softverbs", "on"), ON, indirect=["softverbs"], scope="module")
@pytest.mark.parametrize("wait", ["recv", "poll", "epoll", "nonblock"])
def test_handler_uses_the_interrupted_socket(
    served: tuple[Sandbox, Service], programs: dict[str, Path], tmp_path: Path, wait: str, on: str
) -> None:
    """Without signal.c's putting off, a handler waits for a lock of the code it interrupted: a hang within 20 runs."""
    argv = [str(programs["signals"]), served[0].b.address, PORT, SIGNALS, wait]
    found = counted(served, on, tmp_path / "reports", argv, int(SIGNALS) / 50 + 60)
    assert found["runs"] >= int(SIGNALS)
    assert found["got"] > found["sent"] * 0.2
    assert found["bad"] == found["nested"] == found["mask"] == found["info"] == 0


@pytest.mark.parametrize(("softverbs", "on"), ON[1:], indirect=["softverbs"], scope="module")
@pytest.mark.parametrize("mode", ["recv", "exclusive", "edge", "close"])
def test_threads_share_sockets(
    served: tuple[Sandbox, Service], programs: dict[str, Path], tmp_path: Path, mode: str, on: str
) -> None:
    argv = [str(programs["threads"]), served[0].b.address, PORT, SECONDS, mode]
    found = counted(served, on, tmp_path / "reports", argv, float(SECONDS) + 60)
    assert found["hung"] == found["twice"] == found["strange"] == 0
    # a socket that is closed takes answers with it
    assert found["answered"] > found["asked"] * (0.1 if mode == "close" else 0.95), found
    assert found["asked"] > 50 * float(SECONDS)


@pytest.fixture(scope="module")
def racing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_program("threads.c", tmp_path_factory.mktemp("racing") / "threads", "-fsanitize=thread")


@pytest.mark.parametrize("mode", ["recv", "exclusive", "edge", "close"])
def test_no_data_race(served: tuple[Sandbox, Service], racing: Path, tmp_path: Path, mode: str) -> None:
    """The same threads under ThreadSanitizer. That the program closes an fd that another thread uses is its purpose."""
    sandbox, service = served
    reports, known = tmp_path / "reports", tmp_path / "known"
    reports.mkdir()
    known.write_text("race:^close$\nrace:^dup2$\n")
    options = f"log_path={reports}/tsan:suppressions={known}:exitcode=0:history_size=4"
    # the shim is before the runtime, which the program brings: addresses as TSan knows them, without randomisation
    settings = [f"LD_PRELOAD={tsan_library()}", f"TSAN_OPTIONS={options}", "VMA_TRACELEVEL=1"]
    if service.softverbs:
        settings.append(f"LD_LIBRARY_PATH={tsan_softverbs()}")
    argv = ["setarch", "-R", "env", *settings]
    running = sandbox.start(sandbox.a, [*argv, str(racing), sandbox.b.address, PORT, SECONDS, mode], env=service.env)
    deadline = time.monotonic() + 10
    while running.running and not service.ring_flows(running.pid):
        assert time.monotonic() < deadline, service.ask("explain", str(running.pid))
    said = running.result(float(SECONDS) + 60)
    assert "twice 0 strange 0 hung 0" in said
    found = ours(reports, CLOSED_IN_USE if mode == "close" else "")
    assert not found, "\n\n".join(found)
