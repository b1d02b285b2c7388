/* A connection as bytes (tcp_state.h), out of the stack and into it. */
#include "core.h"
#include "tcp_state.h"
#include <stdlib.h>
#include <sys/socket.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the numbers of tcp_state.h are written as they are");

void core_settle(struct vmh_tcp_conn *c, bool settling)
{
	if (c->settling == settling)
		return;
	c->settling = settling;
	if (settling || !c->pcb || !c->established || c->frozen)
		return;
	core_enter(c->t, c);
	core_window(c);
	recovery_output(c);
	core_leave(c->t, c);
}

int core_freeze(struct vmh_tcp_conn *c, bool frozen)
{
	c->settling = false;
	if (c->listening || !c->pcb || !c->established)
		return -ENOTCONN;
	if (c->frozen == frozen)
		return 0;
	if (frozen && c->pcb->flags & TF_ACK_DELAY) { /* the other stack does not know that it owes one */
		core_enter(c->t, c);
		tcp_send_empty_ack(c->pcb);
		core_leave(c->t, c);
	}
	c->frozen = frozen;
	timer_remove(c);
	if (!frozen) {
		core_enter(c->t, c);
		core_forget_kept(c); /* it gets them again, or the peer sends them */
		memset(c->due, 0, sizeof(c->due));
		c->rtt_at = 0;
		recovery_output(c);
		core_leave(c->t, c);
	}
	return 0;
}

void core_forget(struct vmh_tcp_conn *c)
{
	c->app_closed = true;
	c->frozen = false;
	if (!c->pcb) {
		core_conn_free(c);
		return;
	}
	core_enter(c->t, c);
	demux_tw_add(c, c->pcb, true); /* frames that are on their way to us are not to be answered by a reset */
	core_drop(c, 0, false);
	core_leave(c->t, c);
}

/* At a time that the peer knows: the next stack's clock may be behind ours. */
void core_nudge(struct vmh_tcp_conn *c)
{
	if (!c->pcb || !c->frozen)
		return;
	c->t->now = c->t->env.now_ns(c->t->env.ctx) / 1000;
	core_send_probe(c, c->ts_sent);
}

void core_forget_kept(struct vmh_tcp_conn *c)
{
	struct kept *k;

	while ((k = c->kept)) {
		c->kept = k->next;
		vmh_heap_free(k);
	}
	c->kept_bytes = 0;
	c->urgent = c->kept_full = false;
}

const void *core_urgent(struct vmh_tcp_conn *c, const void *after, size_t *len)
{
	const struct kept *k = c->kept;

	if (after)
		k = ((const struct kept *)((const char *)after - offsetof(struct kept, frame)))->next;
	if (!k)
		return NULL;
	*len = k->len;
	return k->frame;
}

/* Bytes of a queue from `from` on: counted, and copied if `to` is not NULL. */
static uint32_t gather(const struct tcp_seg *s, uint32_t from, uint8_t *to)
{
	uint32_t total = 0;

	for (; s; s = s->next) {
		uint32_t seq = lwip_ntohl(s->tcphdr->seqno), skip = TCP_SEQ_LT(seq, from) ? from - seq : 0;
		const uint8_t *data = (const uint8_t *)s->tcphdr + TCPH_HDRLEN_BYTES(s->tcphdr);

		if (skip >= s->len)
			continue;
		if (to)
			memcpy(to + total, data + skip, s->len - skip);
		total += s->len - skip;
	}
	return total;
}

static uint32_t closing_flags(const struct vmh_tcp_conn *c, uint32_t send_len)
{
	const struct tcp_pcb *pcb = c->pcb;
	uint32_t f = 0, fin = pcb->lastack + send_len;

	if (c->shut_rd)
		f |= VMH_TCP_F_SHUT_RD;
	if (c->eof)
		f |= VMH_TCP_F_PEER_FIN;
	if (!c->shut_wr)
		return f;
	f |= VMH_TCP_F_FIN_WANTED;
	if (pcb->state == FIN_WAIT_2)
		f |= VMH_TCP_F_FIN_SENT | VMH_TCP_F_FIN_ACKED;
	else if (TCP_SEQ_GT(pcb->snd_nxt, fin))
		f |= VMH_TCP_F_FIN_SENT;
	return f;
}

