"""The compiled programs are kept for the next start, and whatever is wrong with the file means a compilation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from vmahybrid.xdp import imagecache
from vmahybrid.xdp.image import Image

pytestmark = pytest.mark.root


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, image: Image) -> list[Image]:
    """One entry for each compilation that a test takes for one."""
    made: list[Image] = []

    def compile_image() -> Image:
        made.append(image)
        return image

    monkeypatch.setenv("CACHE_DIRECTORY", f"{tmp_path / 'cache'}:/elsewhere")
    monkeypatch.setattr(imagecache, "compile_image", compile_image)
    return made


def the_file(tmp_path: Path) -> Path:
    found = list((tmp_path / "cache").iterdir())
    assert len(found) == 1, found
    return found[0]


def test_the_second_start_compiles_nothing(compiled: list[Image], tmp_path: Path, image: Image) -> None:
    assert imagecache.kept_image() == imagecache.kept_image() == image
    assert len(compiled) == 1
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    assert the_file(tmp_path).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("harm", [
    lambda path: path.write_text(path.read_text()[:-10]),
    lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 1})),
    lambda path: path.chmod(0o666),
    lambda path: (path.rename(path.with_name("x")), path.symlink_to("x")),
    lambda path: (path.unlink(), path.mkdir()),
], ids=["cut", "version", "mode", "link", "directory"])  # fmt: skip
def test_a_file_that_is_not_to_be_trusted(compiled: list[Image], tmp_path: Path, image: Image,
                                          harm: Callable[[Path], object]) -> None:  # fmt: skip
    imagecache.kept_image()
    harm(the_file(tmp_path))
    assert imagecache.kept_image() == image
    assert len(compiled) == 2


def test_another_kernel(compiled: list[Image], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for release in range(6):
        monkeypatch.setattr("platform.release", lambda release=release: f"6.{release}")
        imagecache.kept_image()
    assert len(compiled) == 6
    assert len(list((tmp_path / "cache").iterdir())) == imagecache.KEPT


def test_where_nothing_can_be_kept(compiled: list[Image], monkeypatch: pytest.MonkeyPatch, image: Image) -> None:
    monkeypatch.setenv("CACHE_DIRECTORY", "/dev/null")
    assert imagecache.kept_image() == imagecache.kept_image() == image
    assert len(compiled) == 2
