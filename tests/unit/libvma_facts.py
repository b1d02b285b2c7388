"""Facts of the table of VMA_* parameters in the research of libvma's source: label, default, range, bounds by others.

    python tests/unit/libvma_facts.py libvma.md tests/unit/data/libvma.json

As manual_facts.py for the manual: the research is not in the repository, its facts are.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any, cast

ENTRY = re.compile(r"(?:^ |   +)(?P<name>VMA_[A-Z0-9_]+)(?: / (?P<second>_[A-Z0-9_]+))? \| (?P<rest>.*)")
RANGES = (r"^(?P<low>-?\d+)\.\.(?P<high>\d+)", r"^clamp (?P<low>-?\d+)\.\.(?P<high>\d+)",
          r"^0 or (?P<low>-?\d+)\.\.(?P<high>\d+)", r"^max\((?P<low>0),x\)", r"^>(?P<high>\d+) => (?P=high)",
          r"\bmax (?P<high>\d+) chars", r"^(?P<low>-1) = off", r"^manual: >= MTU, <= (?P<high>0x[0-9A-F]+)",
          r"max \d+/align64\(inline\) \(=(?P<high>\d+) at 204\)")  # fmt: skip
# a parameter that another one bounds: "min 2*TX_WRE_BATCHING", ">= RX_WRE_BATCHING", "<= RX_WRE/2", "< X => raised"
BOUNDS = {"floor": r"(?:^min (?P<times>\d+)\*|^>= |^< (?=\w+ => raised))(?P<other>[A-Z_]+)",
          "ceiling": r"^<= (?P<other>[A-Z_]+)/(?P<divisor>\d+)"}


def table(text: str) -> list[str]:
    """The lines of the section, two entries of one line apart."""
    begun = text[text.index("## 1b.") :]
    lines = begun[: begun.index("\n## 1c.")].splitlines()
    return [part for line in lines for part in re.sub(r"( {3,})(?=VMA_\w+ \| )", "\n ", line).split("\n")
            if line.startswith(" VMA_")]  # fmt: skip


def default_of(cell: str) -> str | None:
    """What is said first: a number, a path, a word in capitals, or the empty text."""
    found = re.search(r'(?<![\w.])-?\d+|""|/[\w./]+|VMA_\w+|\bnone\b', cell)
    return None if found is None else found[0].strip('"').replace("none", "")


def limits_of(text: str, before: dict[str, object]) -> dict[str, object]:
    """``range`` and the bounds by others; of the entry before it where the text says so."""
    entry: dict[str, object] = {"range": before["range"]} if text.startswith("same range") else {}
    for pattern in RANGES:
        if limits := re.search(pattern, text):
            entry["range"] = [int(limits[name], 0) if name in limits.groupdict() else None for name in ("low", "high")]
    for kind, pattern in BOUNDS.items():
        if bound := re.search(pattern, text):
            found = {"times": "1", "divisor": "1"} | bound.groupdict("1")
            entry[kind] = [f"VMA_{found['other']}", int(found["times"]), int(found["divisor"])]
    return entry


def facts(text: str) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = {}
    before: dict[str, object] = {}
    for line in table(text):
        match = ENTRY.match(line)
        if match is None:
            continue
        label, default, *more = (cell.strip() for cell in match["rest"].split("|"))
        names = [match["name"]]
        if match["second"]:
            first, other = {"_RX": ("_TX", "_RX"), "_PARAM2": ("1", "2"),
                            "_DUMP_FILE": ("_NUM_SAMPLES", "_DUMP_FILE")}[match["second"]]  # fmt: skip
            names.append(match["name"].removesuffix(first) + other)
        before = entry = {"label": label, "default": default_of(default), **limits_of(more[0] if more else "", before)}
        two = len(names) > 1
        texts = default.split(" / ") if two and " / " in default else [default] * len(names)
        labels = label.replace('"', "").split(" / ") if two and " / " in label else [label] * len(names)
        for name, own, shown in zip(names, texts, labels, strict=True):
            ending = f" {name[-2:]}" if shown.endswith(" TX/RX") else ""
            label = re.sub(r" \(29west.*\)$", "", shown).removesuffix(" TX/RX") + ending
            found[name] = {**entry, "label": label, "default": default_of(own)}
    for entry in found.values():  # a name that is written without its end
        for kind in BOUNDS.keys() & entry.keys():
            other, *factors = cast("list[Any]", entry[kind])
            whole = other if other in found else next(name for name in found if name.startswith(other))
            entry[kind] = [whole, *factors]
    return found


if __name__ == "__main__":
    rows = (f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in facts(Path(sys.argv[1]).read_text()).items())
    Path(sys.argv[2]).write_text("{\n" + ",\n".join(rows) + "\n}\n")
