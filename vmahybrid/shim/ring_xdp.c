/* Receive and transmit of the AF_XDP ring: a UMEM, and per queue an XSK with its RX, TX, fill and completion ring.
 *
 * UMEM frames 0..tx_frames-1 are for transmitting, through queue 0; the others circulate between the
 * free stack, the fill rings, the RX rings and whoever holds a delivered buffer. Facts about the kernel
 * (6.18) that shape this file:
 *  - an RX descriptor points into its frame behind 256 bytes of headroom, so the frame is addr / size;
 *  - in copy mode one sendto() handles at most XDP_MAX_TX_SKB_BUDGET descriptors and answers EAGAIN
 *    while some are left; EAGAIN also means that socket buffer or completion ring are full;
 *  - a completion comes when the skb is freed, so late if the receiver is a socket that sleeps;
 *  - poll(2) on an XSK in copy mode transmits what is posted: a sleeper pushes what a kick left behind;
 *  - a mapping of any ring keeps the XSK and its queue, close() alone does not free them.
 */
#include "ring_xdp.h"

#define XDP_OPT_CONTD 1 /* descriptor: the packet goes on in the next one */
#define HEADERS 42
#define RX_HEADROOM 256 /* XDP_PACKET_HEADROOM: where the data of most drivers begins */
#define CACHE_LINE 64
#define KICK_RETRIES 2
#define KICK_BATCH 32   /* descriptors per sendto() by default */

/* ---- receive ---- */

static inline uint32_t wanted(const struct xdp_ring *x, const struct xqueue *q)
{
	uint32_t goal = frames_wanted(x), n = goal > q->posted ? goal - q->posted : 0;

	return n < x->rx_nfree ? n : x->rx_nfree;
}

void vmh_xdp_refill(struct xdp_ring *x, struct xqueue *q)
{
	uint32_t n = wanted(x, q), space;

	space = room(&q->fill, n);
	if (n > space)
		n = space;
	if (!n)
		return;
	for (uint32_t i = 0; i < n; i++)
		VMH_SET(*addr_at(&q->fill, q->fill.here + i), (uint64_t)x->rx_free[--x->rx_nfree] << x->frame_shift);
	q->fill.here += n;
	q->posted += n;
	publish(q->fill.prod, q->fill.here);
	if (vmh_unlikely(x->zerocopy && needs_wakeup(&q->fill)))
		vmh_sys(SYS_recvfrom, q->fd, NULL, 0, MSG_DONTWAIT, NULL, NULL);
}

/* Post free frames where it is worth it; at once where a fill ring runs low. */
static inline void refill_if_due(struct xdp_ring *x)
{
	for (uint32_t i = 0; i < x->nq; i++)
		if (wanted(x, &x->q[i]) >= x->batch || x->q[i].posted < x->low)
			vmh_xdp_refill(x, &x->q[i]);
}

struct taken {
	uint32_t taken, no_socket, dropped, bad;
	uint32_t chain; /* bytes of a frame that goes on in the next buffer */
	uint64_t bytes;
};

static inline void prefetch_frame(const struct xdp_ring *x, const struct xdp_desc *d)
{
	if (vmh_likely(d->addr < x->umem_len)) {
		__builtin_prefetch(x->umem + d->addr);
		__builtin_prefetch(x->umem + d->addr + CACHE_LINE);
	}
	__builtin_prefetch(&x->bufs[(uint32_t)(d->addr >> x->frame_shift) % x->frames], 1);
}

static void receive_other(struct xdp_ring *x, uint32_t frame, unsigned char *data, uint32_t len,
			  struct taken *t)
{
	if (x->r.other) {
		if (x->r.other(&x->r, data, len, &x->bufs[frame].b) > 0) {
			vmh_buf_is_out(&x->r); /* at once: it may go back before the look ends */
			return;
		}
	} else {
		t->bad++;
	}
	free_rx_frame(x, frame);
}

