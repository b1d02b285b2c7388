"""What runs inside the guest of test_bonds.py: as guest.py, with bonds of the kernel's own on both ends of veths."""

from __future__ import annotations

import functools
import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import lab

PAIRS = 2
# each bond with its options
MODES = {
    "bond1": ("mode", "active-backup"),
    "bond2": ("mode", "802.3ad", "lacp_rate", "fast"),
    "bond3": ("mode", "balance-rr"),
    "bond4": ("mode", "active-backup", "fail_over_mac", "active"),
}
# VLAN interfaces, of the bonds whose address stays and whose goes with the active slave
VLANS = {"bond1.11": "bond1", "bond4.10": "bond4"}
LINKS = tuple(lab.Link(name, f"10.88.{number}.1", name, f"10.88.{number}.2", "", "auto")
              for number, name in enumerate((*MODES, *VLANS), 1))
_CARRIER_S = 30


def _ip(*argv: str) -> None:
    done = subprocess.run(["ip", *argv], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(argv)}: {done.stderr}")


def _bond(name: str, end: str, *namespace: str) -> None:
    _ip(*namespace, "link", "add", name, "type", "bond", *MODES[name], "miimon", "100")
    for number in range(PAIRS):
        slave = f"{end}{name[4:]}{number}"
        _ip(*namespace, "link", "set", slave, "down")
        _ip(*namespace, "link", "set", slave, "master", name)
        _ip(*namespace, "link", "set", slave, "up")


def wire() -> dict[str, Any]:
    """Two veths per bond to the peer namespace, which has the same bonds; what the kernel says of them."""
    _ip("netns", "add", lab.PEER)
    peer = ("-n", lab.PEER)
    for name in MODES:
        for number in range(PAIRS):
            end = f"{name[4:]}{number}"
            _ip("link", "add", f"n{end}", "type", "veth", "peer", "name", f"p{end}", "netns", lab.PEER)
        _bond(name, "n")
        _bond(name, "p", *peer)
    for name, over in VLANS.items():
        for namespace in ((), peer):
            _ip(*namespace, "link", "add", "link", over, "name", name, "type", "vlan", "id", name.partition(".")[2])
    for link in LINKS:
        for namespace, address in (((), link.address), (peer, link.peer_address)):
            _ip(*namespace, "address", "add", f"{address}/24", "dev", link.device)
            _ip(*namespace, "link", "set", link.device, "up")
    deadline = time.monotonic() + _CARRIER_S
    while time.monotonic() < deadline and "Number of ports: 2" not in _state("bond2"):
        time.sleep(0.2)
    return {name: _state(name) for name in MODES}


def _state(bond: str) -> str:
    return Path(f"/proc/net/bonding/{bond}").read_text()


def _active() -> str:
    return Path("/sys/class/net/bond1/bonding/active_slave").read_text().strip()


def _peer_active() -> str:
    """The slave of the peer's bond1, whose driver looks at the link every 100 ms and sends into the void until then."""
    shown = subprocess.run(["ip", "-n", lab.PEER, "-j", "-d", "link", "show", "bond1"], capture_output=True, text=True)
    return str(json.loads(shown.stdout)[0]["linkinfo"]["info_data"].get("active_slave", ""))


def failover() -> dict[str, Any]:
    """Answers before the active slave goes down, after that, and when it is up again; on one socket all the while."""
    link = LINKS[0]

    def carried() -> list[Any]:
        return [flow for flow in lab.ask("/v1/status")["flows"] if flow["pid"] == pid]

    with tempfile.TemporaryFile("w+") as log, lab.server(link, lab.PORT, log) as pid:
        slaves, answered, flows = [_active()], [lab.exchange(link)], [carried()]
        _ip("link", "set", slaves[0], "down")
        deadline = time.monotonic() + _CARRIER_S
        while time.monotonic() < deadline and (_active() in ("", slaves[0]) or _peer_active()[1:] != _active()[1:]):
            time.sleep(0.05)
        slaves.append(_active())
        answered.append(lab.exchange(link))
        flows.append(carried())
        _ip("link", "set", slaves[0], "up")
        time.sleep(1)
        answered.append(lab.exchange(link))
        flows.append(carried())
        steps = lab.ask(f"/v1/sockets/{link.address}:{lab.PORT}/explain")["steps"]
        log.seek(0)
        return {"slaves": slaves, "answered": answered, "flows": flows, "explain": steps, "log": log.read()}


def below_a_vlan() -> dict[str, Any]:
    """A bond without a rule has no program; it gets one again while the VLAN interface above it has one."""
    bond, vlan = (next(link for link in LINKS if link.device == name) for name in ("bond1", "bond1.11"))

    def row(device: str) -> Any:
        return next(row for row in lab.ask("/v1/status")["interfaces"] if row["name"] == device)

    with tempfile.TemporaryFile("w+") as log, lab.server(vlan, lab.PORT, log) as pid:
        answered = [lab.exchange(vlan)]
        deadline = time.monotonic() + _CARRIER_S
        while time.monotonic() < deadline and row(bond.device)["attached"]:
            time.sleep(0.2)
        before = [row(link.device)["attached"] for link in (bond, vlan)]
        found = lab.echo(bond)
        answered += [found["answered"], lab.exchange(vlan)]
        after = [row(link.device)["attached"] for link in (bond, vlan)]
        carried = [flow for flow in lab.ask("/v1/status")["flows"] if flow["pid"] == pid]
    return {"answered": answered, "before": before, "after": after, "flows": [*found["flows"], *carried]}


def main() -> None:
    with lab.recording() as step:
        step(wire)
        with lab.Service(LINKS) as service:
            step(service.started, "service")
            step(failover)
            for link in LINKS:
                step(functools.partial(lab.echo, link), f"echo {link.device}")
            step(below_a_vlan)
        step(service.stopped, "stopped")


if __name__ == "__main__":
    main()
