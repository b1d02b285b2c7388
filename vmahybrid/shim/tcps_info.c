/* What the stack says of a connection on a ring: TCP_INFO, the queues' ioctls, and the dump of example 7 in the
 * monitoring manual. Its kernel socket is parked, or was never connected, and knows none of it. */
#include "vmh_base.h"
#include "vmh_log.h"
#include "vmh_sock.h"
#include "vmh_tcps.h"
#include "vmh_tcps_info.h"
#include "vmh_wait.h"
#include <errno.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <sys/ioctl.h>

#define STAMP_BYTES 12u /* of each segment, which an MSS in a SYN does not count */

/* False: it is not on a ring. */
bool vmh_tcps_info(struct vmh_tcps *s, struct vmh_tcp_info *i)
{
	bool here;

	vmh_lock(&s->io);
	here = s->conn && vmh_tcps_state(s) == VMH_TCPS_RING;
	if (here)
		vmh_tcp_get_info(s->conn, i);
	vmh_unlock(&s->io);
	return here;
}

static uint32_t segments(uint32_t bytes, uint32_t mss)
{
	return mss ? (bytes + mss - 1) / mss : bytes;
}

static void fill(const struct vmh_tcp_info *i, struct tcp_info *t)
{
	uint32_t mss = i->snd_mss;

	/* TIME_WAIT is none of the program's socket in the kernel */
	*t = (struct tcp_info){ .tcpi_state = i->state == VMH_TCP_TIME_WAIT ? VMH_TCP_CLOSE : i->state, .tcpi_ca_state = i->ca_state, .tcpi_retransmits = i->retries,
				.tcpi_probes = i->probing, .tcpi_backoff = i->retries, .tcpi_snd_wscale = i->snd_wscale & 15,
				.tcpi_rcv_wscale = i->rcv_wscale & 15, .tcpi_rto = i->rto_us, .tcpi_ato = 40000,
				.tcpi_snd_mss = mss, .tcpi_rcv_mss = i->rcv_mss, .tcpi_advmss = i->adv_mss,
				.tcpi_pmtu = i->mtu, .tcpi_rcv_ssthresh = i->rcv_wnd, .tcpi_rtt = i->rtt_us,
				.tcpi_rttvar = i->rttvar_us, .tcpi_rcv_space = i->rcv_wnd, .tcpi_reordering = i->reordering,
				.tcpi_pacing_rate = UINT64_MAX, .tcpi_max_pacing_rate = UINT64_MAX,
				.tcpi_total_retrans = i->retransmits, .tcpi_bytes_acked = i->bytes_acked,
				.tcpi_bytes_received = i->bytes_received, .tcpi_segs_out = i->segs_out,
				.tcpi_segs_in = i->segs_in, .tcpi_data_segs_in = i->data_segs_in,
				.tcpi_data_segs_out = i->data_segs_out, .tcpi_notsent_bytes = i->unsent + i->left_unsent,
				.tcpi_min_rtt = i->min_rtt_us, .tcpi_snd_wnd = i->snd_wnd,
				.tcpi_bytes_sent = i->bytes_acked + i->unacked, .tcpi_dsack_dups = i->dsacks, .tcpi_reord_seen = i->overtaken,
				.tcpi_rcv_ooopack = i->ooo_in, .tcpi_last_data_sent = i->ms_since_sent,
				.tcpi_last_ack_sent = 0, .tcpi_last_data_recv = i->ms_since_received,
				.tcpi_last_ack_recv = i->ms_since_heard };
	t->tcpi_options = (uint8_t)((i->timestamps ? TCPI_OPT_TIMESTAMPS : 0) | (i->sack ? TCPI_OPT_SACK : 0) |
				    (i->wscale ? TCPI_OPT_WSCALE : 0));
	t->tcpi_unacked = segments(i->unacked, mss);
	t->tcpi_snd_cwnd = i->cwnd / (mss ? mss : 1);
	t->tcpi_snd_ssthresh = i->ssthresh / (mss ? mss : 1);
}

