"""Which interface an RDMA device belongs to, as the shim and the service see it: the same trees of files for both.

The interface is lo, which is in every namespace: its index is 1, its MAC zero, its EUI-64 0200:00ff:fe00:0000.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from unit.c.test_c_programs import ROOT, build

from vmahybrid.config import gen_params
from vmahybrid.verbs import discovery

OWN = "fe80:0000:0000:0000:0200:00ff:fe00:0000"
OTHER = "fe80:0000:0000:0000:4c3d:acff:fefa:f225"
ZERO = "0000:0000:0000:0000:0000:0000:0000:0000"
NET = "device/net/lo"
# files of the device's directory, and the port that lo is
TREES: dict[str, tuple[dict[str, str], int]] = {
    "hardware": ({f"{NET}/ifindex": "1", f"{NET}/address": "00:00:00:00:00:00", f"{NET}/dev_port": "0"}, 1),
    "hardware, second port": (
        {f"{NET}/ifindex": "1", f"{NET}/address": "00:00:00:00:00:00", f"{NET}/dev_port": "1"}, 2),
    # device/net shows the own namespace only, the table of addresses every name
    "hardware of another namespace": (
        {"device/vendor": "0x15b3", "ports/1/gid_attrs/ndevs/0": "lo", "ports/1/gids/0": OTHER}, 0),
    "hardware of another namespace, equal MAC": (
        {"device/vendor": "0x15b3", "ports/1/gid_attrs/ndevs/0": "lo", "ports/1/gids/0": OWN}, 0),
    "rxe": ({"parent": "lo", "ports/1/gids/0": OWN}, 1),
    "rxe, a later address": ({"parent": "lo", "ports/1/gids/0": ZERO, "ports/1/gids/3": OWN}, 1),
    "rxe by its GUID": ({"parent": "lo", "node_guid": OWN[20:], "ports/1/gids/0": ZERO}, 1),
    "by the table of addresses": ({"ports/1/gid_attrs/ndevs/0": "lo", "ports/1/gids/0": OWN}, 1),
    "rxe of another namespace": (
        {"parent": "lo", "ports/1/gid_attrs/ndevs/0": "lo", "ports/1/gids/0": OTHER, "node_guid": OTHER[20:]}, 0),
    "rxe without an address": ({"parent": "lo", "ports/1/gids/0": ZERO}, 0),
    "another interface's": ({"parent": "eth0", "ports/1/gids/0": OWN}, 0),
}


@pytest.fixture(scope="module")
def port_of(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shim's answer as a program."""
    where = tmp_path_factory.mktemp("verbs_dev")
    parameters = ROOT / "vmahybrid" / "config" / "parameters.toml"
    assert gen_params.main([str(parameters), str(where / "params_gen.h")]) == 0
    return build(where / "program", "sanitized", ["verbs_dev.c"], ["heap.c", "lock.c"], f"-I{where}")


def grow(sysfs: Path, files: dict[str, str]) -> Path:
    device = sysfs / "class/infiniband/dev0"
    for name, text in {"ports/1/state": "4: ACTIVE", "ports/2/state": "4: ACTIVE", **files}.items():
        path = device / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    net = sysfs / "class/net/lo"
    net.mkdir(parents=True)
    (net / "ifindex").write_text("1\n")
    (net / "address").write_text("00:00:00:00:00:00\n")
    return device


@pytest.mark.parametrize("case", TREES)
def test_port_of_an_interface(port_of: Path, tmp_path: Path, case: str) -> None:
    files, wanted = TREES[case]
    device = grow(tmp_path, files)
    done = subprocess.run([port_of, device, "lo"], capture_output=True, text=True, timeout=20, check=True)
    found = discovery.device_of("lo", [], discovery.scan(tmp_path))
    assert (int(done.stdout), found[1] if found else 0) == (wanted, wanted)


@pytest.mark.parametrize(("name", "value"), [("ifindex", "2"), ("address", "00:00:00:00:00:01")])
def test_a_sysfs_of_another_namespace(port_of: Path, tmp_path: Path, name: str, value: str) -> None:
    """nsenter without a mount of its own: the program sees the host's interface of that name."""
    device = grow(tmp_path, TREES["hardware"][0] | {f"{NET}/{name}": value})
    done = subprocess.run([port_of, device, "lo"], capture_output=True, text=True, timeout=20, check=True)
    assert int(done.stdout) == 0