static uint32_t option_flags(const struct vmh_tcp_conn *c)
{
	uint32_t f = 0;

	f |= c->pcb->flags & TF_WND_SCALE ? VMH_TCP_F_WSCALE : 0;
	f |= c->pcb->flags & TF_SACK ? VMH_TCP_F_SACK : 0;
	f |= c->pcb->flags & TF_TIMESTAMP ? VMH_TCP_F_TIMESTAMPS : 0;
	f |= c->opt.nodelay ? VMH_TCP_F_NODELAY : 0;
	f |= c->opt.cork ? VMH_TCP_F_CORK : 0;
	f |= c->opt.quickack ? VMH_TCP_F_QUICKACK : 0;
	f |= c->opt.keepalive ? VMH_TCP_F_KEEPALIVE : 0;
	return f;
}

static void fill_sequence(const struct vmh_tcp_conn *c, struct vmh_tcp_state *s)
{
	const struct tcp_pcb *pcb = c->pcb;

	s->send_len = gather(pcb->unacked, pcb->lastack, NULL) + gather(pcb->unsent, pcb->lastack, NULL);
	s->recv_len = c->rx_bytes;
	s->flags = option_flags(c) | closing_flags(c, s->send_len);
	s->snd_una = pcb->lastack - !!(s->flags & VMH_TCP_F_FIN_ACKED);
	s->snd_nxt = pcb->snd_nxt - !!(s->flags & VMH_TCP_F_FIN_SENT);
	s->rcv_nxt = pcb->rcv_nxt - c->eof;
	s->snd_wl1 = pcb->snd_wl1;
	s->snd_wnd = pcb->snd_wnd;
	s->max_window = pcb->snd_wnd_max;
	s->rcv_wup = pcb->rcv_nxt - c->eof;
	s->rcv_wnd = TCP_SEQ_GT(pcb->rcv_ann_right_edge, s->rcv_wup) ? pcb->rcv_ann_right_edge - s->rcv_wup : 0;
}

static void fill_rest(const struct vmh_tcp_conn *c, struct vmh_tcp_state *s)
{
	const struct tcp_pcb *pcb = c->pcb;
	bool scaled = pcb->flags & TF_WND_SCALE;

	s->snd_wscale = scaled ? pcb->snd_scale : 0;
	s->rcv_wscale = scaled ? pcb->rcv_scale : 0;
	s->mss = pcb->mss;
	s->snd_mss = pcb->mss - (pcb->flags & TF_TIMESTAMP ? 12u : 0);
	s->rcv_mss = c->path.mtu - key_headers(&c->key);
	s->pmtu = c->path.mtu;
	s->tsval_now = (uint32_t)(c->t->now / 1000) + c->ts_offset;
	s->tsval_idle = s->tsval_now - c->ts_sent;
	s->ts_recent = pcb->ts_recent;
	s->srtt_us = c->srtt;
	s->rttvar_us = c->rttvar;
	s->rto_us = recovery_rto_us(c);
	s->cwnd = c->cwnd;
	s->ssthresh = c->ssthresh;
	s->retries = c->retries;
	s->ttl = key_ttl(&c->key, &c->opt);
	s->tos = key_tos(&c->key, &c->opt);
	s->keep_cnt = c->opt.keep_cnt;
	s->keep_idle_s = c->opt.keep_idle_s;
	s->keep_intvl_s = c->opt.keep_intvl_s;
	s->user_timeout_ms = c->opt.user_timeout_ms;
	s->sndbuf = c->opt.sndbuf_asked ? c->opt.sndbuf : 0;
	s->rcvbuf = c->opt.rcvbuf_asked ? c->opt.rcvbuf : 0;
	s->error = (uint32_t)c->error;
	s->bytes_acked = c->count.bytes_acked;
	s->bytes_received = c->count.bytes_received;
	s->segs_out = c->count.segs_out;
	s->segs_in = c->count.segs_in;
	s->retransmits = c->count.retransmits;
}

bool core_movable(const struct vmh_tcp_conn *c)
{
	unsigned s = c->pcb ? c->pcb->state : CLOSED;

	return s == ESTABLISHED || s == CLOSE_WAIT || s == FIN_WAIT_1 || s == FIN_WAIT_2 || s == CLOSING || s == LAST_ACK;
}

