"""The service's configuration: origins, errors that name the token, live changes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vmahybrid.config.rule import DEFAULT_RULES, OperatorRule, parse_endpoint
from vmahybrid.config.service import KEYS, Key, load, problems, run_directory
from vmahybrid.contracts import ANY_ADDR, addr_to_bytes
from vmahybrid.errors import UsageError
from vmahybrid.steering.flow import Kind


@pytest.fixture(autouse=True)
def no_system_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("vmahybrid.config.service.DEFAULT_FILE", tmp_path / "absent.toml")
    monkeypatch.setenv("VMAHYBRID_RUNDIR", "/run/here")


def file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "vmahybrid.toml"
    path.write_text(text)
    return path


def test_defaults() -> None:
    config = load()
    assert (config["control.path"], config["api.unix"]) == ("/run/here/control.sock", "/run/here/api.sock")
    assert (config["control.mode"], config["api.mode"]) == (0o666, 0o660)
    assert {config.origin(key.name) for key in KEYS} == {"default"}
    assert config.mode_of("eth0") == "auto"
    assert config.rules == DEFAULT_RULES == (OperatorRule("kernel", "udp", "*:*", "*:53"),)
    for key in KEYS:
        if key.name not in ("control.path", "api.unix"):
            assert key.parse(config[key.name]) == config[key.name], key.name


def test_the_run_directory_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VMAHYBRID_RUNDIR")
    assert str(run_directory()) == "/run/vmahybrid"


def test_command_line_beats_file_beats_default(tmp_path: Path) -> None:
    path = file(tmp_path, 'interfaces = ["eth0"]\n[log]\nlevel = "debug"\n[ring]\nframes = 16384\n'
                          '[interface."eth0"]\nmode = "native"\n[control]\nmode = "0600"\n[api]\nmode = 0o600\n')
    config = load(path, {"log.level": "error"})
    assert config["log.level"] == "error"
    assert (config.origin("log.level"), config.origin("ring.frames"), config.origin("ring.direct")) == (
        "command line", str(path), "default")
    assert (config["interfaces"], config["ring.frames"]) == (("eth0",), 16384)
    assert (config["control.mode"], config["api.mode"]) == (0o600, 0o600)
    assert (config.mode_of("eth0"), config.mode_of("eth1")) == ("native", "auto")
    assert config.describe()["control.mode"]["value"] == "0600"
    assert config.describe()["interfaces"]["value"] == ["eth0"]


def taken(key: Key, value: object) -> bool:
    try:
        key.parse(value)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_the_schema_says_what_is_taken(key: Key) -> None:
    """At each edge of what it says, and for every other type."""
    schema = load().describe()[key.name]["accepts"]
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    of_type = {"integer": 1, "string": "x", "boolean": True, "array": ["x"], "number": 1.5, "null": None, "object": {}}
    for name, value in of_type.items():
        if name not in types:
            assert not taken(key, value), f"{name} is not among {types}"
    if "enum" in schema:
        assert all(taken(key, value) for value in schema["enum"])
        assert not taken(key, "nonsense") and not taken(key, 3)
    elif "minimum" in schema:
        assert taken(key, schema["minimum"]) and taken(key, schema["maximum"])
    if "minimum" in schema:
        assert not taken(key, schema["minimum"] - 1) and not taken(key, schema["maximum"] + 1)
    if "maxLength" in schema:
        assert taken(key, "/" * schema["maxLength"]) and not taken(key, "/" * (schema["maxLength"] + 1))
    strings = ["", "/", "x", "/x", "0660", "0o660", "777", "0999", "a:1", "a:0", ":1", "a:b", "a\0b"]
    if "pattern" in schema:
        for text in strings:
            if taken(key, text):
                assert re.search(schema["pattern"], text), f"{text!r} is taken and not described"
            elif not re.search(schema["pattern"], text):
                assert not taken(key, text)
    assert taken(key, load().describe()[key.name]["default"])


def test_backends(tmp_path: Path) -> None:
    assert load().backend_of("eth0") == "auto"
    config = load(file(tmp_path, 'backend = "xdp"\n[interface."eth0"]\nbackend = "verbs"\nmode = "native"\n'
                                 '[interface."eth1"]\nmode = "kernel"\n'))
    assert [config.backend_of(name) for name in ("eth0", "eth1", "eth2")] == ["verbs", "xdp", "xdp"]
    assert (config.mode_of("eth0"), config.mode_of("eth1")) == ("native", "kernel")
    assert '[interface."eth0"]' in config.backend_remedy("eth0")
    assert config.changed({"backend": "kernel"}).backend_remedy("eth1") == (
        "vmahybrid config set backend=auto (now kernel, by api)")
    live = config.changed({"backend": "auto"})
    assert [live.backend_of(name) for name in ("eth0", "eth2")] == ["verbs", "auto"]


@pytest.mark.parametrize(("text", "named"), [
    ("[ring]\nframez = 1", 'unknown key "ring.framez"'),
    ("[ring]\nframez = 1", "did you mean ring.frames?"),
    ("nonsense = 1", 'unknown key "nonsense"'),
    ("ring = 1", 'unknown key "ring"'),
    ('[ring]\nframes = "many"', "ring.frames = 'many'"),
    ("[ring]\nframes = 1000", "ring.frames = 1000"),
    ("[ring]\nframes = 1048576", "not a power of two from 64 to 131072"),
    ("[ring]\nframes = true", "ring.frames = True"),
    ("[ring]\nframes = 1024", "ring.frames: 1024 frames"),
    ('[ring]\ndirect = "always"', "ring.direct = 'always' is not one of first, never"),
    ("[limits]\nsessions = 0", "limits.sessions = 0"),
    ('[control]\npath = "relative"', "control.path = 'relative'"),
    (f'[control]\npath = "/{"x" * 107}"', "control.path"),
    ("[control]\nmode = 0o1777", "control.mode = 1023"),
    ('[api]\nmode = "rw"', "api.mode = 'rw'"),
    ('[api]\ntcp = "8080"', "api.tcp = '8080'"),
    ('[api]\ntcp = "127.0.0.1:8080"', "api.token_file"),
    ('interfaces = "eth0"', "interfaces = 'eth0'"),
    ('interfaces = ["a:b:c"]', "interfaces"),
    ('interfaces = ["a:"]', "interfaces"),
    ('interfaces = [":eth0"]', "interfaces"),
    ('interfaces = ["eth 0"]', "interfaces"),
    ('interfaces = ["a_name_of_16_chars"]', "interfaces"),
    ('[interface."eth0"]\nspeed = 1', 'interface."eth0".speed'),
    ('[interface."eth0"]\nmode = "fast"', "interface.\"eth0\".mode = 'fast'"),
    ('backend = "rdma"', "backend = 'rdma' is not one of auto, verbs, xdp, kernel"),
    ('[interface."eth0"]\nbackend = "rdma"', "interface.\"eth0\".backend = 'rdma' is not one of auto, verbs, xdp"),
    ('[interface."eth0"]\nbackends = "xdp"', 'interface."eth0".backends. the keys there are mode and backend'),
    ('[interface."eth0"]\nmode = "kernel"\nbackend = "verbs"',
     'interface."eth0": mode = "kernel" contradicts backend = "verbs"'),
    ('interface.backend = "verbs"', 'names no interface. write [interface."NAME"] backend = "verbs"'),
    ("interface = 1", 'interface = 1 is no table. write [interface."NAME"] mode = ...'),
    ("interface.eth0 = 1", 'interface.eth0 = 1 names no setting. write [interface."eth0"] mode = ...'),
    ('interface.mode = "native"',
     """interface.mode = 'native' names no interface. write [interface."NAME"] mode = "native\""""),
    ("rule = 1", "rule is an array"),
    ('[[rule]]\nproto = "udp"', "a rule without action"),
    ('[[rule]]\naction = "pass"', "action 'pass'"),
    ('[[rule]]\naction = "kernel"\nproto = "sctp"', "proto 'sctp'"),
    ('[[rule]]\naction = "kernel"\nport = 1', "rule.port"),
    ('[[rule]]\naction = "kernel"\nlocal = 5', "rule.local = 5"),
    ('[[rule]]\naction = "kernel"\nremote = "10.0.0.1"', "remote = '10.0.0.1'"),
    ('[[rule]]\naction = "kernel"\nremote = "10.0.0.1:70000"', "remote = '10.0.0.1:70000'"),
    ('[[rule]]\naction = "drop"\nremote = "*:53"', "drop *:* *:53"),
    ("[broken", "not TOML"),
])
def test_errors_are_one_line_that_names_the_token(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(UsageError) as error:
        load(file(tmp_path, text))
    assert named in str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 2


PLACES = [
    (2, "[ring]\nframes = 3\n", "ring.frames = 3 is not a power of two"),
    (3, "# ring.frames = 3\n\nring.frames = 3 # ring.frames = 3\n", "ring.frames = 3"),
    (4, 'backend = """\nxdp\\\n"""\nring = { rx_size = 512, frames = 3 }\n', "ring.frames = 3"),
    (5, '[control]\ngroup = """\n[ring]\nframes = 3"""\nnonsense = 1\n', 'unknown key "control.nonsense"'),
    (6, "interfaces = [\n 'a',\n 'b' ]\n['ring']\n\n \"frames\" = 3\n", "ring.frames = 3"),
    (2, "interfaces = []\nbackend = [\n'xdp' ]\n", "backend = ['xdp']"),
    (4, '[interface."eth0"]\nmode = "native"\n[interface."eth1"]\nmode = "fast"\n', "interface.\"eth1\".mode = 'fast'"),
    (2, 'interface.eth0.mode = "native"\ninterface.eth1.mode = "fast"\n', "interface.\"eth1\".mode = 'fast'"),
    (3, '[interface.eth0]\nmode = "kernel"\nbackend = "verbs"\n', "contradicts"),
    (5, '[[rule]]\naction = "kernel"\n[[rule]]\naction = "kernel"\nlocal = "10.0.0.1"\n', "local = '10.0.0.1'"),
    (3, '[[rule]]\naction = "kernel"\n[[rule]]\nproto = "udp"\n', "a rule without action"),
    (1, '[[rule]]\naction = "drop"\nremote = "*:53"\n', "drop *:* *:53"),
    (2, "[ring]\nframes = 1024\n", "ring.frames: 1024 frames can't fill"),
    (2, "[ring]\nrx_size = 65536\n", "ring.frames: 8192 frames can't fill"),
    (1, 'api.tcp = "127.0.0.1:8080"\n[ring]\nframes = 8192\n', "api.tcp: the API over TCP needs a token"),
    (3, "[ring]\n\nframes 3\n", 'not TOML: Expected \'=\' after a key in a key/value pair, column 8: "frames 3"'),
    (2, '[log]\nlevel = "debug\n[ring]\n', 'not TOML: Illegal character \'\\n\', column 15: "level = "debug"'),
    (3, '[log]\nlevel = """debug\nx', "not TOML: Unterminated string at its end"),
    (3, "[ring]\nframes = 8192\nframes = 8192\n", "not TOML: Cannot overwrite a value"),
    (2, "# x\r\nring.frames = 3\r\n", "ring.frames = 3"),
]


@pytest.mark.parametrize(("line", "text", "named"), PLACES)
def test_errors_name_the_line(tmp_path: Path, line: int, text: str, named: str) -> None:
    path = tmp_path / "vmahybrid.toml"
    path.write_bytes(text.encode())
    with pytest.raises(UsageError) as error:
        load(path)
    assert str(error.value).startswith(f"{path}:{line}: ")
    assert named in str(error.value)


def test_every_problem_of_a_file_by_line(tmp_path: Path) -> None:
    path = file(tmp_path, 'backend = "rdma"\n[[rule]]\nport = 1\n[ring]\nframes = 3\nrx = 5\n'
                          "[interface.eth0]\nmode = 1\n")
    said = [str(problem).removeprefix(f"{path}:") for problem in problems(path)]
    assert [text.partition(" is ")[0].partition(". ")[0] for text in said] == [
        "1: backend = 'rdma'", "2: a rule without action", "3: unknown key rule.port", "5: ring.frames = 3",
        '6: unknown key "ring.rx"', '8: interface."eth0".mode = 1']
    assert problems(file(tmp_path, "[ring]\nframes = 8192\n")) == []
    assert len(problems(file(tmp_path, "[ring]\nframes = 1024\n"))) == 1


def test_the_command_line_may_mend_what_contradicts_itself(tmp_path: Path) -> None:
    path = file(tmp_path, "[ring]\nframes = 1024\n")
    assert load(path, {"ring.rx_size": 512, "ring.tx_size": 512})["ring.frames"] == 1024
    with pytest.raises(UsageError, match=r"^ring\.frames: "):
        load(file(tmp_path, ""), {"ring.frames": 1024})


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        load(tmp_path / "none.toml")
    path = tmp_path / "latin.toml"
    path.write_bytes(b'[log]\nx = "\xff"')
    with pytest.raises(UsageError, match=r"latin\.toml:2: not TOML: not UTF-8: byte 0xff"):
        load(path)
    path.write_bytes(b"interfaces = " + b"[" * 100_000)
    with pytest.raises(UsageError, match="nested too deeply"):
        load(path)


def test_the_system_file_is_read_when_it_is_there(tmp_path: Path) -> None:
    (tmp_path / "absent.toml").write_text('[log]\nlevel = "debug"\nrule = []')
    with pytest.raises(UsageError, match=r"log\.rule"):
        load()
    (tmp_path / "absent.toml").write_text('rule = []\n[log]\nlevel = "debug"')
    assert (load()["log.level"], load().rules) == ("debug", ())


def test_live_changes_are_all_or_none() -> None:
    config = load()
    changed = config.changed({"limits.rings": 3, "log.level": "debug"})
    assert (changed["limits.rings"], changed.origin("limits.rings"), config["limits.rings"]) == (3, "api", 256)
    for bad, named in (({"limits.rings": 3, "ring.frames": 5}, "ring.frames"), ({"interfaces": ["eth0"]}, "interfaces"),
                       ({"no.key": 1}, "no.key"), ({"ring.rx_size": 1 << 16}, "ring.frames")):
        with pytest.raises(UsageError, match=named):
            config.changed(bad)


def test_endpoints() -> None:
    assert parse_endpoint("x", "10.0.0.1:53") == (addr_to_bytes("10.0.0.1"), 53)
    assert parse_endpoint("x", "*:*") == parse_endpoint("x", "0.0.0.0:*") == (ANY_ADDR, 0)
    assert parse_endpoint("x", "[fe80::1]:7") == (addr_to_bytes("fe80::1"), 7)


@pytest.mark.parametrize("bad", [
    "", "10.0.0.1", ":", "10.0.0.1:-1", "10.0.0.1:x", "host:1", "10.0.0.1:\u0661", "*:0", "10.0.0.1:0", "[]:5", ":5",
    "[*]:5", "[::1:5", "::1]:5", "::1:5", "10.0.0.1]:6", "[10.0.0.1]:6", "10.0.0.1:+5", "10.0.0.1: 5", "10.0.0.1:5 ",
    " 10.0.0.1:5", "10.0.0.1:5\n", "10.0.0.1:65536", "10.0.0.1:000080",
])
def test_what_is_no_endpoint(bad: str) -> None:
    """Nothing wrong becomes a wider rule."""
    with pytest.raises(UsageError, match="rule: x = "):
        parse_endpoint("x", bad)


@pytest.mark.parametrize("field", ["netns", "interface"])
@pytest.mark.parametrize("bad", ["a/b", "a b", "eth0\n", "\x01"])
def test_patterns_that_no_name_matches(field: str, bad: str) -> None:
    with pytest.raises(UsageError, match=field):
        OperatorRule("kernel", **{field: bad}).flow()


def test_kinds_of_rules() -> None:
    kinds = {("10.0.0.1:5", "*:*"): Kind.THREE, ("10.0.0.1:5", "10.0.0.2:6"): Kind.FIVE,
             ("239.1.1.1:5", "*:*"): Kind.MULTICAST, ("*:*", "*:53"): Kind.THREE}
    for (local, remote), kind in kinds.items():
        assert OperatorRule("kernel", "udp", local, remote).flow().kind is kind
