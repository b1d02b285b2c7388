"""The man pages and docs name every command, option and route."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from fake_view import FakeView

from api import create_app
from vmahybrid.cli.main import COMMANDS, build_parser
from vmahybrid.vma_stats.options import LONG, USAGE

DOCS = Path(__file__).parents[2] / "docs"


def page(name: str) -> str:
    return (DOCS / "man" / name).read_text().replace("\\-", "-").replace("\\fB", "").replace("\\fR", "")


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from options(inner)
        yield from action.option_strings


def test_man_page_of_vmahybrid() -> None:
    text = page("vmahybrid.1")
    missing = {option for option in options(build_parser(with_start=False)) if option not in text}
    # in each, as everywhere
    assert missing - {"-h", "--help", "--version", "--profile", "--env"} == set()
    assert [command for command in COMMANDS if command not in text] == []


def test_man_page_and_help_of_vma_stats() -> None:
    text = page("vma_stats.1")
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