/* What `steer_stamped` put before the frame. It goes, in case that the next frame here has none. */
VMH_COLD static uint64_t take_stamp(struct xdp_ring *x, uint64_t addr)
{
	unsigned char *at = x->umem + addr - sizeof(struct vmh_stamp);
	struct vmh_stamp stamp;

	if ((addr & (x->frame_size - 1)) < sizeof(stamp) ||
	    !atomic_load_explicit(&vmh_wanted_hw_stamps, memory_order_relaxed))
		return 0;
	memcpy(&stamp, at, sizeof(stamp));
	if (stamp.magic != VMH_STAMP_MAGIC)
		return 0;
	memset(at, 0, sizeof(stamp));
	return vmh_xdp_clock_ns(&x->clock, stamp.ns);
}

/* A part of a frame that has none to itself: the parts are put together elsewhere, and nobody keeps that place. */
VMH_COLD static void receive_part(struct xdp_ring *x, uint32_t frame, const struct xdp_desc *d, struct taken *t)
{
	uint32_t len = d->len, whole = t->chain + len;

	if (x->chain && (d->addr & (x->frame_size - 1)) + len <= x->frame_size && whole <= CHAIN_MAX)
		memcpy(x->chain + t->chain, x->umem + d->addr, len);
	else
		whole = CHAIN_MAX + 1;
	free_rx_frame(x, frame);
	if (d->options & XDP_OPT_CONTD) {
		t->chain = whole;
		return;
	}
	t->chain = 0;
	if (whole > CHAIN_MAX || !x->r.other) {
		t->bad++;
		return;
	}
	t->bytes += whole;
	x->r.other(&x->r, x->chain, whole, NULL);
}

static inline void receive_one(struct xdp_ring *x, const struct xdp_desc *d, struct taken *t)
{
	uint64_t addr = d->addr, frame = addr >> x->frame_shift, hw_ns = 0;
	uint32_t len = d->len;
	struct vmh_buf *b;
	int rc;

	if (vmh_unlikely(frame >= x->frames || frame < x->tx_frames)) { /* not a frame that we posted: not ours to free */
		t->bad++;
		return;
	}
	b = &x->bufs[frame].b;
	if (vmh_unlikely((d->options & XDP_OPT_CONTD) | t->chain)) {
		receive_part(x, (uint32_t)frame, d, t);
		return;
	}
	if (vmh_unlikely((addr & (x->frame_size - 1)) + len > x->frame_size)) {
		t->bad++;
		free_rx_frame(x, (uint32_t)frame);
		return;
	}
	t->bytes += len;
	if (vmh_unlikely(x->r.hw_stamps))
		hw_ns = take_stamp(x, addr);
	if (vmh_unlikely(vmh_frame_parse(x->umem + addr, len, x->verify, b))) {
		receive_other(x, (uint32_t)frame, x->umem + addr, len, t);
		return;
	}
	b->stamp_ns = vmh_unlikely(atomic_load_explicit(&vmh_want_stamps, memory_order_relaxed)) ? vmh_wall_ns() : 0;
	if (vmh_unlikely(x->r.hw_stamps))
		vmh_buf_set_hw_stamp(b, hw_ns);
	rc = vmh_deliver(&x->r, b);
	if (vmh_likely(rc == VMH_DELIVERED)) {
		t->taken++;
		return;
	}
	if (rc == 0)
		t->no_socket++;
	else if (rc != VMH_DELIVERED_COPY)
		t->dropped++;
	free_rx_frame(x, (uint32_t)frame);
}

static void count_received(struct xdp_ring *x, uint32_t frames, const struct taken *t)
{
	struct vmh_ring_stats *s = x->r.stats;
	uint32_t out = atomic_load_explicit(&x->r.bufs_out, memory_order_relaxed);

	VMH_COUNT(s->rx_packets, frames);
	VMH_COUNT(s->rx_bytes, t->bytes);
	if (vmh_unlikely(t->bad | t->no_socket | t->dropped)) {
		VMH_COUNT(s->rx_bad, t->bad);
		VMH_COUNT(s->rx_no_socket, t->no_socket);
		VMH_COUNT(s->rx_dropped, t->dropped);
	}
	if (vmh_unlikely(frames > VMH_GET(s->drained_max)))
		VMH_SET(s->drained_max, frames);
	VMH_SET(s->queue_len, out);
	VMH_SET(s->pool_rx_free, x->rx_frames - out);
}

