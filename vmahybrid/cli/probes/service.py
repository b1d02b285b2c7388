"""The running service, as its API tells."""

import os
from collections.abc import Iterator

from vmahybrid.cli.paths import control_socket
from vmahybrid.cli.probes import Check
from vmahybrid.errors import ServiceUnreachable

TOPIC = "service"


def service() -> Iterator[Check]:
    from vmahybrid.cli.client import Client

    try:
        with Client() as client:
            status = client.get("v1", "status")
    except ServiceUnreachable as error:
        yield Check(TOPIC, "service", "warn", f"{error.what}: {error.why}", error.remedy.rpartition(": ")[2])
        return
    text = f"version {status['version']}, pid {status['pid']}, {'ready' if status['ready'] else 'not ready'}"
    yield Check(TOPIC, "service", "ok" if status["ready"] else "warn", text, "vmahybrid status")
    for sentence in status["health"]:
        yield Check(TOPIC, "health", "warn", sentence, "vmahybrid status")
    path = control_socket()
    if path.exists() and not os.access(path, os.W_OK):
        yield Check(TOPIC, "control socket", "warn", f"{path} may not be opened by this user: no rings",
                    "join its group, or set control.mode")  # fmt: skip


PROBES = (service,)
