"""Every counter and gauge of the statistics page: name, unit, kind and meaning, written once.

The names are the members of contracts/stats_page.h (a test compares the two). The page reader, the API models, the
metrics and vma_stats all take their fields from here. Meanings: research of libvma 9.8.84 and the VMA monitoring
manual 9.8.80.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge"]
Unit = Literal["packets", "bytes", "calls", "frames", "percent", "segments", "rings", "polls", "sleeps", "sockets",
               "completions", "microseconds"]


@dataclass(frozen=True, slots=True)
class Counter:
    """A 64-bit value of the page; a counter only grows (until zeroed), a gauge is a present value or a high water."""

    name: str
    unit: Unit
    kind: Kind
    text: str


def _c(name: str, unit: Unit, text: str) -> Counter:
    return Counter(name, unit, "counter", text)


def _g(name: str, unit: Unit, text: str) -> Counter:
    return Counter(name, unit, "gauge", text)


SOCKET = (
    _c("rx_packets", "packets", "datagrams that receive calls took from a ring"),
    _c("rx_bytes", "bytes", "payload that receive calls took from a ring"),
    _c("rx_eagain", "calls", "receive calls that found no data and returned EAGAIN"),
    _c("rx_errors", "calls", "receive calls that failed for another reason, EINTR too"),
    _c("rx_poll_hit", "polls", "receive calls whose polling found data at once or within its budget"),
    _c("rx_poll_miss", "polls", "receive calls whose polling ended without data"),
    _c("rx_os_packets", "packets", "datagrams received through the kernel"),
    _c("rx_os_bytes", "bytes", "payload received through the kernel"),
    _c("rx_os_eagain", "calls", "receive calls on the kernel socket that returned EAGAIN"),
    _c("rx_os_errors", "calls", "receive calls on the kernel socket that failed"),
    _c("tx_packets", "packets", "datagrams sent through a ring"),
    _c("tx_bytes", "bytes", "payload sent through a ring"),
    _c("tx_eagain", "calls", "send calls that returned EAGAIN"),
    _c("tx_errors", "calls", "send calls that failed for another reason"),
    _c("tx_drops", "packets", "datagrams accepted and then dropped, for want of a free frame or descriptor"),
    _c("tx_os_packets", "packets", "datagrams sent through the kernel"),
    _c("tx_os_bytes", "bytes", "payload sent through the kernel"),
    _c("tx_os_eagain", "calls", "send calls on the kernel socket that returned EAGAIN"),
    _c("tx_os_errors", "calls", "send calls on the kernel socket that failed"),
    _c("tx_dummy", "packets", "dummy messages, which warm the sending path and never leave the host"),
    _c("rx_drop_packets", "packets", "datagrams dropped because the socket held SO_RCVBUF bytes already"),
    _c("rx_drop_bytes", "bytes", "payload dropped because the socket held SO_RCVBUF bytes already"),
    _c("rx_migrations", "rings", "changes of the receiving ring"),
    _c("tx_migrations", "rings", "changes of the sending ring"),
    _c("retransmits", "segments", "TCP segments sent again"),
    _g("rx_ready_packets", "packets", "datagrams that wait in the socket's queue now"),
    _g("rx_ready_bytes", "bytes", "payload that waits in the socket's queue now"),
    _g("rx_ready_packets_max", "packets", "most datagrams that ever waited in the queue"),
    _g("rx_ready_bytes_max", "bytes", "most payload that ever waited in the queue"),
    _g("rx_limit", "bytes", "receive memory that the queue may take (SO_RCVBUF, VMA_RX_BYTES_MIN at least)"),
    _g("tx_ready_bytes", "bytes", "payload of TCP accepted and not yet acknowledged"),
    _g("rx_zcopy_packets", "packets", "datagrams lent to the program without a copy"),
)

RING = (
    _c("rx_packets", "packets", "frames received"),
    _c("rx_bytes", "bytes", "bytes received, headers included"),
    _c("tx_packets", "packets", "frames sent"),
    _c("tx_bytes", "bytes", "bytes sent, headers included"),
    _c("kicks", "calls", "wake-up system calls for sending"),
    _c("interrupts_requested", "sleeps", "times that the process went to sleep on the ring"),
    _c("interrupts_received", "sleeps", "times that the ring woke the process"),
    _g("drained_max", "frames", "most frames taken in one poll"),
    _c("rx_no_socket", "frames", "frames received that no socket wanted"),
    _c("rx_bad", "frames", "frames received that did not parse"),
    _c("rx_dropped", "frames", "frames dropped because the socket had no room"),
    _c("tx_full", "calls", "sends that found the transmit ring full, a datagram that is tried again counted once"),
    _c("rx_tcp_kept", "frames", "frames whose TCP payload stayed in the ring's memory until it was read (zero-copy)"),
    _c("rx_tcp_copied", "frames", "frames whose TCP payload was copied out, so that the ring keeps free frames"),
    _c("rx_tcp_merged", "frames", "frames of TCP data that went through the stack as one segment with an earlier one"),
    _c("tx_tcp_resent", "segments", "TCP segments sent again"),
    _c("cq_errors", "completions", "completions with an error, flushes apart (verbs rings)"),
    _c("rx_tagged", "frames", "frames whose flow tag named the socket (verbs rings)"),
    _c("rx_hw_csum", "frames", "frames whose checksums the device verified (verbs rings)"),
    _c("tx_inline", "frames", "frames sent inline (verbs rings)"),
    _c("dm_packets", "frames", "frames sent from device memory (verbs rings)"),
    _c("dm_bytes", "bytes", "bytes sent from device memory (verbs rings)"),
    _c("dm_full", "frames", "frames that found no room in device memory (verbs rings)"),
    _g("pool_rx_free", "frames", "free frames for receiving now"),
    _g("pool_tx_free", "frames", "free frames for sending now"),
    _c("pool_rx_empty", "calls", "requests for a receive frame that failed"),
    _c("pool_tx_empty", "calls", "requests for a send frame that failed"),
    _g("queue_len", "frames", "frames drained from the ring and not yet taken by the program"),
    _g("mod_count", "frames", "frames after which the device interrupts (verbs rings)"),
    _g("mod_usec", "microseconds", "time after which the device interrupts (verbs rings)"),
    _g("dm_size", "bytes", "device memory that the ring has (verbs rings)"),
)

IOMUX = (
    _c("rx_ready", "sockets", "ready offloaded descriptors returned"),
    _c("os_rx_ready", "sockets", "ready kernel descriptors returned"),
    _c("poll_hit", "polls", "polling phases that ended with a ready descriptor"),
    _c("poll_miss", "polls", "polling phases that ended without one"),
    _c("timeouts", "calls", "calls that returned 0"),
    _c("errors", "calls", "calls that failed, other than by a signal (EINTR)"),
    _g("polling_percent", "percent", "share of the last second spent polling (needs VMA_CPU_USAGE_STATS=1)"),
)
