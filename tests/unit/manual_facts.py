"""Facts of the README manual as bare data: names, labels, defaults, ranges, numbered choices, profile tables.

    python tests/unit/manual_facts.py vma-readme.txt tests/unit/data/manual.json

The manual itself is not in the repository; its facts are, so that tests compare them with the catalogue anywhere.
"""

import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

BANNER = re.compile(r"^ VMA (?:INFO|DETAILS): (?P<text>.*\S)\s+\[(?P<name>VMA_\w+)\]$")
HEADING = re.compile(r"^VMA_[A-Z0-9_]+$")
DEFAULTS = (
    r"^Default (?:values?|VMA_\w+) is:?\s+(?:an )?(?P<value>empty string|\S+)",
    r"^Default(?: value)?: (?P<value>\S+)",
    r"(?:^|\. )Default is (?P<value>\S+)",
    r"^(?P<value>Disabled) by default",
)
RANGE = re.compile(r"^Value range is (?P<low>-?\d+)(?: bytes)?(?:, 0)?(?: to |-)(?P<high>[\d,]+|MTU)")
SIMILAR = re.compile(r"^Value range is similar to the above (?P<other>VMA_\w+)")
CHOICES = (
    r"^\t?(?P<value>\d+)\s*[-=] ",
    r"Use value of (?P<value>-?\d+) ",
    r"(?<!Default )value is (?P<value>\d+)(?: then|$)",
    r"^(?:Enable|Disable) with (?P<value>\d+)$",
)
SENTENCES = {
    "most": re.compile(r"greater than (?P<value>0x[0-9A-F]+)\."),
    "floor": re.compile(r"^Minimum value is the .*\((?P<value>VMA_\w+)\)\.$"),
    "older name": re.compile(r"^In older releases this parameter was called: (?P<value>VMA_\w+)$"),
    "also": re.compile(r"(?:value of|used) (?P<value>-1) "),
}
PROFILE = re.compile(r"^(?P<name>latency|multi_ring_latency)$")
CHANGE = re.compile(r"^\s+(?P<name>VMA_\w+) = (?P<value>\S+)\s+\(default: (?P<default>.*)\)$")


def banner(lines: list[str]) -> list[list[str]]:
    """``[name, label, value]`` in the manual's order; the label has a column of 30, and one label is longer."""
    found = []
    for line in lines:
        if match := BANNER.match(line):
            text = match["text"]
            label, value = (text[:30], text[30:]) if text[30:31] in ("", " ") else text.rsplit(" ", 1)
            found.append([match["name"], label.strip(), value.strip()])
    return found


def sections(lines: list[str]) -> dict[str, list[str]]:
    """The lines that describe each parameter; two headings in a row share theirs."""
    end = next(number for number, line in enumerate(lines) if line.startswith("VMA Monitoring"))
    found: dict[str, list[str]] = {}
    names: list[str] = []
    body: list[str] = []
    for before, line in pairwise(lines[:end]):
        if not HEADING.match(line) or (before and not HEADING.match(before)):
            body.append(line)
            continue
        if any(body) or not names:
            names = []
            body = []
        names.append(line)
        found[line] = body
    return found


def described(body: list[str]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for line in body:
        for pattern in DEFAULTS:
            if "default" not in facts and (match := re.search(pattern, line)):
                value = match["value"]
                facts["default"] = "" if value == "empty string" else value.strip('".,')
        if match := RANGE.match(line):
            high = match["high"].replace(",", "")
            facts["range"] = [int(match["low"]), high if high == "MTU" else int(high)]
        for pattern in CHOICES:
            if match := re.search(pattern, line):
                facts.setdefault("choices", []).append(int(match["value"]))
                break
        facts |= {what: match["value"] for what, form in SENTENCES.items() if (match := form.search(line))}
        if match := SIMILAR.match(line):
            facts["range"] = match["other"]
    if "choices" in facts:
        facts["choices"] = sorted(set(facts["choices"]))
    return facts


def profiles(body: list[str]) -> dict[str, dict[str, list[str]]]:
    """``{profile: {name: [value, default]}}``."""
    found: dict[str, dict[str, list[str]]] = {}
    for line in body:
        if match := PROFILE.match(line):
            current = found.setdefault(match["name"], {})
        elif match := CHANGE.match(line):
            current[match["name"]] = [match["value"], match["default"].strip()]
    return found


def facts(text: str) -> dict[str, Any]:
    lines = text.splitlines()
    bodies = sections(lines)
    of_each = {name: described(body) for name, body in bodies.items()}
    for fact in of_each.values():
        if isinstance(fact.get("range"), str):
            fact["range"] = of_each[fact["range"]]["range"]
    return {
        "banner": banner(lines),
        "described": of_each,
        "profiles": profiles(bodies["VMA_SPEC"]),
    }


def main(source: str, target: str) -> None:
    found = json.dumps(facts(Path(source).read_text("utf-8")), indent=1)
    lists = re.compile(r"\[\s+([^][{}]*?)\s+\]")
    Path(target).write_text(lists.sub(lambda m: "[" + re.sub(r",\s+", ", ", m[1]) + "]", found) + "\n", "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
