/* Going into lwIP and coming out of it; what it calls back; the life of a connection's struct. */
#include "core.h"
#include "ops.h"
#include <sys/random.h>

#define DEFAULT_TW 65536u
#define PATH_MTU 1500u
#define MSS_MIN 48 /* tcp_min_snd_mss of Linux */

void core_enter(struct vmh_tcp *t, struct vmh_tcp_conn *c)
{
	core_now = t;
	core_conn = c;
	t->now = t->env.now_ns(t->env.ctx) / 1000;
	tcp_ticks = (u32_t)(t->now / 1000);
	t->netif.mtu = (u16_t)((c ? c->path.mtu : t->reply.mtu) - (key_is4(c ? &c->key : &t->in) ? 0 : 20)); /* as IPv4 */
	if (c && c->pcb) {
		tcp_active_pcbs = c->pcb;
		c->pcb->next = NULL;
	}
}

void core_note(struct vmh_tcp_conn *c)
{
	const struct vmh_tcp_amounts a = {.unread = c->rx_bytes, .unread_pieces = c->rx_pieces, .resent = c->resent,
					  .unacked = c->pcb && !c->listening ? TCP_SND_BUF - c->pcb->snd_buf : 0};

	c->events = core_events(c);
	if (c->t->env.level)
		c->t->env.level(c->t->env.ctx, c->user, c->events | (unsigned)core_state(c) << 16, &a);
}

static void tell(struct vmh_tcp_conn *c)
{
	unsigned before = c->events;
	bool news;

	core_note(c);
	news = c->changed || c->events & ~before;
	c->changed = false;
	if (news && c->t->env.ready)
		c->t->env.ready(c->t->env.ctx, c->user, c);
}

static void finish(struct vmh_tcp_conn *c)
{
	if (!c->pcb && !c->listening) {
		core_delist(c);
		demux_remove(c);
		timer_remove(c);
		if (c->parent && !c->in_accept_queue) {
			list_remove(&c->parent->listening->half_open, c);
			core_conn_free(c);
			return;
		}
		if (c->app_closed) {
			core_conn_free(c);
			return;
		}
	} else if (c->pcb) {
		timer_sync(c);
	}
	if (c->in_accept_queue)
		tell(c->parent);
	else if (!c->parent && !c->app_closed)
		tell(c);
}

void core_leave(struct vmh_tcp *t, struct vmh_tcp_conn *c)
{
	struct tcp_pcb *tw = tcp_tw_pcbs;
	struct vmh_tcp_conn *fresh = t->new_conn;

	/* tcp_output() forgets it when Nagle keeps back the data that it would go with */
	if (c && c->pcb && c->pcb->flags & TF_ACK_NOW && c->pcb->state >= ESTABLISHED && !c->frozen)
		tcp_send_empty_ack(c->pcb);
	tcp_active_pcbs = NULL;
	tcp_tw_pcbs = NULL;
	if (tw) { /* c's */
		demux_remove(c);
		demux_tw_add(c, tw, false);
		c->last_state = TIME_WAIT;
		tcp_pcb_purge(tw);
		tcp_free(tw);
		c->pcb = NULL;
	}
	t->new_conn = NULL;
	core_conn = NULL;
	if (c)
		finish(c);
	if (fresh)
		finish(fresh);
	core_now = NULL;
}

/* ---- lwIP calls ---- */

static void pcb_gone(u8_t id, void *data)
{
	struct vmh_tcp_conn *c = data;

	(void)id;
	if (c && c->pcb) {
		if (c->last_state != TIME_WAIT)
			c->last_state = (uint8_t)c->pcb->state;
		core_get_settled(c, &c->count); /* is told after the end, too */
		c->count.left = core_ahead(c->pcb->snd_lbb, c->pcb->lastack);
		c->count.left_unsent = core_ahead(c->pcb->snd_lbb, c->pcb->snd_nxt);
		if (c->opened && c->established && c->last_state != TIME_WAIT)
			demux_ended(c->t, &c->key, c->pcb->snd_nxt);
		c->pcb = NULL;
	}
}

