"""Makes the version script and the stubs of the symbols that softverbs has only for the loader's sake.

Usage: symbols.py symbols.txt MAP STUBS. The table says what becomes of each symbol.
"""

import sys
from pathlib import Path

STUBS = {
    "pointer": "SV_STUB void *{name}(void)\n{{\n\treturn SV_NULL(EOPNOTSUPP);\n}}\n",
    "error": "SV_STUB int {name}(void)\n{{\n\terrno = EOPNOTSUPP;\n\treturn EOPNOTSUPP;\n}}\n",
    "minus": "SV_STUB int {name}(void)\n{{\n\terrno = EOPNOTSUPP;\n\treturn -1;\n}}\n",
    "zero": "SV_STUB int {name}(void)\n{{\n\treturn 0;\n}}\n",
    "void": "SV_STUB void {name}(void)\n{{\n}}\n",
    "object": "SV_STUB char {name}[8];\n",
}
# arguments are not looked at: any prototype will do, and verbs.h must not be there with another one
HEAD = """#include <errno.h>
#include <stddef.h>
#define SV_STUB __attribute__((visibility("default")))
#define SV_NULL(error) ({ errno = (error); NULL; })
#pragma GCC diagnostic ignored "-Wmissing-prototypes"
"""


def read(path: str) -> dict[str, list[tuple[str, str]]]:
    """Node -> [(kind, symbol)] in the order of the file."""
    nodes: dict[str, list[tuple[str, str]]] = {}
    node = ""
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        words = line.split("#")[0].split()
        if len(words) == 1:
            node = words[0]
            nodes[node] = []
        elif len(words) == 2 and node and (words[0] == "own" or words[0] in STUBS):
            nodes[node].append((words[0], words[1]))
        elif words:
            raise SystemExit(f"{path}:{number}: {line!r} is neither a version nor KIND SYMBOL")
    return nodes


def version_script(nodes: dict[str, list[tuple[str, str]]]) -> str:
    text, before = "", ""
    for node, symbols in nodes.items():
        inherits = before if "PRIVATE" not in node else ""
        names = "".join(f"\t\t{name};\n" for _kind, name in symbols)
        local = "" if text else "\tlocal:\n\t\t*;\n"
        text += f"{node} {{\n\tglobal:\n{names}{local}}}{' ' + inherits if inherits else ''};\n\n"
        before = node
    return text


def main() -> None:
    nodes = read(sys.argv[1])
    Path(sys.argv[2]).write_text(version_script(nodes))
    stubs = [STUBS[kind].format(name=name) for symbols in nodes.values() for kind, name in symbols if kind != "own"]
    Path(sys.argv[3]).write_text("\n".join([HEAD, *stubs]))


if __name__ == "__main__":
    main()
