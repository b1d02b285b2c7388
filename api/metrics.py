"""The service as Prometheus metrics: base units, ``_total`` on counters, no pid, fd, port or peer in a label."""

from collections import Counter as Tally
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from vmahybrid.errors import NotFound
from vmahybrid.service.view import FlowView, InterfaceView, ProcessStats, ServiceView, StatusView
from vmahybrid.stats.counters import RING, SOCKET

PREFIX = "vmahybrid_"
PLACE = ["interface", "netns"]
Values = Mapping[Any, float]  # by label values; Mapping is invariant in its key, so tuples of one length do not fit


class Accumulator:
    """Totals that outlive their sources: a sum over living sockets would fall whenever one is closed.

    A value below the last one of the same source means that it was zeroed. What a source counts between the last
    scrape and its end is lost.
    """

    def __init__(self) -> None:
        self._last: dict[Hashable, int] = {}
        self._totals: Tally[tuple[str, ...]] = Tally()

    def update(self, values: Iterable[tuple[Hashable, tuple[str, ...], int]]) -> Mapping[tuple[str, ...], int]:
        """``values``: source, label values, present count. Returns the totals by label values."""
        seen: dict[Hashable, int] = {}
        for source, labels, value in values:
            before = self._last.get(source, 0)
            self._totals[labels] += value - before if value >= before else value
            seen[source] = value
        self._last = seen
        return self._totals


class ServiceCollector(Collector):
    """Reads the view at each scrape; scrapes come one at a time, from the event loop."""

    def __init__(self, view: ServiceView, version: str) -> None:
        self._view, self._version = view, version
        self._flows, self._sockets, self._rings = Accumulator(), Accumulator(), Accumulator()
        self._kernel, self._guard = Accumulator(), Accumulator()

    def describe(self) -> list[Metric]:
        """Nothing at registration: the view is not asked before the first scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        status = self._view.status()
        stats = self._readings(status)
        yield from self._service(status)
        yield from _interfaces(status.interfaces)
        yield from self._flow_metrics(status.flows)
        yield from self._socket_metrics(stats)
        yield from self._ring_metrics(stats)

    def _readings(self, status: StatusView) -> list[ProcessStats]:
        readings = []
        for process in status.processes:
            try:
                readings.append(self._view.stats(process.pid))
            except NotFound:
                continue
        return readings

    def _service(self, status: StatusView) -> Iterator[Metric]:
        yield InfoMetricFamily(PREFIX + "build", "Version of the service", {"version": self._version})
        yield _gauge("start_time_seconds", "When the service started, since the epoch", status.started)
        yield _gauge("ready", "1 if programs may be offloaded", int(status.ready))
        yield _gauge("health_problems", "Sentences of /v1/status health", len(status.health))
        yield _gauge("processes", "Processes under the shim", len(status.processes))
        yield _counter(
            "events", "Events counted by the service", ["event"],
            {(name.removesuffix("_total"),): value for name, value in status.counters.items()},
        )  # fmt: skip
        yield _counter(
            "reasons", "Refusals and homecomings by reason", ["reason"],
            {(reason,): value for reason, value in status.reasons.items()},
        )  # fmt: skip

    def _flow_metrics(self, flows: list[FlowView]) -> Iterator[Metric]:
        present = Tally((flow.kind, flow.action, flow.source) for flow in flows)
        yield _gauges("flows", "Rows of the steering table", ["kind", "action", "source"], present)
        totals = self._flows.update(
            ((flow.flow_id, name), (name, flow.action), getattr(flow, name))
            for flow in flows for name in ("packets", "bytes")
        )  # fmt: skip
        for name in ("packets", "bytes"):
            values = {labels[1:]: value for labels, value in totals.items() if labels[0] == name}
            yield _counter(f"flow_{name}", f"{name.capitalize()} that hit steering rules", ["action"], values)

    def _socket_metrics(self, stats: list[ProcessStats]) -> Iterator[Metric]:
        sockets = [sock for reading in stats for sock in reading.sockets]
        present = Tally((sock.proto, "ring" if sock.offloaded else "kernel", sock.reason) for sock in sockets)
        yield _gauges("sockets", "Sockets under the shim, and why not on a ring", ["proto", "path", "reason"], present)
        kept = [counter for counter in SOCKET if counter.kind == "counter"]
        totals = self._sockets.update(
            ((sock.socket_id, sock.inode, counter.name), (counter.name,), sock.counters.get(counter.name, 0))
            for sock in sockets
            for counter in kept
        )
        for counter in kept:
            value = totals.get((counter.name,), 0)
            yield _counter(f"socket_{counter.name}", f"Sockets: {counter.text}", [], {(): value})

    def _ring_metrics(self, stats: list[ProcessStats]) -> Iterator[Metric]:
        rings = [ring for reading in stats for ring in reading.rings]
        present = Tally((ring.interface, ring.netns, ring.kind, ring.mode) for ring in rings)
        yield _gauges("rings", "Rings granted", [*PLACE, "kind", "mode"], present)
        kept = [counter for counter in RING if counter.kind == "counter"]
        totals = self._rings.update(
            ((ring.pid, ring.ring_id, counter.name), (counter.name, ring.interface, ring.netns),
             ring.stats.get(counter.name, 0))
            for ring in rings for counter in kept
        )  # fmt: skip
        for counter in kept:
            values = {labels[1:]: value for labels, value in totals.items() if labels[0] == counter.name}
            yield _counter(f"ring_{counter.name}", f"Rings: {counter.text}", PLACE, values)
        for name, label, accumulator, text in (
            ("kernel", "statistic", self._kernel, "XDP_STATISTICS of the kernel"),
            ("guard", "out", self._guard, "Packets by way out of the guard program of ring veths"),
        ):
            by_name = accumulator.update(
                ((ring.pid, ring.ring_id, key), (ring.interface, ring.netns, key), value)
                for ring in rings for key, value in getattr(ring, name).items()
            )  # fmt: skip
            yield _counter(f"ring_{name}_packets", text, [*PLACE, label], by_name)


def _interfaces(interfaces: list[InterfaceView]) -> Iterator[Metric]:
    labels = [*PLACE, "backend", "mode", "driver", "reason"]
    info = {(i.name, i.netns, i.backend, i.mode, i.driver, i.reason): 1 for i in interfaces}
    yield _gauges("interface_info", "Served interfaces: backend, mode obtained, and why not better", labels, info)
    for name, text, value in (
        ("interface_up", "1 if up with carrier", lambda i: int(i.up)),
        ("interface_attached", "1 if our XDP program is attached", lambda i: int(i.attached)),
        ("interface_mtu_bytes", "Largest packet without the link header", lambda i: i.mtu),
        ("interface_queues", "Receive queues", lambda i: i.queues),
        ("interface_rules", "Steering rules in the XDP maps", lambda i: i.rules),
    ):
        yield _gauges(name, text, PLACE, {(i.name, i.netns): value(i) for i in interfaces})
    outs = {(i.name, i.netns, out): count for i in interfaces for out, count in i.outs.items()}
    yield _counter("xdp_packets", "Packets by way out of the XDP program", [*PLACE, "out"], outs)


def _gauge(name: str, text: str, value: float) -> Metric:
    return _gauges(name, text, [], {(): value})


def _gauges(name: str, text: str, labels: list[str], values: Values) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, text, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family


def _counter(name: str, text: str, labels: list[str], values: Values) -> Metric:
    family = CounterMetricFamily(PREFIX + name, text, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family
