"""Two programs that spin for ever, on one processor, waiting for each other."""

import signal
from pathlib import Path

import pytest

from vmahybrid.bench import sockperf
from vmahybrid.bench.ways import OFFLOAD, places

pytestmark = pytest.mark.apps
SECONDS = 2
CPU = 0
# Where nobody gives it away a round trip takes two time slices, several milliseconds each: some hundreds in that time.
ENOUGH = 2000


@pytest.mark.parametrize("protocol", ["udp", "tcp"])
@pytest.mark.parametrize("calls", ["recv", "epoll"])
def test_spinners_give_the_processor_to_each_other(tmp_path: Path, protocol: str, calls: str) -> None:
    feed = tmp_path / "feed"
    with places((OFFLOAD,)) as found:
        place = found[OFFLOAD.name]
        a, b = place.sandbox.sides
        feed.write_text(f"{protocol[0].upper()}:{b.address}:{sockperf.PORT}\n")
        target = ["-i", b.address, "-p", str(sockperf.PORT), *(["--tcp"] if protocol == "tcp" else [])]
        if calls == "epoll":
            target = ["-f", str(feed), "-F", "epoll"]
        server = place.start(b, ["sockperf", "server", *target], CPU)
        try:
            sockperf.wait_bound(b, sockperf.PORT, protocol)
            client = place.start(a, ["sockperf", "ping-pong", *target, "-t", str(SECONDS)], CPU)
            latency = sockperf.parse_latency(client.program.result(SECONDS + 30))
        finally:
            server.program.stop(signal.SIGINT)
    assert latency.samples > ENOUGH
