/* What the holder of a connection calls. */
#include "core.h"
#include <sys/socket.h>

#define FRAME_MOST 0xf000u /* bytes of one tcp_write */

static void inside(struct vmh_tcp_conn *c)
{
	core_enter(c->t, c);
}

static void outside(struct vmh_tcp_conn *c)
{
	core_leave(c->t, c);
}

int core_listen(struct vmh_tcp *t, const struct vmh_ip *laddr, uint16_t lport, unsigned families, unsigned backlog,
		const struct vmh_tcp_options *o, void *user, struct vmh_tcp_conn **out)
{
	struct key k = {.laddr = *laddr, .lport = lport};
	struct vmh_tcp_conn *l;
	struct tcp_pcb *pcb;

	if (demux_taken(t, laddr, lport, families))
		return -EADDRINUSE;
	l = core_conn_new(t, &k, o);
	if (l)
		l->listening = vmh_heap_zero(1, sizeof(*l->listening));
	if (!l || !l->listening) {
		vmh_heap_free(l);
		return -ENOMEM;
	}
	l->user = user;
	l->listening->backlog = backlog;
	l->listening->families = families;
	core_enter(t, NULL);
	pcb = tcp_new();
	if (pcb) {
		tcp_bind(pcb, IP4_ADDR_ANY, lwip_ntohs(lport)); /* demux.c knows the address */
		pcb = tcp_listen_with_backlog(pcb, 255);
	}
	tcp_bound_pcbs = NULL;
	tcp_listen_pcbs.pcbs = NULL;
	core_leave(t, NULL);
	if (!pcb) {
		core_conn_free(l);
		return -ENOMEM;
	}
	core_callbacks(l, pcb);
	l->listening->pcb = (struct tcp_pcb_listen *)pcb;
	l->listening->next = t->listeners;
	t->listeners = l;
	*out = l;
	return 0;
}

int core_accept(struct vmh_tcp_conn *l, void *user, struct vmh_tcp_conn **out)
{
	struct vmh_tcp_conn *c = l->listening ? l->listening->ready.head : NULL;

	if (!l->listening)
		return -EINVAL;
	if (!c)
		return -EAGAIN;
	list_remove(&l->listening->ready, c);
	c->in_accept_queue = false;
	c->parent = NULL;
	c->user = user;
	core_note(l);
	*out = c;
	return 0;
}

void core_set_backlog(struct vmh_tcp_conn *l, unsigned backlog)
{
	if (l->listening)
		l->listening->backlog = backlog;
}

unsigned core_half_open(struct vmh_tcp_conn *l)
{
	return l->listening ? l->listening->half_open.n + cookie_awaited(l) : 0;
}

int core_reclaim(struct vmh_tcp *t, void *user, struct vmh_tcp_conn **out)
{
	struct vmh_tcp_conn *c = demux_orphan(t);

	if (!c)
		return -ENOENT;
	c->app_closed = false;
	c->user = user;
	*out = c;
	return 0;
}