static void on_error(void *arg, err_t err)
{
	struct vmh_tcp_conn *c = arg;
	unsigned state = c->pcb ? c->pcb->state : c->last_state;

	if (err == ERR_RST)
		c->error = state == SYN_SENT ? ECONNREFUSED : state == CLOSE_WAIT ? EPIPE : ECONNRESET;
	c->count.why = (uint32_t)c->error;
	c->changed = true;
}

static err_t on_data(void *arg, struct tcp_pcb *pcb, struct pbuf *p, err_t err)
{
	struct vmh_tcp_conn *c = arg;

	(void)pcb, (void)err;
	c->changed = true;
	if (!p) {
		c->eof = true;
		return ERR_OK;
	}
	for (struct pbuf *next; p; p = next) {
		next = p->next;
		p->next = NULL;
		c->count.bytes_received += p->len;
		if (!p->len) {
			pbuf_free(p);
			continue;
		}
		hold_append(c, p);
	}
	return ERR_OK;
}

static err_t on_sent(void *arg, struct tcp_pcb *pcb, u16_t len)
{
	struct vmh_tcp_conn *c = arg;

	(void)pcb;
	c->count.bytes_acked += len;
	c->changed = true;
	return ERR_OK;
}

static uint32_t window_max(const struct tcp_pcb *pcb)
{
	return pcb->flags & TF_WND_SCALE ? (uint32_t)LWIP_MIN((uint64_t)TCP_WND, 0xffffull << pcb->rcv_scale) : 0xffff;
}

static void set_first_window(struct vmh_tcp_conn *c)
{
	struct tcp_pcb *pcb = c->pcb;

	if (c->opt.mss_max && pcb->mss > c->opt.mss_max)
		pcb->mss = c->opt.mss_max;
	pcb->mss = LWIP_MAX(pcb->mss, MSS_MIN);
	pcb->rcv_wnd = pcb->rcv_ann_wnd = LWIP_MIN(c->opt.rcvbuf, window_max(pcb));
	pcb->rcv_ann_right_edge = pcb->rcv_nxt + LWIP_MIN(c->opt.rcvbuf, 0xffff); /* what the SYN said */
}

static void enlist(struct vmh_tcp_conn *c)
{
	struct vmh_tcp_addr a = {.laddr = c->key.laddr, .raddr = c->key.raddr, .lport = c->key.lport, .rport = c->key.rport};

	if (c->t->env.opened)
		c->place = c->t->env.opened(c->t->env.ctx, &a);
}

void core_delist(struct vmh_tcp_conn *c)
{
	if (c->place)
		c->t->env.over(c->t->env.ctx, c->place);
	c->place = 0;
}

static err_t begin(struct vmh_tcp_conn *c)
{
	enlist(c);
	set_first_window(c);
	c->established = c->changed = true;
	recovery_start(c);
	return ERR_OK;
}

static err_t on_connected(void *arg, struct tcp_pcb *pcb, err_t err)
{
	struct vmh_tcp_conn *c = arg;

	(void)pcb, (void)err;
	c->count.bytes_acked++; /* as Linux: our SYN */
	c->young = true;
	return begin(c);
}

static err_t on_accept(void *arg, struct tcp_pcb *pcb, err_t err)
{
	struct vmh_tcp_conn *c = arg, *l = c ? c->parent : NULL;

	if (err != ERR_OK || !l)
		return ERR_VAL;
	pcb->listener = NULL;
	list_remove(&l->listening->half_open, c);
	list_add(&l->listening->ready, c);
	c->in_accept_queue = true;
	l->changed = true;
	return begin(c);
}

