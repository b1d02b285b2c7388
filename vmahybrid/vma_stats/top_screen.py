"""vma_stats --top: the state as lines of text for a screen of any size. No line is longer than the screen is wide."""

from collections.abc import Iterator
from textwrap import wrap
from typing import Any, Literal, NamedTuple

from vmahybrid.cli.output import short
from vmahybrid.printable import clean
from vmahybrid.vma_stats import full
from vmahybrid.vma_stats.tables import iomux_active, iomux_row, poll_percent
from vmahybrid.vma_stats.top_model import COLUMNS, HELP, Sock, Top, columns_for, is_counted

Look = Literal["plain", "bold", "dim", "reverse", "warn"]
HEAD = 3        # lines above the rows
DETAIL_MIN = 4  # lines of the pane, its title included


class Line(NamedTuple):
    text: str
    look: Look = "plain"


def screen(top: Top, width: int, height: int, clock: str) -> list[Line]:
    """At most ``height`` lines. Sets ``top.page``."""
    if top.help:
        lines = list(_help(top))
    else:
        rows = top.rows()
        lines = [*_head(top, rows, clock, width), *_body(top, rows, width, height - HEAD - 1)]
    lines = lines[: max(0, height - 1)]
    lines += [Line("")] * (height - 1 - len(lines))
    lines.append(_foot(top))
    return [Line(_fit(line.text, width), line.look) for line in lines[:height]]


