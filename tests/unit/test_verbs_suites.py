"""Every test file for UDP runs on raw packet QPs as well, or docs/verbs.md says why it does not."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SUITES = ("apps", "compare", "fuzz", "net", "sanitize")
OTHER = re.compile(r"test_(\w+_)?(tcp|verbs)")  # TCP, and what is about verbs itself
FILES = sorted(path for suite in SUITES for path in (TESTS / suite).glob("test_*.py") if not OTHER.match(path.name))


def name_of(path: Path) -> str:
    return str(path.relative_to(TESTS))


def listed() -> dict[str, str]:
    """File and reason, of the table in docs/verbs.md."""
    text = (TESTS.parent / "docs" / "verbs.md").read_text("utf-8")
    (section,) = re.findall(r"^## Test suites$(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    return dict(re.findall(r"^\| `(\w+/test_\w+\.py)` \| (\S.*) \|$", section, re.MULTILINE))


def on_softverbs(text: str) -> bool:
    """Whether some test or fixture takes the parameter, by itself or by the shared service, or its value by name."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.arg(arg="softverbs") | ast.alias(name="module_services"):
                return True
            case ast.keyword(arg="softverbs", value=ast.Constant(value=True)) | ast.Constant(value="softverbs"):
                return True
    return False


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_on_softverbs_or_listed(path: Path) -> None:
    assert on_softverbs(path.read_text("utf-8")) is (name_of(path) not in listed())


def test_the_list_names_files_that_are_there() -> None:
    assert len(FILES) > 40
    assert set(listed()) <= {name_of(path) for path in FILES}


def test_what_counts() -> None:
    """The check above can fail."""
    assert not on_softverbs("def test(service, netns_pair): Service(netns_pair)  # softverbs")
    assert on_softverbs("def test(softverbs: bool): pass")
    assert on_softverbs("from net.service_lab import module_services")
    assert on_softverbs("@fixture(params=['none', 'softverbs'])\ndef rig(request): pass")
    assert not OTHER.match("test_death_life.py") and OTHER.match("test_fuzz_tcp.py") and OTHER.match("test_tcpmove.py")
