"""View 3: a block per socket, per select, poll and epoll set, per CQ, per ring, and for the two buffer pools.

Lines and labels of libvma 9.8.84. What libvma counts per completion queue and what per ring comes from the same
AF_XDP ring here. A line is left out where nothing of it happened, as libvma does.
"""

from collections.abc import Iterator
from typing import Any

from vmahybrid.vma_stats.delta import Reading
from vmahybrid.vma_stats.tables import KB, iomux_active, iomux_name, poll_percent

EDGE = "=" * 54
UNBOUND = ("0.0.0.0:*", "[::]:*")


def socket_block(sock: dict[str, Any], post: str) -> Iterator[str]:
    yield EDGE
    yield f"\tFd=[{sock['fd']}]"
    yield _kind(sock)
    if sock["local"] not in UNBOUND:
        yield f"- Local Address   = [{sock['local']}]"
    if sock["remote"] not in UNBOUND:
        yield f"- Foreign Address = [{sock['remote']}]"
    for group in sock["groups"]:
        yield f"- Member of = [{group}]"
    if sock["thread_rx"] or sock["thread_tx"]:
        yield f"- Thread Id Rx: {sock['thread_rx']:>5}, Tx: {sock['thread_tx']:>5}"
    active = [*_transmit(sock["counters"], post), *_receive(sock["counters"], post)]
    yield from active
    yield from _changes(sock["counters"])
    if not active:
        yield "Rx and Tx where not active"


def _kind(sock: dict[str, Any]) -> str:
    text = f"- {sock['proto'].upper()}, {'Blocked' if sock['blocking'] else 'Non-blocked'}"
    if sock["proto"] == "udp":
        text += f", MC Loop {'Enabled ' if sock['mc_loop'] else 'Disabled'}"
        if sock["mc_if"]:
            text += f", MC IF = [{sock['mc_if']}]"
    return text


def _path(label: str, c: dict[str, int], prefix: str, post: str) -> Iterator[str]:
    size, packets, eagain, errors = (c[f"{prefix}_{name}"] for name in ("bytes", "packets", "eagain", "errors"))
    if size or packets or eagain or errors:
        yield f"{label}: {size // KB} / {packets} / {eagain} / {errors} [kilobytes/packets/eagains/errors]{post}"


def _transmit(c: dict[str, int], post: str) -> Iterator[str]:
    yield from _path("Tx Offload", c, "tx", post)
    yield from _path("Tx OS info", c, "tx_os", post)
    if c["tx_dummy"]:
        yield f"Tx Dummy messages : {c['tx_dummy']}"


def _receive(c: dict[str, int], post: str) -> Iterator[str]:
    yield from _path("Rx Offload", c, "rx", post)
    yield from _path("Rx OS info", c, "rx_os", post)
    if c["rx_packets"] or c["rx_ready_packets"]:
        yield (
            f"Rx byte: cur {c['rx_ready_bytes']} / max {c['rx_ready_bytes_max']} / "
            f"dropped{post} {c['rx_drop_bytes']} / limit {c['rx_limit']}"
        )
        yield (
            f"Rx pkt : cur {c['rx_ready_packets']} / max {c['rx_ready_packets_max']} / "
            f"dropped{post} {c['rx_drop_packets']}"
        )
    if c["rx_zcopy_packets"]:
        yield f"Rx zero copy buffers: cur {c['rx_zcopy_packets']}"
    miss, hit = c["rx_poll_miss"], c["rx_poll_hit"]
    if miss or hit:
        yield f"Rx poll: {miss} / {hit} ({poll_percent(hit, miss):.2f}%) [miss/hit]"


def _changes(c: dict[str, int]) -> Iterator[str]:
    if c["rx_migrations"] or c["tx_migrations"]:
        yield f"Ring migrations Rx: {c['rx_migrations']}, Tx: {c['tx_migrations']}"
    if c["retransmits"]:
        yield f"Retransmissions: {c['retransmits']}"


def iomux_block(iomux: dict[str, Any], post: str) -> Iterator[str]:
    c = iomux["counters"]
    if not iomux_active(c):
        return
    yield EDGE
    yield f"\t{iomux_name(iomux)}"
    yield f"Polling CPU{post}:{c['polling_percent']}%"
    if iomux["thread"]:
        yield f"- Thread Id: {iomux['thread']:>5}"
    if c["os_rx_ready"] or c["rx_ready"]:
        yield f"Rx fds ready: {c['os_rx_ready']} / {c['rx_ready']} [os/offload]{post}"
    miss, hit = c["poll_miss"], c["poll_hit"]
    if miss or hit:
        yield f"Polls [miss/hit]{post}: {miss} / {hit} ({poll_percent(hit, miss):.2f}%)"
    if c["timeouts"]:
        yield f"Timeouts{post}: {c['timeouts']}"
    if c["errors"]:
        yield f"Errors{post}: {c['errors']}"
    yield EDGE


