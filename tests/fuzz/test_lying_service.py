"""A program under the shim while the service lies, hangs, chatters and closes: it gets its answers by the kernel.

VMH_FUZZ_SECONDS (5) says how long the random part goes on in all, VMH_FUZZ_SEED where it begins; a failure names both.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

import pytest
from compare.programs import build
from fuzz.lying_service import LIES, LyingService

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.cli.run import library
from vmahybrid.verbs.library import softverbs_environment

pytestmark = pytest.mark.root

HERE = Path(__file__).resolve().parent
ECHO_PORT = 7001
BLOCKED_MS = 4000  # in all: 3 s of patience, some retries
FREE_MS = 100      # for each answer: what vmh_patience.h does not count


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("through") / "through"
    flags = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["cc", *flags, "-o", target, HERE / "through.c"], check=True, timeout=60)
    return target


@pytest.fixture
def stage(netns_pair: Sandbox) -> Sandbox:
    peer = netns_pair.start(netns_pair.b, [str(build() / "peer"), netns_pair.b.address, "900"])
    peer.wait_for("ready")
    return netns_pair


def get_through(sandbox: Sandbox, program: Path, path: Path, seconds: float,
                softverbs: bool = False) -> dict[str, int]:
    """What the program counted; fails when it crashed or hung. With ``softverbs`` it asks for a raw packet QP, of which
    the service knows nothing: it grants AF_XDP rings."""
    preload = ":".join(filter(None, [os.environ.get("VMH_SANITIZER_RUNTIME"), str(library())]))
    env = {"LD_PRELOAD": preload, "VMA_HYBRID_SOCKET": str(path), "VMA_TRACELEVEL": "1",
           **(softverbs_environment() if softverbs else {})}
    argv = ["env", *(f"{k}={v}" for k, v in env.items()), str(program), sandbox.a.address, sandbox.b.address]
    said = sandbox.start(sandbox.a, [*argv, str(ECHO_PORT), str(seconds)]).result(seconds + 30)
    return {name: int(value) for name, value in re.findall(r"(\w+) (\d+)", said)}


def check(counted: dict[str, int], told: dict[str, int], what: str) -> None:
    why = f"{what}: {counted}; told {told}"
    assert counted["blocked_ms"] <= BLOCKED_MS + FREE_MS * sum(told.values()), why
    assert counted["wrong"] == 0, why
    # what was posted to a ring that leads nowhere is lost; everything else comes by the kernel
    assert counted["answered"] >= 5, why


@pytest.mark.parametrize(("softverbs", "lie"), [
    *(("xdp", lie) for lie in (*LIES, "truth")), ("softverbs", "truth"), ("softverbs", "fields"), ("softverbs", "few"),
], indirect=["softverbs"])
def test_one_kind_of_lie(stage: Sandbox, program: Path, tmp_path: Path, lie: str, softverbs: bool) -> None:
    service = LyingService(stage, tmp_path / "control", 1, lies=0.0 if lie == "truth" else 1.0, only=[lie])
    try:
        seconds = 6 if lie in ("hang", "flood", "late") else 1
        counted = get_through(stage, program, tmp_path / "control", seconds, softverbs)
    finally:
        service.close()
    assert service.told, "nobody asked the service"
    check(counted, service.told, lie)


@pytest.mark.timeout(1200)
def test_random_lies(stage: Sandbox, program: Path, tmp_path: Path, softverbs: bool) -> None:
    seconds = float(os.environ.get("VMH_FUZZ_SECONDS", "5"))
    seed = int(os.environ.get("VMH_FUZZ_SEED", "1"))
    end = time.monotonic() + seconds
    runs = messages = 0
    while time.monotonic() < end:
        path = tmp_path / f"control-{seed}"
        service = LyingService(stage, path, seed, lies=(0.1, 0.3, 0.6)[seed % 3])
        try:
            counted = get_through(stage, program, path, min(5.0, seconds), softverbs)
        finally:
            service.close()
        check(counted, service.told, f"VMH_FUZZ_SEED={seed}")
        runs, messages, seed = runs + 1, messages + sum(service.told.values()), seed + 1
    print(f"{runs} runs, {messages} replies of a lying service")
    assert messages
