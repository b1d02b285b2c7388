"""Builds vmahybrid._contracts: the structs and constants of the contract headers as seen by the C compiler.

The parser of libvma.conf comes with them: the command line checks a file with the shim's own code.

``python build_contracts.py OUT.c`` writes the C source of the extension module; meson compiles it with ``bpf/`` and
``vmahybrid/contracts/`` on the include path. The declarations are the headers themselves, so no layout is written
down twice.
"""

import re
import sys
from pathlib import Path

import cffi

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
HEADERS = (ROOT / "bpf" / "vmh_flow.h", HERE / "control.h", HERE / "net_page.h", HERE / "stats_page.h",
           ROOT / "vmahybrid" / "shim" / "vmh_conf_rules.h")  # fmt: skip

_NOT_FOR_CFFI = re.compile(r"^\s*#\s*(ifndef|endif|include|define\s+\w+_H\s*$)")


def declarations(header: Path) -> str:
    """The header without guard and includes, which cffi does not parse."""
    text = re.sub(r"/\*.*?\*/", " ", header.read_text(), flags=re.S)
    return "\n".join(line for line in text.splitlines() if not _NOT_FOR_CFFI.match(line))


ffibuilder = cffi.FFI()
for _header in HEADERS:
    ffibuilder.cdef(declarations(_header))
ffibuilder.set_source(
    "vmahybrid._contracts",
    "\n".join(f'#include "{header.name}"' for header in HEADERS),
)

if __name__ == "__main__":
    ffibuilder.emit_c_code(sys.argv[1])