/* As the kernel: a short buffer gets a part. 0, or -errno. */
int vmh_tcps_give(void *val, socklen_t *len, const void *what, size_t size)
{
	if ((int)*len < 0)
		return -EINVAL;
	if (*len > size)
		*len = (socklen_t)size;
	memcpy(val, what, *len);
	return 0;
}

/* 0, -errno or VMH_TCPS_KERNELS */
int vmh_tcps_tcp_info(struct vmh_tcps *s, void *val, socklen_t *len)
{
	struct vmh_tcp_info i;
	struct tcp_info t;

	if (!vmh_tcps_info(s, &i))
		return VMH_TCPS_KERNELS;
	fill(&i, &t);
	return vmh_tcps_give(val, len, &t, sizeof(t));
}

int vmh_tcps_listener_info(struct vmh_tcps *s, int fd, void *val, socklen_t *len)
{
	struct tcp_info t = { 0 };
	socklen_t n = sizeof(t);
	int err = (int)vmh_sys(SYS_getsockopt, fd, IPPROTO_TCP, TCP_INFO, &t, &n);

	if (err)
		return err;
	vmh_rings_poll(VMH_TCPS_POLL);
	t.tcpi_unacked += vmh_tlisten_waiting(s);
	return vmh_tcps_give(val, len, &t, n);
}

static int queue_length(const struct vmh_tcp_info *i, unsigned long request)
{
	switch (request) {
	case SIOCINQ: return (int)i->unread;
	case SIOCOUTQ: return (int)(i->unacked + i->unsent + i->left);
	case SIOCOUTQNSD: return (int)(i->unsent + i->left_unsent);
	default: return 0; /* SIOCATMARK: urgent data goes by the kernel */
	}
}

int vmh_tcps_queue(struct vmh_tcps *s, int fd, unsigned long request, void *value)
{
	struct vmh_tcp_info i;
	bool here;
	int r = 0, v;

	if (request != SIOCINQ && request != SIOCOUTQ && request != SIOCOUTQNSD && request != SIOCATMARK)
		return VMH_TCPS_KERNELS;
	if (vmh_tcps_state(s) == VMH_TCPS_HOME)
		return (int)vmh_sys(SYS_ioctl, fd, request, value);
	vmh_rings_poll(VMH_TCPS_POLL);
	here = vmh_tcps_info(s, &i);
	if (!here) {
		vmh_lock(&s->obj.lock); /* nobody moves it meanwhile */
		here = vmh_tcps_info(s, &i);
		r = here ? 0 : (int)vmh_sys(SYS_ioctl, fd, request, value);
		vmh_unlock(&s->obj.lock);
	}
	if (here) {
		v = queue_length(&i, request);
		memcpy(value, &v, sizeof(v)); /* ioctl(2) asks for no alignment */
	}
	return r;
}

/* The peer's end counts as a byte, also when it was read. */
void vmh_tcps_tell_inq(struct vmh_tcps *s, struct msghdr *m)
{
	struct vmh_cmsg_out o;
	struct vmh_tcp_info i;
	int left = 0;

	if (vmh_tcps_info(s, &i))
		left = (int)i.unread + i.peer_ended;
	else if (vmh_tcps_queue(s, s->obj.fd, FIONREAD, &left) < 0) /* it has just gone home */
		left = 0;
	vmh_cmsg_begin(&o, m);
	vmh_put_cmsg(&o, IPPROTO_TCP, TCP_CM_INQ, &left, sizeof(left));
	vmh_cmsg_end(&o, m);
}

/* ---- the page ---- */

/* Stack lock held. The page has lwIP's numbers of states. */
void vmh_tcps_note_state(struct vmh_tcps *s, unsigned state)
{
	static const uint8_t of_page[] = { 0, 4, 2, 3, 5, 6, 10, 0, 7, 9, 1, 8 };
	unsigned char number = state < sizeof(of_page) ? of_page[state] : 0;

	if (VMH_GET(s->phase) == number)
		return;
	VMH_SET(s->phase, number);
	VMH_SET(s->stats->state, number); /* beyond VMA_STATS_FD_NUM sockets it is no socket's own */
}