int core_connect(struct vmh_tcp *t, const struct vmh_tcp_addr *a, const struct vmh_tcp_path *p,
		 const struct vmh_tcp_options *o, void *user, struct vmh_tcp_conn **out)
{
	struct key k = {a->laddr, a->raddr, a->lport, a->rport};
	struct vmh_tcp_conn *c;
	ip_addr_t from = {key_local(&k)}, to = {key_remote(&k)};
	struct tcp_pcb *pcb;
	struct tw *w;
	err_t err;

	core_tick(t); /* ACKs that wait for company: the peer accepts in the order of the calls */
	w = demux_tw(t, &k);
	if (!a->lport || !a->rport || vmh_ip_any(&a->laddr) || vmh_ip_any(&a->raddr) ||
	    vmh_ip_is4(&a->laddr) != vmh_ip_is4(&a->raddr))
		return -EINVAL;
	if (w && w->moved) /* it lives elsewhere */
		return -EADDRNOTAVAIL;
	c = core_conn_new(t, &k, o);
	if (!c)
		return -ENOMEM;
	c->path = *p;
	c->user = user;
	if (demux_add(c)) {
		vmh_heap_free(c);
		return -EADDRNOTAVAIL;
	}
	c->opened = true;
	t->reusing = w || demux_end(t, &k, &t->isn_floor);
	if (w) {
		t->isn_floor = w->snd_nxt;
		demux_tw_remove(t, w);
	}
	t->isn_floor += REUSE_GAP;
	core_enter(t, c);
	pcb = tcp_new();
	err = ERR_MEM;
	if (pcb) {
		core_callbacks(c, pcb);
		tcp_bind(pcb, &from, lwip_ntohs(a->lport));
		err = tcp_connect(pcb, &to, lwip_ntohs(a->rport), pcb->connected);
		if (err != ERR_OK)
			tcp_abandon(pcb, 0);
		else
			c->una = pcb->lastack;
	}
	tcp_bound_pcbs = NULL;
	t->reusing = false;
	if (err != ERR_OK) {
		c->parent = NULL;
		demux_remove(c);
		timer_remove(c);
		tcp_active_pcbs = NULL;
		core_now = NULL;
		core_conn = NULL;
		core_conn_free(c);
		return -ENOMEM;
	}
	core_leave(t, c);
	*out = c;
	return 0;
}

static bool corked(const struct vmh_tcp_conn *c, bool more)
{
	const struct tcp_seg *s = c->pcb->unsent;

	return (more || c->opt.cork) && s && !s->next && !is_whole(c->pcb, s);
}

/* An error is told once. */
static int told(struct vmh_tcp_conn *c, int rc)
{
	core_note(c);
	return rc;
}

/* -EPIPE and the like before anything is written */
static int may_write(struct vmh_tcp_conn *c)
{
	int err = c->error;

	if (c->listening)
		return -ENOTCONN;
	if (err) { /* also after SHUT_WR */
		c->error = 0;
		return -err;
	}
	if (c->shut_wr || !c->pcb)
		return -EPIPE;
	return c->established && !c->frozen ? 0 : -EAGAIN;
}

/* Of a buffer that the program has made small Linux asks only whether something is free, and then takes a frame of 64 KiB. */
static uint32_t room(const struct vmh_tcp_conn *c)
{
	uint32_t used = TCP_SND_BUF - c->pcb->snd_buf, left;

	if ((c->opt.segs_max && c->pcb->snd_queuelen >= c->opt.segs_max) || used >= core_sndbuf(c))
		return 0;
	left = core_sndbuf(c) - used;
	if (c->opt.sndbuf_asked)
		left = LWIP_MAX(left, FRAME_MOST);
	return LWIP_MIN(left, c->pcb->snd_buf);
}

static size_t queue(struct vmh_tcp_conn *c, const uint8_t *data, size_t len, bool more)
{
	size_t done = 0;

	while (done < len) {
		size_t part = LWIP_MIN(len - done, LWIP_MIN(room(c), c->opt.segs_max ? c->pcb->mss : FRAME_MOST));

		if (!part ||
		    tcp_write(c->pcb, data + done, (u16_t)part,
			      TCP_WRITE_FLAG_COPY | (more || done + part < len ? TCP_WRITE_FLAG_MORE : 0)) != ERR_OK)
			break;
		done += part;
	}
	return done;
}

/* All of a write that the window has room for goes. Linux sends it as one frame, and who gets more than a segment at a
 * time acknowledges it at once; ours comes as several, and the ACK of the last may take 40 ms. So less than a segment
 * does not wait for such a last one. */
static void output(struct vmh_tcp_conn *c, size_t wanted, bool alone)
{
	if (alone && c->short_tail && wanted < c->pcb->mss && !c->opt.cork)
		tcp_set_flags(c->pcb, TF_NODELAY);
	recovery_output(c);
	core_nagle(c);
	if (c->short_out && wanted > c->pcb->mss && c->short_end == c->pcb->snd_lbb)
		c->short_tail = true;
}

#define PROMPT_US 300

