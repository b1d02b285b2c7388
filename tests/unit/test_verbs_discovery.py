"""Which RDMA device belongs to which interface: on trees of files that look like sysfs, and by the software's names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vmahybrid.errors import NotPossibleHere
from vmahybrid.verbs import discovery, library
from vmahybrid.verbs.discovery import RdmaLink


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def test_a_machine_without_rdma(tmp_path: Path) -> None:
    assert discovery.scan(tmp_path) == []
    assert discovery.names(tmp_path) == []


def test_a_nic_with_one_device_per_port(tmp_path: Path) -> None:
    for number in (0, 1):
        device = f"class/infiniband/mlx5_{number}"
        net = f"{device}/device/net/eth{number}"
        tree(tmp_path, {f"{device}/ports/1/state": "", f"{net}/ifindex": str(number + 2), f"{net}/dev_port": "0"})
        os.symlink("/bus/pci/drivers/mlx5_core", tmp_path / device / "device/driver")
    assert discovery.scan(tmp_path) == [RdmaLink("mlx5_0", 1, "eth0", 2, "mlx5_core"),
                                        RdmaLink("mlx5_1", 1, "eth1", 3, "mlx5_core")]
    assert discovery.names(tmp_path) == ["mlx5_0", "mlx5_1"]


def test_a_device_with_two_ports(tmp_path: Path) -> None:
    device = "class/infiniband/mlx4_0"
    tree(tmp_path, {f"{device}/ports/1/state": "", f"{device}/ports/2/state": "",
                    f"{device}/device/net/a/ifindex": "7", f"{device}/device/net/a/dev_port": "1",
                    f"{device}/device/net/b/ifindex": "8", f"{device}/device/net/b/dev_port": "0"})
    assert {(link.ifname, link.port) for link in discovery.scan(tmp_path)} == {("a", 2), ("b", 1)}


def test_an_interface_whose_port_the_device_does_not_have(tmp_path: Path) -> None:
    device = "class/infiniband/mlx5_0"
    tree(tmp_path, {f"{device}/ports/1/state": "", f"{device}/device/net/rep0/ifindex": "9",
                    f"{device}/device/net/rep0/dev_port": "1"})
    assert discovery.scan(tmp_path) == []


@pytest.mark.parametrize("says", ["parent", "ports/1/gid_attrs/ndevs/3"])
def test_a_device_without_a_bus(tmp_path: Path, says: str) -> None:
    tree(tmp_path, {"class/infiniband/rxe0/ports/1/state": "4: ACTIVE", f"class/infiniband/rxe0/{says}": "eth0",
                    "class/infiniband/rxe0/ports/1/gids/0": "fe80:0000:0000:0000:4c3d:acff:fefa:f225",
                    "class/net/eth0/ifindex": "2", "class/net/eth0/address": "4e:3d:ac:fa:f2:25"})
    assert discovery.scan(tmp_path) == [RdmaLink("rxe0", 1, "eth0", 2, "")]


def test_an_interface_of_another_namespace_is_nobodys(tmp_path: Path) -> None:
    tree(tmp_path, {"class/infiniband/rxe0/ports/1/gid_attrs/ndevs/0": "eth9"})
    assert discovery.scan(tmp_path) == []
    assert discovery.names(tmp_path) == ["rxe0"]


def test_a_name_that_leads_out_of_the_directory(tmp_path: Path) -> None:
    tree(tmp_path, {"class/infiniband/x/parent": "../../evil", "class/infiniband/x/ports/1/state": "",
                    "evil/ifindex": "5"})
    assert discovery.scan(tmp_path) == []


def test_the_software_device_first() -> None:
    links = [RdmaLink("mlx5_0", 2, "eth0", 2, "mlx5_core")]
    assert discovery.device_of("eth0", ["sv_eth0", "mlx5_0"], links) == ("sv_eth0", 1)
    assert discovery.device_of("eth0", ["mlx5_0"], links) == ("mlx5_0", 2)
    assert discovery.device_of("eth1", ["sv_eth0", "mlx5_0"], links) is None


def test_where_the_software_library_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMAHYBRID_SOFTVERBS", str(tmp_path))
    with pytest.raises(NotPossibleHere, match=rf"there is no {tmp_path}/libibverbs.so.1. make build, or set VMA"):
        library.softverbs_environment()
    (tmp_path / "libibverbs.so.1").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/opt/lib::{tmp_path}")
    assert library.softverbs_environment() == {"LD_LIBRARY_PATH": f"{tmp_path}:/opt/lib"}
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert library.softverbs_environment() == {"LD_LIBRARY_PATH": str(tmp_path)}
    colon = tmp_path / "a:b"
    colon.mkdir()
    (colon / "libibverbs.so.1").touch()
    monkeypatch.setenv("VMAHYBRID_SOFTVERBS", str(colon))
    with pytest.raises(NotPossibleHere, match="has a colon"):
        library.softverbs_environment()