VMH_HOT static uint32_t receive(struct xdp_ring *x, struct xqueue *q, uint32_t budget, struct taken *t)
{
	struct xring *g = &q->rx;
	uint32_t n;

	if (vmh_unlikely(budget >= g->size)) /* all that is there now, not only what was seen last */
		g->there = kernel_index(g->prod);
	n = to_consume(g);
	if (n > budget)
		n = budget;
	if (!n)
		return 0;
	while (vmh_unlikely(desc_at(g, g->here + n - 1)->options & XDP_OPT_CONTD) && g->here + n != g->there)
		n++; /* a frame is taken whole: the kernel has told of all its parts at once */
	x->r.several = n > 1;
	x->r.scarce = q->posted + x->rx_nfree < n + x->most / 4;
	if (vmh_unlikely(q->posted <= n && x->rx_nfree == 0)) /* the kernel has no more until these are given back */
		VMH_COUNT(x->r.stats->pool_rx_empty, 1);
	prefetch_frame(x, desc_at(g, g->here));
	for (uint32_t i = 0; i < n; i++) {
		if (i + 1 < n)
			prefetch_frame(x, desc_at(g, g->here + i + 1));
		receive_one(x, desc_at(g, g->here + i), t);
	}
	VMH_SET(g->here, g->here + n); /* vmh_xdp_pending reads it */
	publish(g->cons, g->here);
	q->posted -= n < q->posted ? n : q->posted;
	return n;
}

/* Descriptor and frame come from another core's cache, one after the other. But the kernel takes frames in the order
 * in which they were posted, so both can be asked for at once. A wrong guess costs nothing. */
static inline void ask_for_next(struct xdp_ring *x, struct xqueue *q, uint32_t here)
{
	/* the ring may be closing: a number, not a pointer */
	uintptr_t data = (uintptr_t)VMH_GET(x->umem) + VMH_GET(*addr_at(&q->fill, here + q->ahead)) + RX_HEADROOM;

	__builtin_prefetch(desc_at(&q->rx, here));
	__builtin_prefetch((const void *)data);
	__builtin_prefetch((const void *)(data + CACHE_LINE));
}

bool vmh_xdp_pending(struct vmh_ring *r)
{
	struct xdp_ring *x = xdp_ring_of(r);

	for (uint32_t i = 0, n = VMH_GET(x->nq); i < n; i++) {
		uint32_t here = VMH_GET(x->q[i].rx.here);

		if (kernel_index(x->q[i].rx.prod) != here) {
			ask_for_next(x, &x->q[i], here);
			return true;
		}
	}
	return atomic_load_explicit(&x->kick_later, memory_order_relaxed);
}

/* Queues `from` up to, not including, `to`. */
static uint32_t receive_from(struct xdp_ring *x, uint32_t from, uint32_t to, uint32_t budget, struct taken *t)
{
	uint32_t n = 0;

	for (uint32_t i = from; i < to && n < budget; i++)
		n += receive(x, &x->q[i], budget - n, t);
	return n;
}

/* Frames on those queues now. */
static uint32_t look_at(struct xdp_ring *x, uint32_t from, uint32_t to)
{
	uint32_t n = 0;

	for (uint32_t i = from; i < to; i++) {
		struct xring *g = &x->q[i].rx;

		g->there = kernel_index(g->prod);
		n += g->there - g->here;
	}
	return n;
}

/* What look_at() saw, and nothing that came since. */
static uint32_t receive_seen(struct xdp_ring *x, uint32_t from, uint32_t to, uint32_t budget, struct taken *t)
{
	uint32_t n = 0;

	for (uint32_t i = from; i < to && n < budget; i++) {
		uint32_t seen = x->q[i].rx.there - x->q[i].rx.here;

		if (seen)
			n += receive(x, &x->q[i], seen < budget - n ? seen : budget - n, t);
	}
	return n;
}