/* Stack lock held; of no stack any more: all zero. */
void vmh_tcps_note_amounts(struct vmh_tcps *s, const struct vmh_tcp_amounts *a)
{
	struct vmh_sock_stats *st = VMH_GET(s->stats);

	VMH_SET(st->rx_ready_bytes, a->unread);
	VMH_SET(st->rx_ready_packets, a->unread_pieces);
	VMH_SET(st->tx_ready_bytes, a->unacked);
	if (vmh_unlikely(a->unread > VMH_GET(st->rx_ready_bytes_max)))
		VMH_SET(st->rx_ready_bytes_max, a->unread);
	if (vmh_unlikely(a->unread_pieces > VMH_GET(st->rx_ready_packets_max)))
		VMH_SET(st->rx_ready_packets_max, a->unread_pieces);
	if (vmh_unlikely(a->resent != s->seen_resent)) { /* less: a new connection of the stack */
		if (a->resent > s->seen_resent) {
			VMH_COUNT(st->retransmits, a->resent - s->seen_resent);
			vmh_tpath_sent_again(s);
		}
		s->seen_resent = a->resent;
	}
}

/* ---- the dump ---- */

static const char *state_name(unsigned state)
{
	static const char *const names[] = { "CLOSED", "ESTABLISHED", "SYN_SENT", "SYN_RCVD", "FIN_WAIT_1", "FIN_WAIT_2",
					     "TIME_WAIT", "CLOSED", "CLOSE_WAIT", "LAST_ACK", "LISTEN", "CLOSING" };

	return state < sizeof(names) / sizeof(names[0]) ? names[state] : "UNKNOWN";
}

static const char *sock_state(unsigned state)
{
	switch (state) {
	case 1: return "TCP_SOCK_CONNECTED_RDWR";
	case 2: return "TCP_SOCK_ASYNC_CONNECT";
	case 4: case 5: return "TCP_SOCK_CONNECTED_RD";
	case 8: return "TCP_SOCK_CONNECTED_WR";
	case 10: return "TCP_SOCK_ACCEPT_READY";
	}
	return "TCP_SOCK_BOUND";
}

static const char *conn_state(const struct vmh_tcp_info *i)
{
	if (i->state != VMH_TCP_CLOSE)
		return i->state == VMH_TCP_SYN_SENT ? "TCP_CONN_CONNECTING" : i->state == VMH_TCP_LISTEN ? "TCP_CONN_INIT" : "TCP_CONN_CONNECTED";
	switch (i->why) {
	case 0: return "TCP_CONN_INIT"; /* both ends have closed it, and there is none any more */
	case EPIPE: case ECONNRESET: return "TCP_CONN_RESETED";
	case ETIMEDOUT: return "TCP_CONN_TIMEOUT";
	case ECONNREFUSED: return "TCP_CONN_ERROR";
	}
	return "TCP_CONN_FAILED";
}

static void dump_segment(int level, const char *end, const char *queue, const struct vmh_tcp_span *s)
{
	vmh_log(level, "%s %s : seqno %u, len %u, seqno + len %u", end, queue, s->seq, s->len, s->seq + s->len);
}

static void dump_queue(int level, const char *queue, const struct vmh_tcp_span *first, const struct vmh_tcp_span *last)
{
	if (!first->len && !first->fin) {
		vmh_log(level, "First %s : NULL", queue);
		return;
	}
	dump_segment(level, "First", queue, first);
	dump_segment(level, "Last", queue, last);
}

