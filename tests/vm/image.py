"""The guest of `make test-vm` as files: QEMU, Debian's kernels and an initramfs in build-vm/, nothing installed.

Everything comes from apt and is only unpacked: installing a kernel image would touch /boot and the boot loader. What
the guest runs besides, it takes from the host's file system, which it mounts read-only.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import lzma
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

CACHE = Path(__file__).resolve().parents[2] / "build-vm"
INIT = Path(__file__).with_name("init.sh")

# Linux 6.4 is the first that lets a program map an AF_XDP socket which the service has bound; Debian 12 has a kernel on
# either side of it
KERNELS = {"6.1": "linux-image-amd64", "6.12": "linux-image-6.12-amd64"}
# named with what could be installed on the host already, as `apt-get install` downloads only what is absent
PACKAGES = ("qemu-system-x86", "qemu-system-common", "qemu-system-data", "seabios", "busybox-static")
# overlay: the guest writes into memory, over the host's tree; crc32_generic: rxe asks for it when it makes a device
MODULES = ("virtio_pci", "9pnet_virtio", "9p", "overlay", "veth", "8021q", "bonding", "crc32_generic", "rdma_rxe")
_UNUSED = ("usr/share/doc", "usr/share/man", "usr/share/lintian")
_SEABIOS_DIRECTORIES = ("usr/share/qemu", "usr/share/seabios")


class ImageError(Exception):
    """The image could not be made; the text carries the command and what it said."""


def _run(*argv: str, cwd: Path | None = None, stdin: str | None = None) -> bytes:
    done: subprocess.CompletedProcess[bytes] = subprocess.run(
        argv, cwd=cwd, capture_output=True, timeout=600, input=stdin and stdin.encode(),
        env={**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"})
    if done.returncode:
        raise ImageError(f"{' '.join(argv)}: exit {done.returncode}: {done.stderr.decode(errors='replace')[-1500:]}")
    return done.stdout


def _kernel_package(meta: str) -> str:
    """The package with the kernel that a metapackage stands for now."""
    words = re.findall(r"^\s*Depends:\s*(linux-image-\S+)", _run("apt-cache", "depends", meta).decode(), re.MULTILINE)
    if not words:
        raise ImageError(f"apt-cache depends {meta} names no kernel. Run: apt-get update")
    return str(words[0])


def _unpack(apt: Sequence[str], debs: Path, root: Path) -> None:
    """Download into debs, as apt-get does with the words of apt, and unpack into root."""
    (debs / "partial").mkdir(parents=True)
    # as root apt would drop to a user who can't write here, and warn
    _run("apt-get", "-q", "-o", "APT::Sandbox::User=root", "-o", f"Dir::Cache::archives={debs}", *apt, cwd=debs)
    for package in sorted(debs.glob("*.deb")):
        _run("dpkg", "-x", str(package), str(root))
    shutil.rmtree(debs)


def _modules(root: Path, release: str) -> list[Path]:
    """The files of MODULES and of all that they need, in the order in which they must be loaded."""
    _run("depmod", "-b", str(root), release)
    files: dict[Path, None] = {}
    for name in MODULES:
        listing = _run("modprobe", "-d", str(root), "-S", release, "--show-depends", name).decode()
        files.update(dict.fromkeys(Path(line.split()[1]) for line in listing.splitlines() if line.startswith("insmod")))
    return list(files)


def _initramfs(busybox: Path, modules: Sequence[Path], target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        tree = Path(directory)
        for name in ("bin", "modules", "proc", "sys", "dev", "host", "memory", "new"):
            (tree / name).mkdir()
        shutil.copy(busybox, tree / "bin/busybox")
        shutil.copy(INIT, tree / "init")
        (tree / "init").chmod(0o755)
        for number, module in enumerate(modules):
            content = module.read_bytes()
            if module.suffix == ".xz":
                content = lzma.decompress(content)
            (tree / "modules" / f"{number:02}-{module.name.removesuffix('.xz')}").write_bytes(content)
        names = "\n".join(str(path.relative_to(tree)) for path in sorted(tree.rglob("*"))) + "\n"
        archive = _run(str(busybox), "cpio", "-o", "-H", "newc", cwd=tree, stdin=names)
        target.write_bytes(gzip.compress(archive, 1))


def _kernel(name: str, meta: str) -> None:
    """vmlinuz-NAME and initrd-NAME.gz; the rest of the package is not kept."""
    root = CACHE / "kernel"
    _unpack(["download", _kernel_package(meta)], CACHE / "debs", root)
    kernel = next((root / "boot").glob("vmlinuz-*"))
    modules = _modules(root, kernel.name.removeprefix("vmlinuz-"))
    _initramfs(CACHE / "root/bin/busybox", modules, CACHE / f"initrd-{name}.gz")
    kernel.rename(CACHE / f"vmlinuz-{name}")
    shutil.rmtree(root)


def _make() -> None:
    for old in CACHE.iterdir():
        if old.name != ".lock":
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    _unpack(["install", "-y", "--no-install-recommends", "--download-only", "--reinstall", *PACKAGES],
            CACHE / "debs", CACHE / "root")
    for name, meta in KERNELS.items():
        _kernel(name, meta)
    for unused in _UNUSED:
        shutil.rmtree(CACHE / "root" / unused, ignore_errors=True)
    (CACHE / "stamp").write_text(_stamp())


def _stamp() -> str:
    """Changes with what makes the image. Newer packages do not: `make clean` fetches those."""
    return hashlib.sha256(Path(__file__).read_bytes() + INIT.read_bytes()).hexdigest()


def ready() -> bool:
    stamp = CACHE / "stamp"
    return stamp.is_file() and stamp.read_text() == _stamp()


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    CACHE.mkdir(exist_ok=True)
    with (CACHE / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def prepare() -> None:
    """Makes the image unless it is there: 200 MB of packages, half a minute beside the download. Raises ImageError."""
    with _locked():
        if ready():
            return
        print(f"make test-vm: fetching QEMU and kernels, 200 MB, into {CACHE} (make clean removes it)", flush=True)
        try:
            _make()
        except ImageError:
            # a package list older than the archive names files that are gone
            _run("apt-get", "-q", "update")
            _make()


def qemu() -> tuple[list[str], dict[str, str]]:
    """The emulator as command line and environment: its libraries and firmware are those of the image."""
    root = CACHE / "root"
    firmware = [word for name in _SEABIOS_DIRECTORIES for word in ("-L", str(root / name))]
    libraries = ":".join(str(root / name) for name in ("usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"))
    return [str(root / "usr/bin/qemu-system-x86_64"), *firmware], {"PATH": os.defpath, "LD_LIBRARY_PATH": libraries}


if __name__ == "__main__":
    try:
        prepare()
    except (ImageError, OSError, subprocess.TimeoutExpired) as error:
        sys.exit(f"make test-vm: the guest's image: {error}")