/* A flow comes by its queue or by the far end, and changes over while the service switches. So one side is taken until it
 * is empty. Frames of the other side are younger than all of the first only if it still is when they have been seen. */
static uint32_t receive_sides(struct xdp_ring *x, uint32_t budget, struct taken *t)
{
	bool far = x->far_first;
	uint32_t from = far ? x->far : 0, to = far ? x->nq : x->far;
	uint32_t other = far ? 0 : x->far, other_end = far ? x->far : x->nq;
	uint32_t n = receive_from(x, from, to, budget, t);

	if (vmh_likely(n || !look_at(x, other, other_end)))
		return n;
	n = receive_from(x, from, to, budget, t);
	if (n)
		return n;
	x->far_first = !far;
	return receive_seen(x, other, other_end, budget, t);
}

int vmh_xdp_poll(struct vmh_ring *r, unsigned budget)
{
	struct xdp_ring *x = xdp_ring_of(r);
	struct taken t = {0};
	uint32_t n = receive_sides(x, budget, &t);

	if (n) {
		atomic_store_explicit(&r->bufs_out,
				      atomic_load_explicit(&r->bufs_out, memory_order_relaxed) + t.taken,
				      memory_order_relaxed);
		vmh_others_end(r);
		refill_if_due(x);
		count_received(x, n, &t);
	}
	if (vmh_unlikely(atomic_load_explicit(&x->kick_later, memory_order_relaxed)) && vmh_trylock(&r->tx_lock)) {
		vmh_xdp_kick(r);
		vmh_unlock(&r->tx_lock);
	}
	return (int)n;
}

void vmh_xdp_put(struct vmh_ring *r, struct vmh_buf *b)
{
	struct xdp_ring *x = xdp_ring_of(r);
	uint32_t out = atomic_load_explicit(&r->bufs_out, memory_order_relaxed) - 1;

	atomic_store_explicit(&r->bufs_out, out, memory_order_relaxed);
	if (vmh_unlikely(x->closed)) {
		if (!out)
			vmh_xdp_free_memory(x);
		return;
	}
	VMH_SET(r->stats->queue_len, out);
	VMH_SET(r->stats->pool_rx_free, x->rx_frames - out);
	free_rx_frame(x, b->frame);
	refill_if_due(x);
}

/* ---- transmit ---- */

static void reap(struct xdp_ring *x)
{
	struct xring *g = &x->q[0].comp;
	uint32_t n = to_consume(g);

	if (!n)
		return;
	for (uint32_t i = 0; i < n; i++) {
		uint64_t frame = *addr_at(g, g->here + i) >> x->frame_shift;

		if (vmh_likely(frame < x->tx_frames && x->tx_nfree < x->tx_frames))
			x->tx_free[x->tx_nfree++] = (uint32_t)frame;
	}
	g->here += n;
	publish(g->cons, g->here);
}

static bool tx_ready(struct xdp_ring *x)
{
	if (vmh_unlikely(x->tx_frames - x->tx_nfree >= x->tx_batch))
		reap(x);
	return vmh_likely(x->tx_nfree && room(&x->q[0].tx, 1));
}

/* A frame and a descriptor are there afterwards, or -EAGAIN. */
static int make_room(struct vmh_ring *r)
{
	struct xdp_ring *x = xdp_ring_of(r);
	int rc;

	if (vmh_likely(tx_ready(x)))
		return 0;
	rc = vmh_xdp_kick(r); /* what was posted with `more` */
	if (rc)
		return rc;
	reap(x);
	if (tx_ready(x))
		return 0;
	if (!r->again) {
		VMH_COUNT(r->stats->pool_tx_empty, !x->tx_nfree);
		VMH_COUNT(r->stats->tx_full, 1);
	}
	return -EAGAIN;
}

