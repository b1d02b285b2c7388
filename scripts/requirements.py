"""Prints what pip installs for development: build requirements, dependencies and the dev extra of pyproject.toml."""

import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
wanted = [
    *project["build-system"]["requires"],
    *project["project"]["dependencies"],
    *project["project"]["optional-dependencies"]["dev"],
]
print("\n".join(wanted))
