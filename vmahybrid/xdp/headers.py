"""A private kernel-header tree for bcc, made from linux-libc-dev: no /lib/modules, no linux-headers, 3x faster.

bcc wants the tree of a kernel build. XDP programs need only the exported headers, so a few directories are linked and
what the exported ones lack is written here.
"""

from __future__ import annotations

import platform
import sysconfig
from pathlib import Path

from vmahybrid.errors import NotPossibleHere

_ARCH = {"x86_64": "x86", "aarch64": "arm64", "riscv64": "riscv", "ppc64le": "powerpc"}

# Kernel-internal types and byte order helpers: a missing htons shows only as "jump out of range" when loading.
_TYPES_H = """\
#ifndef VMH_LINUX_TYPES_H
#define VMH_LINUX_TYPES_H
#include <uapi/linux/types.h>
typedef __u8 u8;
typedef __u16 u16;
typedef __u32 u32;
typedef __u64 u64;
typedef __s8 s8;
typedef __s16 s16;
typedef __s32 s32;
typedef __s64 s64;
typedef __u8 uint8_t;
typedef __u16 uint16_t;
typedef __u32 uint32_t;
typedef __u64 uint64_t;
typedef __s32 int32_t;
typedef __s64 int64_t;
typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ssize_t;
typedef __UINTPTR_TYPE__ uintptr_t;
typedef int pid_t;
typedef _Bool bool;
#define true 1
#define false 0
#ifndef NULL
#define NULL ((void *)0)
#endif
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define htons(x) ((__u16)__builtin_bswap16(x))
#define htonl(x) ((__u32)__builtin_bswap32(x))
#else
#define htons(x) ((__u16)(x))
#define htonl(x) ((__u32)(x))
#endif
#define ntohs(x) htons(x)
#define ntohl(x) htonl(x)
#endif
"""

_FILES = {
    "include/linux/types.h": _TYPES_H,
    "include/linux/kconfig.h": "#define CONFIG_BPF_SYSCALL 1\n",
    "include/linux/log2.h": "#define ilog2(n) (63 - __builtin_clzll(n))\n",
    "include/asm/page.h": "#define PAGE_SIZE 4096UL\n",
}

_REMEDY = "apt install linux-libc-dev"


def _exported(root: Path) -> tuple[Path, Path, Path]:
    """linux, asm and asm-generic of the exported headers; asm is in the multiarch directory on Debian."""
    multiarch = sysconfig.get_config_var("MULTIARCH") or f"{platform.machine()}-linux-gnu"
    asm = next((path for path in (root / multiarch / "asm", root / "asm") if path.is_dir()), None)
    if asm is None or not (root / "linux/if_ether.h").is_file():
        raise NotPossibleHere("XDP programs", f"the exported kernel headers are not in {root}", _REMEDY)
    return root / "linux", asm, root / "asm-generic"


def make_tree(target: Path, *, exported: Path = Path("/usr/include")) -> None:
    """Fill the empty directory ``target``. Raises NotPossibleHere when linux-libc-dev is not installed."""
    linux, asm, generic = _exported(exported)
    arch = _ARCH.get(platform.machine(), platform.machine())
    for path, text in _FILES.items():
        file = target / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "ascii")
    uapi = target / "include/uapi"
    uapi.mkdir(parents=True)
    (uapi / "linux").symlink_to(linux)
    (uapi / "asm").symlink_to(asm)
    (uapi / "asm-generic").symlink_to(generic)
    # bcc brings a newer bpf.h of its own, whose guard the exported one does not share: shadow the exported one.
    for shadow in (f"arch/{arch}/include/uapi/linux/bpf.h", f"arch/{arch}/include/linux/bpf.h"):
        file = target / shadow
        file.parent.mkdir(parents=True)
        file.touch()
