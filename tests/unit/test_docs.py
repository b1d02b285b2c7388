"""The documents name what there is: keys with defaults, commands and options, reasons, ways out, message sizes."""

import argparse
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from vmahybrid import contracts
from vmahybrid.cli.main import COMMANDS, build_parser
from vmahybrid.config import catalogue
from vmahybrid.config.rule import FIELDS
from vmahybrid.config.service import KEYS, MODES, Key, load
from vmahybrid.service.messages import HEADER, REQUESTS
from vmahybrid.steering.reasons import ROWS
from vmahybrid.xdp.counters import out_names

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def read(name: str) -> str:
    return (DOCS / name).read_text("utf-8")


def anchors(page: Path) -> set[str]:
    """Those that GitHub makes of headings."""
    text = BLOCK.sub("", page.read_text("utf-8"))
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(BLOCK.sub("", page.read_text("utf-8"))):
        if link.startswith(("http:", "https:")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_readme_lists_every_page() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert [page.name for page in DOCS.glob("*.md") if f"(docs/{page.name})" not in text] == []


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_configuration_key(key: Key) -> None:
    shown = load(Path("/dev/null")).describe()[key.name]
    row = re.search(rf"^\| `{re.escape(key.name)}` \| (.*?) \| (yes|no) \|", read("user-guide.md"), re.MULTILINE)
    assert row, "no row in the table of the user guide"
    default = row[1].strip("`").strip('"')
    if not default.startswith("RUNDIR/"):
        wanted = shown["default"]
        assert default == (str(wanted).lower() if isinstance(wanted, bool) else str(wanted))
    assert row[2] == ("yes" if shown["live"] else "no")


def test_no_key_that_does_not_exist() -> None:
    section = read("user-guide.md").partition("## Configuration")[2].partition("### Rules")[0]
    assert set(re.findall(r"^\| `([a-z_.]+)` \|", section, re.MULTILINE)) == {key.name for key in KEYS}


def test_rules_and_interface_modes() -> None:
    text = read("user-guide.md")
    example = text.partition("[[rule]]  ")[2].partition("```")[0]
    assert [name for name in FIELDS if not re.search(rf"^{name} = ", example, re.MULTILINE)] == []
    assert [mode for mode in MODES if not re.search(rf"^mode = .*\b{mode}\b", text, re.MULTILINE)] == []


def test_example_configuration_is_read(tmp_path: Path) -> None:
    blocks = re.findall(r"^```toml\n(.*?)^```", read("user-guide.md"), re.MULTILINE | re.DOTALL)
    file = tmp_path / "vmahybrid.toml"
    file.write_text("\n".join(blocks))
    config = load(file)
    assert config.mode_of("eth1") == "native"
    assert [(rule.action, rule.local) for rule in config.rules] == [("kernel", "*:123")]


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from options(inner)
        elif action.option_strings and action.dest not in ("help", "version"):
            yield from action.option_strings[:1]


def test_commands_and_options() -> None:
    text = read("user-guide.md")
    assert [command for command in COMMANDS if not re.search(rf"vmahybrid {command}\b|`{command}`", text)] == []
    found = set(options(build_parser()))
    assert {"--foreground", "--json", "-p"} <= found
    assert [option for option in sorted(found) if not re.search(rf"(?<![\w-]){option}\b", text)] == []


def test_profiles() -> None:
    text = read("user-guide.md")
    assert [profile.name for profile in catalogue.load().profiles if f"`{profile.name}`" not in text] == []


def test_table_of_reasons_is_current() -> None:
    page = runpy.run_path(str(DOCS / "gen_reasons.py"))["page"]
    source = (ROOT / "vmahybrid/contracts/reasons.def").read_text("ascii")
    assert read("reasons.md") == page(source), "run: .venv/bin/python docs/gen_reasons.py"
    assert [row.slug for row in ROWS if f"| `{row.slug}` | {row.code} |" not in read("reasons.md")] == []


def test_reasons_that_are_named_exist() -> None:
    guide = read("user-guide.md")
    homes = re.findall(r"`([a-z-]+)`", guide.partition("For good:")[2].partition("## Seeing")[0])
    errors = re.findall(r"`([a-z-]+)`", read("control-protocol.md").partition("| errno |")[2].partition("Limits:")[0])
    assert len(homes) > 10 < len(errors)
    assert [slug for slug in homes + errors if slug not in {row.slug for row in ROWS}] == []


@pytest.mark.parametrize("prefix", ["VMH_OUT_", "VMH_GUARD_", "VMH_RIN_"])
def test_ways_out(prefix: str) -> None:
    text = read("steering.md")
    assert [name for name in out_names(prefix).values() if f"`{name}`" not in text] == []


def test_messages_and_their_sizes() -> None:
    rows = re.findall(r"^\| ([A-Z_]+) \((\d+)\)[^|]* \| (\d+) \|(?:[^|]*\|){2} ?(\d*) ?\|", read("control-protocol.md"),
                      re.MULTILINE)
    said = {(int(number), int(size), int(reply)) for _, number, size, reply in rows if reply}
    wanted = {(number, contracts.size_of(request), contracts.size_of(reply))
              for number, (request, reply, *_) in REQUESTS.items()}
    assert said == wanted
    assert ("EVENT", str(contracts.lib.VMH_MSG_EVENT), str(contracts.size_of("struct vmh_msg_event")), "") in rows
    assert contracts.size_of(HEADER) == 24
