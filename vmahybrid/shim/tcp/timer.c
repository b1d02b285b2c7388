/* Timers: each connection has a few, and one place in a heap by the earliest of them. A timer that moves to a later time
 * leaves the heap as it is; the connection is looked at too early once, and put back. So what happens with every
 * segment costs no more than a comparison. */
#include "core.h"

#define PERSIST_MIN (200 * MS)
#define PERSIST_MAX (120 * SEC)
#define RETRY_US (1 * MS)
#define SYN_ACK_RETRIES 5

/* ---- the heap ---- */

static inline void place(struct vmh_tcp *t, uint32_t at, struct vmh_tcp_conn *c)
{
	t->heap[at] = c;
	c->heap_at = at;
}

static void sift_up(struct vmh_tcp *t, uint32_t at)
{
	struct vmh_tcp_conn *c = t->heap[at];

	for (; at > 1 && t->heap[at / 2]->heap_due > c->heap_due; at /= 2)
		place(t, at, t->heap[at / 2]);
	place(t, at, c);
}

static void sift_down(struct vmh_tcp *t, uint32_t at)
{
	struct vmh_tcp_conn *c = t->heap[at];

	for (uint32_t child; (child = 2 * at) <= t->heap_n; at = child) {
		if (child < t->heap_n && t->heap[child + 1]->heap_due < t->heap[child]->heap_due)
			child++;
		if (t->heap[child]->heap_due >= c->heap_due)
			break;
		place(t, at, t->heap[child]);
	}
	place(t, at, c);
}

void timer_remove(struct vmh_tcp_conn *c)
{
	struct vmh_tcp *t = c->t;
	uint32_t at = c->heap_at;
	struct vmh_tcp_conn *last;

	if (!at)
		return;
	c->heap_at = 0;
	last = t->heap[t->heap_n--];
	if (last == c)
		return;
	place(t, at, last);
	sift_up(t, at);
	sift_down(t, last->heap_at);
}

static bool room(struct vmh_tcp *t)
{
	uint32_t size = t->heap_size ? 2 * t->heap_size : 64;
	struct vmh_tcp_conn **heap;

	if (t->heap_n + 1 < t->heap_size)
		return true;
	heap = vmh_heap_more(t->heap, size * sizeof(*heap));
	if (!heap)
		return false;
	t->heap = heap;
	t->heap_size = size;
	return true;
}

static uint64_t earliest(const struct vmh_tcp_conn *c)
{
	uint64_t due = UINT64_MAX - 1; /* one less than what is meant: 0, off, becomes the greatest, without a branch */

	for (int i = 0; i < TIMERS; i++)
		due = LWIP_MIN(due, c->due[i] - 1);
	return due + 1;
}

void timer_arm(struct vmh_tcp_conn *c)
{
	uint64_t due = c->frozen ? UINT64_MAX : earliest(c);

	if (due == UINT64_MAX || (c->heap_at && c->heap_due <= due))
		return;
	if (!c->heap_at) {
		if (!room(c->t))
			return;
		c->t->heap[++c->t->heap_n] = c;
		c->heap_at = c->t->heap_n;
	}
	c->heap_due = due;
	sift_up(c->t, c->heap_at);
}

/* ---- what is due when ---- */

/* TCP_USER_TIMEOUT ends a connection at its time, not with the step of the timer that follows. The first step is whole,
 * as in Linux: an answer may be on its way. */
static uint64_t in_user_timeout(const struct vmh_tcp_conn *c, uint64_t wait, unsigned steps, uint64_t since)
{
	uint64_t limit = c->opt.user_timeout_ms * 1000ull, gone = c->t->now - since;

	if (!limit || !steps || !since)
		return wait;
	return gone < limit ? LWIP_MIN(wait, limit - gone) : 1;
}

