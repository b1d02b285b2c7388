"""vmahybrid, vma_stats and the API on a real service with real programs on real rings."""

import json
import re
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from fake_view import FakeView
from net.service_lab import module_pair, module_services, until  # noqa: F401
from prometheus_client.parser import text_string_to_metric_families

from vmahybrid.bench.sandbox import Program, Sandbox
from vmahybrid.bench.served import Service, run_words
from vmahybrid.cli.client import Client
from vmahybrid.cli.main import main
from vmahybrid.vma_stats.main import main as vma_stats

pytestmark = pytest.mark.root

ECHO = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind((sys.argv[1], 7777))
print("bound", flush=True)
while True:
    data, peer = s.recvfrom(2048)
    s.sendto(data, peer)
"""
ASK = """
import socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(5)
for n in range(100000):
    s.sendto(b"x" * 100, (sys.argv[1], 7777))
    s.recv(2048)
    time.sleep(0.001)
"""
SENDS = """
import socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind((sys.argv[1], 7778))
for _ in range(2):
    s.sendto(b"x" * 100, (sys.argv[2], 7778))
print("sent", flush=True)
time.sleep(60)
"""
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    monkeypatch.setenv("VMAHYBRID_RUNDIR", service.env["VMAHYBRID_RUNDIR"])

    def run(*argv: str) -> tuple[int, str, str]:
        tool_main = vma_stats if argv[0] == "vma_stats" else main
        code = tool_main(list(argv[1:]))
        found = capsys.readouterr()
        return code, found.out, found.err

    return run


@pytest.fixture
def echo(service: Service, netns_pair: Sandbox) -> Iterator[Program]:
    """An echo server on side a, asked a thousand times a second from side b; both on rings when it returns."""
    run = run_words(*(["--softverbs"] if service.softverbs else []), "--", sys.executable, "-c")
    server = netns_pair.start(netns_pair.a, [*run, ECHO, netns_pair.a.address], env=service.env)
    server.wait_for("bound")
    asker = netns_pair.start(netns_pair.b, [*run, ASK, netns_pair.a.address], env=service.env)
    with Client(service.rundir / "api.sock") as client:
        deadline = time.monotonic() + 10
        while sum(process["offloaded_sockets"] for process in client.get("v1", "processes")) < 2:
            assert time.monotonic() < deadline, client.get("v1", "sockets")
            time.sleep(0.05)
        yield server
        for program in (asker, server):
            program.stop()
        until(lambda: not client.get("v1", "processes"), 5)


def test_what_one_sees(service: Service, netns_pair: Sandbox, echo: Program, call: Call) -> None:
    code, out, err = call("vmahybrid", "status")
    assert (code, err) == (0, ""), out
    of_ring = ("verbs", "sv_va") if service.softverbs else ("generic", "generic-virtual")
    for text in (netns_pair.a.netns, "va", *of_ring, f"{netns_pair.a.address}:7777", "ring", "all is well"):
        assert text in out, out
    body = json.loads(call("vmahybrid", "flows", "--json")[1])
    (flow,) = [flow for flow in body["flows"] if flow["local"] == f"{netns_pair.a.address}:7777"]
    assert (flow["action"], flow["pid"], flow["reason"], flow["backend"]) == ("ring", echo.pid, "none",
                                                                              service.backend)
    assert flow["packets"] > 0
    for socket_id in (f"{echo.pid}", f"{echo.pid}:{flow['fd']}", f"{netns_pair.a.address}:7777"):
        code, out, _ = call("vmahybrid", "explain", socket_id)
        assert code == 0
        assert "no " not in {line.split()[0] + " " for line in out.splitlines()[1:]}, out


def test_vma_stats_counts_what_is_sent(service: Service, netns_pair: Sandbox, echo: Program, call: Call) -> None:
    _, out, _ = call("vma_stats", "-p", str(echo.pid), "--json", "-F", "-c", "2")
    readings = [json.loads(line) for line in out.splitlines()]
    first, second = (reading["sockets"][0]["counters"] for reading in readings)
    assert second["rx_packets"] > first["rx_packets"] > 0
    assert second["rx_bytes"] - first["rx_bytes"] == 100 * (second["rx_packets"] - first["rx_packets"])
    assert second["rx_os_packets"] == first["rx_os_packets"]
    _, out, _ = call("vma_stats", "-p", str(echo.pid), "-F", "-d2", "-c1", "-i1", "--json")
    rate = json.loads(out)["sockets"][0]["counters"]["rx_packets"]
    assert 50 < rate < 1100  # the client sleeps a millisecond between two
    for view in "12345":
        code, out, err = call("vma_stats", "-p", str(echo.pid), "-F", "--once", "-v", view)
        assert (code, err) == (0, "")
        assert out
        if view == "3":
            shown = re.search(r"^\tRING_ETH=\[0\]\nBackend: +verbs sv_va\n", out, re.MULTILINE)
            assert bool(shown) is service.softverbs, out
            assert "\tCQ=[0]\n" in out and "\tBUFFER_POOL(RX)=[0]\n" in out


def test_the_ring_s_counters_by_the_api(service: Service, echo: Program) -> None:
    with Client(service.rundir / "api.sock") as client:
        (reading,) = [reading for reading in client.get("v1", "stats") if reading["process"]["pid"] == echo.pid]
    (ring,) = reading["rings"]
    stats = ring["stats"]
    assert stats["rx_packets"] > 0 and stats["pool_rx_free"] > 0
    assert stats["rx_tagged"] == stats["rx_hw_csum"] == (stats["rx_packets"] if service.softverbs else 0)


def test_zero(service: Service, netns_pair: Sandbox, echo: Program, call: Call) -> None:
    def received() -> int:
        out = call("vma_stats", "-p", str(echo.pid), "--json", "-F", "--once")[1]
        return int(json.loads(out)["sockets"][0]["counters"]["rx_packets"])

    deadline = time.monotonic() + 10
    while (before := received()) < 500:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    call("vma_stats", "-p", str(echo.pid), "-z", "-F", "--once")
    time.sleep(0.05)
    assert received() < before


def test_a_rule_sends_the_flow_home(service: Service, netns_pair: Sandbox, echo: Program, call: Call) -> None:
    local = f"{netns_pair.a.address}:7777"

    def action() -> str:
        flows = json.loads(call("vmahybrid", "flows", "--json")[1])["flows"]
        return next((flow["action"] for flow in flows if flow["local"] == local), "none")

    code, out, err = call("vmahybrid", "flows", "add", "kernel", "*:7777", "--json")
    assert (code, err) == (0, ""), out
    rule = json.loads(out)["flows"][0]["flow_id"]
    deadline = time.monotonic() + 5
    while action() == "ring":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    code, out, err = call("vmahybrid", "explain", local)
    assert (code, err) == (0, "")
    (step,) = re.findall(r"^  no  rule +(.*)$", out, re.M)  # once, and by its number
    assert step.startswith(f"rule {rule} of the operator: kernel udp *:7777 *:*")
    assert call("vmahybrid", "flows", "delete", str(rule))[0] == 0
    assert echo.running


def test_one_that_has_sent_is_home_before_it_sends_again(service: Service, netns_pair: Sandbox, call: Call) -> None:
    run = run_words(*(["--softverbs"] if service.softverbs else []), "--", sys.executable, "-c")
    ends = [netns_pair.a.address, netns_pair.b.address]
    program = netns_pair.start(netns_pair.a, [*run, SENDS, *ends], env=service.env)
    try:
        program.wait_for("sent")

        def row() -> str:
            rows = call("vma_stats", "-F", "-v", "5", "-p", str(program.pid), "--once")[1].splitlines()
            return next(row for row in rows if f"{ends[0]}:7778" in row)

        until(lambda: "Yes" in row())
        begun = time.monotonic()
        assert call("vmahybrid", "home", str(program.pid))[0] == 0
        assert time.monotonic() - begun < 2
        assert "Yes" not in row()
    finally:
        program.stop()


def test_metrics_of_a_running_service(service: Service, netns_pair: Sandbox, echo: Program) -> None:
    import http.client

    from vmahybrid.cli.client import _UnixConnection

    connection = _UnixConnection(service.rundir / "api.sock")
    connection.request("GET", "/metrics")
    response: http.client.HTTPResponse = connection.getresponse()
    families = {family.name: family for family in text_string_to_metric_families(response.read().decode())}
    connection.close()
    assert families["vmahybrid_socket_rx_packets"].samples[0].value > 0
    assert sum(sample.value for sample in families["vmahybrid_rings"].samples) == 2


def test_the_api_has_the_fields_of_the_fake(service: Service, echo: Program) -> None:
    """What the unit tests rest on: the fake and the service say the same things."""
    with Client(service.rundir / "api.sock") as client:
        status = client.get("v1", "status")
        assert set(status["interfaces"][0]) == set(FakeView().interface_list[0].__slots__)
        assert set(status["flows"][0]) == set(FakeView().flow_list[0].__slots__)
        (reading,) = [reading for reading in client.get("v1", "stats") if reading["process"]["pid"] == echo.pid]
        assert set(reading["sockets"][0]) == set(FakeView().sockets()[0].__slots__)
