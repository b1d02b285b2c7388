#include "tcp_ring.h"

#define CLOCK_CYCLES 16384u /* 4 to 8 us */
#define SOON_CYCLES 32768u  /* 8 to 16 us */
#define FRAMES 2048 /* of a ring that does not tell */
#define TICK_MAX_NS 1000000u /* a timer that came to be since the last tick is found after this time at the latest */

/* Stack lock held. The clock costs twice what the counter does, and a reading stays good for some microseconds: a counter
 * that runs at another rate than it says makes that shorter or longer, and no time goes back. */
static uint64_t now_ns(void *ctx)
{
	struct vmh_tcp_ring *tr = ctx;
	uint64_t cycles = vmh_cycles();

	if (!cycles || cycles - tr->cycles >= CLOCK_CYCLES) {
		tr->cycles = cycles;
		tr->ns = vmh_now_ns();
	}
	return tr->ns;
}

static int send_frame(void *ctx, const void *frame, size_t len)
{
	struct vmh_tcp_ring *tr = ctx;
	bool at_once = VMH_GET(tr->at_once);
	int rc = vmh_ring_send_frame(tr->ring, frame, len, !at_once);

	if (at_once)
		VMH_SET(tr->at_once, false);
	else if (!rc)
		atomic_store_explicit(&tr->posted, true, memory_order_relaxed);
	return rc;
}

static void release(void *ctx, void *token)
{
	(void)ctx;
	vmh_ring_put_later(token);
}

static void level(void *ctx, void *user, unsigned events, const struct vmh_tcp_amounts *a)
{
	struct vmh_tcp_ring *tr = ctx;

	if (tr->level)
		tr->level(tr->arg, user, events, a);
}

static void ready(void *ctx, void *user, struct vmh_tcp_conn *c)
{
	struct vmh_tcp_ring *tr = ctx;

	if (tr->ready)
		tr->ready(tr->arg, user, c);
}

static unsigned opened(void *ctx, const struct vmh_tcp_addr *a)
{
	struct vmh_tcp_ring *tr = ctx;

	return tr->opened ? tr->opened(a) : 0;
}

static void over(void *ctx, unsigned place)
{
	struct vmh_tcp_ring *tr = ctx;

	tr->over(place);
}

/* Of an input, so under the ring's lock. */
static void talkers(void *ctx, uint32_t n)
{
	struct vmh_tcp_ring *tr = ctx;

	VMH_SET(tr->ring->talkers, n);
}

static void soon(void *ctx)
{
	struct vmh_tcp_ring *tr = ctx;

	atomic_store_explicit(&tr->soon, vmh_cycles() + SOON_CYCLES, memory_order_relaxed);
}

void vmh_tcp_ring_acks_go(struct vmh_tcp_ring *tr)
{
	atomic_store_explicit(&tr->soon, 0, memory_order_relaxed);
	vmh_tcp_tick(tr->tcp);
}

/* Stack lock held, so one at a time. */
static void copied(void *ctx, unsigned frames)
{
	struct vmh_tcp_ring *tr = ctx;

	VMH_COUNT(tr->ring->stats->rx_tcp_copied, frames);
}

/* Stack lock held. */
static void resent(void *ctx)
{
	struct vmh_tcp_ring *tr = ctx;

	VMH_COUNT(tr->ring->stats->tx_tcp_resent, 1);
}

static bool no_way_back(void *ctx, const struct vmh_ip *laddr, const struct vmh_ip *raddr)
{
	const struct vmh_tcp_ring *tr = ctx;

	return tr->no_way_back && tr->no_way_back(tr, laddr, raddr);
}

/* The stack has had it. */
static int taken(struct vmh_tcp_ring *tr, unsigned char *frame, uint32_t len, int rc)
{
	if (vmh_likely(rc > 0)) {
		VMH_COUNT(tr->ring->stats->rx_tcp_kept, 1);
	} else if (vmh_unlikely(rc < 0)) {
		VMH_COUNT(tr->unwanted, 1);
		if (rc == -ENOENT && tr->stray)
			tr->stray(tr, frame, len);
	}
	return rc > 0;
}

