"""bpf(2) wrappers: maps, loading, test runs, and their errors."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import subprocess

import pytest

from bpf.frames import LOCAL, TCP, tcp4, udp4
from bpf.harness import Outcome, Steer, index
from vmahybrid.xdp.bpf import (
    BPF_EXIST,
    BPF_NOEXIST,
    XDP_PASS,
    BpfError,
    BpfMap,
    BpfProgram,
    load_set,
    open_program,
    possible_cpus,
)
from vmahybrid.xdp.image import Image, MapSpec, ProgramImage

pytestmark = pytest.mark.root

HASH = MapSpec("vmh_test", 1, 4, 8, 4, 0)


def test_hash() -> None:
    with BpfMap.create(HASH) as table:
        assert table.lookup(b"aaaa") is None
        assert table.delete(b"aaaa") is False
        for number, key in enumerate((b"aaaa", b"bbbb", b"cccc")):
            table.update(key, struct.pack("=Q", number))
        assert sorted(table.keys()) == [b"aaaa", b"bbbb", b"cccc"]
        assert table.lookup(b"cccc") == struct.pack("=Q", 2)
        assert table.delete(b"bbbb") is True
        assert sorted(table.keys()) == [b"aaaa", b"cccc"]
        table.zero(b"cccc")
        assert table.lookup(b"cccc") == bytes(8)


@pytest.mark.parametrize(("key", "flags", "number"), [(b"aaaa", BPF_NOEXIST, errno.EEXIST),
                                                     (b"zzzz", BPF_EXIST, errno.ENOENT)])
def test_update_flags(key: bytes, flags: int, number: int) -> None:
    with BpfMap.create(HASH) as table:
        table.update(b"aaaa", bytes(8))
        with pytest.raises(BpfError, match="vmh_test") as error:
            table.update(key, bytes(8), flags)
        assert error.value.errno == number


def test_a_full_map() -> None:
    with BpfMap.create(HASH) as table:
        for number in range(4):
            table.update(index(number), bytes(8))
        with pytest.raises(BpfError) as error:
            table.update(index(4), bytes(8))
        assert error.value.errno == errno.E2BIG


@pytest.mark.parametrize(("key", "value"), [(b"aaa", bytes(8)), (b"aaaaa", bytes(8)), (b"aaaa", bytes(7)),
                                            (b"aaaa", bytes(9))])
def test_wrong_sizes_never_reach_the_kernel(key: bytes, value: bytes) -> None:
    with BpfMap.create(HASH) as table, pytest.raises(ValueError, match="vmh_test"):
        table.update(key, value)


def test_percpu() -> None:
    with BpfMap.create(MapSpec("vmh_test", 6, 4, 12, 2, 0)) as table:
        assert table.lookup_percpu(index(1)) == [bytes(12)] * possible_cpus()
        assert table.lookup_percpu(index(2)) == []
        with pytest.raises(ValueError, match="per CPU"):
            table.update(index(0), bytes(12))
        with pytest.raises(ValueError, match="lookup_percpu"):
            table.lookup(index(0))


def test_impossible_map() -> None:
    with pytest.raises(BpfError, match="map vmh_test: Invalid argument"):
        BpfMap.create(MapSpec("vmh_test", 1, 0, 8, 4, 0))


def test_closed_twice() -> None:
    table = BpfMap.create(HASH)
    table.close()
    table.close()
    assert table.fd == -1


def test_descriptors_are_close_on_exec(image: Image) -> None:
    with load_set(image, ["steer"]) as loaded:
        fds = [thing.fd for thing in (*loaded.maps.values(), *loaded.programs.values())]
        assert all(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for fd in fds)


def test_load_error_carries_the_verifiers_words() -> None:
    # r0 = *(u64 *)(r1 + 4096); exit
    insns = struct.pack("=BBhi", 0x79, 0x10, 4096, 0) + struct.pack("=BBhi", 0x95, 0, 0, 0)
    with pytest.raises(BpfError) as error:
        BpfProgram.load(ProgramImage("vmh_test", insns, ()), {})
    assert error.value.errno == errno.EACCES
    assert "invalid bpf_context access off=4096" in error.value.why


def test_a_failed_set_leaves_nothing(image: Image) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    broken = Image({**image.programs, "guard": ProgramImage("guard", bytes(8), ())}, image.maps)
    with pytest.raises(BpfError):
        load_set(broken, ["steer", "guard"])
    with pytest.raises(KeyError):
        load_set(image, ["steer", "nonsense"])
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_shared_maps_stay_open(image: Image) -> None:
    with load_set(image, ["steer"]) as first:
        with load_set(image, ["steer"], share={"outs": first.maps["outs"]}) as second:
            assert second.maps["outs"] is first.maps["outs"]
            assert second.maps["rules5"] is not first.maps["rules5"]
            second.programs["steer"].test_run(udp4())
        counted = sum(struct.unpack("=QQ", value)[0] for number in range(first.maps["outs"].spec.max_entries)
                      for value in first.maps["outs"].lookup_percpu(index(number)))
        assert counted == 1


def test_repeat(image: Image) -> None:
    with load_set(image, ["steer"]) as loaded:
        result = loaded.programs["steer"].test_run(udp4(), repeat=100_000)
        assert (result.retval, result.data) == (XDP_PASS, udp4())
        assert 0 < result.nanoseconds < 100_000


def test_a_frame_beyond_what_test_runs_take(image: Image) -> None:
    with load_set(image, ["steer"]) as loaded, pytest.raises(BpfError, match="test run of steer on 1048576 bytes"):
        loaded.programs["steer"].test_run(bytes(1 << 20))


@pytest.mark.parametrize(("mtu", "out"), [(9000, "ring"), (8999, "pass-too-long"), (1500, "pass-too-long")])
def test_frags(image: Image, mtu: int, out: str) -> None:
    """Loaded for multi-buffer frames, the length is that of the whole frame and not of its linear part."""
    with Steer(image, frags=True) as steer:
        steer.mtu = mtu
        steer.xsk("xsks", 0)
        steer.rule(LOCAL)
        assert steer.run(udp4(payload=bytes(9000 - 28))).out == out


def test_super_packet_of_64_kb(image: Image) -> None:
    with Steer(image, frags=True) as steer:
        steer.rule(LOCAL, proto=TCP)
        assert steer.run(tcp4(payload=bytes(65000))) == Outcome("pass", "pass-too-long")


@pytest.mark.parametrize("name", ["steer", "guard", "ring_in"])
def test_every_program_can_be_loaded_for_fragments(image: Image, name: str) -> None:
    with load_set(image, [name], frags=True) as loaded:
        assert loaded.programs[name].id > 0


def test_ids(image: Image) -> None:
    with load_set(image, ["ring_in"]) as loaded:
        program = loaded.programs["ring_in"]
        shown = subprocess.run(["bpftool", "prog", "show", "id", str(program.id)], capture_output=True, text=True,
                               timeout=10, check=True).stdout
        assert "xdp  name ring_in" in shown
        with open_program(program.id) as again:
            assert again.fd != program.fd
        gone = program.id
    with pytest.raises(BpfError) as error:
        open_program(gone)
    assert error.value.errno == errno.ENOENT
