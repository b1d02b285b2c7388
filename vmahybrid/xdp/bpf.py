"""bpf(2): maps, programs, test runs. Thin and typed; keys and values are bytes in the layout of bpf/vmh_flow.h.

Every descriptor is close-on-exec (the kernel's default for bpf objects). Objects own theirs: close() or ``with``.
Updating a DEVMAP looks up the ifindex in the network namespace of the calling thread.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from vmahybrid.errors import NotPossibleHere, VmahybridError
from vmahybrid.xdp.image import INSN_SIZE, Image, MapSpec, ProgramImage
from vmahybrid.xdp.kfunc import with_calls

# uapi linux/bpf.h: commands
_MAP_CREATE, _MAP_LOOKUP, _MAP_UPDATE, _MAP_DELETE, _MAP_NEXT_KEY, _PROG_LOAD = range(6)
_PROG_TEST_RUN = 10
_PROG_FD_BY_ID = 13
_OBJ_GET_INFO = 15

BPF_ANY, BPF_NOEXIST, BPF_EXIST = range(3)
XDP_ABORTED, XDP_DROP, XDP_PASS, XDP_TX, XDP_REDIRECT = range(5)
TCX_NEXT, TCX_DROP, TCX_REDIRECT = -1, 2, 7  # enum tcx_action_base; TC_ACT_REDIRECT
ATTACH_XDP, ATTACH_TCX_INGRESS = 37, 46  # enum bpf_attach_type

_PROG_TYPE_SCHED_CLS, _PROG_TYPE_XDP = 3, 6
_XDP_HAS_FRAGS, _XDP_DEV_BOUND = 1 << 5, 1 << 6
_TEST_XDP_LIVE_FRAMES = 1 << 1
_SK_BUFF_SIZE, _SK_BUFF_GSO_SIZE = 192, 176  # struct __sk_buff, and gso_size in it
_PERCPU_TYPES = frozenset({5, 6, 10})  # hash, array, lru hash
_NAME_MAX = 15
_LOG_SIZE = 1 << 20
_LOG_TAIL = 1500  # characters of the verifier's log that an error carries
_LICENSE = b"GPL"

# A page less headroom (256), skb_shared_info (320) and struct xdp_page_head; 3400 are taken on 6.18 with 4 KiB pages
LIVE_FRAME_MAX = 3328

_SYSCALL = {"x86_64": 321, "aarch64": 280, "riscv64": 280, "ppc64le": 361}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class BpfError(VmahybridError):
    """The kernel refused a bpf(2) call: ``errno``, and ``log``, the verifier's, when a program was loaded."""

    def __init__(self, what: str, number: int, remedy: str = "", log: str = "") -> None:
        why = os.strerror(number) + (f"; verifier: {log[-_LOG_TAIL:].strip()}" if log else "")
        super().__init__(what, why, remedy)
        self.errno, self.log = number, log


@functools.cache
def _syscall_number() -> int:
    machine = platform.machine()
    if machine not in _SYSCALL:
        raise NotPossibleHere("bpf(2)", f"the system call number on {machine} is not known", "report the architecture")
    return _SYSCALL[machine]


def bpf_call(command: int, attr: ctypes.Array[ctypes.c_char]) -> int:
    """bpf(2) itself: the result, or a negative errno. ``attr`` is the used part of union bpf_attr and is written to."""
    result: int = _libc.syscall(_syscall_number(), command, attr, len(attr))
    return result if result >= 0 else -ctypes.get_errno()


def bpf_attr(layout: str, *values: int | bytes) -> ctypes.Array[ctypes.c_char]:
    """The used part of union bpf_attr, packed as by struct without padding of its own."""
    packed = struct.pack("=" + layout, *values)
    return ctypes.create_string_buffer(packed, len(packed))


def _remedy(number: int) -> str:
    if number == errno.EPERM:
        return "start the service as root, or with CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON"
    return "run vmahybrid doctor"


@functools.cache
def possible_cpus() -> int:
    """Values in a per-CPU map's entry: one per possible (not online) CPU."""
    ranges = Path("/sys/devices/system/cpu/possible").read_text("ascii").strip().split(",")
    return int(ranges[-1].split("-")[-1]) + 1


def object_info(fd: int, size: int) -> bytes:
    """BPF_OBJ_GET_INFO_BY_FD: the first ``size`` bytes of struct bpf_{map,prog,link}_info. Raises BpfError."""
    info = ctypes.create_string_buffer(size)
    result = bpf_call(_OBJ_GET_INFO, bpf_attr("IIQ", fd, size, ctypes.addressof(info)))
    if result < 0:
        raise BpfError("bpf object", -result, _remedy(-result))
    return info.raw


class Descriptor:
    """Owner of one bpf descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        """Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()


