/* Header prediction, after Van Jacobson: the next request that answers all we have sent, and a short answer while nothing is
 * under way, are most of what a connection on a ring does. For those, and nothing else, the pcb goes from one state of lwIP's
 * to the next here, without its state machine: what counts is less the work than its code, which the kernel's displaces from
 * the cache with each message. Any doubt is lwIP's. */
#include "core.h"
#include "lwip/inet_chksum.h"
#include "lwip/sys.h"
#include <netinet/in.h>

#define TCP_LEN 20u
#define PLAIN_FLAGS (TF_ACK_DELAY | TF_NODELAY | TF_WND_SCALE | TF_TIMESTAMP | TF_SACK)

/* Nothing of either direction is in question. */
static bool is_plain(const struct vmh_tcp_conn *c)
{
	const struct tcp_pcb *pcb = c->pcb;

#ifdef VMH_TCP_NO_PREDICTION /* a test compares */
	return false;
#endif
	return pcb && pcb->state == ESTABLISHED && !(pcb->flags & ~PLAIN_FLAGS) && !pcb->unsent && c->recovery == OPEN &&
	       !(c->sacked_any | c->shut_out | c->shut_rd | c->shut_wr | c->app_closed | c->eof) && !c->dupacks && !c->parent;
}

/* ---- from the wire ---- */

/* The options are timestamps alone where they were agreed upon, and they say nothing that is old; else there are none. */
static bool options_fit(const struct tcp_pcb *pcb, const uint8_t *tcp)
{
	static const uint8_t kind[4] = {1, 1, 8, 10};

	if (!(pcb->flags & TF_TIMESTAMP))
		return tcp[12] == TCP_LEN / 4 << 4;
	return tcp[12] == (TCP_LEN + TS_LEN) / 4 << 4 && !memcmp(tcp + TCP_LEN, kind, 4) && pcb->ts_recent &&
	       TCP_SEQ_GEQ(get32(tcp + TCP_LEN + 4), pcb->ts_recent);
}

static bool predicted(const struct vmh_tcp_conn *c, const struct segment *s)
{
	const struct tcp_pcb *pcb = c->pcb;
	const uint8_t *tcp = s->tcp;
	uint32_t header = (tcp[12] >> 4) * 4u;

	if (!is_plain(c) || (tcp[13] & ~TCP_PSH) != TCP_ACK || !options_fit(pcb, tcp) || s->next)
		return false;
	if (get32(tcp + 4) != pcb->rcv_nxt || get32(tcp + 8) != pcb->snd_nxt || !get16(tcp + 14))
		return false;
	if (s->len <= header || s->len - header > LWIP_MIN(pcb->mss, pcb->rcv_wnd) || pcb->ooseq || LWIP_TCP_SACK_VALID(pcb, 0))
		return false;
	/* of one segment at most, with room in the congestion window: it stays as it is */
	return (!pcb->unacked || !pcb->unacked->next) && recovery_flight(c) + pcb->mss < c->cwnd;
}

/* What lwIP counts before its window grows, while it is no limit. */
static void count_acked(const struct vmh_tcp_conn *c, uint32_t acked)
{
	struct tcp_pcb *pcb = c->pcb;

	if (c->cwnd < c->ssthresh)
		return;
	TCP_WND_INC(pcb->bytes_acked, acked);
	if (pcb->bytes_acked >= c->cwnd)
		pcb->bytes_acked -= c->cwnd;
}

/* All that was sent is acknowledged. */
static void acknowledged(struct vmh_tcp_conn *c, uint32_t ack)
{
	struct tcp_pcb *pcb = c->pcb;
	struct tcp_seg *s = pcb->unacked;
	uint32_t acked = ack - pcb->lastack;

	recovery_limited(c);
	pcb->unacked = NULL;
	pcb->lastack = ack;
	pcb->snd_buf += s->len;
	pcb->snd_queuelen = 0;
	pcb->rtime = -1;
	c->count.bytes_acked += s->len;
	tcp_seg_free(s);
	c->short_out = false;
	core_nagle(c);
	count_acked(c, acked);
	cc_ack(c, acked, 0);
}

static void take_window(struct tcp_pcb *pcb, uint32_t seq, uint32_t ack, uint16_t field)
{
	uint32_t wnd = SND_WND_SCALE(pcb, field);

	if (!TCP_SEQ_LT(pcb->snd_wl1, seq) && !(pcb->snd_wl1 == seq && TCP_SEQ_LT(pcb->snd_wl2, ack)) &&
	    !(pcb->snd_wl2 == ack && wnd > pcb->snd_wnd) && !TCP_SEQ_GT(ack, pcb->lastack))
		return;
	pcb->snd_wnd = wnd;
	pcb->snd_wnd_max = LWIP_MAX(pcb->snd_wnd_max, wnd);
	pcb->snd_wl1 = seq;
	pcb->snd_wl2 = ack;
}

