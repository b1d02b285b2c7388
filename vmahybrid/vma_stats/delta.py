"""The difference of two readings, per second of the time that really passed between them."""

from typing import Any

from vmahybrid.stats.counters import IOMUX, RING, SOCKET, Counter

Reading = dict[str, Any]  # a body of GET /v1/stats/{pid}


def delta(before: Reading, now: Reading, interval: float) -> Reading:
    """``now`` with counters as rates, rounded; gauges stay. ``interval`` counts where the readings have one time."""
    seconds = now["read_at"] - before["read_at"]
    if seconds <= 0:
        seconds = interval
    old_sockets = {(s["fd"], s["inode"]): s["counters"] for s in before["sockets"]}
    old_iomux = {(i["kind"], i["epfd"]): i["counters"] for i in before["iomux"]}
    old_rings = {r["ring_id"]: r for r in before["rings"]}
    return now | {
        "sockets": [
            s | {"counters": _rates(SOCKET, old_sockets.get((s["fd"], s["inode"]), {}), s["counters"], seconds)}
            for s in now["sockets"]
        ],
        "iomux": [
            i | {"counters": _rates(IOMUX, old_iomux.get((i["kind"], i["epfd"]), {}), i["counters"], seconds)}
            for i in now["iomux"]
        ],
        "rings": [
            r | {
                "stats": _rates(RING, old_rings.get(r["ring_id"], {}).get("stats", {}), r["stats"], seconds),
                "kernel": _kernel(old_rings.get(r["ring_id"], {}).get("kernel", {}), r["kernel"], seconds),
            }
            for r in now["rings"]
        ],
    }


def _kernel(before: dict[str, int], now: dict[str, int], seconds: float) -> dict[str, int]:
    return {name: _rate(before.get(name, 0), value, seconds) for name, value in now.items()}


def _rates(
    table: tuple[Counter, ...], before: dict[str, int], now: dict[str, int], seconds: float
) -> dict[str, int]:
    rates = dict(now)
    for counter in table:
        if counter.kind == "counter":
            rates[counter.name] = _rate(before.get(counter.name, 0), now[counter.name], seconds)
    return rates


def _rate(old: int, new: int, seconds: float) -> int:
    # Less than before: zeroed in between, so all of it is new.
    return round((new - old if new >= old else new) / seconds)