static err_t on_passive_open(u8_t id, struct tcp_pcb_listen *lpcb, struct tcp_pcb *pcb)
{
	struct vmh_tcp_conn *l = lpcb->callback_arg, *c;
	struct vmh_tcp *t = core_now;

	(void)id, (void)lpcb;
	c = core_conn_new(t, &t->in, &l->opt);
	if (!c || demux_add(c)) {
		vmh_heap_free(c);
		return ERR_MEM;
	}
	c->path = t->reply;
	c->parent = l;
	c->user = NULL;
	c->una = c->nxt = pcb->lastack;
	c->heard_at = t->now;
	core_callbacks(c, pcb);
	if (t->recalling) /* a cookie needs them, and the peer was told */
		c->opt.no_timestamps = false;
	if (c->opt.no_timestamps)
		tcp_clear_flags(pcb, TF_TIMESTAMP);
	if (c->opt.no_sack)
		tcp_clear_flags(pcb, TF_SACK);
	if (c->opt.no_wscale) {
		tcp_clear_flags(pcb, TF_WND_SCALE);
		pcb->rcv_scale = pcb->snd_scale = 0;
		pcb->rcv_wnd = pcb->rcv_ann_wnd = 0xffff;
	}
	list_add(&l->listening->half_open, c);
	t->new_conn = c;
	core_conn = c; /* the SYN-ACK goes by its path and clock */
	return ERR_OK;
}

static const struct tcp_ext_arg_callbacks ext_callbacks = {.destroy = pcb_gone, .passive_open = on_passive_open};

void core_callbacks(struct vmh_tcp_conn *c, struct tcp_pcb *pcb)
{
	c->pcb = c->listening ? NULL : pcb;
	tcp_ext_arg_set_callbacks(pcb, 0, &ext_callbacks);
	tcp_ext_arg_set(pcb, 0, c->listening ? NULL : c);
	tcp_arg(pcb, c);
	if (c->listening) {
		tcp_accept(pcb, on_accept);
		return;
	}
	pcb->connected = on_connected;
	tcp_recv(pcb, on_data);
	tcp_sent(pcb, on_sent);
	tcp_err(pcb, on_error);
	pcb->ttl = key_ttl(&c->key, &c->opt);
	pcb->tos = key_tos(&c->key, &c->opt);
	core_nagle(c);
}

/* As in Linux (Minshall): less than a segment waits only for such a one before it, not for whole ones. */
void core_nagle(struct vmh_tcp_conn *c)
{
	if (!c->opt.cork && (c->opt.nodelay || !c->short_out)) /* as in Linux the cork is stronger */
		tcp_set_flags(c->pcb, TF_NODELAY);
	else
		tcp_clear_flags(c->pcb, TF_NODELAY);
}

/* ---- connections ---- */

struct vmh_tcp_conn *core_conn_new(struct vmh_tcp *t, const struct key *k, const struct vmh_tcp_options *o)
{
	struct vmh_tcp_conn *c = vmh_heap_zero(1, sizeof(*c));

	if (!c)
		return NULL;
	c->ops = t->ops;
	c->t = t;
	c->key = *k;
	c->opt = *o;
	c->path.mtu = PATH_MTU;
	c->heard_at = t->now;
	c->ts_offset = (uint32_t)core_hash(t, k, 2);
	return c;
}

void core_conn_free(struct vmh_tcp_conn *c)
{
	core_delist(c);
	while (c->rx_head)
		pbuf_free(hold_pop(c));
	vmh_heap_free(c->listening);
	core_forget_kept(c);
	vmh_heap_free(c);
}

void core_ack_soon(struct vmh_tcp_conn *c)
{
	tcp_set_flags(c->pcb, TF_ACK_DELAY);
	c->due[T_ACK] = c->t->now;
	if (c->t->env.soon)
		c->t->env.soon(c->t->env.ctx);
}

/* The pcb ends here and now; core_leave does the rest. */
void core_drop(struct vmh_tcp_conn *c, int err, bool reset)
{
	if (!c->pcb)
		return;
	if (err && !c->error)
		c->error = err;
	c->count.why = (uint32_t)c->error;
	c->changed = true;
	tcp_abandon(c->pcb, reset);
}

/* The buffers of the start are enough where a round trip is short. Where it is long, the one of the sender is twice what
 * may be on its way, and the one of the receiver twice what the program reads in a round trip, as in Linux. The shortest
 * round trip counts: a queue of our own making is no long way. */
#define LONG_WAY_US 2000u

void core_grow_sndbuf(struct vmh_tcp_conn *c)
{
	if (c->min_rtt >= LONG_WAY_US && c->cwnd > core_sndbuf(c) / 2)
		c->grown_snd = LWIP_MIN(2 * c->cwnd, TCP_SND_BUF);
}

