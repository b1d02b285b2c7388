"""The parameter catalogue: the committed page is the generated one, and the Python model reads like the C one."""

import re
from pathlib import Path

import pytest

from vmahybrid.config import gen_params
from vmahybrid.config.catalogue import CatalogueError, load, parse

ROOT = Path(__file__).parents[2]
HEAD = 'schema = 1\nobsolete = []\n[profile.none]\ntitle = "NONE"\ntext = ""\n'
ENTRY = """
[[parameter]]
name = "VMA_X"
label = ""
type = "int"
default = 1
min = 0
max = 9
outside = "default"
acts = "later"
text = ""
"""
STRING = ENTRY.replace('"int"', '"string"').replace("default = 1", 'default = "x"')


def test_committed_page_is_current() -> None:
    page = ROOT / "docs" / "parameters.md"
    assert page.read_text(encoding="utf-8") == gen_params.markdown(load())


def test_the_page_has_the_labels_of_the_banner() -> None:
    """Both where the label depends on the value."""
    rows = dict(re.findall(r"^\| `(VMA_\w+)` \| ([^|]*) \|", gen_params.markdown(load()), re.MULTILINE))
    for parameter in load().parameters:
        values = (0, 1) if parameter.type == "int" else (parameter.default,)
        shown = {parameter.banner_value(value)[0] for value in values}
        assert all(label in rows[parameter.name] for label in shown), parameter.name
    assert rows["VMA_PROGRESS_ENGINE_INTERVAL"] == "CQ Drain Interval (msec), CQ Drain Thread (at 0)"
    assert rows["VMA_RX_CQ_DRAIN_RATE_NSEC"] == "Rx CQ Drain Rate (nsec), Rx CQ Drain Rate (at 0)"
    assert rows["VMA_TSO"] == ""


def test_every_field_is_a_c_name_and_used_once() -> None:
    fields = [parameter.field for parameter in load().parameters]
    assert len(set(fields)) == len(fields) > 100
    assert all(field.isidentifier() for field in fields)


def test_aliases_and_obsolete_names_are_no_parameters() -> None:
    catalogue = load()
    names = {parameter.name for parameter in catalogue.parameters}
    others = [alias for parameter in catalogue.parameters for alias in parameter.aliases]
    assert not names & {*others, *(obsolete.name for obsolete in catalogue.obsolete)}


def test_profiles() -> None:
    catalogue = load()
    assert catalogue.profile("LATENCY").values["VMA_RX_POLL"] == -1
    assert catalogue.profile("10").name == "ultra-latency"
    assert catalogue.profile("ultra-latency").values["VMA_RX_WRE"] == 256  # inherited
    assert catalogue.profile("mcd-irq").values["VMA_RX_POLL"] == 1  # 0 counts as 1
    with pytest.raises(KeyError):
        catalogue.profile("fast")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("VMA_RX_POLL", "-1", -1),
        ("VMA_RX_POLL", "0", 1),
        ("VMA_TRACELEVEL", "Debug", 5),
        ("VMA_TRACELEVEL", "4", 5),
        ("VMA_OFFLOADED_SOCKETS", "off", 0),
        ("VMA_LOG_FILE", "/tmp/x", "/tmp/x"),
        ("VMA_RX_PREFETCH_BYTES_BEFORE_POLL", "0", 0),
        ("VMA_INTERNAL_THREAD_AFFINITY", "-1", "-1"),
        ("VMA_INTERNAL_THREAD_AFFINITY", "0,2-5,8-15:2", "0,2-5,8-15:2"),
        ("VMA_INTERNAL_THREAD_AFFINITY", "0x3", "0x3"),
        ("VMA_INTERNAL_THREAD_CPUSET", "zz", "zz"),
        ("VMA_LOG_CB_FUNC_PTR", "", ""),
        ("VMA_LOG_CB_FUNC_PTR", "0x55d0c0de1000", "0x55d0c0de1000"),
    ],
)
def test_parse(name: str, text: str, value: int | str) -> None:
    assert load()[name].parse(text) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("VMA_RX_POLL", "abc"),
        ("VMA_RX_POLL", "-2"),
        ("VMA_RX_POLL", ""),
        ("VMA_RX_POLL", "\N{ARABIC-INDIC DIGIT ONE}"),
        ("VMA_TRACELEVEL", "loud"),
        ("VMA_THREAD_MODE", "4"),
        ("VMA_OFFLOADED_SOCKETS", "perhaps"),
        ("VMA_OFFLOADED_SOCKETS", "2"),
        ("VMA_APPLICATION_ID", "x" * 64),
        ("VMA_RX_PREFETCH_BYTES_BEFORE_POLL", "31"),
        ("VMA_INTERNAL_THREAD_AFFINITY", "zz"),
        ("VMA_INTERNAL_THREAD_AFFINITY", ""),
        ("VMA_INTERNAL_THREAD_AFFINITY", "8192"),
        ("VMA_LOG_CB_FUNC_PTR", "my_log"),
        ("VMA_LOG_CB_FUNC_PTR", "0x0"),
    ],
)
def test_parse_refuses_and_names_the_parameter(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=name):
        load()[name].parse(text)


def test_a_wrong_text_is_told_what_is_expected() -> None:
    with pytest.raises(ValueError, match=r"^VMA_INTERNAL_THREAD_AFFINITY: 'zz' is not a hexadecimal mask"):
        load()["VMA_INTERNAL_THREAD_AFFINITY"].parse("zz")


@pytest.mark.parametrize(
    "entry",
    [
        ENTRY + 'syntax = "cpus"\n',
        STRING + 'syntax = "colour"\n',
        STRING + 'syntax = "cpus"\n',  # its default is none
        ENTRY.replace("default = 1", "default = 10"),
        ENTRY.replace("max = 9\n", ""),
        ENTRY.replace('"later"', '"now"'),
        ENTRY.replace('"int"', '"float"'),
        ENTRY + "colour = 1\n",
        ENTRY + 'floor = ["VMA_Y", 1, 1]\n',
        ENTRY + ENTRY,
    ],
)
def test_a_catalogue_that_contradicts_itself(entry: str) -> None:
    parse(HEAD + ENTRY)
    with pytest.raises(CatalogueError):
        parse(HEAD + entry)


def test_acts_says_what_the_shim_does() -> None:
    """A parameter that acts is used by the shim's code, and one that the code uses says so."""
    shim = ROOT / "vmahybrid" / "shim"
    code = "\n".join(path.read_text(encoding="utf-8") for path in shim.glob("*.[ch]") if path.name != "params.c")
    used = set(re.findall(r"vmh_params\.(\w+)(?!\w*\.h\b)", code)) - {"h"}
    used |= {name.lower() for name in re.findall(r"vmh_param_asked\(VMH_PARAM_(\w+)\)", code)}
    in_params_c = {"spec", "hybrid_policy", "hybrid_profile_dir"}  # they set other parameters
    acting = {parameter.field for parameter in load().parameters if parameter.acts == "now"}
    assert acting - used - in_params_c == set()
    assert used - acting == set()
