"""Memory and queues of AF_XDP rings are what the parameters of the program ask for: VMA_MEM_ALLOC_TYPE, VMA_RX_BUFS,
VMA_TX_BUFS, VMA_TX_WRE. The service makes them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from net.counter_lab import Peer, Program
from net.service_lab import Api, module_pair, module_service, until  # noqa: F401

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.bench.served import Service
from vmahybrid.config import profiles

pytestmark = pytest.mark.root
POOL = Path("/proc/sys/vm/nr_hugepages")
COMPACT = Path("/proc/sys/vm/compact_memory")
SHMEM = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
BOX = """\
WARNING: ***************************************************************
WARNING: * NO IMMEDIATE ACTION NEEDED!                                 *
WARNING: * Not enough hugepage resources for VMA memory allocation.    *
WARNING: * VMA will continue working with regular memory allocation.   *
INFO: * Optional: 1. Switch to a different memory allocation type   *
INFO: *              (VMA_MEM_ALLOC_TYPE= 0 or 1)                   *
INFO: *           2. Restart process after increasing the number of *
INFO: *              hugepages resources in the system:             *
INFO: * "cat /proc/meminfo |  grep -i HugePage"                     *
INFO: * "echo 1000000000 > /proc/sys/kernel/shmmax"                 *
INFO: * "echo 800 > /proc/sys/vm/nr_hugepages"                      *
WARNING: * Please refer to the memory allocation section in the VMA's  *
WARNING: * User Manual for more information                            *
WARNING: ***************************************************************
""".replace("WARNING:", " VMA WARNING:").replace("INFO:", " VMA INFO:")


@pytest.fixture
def huge_pages() -> Iterator[int]:
    """The machine's pool has ten more, 20 MB: more than one ring needs, less than two do."""
    before = POOL.read_text()
    COMPACT.write_text("1")
    POOL.write_text(str(int(before) + 10))
    try:
        if int(POOL.read_text()) < int(before) + 10:
            pytest.skip("no 10 huge pages in a row")
        yield 10
    finally:
        POOL.write_text(before)


@pytest.fixture
def no_huge_pages() -> Iterator[None]:
    before = POOL.read_text()
    POOL.write_text("0")
    try:
        until(lambda: not free_huge_pages(), 10)
        yield
    finally:
        POOL.write_text(before)


@pytest.fixture
def shmem_advise() -> Iterator[None]:
    if not SHMEM.exists():
        pytest.skip("a kernel without transparent huge pages of shared memory")
    before = re.search(r"\[(\w+)\]", SHMEM.read_text())
    assert before is not None
    SHMEM.write_text("advise")
    try:
        yield
    finally:
        SHMEM.write_text(before[1])


@pytest.fixture(scope="module")
def peer(netns_pair: Sandbox, service: Service) -> Iterator[Peer]:
    made = Peer(netns_pair)
    yield made
    made.close()


def ring_of(program: Program) -> Any:
    return next(ring for ring in Api.call(program.api, "GET", "/v1/rings")[1] if ring["pid"] == program.pid)


def memory_of(program: Program) -> dict[str, int]:
    """The fields of /proc/PID/smaps of the packet memory, in kB."""
    found, inside = {}, False
    for line in Path(f"/proc/{program.pid}/smaps").read_text().splitlines():
        if re.match(r"^[0-9a-f]+-[0-9a-f]+ ", line):
            inside = "vmahybrid-umem" in line
        elif inside and (field := re.match(r"^(\w+): +(\d+) kB$", line)):
            found[field[1]] = int(field[2])
    return found


def carries(program: Program, peer: Peer, port: int) -> None:
    """Datagrams both ways, by the ring."""
    peer.send((program.address, port), 20, 1000)
    assert program.do("[len(s.recv(2000)) for _ in range(20)]") == [1000] * 20
    there = peer.udp()
    address = there.getsockname()
    until(lambda: program.do(f"s.sendto(b'x', {address!r})") and program.socket()["counters"]["tx_packets"] > 3, 5)
    assert there.recv(10) == b"x"
    assert program.socket()["counters"]["rx_packets"] == 20


