"""The man pages and docs name every command, option and route."""

import argparse
import re
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_view import FakeView

from api import create_app
from vmahybrid.cli.main import COMMANDS, build_parser
from vmahybrid.config import catalogue
from vmahybrid.config.service import KEYS
from vmahybrid.steering.reasons import ROWS
from vmahybrid.vma_stats.options import LONG, USAGE

DOCS = Path(__file__).parents[2] / "docs"


def page(name: str) -> str:
    return (DOCS / "man" / name).read_text().replace("\\-", "-").replace("\\fB", "").replace("\\fR", "")


def options(parser: argparse.ArgumentParser, command: str = "") -> Iterator[tuple[str, str]]:
    """Command and option."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from options(inner, f"{command} {name}".strip())
        yield from ((command, option) for option in action.option_strings)


def test_man_page_of_vmahybrid() -> None:
    """Each option of each command, below OPTIONS with what it does; those that several have may name them."""
    text = page("vmahybrid.1")
    assert [command for command in COMMANDS if command not in text] == []
    listed = text.partition(".SH OPTIONS\n")[2].partition(".SH PROFILES")[0]
    entries = [entry.replace("\\fI", "").split("\n") for entry in listed.split(".TP\n")[1:]]
    found = {(command, option) for tag, meaning, *_ in entries if meaning
             for commands in re.findall(r" Of (.*)\.$", meaning) or [re.split(r" ?--?\b", tag)[0]]
             for command in commands.split(", ") for option in re.findall(r"(?<!\S)--?[\w-]+", tag)}  # fmt: skip
    everywhere = {"-h", "--help"}
    assert all(option in listed for option in everywhere)
    needed = {(command, option) for command, option in options(build_parser()) if option not in everywhere}
    assert ("start", "--log-level") in needed and ("", "--version") in needed
    assert (needed - found, found - needed) == (set(), set())


def test_man_pages_are_those_of_the_catalogue() -> None:
    made = runpy.run_path(str(DOCS / "gen_man.py"))["pages"]()
    for name, text in made.items():
        assert (DOCS / "man" / name).read_text() == text, "run: .venv/bin/python docs/gen_man.py"
    library, conf, tool = (made[name] for name in ("libvmahybrid.7", "vmahybrid.conf.5", "vmahybrid.1"))
    known = catalogue.load()
    assert [p.name for p in known.parameters if f".B {p.name}\n" not in library] == []
    plain = library.replace("\\-", "-")
    assert [p.name for p in known.parameters if p.label and f"In the banner: {p.label}" not in plain
            and f", {p.label} (at 0)" not in plain] == []  # fmt: skip
    assert [p.name for p in known.profiles if f"\n.B {p.name}".replace("-", "\\-") not in library] == []
    assert [p.name for p in known.profiles if f"\n.B {p.name}".replace("-", "\\-") not in tool] == []
    assert [key.name for key in KEYS if f".B {key.name}\n" not in conf] == []
    assert [row.slug for row in ROWS if f".B {row.slug}\n".replace("-", "\\-") not in library] == []


@pytest.mark.parametrize("name", ["vmahybrid.1", "vmahybrid.conf.5", "libvmahybrid.7", "vma_stats.8"])
def test_man_page_is_roff(name: str) -> None:
    """Known requests only, balanced, and no text that begins as a request by accident."""
    lines = (DOCS / "man" / name).read_text("ascii").splitlines()
    assert lines[0].startswith(".TH ") and lines[1:3] == [".nh", ".SH NAME"]
    requests = [line.split()[0] for line in lines if line.startswith((".", "'"))]
    known = ".TH .SH .TP .PP .B .I .BR .RB .RI .IR .BI .br .nf .fi .nh .RS .RE"
    assert set(requests) <= {*known.split(), '.\\"'}
    assert requests.count(".nf") == requests.count(".fi") and requests.count(".RS") == requests.count(".RE")
    assert not [line for line in lines if re.search(r"\\(?![-e&\"]|f[BIR])", line.removesuffix("\\"))]
    if shutil.which("groff"):
        command = ["groff", "-man", "-Tascii", "-ww", "-z"]
        done = subprocess.run(command, input="\n".join(lines), text=True, capture_output=True)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not shutil.which("groff"), reason="no groff that formats pages")
@pytest.mark.parametrize("width", range(60, 100, 8))
def test_names_of_parameters_can_be_searched_for(width: int) -> None:
    """Whatever the width of the terminal: none is broken at the end of a line."""
    page = (DOCS / "man" / "libvmahybrid.7").read_text("ascii")
    done = subprocess.run(["groff", "-man", "-Tascii", "-P-cbou", f"-rLL={width}n"], input=page, text=True,
                          capture_output=True, check=True)
    assert re.findall(r"^.*[A-Z0-9]_?-\n.*$", done.stdout, re.M) == []
    assert "VMA_SELECT_POLL" in done.stdout


def test_man_page_and_help_of_vma_stats() -> None:
    text = page("vma_stats.8")
    assert [name for name in LONG if f"--{name.rstrip('=')}" not in text] == []
    assert [name for name in LONG if f"--{name.rstrip('=')}" not in USAGE] == []


def test_api_page_names_every_route() -> None:
    text = (DOCS / "api.md").read_text()
    for path, methods in create_app(FakeView(), version="0").openapi()["paths"].items():
        tail = path.replace("{flow_id}", "{id}").replace("{socket_id}", "{id}")
        if tail.endswith(("/log", "/dump-fd")):
            tail = tail[tail.rindex("/"):]
        assert tail in text, path
        assert all(method.upper() in text for method in methods)