bool fast_input(struct vmh_tcp_conn *c, struct segment *s)
{
	struct seg_in in = {0};
	struct tcp_pcb *pcb = c->pcb;
	const uint8_t *tcp = s->tcp;
	bool first;

	if (!predicted(c, s))
		return false;
	s->header = (uint16_t)((tcp[12] >> 4) * 4);
	s->payload = in.payload = (uint16_t)(s->len - s->header);
	if (!hold_next(c, s))
		return false;
	in.seq = pcb->rcv_nxt;
	in.ack = pcb->snd_nxt;
	c->t->stats.predicted++;
	core_enter(c->t, c);
	first = input_count(c, &in, 1);
	if (s->header > TCP_LEN && TCP_SEQ_BETWEEN(pcb->ts_lastacksent, in.seq, in.seq + in.payload))
		pcb->ts_recent = get32(tcp + TCP_LEN + 4);
	take_window(pcb, in.seq, in.ack, get16(tcp + 14));
	if (pcb->unacked)
		acknowledged(c, in.ack);
	pcb->cwnd = c->cwnd;
	pcb->rcv_nxt += in.payload;
	pcb->rcv_wnd -= in.payload;
	tcp_update_rcv_ann_wnd(pcb);
	tcp_ack(pcb);
	if (first && pcb->flags & TF_ACK_DELAY)
		core_ack_soon(c);
	c->count.bytes_received += in.payload;
	c->changed = true;
	core_leave(c->t, c);
	return true;
}

/* ---- to the wire ---- */

/* With room for `most` bytes of options and data, as tcp_write() makes them: more may be added if it can't go. */
static struct tcp_seg *new_segment(const struct iovec *data, uint32_t options, uint32_t most)
{
	u16_t len = (u16_t)data->iov_len, sum;
	struct pbuf *p = pbuf_alloc(PBUF_TRANSPORT, (u16_t)most, PBUF_RAM);
	struct tcp_seg *s = p ? memp_malloc(MEMP_TCP_SEG) : NULL;

	if (!s) {
		if (p)
			pbuf_free(p);
		return NULL;
	}
	sum = LWIP_CHKSUM_COPY((uint8_t *)p->payload + options, data->iov_base, len);
	p->len = p->tot_len = (u16_t)(options + len);
	pbuf_add_header(p, TCP_LEN);
	*s = (struct tcp_seg){.p = p, .len = len, .tcphdr = p->payload, .chksum_swapped = len & 1,
			      .chksum = len & 1 ? SWAP_BYTES_IN_WORD(sum) : sum,
			      .flags = TF_SEG_DATA_CHECKSUMMED | (options ? TF_SEG_OPTS_TS : 0)};
	return s;
}

static void fill_header(struct vmh_tcp_conn *c, const struct tcp_seg *s, uint32_t options)
{
	const struct tcp_pcb *pcb = c->pcb;
	uint32_t *after = (uint32_t *)(s->tcphdr + 1), sum;
	struct tcp_hdr *h = s->tcphdr;

	*h = (struct tcp_hdr){.src = c->key.lport, .dest = c->key.rport, .seqno = lwip_htonl(pcb->snd_nxt),
			      .ackno = lwip_htonl(pcb->rcv_nxt),
			      .wnd = lwip_htons(TCPWND_MIN16(RCV_WND_SCALE(pcb, pcb->rcv_ann_wnd)))};
	TCPH_HDRLEN_FLAGS_SET(h, (TCP_LEN + options) / 4, TCP_ACK | TCP_PSH);
	if (options) {
		after[0] = PP_HTONL(0x0101080A);
		after[1] = lwip_htonl(sys_now());
		after[2] = lwip_htonl(pcb->ts_recent);
	}
	sum = core_pseudo(&c->key) + PP_HTONS(IPPROTO_TCP) + lwip_htons(s->p->len) + (uint16_t)~inet_chksum(h, (u16_t)(TCP_LEN + options));
	h->chksum = sum_of(sum + (s->chksum_swapped ? SWAP_BYTES_IN_WORD(s->chksum) : s->chksum));
}

/* Inside. One short message that may go at once. False: nothing was done. */
bool fast_output(struct vmh_tcp_conn *c, const struct iovec *data)
{
	struct tcp_pcb *pcb = c->pcb;
	uint32_t options, most;
	struct tcp_seg *s;

	if (!is_plain(c) || pcb->unacked || c->settling)
		return false;
	options = pcb->flags & TF_TIMESTAMP ? TS_LEN : 0;
	most = LWIP_MIN(pcb->mss, pcb->snd_wnd_max / 2);
	if (!data->iov_len || data->iov_len + options > most ||
	    data->iov_len > LWIP_MIN(pcb->snd_wnd, c->cwnd) || data->iov_len > c->opt.sndbuf)
		return false;
	s = new_segment(data, options, most);
	if (!s)
		return false;
	c->t->stats.predicted++;
	pcb->cwnd = c->cwnd;
	pcb->persist_backoff = 0;
	fill_header(c, s, options);
	pcb->rcv_ann_right_edge = pcb->rcv_nxt + pcb->rcv_ann_wnd;
	pcb->ts_lastacksent = pcb->rcv_nxt;
	pcb->snd_lbb += s->len;
	pcb->snd_buf -= s->len;
	pcb->snd_queuelen = 1;
	pcb->rtime = LWIP_MAX(pcb->rtime, 0);
	c->short_out = !is_whole(pcb, s);
	c->short_tail = false;
	c->short_end = pcb->snd_nxt + s->len;
	core_nagle(c);
	if (core_send(c, s->p) == ERR_OK) {
		pcb->unacked = s;
		pcb->snd_nxt += s->len;
		tcp_clear_flags(pcb, TF_ACK_DELAY);
	} else { /* as tcp_output() leaves it */
		pcb->unsent = s;
		pcb->unsent_oversize = (u16_t)(most - options - s->len);
		tcp_set_flags(pcb, TF_NAGLEMEMERR);
	}
	return true;
}
