"""The compiler's process, the image, and what the user is told when something is missing."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from vmahybrid.contracts import ffi, lib
from vmahybrid.errors import NotPossibleHere
from vmahybrid.xdp import bcc_child, headers
from vmahybrid.xdp import compile as compiler
from vmahybrid.xdp.image import INSN_SIZE, Image

pytestmark = pytest.mark.root

FLOW_KEY, ACTION, HITS, GRANT = (ffi.sizeof(f"struct vmh_{name}") for name in
                                 ("flow_key", "action", "hits", "grant_key"))


def test_programs(image: Image) -> None:
    assert sorted(image.programs) == ["guard", "ring_in", "steer", "steer_stamped", "tc_steer"]
    assert set(image.programs["ring_in"].maps) == {"rin_xsks", "rin_outs"}
    assert set(image.programs["guard"].maps) == {"guard", "granted", "guard_dev", "guard_outs"}
    shared = {"port", "rules5", "rules3", "rulesmc", "memos", "rule_hits", "outs"}
    assert set(image.programs["steer"].maps) == shared | {"xsks", "devs"}
    assert image.programs["steer_stamped"].maps == image.programs["steer"].maps
    assert set(image.programs["tc_steer"].maps) == shared | {"nears"}
    assert [program.name for program in image.programs.values() if program.tc] == ["tc_steer"]


@pytest.mark.parametrize(("name", "key", "value", "entries"), [
    ("rules5", FLOW_KEY, ACTION, lib.VMH_MAX_RULES), ("rules3", FLOW_KEY, ACTION, lib.VMH_MAX_RULES),
    ("rulesmc", FLOW_KEY, ACTION, lib.VMH_MAX_RULES), ("rule_hits", 4, HITS, lib.VMH_MAX_RULES),
    ("memos", 4, ffi.sizeof("struct vmh_memo"), lib.VMH_MEMOS),
    ("xsks", 4, 4, lib.VMH_MAX_XSK), ("devs", 4, 4, lib.VMH_MAX_DEV), ("outs", 4, HITS, lib.VMH_OUT_COUNT),
    ("granted", GRANT, 4, lib.VMH_MAX_GRANTS), ("guard_dev", 4, 4, 1), ("guard_outs", 4, HITS, lib.VMH_GUARD_COUNT),
    ("rin_xsks", 4, 4, lib.VMH_QUEUES),
])
def test_maps_have_the_layout_of_the_contract(image: Image, name: str, key: int, value: int, entries: int) -> None:
    spec = image.maps[name]
    assert (spec.name, spec.key_size, spec.value_size, spec.max_entries) == (name, key, value, entries)


def test_no_descriptor_of_the_child_is_left(image: Image) -> None:
    for program in image.programs.values():
        for reloc in program.relocs:
            at = reloc.insn * INSN_SIZE
            assert program.insns[at] == 0x18
            assert program.insns[at + 1] >> 4 == 1
            assert program.insns[at + 4:at + 8] == bytes(4)


def test_image_survives_its_transport(image: Image) -> None:
    assert Image.from_json(image.to_json()) == image


@pytest.mark.parametrize("text", [
    "", "[]", "{}", "null", '{"version": 999}', '{"version": 2, "programs": [{}], "maps": []}',
    '{"version": 2, "programs": [], "maps": [{"name": "x"}]}',
    '{"version": 2, "programs": [{"name": "p", "insns": "", "relocs": [[0, "x"]], "calls": []}], "maps": []}',
    '{"version": 2, "programs": [{"name": "p", "insns": "!", "relocs": [], "calls": []}], "maps": []}',
    '{"version": 2, "programs": [{"name": "p", "insns": "", "relocs": [], "calls": [0]}], "maps": []}',
])
def test_what_is_no_image(text: str) -> None:
    with pytest.raises(ValueError, match=r"image|JSON|value|points nowhere|base64|not in it"):
        Image.from_json(text)


def test_relocation_beyond_the_program(image: Image) -> None:
    data = json.loads(image.to_json())
    data["programs"][0]["relocs"][0][0] = 1 << 20
    with pytest.raises(ValueError, match="points nowhere"):
        Image.from_json(json.dumps(data))


def test_compiler_message_names_the_file_and_line(tmp_path: Path) -> None:
    for file in compiler.source_directory().iterdir():
        (tmp_path / file.name).write_text(file.read_text())
    broken = tmp_path / "vmh_parse.h"
    lines = broken.read_text().splitlines()
    number = next(n for n, line in enumerate(lines) if "struct udphdr *udp" in line)
    lines[number] = "\tstruct udphdr *udp = nonsense;"
    broken.write_text("\n".join(lines) + "\n")
    with pytest.raises(compiler.CompileError) as error:
        compiler.compile_text(compiler.source_text(tmp_path))
    assert f"vmh_parse.h:{number + 1}:" in error.value.why
    assert "nonsense" in error.value.why


def test_compiler_that_does_not_end() -> None:
    with pytest.raises(compiler.CompileError, match=r"did not end in 0.01 s"):
        compiler.compile_image(timeout_s=0.01)


def test_without_kernel_headers(tmp_path: Path) -> None:
    with pytest.raises(NotPossibleHere, match=r"apt install linux-libc-dev"):
        headers.make_tree(tmp_path / "tree", exported=tmp_path)


def test_without_bcc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A package named bcc that cannot be imported, found before Debian's."""
    (tmp_path / "bcc.py").write_text("raise ImportError('not here')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(NotPossibleHere) as error:
        compiler.compile_image()
    assert "not here" in error.value.why
    assert "python3-bpfcc" in error.value.remedy


def test_a_file_in_the_working_directory_is_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bcc.py").write_text("raise ImportError('a stranger')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert "steer" in compiler.compile_image().programs


def test_the_environment_does_not_steer_the_compiler(monkeypatch: pytest.MonkeyPatch, image: Image) -> None:
    monkeypatch.setenv("BCC_KERNEL_SOURCE", "/nowhere")
    monkeypatch.setenv("CPATH", "/nowhere")
    assert compiler.compile_image() == image


def test_nothing_is_left_in_the_temporary_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    compiler.compile_image()
    with pytest.raises(compiler.CompileError):
        compiler.compile_text("int xdp_x(struct xdp_md *ctx) { return nonsense; }")
    assert list(tmp_path.iterdir()) == []


def test_the_service_does_not_import_bcc() -> None:
    assert bcc_child.PREFIX == "xdp_"
    assert "bcc" not in sys.modules


def test_specs_are_plain_data(image: Image) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        image.maps["outs"].max_entries = 1  # type: ignore[misc]