def test_huge_pages(netns_pair: Sandbox, service: Service, peer: Peer, huge_pages: int) -> None:
    with Program(netns_pair, service, VMA_MEM_ALLOC_TYPE="2", VMA_TRACELEVEL="details") as program:
        port = program.on_ring()
        memory = memory_of(program)
        assert memory["KernelPageSize"] == 2048
        assert memory["Size"] == 16384
        carries(program, peer, port)
        assert "huge pages" in str(ring_of(program)["ladder"])
        log = program.log.read_text()
        assert "hugepage resources" not in log
        assert "VMA_MEM_ALLOC_TYPE has no effect" not in log
        with Program(netns_pair, service, VMA_MEM_ALLOC_TYPE="2") as second:  # the pool is empty now
            carries(second, peer, second.on_ring())
            assert memory_of(second)["KernelPageSize"] == 4
            assert BOX in second.log.read_text()
    until(lambda: int(Path("/proc/sys/vm/nr_hugepages").read_text()) and free_huge_pages() >= huge_pages, 5)


def free_huge_pages() -> int:
    found = re.search(r"^HugePages_Free: +(\d+)$", Path("/proc/meminfo").read_text(), re.M)
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize(("kind", "warned"), [("0", False), ("1", False), ("2", True)])
@pytest.mark.usefixtures("no_huge_pages")
def test_without_huge_pages(netns_pair: Sandbox, service: Service, peer: Peer, kind: str, warned: bool) -> None:
    with Program(netns_pair, service, VMA_MEM_ALLOC_TYPE=kind) as program:
        carries(program, peer, program.on_ring())
        assert memory_of(program)["KernelPageSize"] == 4
        assert program.log.read_text().count("NO IMMEDIATE ACTION") == warned
        assert (BOX in program.log.read_text()) is warned


@pytest.mark.parametrize(("kind", "huge"), [("0", False), ("1", True)])
@pytest.mark.usefixtures("shmem_advise")
def test_pages_that_the_kernel_may_make_huge(
    netns_pair: Sandbox, service: Service, peer: Peer, kind: str, huge: bool
) -> None:
    with Program(netns_pair, service, VMA_MEM_ALLOC_TYPE=kind) as program:
        carries(program, peer, program.on_ring())
        assert bool(memory_of(program)["ShmemPmdMapped"]) is huge, memory_of(program)


@pytest.mark.parametrize(("asked", "rx", "tx", "frames"), [
    ({}, 6144, 2048, 8192),
    ({"VMA_RX_BUFS": "100"}, 100, 64, 256),
    ({"VMA_RX_BUFS": "20000"}, 20000, 2048, 32768),
    ({"VMA_TX_BUFS": "300"}, 7892, 300, 8192),
    ({"VMA_RX_BUFS": "1000", "VMA_TX_BUFS": "24"}, 1000, 64, 2048),
    ({"VMA_SPEC": "ultra-latency"}, 1024, 512, 2048),
    ({"VMA_SPEC": "7750"}, 129024, 2048, 131072),  # of 204800
    ({"VMA_SPEC": "{}/copy.conf"}, 129024, 2048, 131072),
])  # fmt: skip
def test_buffers(netns_pair: Sandbox, service: Service, peer: Peer, tmp_path: Path, asked: dict[str, str], rx: int,
                 tx: int, frames: int) -> None:  # fmt: skip
    """A built-in profile acts as a file with its values; that more can't be had is a warning of what a person set."""
    (tmp_path / "copy.conf").write_text(profiles.text_of("7750"))
    asked = {name: value.format(tmp_path) for name, value in asked.items()}
    more = {"VMA_RX_POLL": "10", "VMA_SELECT_POLL": "0", "VMA_TRACELEVEL": "info"} if "VMA_SPEC" in asked else {}
    with Program(netns_pair, service, **asked, **more) as program:
        port = program.on_ring()
        pools = program.stats()["rings"][0]["stats"]
        assert (pools["pool_rx_free"], pools["pool_tx_free"]) == (rx, tx)
        assert ring_of(program)["frames"] == frames
        carries(program, peer, port)
        text = "the ring on vb has 129024 receive buffers only, VMA_RX_BUFS asks for 204800"
        assert (text in program.log.read_text()) is ("copy.conf" in asked.get("VMA_SPEC", ""))


