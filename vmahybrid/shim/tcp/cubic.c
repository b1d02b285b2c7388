/* Congestion control: what an acknowledgement and a loss do to the window. */
#include "core.h"

#define C_CUBIC 0.4 /* RFC 9438, section 5 */
#define BETA 0.7
#define ALPHA (3.0 * (1.0 - BETA) / (1.0 + BETA))
#define UNLIMITED (1u << 30)
#define SMALL 1000u          /* of a peer that takes only such segments */
#define SMALL_ALL 1024u      /* so many may be on their way: each SACK is looked for among all of them */

static double cube_root(double x)
{
	double y = x > 1 ? x / 3 : 1;

	if (x <= 0)
		return 0;
	for (int i = 0; i < 40; i++)
		y = (2 * y + x / (y * y)) / 3;
	return y;
}

static uint32_t mss_of(const struct vmh_tcp_conn *c)
{
	return c->pcb->mss;
}

static void start_epoch(struct vmh_tcp_conn *c, double cwnd)
{
	struct cubic *q = &c->cubic;

	q->epoch = c->t->now;
	q->w_est = cwnd;
	if (q->w_max > cwnd) {
		q->k = cube_root((q->w_max - cwnd) / C_CUBIC);
		q->origin = q->w_max;
	} else {
		q->k = 0;
		q->origin = cwnd;
	}
}

static void cubic_ack(struct vmh_tcp_conn *c, uint32_t acked)
{
	struct cubic *q = &c->cubic;
	double mss = mss_of(c), cwnd = c->cwnd / mss, t, target, segments = acked / mss;

	if (!q->epoch)
		start_epoch(c, cwnd);
	t = (double)(c->t->now - q->epoch + c->srtt) / 1e6 - q->k;
	target = q->origin + C_CUBIC * t * t * t;
	q->w_est += (q->w_est < q->prior ? ALPHA : 1) * segments / cwnd;
	if (target < q->w_est) /* the Reno-friendly region */
		target = q->w_est;
	if (target > 1.5 * cwnd)
		target = 1.5 * cwnd;
	if (target > cwnd)
		c->cwnd += (uint32_t)((target - cwnd) / cwnd * segments * mss);
}

/* Time in which the window had no part, since the program sent less, is none of the epoch (RFC 9438, 4.2 and 5.8). */
static void count_time(struct vmh_tcp_conn *c)
{
	struct cubic *q = &c->cubic;

	if (q->epoch && !c->cwnd_limited)
		q->epoch += c->t->now - q->seen;
	q->seen = c->t->now;
}

void cc_rested(struct vmh_tcp_conn *c, uint64_t us)
{
	if (!c->cubic.epoch)
		return;
	c->cubic.epoch += us;
	c->cubic.seen += us;
}

/* lwip_cwnd: what lwIP made of it, 0 if it was not asked. */
void cc_ack(struct vmh_tcp_conn *c, uint32_t acked, uint32_t lwip_cwnd)
{
	core_grow_sndbuf(c);
	count_time(c);
	if (c->opt.cc == VMH_TCP_CC_NONE) {
		c->cwnd = UNLIMITED;
	} else if (!c->cwnd_limited) {
		return;
	} else if (c->cwnd < c->ssthresh) { /* an ACK may be for a whole flight: all of it counts, as in Linux */
		c->cwnd += c->recovery == OPEN ? acked : LWIP_MIN(acked, mss_of(c)); /* RFC 3465 */
	} else if (c->opt.cc == VMH_TCP_CC_LWIP && lwip_cwnd) {
		c->cwnd = lwip_cwnd;
	} else if (c->opt.cc == VMH_TCP_CC_CUBIC) {
		cubic_ack(c, acked);
	} else {
		c->cwnd += (uint32_t)((uint64_t)acked * mss_of(c) / LWIP_MAX(c->cwnd, 1));
	}
	c->cwnd = LWIP_MIN(c->cwnd, mss_of(c) < SMALL ? SMALL_ALL * mss_of(c) : UNLIMITED);
}

/* A recovery begins, or the timer has run out. */
void cc_loss(struct vmh_tcp_conn *c, bool timeout)
{
	uint32_t mss = mss_of(c), least = 2 * mss;
	double cwnd = (double)c->cwnd / mss;

	if (c->opt.cc == VMH_TCP_CC_NONE) {
		c->cwnd = c->ssthresh = UNLIMITED;
		return;
	}
	if (c->opt.cc == VMH_TCP_CC_CUBIC) {
		c->cubic.prior = cwnd;
		c->cubic.w_max = cwnd < c->cubic.w_max ? cwnd * (1 + BETA) / 2 : cwnd; /* fast convergence */
		if (timeout) /* K is 0 in the epoch that follows slow start (RFC 9438, 4.8) */
			c->cubic.w_max = 0;
		c->cubic.epoch = 0;
		c->ssthresh = (uint32_t)(c->cwnd * BETA);
	} else {
		c->ssthresh = LWIP_MIN(c->cwnd, c->pcb->snd_wnd) / 2;
	}
	c->ssthresh = LWIP_MAX(c->ssthresh, least);
	c->cwnd = timeout ? mss : c->ssthresh;
}
