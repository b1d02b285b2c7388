"""lwIP's sources: what is not Debian's package is refused, and the message says what to do."""

import shutil
from pathlib import Path

import pytest
from tcp_build import ROOT, lwip

CACHE = ROOT / "build" / "lwip"


def test_a_wrong_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong").write_bytes(b"not lwIP")
    url = (tmp_path / "wrong").as_uri()
    monkeypatch.setattr(lwip, "URLS", (url,))
    with pytest.raises(lwip.LwipError) as error:
        lwip.fetch(tmp_path / "cache")
    assert all(said in str(error.value) for said in (url, lwip.SHA256, lwip.sha256(tmp_path / "wrong")))
    assert not list((tmp_path / "cache").iterdir()), "nothing of it stays"


def test_without_a_network_the_message_names_addresses_and_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lwip, "URLS", ("http://127.0.0.1:9/a", "http://127.0.0.1:9/b"))
    with pytest.raises(lwip.LwipError, match="SHA256") as error:
        lwip.fetch(tmp_path)
    assert "http://127.0.0.1:9/a" in str(error.value) and "http://127.0.0.1:9/b" in str(error.value)
    assert str(tmp_path / lwip.FILE) in str(error.value)


def test_the_second_address_helps_when_the_first_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lwip.fetch(CACHE)
    (tmp_path / "wrong").write_bytes(b"not lwIP")
    monkeypatch.setattr(lwip, "URLS", ((tmp_path / "wrong").as_uri(), (CACHE / lwip.FILE).as_uri()))
    sources = lwip.fetch(tmp_path / "cache")
    assert (sources / "src" / "core" / "tcp_in.c").is_file()


def test_what_is_there_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lwip.fetch(CACHE)
    monkeypatch.setattr(lwip, "URLS", ())
    shutil.copyfile(CACHE / lwip.FILE, tmp_path / lwip.FILE)
    assert lwip.fetch(tmp_path) == lwip.fetch(tmp_path)
    shutil.rmtree(tmp_path / lwip.FOLDER)
    (tmp_path / lwip.FILE).write_bytes(b"damaged")
    with pytest.raises(lwip.LwipError, match="Remove it"):
        lwip.fetch(tmp_path)