static void dump_windows(int level, const struct vmh_tcp_info *i)
{
	const struct vmh_tcp_pcb_info *p = &i->pcb;
	unsigned rs = i->rcv_wscale, ss = i->snd_wscale;

	vmh_log(level, "PCB state : %s", state_name(i->state));
	vmh_log(level, "PCB flags : 0x%x", p->flags);
	vmh_log(level, "Segment size : mss %u, advtsd_mss %u", i->snd_mss, i->adv_mss + (i->timestamps ? STAMP_BYTES : 0));
	if (i->wscale)
		vmh_log(level, "Window scaling : ENABLED, rcv_scale %u, snd_scale %u", rs, ss);
	else
		vmh_log(level, "Window scaling : DISABLED");
	vmh_log(level,
		"Receive window : rcv_wnd %u (%u), rcv_ann_wnd %u (%u), rcv_wnd_max %u (%u), rcv_wnd_max_desired %u (%u)",
		p->rcv_wnd, p->rcv_wnd >> rs, i->rcv_wnd, i->rcv_wnd >> rs, p->rcvbuf, p->rcvbuf >> rs, p->rcvbuf,
		p->rcvbuf >> rs);
	vmh_log(level, "Send window : snd_wnd %u (%u), snd_wnd_max %u (%u)", i->snd_wnd, i->snd_wnd >> ss, p->snd_wnd_max,
		p->snd_wnd_max >> ss);
	vmh_log(level, "Congestion : cwnd %u", i->cwnd);
}

static void dump_pcb(int level, const struct vmh_tcp_info *i)
{
	const struct vmh_tcp_pcb_info *p = &i->pcb;

	dump_windows(level, i);
	vmh_log(level, "Receiver data : rcv_nxt %u, rcv_ann_right_edge %u", p->rcv_nxt, p->right_edge);
	vmh_log(level, "Sender data : snd_nxt %u, snd_wl1 %u, snd_wl2 %u", p->snd_nxt, p->snd_wl1, p->snd_wl2);
	vmh_log(level, "Send buffer : snd_buf %u, max_snd_buff %u",
		p->sndbuf > i->unacked + i->unsent ? p->sndbuf - i->unacked - i->unsent : 0, p->sndbuf);
	/* milliseconds, where the peer counts ticks of its slow timer */
	vmh_log(level, "Retransmission : rtime %u, rto %u, nrtx %u", p->rtime_ms, i->rto_us / 1000, i->retries);
	vmh_log(level, "RTT variables : rttest %u, rtseq %u", i->rtt_us / 1000, p->rtseq);
	dump_queue(level, "unsent", &p->first_unsent, &p->last_unsent);
	dump_queue(level, "unacked", &p->first_unacked, &p->last_unacked);
	vmh_log(level, "Acknowledge : lastack %u", p->lastack);
}

static void dump_states(int level, const struct vmh_tcp_info *i)
{
	vmh_log(level, "Socket state : %s", sock_state(i->state));
	vmh_log(level, "Connection state : %s", conn_state(i));
}

/* A listener has no buffers and no windows. */
static void dump_listener(int level)
{
	const struct vmh_tcp_info i = { .state = VMH_TCP_LISTEN };

	dump_states(level, &i);
	vmh_log(level, "PCB state : %s", state_name(i.state));
}

void vmh_tcps_dump(int fd, int level)
{
	TCPS_HELD s = vmh_tcps_get(fd);
	struct vmh_tcp_info i;

	if (s && vmh_tcps_state(s) == VMH_TCPS_LISTEN)
		dump_listener(level);
	if (!s || !vmh_tcps_info(s, &i))
		return;
	dump_states(level, &i);
	vmh_log(level, "Receive buffer : m_rcvbuff_current %u, m_rcvbuff_max %u, m_rcvbuff_non_tcp_recved 0", i.unread,
		i.pcb.rcvbuf);
	vmh_log(level, "Rx lists size : m_rx_pkt_ready_list %u, m_rx_ctl_packets_list 0, m_rx_ctl_reuse_list 0",
		i.unread_pieces);
	dump_pcb(level, &i);
}