static void grow_rcvbuf(struct vmh_tcp_conn *c)
{
	uint64_t read = c->count.bytes_received - c->rx_bytes, us = c->t->now - c->read_at;

	if (c->srtt < LONG_WAY_US || us < c->srtt)
		return;
	if (c->read_at && (read - c->read_then) * c->srtt / us > core_rcvbuf(c) / 2)
		c->grown_rcv = LWIP_MIN(2 * core_rcvbuf(c), window_max(c->pcb));
	c->read_then = read;
	c->read_at = c->t->now;
}

/* The window follows what the program has read. Its right edge never moves to the left. True: the peer is to be told, since
 * it is worth a segment (RFC 1122, 4.2.3.3). */
bool core_window_due(struct vmh_tcp_conn *c)
{
	struct tcp_pcb *pcb = c->pcb;
	uint32_t announced, limit = window_max(pcb), rcvbuf, size, more, worth;

	if (c->settling)
		return false;
	grow_rcvbuf(c);
	rcvbuf = core_rcvbuf(c);
	announced = TCP_SEQ_GT(pcb->rcv_ann_right_edge, pcb->rcv_nxt) ? pcb->rcv_ann_right_edge - pcb->rcv_nxt : 0;
	size = LWIP_MIN(rcvbuf, limit);
	size = size > c->rx_bytes ? size - c->rx_bytes : 0;
	size = LWIP_MAX(size, announced);
	pcb->rcv_wnd = size;
	more = size - announced;
	worth = LWIP_MIN(rcvbuf / 2, LWIP_MAX(2u * pcb->mss, rcvbuf / 8));
	if (announced < pcb->mss)
		worth = LWIP_MIN(rcvbuf / 2, 2u * pcb->mss);
	if (more < LWIP_MIN(worth, pcb->mss))
		return false;
	pcb->rcv_ann_wnd = size;
	return more >= worth;
}

void core_window(struct vmh_tcp_conn *c)
{
	if (core_window_due(c)) {
		tcp_ack_now(c->pcb);
		tcp_output(c->pcb);
	}
}

static bool writable(const struct vmh_tcp_conn *c)
{
	uint32_t used = TCP_SND_BUF - c->pcb->snd_buf;

	if (c->opt.segs_max && c->pcb->snd_queuelen > c->opt.segs_max / 2)
		return false;
	return used < core_sndbuf(c) && core_sndbuf(c) - used >= used / 2; /* sk_stream_is_writeable() of Linux */
}

unsigned core_events(struct vmh_tcp_conn *c)
{
	unsigned e = 0;

	if (c->listening)
		return c->listening->ready.n ? VMH_TCP_IN : 0;
	if (c->error)
		e |= VMH_TCP_ERR;
	if (c->urgent)
		e |= VMH_TCP_URGENT;
	if (c->long_frames)
		e |= VMH_TCP_LONG;
	if (c->fragments)
		e |= VMH_TCP_FRAGMENTS;
	if (c->rx_bytes)
		e |= VMH_TCP_IN;
	if (!c->pcb)
		return e | VMH_TCP_IN | VMH_TCP_OUT | VMH_TCP_RDHUP | VMH_TCP_HUP | VMH_TCP_DRAINED;
	if (!c->established)
		return e;
	if (c->eof || c->shut_rd)
		e |= VMH_TCP_IN | VMH_TCP_RDHUP;
	if (c->shut_wr || writable(c))
		e |= VMH_TCP_OUT;
	if ((c->eof || c->shut_rd) && c->shut_wr)
		e |= VMH_TCP_HUP;
	if (!c->pcb->unacked && !c->pcb->unsent)
		e |= VMH_TCP_DRAINED;
	return e;
}

/* ---- instances ---- */