ssize_t core_export(struct vmh_tcp_conn *c, void *blob, size_t size)
{
	struct vmh_tcp_state s = {.magic = VMH_TCP_STATE_MAGIC, .version = VMH_TCP_STATE_VERSION,
				  .header_len = VMH_TCP_STATE_LEN, .family = key_is4(&c->key) ? AF_INET : AF_INET6,
				  .state = core_state(c)};
	const size_t at = s.family == AF_INET ? 12 : 0; /* of the address in the mapped one */
	uint8_t *to = (uint8_t *)blob + sizeof(s);
	struct iovec unread;
	size_t needed;

	if (!c->frozen || !core_movable(c))
		return -ENOTSUP;
	c->t->now = c->t->env.now_ns(c->t->env.ctx) / 1000;
	memcpy(s.laddr, c->key.laddr.b + at, 16 - at);
	memcpy(s.raddr, c->key.raddr.b + at, 16 - at);
	s.lport = c->key.lport;
	s.rport = c->key.rport;
	fill_sequence(c, &s);
	fill_rest(c, &s);
	needed = sizeof(s) + s.send_len + s.recv_len;
	if (size < needed)
		return (ssize_t)needed;
	memcpy(blob, &s, sizeof(s));
	to += gather(c->pcb->unacked, c->pcb->lastack, to);
	to += gather(c->pcb->unsent, c->pcb->lastack, to);
	unread = (struct iovec){to, s.recv_len};
	if (s.recv_len)
		core_read(c, &unread, 1, true);
	return (ssize_t)needed;
}

/* ---- import ---- */

static int check(const struct vmh_tcp_state *s, size_t len)
{
	uint32_t sent = s->snd_nxt - s->snd_una, f = s->flags;

	if (s->magic != VMH_TCP_STATE_MAGIC || s->version != VMH_TCP_STATE_VERSION || s->header_len != VMH_TCP_STATE_LEN)
		return -EPROTONOSUPPORT;
	if (s->family != AF_INET && s->family != AF_INET6)
		return -EAFNOSUPPORT;
	if (f & ~VMH_TCP_F_ALL || s->send_len > VMH_TCP_STATE_MAX_QUEUE || s->recv_len > VMH_TCP_STATE_MAX_QUEUE ||
	    len != sizeof(*s) + (size_t)s->send_len + s->recv_len || sent > s->send_len || !s->lport || !s->rport ||
	    s->snd_wscale > 14 || s->rcv_wscale > 14 || s->mss < 48 || s->rcv_wnd > 1u << 30 || s->snd_wnd > 1u << 30)
		return -EINVAL;
	if ((f & VMH_TCP_F_FIN_SENT && (!(f & VMH_TCP_F_FIN_WANTED) || sent != s->send_len)) ||
	    (f & VMH_TCP_F_FIN_ACKED && (!(f & VMH_TCP_F_FIN_SENT) || s->send_len)))
		return -EINVAL;
	if (f & VMH_TCP_F_FIN_ACKED && f & VMH_TCP_F_PEER_FIN) /* closed */
		return -ENOTSUP;
	return s->send_len > TCP_SND_BUF ? -ENOBUFS : 0;
}

static void import_options(const struct vmh_tcp_state *s, struct vmh_tcp_options *o)
{
	vmh_tcp_options_init(o);
	o->nodelay = s->flags & VMH_TCP_F_NODELAY;
	o->cork = s->flags & VMH_TCP_F_CORK;
	o->quickack = s->flags & VMH_TCP_F_QUICKACK;
	o->keepalive = s->flags & VMH_TCP_F_KEEPALIVE;
	if (s->family == AF_INET) {
		o->ttl = s->ttl ? s->ttl : o->ttl;
		o->tos = s->tos;
	} else {
		o->hops = s->ttl ? s->ttl : o->hops;
		o->tclass = s->tos;
	}
	o->keep_cnt = s->keep_cnt ? s->keep_cnt : o->keep_cnt;
	o->keep_idle_s = s->keep_idle_s ? s->keep_idle_s : o->keep_idle_s;
	o->keep_intvl_s = s->keep_intvl_s ? s->keep_intvl_s : o->keep_intvl_s;
	o->user_timeout_ms = s->user_timeout_ms;
	o->sndbuf_asked = s->sndbuf;
	o->rcvbuf_asked = s->rcvbuf;
	if (s->sndbuf)
		o->sndbuf = LWIP_MIN(s->sndbuf, TCP_SND_BUF);
	if (s->rcvbuf)
		o->rcvbuf = LWIP_MIN(s->rcvbuf, TCP_WND);
	if (s->flags & VMH_TCP_F_WSCALE)
		o->rcvbuf = (uint32_t)LWIP_MIN((uint64_t)o->rcvbuf, (uint64_t)0xffff << s->rcv_wscale);
}

