"""What rdma-core has no tests for with raw packet QPs: the cases of the C program, each in a sandbox of its own."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from softverbs.build import CASES, build_own, library, sanitized_library

from vmahybrid.bench.sandbox import Sandbox
from vmahybrid.cli.run import library as shim

pytestmark = pytest.mark.root

ASAN = {"ASAN_OPTIONS": "detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1"}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_own(tmp_path_factory.mktemp("softverbs") / "own", library())


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    return build_own(tmp_path_factory.mktemp("softverbs") / "own", sanitized_library(), *flags)


def run_case(sandbox: Sandbox, program: Path, case: str, env: dict[str, str]) -> str:
    a, b = sandbox.sides
    argv = [str(program), a.device, f"/run/netns/{b.netns}", b.device, case]
    said = sandbox.start(a, argv, env=env).result(45)
    assert re.search(r"^[1-9]\d* checks, 0 failed$", said, re.MULTILINE), said
    return said


@pytest.mark.parametrize("case", CASES)
def test_case(own: Path, case: str, netns_pair: Sandbox) -> None:
    run_case(netns_pair, own, case, {"LD_LIBRARY_PATH": str(library().parent)})


@pytest.mark.parametrize("case", CASES)
def test_case_sanitized(sanitized: Path, case: str, netns_pair: Sandbox) -> None:
    """The same with address, leak and undefined-behaviour sanitizers in the library and the program."""
    env = {"LD_LIBRARY_PATH": str(sanitized_library().parent), "OWN_CYCLES": "300", **ASAN}
    run_case(netns_pair, sanitized, case, env)


def test_every_case_is_run() -> None:
    """The table of names here is that of the C files."""
    found = set()
    for path in Path(__file__).parent.glob("*_cases.c"):
        table = path.read_text().rpartition("const struct named_case")[2]
        found |= set(re.findall(r'\{ "([a-z0-9-]+)", ', table))
    assert found == set(CASES)


def test_symbols(own: Path) -> None:
    """Each versioned symbol that Debian's users of libibverbs want is there, and no other is exported unversioned."""
    users = [*Path("/usr/lib/python3/dist-packages/pyverbs").rglob("*.so"), Path("/usr/bin/raw_ethernet_bw"),
             *(Path("/usr/lib/x86_64-linux-gnu") / name for name in ("librdmacm.so.1", "libmlx5.so.1", "libefa.so.1"))]
    offered = set(symbols(library(), defined=True))
    wanted = {symbol for user in users if user.exists() for symbol in symbols(user, defined=False)}
    assert len(wanted) > 60
    assert not wanted - offered


def test_no_call_that_a_preload_could_take() -> None:
    """A shim before it sees none of its descriptors: system calls are made without libc."""
    def names(path: Path, which: str) -> set[str]:
        said = subprocess.run(["nm", "-D", which, path], capture_output=True, text=True, check=True).stdout
        return {line.split()[-1].partition("@")[0] for line in said.splitlines()}

    ours = {"vmh_fd_hide", "vmh_fd_hidden_close"}  # offered by the shim for this
    needed = names(library(), "--undefined-only")
    assert ours <= needed
    taken = names(shim(), "--defined-only")
    assert {"close", "epoll_ctl", "socket", "syscall"} <= taken
    assert needed & taken == ours


def symbols(path: Path, *, defined: bool) -> list[str]:
    said = subprocess.run(["objdump", "-T", str(path)], capture_output=True, text=True, check=True).stdout
    found = []
    for line in said.splitlines():
        match = re.search(r"\(?(IBVERBS_[\w.]+)\)?\s+(\w+)$", line)
        if match and ("*UND*" in line) != defined:
            found.append(f"{match[2]}@{match[1]}")
    return found