static void sync_flight(struct vmh_tcp_conn *c)
{
	struct tcp_pcb *pcb = c->pcb;
	uint64_t now = c->t->now;
	uint32_t probe;

	if (pcb->lastack != c->una) {
		c->una = pcb->lastack;
		c->retries = c->persist_shift = 0;
		if (c->void_at && TCP_SEQ_GT(c->una, c->void_from)) {
			c->void_us = (uint32_t)LWIP_MIN(now - c->void_at, UINT32_MAX);
			c->void_at = 0;
		}
		c->probed = false;
		c->first_sent_at = now;
		c->due[T_RTO] = c->due[T_PROBE] = 0;
		if (c->rtt_at && TCP_SEQ_GEQ(c->una, c->rtt_seq)) {
			if (!c->rtt_cut || TCP_SEQ_LEQ(c->una, c->rtt_most))
				recovery_rtt(c, (uint32_t)(now - c->rtt_at));
			c->rtt_at = 0;
		}
	}
	if (pcb->snd_nxt != c->nxt) {
		if (!c->rtt_at && c->recovery == OPEN) {
			c->rtt_at = now;
			c->rtt_from = c->nxt;
			c->rtt_seq = pcb->snd_nxt;
			c->rtt_cut = false;
		}
		c->nxt = pcb->snd_nxt;
		c->due[T_PROBE] = 0;
	}
	if (!pcb->unacked) {
		if (!c->resting_since)
			c->resting_since = now;
		c->due[T_RTO] = c->due[T_PROBE] = c->due[T_REORDER] = 0;
		c->first_sent_at = pcb->unsent && c->first_sent_at ? c->first_sent_at : 0;
		return;
	}
	if (c->resting_since) {
		cc_rested(c, now - c->resting_since);
		c->resting_since = 0;
	}
	if (!c->first_sent_at)
		c->first_sent_at = now;
	if (!c->due[T_RTO])
		c->due[T_RTO] = now + in_user_timeout(c, recovery_rto_us(c), c->retries, c->first_sent_at);
	if (!c->due[T_PROBE]) {
		probe = recovery_probe_us(c);
		if (probe && now + probe < c->due[T_RTO])
			c->due[T_PROBE] = now + probe;
	}
}

static uint64_t persist_wait(const struct vmh_tcp_conn *c)
{
	uint64_t wait = LWIP_MAX(c->srtt + 4ull * c->rttvar, PERSIST_MIN) << LWIP_MIN(c->persist_shift, 12);

	return in_user_timeout(c, LWIP_MIN(wait, PERSIST_MAX), c->persist_shift, c->probing_since);
}

/* After each visit to lwIP. */
void timer_sync(struct vmh_tcp_conn *c)
{
	struct tcp_pcb *pcb = c->pcb;
	uint64_t now = c->t->now;
	bool open = pcb->state >= ESTABLISHED, orphan = c->app_closed && pcb->state == FIN_WAIT_2;

	if (c->kept_rest) { /* no failed send */
		c->kept_rest = false;
		tcp_clear_flags(pcb, TF_NAGLEMEMERR);
	}
	sync_flight(c);
	if (!open || !pcb->unsent || pcb->unacked) {
		c->due[T_PERSIST] = c->probing_since = 0;
	} else if (!c->due[T_PERSIST]) {
		c->due[T_PERSIST] = now + persist_wait(c);
	}
	if (!(pcb->flags & TF_ACK_DELAY))
		c->due[T_ACK] = 0;
	else if (!c->due[T_ACK])
		c->due[T_ACK] = now + (c->opt.ack_ms ? c->opt.ack_ms * MS : DELAYED_ACK_US);
	if (!(pcb->flags & (TF_NAGLEMEMERR | TF_ACK_NOW | TF_CLOSEPEND)))
		c->due[T_RETRY] = 0;
	else if (!c->due[T_RETRY])
		c->due[T_RETRY] = now + RETRY_US;
	if (!c->opt.keepalive || !open || pcb->state > CLOSE_WAIT || orphan)
		c->due[T_KEEP] = 0;
	else if (!c->due[T_KEEP])
		c->due[T_KEEP] = now + c->opt.keep_idle_s * SEC;
	if (orphan) {
		if (!c->due[T_LIFE])
			c->due[T_LIFE] = now + FIN_WAIT2_US;
	} else {
		c->due[T_LIFE] = 0;
	}
	timer_arm(c);
}

/* ---- what happens then; inside ---- */

static bool too_long(const struct vmh_tcp_conn *c, uint64_t since)
{
	uint64_t limit = c->opt.user_timeout_ms ? c->opt.user_timeout_ms * 1000ull : c->app_closed ? ORPHAN_US : GIVE_UP_US;

	return since && c->t->now - since >= limit;
}

static void on_rto(struct vmh_tcp_conn *c)
{
	unsigned state = c->pcb->state;
	/* a peer that answers may keep its window shut: not with TCP_USER_TIMEOUT, nor when the program has closed */
	uint64_t since = c->opt.user_timeout_ms || c->app_closed || c->pcb->snd_wnd ? c->first_sent_at : c->heard_at;

	if (!c->pcb->unacked)
		return;
	if ((state == SYN_SENT && c->retries >= c->opt.syn_retries) || (state == SYN_RCVD && c->retries >= SYN_ACK_RETRIES) ||
	    too_long(c, since)) {
		core_drop(c, ETIMEDOUT, false);
		return;
	}
	if (c->retries < 255)
		c->retries++;
	recovery_rto(c);
	c->probed = true; /* the timer's steps grow; no probe between them */
	c->due[T_PROBE] = 0;
}

