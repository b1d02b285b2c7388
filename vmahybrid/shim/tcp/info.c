/* Options, the path, and what is known of a connection. */
#include "core.h"

#define BUF_MIN 2304u /* of Linux */

/* linux/tcp_states.h */
uint8_t core_state(const struct vmh_tcp_conn *c)
{
	static const uint8_t linux_state[] = {[CLOSED] = 7, [LISTEN] = 10, [SYN_SENT] = 2, [SYN_RCVD] = 3, [ESTABLISHED] = 1,
					      [FIN_WAIT_1] = 4, [FIN_WAIT_2] = 5, [CLOSE_WAIT] = 8, [CLOSING] = 11,
					      [LAST_ACK] = 9, [TIME_WAIT] = 6};

	if (c->listening)
		return linux_state[LISTEN];
	if (!c->pcb)
		return linux_state[c->last_state == TIME_WAIT ? TIME_WAIT : CLOSED];
	return linux_state[c->pcb->state];
}

int core_set_options(struct vmh_tcp_conn *c, const struct vmh_tcp_options *o)
{
	struct tcp_pcb *pcb = c->pcb;
	struct vmh_tcp_options new = *o;
	bool other_idle = c->due[T_KEEP] && o->keep_idle_s != c->opt.keep_idle_s;
	bool push = pcb && ((!c->opt.nodelay && o->nodelay) || (c->opt.cork && !o->cork));

	new.sndbuf = LWIP_MIN(LWIP_MAX(o->sndbuf, BUF_MIN), TCP_SND_BUF);
	new.rcvbuf = LWIP_MIN(LWIP_MAX(o->rcvbuf, BUF_MIN), TCP_WND);
	new.no_sack = c->opt.no_sack; /* settled in the SYNs */
	new.no_wscale = c->opt.no_wscale;
	new.no_timestamps = c->opt.no_timestamps;
	if (o->keepalive != c->opt.keepalive)
		c->due[T_KEEP] = 0;
	c->opt = new;
	if (!pcb || c->frozen)
		return 0;
	core_enter(c->t, c);
	if (c->due[T_KEEP] && other_idle) /* from when the peer was heard, as in Linux */
		c->due[T_KEEP] = LWIP_MAX(c->t->now, c->heard_at + o->keep_idle_s * SEC);
	pcb->ttl = key_ttl(&c->key, o);
	pcb->tos = key_tos(&c->key, o);
	core_nagle(c);
	if (o->quickack && pcb->flags & TF_ACK_DELAY)
		tcp_send_empty_ack(pcb);
	if (push) {
		tcp_set_flags(pcb, TF_NAGLEMEMERR);
		recovery_push(c);
	}
	core_leave(c->t, c);
	return 0;
}

/* Segments on the queue that are too long for a path that became narrower: cut, in place. */
static void cut(struct vmh_tcp_conn *c, uint16_t mss)
{
	struct tcp_pcb *pcb = c->pcb;
	struct tcp_seg *s, *unsent = pcb->unsent, **end = &pcb->unacked;

	/* core_split() works on the head of the unsent queue: all goes there, and comes back piece by piece */
	while (*end)
		end = &(*end)->next;
	*end = unsent;
	pcb->unsent = pcb->unacked;
	pcb->unacked = NULL;
	end = &pcb->unacked;
	while ((s = pcb->unsent)) {
		u16_t optlen = s->flags & TF_SEG_OPTS_TS ? 12 : 0;

		if (s->len + optlen > mss && !(TCPH_FLAGS(s->tcphdr) & TCP_SYN))
			core_split(pcb, (u16_t)(mss - optlen));
		s = pcb->unsent;
		pcb->unsent = s->next;
		s->next = NULL;
		*end = s;
		end = &s->next;
	}
	/* what was sent stays on unacked, the rest goes back */
	for (end = &pcb->unacked; *end && TCP_SEQ_LT(lwip_ntohl((*end)->tcphdr->seqno), pcb->snd_nxt);)
		end = &(*end)->next;
	pcb->unsent = *end;
	*end = NULL;
	pcb->unsent_oversize = 0;
}

void core_set_path(struct vmh_tcp_conn *c, const struct vmh_tcp_path *p)
{
	struct tcp_pcb *pcb = c->pcb;
	uint16_t mss = (uint16_t)(p->mtu - key_headers(&c->key));

	c->path = *p;
	if (!pcb || pcb->state < ESTABLISHED || c->frozen)
		return;
	core_enter(c->t, c);
	if (mss < pcb->mss) {
		pcb->mss = mss;
		cut(c, mss);
		for (struct tcp_seg *s = pcb->unacked; s; s = s->next) /* too long for the path, so it did not arrive */
			if (!(s->flags & SEG_SACKED))
				s->flags = (u8_t)((s->flags | SEG_LOST) & ~SEG_RETRANS);
		if (pcb->unacked && c->recovery == OPEN) {
			c->recovery = LOSS; /* without a smaller window: nothing says congestion */
			c->recover = pcb->snd_nxt;
		}
	}
	recovery_output(c);
	core_leave(c->t, c);
}

