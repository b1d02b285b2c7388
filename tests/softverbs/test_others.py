"""Programs of others on softverbs: rdma-core's tests on Debian's pyverbs, and Debian's perftest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from softverbs.build import HERE, library

from vmahybrid.bench.sandbox import Sandbox

pytestmark = [pytest.mark.root, pytest.mark.apps]

ROOT = HERE.parents[1]
VERSION = "59.0"
MODULES = ("test_device", "test_pd", "test_mr", "test_cq", "test_cqex", "test_qp", "test_flow")
# the tests that a device with raw packet QPs can pass on pyverbs 44; all others skip, for want of other QP types
PASSING = {
    "test_device.DeviceTest": ["dev_list", "open_dev", "phys_port_cnt_ex", "query_device", "query_device_ex",
                               "query_gid", "query_gid_ex", "query_gid_ex_bad_flow", "query_gid_table",
                               "query_gid_table_bad_flow", "query_pkey", "query_port_bad_flow"],
    "test_pd.PDTest": ["alloc_pd", "dealloc_pd", "destroy_pd_twice", "multiple_pd_creation"],
    "test_mr.MRTest": ["reg_mr_bad_flags"],
    "test_cq.CQAPITest": ["create_cq", "create_cq_bad_flow", "create_cq_with_comp_channel"],
    "test_cqex.CQEXAPITest": ["create_cq_ex", "create_cq_ex_bad_flow"],
    "test_qp.QPTest": ["create_raw_qp_ex_no_attr", "create_raw_qp_ex_with_attr", "create_raw_qp_no_attr",
                       "create_raw_qp_with_attr", "query_raw_qp"],
    "test_flow.FlowTest": ["eth_spec_flow_traffic", "ipv4_spec_flow_traffic", "ipv6_spec_flow_traffic",
                           "tcp_spec_flow_traffic", "udp_spec_flow_traffic"],
}
# not the device's doing: one compares with /sys/class/infiniband, one asks for a field that pyverbs 44 has not
WAIVED = {"test_device.DeviceTest.test_get_pkey_index", "test_device.DeviceTest.test_query_port"}


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with rdma-core's `tests`, out of the source distribution on PyPI, which is kept in .cache."""
    cache = ROOT / ".cache" / "pyverbs"
    archive = cache / f"pyverbs-{VERSION}.tar.gz"
    if not archive.exists():
        cache.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run([*pip, "--no-binary", "pyverbs", f"pyverbs=={VERSION}", "-d", str(cache)],
                              capture_output=True, text=True, timeout=110, check=False)
        assert archive.exists(), f"pip download pyverbs: {done.stderr[-1000:]}"
    directory = tmp_path_factory.mktemp("upstream")
    prefix = f"pyverbs-{VERSION}/rdma-core/"
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            body = tar.extractfile(member)
            if body and re.fullmatch(rf"{re.escape(prefix)}tests/\w+\.py", member.name):
                target = directory / member.name.removeprefix(prefix)
                target.parent.mkdir(exist_ok=True)
                target.write_bytes(body.read())
    return directory


def test_rdma_core(upstream: Path, netns_pair: Sandbox) -> None:
    argv = ["/usr/bin/python3", str(HERE / "upstream.py"), str(upstream), f"sv_{netns_pair.a.device}", *MODULES]
    # iproute2's own fails where the kernel has no RDMA
    rdma = upstream / "bin" / "rdma"
    rdma.parent.mkdir()
    device = netns_pair.a.device
    rdma.write_text(f"#!/bin/sh\necho '[{{\"ifname\":\"sv_{device}\",\"port\":1,\"netdev\":\"{device}\"}}]'\n")
    rdma.chmod(0o755)
    env = {"LD_LIBRARY_PATH": str(library().parent), "PATH": f"{rdma.parent}:{os.environ['PATH']}"}
    program = netns_pair.start(netns_pair.a, argv, env=env)
    program.wait(90)
    # the verdict ends the last line of the test's name and description
    results = dict(re.findall(r"^test_\w+ \(tests\.([\w.]+)\)(?:\n(?!test_).*?)?? \.\.\. (\w+)", program.output,
                              re.MULTILINE))
    assert results, program.output[-3000:] + program.errors[-3000:]
    passed = {name for name, verdict in results.items() if verdict == "ok"}
    failed = {name for name, verdict in results.items() if verdict not in ("ok", "skipped")}
    assert failed <= WAIVED, program.output[-6000:]
    assert {f"{group}.test_{name}" for group, names in PASSING.items() for name in names} <= passed, program.output


def perftest(sandbox: Sandbox, tool: str, *options: str) -> tuple[list[float], list[float]]:
    """The result lines of the server on a and the client on b: octets, iterations, figures."""
    a, b = sandbox.sides
    env = {"LD_LIBRARY_PATH": str(library().parent)}
    common = [*options, "-s", "64"]
    served_by = ["stdbuf", "-oL", tool, "--server", "-d", "sv_va", "-B", a.mac, "-E", b.mac]
    server = sandbox.start(a, [*served_by, *common], env=env)
    server.wait_for("#bytes")  # printed when receive buffers are posted; the client does not ask
    client = sandbox.start(b, [tool, "--client", "-d", "sv_vb", "-B", b.mac, "-E", a.mac, *common], env=env)
    said = client.result(30), server.result(30)
    lines = [re.findall(r"^ 64\s.*$", text, re.MULTILINE) for text in said]
    assert all(lines), said
    ended, served = ([float(word) for word in line[-1].split()] for line in lines)
    return served, ended


def test_raw_ethernet_bw(netns_pair: Sandbox) -> None:
    """All frames arrive: the server ends by itself when it has counted as many as the client sent."""
    count = 200_000
    served, ended = perftest(netns_pair, "raw_ethernet_bw", "-n", str(count))
    assert served[1] == ended[1] == count
    print(f"raw_ethernet_bw, 64 octets: {ended[4]:.3f} million frames per second")


def test_raw_ethernet_lat(netns_pair: Sandbox) -> None:
    served, ended = perftest(netns_pair, "raw_ethernet_lat", "-n", "20000")
    assert served[1] == ended[1] == 20000
    print(f"raw_ethernet_lat, 64 octets: {ended[4]:.2f} us typical")
