"""UMEM and AF_XDP sockets without any program: memory, modes, queues, release."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from net.xdp_lab import ENVIRONMENT, Lab

from vmahybrid._xsk import lib as xsk_lib
from vmahybrid.xdp.latebind import LateXsk, bound_can_be_mapped
from vmahybrid.xdp.umem import SEALS, Umem
from vmahybrid.xdp.xsk import STATISTICS, Xsk

pytestmark = pytest.mark.root

# Binds vb queue 0 as another process would, reports, and waits to be killed.
HOLDER = """
import sys, time
from vmahybrid.net.netns import NetnsWorker
from vmahybrid.xdp.umem import Umem
from vmahybrid.xdp.xsk import Xsk
worker = NetnsWorker.open_path(sys.argv[1])
umem = Umem(64)
xsk = worker.call(Xsk.open, umem, "vb", 0, rx_size=64, tx_size=64)
print("bound", flush=True)
time.sleep(60)
"""


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(queues=2) as made:
        yield made


def rss_kib() -> int:
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def test_umem_is_sealed_and_close_on_exec() -> None:
    with Umem(64) as umem:
        assert fcntl.fcntl(umem.fd, fcntl.F_GET_SEALS) & SEALS == SEALS
        for size in (0, umem.size // 2, umem.size * 2):
            with pytest.raises(PermissionError):
                os.ftruncate(umem.fd, size)
        assert fcntl.fcntl(umem.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        assert os.fstat(umem.fd).st_size == 64 * 2048


@pytest.mark.parametrize(("frames", "size"), [(64, 1000), (64, 1024), (64, 8192), (0, 2048), (1, 2048), (-2, 2048)])
def test_umem_refuses_impossible_sizes(frames: int, size: int) -> None:
    with pytest.raises(ValueError, match="frame"):
        Umem(frames, size)


def test_a_registered_umem_costs_the_service_no_memory(lab: Lab) -> None:
    with Umem(16384) as umem:  # 32 MiB
        before = rss_kib()
        with lab.b.call(Xsk.open, umem, "vb"):
            assert rss_kib() - before < 4096
            assert "memfd:vmahybrid-umem" not in Path("/proc/self/maps").read_text()


def test_copy_mode_after_zero_copy_was_refused(lab: Lab) -> None:
    with Umem(64) as umem, lab.b.call(Xsk.open, umem, "vb") as xsk:
        assert not xsk.zerocopy
        assert "zero-copy refused" in xsk.fallback
        assert xsk.statistics() == dict.fromkeys(STATISTICS, 0)
    with Umem(64) as umem, lab.b.call(Xsk.open, umem, "vb", zerocopy=False) as xsk:
        assert xsk.fallback == ""
    with Umem(64) as umem, pytest.raises(OSError, match="vb") as refused:
        lab.b.call(Xsk.open, umem, "vb", zerocopy=True)
    assert refused.value.errno == errno.EOPNOTSUPP


@pytest.mark.parametrize(("name", "queue", "code"), [("vb", 2, errno.EINVAL), ("nope", 0, errno.ENODEV)])
def test_errors_name_interface_and_queue(lab: Lab, name: str, queue: int, code: int) -> None:
    with Umem(64) as umem:
        with pytest.raises(OSError, match=f"{name} queue {queue}") as refused:
            lab.b.call(Xsk.open, umem, name, queue)
        assert refused.value.errno == code
        with lab.b.call(Xsk.open, umem, "vb"):  # the failure left the UMEM usable
            pass


def test_ring_sizes_must_be_powers_of_two(lab: Lab) -> None:
    with Umem(64) as umem, pytest.raises(ValueError, match="tx_size"):
        lab.b.call(Xsk.open, umem, "vb", tx_size=100)


def test_several_queues_share_one_umem(lab: Lab) -> None:
    with Umem(64) as umem:
        first = lab.b.call(Xsk.open, umem, "vb", 0)
        second = lab.b.call(Xsk.open, umem, "vb", 1)
        assert first.fd != second.fd
        first.close()
        second.close()
        second.close()
        assert not umem.registered
        with lab.b.call(Xsk.open, umem, "vb", 1):
            pass


def test_the_probe_says_what_happens_to_a_bound_socket(lab: Lab) -> None:
    with Umem(64) as umem, lab.b.call(Xsk.open, umem, "vb") as xsk:
        result = xsk_lib.vmh_xsk_map(xsk.fd, xsk.rx_size)
        assert bound_can_be_mapped() == (result == 0)
        assert result in (0, -errno.EBUSY)


def test_a_late_socket_is_bound_once_and_never_to_a_taken_queue(lab: Lab) -> None:
    with Umem(64) as mine, Umem(64) as other, lab.b.call(LateXsk.open, mine, "vb", zerocopy=False) as late:
        with lab.b.call(Xsk.open, other, "vb"), pytest.raises(OSError, match="queue 0") as refused:
            lab.b.call(late.bind)
        assert (refused.value.errno, late.bound) == (errno.EBUSY, False)
        lab.b.call(late.bind)  # the failure left nothing
        assert late.bound
        with pytest.raises(OSError, match="queue 0"):
            lab.b.call(late.bind)
    with pytest.raises(OSError, match="no interface") as gone, Umem(64) as umem, \
            lab.b.call(LateXsk.open, umem, "nowhere") as late:
        lab.b.call(late.bind)
    assert gone.value.errno == errno.ENODEV
    with Umem(64) as umem, lab.b.call(LateXsk.open, umem, "vb") as late:  # "auto": in copy mode after a refusal
        lab.b.call(late.bind)
        assert (late.zerocopy, late.fallback.startswith("zero-copy refused")) == (False, True)


def test_a_taken_queue_is_busy(lab: Lab) -> None:
    with Umem(64) as mine, Umem(64) as other, lab.b.call(Xsk.open, mine, "vb"):
        started = time.monotonic()
        with pytest.raises(OSError, match="queue 0") as refused:
            lab.b.call(Xsk.open, other, "vb")
        assert refused.value.errno == errno.EBUSY
        assert time.monotonic() - started < 2


def test_the_queue_of_a_killed_process_is_got_at_the_first_try(lab: Lab) -> None:
    fd = lab.b.namespace_fd()
    try:
        for _ in range(3):
            with subprocess.Popen([sys.executable, "-P", "-c", HOLDER, f"/proc/self/fd/{fd}"], pass_fds=[fd],
                                  stdout=subprocess.PIPE, env=ENVIRONMENT) as holder:
                assert holder.stdout is not None
                assert holder.stdout.readline() == b"bound\n"
                holder.kill()
                holder.wait()
                with Umem(64) as umem, lab.b.call(Xsk.open, umem, "vb"):
                    pass
    finally:
        os.close(fd)