static bool shut_too_long(const struct vmh_tcp_conn *c)
{
	if (c->app_closed && !c->opt.user_timeout_ms)
		return c->probing_since && c->t->now - c->probing_since >= SHUT_ORPHAN_US;
	return too_long(c, c->opt.user_timeout_ms ? c->probing_since : c->heard_at);
}

static void on_persist(struct vmh_tcp_conn *c)
{
	struct tcp_pcb *pcb = c->pcb;

	if (!pcb->unsent || pcb->unacked)
		return;
	if (shut_too_long(c)) {
		core_drop(c, ETIMEDOUT, false);
		return;
	}
	if (!c->probing_since)
		c->probing_since = c->t->now;
	if (c->persist_shift < 255)
		c->persist_shift++;
	if (pcb->snd_wnd == 0) {
		c->count.probes++;
		core_probe(c);
	} else {
		if (pcb->unsent->len > pcb->snd_wnd)
			core_split(pcb, (u16_t)pcb->snd_wnd);
		tcp_set_flags(pcb, TF_NAGLEMEMERR);
		recovery_push(c);
	}
}

static void on_keep(struct vmh_tcp_conn *c)
{
	uint64_t now = c->t->now, silent = now - c->heard_at, idle = c->opt.keep_idle_s * SEC;
	bool give_up = c->opt.user_timeout_ms ? c->keep_sent && silent >= c->opt.user_timeout_ms * 1000ull :
						c->keep_sent >= c->opt.keep_cnt;

	if (c->pcb->unacked || c->pcb->unsent) { /* other timers tell whether the peer lives */
		c->due[T_KEEP] = now + idle;
	} else if (silent < idle) {
		c->due[T_KEEP] = c->heard_at + idle;
	} else if (give_up) {
		core_drop(c, ETIMEDOUT, true);
	} else {
		core_probe(c);
		c->keep_sent++;
		c->due[T_KEEP] = now + c->opt.keep_intvl_s * SEC;
	}
}

void core_resume(struct vmh_tcp_conn *c)
{
	struct vmh_tcp *t = c->t;

	if (!c->pcb || c->frozen || !c->retries)
		return;
	t->now = t->env.now_ns(t->env.ctx) / 1000;
	core_enter(t, c);
	c->retries = 0;
	c->due[T_RTO] = 0;
	on_rto(c);
	core_leave(t, c);
}

static void fire(struct vmh_tcp_conn *c, enum timer which)
{
	c->due[which] = 0;
	switch (which) {
	case T_RTO:
		on_rto(c);
		break;
	case T_PROBE:
		if (c->pcb->unacked)
			recovery_probe(c);
		c->due[T_RTO] = 0; /* from now on */
		break;
	case T_REORDER:
		recovery_reorder(c);
		break;
	case T_ACK:
		tcp_send_empty_ack(c->pcb);
		break;
	case T_PERSIST:
		on_persist(c);
		break;
	case T_KEEP:
		on_keep(c);
		break;
	case T_LIFE:
		core_drop(c, 0, false);
		break;
	case T_RETRY:
		if (c->pcb->flags & TF_CLOSEPEND) {
			tcp_clear_flags(c->pcb, TF_CLOSEPEND);
			tcp_shutdown(c->pcb, 0, 1);
		}
		recovery_output(c);
		break;
	case TIMERS:
		break;
	}
}

static void look_at(struct vmh_tcp_conn *c)
{
	struct vmh_tcp *t = c->t;
	uint64_t due = c->frozen ? UINT64_MAX : earliest(c), now = t->now;

	if (due == UINT64_MAX) {
		timer_remove(c);
	} else if (due > now) {
		c->heap_due = due;
		sift_down(t, c->heap_at);
	} else {
		timer_remove(c); /* core_leave puts it back */
		core_enter(t, c);
		for (int i = 0; i < TIMERS && c->pcb; i++)
			if (c->due[i] && c->due[i] <= now)
				fire(c, (enum timer)i);
		core_leave(t, c);
	}
}

uint64_t core_tick(struct vmh_tcp *t)
{
	uint64_t next;

	t->now = t->env.now_ns(t->env.ctx) / 1000;
	next = demux_tw_expire(t);
	while (t->heap_n && t->heap[1]->heap_due <= t->now)
		look_at(t->heap[1]);
	if (t->heap_n && t->heap[1]->heap_due < next)
		next = t->heap[1]->heap_due;
	return next == UINT64_MAX ? next : next * 1000;
}
