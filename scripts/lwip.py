"""lwIP for the TCP stack: fetches Debian's source package, verifies it, and compiles it with vmahybrid/shim/tcp.

Usage: lwip.py fetch DIR                            unpacks under DIR, prints the directory of the sources
       lwip.py cores DIR OUT [COMPILER [FLAG...]]    fetches, compiles, and writes OUT, an object with every copy

Nothing of lwIP is changed. Its state is global, so an instance of the stack needs a copy of its own: everything is
linked into one relocatable object whose only visible symbol is vmh_tcp_core, and that is copied under
VMH_TCP_INSTANCES names.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TCP = ROOT / "vmahybrid" / "shim" / "tcp"

FILE = "lwip_2.2.1+dfsg1.orig.tar.xz"
SHA256 = "83729c274c499d3348e9fbbe043a3113f3fa8953e7efddc7c21c7fcbb1f2b7b1"
FOLDER = "lwip-2.2.1"
# the pool follows Debian's releases; the snapshot of trixie's release keeps the file for good
URLS = (
    f"https://deb.debian.org/debian/pool/main/l/lwip/{FILE}",
    f"http://deb.debian.org/debian/pool/main/l/lwip/{FILE}",
    f"https://snapshot.debian.org/archive/debian/20250809T133719Z/pool/main/l/lwip/{FILE}",
)
LWIP = ("tcp", "tcp_in", "tcp_out", "pbuf", "memp", "mem", "inet_chksum", "def", "ip", "ipv4/ip4_addr")
FLAGS = ("-std=gnu11", "-fPIC", "-fvisibility=hidden", "-fexceptions", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE")
RELEASE = ("-O2", "-g")


class LwipError(Exception):
    """What went wrong and what to do about it."""


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def download(target: Path) -> None:
    """The archive to `target`, from the first address that has the right one."""
    tried = []
    for url in URLS:
        part = target.with_suffix(f".{os.getpid()}")
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                part.write_bytes(answer.read())
        except (urllib.error.URLError, OSError) as error:
            tried.append(f"{url}: {error}")
            continue
        found = sha256(part)
        if found == SHA256:
            part.replace(target)
            return
        part.unlink()
        tried.append(f"{url}: SHA256 is {found}")
    listing = "\n  ".join(tried)
    raise LwipError(
        f"lwip: no source package with SHA256 {SHA256}:\n  {listing}\n"
        f"Put {FILE} there by hand: {target}"
    )


def fetch(directory: Path) -> Path:
    """The unpacked sources under `directory`; downloaded when they are not there yet."""
    directory.mkdir(parents=True, exist_ok=True)
    sources, archive = directory / FOLDER, directory / FILE
    if sources.is_dir():
        return sources
    if archive.exists() and sha256(archive) != SHA256:
        raise LwipError(f"lwip: {archive} has SHA256 {sha256(archive)}, not {SHA256}. Remove it")
    if not archive.exists():
        download(archive)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        with tarfile.open(archive) as tar:
            tar.extractall(scratch)  # its hash is known
        try:
            (Path(scratch) / FOLDER).rename(sources)
        except OSError:
            if not sources.is_dir():  # another build was faster
                raise
    return sources


def copies() -> int:
    found = re.search(r"#define VMH_TCP_INSTANCES (\d+)", (TCP / "tcp_stack.h").read_text())
    assert found
    return int(found[1])


def own_sources() -> list[Path]:
    return [path for path in sorted(TCP.glob("*.c")) if not path.name.startswith("tcp_")]  # those are there once


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LwipError(f"lwip: {' '.join(command)}\n{done.stderr}")


def compile_all(sources: Path, scratch: Path, compiler: list[str]) -> list[str]:
    includes = [f"-I{path}" for path in (TCP, TCP / "port", TCP.parent, sources / "src" / "include")]
    jobs = []
    for path in own_sources():
        jobs.append((path, ["-Wall", "-Wextra", "-Werror"], scratch / f"own_{path.stem}.o"))
    for name in LWIP:
        path = sources / "src" / "core" / f"{name}.c"
        jobs.append((path, ["-w", "-fno-sanitize=shift"], scratch / f"{path.stem}.o"))

    def one(job: tuple[Path, list[str], Path]) -> str:
        path, warnings, target = job
        run(*compiler, *FLAGS, *warnings, *includes, "-c", str(path), "-o", str(target))
        return str(target)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, jobs))


def digest(compiler: list[str]) -> str:
    total = hashlib.sha256(repr((compiler, FLAGS, SHA256, Path(__file__).read_text())).encode())
    for path in sorted(TCP.rglob("*.[ch]")):
        if path.suffix == ".h" or not path.name.startswith("tcp_"):
            total.update(path.read_bytes())
    return total.hexdigest()[:16]


def cores(directory: Path, compiler: list[str]) -> Path:
    """One object with every copy of the core, made by `compiler` (with its flags). Kept in `directory`."""
    target = directory / f"cores-{digest(compiler)}.o"
    if target.exists():
        return target
    sources = fetch(directory)
    with tempfile.TemporaryDirectory(dir=directory) as name:
        scratch = Path(name)
        whole, hidden = scratch / "whole.o", scratch / "hidden.o"
        # groups (of a sanitizer's constructors) would be taken for duplicates among the copies
        run("ld", "-r", "--force-group-allocation", *compile_all(sources, scratch, compiler), "-o", str(whole))
        run("objcopy", "--keep-global-symbol=vmh_tcp_core", str(whole), str(hidden))
        parts = []
        for i in range(copies()):
            parts.append(str(scratch / f"core{i}.o"))
            run("objcopy", f"--redefine-sym=vmh_tcp_core=vmh_tcp_core_{i}", str(hidden), parts[-1])
        run("ld", "-r", *parts, "-o", str(scratch / "cores.o"))
        (scratch / "cores.o").replace(target)
    return target


def main(arguments: list[str]) -> int:
    try:
        if len(arguments) == 2 and arguments[0] == "fetch":
            print(fetch(Path(arguments[1])))
        elif len(arguments) >= 3 and arguments[0] == "cores":
            made = cores(Path(arguments[1]), arguments[3:] or ["gcc", *RELEASE])
            shutil.copyfile(made, arguments[2])
        else:
            print(__doc__, file=sys.stderr)
            return 2
    except LwipError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
