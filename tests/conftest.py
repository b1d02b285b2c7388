"""Fixtures of all tests. A privileged test makes its own sandbox and removes it; in CI it may not be skipped."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import NoReturn

import leftovers
import pytest

from vmahybrid.bench.sandbox import Sandbox, sweep
from vmahybrid.bench.served import Service

PRIVILEGED = ("root", "apps")


def in_ci() -> bool:
    return os.environ.get("CI", "").lower() in ("1", "true", "yes")


def missing_capability() -> str | None:
    """Why a privileged test cannot run here, or None."""
    if os.geteuid() != 0:
        return "not root"
    effective = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff"))
    wanted = {"CAP_NET_ADMIN": 12, "CAP_NET_RAW": 13, "CAP_SYS_ADMIN": 21, "CAP_BPF": 39}
    absent = [name for name, bit in wanted.items() if not int(effective.split()[1], 16) >> bit & 1]
    return f"without {', '.join(absent)}" if absent else None


def _terminate(signum: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt(f"signal {signum}")


def pytest_configure() -> None:
    """SIGTERM (of timeout(1), of CI) ends the session as Ctrl-C does: fixtures remove what they made. A shell has its
    background jobs ignore SIGINT; programs that the tests end by it must not inherit that. All services share what is
    compiled once."""
    for name in ("VMA_HYBRID_TCP_PROCESSOR", "VMA_HYBRID_SPIN_SHARE"):
        os.environ[name] = "0"  # other tests want it as well
    os.environ["CACHE_DIRECTORY"] = str(Path(__file__).parents[1] / "build" / "xdp-cache")
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if any(item.get_closest_marker(name) for name in PRIVILEGED):
        missing = missing_capability()
        if missing:
            pytest.skip(f"privileged test: {missing}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI a privileged test that was skipped has failed: the capability is there by contract."""
    report = yield
    privileged = any(item.get_closest_marker(name) for name in PRIVILEGED)
    if in_ci() and privileged and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, which CI does not allow: {report.longrepr}"
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The check for leftovers comes last, wherever its file sorts."""
    items.sort(key=lambda item: item.path.name == "test_zz_leftovers.py")


@pytest.fixture(scope="session", autouse=True)
def machine_before() -> Iterator[tuple[leftovers.Snapshot, str]]:
    """The state of the machine before the first test, and the name of this session in its children's environment."""
    session = uuid.uuid4().hex
    os.environ[leftovers.SESSION_VARIABLE] = session
    pages = Path(tempfile.mkdtemp(prefix="vmh-pages-"))  # pytest's own directories are closed to other users
    pages.chmod(0o1777)
    os.environ[leftovers.STATS_VARIABLE] = str(pages)
    if os.geteuid() == 0:
        sweep()
    yield (leftovers.take() if os.geteuid() == 0 else leftovers.Snapshot()), session
    del os.environ[leftovers.SESSION_VARIABLE], os.environ[leftovers.STATS_VARIABLE]
    shutil.rmtree(pages, ignore_errors=True)


@pytest.fixture(scope="module", params=["xdp", "softverbs"])
def softverbs(request: pytest.FixtureRequest) -> bool:
    """Runs a test twice: with programs on AF_XDP rings, and with programs on raw packet QPs of the software device."""
    return bool(request.param == "softverbs")


@pytest.fixture
def netns_pair() -> Iterator[Sandbox]:
    """Two namespaces joined by a veth; see vmahybrid.bench.sandbox."""
    with Sandbox("test") as sandbox:
        yield sandbox


@pytest.fixture
def make_service(netns_pair: Sandbox) -> Callable[..., Service]:
    """Makes a service for this test's sandbox: `with make_service(sides=..., arguments=...) as service:`."""

    def make(**options: object) -> Service:
        return Service(netns_pair, **options)  # type: ignore[arg-type]

    return make


@pytest.fixture
def service(netns_pair: Sandbox) -> Iterator[Service]:
    """A running service on both sides of netns_pair; the test fails when it does not stop cleanly."""
    with Service(netns_pair) as running:
        yield running
