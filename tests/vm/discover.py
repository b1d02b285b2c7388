"""What vmahybrid finds in the network namespace that this is run in, as JSON."""

import dataclasses
import json
import socket

from vmahybrid.verbs import caps, discovery

found = discovery.scan_here()
print(json.dumps({
    "listed": caps.devices(),
    "links": [dataclasses.asdict(link) for link in found],
    "device_of": {name: discovery.device_of(name, caps.devices(), found) for _, name in socket.if_nameindex()},
    "capabilities": {link.device: dataclasses.asdict(caps.in_child(link.device)) for link in found},
}))
