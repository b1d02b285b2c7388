"""Tells whether the installed vmahybrid is that of the present sources: a hash over every file that goes into it.

Usage: freshness.py check (exit 0 when fresh) | record
"""

import hashlib
import sys
import sysconfig
from pathlib import Path

root = Path(__file__).resolve().parent.parent
suffixes = {".py", ".pyi", ".c", ".h", ".def", ".toml", ".map", ".build", ".txt", ".html", ".css", ".js", ".typed"}


def digest() -> str:
    total = hashlib.sha256()
    for top in ("vmahybrid", "api", "bpf", "scripts", "pyproject.toml", "meson.build", "meson_options.txt"):
        start = root / top
        files = [start] if start.is_file() else sorted(start.rglob("*"))
        for path in files:
            if path.suffix in suffixes and path.is_file() and not path.is_relative_to(root / "vmahybrid/bpf"):
                total.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


def main() -> int:
    package = Path(sysconfig.get_path("platlib")) / "vmahybrid"
    stamp = root / ".venv/.build-stamp"
    if sys.argv[1] == "record":
        stamp.write_text(digest())
        return 0
    fresh = (package / "libvmahybrid.so").exists() and stamp.exists() and stamp.read_text() == digest()
    return 0 if fresh else 1


sys.exit(main())