static uint32_t unsent_bytes(const struct tcp_pcb *pcb)
{
	return core_ahead(pcb->snd_lbb, pcb->snd_nxt);
}

static uint32_t ms_since(const struct vmh_tcp_conn *c, uint64_t at)
{
	uint64_t now = c->t->env.now_ns(c->t->env.ctx) / 1000;

	return at && now > at ? (uint32_t)((now - at) / MS) : 0;
}

static void span(struct vmh_tcp_span *to, const struct tcp_seg *s)
{
	if (s)
		*to = (struct vmh_tcp_span){lwip_ntohl(s->tcphdr->seqno), s->len, TCPH_FLAGS(s->tcphdr) & TCP_FIN};
}

static const struct tcp_seg *last(const struct tcp_seg *s)
{
	while (s && s->next)
		s = s->next;
	return s;
}

static void get_pcb(struct vmh_tcp_conn *c, struct vmh_tcp_pcb_info *i)
{
	const struct tcp_pcb *pcb = c->pcb;

	i->flags = c->opt.nodelay ? pcb->flags : pcb->flags & ~(uint32_t)TF_NODELAY; /* see core_nagle */
	i->rcv_nxt = pcb->rcv_nxt;
	i->rcv_wnd = pcb->rcv_wnd;
	i->right_edge = pcb->rcv_ann_right_edge;
	i->snd_nxt = pcb->snd_nxt;
	i->snd_wl1 = pcb->snd_wl1;
	i->snd_wl2 = pcb->snd_wl2;
	i->snd_wnd_max = pcb->snd_wnd_max;
	i->lastack = pcb->lastack;
	i->rtseq = c->rtt_seq;
	i->rtime_ms = pcb->unacked ? ms_since(c, c->first_sent_at) : 0;
	span(&i->first_unsent, pcb->unsent);
	span(&i->last_unsent, last(pcb->unsent));
	span(&i->first_unacked, pcb->unacked);
	span(&i->last_unacked, last(pcb->unacked));
}

static uint32_t offered(const struct vmh_tcp_conn *c)
{
	uint32_t path = c->path.mtu - key_headers(&c->key);

	if (c->offered)
		return c->offered;
	return c->opt.mss_max ? LWIP_MIN(c->opt.mss_max, path) : path;
}

void core_get_settled(const struct vmh_tcp_conn *c, struct vmh_tcp_info *i)
{
	const struct tcp_pcb *pcb = c->pcb;
	uint32_t room = pcb->flags & TF_TIMESTAMP ? 12 : 0;

	i->snd_mss = pcb->mss - room;
	i->rcv_mss = i->adv_mss = offered(c) - room;
	i->timestamps = !!(pcb->flags & TF_TIMESTAMP);
	i->sack = !!(pcb->flags & TF_SACK);
	i->wscale = !!(pcb->flags & TF_WND_SCALE);
	i->snd_wscale = i->wscale ? pcb->snd_scale : 0;
	i->rcv_wscale = i->wscale ? pcb->rcv_scale : 0;
}

void core_get_info(struct vmh_tcp_conn *c, struct vmh_tcp_info *i)
{
	const struct tcp_pcb *pcb = c->pcb;

	*i = c->count;
	i->state = core_state(c);
	i->rto_us = pcb ? recovery_rto_us(c) : SEC;
	i->rtt_us = c->srtt;
	i->rttvar_us = c->rttvar;
	i->min_rtt_us = c->min_rtt;
	i->reordering = c->reordering;
	i->retries = c->retries;
	i->unread = c->rx_bytes;
	i->peer_ended = c->eof;
	i->cwnd = c->cwnd;
	i->ssthresh = c->ssthresh;
	i->ca_state = c->recovery == OPEN ? 0 : c->recovery == RECOVERY ? 3 : 4;
	i->held = c->t->stats.held;
	i->ms_since_sent = ms_since(c, c->sent_at);
	i->ms_since_received = ms_since(c, c->received_at);
	i->ms_since_heard = ms_since(c, c->heard_at);
	i->probing = c->persist_shift ? c->persist_shift : c->keep_sent;
	i->pcb.rcvbuf = core_rcvbuf(c);
	i->pcb.sndbuf = core_sndbuf(c);
	i->unread_pieces = c->rx_pieces;
	i->mtu = c->path.mtu;
	if (c->listening)
		i->waiting = c->listening->ready.n;
	if (!pcb || c->listening)
		return;
	get_pcb(c, &i->pcb);
	core_get_settled(c, i);
	i->snd_wnd = pcb->snd_wnd;
	i->rcv_wnd = pcb->rcv_ann_wnd;
	i->unacked = recovery_flight(c);
	i->unsent = unsent_bytes(pcb);
}