def open_program(identity: int) -> Descriptor:
    """A descriptor of the loaded program with this id. Raises BpfError: ENOENT."""
    fd = bpf_call(_PROG_FD_BY_ID, bpf_attr("III", identity, 0, 0))
    if fd < 0:
        raise BpfError(f"BPF program {identity}", -fd, _remedy(-fd))
    return Descriptor(fd)


class BpfMap(Descriptor):
    """One map. Keys are ``spec.key_size`` bytes, values ``spec.value_size``; other lengths raise ValueError."""

    def __init__(self, fd: int, spec: MapSpec) -> None:
        super().__init__(fd)
        self.spec = spec
        self._percpu = spec.type in _PERCPU_TYPES
        self._stride = (spec.value_size + 7) & ~7
        # A lookup of a per-CPU map writes a value per possible CPU: a shorter buffer would be overrun.
        self._buffer = self._stride * possible_cpus() if self._percpu else spec.value_size

    @classmethod
    def create(cls, spec: MapSpec) -> Self:
        """Raises BpfError."""
        attr = bpf_attr("IIIII2I16s", spec.type, spec.key_size, spec.value_size, spec.max_entries, spec.flags, 0, 0,
                        spec.name.encode("ascii")[:_NAME_MAX])
        fd = bpf_call(_MAP_CREATE, attr)
        if fd < 0:
            raise BpfError(f"map {spec.name}", -fd, _remedy(-fd))
        return cls(fd, spec)

    def _key(self, key: bytes) -> ctypes.Array[ctypes.c_char]:
        if len(key) != self.spec.key_size:
            raise ValueError(f"map {self.spec.name}: key of {len(key)} bytes, not {self.spec.key_size}")
        return ctypes.create_string_buffer(key, len(key))

    def _element(self, command: int, key: ctypes.Array[ctypes.c_char] | None, value: ctypes.Array[ctypes.c_char] | None,
                 flags: int = 0) -> int:
        key_at = 0 if key is None else ctypes.addressof(key)
        value_at = 0 if value is None else ctypes.addressof(value)
        return bpf_call(command, bpf_attr("I4xQQQ", self.fd, key_at, value_at, flags))

    def _failed(self, call: str, result: int) -> BpfError:
        return BpfError(f"map {self.spec.name}: {call}", -result, _remedy(-result))

    def update(self, key: bytes, value: bytes, flags: int = BPF_ANY) -> None:
        """Raises BpfError: E2BIG when the map is full, EEXIST and ENOENT by the flags."""
        if self._percpu:
            raise ValueError(f"map {self.spec.name}: values per CPU are the program's to write; see zero()")
        if len(value) != self.spec.value_size:
            raise ValueError(f"map {self.spec.name}: value of {len(value)} bytes, not {self.spec.value_size}")
        result = self._element(_MAP_UPDATE, self._key(key), ctypes.create_string_buffer(value, len(value)), flags)
        if result < 0:
            raise self._failed("update", result)

    def zero(self, key: bytes) -> None:
        """Set the entry to zero, on all CPUs in a per-CPU map. Raises BpfError."""
        result = self._element(_MAP_UPDATE, self._key(key), ctypes.create_string_buffer(self._buffer))
        if result < 0:
            raise self._failed("update", result)

    def delete(self, key: bytes) -> bool:
        """False if it was not there. Raises BpfError."""
        result = self._element(_MAP_DELETE, self._key(key), None)
        if result < 0 and result != -errno.ENOENT:
            raise self._failed("delete", result)
        return result == 0

    def _lookup(self, key: bytes) -> bytes | None:
        value = ctypes.create_string_buffer(self._buffer)
        result = self._element(_MAP_LOOKUP, self._key(key), value)
        if result == -errno.ENOENT:
            return None
        if result < 0:
            raise self._failed("lookup", result)
        return value.raw

    def lookup(self, key: bytes) -> bytes | None:
        """None if it is not there. Raises BpfError: XSKMAPs cannot be read."""
        if self._percpu:
            raise ValueError(f"map {self.spec.name}: has a value per CPU; see lookup_percpu()")
        return self._lookup(key)

    def lookup_percpu(self, key: bytes) -> list[bytes]:
        """The values of all possible CPUs; empty if the key is not there. Raises BpfError."""
        if not self._percpu:
            raise ValueError(f"map {self.spec.name}: has one value; see lookup()")
        raw = self._lookup(key) or b""
        return [raw[at:at + self.spec.value_size] for at in range(0, len(raw), self._stride)]

    def reader(self, key: bytes) -> Callable[[], bytes]:
        """For an entry that is read often: each call is one system call and gives the raw value, of a per-CPU map the
        values of all possible CPUs. It raises BpfError, also when the entry is not there; not to be called once the map
        is closed."""
        at, value = self._key(key), ctypes.create_string_buffer(self._buffer)
        attr = bpf_attr("I4xQQQ", self.fd, ctypes.addressof(at), ctypes.addressof(value), 0)

        def read(_keep: object = at) -> bytes:
            result = bpf_call(_MAP_LOOKUP, attr)
            if result < 0:
                raise self._failed("lookup", result)
            return value.raw

        return read

    def keys(self) -> list[bytes]:
        """All keys, each once, even if keys go while reading. Raises BpfError."""
        found: dict[bytes, None] = {}
        last: bytes | None = None
        following = ctypes.create_string_buffer(self.spec.key_size)
        while True:
            result = self._element(_MAP_NEXT_KEY, None if last is None else self._key(last), following)
            if result == -errno.ENOENT:
                return list(found)
            if result < 0:
                raise self._failed("next key", result)
            last = following.raw
            # The kernel starts again from the first key when `last` was deleted meanwhile: enough is max_entries.
            if len(found) >= self.spec.max_entries:
                return list(found)
            found[last] = None