static void take_together(struct vmh_ring *r)
{
	struct vmh_tcp_ring *tr = r->other_arg;
	unsigned n = tr->waiting, merged;

	if (!n)
		return;
	tr->waiting = 0;
	merged = vmh_tcp_input_all(tr->tcp, tr->in, n);
	VMH_COUNT(r->stats->rx_tcp_merged, merged);
	for (unsigned i = 0; i < n; i++)
		if (!taken(tr, tr->in[i].frame, tr->in[i].len, tr->in[i].rc))
			r->ops->put(r, tr->buf[i]);
}

/* One that comes alone goes on at once. */
static int take(struct vmh_ring *r, unsigned char *frame, uint32_t len, struct vmh_buf *b)
{
	struct vmh_tcp_ring *tr = r->other_arg;
	bool may_stay = !r->scarce && atomic_load_explicit(&r->bufs_out, memory_order_relaxed) < tr->most_out;
	void *token = may_stay ? b : NULL;

	if (vmh_unlikely(tr->aside != NULL) && tr->aside(tr, frame, len))
		return 0;
	if (vmh_unlikely(!b)) { /* it lies where the next one of its kind will: what came before goes first */
		take_together(r);
		return taken(tr, frame, len, vmh_tcp_input(tr->tcp, frame, len, NULL));
	}
	if (!tr->waiting && (!r->several || !tr->merge_max))
		return taken(tr, frame, len, vmh_tcp_input(tr->tcp, frame, len, token));
	if (tr->waiting == VMH_TCP_RING_LOOK)
		take_together(r);
	tr->buf[tr->waiting] = b;
	tr->in[tr->waiting++] = (struct vmh_tcp_in){ .frame = frame, .token = token, .len = len };
	return 1;
}

int vmh_tcp_ring_open(struct vmh_tcp_ring *tr, struct vmh_ring *r, bool partial, unsigned merge_max,
		      void (*told)(void *arg, void *user, struct vmh_tcp_conn *c), void *arg)
{
	unsigned frames = r->rx_frames ? r->rx_frames : FRAMES, share = r->rx_share ? r->rx_share : frames;
	struct vmh_tcp_env env = {.ctx = tr, .now_ns = now_ns, .send = send_frame, .release = release, .level = level, .ready = ready,
				  .copied = copied, .resent = resent, .soon = soon, .talkers = talkers, .opened = opened,
				  .over = over, .no_way_back = no_way_back,
				  .hold_max = share / 2, /* they may all have come by one queue */
				  .hold_share = share / 8, .merge_max = merge_max, .verify = true, .partial = partial};
	int rc;

	memset(tr, 0, sizeof(*tr));
	tr->ring = r;
	tr->most_out = frames - frames / 4; /* datagrams are out as well */
	tr->merge_max = merge_max;
	tr->ready = told;
	tr->arg = arg;
	if (!r->ops->send_frame)
		return -EOPNOTSUPP;
	rc = vmh_tcp_open(&env, &tr->tcp);
	if (rc)
		return rc;
	vmh_lock(&r->lock);
	r->other_arg = tr;
	r->other = take;
	r->others_end = take_together;
	vmh_unlock(&r->lock);
	return 0;
}

void vmh_tcp_ring_flush(struct vmh_tcp_ring *tr)
{
	if (atomic_load_explicit(&tr->posted, memory_order_relaxed)) {
		atomic_store_explicit(&tr->posted, false, memory_order_relaxed);
		vmh_ring_kick(tr->ring);
	}
}

int vmh_tcp_ring_poll(struct vmh_tcp_ring *tr, unsigned budget)
{
	int n = vmh_ring_poll(tr->ring, budget);
	uint64_t now = vmh_now_ns(), next;

	if (vmh_unlikely(now >= atomic_load_explicit(&tr->due, memory_order_relaxed))) {
		next = vmh_tcp_tick(tr->tcp);
		atomic_store_explicit(&tr->due, next < now + TICK_MAX_NS ? next : now + TICK_MAX_NS, memory_order_relaxed);
	}
	vmh_tcp_ring_acks(tr, false);
	vmh_tcp_ring_flush(tr);
	return n;
}

void vmh_tcp_ring_close(struct vmh_tcp_ring *tr)
{
	vmh_lock(&tr->ring->lock);
	tr->ring->other = NULL;
	tr->ring->others_end = NULL;
	vmh_unlock(&tr->ring->lock);
	vmh_tcp_destroy(tr->tcp);
}
