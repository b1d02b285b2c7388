"""Numbers of kernel functions in BTF, and where a program calls one."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from vmahybrid.errors import NotPossibleHere
from vmahybrid.xdp import kfunc
from vmahybrid.xdp.image import ProgramImage

# struct btf_type by kind, and what is behind it: (kind, vlen, bytes)
KINDS = {"int": (1, 0, 4), "ptr": (2, 0, 0), "array": (3, 0, 12), "struct": (4, 3, 36), "union": (5, 1, 12),
         "enum": (6, 2, 16), "fwd": (7, 0, 0), "typedef": (8, 0, 0), "func": (12, 1, 0), "func_proto": (13, 2, 16),
         "var": (14, 0, 4), "datasec": (15, 2, 24), "float": (16, 0, 0), "decl_tag": (17, 0, 4), "enum64": (19, 2, 24)}


def btf(*types: tuple[str, str]) -> bytes:
    """A BTF of these (kind, name); each name stands there once."""
    strings, body = b"\0", b""
    for kind, name in types:
        number, members, behind = KINDS[kind]
        if strings.find(f"\0{name}\0".encode()) < 0:
            strings += name.encode() + b"\0"
        at = strings.index(f"\0{name}\0".encode()) + 1
        body += struct.pack("=III", at, number << 24 | members, 0) + b"\xff" * behind
    return struct.pack("=HBBIIIII", 0xEB9F, 1, 0, 24, 0, len(body), len(body), len(strings)) + body + strings


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    kfunc._rx_timestamp.cache_clear()
    yield
    kfunc._rx_timestamp.cache_clear()


@pytest.mark.parametrize("before", [[], *[[kind] for kind in KINDS], list(KINDS)])
def test_a_function_behind_other_types(before: list[str]) -> None:
    types = [(kind, f"a_{kind}") for kind in before]
    assert kfunc.function_number(btf(*types, ("func", "wanted"), ("func", "more")), "wanted") == len(before) + 1


def test_what_is_not_there() -> None:
    """A name that is the end of another one, or a type's."""
    data = btf(("func", "not_wanted"), ("struct", "wanted"), ("func", "wanted_not"))
    assert [kfunc.function_number(data, name) for name in ("wanted", "none", "not")] == [0, 0, 0]


def test_a_type_of_the_same_name() -> None:
    assert kfunc.function_number(btf(("struct", "wanted"), ("func", "wanted")), "wanted") == 2


@pytest.mark.parametrize("data", [b"", b"\0" * 10, b"\0" * 100, b"\xeb\x9f" + bytes(22)])
def test_what_is_no_btf(data: bytes) -> None:
    with pytest.raises((ValueError, struct.error)):
        kfunc.function_number(data, "wanted")


def test_calls_get_the_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "vmlinux"
    file.write_bytes(btf(("int", "x"), ("func", kfunc.RX_TIMESTAMP)))
    monkeypatch.setattr(kfunc, "_BTF", file)
    plain, call = bytes.fromhex("b700000000000000"), bytes.fromhex("850000000100af7e")
    program = ProgramImage("p", plain + call + plain + call, (), (1, 3))
    named = struct.pack("=BBhi", 0x85, 0x20, 0, 2)
    assert kfunc.with_calls(program) == ProgramImage("p", plain + named + plain + named, ())
    assert kfunc.missing() == ""


def test_a_kernel_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = ProgramImage("p", bytes(8), (), (0,))
    monkeypatch.setattr(kfunc, "_BTF", tmp_path / "vmlinux")
    with pytest.raises(NotPossibleHere, match="No such file"):
        kfunc.with_calls(program)
    (tmp_path / "vmlinux").write_bytes(btf(("func", "another")))
    assert kfunc.missing() == "this kernel has no bpf_xdp_metadata_rx_timestamp"
    (tmp_path / "vmlinux").write_bytes(b"nothing of the kind, but long enough")
    assert "not BTF" in kfunc.missing()
    assert kfunc.with_calls(ProgramImage("q", bytes(8), ())) == ProgramImage("q", bytes(8), ()), "nothing to look for"