def _fit(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"[: max(0, width)]


def _head(top: Top, rows: list[Sock], clock: str, width: int) -> Iterator[Line]:
    readings = top.shown()
    on_ring = sum(sock["offloaded"] for sock in rows)
    state = " paused," if top.paused else ""
    others = f", {top.uncounted()} not counted" if top.uncounted() else ""
    found = f", with {top.filter!r}" if top.filter else ""
    text = (f"vma_stats {clock},{state} every {top.interval} s: {len(readings)} programs, {len(rows)} sockets, "
            f"{on_ring} on rings{others}{found}")
    yield Line(text if len(text) <= width else text.removeprefix("vma_stats "), "bold")
    yield Line(top.message, "warn") if top.message else Line(_sums(rows, "" if top.totals else "/s"))


def _sums(rows: list[Sock], per: str) -> str:
    def total(*names: str) -> str:
        return short(sum(sock["counters"][name] for sock in rows for name in names))

    hit, miss = (sum(sock["counters"][f"rx_poll_{word}"] for sock in rows) for word in ("hit", "miss"))
    return (f"rx {total('rx_packets')}{per} {total('rx_bytes')}B{per}  tx {total('tx_packets')}{per} "
            f"{total('tx_bytes')}B{per}  os {total('rx_os_packets', 'tx_os_packets')}{per}  "
            f"err {total('rx_errors', 'tx_errors', 'rx_os_errors', 'tx_os_errors')}{per}  "
            f"drop {total('rx_drop_packets', 'tx_drops')}{per}  poll {poll_percent(hit, miss):.1f}%")


def _body(top: Top, rows: list[Sock], width: int, height: int) -> Iterator[Line]:
    """The table, and below it the pane of the chosen socket."""
    at = top.selected(rows)
    detail = _detail(top, rows[at]) if top.detail and rows else []
    pane = min(len(detail), max(DETAIL_MIN, height - min(len(rows), 5))) if detail else 0
    pane = max(0, min(pane, height - 1))
    page = top.page = max(1, height - pane)
    chosen = columns_for(width)
    if chosen and top.sorted_by()[0] not in chosen:
        chosen = _with_sorted(chosen, top.sorted_by()[0], width)
    yield Line(_heading(top, chosen).ljust(width), "reverse")
    first = max(0, min(at - page // 2, len(rows) - page))
    table = [Line(_row(sock, chosen).ljust(width), "reverse" if sock is rows[at] else
                  "plain" if sock["offloaded"] else "dim") for sock in rows[first : first + page]]
    if not rows:
        table = [Line("no socket" + (f" with {top.filter!r}: Esc shows all" if top.filter else " yet"), "dim")]
    yield from table
    if pane:
        yield from [Line("")] * (page - len(table))
        yield from detail[: pane - 1] if len(detail) > pane else detail[:pane]
        if len(detail) > pane:
            yield Line(f"… {len(detail) - pane + 1} more lines: a higher window shows them", "dim")


def _with_sorted(chosen: list[int], sort: int, width: int) -> list[int]:
    """The column that is sorted by is seen: the least important ones give way."""
    kept = sorted(chosen, key=lambda n: COLUMNS[n].rank)
    while kept and sum(COLUMNS[n].width + 1 for n in kept) + COLUMNS[sort].width > width:
        kept.pop()
    return sorted([*kept, sort])


def _heading(top: Top, chosen: list[int]) -> str:
    words = []
    for number in chosen:
        column = COLUMNS[number]
        mark = ("^" if top.ascending else "v") if number in top.sorted_by() else ""
        words.append(_cell(column.heading(top.totals) + mark, column.width, column.number))
    return " ".join(words)


def _row(sock: Sock, chosen: list[int]) -> str:
    return " ".join(_cell(COLUMNS[n].show(sock), COLUMNS[n].width, COLUMNS[n].number) for n in chosen)


def _cell(text: str, width: int, number: bool) -> str:
    text = _fit(text, width)
    return text.rjust(width) if number else text.ljust(width)


def _detail(top: Top, sock: Sock) -> list[Line]:
    """The block of view 3, and what it leaves out: the reason, the ring, the waits of the program."""
    post = "" if top.totals else "/s"
    title = f"---- fd {sock['fd']} of {clean(sock['comm'])} ({sock['pid']}), inode {sock['inode']} "
    if not is_counted(sock):
        queues = f"{sock['state']}, Recv-Q {sock['recv_q']}, Send-Q {sock['send_q']}"
        return [Line(title.ljust(78, "-"), "bold"), Line(f"{queues}. Nothing is counted: the kernel alone serves it")]
    reading = next(r for r in top.shown() if any(s is sock for s in r["sockets"]))
    lines = [Line(title.ljust(78, "-"), "bold")]
    if sock["reason"] != "none":
        lines.append(Line(f"{sock['reason']}: {clean(sock['reason_text'])}. {clean(sock['remedy'])}".rstrip(), "warn"))
    lines += [Line(clean(line)) for line in list(full.socket_block(sock, post))[2:]]
    lines += [Line(_ring(ring, post)) for ring in reading["rings"] if ring["ring_id"] == sock["ring_id"]]
    lines += [Line(iomux_row(i, not top.totals)) for i in reading["iomux"] if iomux_active(i["counters"])]
    return lines


def _ring(ring: dict[str, Any], post: str) -> str:
    c = ring["stats"]
    mode = ring["mode"] if ring["backend"] == "xdp" else ring["device"]
    return (f"Ring {ring['ring_id']}: {clean(ring['interface'])}, {ring['backend']} {clean(mode)}, rx {c['rx_packets']}"
            f"{post} tx {c['tx_packets']}{post}, free frames rx {c['pool_rx_free']} tx {c['pool_tx_free']}")


def _help(top: Top) -> Iterator[Line]:
    yield Line("vma_stats --top: the sockets of all programs under the shim", "bold")
    for keys, text in HELP:
        yield Line(f"  {keys:<18} {text}")
    columns = "; ".join(f"{column.title} {column.text}" for column in COLUMNS)
    yield from (Line(text, "dim") for text in wrap(columns, 78))


def _foot(top: Top) -> Line:
    if top.typing is not None:
        return Line(f"show only: {top.typing}_", "bold")
    if top.help:
        return Line("any key goes back", "reverse")
    what = "rates" if top.totals else "totals"
    return Line(f"? help  q quit  <> sort  r reverse  Enter detail  d {what}  / search  p pause", "reverse")