/* The first write. A peer that waits for the ACK in accept() is not to wait for a program that has other things to do, or
 * that lets the peer speak first. */
static void was_young(struct vmh_tcp_conn *c)
{
	c->young = false;
	c->t->prompt = !c->count.bytes_received && c->t->now - c->heard_at < PROMPT_US;
}

ssize_t core_write(struct vmh_tcp_conn *c, const struct iovec *iov, int n, bool more)
{
	size_t total = 0, wanted = 0, part;
	int rc = may_write(c);
	bool alone;

	if (rc)
		return told(c, rc);
	for (int i = 0; i < n; i++)
		wanted += iov[i].iov_len;
	inside(c);
	if (c->young)
		was_young(c);
	recovery_idle(c);
	if (n == 1 && !more && !c->opt.cork && fast_output(c, iov)) {
		outside(c);
		return (ssize_t)wanted;
	}
	alone = !c->pcb->unsent;
	for (int i = 0; i < n; i++) {
		part = queue(c, iov[i].iov_base, iov[i].iov_len, more || i + 1 < n);
		total += part;
		if (part < iov[i].iov_len)
			break;
	}
	if (total < wanted) /* as in Linux: all goes before it waits for room */
		recovery_push(c);
	else if (!corked(c, more))
		output(c, wanted, alone);
	tcp_clear_flags(c->pcb, total < wanted && !room(c) ? TF_NAGLEMEMERR : 0); /* a full buffer is no failed send */
	outside(c);
	return total || !wanted ? (ssize_t)total : -EAGAIN;
}

/* What a read gives when there is no data. */
static int no_data(struct vmh_tcp_conn *c)
{
	int err = c->error;

	if (c->listening)
		return -ENOTCONN;
	if (c->eof) /* before an error, as in Linux */
		return 0;
	if (err) {
		c->error = 0;
		return -err;
	}
	return c->shut_rd || !c->pcb ? 0 : -EAGAIN;
}

/* By the next tick, or with what is written before: that one tells the window, too. */
static bool ack_goes_soon(const struct vmh_tcp_conn *c)
{
	return c->due[T_ACK] && c->due[T_ACK] <= c->t->now;
}

static void was_read(struct vmh_tcp_conn *c)
{
	hold_was_read(c);
	if (c->pcb && c->established && !c->frozen && core_window_due(c) && !ack_goes_soon(c)) {
		inside(c);
		tcp_ack_now(c->pcb);
		tcp_output(c->pcb);
		outside(c);
	}
	core_note(c);
}

static size_t peek(const struct vmh_tcp_conn *c, const struct iovec *iov, int n)
{
	const struct pbuf *p = c->rx_head;
	size_t off = c->rx_off, total = 0;

	for (int i = 0; i < n && p; i++)
		for (size_t at = 0; at < iov[i].iov_len && p;) {
			size_t part = LWIP_MIN(p->len - off, iov[i].iov_len - at);

			if (iov[i].iov_base)
				memcpy((uint8_t *)iov[i].iov_base + at, (uint8_t *)p->payload + off, part);
			at += part;
			off += part;
			total += part;
			if (off == p->len) {
				p = p->next;
				off = 0;
			}
		}
	return total;
}

ssize_t core_read(struct vmh_tcp_conn *c, const struct iovec *iov, int n, bool only_peek)
{
	size_t total, left;

	if (!c->rx_head)
		return told(c, no_data(c));
	total = peek(c, iov, n);
	if (only_peek || !total)
		return (ssize_t)total;
	for (left = total; left;) {
		size_t part = LWIP_MIN(c->rx_head->len - c->rx_off, left);

		left -= part;
		if (c->rx_off + part < c->rx_head->len) {
			c->rx_off += (uint32_t)part;
			c->rx_bytes -= (uint32_t)part;
		} else {
			pbuf_free(hold_pop(c));
		}
	}
	was_read(c);
	return (ssize_t)total;
}