static void post(struct xdp_ring *x, uint64_t addr, size_t size)
{
	struct xring *g = &x->q[0].tx;
	struct xdp_desc *d = desc_at(g, g->here);

	x->tx_nfree--;
	d->addr = addr;
	d->len = (uint32_t)size;
	d->options = 0;
	publish(g->prod, ++g->here);
	VMH_COUNT(x->r.stats->tx_packets, 1);
	VMH_COUNT(x->r.stats->tx_bytes, size);
	VMH_SET(x->r.stats->pool_tx_free, x->tx_nfree);
}

/* The kernel gives each frame the priority that the XSK has when it takes the frame. A driver that sends without an skb
 * has no use for it. */
VMH_COLD static void set_priority(struct xdp_ring *x, uint32_t priority)
{
	vmh_xdp_kick(&x->r); /* what was posted before has the other one */
	vmh_sys(SYS_setsockopt, x->q[0].fd, SOL_SOCKET, SO_PRIORITY, &priority, sizeof(priority));
	x->priority = priority; /* if it was refused: not asked again for each frame */
}

int vmh_xdp_send(struct vmh_ring *r, const struct vmh_frame_hdr *h, const struct iovec *iov, int n, size_t len)
{
	struct xdp_ring *x = xdp_ring_of(r);
	uint64_t addr;
	size_t size;
	int rc;

	if (vmh_unlikely(len + 28 > r->mtu || len + HEADERS > x->frame_size))
		return -EMSGSIZE;
	if (vmh_unlikely(h->priority != x->priority))
		set_priority(x, h->priority);
	rc = make_room(r);
	if (vmh_unlikely(rc))
		return rc;
	addr = (uint64_t)x->tx_free[x->tx_nfree - 1] << x->frame_shift;
	size = vmh_frame_build(x->umem + addr, h, x->ip_id, iov, n, len);
	if (vmh_unlikely(!size))
		return -EINVAL;
	x->ip_id++;
	post(x, addr, size);
	return 0;
}

int vmh_xdp_send_frame(struct vmh_ring *r, const void *frame, size_t len)
{
	struct xdp_ring *x = xdp_ring_of(r);
	uint64_t addr;
	int rc;

	if (vmh_unlikely(len > r->mtu + 14u || len > x->frame_size))
		return -EMSGSIZE;
	if (vmh_unlikely(x->priority)) /* a TCP socket that has one is not here, if it matters */
		set_priority(x, 0);
	rc = make_room(r);
	if (vmh_unlikely(rc))
		return rc;
	addr = (uint64_t)x->tx_free[x->tx_nfree - 1] << x->frame_shift;
	memcpy(x->umem + addr, frame, len);
	post(x, addr, len);
	return 0;
}

/* Never waits: what the kernel can't take now stays posted, and poll, the next kick or poll(2) push it. */
int vmh_xdp_kick(struct vmh_ring *r)
{
	struct xdp_ring *x = xdp_ring_of(r);
	struct xring *g = &x->q[0].tx;
	uint32_t before, after = kernel_index(g->cons);
	/* before linux 6.17 an EAGAIN for the batch limit does not show the progress made */
	int retries = KICK_RETRIES + (int)((g->here - after) / KICK_BATCH);
	long rc;

	while (after != g->here && (!x->zerocopy || needs_wakeup(g))) {
		before = after;
		VMH_COUNT(r->stats->kicks, 1);
		rc = vmh_sys(SYS_sendto, x->q[0].fd, NULL, 0, MSG_DONTWAIT, NULL, 0);
		after = kernel_index(g->cons);
		if (rc >= 0 && x->zerocopy) /* the driver goes on by itself */
			break;
		if (after != before)
			continue;
		if (rc < 0 && rc != -EAGAIN && rc != -EBUSY && rc != -ENOBUFS)
			return -ENETDOWN; /* ENETDOWN: down; ENXIO: unbound, the device is gone */
		if (retries-- == 0) {
			atomic_store_explicit(&x->kick_later, true, memory_order_relaxed);
			return 0;
		}
		reap(x); /* a full completion ring stops the kernel */
	}
	if (vmh_unlikely(atomic_load_explicit(&x->kick_later, memory_order_relaxed)))
		atomic_store_explicit(&x->kick_later, false, memory_order_relaxed);
	return 0;
}