def test_not_root(own: Path, netns_pair: Sandbox) -> None:
    """Without CAP_NET_RAW no QP is made; listing devices and asking them needs nothing."""
    dropped = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"]
    script = (
        "import pyverbs.device as d, pyverbs.enums as e\n"
        "from pyverbs.pd import PD\nfrom pyverbs.cq import CQ\nfrom pyverbs.qp import QP, QPInitAttr, QPCap\n"
        "from pyverbs.pyverbs_error import PyverbsRDMAError\n"
        "ctx = d.Context(name=d.get_device_list()[0].name.decode()); cq = CQ(ctx, 8)\n"
        "print(ctx.query_port(1).state)\n"
        "try: QP(PD(ctx), QPInitAttr(qp_type=e.IBV_QPT_RAW_PACKET, scq=cq, rcq=cq, cap=QPCap(4, 4, 1, 1, 0)))\n"
        "except PyverbsRDMAError as error: print(error)\n"
    )
    a = netns_pair.a
    env = {"LD_LIBRARY_PATH": str(library().parent)}
    said = netns_pair.start(a, [*dropped, "/usr/bin/python3", "-c", script], env=env).result(20)
    assert said.splitlines()[0] == "4" and "Operation not permitted" in said, said


@pytest.mark.parametrize("extra", [(), ("perfmon",)])
def test_capabilities_of_steering(netns_pair: Sandbox, extra: tuple[str, ...]) -> None:
    """Without CAP_PERFMON the kernel's verifier demands of programs what these are not: that is said as EPERM."""
    capabilities = ",".join(f"+{name}" for name in ("net_raw", "net_admin", "bpf", *extra))
    some = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", f"--inh-caps={capabilities}",
            f"--ambient-caps={capabilities}"]
    script = (
        "import pyverbs.device as d, pyverbs.enums as e\n"
        "from pyverbs.pd import PD\nfrom pyverbs.cq import CQ\nfrom pyverbs.flow import Flow, FlowAttr\n"
        "from pyverbs.qp import QP, QPInitAttr, QPCap\nfrom pyverbs.spec import TcpUdpSpec\n"
        "from pyverbs.pyverbs_error import PyverbsRDMAError\n"
        "ctx = d.Context(name=d.get_device_list()[0].name.decode()); cq = CQ(ctx, 8)\n"
        "qp = QP(PD(ctx), QPInitAttr(qp_type=e.IBV_QPT_RAW_PACKET, scq=cq, rcq=cq, cap=QPCap(4, 4, 1, 1, 0)))\n"
        "attr = FlowAttr(num_of_specs=1)\n"
        "attr.specs.append(TcpUdpSpec(spec_type=e.IBV_FLOW_SPEC_UDP, dst_port=7))\n"
        "try: flow = Flow(qp, attr); print('made')\n"
        "except PyverbsRDMAError as error: print(error)\n"
    )
    env = {"LD_LIBRARY_PATH": str(library().parent), "SOFTVERBS_DEVICES": "va"}
    said = netns_pair.start(netns_pair.a, [*some, "/usr/bin/python3", "-c", script], env=env).result(20)
    assert ("made" in said) if extra else ("Operation not permitted" in said), said


def test_devices_of_the_namespace(netns_pair: Sandbox) -> None:
    """One device per Ethernet interface, of this namespace, limited by SOFTVERBS_DEVICES."""
    netns_pair.a.ip("link", "add", "extra0", "type", "veth", "peer", "name", "extra1")
    script = "import pyverbs.device as d; print(sorted(x.name.decode() for x in d.get_device_list()))"
    env = {"LD_LIBRARY_PATH": str(library().parent)}
    argv = ["/usr/bin/python3", "-c", script]
    assert netns_pair.start(netns_pair.a, argv, env=env).result(20) == "['sv_extra0', 'sv_extra1', 'sv_va']\n"
    env["SOFTVERBS_DEVICES"] = "va,eth7"
    assert netns_pair.start(netns_pair.a, argv, env=env).result(20) == "['sv_va']\n"
