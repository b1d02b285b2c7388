"""Metrics: names, labels, base units, and totals that never fall."""

import asyncio

import httpx
import pytest
from fake_view import FakeView, flow, process, ring, sock
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from api import create_app
from api.metrics import Accumulator, ServiceCollector
from vmahybrid.service.view import ProcessStats

FORBIDDEN = {"pid", "fd", "port", "peer", "remote", "local", "comm", "address"}


def scrape(view: FakeView) -> dict[str, Metric]:
    app = create_app(view, version="0.1.0")

    async def run() -> str:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://service") as client:
            return (await client.get("/metrics")).text

    return {family.name: family for family in text_string_to_metric_families(asyncio.run(run()))}


def value(families: dict[str, Metric], name: str, **labels: str) -> float:
    (sample,) = [s for s in families[name].samples if labels.items() <= s.labels.items()]
    return sample.value


def test_what_is_exported() -> None:
    found = scrape(FakeView())
    assert value(found, "vmahybrid_ready") == 1
    assert value(found, "vmahybrid_build_info", version="0.1.0") == 1
    assert value(found, "vmahybrid_xdp_packets", interface="veth0", netns="host", out="redirect") == 10
    assert value(found, "vmahybrid_events", event="grants") == 2
    assert value(found, "vmahybrid_reasons", reason="fork") == 1
    assert value(found, "vmahybrid_flows", action="ring", kind="3-tuple") == 1
    assert value(found, "vmahybrid_flow_bytes", action="ring") == 10600
    assert value(found, "vmahybrid_sockets", path="ring", proto="udp", reason="none") == 1
    assert value(found, "vmahybrid_socket_rx_packets") == 5
    assert value(found, "vmahybrid_rings", kind="direct") == 1
    assert value(found, "vmahybrid_interface_info", mode="generic", reason="generic-virtual") == 1


def test_labels_and_units() -> None:
    for family in scrape(FakeView()).values():
        assert family.name.startswith("vmahybrid_")
        assert family.documentation, family.name
        assert not any(unit in family.name for unit in ("kbyte", "_ms", "milli", "micro", "percent")), family.name
        for sample in family.samples:
            assert not FORBIDDEN & sample.labels.keys(), sample
            assert sample.name.endswith("_total") == (family.type == "counter"), sample


def test_totals_survive_their_sockets() -> None:
    view = FakeView()
    collector = ServiceCollector(view, "0")

    def total() -> float:
        (family,) = [f for f in collector.collect() if f.name == "vmahybrid_socket_rx_packets"]
        return family.samples[0].value

    def show(*sockets: tuple[int, int]) -> None:
        socks = [sock(fd, counters={"rx_packets": n}, inode=fd) for fd, n in sockets]
        view.readings[4711] = [ProcessStats(process(), 1.0, socks, [], [ring()])]

    show((3, 100))
    assert total() == 100
    show((3, 150), (4, 10))
    assert total() == 160
    show((4, 20))  # the first is closed
    assert total() == 170
    show((4, 5))  # vma_stats -z
    assert total() == 175
    view.readings.clear()
    assert total() == 175


def test_flow_totals_survive_their_flows() -> None:
    view = FakeView()
    collector = ServiceCollector(view, "0")
    view.flow_list = [flow(1, packets=7), flow(2, packets=3)]
    list(collector.collect())
    view.flow_list = [flow(2, packets=4)]
    (family,) = [f for f in collector.collect() if f.name == "vmahybrid_flow_packets"]
    assert family.samples[0].value == 11


def test_accumulator_keeps_no_dead_source() -> None:
    accumulator = Accumulator()
    accumulator.update((n, ("x",), 1) for n in range(1000))
    assert accumulator.update([]) == {("x",): 1000}
    assert accumulator._last == {}


@pytest.mark.parametrize("name", ["veth0", 'we"ird\\\n'])
def test_label_values_are_escaped(name: str) -> None:
    view = FakeView()
    view.interface_list[0].name = name
    assert value(scrape(view), "vmahybrid_interface_up", interface=name) == 1
