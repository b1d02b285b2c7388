"""Prints the files of the tree that meson installs or compiles, one per line, relative to the root.

meson.build calls it at configure time and pip reconfigures on every install, so that a new module needs no entry in a
list. Usage: list_sources.py python|data|bpf|shim|tcp|softverbs
"""

import sys
from pathlib import Path

root = Path(__file__).resolve().parent.parent
kinds = {
    "python": ("vmahybrid/**/*.py", "api/**/*.py"),
    "data": (
        "vmahybrid/**/*.toml",
        "vmahybrid/contracts/*.h",
        "vmahybrid/contracts/*.def",
        "vmahybrid/**/*.pyi",
        "vmahybrid/py.typed",
        "api/py.typed",
        "api/**/*.html",
        "api/**/*.css",
        "api/**/*.js",
    ),
    "bpf": ("bpf/*.c", "bpf/*.h"),
    "shim": ("vmahybrid/shim/*.c",),
    "tcp": ("vmahybrid/shim/tcp/**/*.[ch]",),
    "softverbs": ("vmahybrid/verbs/softverbs/*.c",),
}
for pattern in kinds[sys.argv[1]]:
    for path in sorted(root.glob(pattern)):
        relative = path.relative_to(root).as_posix()
        # vmahybrid/bpf is a link that scripts/build makes to the installed copy
        made = "__pycache__" in relative or relative.startswith("vmahybrid/bpf/")
        if not made and not relative.endswith(".bpf.c"):
            print(relative)
