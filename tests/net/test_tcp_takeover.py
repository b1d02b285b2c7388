"""A server is replaced as many are: the old process closes its listener and goes on with its connections, and the next
one listens at the same port meanwhile."""

from __future__ import annotations

import pytest
from net.service_lab import Api, until
from net.test_tcp_long_frames import why
from net.test_tcp_seen import service_of_tcp  # noqa: F401
from net.test_tcp_shim import ShimPeer, on_ring

from vmahybrid.bench.served import Service

pytestmark = pytest.mark.root

SOON = 5.0


def listens_on_ring(service: Service, program: ShimPeer) -> bool:
    program.do("waits")     # it is tried again when the program waits for connections
    sockets = Api(service).call("GET", "/v1/sockets")[1]
    return any(s["pid"] == program.pid and s["state"] == "LISTEN" and s["offloaded"] for s in sockets)


def test_the_next_process_listens(service: Service) -> None:
    a_side, b_side = service.sandbox.sides
    with ShimPeer(service, b_side, "offload") as old, \
            ShimPeer(service, b_side, "offload", VMA_HYBRID_TCP_BUDGET="100", VMA_HYBRID_TCP_PAYS="0") as new, \
            ShimPeer(service, a_side, "") as a, ShimPeer(service, a_side, "") as c:
        port = old.do("listen", address=b_side.address)
        old.do("waits")
        a.do("connect", address=b_side.address, port=port)
        old.do("accept")
        old.do("echo")
        assert a.do("ask", count=3, size=100) == ""
        on_ring(service, old)
        old.do("listen_no_more")
        assert new.do("listen", address=b_side.address, port=port) == port
        assert not listens_on_ring(service, new), "the connection would come there"
        assert "port-shared" in service.ask("explain", str(new.pid))
        c.do("connect", address=b_side.address, port=port)
        new.do("accept")
        new.do("echo")
        for client in (c, a, c):
            assert client.do("ask", count=20, size=1000) == "", why(service, old)
        on_ring(service, old, new)
        a.do("close")
        assert old.do("echo_ended")
        old.do("close")
        until(lambda: listens_on_ring(service, new), SOON, lambda: f"{why(service, new)} {Api(service).socket_flows()}")
        assert c.do("ask", count=20, size=1000) == ""
        c.do("close")
        assert new.do("echo_ended")