int core_take(struct vmh_tcp_conn *c, struct vmh_tcp_piece *pieces, int max)
{
	int n;

	if (!c->rx_head)
		return told(c, no_data(c));
	for (n = 0; n < max && c->rx_head; n++) {
		uint32_t off = c->rx_off;
		struct pbuf *p = hold_pop(c);

		pieces[n] = (struct vmh_tcp_piece){(uint8_t *)p->payload + off, p->len - off, p};
	}
	was_read(c);
	return n;
}

void core_give(struct vmh_tcp *t, void *handle)
{
	(void)t;
	pbuf_free(handle);
}

static void drop_unread(struct vmh_tcp_conn *c)
{
	while (c->rx_head)
		pbuf_free(hold_pop(c));
}

int core_shutdown(struct vmh_tcp_conn *c, int how)
{
	bool rd = how != SHUT_WR, wr = how != SHUT_RD;

	if (c->listening || (!c->established && c->pcb) || !c->pcb)
		return -ENOTCONN;
	inside(c);
	c->shut_rd |= rd; /* what came, and what comes before SHUT_WR, can be read all the same, as in Linux */
	if (wr && !c->shut_wr) {
		c->shut_wr = true;
		if (c->pcb) {
			if (c->recovery == OPEN && !c->sacked_any)
				c->pcb->cwnd = c->cwnd;
			tcp_shutdown(c->pcb, 0, 1);
		}
	}
	outside(c);
	return 0;
}

static void close_listener(struct vmh_tcp_conn *l)
{
	struct listener *s = l->listening;
	struct vmh_tcp_conn *c, **at;
	struct vmh_tcp *t = l->t;

	while ((c = s->half_open.head)) {
		core_enter(t, c);
		c->pcb->listener = NULL;
		core_drop(c, 0, false);
		core_leave(t, c);
	}
	while ((c = s->ready.head)) {
		list_remove(&s->ready, c);
		c->in_accept_queue = false;
		c->parent = NULL;
		core_close(c, true);
	}
	for (at = &t->listeners; *at != l; at = &(*at)->listening->next)
		;
	*at = s->next;
	core_enter(t, NULL);
	tcp_listen_pcbs.listen_pcbs = s->pcb;
	s->pcb->next = NULL;
	tcp_close((struct tcp_pcb *)s->pcb);
	core_leave(t, NULL);
	core_conn_free(l);
}

void core_close(struct vmh_tcp_conn *c, bool reset)
{
	if (c->listening) {
		close_listener(c);
		return;
	}
	if (c->young) /* nothing was written at all */
		c->t->prompt = false;
	c->app_closed = true;
	c->frozen = false;
	if (!c->pcb) {
		core_conn_free(c);
		return;
	}
	reset |= c->rx_bytes != 0; /* RFC 2525, 2.17 */
	drop_unread(c);
	inside(c);
	if (!c->established) { /* the peer forgets a SYN before the name comes again, which it would take for an error */
		core_drop(c, 0, reset || c->pcb->state == SYN_SENT);
	} else if (reset) {
		core_drop(c, 0, true);
	} else {
		c->shut_wr = true;
		if (c->recovery == OPEN && !c->sacked_any)
			c->pcb->cwnd = c->cwnd;
		tcp_shutdown(c->pcb, 0, 1);
	}
	outside(c);
}

int core_end(struct vmh_tcp_conn *c, int err)
{
	if (!c->pcb || c->listening || c->pcb->state == TIME_WAIT)
		return -ENOTCONN;
	inside(c);
	core_drop(c, err, true);
	outside(c);
	return 0;
}

int core_fail(struct vmh_tcp_conn *c, int err)
{
	if (c->listening)
		return -EINVAL;
	if (!c->pcb || c->established) {
		if (c->established && !c->pcb) /* one that a call could not tell of, after some bytes */
			c->error = err;
		core_note(c);
		if (c->established) /* a soft error: Linux keeps it to itself, timers decide */
			return 0;
		return -ENOTCONN;
	}
	inside(c);
	core_drop(c, err, false);
	outside(c);
	return 0;
}