static int core_open(const struct vmh_tcp_env *env, const struct vmh_tcp_ops *self, unsigned core, struct vmh_tcp **out)
{
	struct vmh_tcp *t = vmh_heap_zero(1, sizeof(*t));

	if (!t)
		return -ENOMEM;
	t->ops = self;
	t->core = core;
	t->env = *env;
	if (!t->env.tw_max)
		t->env.tw_max = DEFAULT_TW;
	t->reply.mtu = PATH_MTU;
	NETIF_SET_CHECKSUM_CTRL(&t->netif, NETIF_CHECKSUM_ENABLE_ALL & ~NETIF_CHECKSUM_CHECK_TCP); /* input.c checks */
	t->now = env->now_ns(env->ctx) / 1000;
	if (getrandom(t->secret, sizeof(t->secret), 0) != sizeof(t->secret) || demux_open(t)) {
		vmh_heap_free(t);
		return -ENOMEM;
	}
	*out = t;
	return 0;
}

static void destroy_listener(struct vmh_tcp_conn *l)
{
	struct conn_list *ready = &l->listening->ready;

	for (struct vmh_tcp_conn *c = ready->head, *next; c; c = next) {
		next = c->q_next;
		if (!c->hashed) /* reset before anyone accepted it */
			core_conn_free(c);
	}
	tcp_listen_pcbs.listen_pcbs = l->listening->pcb;
	tcp_close((struct tcp_pcb *)l->listening->pcb);
	core_conn_free(l);
}

static void core_destroy(struct vmh_tcp *t)
{
	struct vmh_tcp_conn *c, *next;

	for (c = t->listeners; c; c = next) {
		next = c->listening->next;
		destroy_listener(c);
	}
	for (uint32_t i = 0; i <= t->table_mask; i++)
		for (c = t->table[i]; c; c = next) {
			next = c->hash_next;
			core_enter(t, c);
			tcp_abandon(c->pcb, 0);
			tcp_active_pcbs = NULL;
			core_conn_free(c);
		}
	core_now = NULL;
	core_conn = NULL;
	demux_close(t);
	vmh_heap_free(t->heap);
	for (struct held *h = t->free_held, *n; h; h = n) {
		n = h->next;
		vmh_heap_free(h);
	}
	vmh_heap_free(t);
}

static unsigned core_poll(struct vmh_tcp_conn *c)
{
	core_note(c);
	return c->events;
}

static int core_error(struct vmh_tcp_conn *c)
{
	int err = c->error;

	c->error = 0;
	core_note(c);
	return err;
}

static void core_get_options(struct vmh_tcp_conn *c, struct vmh_tcp_options *o)
{
	*o = c->opt;
}

static void core_set_user(struct vmh_tcp_conn *c, void *user)
{
	c->user = user;
}

void core_address(struct vmh_tcp_conn *c, struct vmh_tcp_addr *a)
{
	*a = (struct vmh_tcp_addr){c->key.laddr, c->key.raddr, c->key.lport, c->key.rport};
}

static void core_get_stats(struct vmh_tcp *t, struct vmh_tcp_stats *s)
{
	*s = t->stats;
	s->conns = t->nconns;
	s->time_wait = t->ntw;
	s->listeners = 0;
	for (struct vmh_tcp_conn *l = t->listeners; l; l = l->listening->next)
		s->listeners++;
}

extern const struct vmh_tcp_ops vmh_tcp_core; /* scripts/lwip.py renames it in each copy */
const struct vmh_tcp_ops vmh_tcp_core = {
	.open = core_open, .destroy = core_destroy, .input = core_input, .input_all = merge_input, .tick = core_tick, .listen = core_listen,
	.accept = core_accept, .connect = core_connect, .write = core_write, .read = core_read, .take = core_take,
	.give = core_give, .shutdown = core_shutdown, .close = core_close, .poll = core_poll, .error = core_error,
	.fail = core_fail, .end = core_end, .set_options = core_set_options, .get_options = core_get_options, .set_path = core_set_path,
	.set_user = core_set_user, .address = core_address, .info = core_get_info, .stats = core_get_stats,
	.set_backlog = core_set_backlog, .half_open = core_half_open, .refuse = core_refuse, .name = core_name, .reclaim = core_reclaim,
	.port_users = demux_port_users, .in_use = demux_in_use, .port_names = demux_port_names, .closing = demux_closing, .let_go = hold_let_go,
	.resume = core_resume, .delist = core_delist, .nudge = core_nudge, .urgent = core_urgent,
	.settle = core_settle, .freeze = core_freeze, .export_ = core_export, .forget = core_forget,
	.import = core_import,
};
