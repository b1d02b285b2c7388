"""Views 1 and 2: two lines per socket, one per select, poll and epoll set.

The columns are those of libvma 9.8.84; a value that is wider than its column widens it.
"""

from typing import Any

KB = 1024
SCREEN_LINES = 24
SEPARATOR = "-" * 79
_OS = {False: "--------- total os ----------", True: "---------- os ---------"}
_BASIC = {False: "------------ total offloaded -------------", True: "--------------- offloaded ----------------"}
_EXTRA = {
    False: "----------------------- total offloaded -------------------------",
    True: "---------------------------- offloaded --------------------------",
}
_QUEUE = {False: "---- queue pkt -----", True: "----- queue pkt ------"}


def poll_percent(hit: int, miss: int) -> float:
    return hit / (hit + miss) * 100 if hit else 0.0


def _columns(deltas: bool) -> list[str]:
    names = ["pkt", "Kbyte", "eagain", "error"]
    return [f"{name}/s" for name in names] if deltas else names


def basic_header(deltas: bool) -> list[str]:
    pkt, kbyte, eagain, error = _columns(deltas)
    return [
        f" {'fd':<7} {_BASIC[deltas]:>42} {_OS[deltas]:>31}",
        f" {' ':<7} {pkt:>10} {kbyte:>7} {eagain:>8} {error:>7} {'poll%':>6} "
        f"{pkt:>7} {kbyte:>7} {eagain:>7} {error:>7}",
    ]


def extra_header(deltas: bool) -> list[str]:
    pkt, kbyte, eagain, error = _columns(deltas)
    drop = "drop/s" if deltas else "drop"
    return [
        f" {'fd':<7} {_EXTRA[deltas]:>65} {_OS[deltas]:>31}",
        f" {' ':<7} {pkt:>10} {kbyte:>7} {eagain:>8} {error:>7} {'poll%':>6}{_QUEUE[deltas]:>23} "
        f"{pkt:>7} {kbyte:>7} {eagain:>7} {error:>7}",
        f" {' ':>50} {'cur':>6}  {'max':>6}  {drop:>6} ",
    ]


def _offloaded(c: dict[str, int], way: str) -> str:
    return f"{c[way + '_packets']:>10} {c[way + '_bytes'] // KB:>7} {c[way + '_eagain']:>8} {c[way + '_errors']:>7}"


def _os(c: dict[str, int], way: str) -> str:
    return (
        f"{c[way + '_os_packets']:>7} {c[way + '_os_bytes'] // KB:>7} "
        f"{c[way + '_os_eagain']:>7} {c[way + '_os_errors']:>7}"
    )


def basic_rows(sock: dict[str, Any]) -> list[str]:
    c = sock["counters"]
    percent = poll_percent(c["rx_poll_hit"], c["rx_poll_miss"])
    return [
        f" {sock['fd']:<3} {'Rx:':<3} {_offloaded(c, 'rx')} {percent:>6.1f} {_os(c, 'rx')}",
        f" {' ':<3} {'Tx:':<3} {_offloaded(c, 'tx')} {' ':<6} {_os(c, 'tx')}",
    ]


def extra_rows(sock: dict[str, Any]) -> list[str]:
    c = sock["counters"]
    percent = poll_percent(c["rx_poll_hit"], c["rx_poll_miss"])
    queue = f"{c['rx_ready_packets']:>6}  {c['rx_ready_packets_max']:>6}  {c['rx_drop_packets']:>6}"
    return [
        f" {sock['fd']:<3} {'Rx:':<3} {_offloaded(c, 'rx')} {percent:>6.1f} {queue} {_os(c, 'rx')}",
        f" {' ':<3} {'Tx:':<3} {_offloaded(c, 'tx')} {' ':>29} {_os(c, 'tx')}",
    ]


def iomux_name(iomux: dict[str, Any]) -> str:
    return f"epoll[{iomux['epfd']}]" if iomux["kind"] == "epoll" else str(iomux["kind"])


def iomux_active(c: dict[str, int]) -> bool:
    return any(c[name] for name in ("os_rx_ready", "rx_ready", "timeouts", "errors", "poll_miss", "poll_hit"))


def iomux_row(iomux: dict[str, Any], deltas: bool) -> str:
    c = iomux["counters"]
    rate = "/s" if deltas else ""
    percent = poll_percent(c["poll_hit"], c["poll_miss"])
    return (
        f"{iomux_name(iomux):<8}{rate:<2} {'Rx Ready:':<9}{c['os_rx_ready']}/{c['rx_ready']} {'[os/offload]':<12} "
        f"{'Timeouts:':<9}{c['timeouts']:<5} {'Errors:':<7}{c['errors']:<4} "
        f"{'Poll:':<5}{percent:<2.2f}{'%':<3} {'Polling CPU:':<5}{c['polling_percent']}%"
    )