static void import_pcb(struct vmh_tcp_conn *c, const struct vmh_tcp_state *s)
{
	struct tcp_pcb *pcb = c->pcb;
	uint32_t mss = LWIP_MIN(s->mss, LWIP_MIN(c->path.mtu - (uint32_t)key_headers(&c->key), TCP_MSS));

	pcb->local_ip.addr = key_local(&c->key);
	pcb->remote_ip.addr = key_remote(&c->key);
	pcb->local_port = lwip_ntohs(c->key.lport);
	pcb->remote_port = lwip_ntohs(c->key.rport);
	pcb->state = ESTABLISHED;
	pcb->mss = (u16_t)mss;
	tcp_set_flags(pcb, (tcpflags_t)((s->flags & VMH_TCP_F_WSCALE ? TF_WND_SCALE : 0) |
					(s->flags & VMH_TCP_F_SACK ? TF_SACK : 0) |
					(s->flags & VMH_TCP_F_TIMESTAMPS ? TF_TIMESTAMP : 0)));
	pcb->snd_scale = s->snd_wscale;
	pcb->rcv_scale = s->rcv_wscale;
	pcb->lastack = pcb->snd_wl2 = pcb->snd_lbb = pcb->snd_nxt = s->snd_una;
	pcb->snd_wl1 = s->snd_wl1;
	pcb->snd_wnd = s->snd_wnd;
	pcb->snd_wnd_max = LWIP_MAX(s->max_window, s->snd_wnd);
	pcb->rcv_nxt = pcb->ts_lastacksent = s->rcv_nxt;
	pcb->rcv_ann_right_edge = s->rcv_wup + s->rcv_wnd;
	pcb->rcv_wnd = TCP_SEQ_GT(pcb->rcv_ann_right_edge, s->rcv_nxt) ? pcb->rcv_ann_right_edge - s->rcv_nxt : 0;
	pcb->rcv_ann_wnd = pcb->rcv_wnd;
	pcb->ts_recent = s->ts_recent;
	c->ts_offset = s->tsval_now - (uint32_t)(c->t->now / 1000);
	c->ts_sent = s->tsval_now - s->tsval_idle;
}

static int put(struct vmh_tcp_conn *c, const uint8_t *data, uint32_t len)
{
	for (uint32_t at = 0, part; at < len; at += part) {
		part = LWIP_MIN(len - at, 0xf000u);
		if (tcp_write(c->pcb, data + at, (u16_t)part, TCP_WRITE_FLAG_COPY))
			return -ENOMEM;
	}
	return 0;
}

static void all_sent(struct tcp_pcb *pcb)
{
	struct tcp_seg **end = &pcb->unacked;

	while (*end)
		end = &(*end)->next;
	*end = pcb->unsent;
	pcb->unsent = NULL;
	pcb->unsent_oversize = 0;
	pcb->snd_nxt = pcb->snd_lbb;
	for (struct tcp_seg *s = pcb->unacked; s; s = s->next)
		TCPH_SET_FLAG(s->tcphdr, TCP_ACK);
	if (pcb->unacked)
		pcb->rtime = 0;
}

static int import_queues(struct vmh_tcp_conn *c, const struct vmh_tcp_state *s, const uint8_t *send, const uint8_t *recv)
{
	struct tcp_pcb *pcb = c->pcb;
	uint32_t sent = s->snd_nxt - s->snd_una;

	if (put(c, send, sent))
		return -ENOMEM;
	all_sent(pcb);
	if (put(c, send + sent, s->send_len - sent))
		return -ENOMEM;
	for (uint32_t at = 0, part; at < s->recv_len; at += part) {
		struct pbuf *p = pbuf_alloc(PBUF_RAW, (u16_t)(part = LWIP_MIN(s->recv_len - at, 0x8000u)), PBUF_RAM);

		if (!p)
			return -ENOMEM;
		memcpy(p->payload, recv + at, part);
		hold_append(c, p);
	}
	return 0;
}