@dataclass(frozen=True, slots=True)
class TestRun:
    """BPF_PROG_TEST_RUN's answer: the program's return value, the frame it left, mean nanoseconds per run."""

    __test__ = False  # not a test class

    retval: int
    data: bytes
    nanoseconds: int


class BpfProgram(Descriptor):
    """A loaded XDP program, or one for the tcx hook (``tc``)."""

    def __init__(self, fd: int, name: str, tc: bool = False) -> None:
        super().__init__(fd)
        self.name, self.tc = name, tc

    @classmethod
    def load(cls, image: ProgramImage, maps: Mapping[str, BpfMap], *, frags: bool = False, device: int = 0) -> Self:
        """Load with these maps. ``frags``: BPF_F_XDP_HAS_FRAGS, for native mode at an MTU above about 3.5 kB.
        ``device``: BPF_F_XDP_DEV_BOUND_ONLY, for native mode on this ifindex of the calling thread's namespace alone.

        Raises BpfError with the verifier's log, KeyError if a map is missing, NotPossibleHere if a kernel function is.
        """
        image = with_calls(image)
        insns = bytearray(image.insns)
        for reloc in image.relocs:
            at = reloc.insn * INSN_SIZE
            struct.pack_into("=i", insns, at + 4, maps[reloc.map].fd)
        result = cls._load(image, bytes(insns), frags, device, None)
        if result < 0:
            log = ctypes.create_string_buffer(_LOG_SIZE)
            # EINVAL may also come before the verifier, so ask again with a log; it is slow, hence not at first
            result = cls._load(image, bytes(insns), frags, device, log)
            if result < 0:
                text = log.value.decode("utf-8", "replace")
                raise BpfError(f"program {image.name}", -result, _remedy(-result), text)
        return cls(result, image.name, image.tc)

    @staticmethod
    def _load(image: ProgramImage, insns: bytes, frags: bool, device: int,
              log: ctypes.Array[ctypes.c_char] | None) -> int:
        code = ctypes.create_string_buffer(insns, len(insns))
        licence = ctypes.create_string_buffer(_LICENSE)
        kind, hook = (_PROG_TYPE_SCHED_CLS, 0) if image.tc else (_PROG_TYPE_XDP, ATTACH_XDP)
        flags = (_XDP_HAS_FRAGS if frags else 0) | (_XDP_DEV_BOUND if device else 0)
        attr = bpf_attr("IIQQIIQII16sII", kind, len(insns) // INSN_SIZE, ctypes.addressof(code),
                     ctypes.addressof(licence), 0 if log is None else 1, 0 if log is None else len(log),
                     0 if log is None else ctypes.addressof(log), 0, flags,
                     image.name.encode("ascii")[:_NAME_MAX], device, hook)
        return bpf_call(_PROG_LOAD, attr)

    @property
    def id(self) -> int:
        """The kernel's id of the program, as bpftool and ``ip link`` show it. Raises BpfError."""
        return int(struct.unpack_from("=II", object_info(self.fd, 8))[1])

    def test_run_tc(self, data: bytes, *, gso_size: int = 0) -> TestRun:
        """As :meth:`test_run` for a program of the tcx hook. ``gso_size``: of a super-packet, in bytes. A tag stays in
        the frame, where the kernel would take the outer one out of it. Raises BpfError."""
        frame = ctypes.create_string_buffer(data, len(data))
        answer = ctypes.create_string_buffer(len(data) + 512)
        context = bytearray(_SK_BUFF_SIZE)
        struct.pack_into("=I", context, _SK_BUFF_GSO_SIZE, gso_size)
        held = ctypes.create_string_buffer(bytes(context), len(context))
        attr = bpf_attr("IIIIQQIIIIQQ", self.fd, 0, len(data), len(answer), ctypes.addressof(frame),
                        ctypes.addressof(answer), 1, 0, len(held), 0, ctypes.addressof(held), 0)
        result = bpf_call(_PROG_TEST_RUN, attr)
        if result < 0:
            raise BpfError(f"test run of {self.name} on {len(data)} bytes", -result, _remedy(-result))
        _, retval, _, size, _, _, _, duration = struct.unpack_from("=IiIIQQII", attr.raw)
        return TestRun(retval, answer.raw[:size], duration)

    def test_run(self, data: bytes, *, ifindex: int = 0, queue: int = 0, linear: int | None = None,
                 repeat: int = 1) -> TestRun:
        """Run on the frame ``data`` (at least 14 bytes, about a page at most) without sending it anywhere.

        ``ifindex``: the interface that the program sees as ingress, in the namespace of the calling thread, 0 for the
        kernel's default; ``queue`` needs one with that receive queue. ``linear``: bytes that the program may read
        directly, the rest in fragments (kernel 6.18). Raises BpfError.
        """
        frame = ctypes.create_string_buffer(data, len(data))
        answer = ctypes.create_string_buffer(len(data) + 512)
        # struct xdp_md: data, data_end, data_meta, ingress_ifindex, rx_queue_index, egress_ifindex
        context = bpf_attr("6I", 0, len(data) if linear is None else linear, 0, ifindex, queue, 0)
        use = ifindex != 0 or queue != 0 or linear is not None
        attr = bpf_attr("IIIIQQIIIIQQ", self.fd, 0, len(data), len(answer), ctypes.addressof(frame),
                     ctypes.addressof(answer), repeat, 0, len(context) if use else 0, 0,
                     ctypes.addressof(context) if use else 0, 0)
        result = bpf_call(_PROG_TEST_RUN, attr)
        if result < 0:
            raise BpfError(f"test run of {self.name} on {len(data)} bytes", -result, _remedy(-result))
        _, retval, _, size, _, _, _, duration = struct.unpack_from("=IIIIQQII", attr.raw)
        return TestRun(retval, answer.raw[:size], duration)

    def test_run_live(self, data: bytes, *, ifindex: int = 0, queue: int = 0) -> None:
        """Run once on the frame ``data`` as if ``ifindex`` had received it, and do with it what the program says: after
        XDP_PASS the kernel's stack has it, generic XDP of the interface included (BPF_F_TEST_XDP_LIVE_FRAMES, kernel
        5.18). ``ifindex`` is of the calling thread's namespace, 0 for its loopback. At most LIVE_FRAME_MAX bytes.

        Raises BpfError: EINVAL where the kernel lacks it, or for a longer frame.
        """
        frame = ctypes.create_string_buffer(data, len(data))
        context = bpf_attr("6I", 0, len(data), 0, ifindex, queue, 0)
        attr = bpf_attr("IIIIQQIIIIQQIII4x", self.fd, 0, len(data), 0, ctypes.addressof(frame), 0, 1, 0, len(context),
                        0, ctypes.addressof(context), 0, _TEST_XDP_LIVE_FRAMES, 0, 1)
        result = bpf_call(_PROG_TEST_RUN, attr)
        if result < 0:
            raise BpfError(f"live test run of {self.name} on {len(data)} bytes", -result, _remedy(-result))