@pytest.mark.parametrize(("asked", "size"), [(None, 1024), ("100", 128), ("4096", 4096), ("1000000", 65536)])
def test_transmit_descriptors(netns_pair: Sandbox, service: Service, peer: Peer, asked: str | None, size: int) -> None:
    with Program(netns_pair, service, **({"VMA_TX_WRE": asked} if asked else {})) as program:
        carries(program, peer, program.on_ring())
        assert ring_of(program)["tx_size"] == size


WARNED = [
    ({"VMA_TX_BUFS": "1000000"}, "VMA_TX_BUFS = 1000000 is not a number from 64 to 2048, {}, using [2048]"),
    ({"VMA_TX_BUFS": "1"}, "VMA_TX_BUFS = 1 is not a number from 64 to 2048, {}, using [64]"),
    ({"VMA_RX_BUFS": "1"}, "VMA_RX_BUFS = 1 is not a number from 64 to 131008, {}, using [64]"),
    ({"VMA_TX_WRE": "100000"}, "VMA_TX_WRE = 100000 is not a number from 16 to 65536, {}, using [65536]"),
    ({"VMA_RX_WRE": "1000000"}, "VMA_RX_WRE = 1000000 is not a number from 1 to 3072, {}, using [3072]"),
    ({"VMA_RX_BUFS": "131072"}, "the ring on vb has 129024 receive buffers only, VMA_RX_BUFS asks for 131072: a ring "
                                "has 131072 buffers at most, 2048 of them to send"),
    ({"VMA_TX_WRE": "1000"}, "VMA_TX_WRE = 1000 is not what vb can have, using [1024]"),
    ({"VMA_TX_BUFS": "300", "VMA_RX_BUFS": "1000", "VMA_TX_WRE": "1024", "VMA_RX_WRE": "500"}, None),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "warning"), WARNED, ids=lambda case: str(case)[:40])
def test_sizes_that_a_ring_cannot_have(netns_pair: Sandbox, service: Service, asked: dict[str, str],
                                       warning: str | None) -> None:  # fmt: skip
    with Program(netns_pair, service, **asked) as program:
        program.on_ring()
        program.do("t = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\nt.bind(('', 0))")
        said = [line for line in program.log.read_text().splitlines() if "WARNING" in line]
        text = warning and " VMA WARNING: " + warning.format("which is what vb can have")
        assert said == ([text] if text else [])


def test_sizes_of_a_profile_that_is_a_file(netns_pair: Sandbox, service: Service, tmp_path: Path) -> None:
    """Its user has said them: what can't be had is warned about as in the environment."""
    (tmp_path / "own.conf").write_text("VMA_TX_WRE = 100000\nVMA_RX_BUFS = 10\n")
    with Program(netns_pair, service, VMA_SPEC=f"{tmp_path}/own.conf") as program:
        program.on_ring()
        said = {line for line in program.log.read_text().splitlines() if "WARNING" in line}
    both = ("VMA_TX_WRE = 100000", "16 to 65536", 65536), ("VMA_RX_BUFS = 10", "64 to 131008", 64)
    assert said == {f" VMA WARNING: {line} is not a number from {span}, which is what vb can have, using [{used}]"
                    for line, span, used in both}  # fmt: skip


def test_fewer_buffers_than_asked_for(netns_pair: Sandbox, service: Service, peer: Peer) -> None:
    """The limit of the service is reached: the program gets what anybody gets, and says so."""
    api = Api(service)
    assert api.call("PATCH", "/v1/config", {"limits.memory": 32 << 20})[0] == 200
    try:
        with Program(netns_pair, service, VMA_RX_BUFS="60000") as program:
            carries(program, peer, program.on_ring())
            assert " VMA WARNING: the ring on vb has 6144 receive buffers only, VMA_RX_BUFS asks for 60000: raise " \
                "limits.memory of the service, up to 129024 are possible" in program.log.read_text()
    finally:
        assert api.call("PATCH", "/v1/config", {"limits.memory": 4 << 30})[0] == 200