static int import_closing(struct vmh_tcp_conn *c, const struct vmh_tcp_state *s)
{
	struct tcp_pcb *pcb = c->pcb;

	c->shut_rd = s->flags & VMH_TCP_F_SHUT_RD;
	if (s->flags & VMH_TCP_F_PEER_FIN) {
		c->eof = true;
		pcb->rcv_nxt++;
		if (pcb->rcv_wnd)
			pcb->rcv_wnd--;
		pcb->state = CLOSE_WAIT;
	}
	if (!(s->flags & VMH_TCP_F_FIN_WANTED))
		return 0;
	c->shut_wr = true;
	if (s->flags & VMH_TCP_F_FIN_ACKED) {
		pcb->lastack++;
		pcb->snd_nxt++;
		pcb->snd_lbb++;
		pcb->snd_wl2++;
		tcp_set_flags(pcb, TF_FIN);
		pcb->state = FIN_WAIT_2;
		return 0;
	}
	if (tcp_send_fin(pcb))
		return -ENOMEM;
	/* CLOSING is CLOSE_WAIT with our FIN: LAST_ACK does the same but for TIME_WAIT, which the peer's side has */
	pcb->state = c->eof ? LAST_ACK : FIN_WAIT_1;
	if (s->flags & VMH_TCP_F_FIN_SENT)
		all_sent(pcb);
	return 0;
}

static int import_inside(struct vmh_tcp_conn *c, const struct vmh_tcp_state *s, const uint8_t *data)
{
	struct tcp_pcb *pcb = tcp_new();
	int rc;

	if (!pcb)
		return -ENOMEM;
	core_callbacks(c, pcb);
	import_pcb(c, s);
	tcp_active_pcbs = pcb;
	rc = import_queues(c, s, data, data + s->send_len);
	if (!rc)
		rc = import_closing(c, s);
	if (rc)
		return rc;
	c->established = c->imported = true;
	recovery_start(c);
	c->una = pcb->lastack;
	c->nxt = pcb->snd_nxt;
	c->srtt = s->srtt_us;
	c->rttvar = s->rttvar_us;
	c->error = (int)s->error;
	c->count.bytes_acked = s->bytes_acked;
	c->count.bytes_received = s->bytes_received;
	c->count.segs_in = s->segs_in;
	c->count.segs_out = s->segs_out;
	c->count.retransmits = s->retransmits;
	return 0;
}

static struct key import_key(const struct vmh_tcp_state *s)
{
	struct key k = {.laddr = vmh_ip6(s->laddr), .raddr = vmh_ip6(s->raddr), .lport = s->lport, .rport = s->rport};
	in_addr_t l, r;

	if (s->family == AF_INET) {
		memcpy(&l, s->laddr, 4);
		memcpy(&r, s->raddr, 4);
		k.laddr = vmh_ip4(l);
		k.raddr = vmh_ip4(r);
	}
	return k;
}

/* It lived elsewhere since it was forgotten, and its name is its own again. */
static void back_again(struct vmh_tcp *t, const struct key *k)
{
	struct tw *w = demux_tw(t, k);

	if (w && w->moved)
		demux_tw_remove(t, w);
}

/* Nothing is sent before the first frame or timer, or the holder's next call: vmh_tcp_thaw begins at once. */
int core_import(struct vmh_tcp *t, const void *blob, size_t len, const struct vmh_tcp_path *p, void *user,
		struct vmh_tcp_conn **out)
{
	struct vmh_tcp_options o;
	struct vmh_tcp_state s;
	struct vmh_tcp_conn *c;
	struct key k;
	int rc;

	if (len < sizeof(s))
		return -EINVAL;
	memcpy(&s, blob, sizeof(s));
	rc = check(&s, len);
	if (rc)
		return rc;
	k = import_key(&s);
	if (key_is4(&k) != (s.family == AF_INET))
		return -EINVAL;
	import_options(&s, &o);
	c = core_conn_new(t, &k, &o);
	if (!c)
		return -ENOMEM;
	c->path = *p;
	c->user = user;
	if (demux_add(c)) {
		core_conn_free(c);
		return -EADDRNOTAVAIL;
	}
	core_enter(t, c);
	rc = import_inside(c, &s, (const uint8_t *)blob + sizeof(s));
	if (rc) {
		c->app_closed = true;
		core_drop(c, 0, false);
	} else {
		c->frozen = true;
		back_again(t, &k);
	}
	core_leave(t, c);
	if (!rc)
		*out = c;
	return rc;
}
