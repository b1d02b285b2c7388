"""Compiles and runs the C tests of the ring library, as released and with the sanitizers."""

import os
import subprocess
from pathlib import Path

import pytest
from tcp_build import BOTH

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.config import gen_params

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent.parent
SHIM = ROOT / "vmahybrid" / "shim"
COMPILERS = {
    "gcc": ["gcc", "-O2"],
    "sanitized": ["clang-14", "-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
                  "-DVMH_PLAIN_MALLOC"],
}
FLAGS = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-D_GNU_SOURCE"]
FLAGS += [f"-I{ROOT / path}" for path in ("bpf", "vmahybrid/contracts", "vmahybrid/shim")]
RING = ["ring.c", "ring_xdp.c", "ring_xdp_clock.c", "ring_xdp_open.c", "fd.c", "frame.c", "heap.c", "lock.c"]


VERBS = ["ring.c", "ring_verbs.c", "ring_verbs_clock.c", "ring_verbs_cq.c", "ring_verbs_flow.c", "ring_verbs_mem.c",
         "ring_verbs_open.c", "boxes.c", "fd.c", "frame.c", "heap.c", "lock.c"]


def build(target: Path, compiler: str, tests: list[str], parts: list[str], *more: str) -> Path:
    sources = [str(HERE / name) for name in tests] + [str(SHIM / name) for name in parts]
    command = [*COMPILERS[compiler], *FLAGS, *more, *sources, "-o", str(target), "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return target


@pytest.mark.parametrize("compiler", BOTH)
@pytest.mark.parametrize(
    ("test", "parts"),
    [
        ("test_frame.c", ["frame.c"]),
        ("test_net.c", ["net.c", "net_table.c", "heap.c", "lock.c"]),
        ("test_lock.c", ["lock.c"]),
        ("test_conf.c", ["conf_parse.c"]),
        ("test_links.c", ["links.c"]),
        ("test_xdp_clock.c", ["ring_xdp_clock.c"]),
    ],
)
def test_unit(tmp_path: Path, compiler: str, test: str, parts: list[str]) -> None:
    program = build(tmp_path / "program", compiler, [test], parts)
    done = subprocess.run([program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 failed" in done.stdout


@pytest.mark.parametrize("compiler", BOTH)
def test_heap(tmp_path: Path, compiler: str) -> None:
    program = build(tmp_path / "program", compiler, ["test_heap.c"], ["heap.c", "lock.c"], "-UVMH_PLAIN_MALLOC")
    done = subprocess.run([program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 failed" in done.stdout


@pytest.mark.parametrize("compiler", BOTH)
def test_verbs_ring_on_a_device_made_of_arrays(tmp_path: Path, compiler: str) -> None:
    parameters = ROOT / "vmahybrid" / "config" / "parameters.toml"
    assert gen_params.main([str(parameters), str(tmp_path / "params_gen.h")]) == 0
    program = build(tmp_path / "program", compiler, ["test_ring_verbs.c"], VERBS, f"-I{tmp_path}", "-include",
                    str(HERE / "count_prefetch.h"))
    done = subprocess.run([program], capture_output=True, text=True, timeout=60, check=False,
                          env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 failed" in done.stdout


@pytest.mark.parametrize("compiler", BOTH)
def test_lanes(tmp_path: Path, compiler: str) -> None:
    parameters = ROOT / "vmahybrid" / "config" / "parameters.toml"
    assert gen_params.main([str(parameters), str(tmp_path / "params_gen.h")]) == 0
    program = build(tmp_path / "program", compiler, ["test_lane.c"], ["lane.c", "heap.c", "lock.c"], f"-I{tmp_path}")
    done = subprocess.run([program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 failed" in done.stdout


@pytest.mark.root
@pytest.mark.parametrize("compiler", BOTH)
def test_ring_and_kernel_exchange(tmp_path: Path, compiler: str, netns_pair: Sandbox) -> None:
    program = build(tmp_path / "program", compiler, ["ring_exchange.c", "live.c"], RING)
    a, b = netns_pair.sides
    for side, peer in ((a, b), (b, a)):
        side.ip("neigh", "replace", peer.address, "lladdr", peer.mac, "dev", side.device, "nud", "permanent")
    arguments = [a.device, a.address, a.mac, f"/run/netns/{b.netns}", b.address, b.mac]
    assert ", 0 failed" in netns_pair.start(a, [str(program), *arguments]).result()


@pytest.mark.root
@pytest.mark.parametrize("mode", ["raw", "ring"])
def test_ring_pingpong(tmp_path: Path, mode: str, netns_pair: Sandbox) -> None:
    """The bench program works in both modes; its figures are read by whoever runs it, not judged here."""
    program = build(tmp_path / "program", "gcc", ["ring_pingpong.c", "live.c"], RING)
    a, b = netns_pair.sides
    pong = [str(program), mode, "pong", b.device, b.address, b.mac, a.address, a.mac]
    netns_pair.start(b, pong).wait_for("ready")
    ping = [str(program), mode, "ping", a.device, a.address, a.mac, b.address, b.mac, "2000"]
    assert "half-RTT" in netns_pair.start(a, ping).result()