class ProgramSet:
    """Programs loaded together and the maps they use. Owns the programs and the maps that it made, not shared ones."""

    def __init__(self, programs: dict[str, BpfProgram], maps: dict[str, BpfMap], owned: Iterable[BpfMap]) -> None:
        self.programs, self.maps = programs, maps
        self._owned = list(owned)

    def __iter__(self) -> Iterator[BpfProgram]:
        return iter(self.programs.values())

    def close(self) -> None:
        """Idempotent. An attached program goes on until its Attachment is closed."""
        for thing in (*self.programs.values(), *self._owned):
            thing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()


def load_set(image: Image, names: Iterable[str], *, share: Mapping[str, BpfMap] | None = None,
             frags: bool = False, device: int = 0) -> ProgramSet:
    """Load these programs with one set of maps: those of ``share`` by name, new ones for the rest. ``frags``,
    ``device``: see BpfProgram.load.

    Raises BpfError, NotPossibleHere (nothing is left behind), KeyError for a program that the image does not have.
    """
    images = [image.programs[name] for name in names]
    maps: dict[str, BpfMap] = dict(share or {})
    made: list[BpfMap] = []
    programs: dict[str, BpfProgram] = {}
    try:
        for program in images:
            for name in program.maps:
                if name not in maps:
                    maps[name] = BpfMap.create(image.maps[name])
                    made.append(maps[name])
            programs[program.name] = BpfProgram.load(program, maps, frags=frags, device=device)
    except BaseException:
        ProgramSet(programs, maps, made).close()
        raise
    return ProgramSet(programs, maps, made)