def _line(label: str, value: object) -> str:
    return f"{label:<20} {value}"


def _dropped_before(kernel: dict[str, int]) -> int:
    """Frames for which the ring had no room: the kernel dropped them before the program could see them."""
    return kernel.get("rx_dropped", 0) + kernel.get("rx_ring_full", 0)


def cq_block(number: int, ring: dict[str, Any], post: str) -> Iterator[str]:
    """Dropped: frames that no socket got, whether or not they came as far as the ring."""
    c, before = ring["stats"], _dropped_before(ring["kernel"])
    yield EDGE
    yield f"\tCQ=[{number}]"
    yield f"{_line('Packets dropped:', c['rx_no_socket'] + c['rx_bad'] + c['rx_dropped'] + before)} {post:<3}"
    if before:
        yield f"HW RX Packets dropped: {before} {post:<3}"
    yield _line("Packets queue len:", 0)  # what is drained is its socket's at once
    yield _line("Drained max:", c["drained_max"])
    yield _line("Buffer pool size:", c["pool_rx_free"])


def ring_block(number: int, ring: dict[str, Any], post: str) -> Iterator[str]:
    c = ring["stats"]
    yield EDGE
    yield f"\tRING_ETH=[{number}]"
    if ring["backend"] == "verbs":
        yield _line("Backend:", f"verbs {ring['device']}".rstrip())
    for label, way in (("Tx Offload:", "tx"), ("Rx Offload:", "rx")):
        yield f"{label:<20} {c[way + '_bytes'] // KB} / {c[way + '_packets']} [kilobytes/packets] {post:<3}"
    if c["tx_tcp_resent"]:
        yield f"{_line('Retransmissions:', c['tx_tcp_resent'])} {post:<3}"
    if c["rx_tcp_kept"] or c["rx_tcp_copied"]:
        yield f"{'Rx TCP zero copy:':<20} {c['rx_tcp_kept']} / {c['rx_tcp_copied']} [frames kept/copied] {post:<3}"
    if c["rx_tcp_merged"]:
        yield _line("Rx TCP merged:", c["rx_tcp_merged"])
    requested, received = c["interrupts_requested"], c["interrupts_received"]
    if requested or received:
        yield f"{'Interrupts:':<20} {requested} / {received} [requests/received] {post:<3}"
    if c["mod_count"] or c["mod_usec"]:
        yield f"{'Moderation:':<20} {c['mod_count']} / {c['mod_usec']} [frames/usec period] {post:<3}"
    if c["dm_size"]:
        yield _line("Dev Mem Alloc:", c["dm_size"])
        yield (f"{'Dev Mem Stats:':<20} {c['dm_bytes'] // KB} / {c['dm_packets']} / {c['dm_full']} "
               f"[kilobytes/packets/oob] {post:<3}")


def pool_blocks(rings: list[dict[str, Any]]) -> Iterator[str]:
    """One pool per direction, summed over the rings: each has memory of its own, or one counts what they share."""
    for number, way in enumerate(("rx", "tx") if rings else ()):
        yield EDGE
        yield f"\tBUFFER_POOL({way.upper()})=[{number}]"
        errors = sum(ring["stats"][f"pool_{way}_empty"] for ring in rings)
        if way == "rx":  # packets that found no frame posted
            errors += sum(ring["kernel"].get("rx_fill_ring_empty_descs", 0) for ring in rings)
        yield _line("Size:", sum(ring["stats"][f"pool_{way}_free"] for ring in rings))
        yield _line("No buffers error:", errors)


def full_view(reading: Reading, sockets: list[dict[str, Any]], deltas: bool) -> Iterator[str]:
    post = "/s" if deltas else ""
    rings = reading["rings"]
    for sock in sockets:
        yield from socket_block(sock, post)
    for iomux in reading["iomux"]:
        yield from iomux_block(iomux, post)
    for number, ring in enumerate(rings):
        yield from cq_block(number, ring, post)
    yield EDGE
    for number, ring in enumerate(rings):
        yield from ring_block(number, ring, post)
    yield EDGE
    yield from pool_blocks(rings)
    yield EDGE
