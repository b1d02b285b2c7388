/* Receive and transmit of the ring on a raw packet QP.
 *
 * Receive buffers circulate between the process' pool, the ring's spares, the QP and whoever holds a delivered one. A
 * debt counts the descriptors that the QP lacks; it is paid in chains of VMA_RX_WRE_BATCHING.
 *
 * Frame n to send has slot n % tx_slots, and a piece of registered memory there. Only each VMA_TX_WRE_BATCHING-th
 * frame asks for a completion, which frees all slots up to its own: the QP completes in order.
 */
#include "ring_verbs.h"
#include "vmh_params.h"
#include <arpa/inet.h>

#define HEADERS 42
#define OFF_IP_TOTAL 16
#define OFF_IP_ID 18
#define OFF_IP_FRAG 20
#define OFF_UDP_LEN 38
#define IP_DF_BYTE 0x40
#define TX_POLL 16
#define DM_ALIGN 64u
#define CACHE_LINE 64

/* ---- receive ---- */

static inline void prefetch(const unsigned char *p, size_t bytes)
{
	for (size_t i = 0; i < bytes; i += CACHE_LINE)
		__builtin_prefetch(p + i);
}

static inline size_t smaller(size_t a, int64_t b)
{
	return a < (size_t)b ? a : (size_t)b;
}

/* A QP uses its buffers in the order in which they were posted. */
static inline void prefetch_next(const struct verbs_ring *x)
{
	if (vmh_unlikely(x->order != NULL))
		prefetch(x->pool->mem + (size_t)x->order[x->came % x->rx_wr] * x->pool->buf_size,
			 (size_t)vmh_params.rx_prefetch_bytes_before_poll);
}

static void post_chain(struct verbs_ring *x, uint32_t n)
{
	struct ibv_recv_wr *bad = NULL;
	uint32_t done = 0;

	for (uint32_t i = 0; i < n; i++) {
		uint32_t id = x->spare[--x->nspare];

		x->rwr[i].wr_id = id;
		x->rsge[i].addr = (uintptr_t)(x->pool->mem + (size_t)id * x->pool->buf_size);
		x->pool->bufs[id].owner = x->owner_id;
		if (x->order)
			x->order[(x->ordered + i) % x->rx_wr] = id;
	}
	x->rwr[n - 1].next = NULL;
	if (vmh_likely(!ibv_post_recv(x->qp, x->rwr, &bad))) {
		done = n;
	} else {
		while (done < n && &x->rwr[done] != bad)
			done++;
		for (uint32_t i = n; i-- > done;) {
			x->pool->bufs[x->rwr[i].wr_id].owner = 0;
			x->spare[x->nspare++] = (uint32_t)x->rwr[i].wr_id;
		}
		atomic_store_explicit(&x->suspect, true, memory_order_relaxed);
	}
	x->debt -= done;
	x->ordered += done;
	if (n < x->batch)
		x->rwr[n - 1].next = &x->rwr[n];
}

static bool get_spares(struct verbs_ring *x)
{
	uint32_t got;

	if (x->nspare >= x->batch)
		return true;
	got = vmh_verbs_pool_take(x->pool, x->spare + x->nspare, x->level);
	if (vmh_unlikely(!got))
		VMH_COUNT(x->r.stats->pool_rx_empty, 1);
	x->nspare += got;
	return x->nspare;
}

void vmh_verbs_refill(struct verbs_ring *x)
{
	while (x->debt >= x->batch || (x->debt && x->rx_wr - x->debt < x->batch)) {
		uint32_t before = x->debt, n = x->debt < x->batch ? x->debt : x->batch;

		if (!get_spares(x))
			return;
		if (n > x->nspare)
			n = x->nspare;
		/* a few descriptors are worth a call only where the QP is about to run dry */
		if (n < x->batch && x->rx_wr - x->debt >= x->batch)
			return;
		post_chain(x, n);
		if (x->debt == before)
			return;
	}
}

/* Would the QP stay short of what it lost, if one more buffer went to a socket? Twice the level covers whatever the
 * debt can be between two refills. */
static bool cannot_refill(struct verbs_ring *x)
{
	while (x->nspare < x->debt && x->nspare <= x->level) {
		uint32_t got = vmh_verbs_pool_take(x->pool, x->spare + x->nspare, x->level);

		if (!got) {
			VMH_COUNT(x->r.stats->pool_rx_empty, 1);
			return true;
		}
		x->nspare += got;
	}
	return x->nspare < x->debt;
}

static inline void free_buf(struct verbs_ring *x, uint32_t id)
{
	if (vmh_unlikely(x->nspare == 2 * x->level)) {
		x->nspare -= x->level;
		vmh_verbs_pool_give(x->pool, x->spare + x->nspare, x->level);
	}
	x->spare[x->nspare++] = id;
}

struct taken {
	uint32_t taken, no_socket, dropped, bad, errors, tagged, hw_csum;
	uint64_t bytes;
};

/* The device may loop multicast back that this host sent; whoever here may have it gets it from the kernel. */
static inline bool is_own_multicast(const struct verbs_ring *x, const unsigned char *frame)
{
	return vmh_unlikely(frame[0] & 1) && !memcmp(frame + 6, x->r.mac, 6);
}

static inline void stamp(struct vmh_buf *b, uint64_t hw_ns)
{
	b->stamp_ns = vmh_unlikely(atomic_load_explicit(&vmh_want_stamps, memory_order_relaxed)) ? vmh_wall_ns() : 0;
	vmh_buf_set_hw_stamp(b, hw_ns);
}

static int deliver_other(struct verbs_ring *x, const struct verbs_completion *c, unsigned char *frame, struct vmh_buf *b,
			 struct taken *t)
{
	int rc;

	if (c->len > x->pool->buf_size || !x->r.other) {
		t->bad++;
		return 0;
	}
	rc = x->r.other(&x->r, frame, c->len, b);
	t->bytes += c->len;
	if (rc > 0)
		vmh_buf_is_out(&x->r); /* at once: it may go back before the look ends */
	return rc;
}

static int deliver(struct verbs_ring *x, const struct verbs_completion *c, unsigned char *frame, struct vmh_buf *b,
		   struct taken *t)
{
	bool ok = x->dev->csum && (c->flags & IBV_WC_IP_CSUM_OK), used = false;
	struct vmh_sock *hint;
	int rc;

	t->hw_csum += ok;
	if (vmh_unlikely(c->len > x->pool->buf_size || vmh_frame_parse(frame, c->len, !ok, b)))
		return deliver_other(x, c, frame, b, t);
	if (is_own_multicast(x, frame)) {
		t->no_socket++;
		return 0;
	}
	stamp(b, c->hw_ns);
	hint = c->tag ? vmh_verbs_tagged(c->tag) : NULL;
	rc = hint ? vmh_deliver_hint(&x->r, b, hint, &used) : vmh_deliver(&x->r, b);
	t->tagged += used;
	t->bytes += c->len;
	t->taken += rc > 0;
	t->no_socket += rc == 0;
	t->dropped += rc < 0;
	return rc;
}

static inline void receive_one(struct verbs_ring *x, const struct verbs_completion *c, struct taken *t)
{
	uint32_t id = (uint32_t)c->id;
	struct verbs_buf *v;

	/* not a buffer that this ring posted: not ours to free */
	if (vmh_unlikely(c->id >= x->pool->count || x->pool->bufs[id].owner != x->owner_id)) {
		t->bad++;
		return;
	}
	v = &x->pool->bufs[id];
	v->owner = 0;
	x->debt++;
	x->came++;
	prefetch(x->pool->mem + (size_t)id * x->pool->buf_size, smaller(c->len, vmh_params.rx_prefetch_bytes));
	if (vmh_unlikely(c->status != IBV_WC_SUCCESS)) {
		t->errors += c->status != IBV_WC_WR_FLUSH_ERR;
		atomic_store_explicit(&x->suspect, true, memory_order_relaxed);
	} else if (vmh_unlikely(x->keep_full && x->debt >= x->batch && x->nspare < x->debt && cannot_refill(x))) {
		t->dropped++; /* the buffer goes back to the QP, which would run dry else */
	} else {
		v->b.ring = &x->r;
		v->b.frame = id;
		v->b.shared = 0;
		if (vmh_likely(deliver(x, c, x->pool->mem + (size_t)id * x->pool->buf_size, &v->b, t) > 0))
			return;
	}
	free_buf(x, id);
}

static uint32_t poll_plain(struct verbs_ring *x, uint32_t want, struct taken *t)
{
	const struct ibv_wc *wc = x->rx.wc;
	int n = ibv_poll_cq(x->rx_cq, (int)want, x->rx.wc);

	if (vmh_unlikely(n < 0)) {
		atomic_store_explicit(&x->suspect, true, memory_order_relaxed);
		return 0;
	}
	x->r.several = n > 1;
	for (int i = 0; i < n; i++) {
		struct verbs_completion c = { .id = wc[i].wr_id, .status = wc[i].status, .len = wc[i].byte_len,
					      .flags = wc[i].wc_flags };

		receive_one(x, &c, t);
	}
	return (uint32_t)n;
}

/* What is no datagram may be answered at once, so it is looked at when the library holds the CQ no more. */
static uint32_t poll_extended(struct verbs_ring *x, uint32_t want, struct taken *t)
{
	struct ibv_poll_cq_attr attr = { 0 };
	bool wanted = x->r.hw_stamps && atomic_load_explicit(&vmh_want_hw_stamps, memory_order_relaxed);
	struct verbs_completion *later = x->rx.later;
	struct ibv_cq_ex *q = x->rx_ex;
	const bool put_off = x->r.other != NULL;
	uint32_t n = 0;
	int rc = ibv_start_poll(q, &attr);

	if (vmh_likely(rc == ENOENT))
		return 0;
	if (vmh_unlikely(rc)) {
		atomic_store_explicit(&x->suspect, true, memory_order_relaxed);
		return 0;
	}
	do {
		struct verbs_completion c = { .id = q->wr_id, .status = q->status };

		if (vmh_likely(c.status == IBV_WC_SUCCESS)) {
			c.len = ibv_wc_read_byte_len(q);
			c.flags = ibv_wc_read_wc_flags(q);
			c.tag = ibv_wc_read_flow_tag(q);
			if (vmh_unlikely(wanted))
				c.hw_ns = vmh_verbs_stamp(x);
		}
		if (put_off)
			later[n] = c;
		else
			receive_one(x, &c, t);
	} while (++n < want && !ibv_next_poll(q));
	ibv_end_poll(q);
	x->r.several = n > 1;
	for (uint32_t i = 0; put_off && i < n; i++)
		receive_one(x, &later[i], t);
	return n;
}

static void count_received(struct verbs_ring *x, uint32_t frames, const struct taken *t)
{
	struct vmh_ring_stats *s = x->r.stats;
	uint32_t out = atomic_load_explicit(&x->r.bufs_out, memory_order_relaxed) + t->taken;

	atomic_store_explicit(&x->r.bufs_out, out, memory_order_relaxed);
	VMH_COUNT(s->rx_packets, frames);
	VMH_COUNT(s->rx_bytes, t->bytes);
	VMH_COUNT(s->rx_tagged, t->tagged);
	VMH_COUNT(s->rx_hw_csum, t->hw_csum);
	if (vmh_unlikely(t->bad | t->no_socket | t->dropped | t->errors)) {
		VMH_COUNT(s->rx_bad, t->bad);
		VMH_COUNT(s->rx_no_socket, t->no_socket);
		VMH_COUNT(s->rx_dropped, t->dropped);
		VMH_COUNT(s->cq_errors, t->errors);
	}
	if (vmh_unlikely(frames > VMH_GET(s->drained_max)))
		VMH_SET(s->drained_max, frames);
	VMH_SET(s->queue_len, out);
	vmh_verbs_pool_report(x);
}

int vmh_verbs_poll(struct vmh_ring *r, unsigned budget)
{
	struct verbs_ring *x = verbs_ring_of(r);
	uint32_t n = 0, got, want;
	struct taken t = { 0 };

	x->polls++;
	prefetch_next(x);
	do {
		want = budget - n < x->poll_max ? budget - n : x->poll_max;
		got = x->rx_ex ? poll_extended(x, want, &t) : poll_plain(x, want, &t);
		n += got;
		if (got)
			vmh_verbs_refill(x);
	} while (got == want && n < budget);
	if (n) {
		count_received(x, n, &t);
		vmh_others_end(r);
	}
	return (int)n;
}

void vmh_verbs_put(struct vmh_ring *r, struct vmh_buf *b)
{
	struct verbs_ring *x = verbs_ring_of(r);
	uint32_t out = atomic_load_explicit(&r->bufs_out, memory_order_relaxed) - 1;

	atomic_store_explicit(&r->bufs_out, out, memory_order_relaxed);
	if (vmh_unlikely(x->closed)) {
		vmh_verbs_pool_give(x->pool, &b->frame, 1);
		return;
	}
	VMH_SET(r->stats->queue_len, out);
	free_buf(x, b->frame);
	if (x->debt >= x->batch && x->nspare >= x->batch)
		vmh_verbs_refill(x);
}

/* ---- transmit ---- */

static void release_dm(struct verbs_ring *x, uint64_t upto)
{
	for (uint64_t n = x->tx_done; x->slot_dm && n < upto; n++) {
		uint32_t *bytes = &x->slot_dm[n % x->tx_slots];

		x->dm.used -= *bytes;
		*bytes = 0;
	}
}

void vmh_verbs_reap(struct verbs_ring *x)
{
	struct ibv_wc wc[TX_POLL];
	int n;

	do {
		n = ibv_poll_cq(x->tx_cq, TX_POLL, wc);
		for (int i = 0; i < n; i++) {
			if (vmh_unlikely(wc[i].status != IBV_WC_SUCCESS)) {
				if (wc[i].status != IBV_WC_WR_FLUSH_ERR)
					VMH_COUNT(x->r.stats->cq_errors, 1);
				atomic_store_explicit(&x->suspect, true, memory_order_relaxed);
			}
			if (vmh_unlikely(wc[i].wr_id <= x->tx_done || wc[i].wr_id > x->tx_posted))
				continue;
			release_dm(x, wc[i].wr_id);
			x->tx_done = wc[i].wr_id;
		}
	} while (n == TX_POLL);
	if (vmh_unlikely(n < 0))
		atomic_store_explicit(&x->suspect, true, memory_order_relaxed);
}

static inline void store16(unsigned char *p, uint16_t v)
{
	memcpy(p, &v, sizeof(v));
}

/* Without checksums: the device computes both. */
static void build_headers(unsigned char *to, const struct vmh_frame_hdr *h, uint16_t id, size_t len)
{
	memcpy(to, h->bytes, HEADERS);
	store16(to + OFF_IP_TOTAL, htons((uint16_t)(28 + len)));
	if (!(h->bytes[OFF_IP_FRAG] & IP_DF_BYTE))
		store16(to + OFF_IP_ID, htons(id));
	store16(to + OFF_UDP_LEN, htons((uint16_t)(8 + len)));
}

static bool gather(unsigned char *to, const struct iovec *iov, int n, size_t len)
{
	for (int i = 0; i < n && len; i++) {
		size_t part = iov[i].iov_len < len ? iov[i].iov_len : len;

		if (part)
			memcpy(to, iov[i].iov_base, part);
		to += part;
		len -= part;
	}
	return len == 0;
}

/* Into device memory, if there is room: addr and lkey of the frame are changed then. */
static void use_dm(struct verbs_ring *x, const unsigned char *frame, struct ibv_sge *sge, uint32_t *bytes)
{
	struct verbs_dm *m = &x->dm;
	uint32_t size = (sge->length + DM_ALIGN - 1) & ~(DM_ALIGN - 1), at = m->head, pad = 0;

	if (!m->used)
		at = m->head = 0;
	if (at + size > m->size) { /* the end is too short: it counts as used until this frame is gone */
		pad = m->size - at;
		at = 0;
	}
	if (size > m->size || m->used + pad + size > m->size ||
	    ibv_memcpy_to_dm(m->dm, at, frame, (sge->length + 3) & ~3u))
		return;
	m->head = at + size;
	m->used += pad + size;
	*bytes = pad + size;
	sge->addr = at;
	sge->lkey = m->mr->lkey;
}

/* A frame that was posted. */
static void count_dm(struct verbs_ring *x, const struct ibv_sge *sge, bool used)
{
	struct vmh_ring_stats *s = x->r.stats;

	if (!used) {
		VMH_COUNT(s->dm_full, 1);
		return;
	}
	VMH_COUNT(s->dm_packets, 1);
	VMH_COUNT(s->dm_bytes, sge->length);
}

struct frame {
	struct ibv_sge sge[2];
	struct ibv_send_wr wr;
};

/* The work request for one datagram in its slot. false: iov holds less than len bytes. */
static bool compose(struct verbs_ring *x, struct frame *f, const struct vmh_frame_hdr *h, const struct iovec *iov, int n,
		    size_t len)
{
	uint32_t slot = (uint32_t)(x->tx_posted % x->tx_slots), size = (uint32_t)len + HEADERS;
	unsigned char *at = x->tx_mem + (size_t)slot * x->tx_buf_size;

	prefetch(at, smaller(size, vmh_params.tx_prefetch_bytes)); /* it was written a round of the ring ago */
	f->sge[0] = (struct ibv_sge){ .addr = (uintptr_t)at, .length = size, .lkey = x->tx_mr->lkey };
	f->wr = (struct ibv_send_wr){ .wr_id = x->tx_posted + 1, .sg_list = f->sge, .num_sge = 1,
				      .opcode = IBV_WR_SEND };
	if (size <= x->max_inline)
		f->wr.send_flags = IBV_SEND_INLINE;
	if (!x->dev->csum)
		return vmh_frame_build(at, h, x->ip_id, iov, n, len) == size;
	f->wr.send_flags |= IBV_SEND_IP_CSUM;
	build_headers(at, h, x->ip_id, len);
	if ((f->wr.send_flags & IBV_SEND_INLINE) && n == 1 && len) {
		f->sge[0].length = HEADERS;
		f->sge[1] = (struct ibv_sge){ .addr = (uintptr_t)iov->iov_base, .length = (uint32_t)len };
		f->wr.num_sge = 2;
		return iov->iov_len >= len;
	}
	return gather(at + HEADERS, iov, n, len);
}

static bool has_slot(struct verbs_ring *x)
{
	if (vmh_likely(x->tx_posted - x->tx_done < x->tx_slots))
		return true;
	vmh_verbs_reap(x);
	if (x->tx_posted - x->tx_done < x->tx_slots)
		return true;
	VMH_COUNT(x->r.stats->pool_tx_empty, !x->r.again);
	VMH_COUNT(x->r.stats->tx_full, !x->r.again);
	return false;
}

/* Posts what is in the next slot. */
static int post(struct verbs_ring *x, struct frame *f, size_t size)
{
	struct vmh_ring_stats *s = x->r.stats;
	uint32_t dm_bytes = 0, dm_head = x->dm.head;
	struct ibv_send_wr *bad;
	int rc;

	const bool wanted = x->slot_dm && !(f->wr.send_flags & IBV_SEND_INLINE);

	if (wanted)
		use_dm(x, (unsigned char *)(uintptr_t)f->sge[0].addr, &f->sge[0], &dm_bytes);
	if (x->unsignalled + 1 >= x->tx_batch)
		f->wr.send_flags |= IBV_SEND_SIGNALED;
	rc = ibv_post_send(x->qp, &f->wr, &bad);
	if (vmh_unlikely(rc)) {
		x->dm.used -= dm_bytes;
		x->dm.head = dm_head;
		if (rc != ENOMEM) {
			atomic_store_explicit(&x->suspect, true, memory_order_relaxed);
			return -ENETDOWN;
		}
		vmh_verbs_reap(x);
		VMH_COUNT(s->tx_full, !x->r.again);
		return -EAGAIN;
	}
	if (x->slot_dm)
		x->slot_dm[x->tx_posted % x->tx_slots] = dm_bytes;
	if (wanted)
		count_dm(x, &f->sge[0], dm_bytes != 0);
	x->tx_posted++;
	VMH_COUNT(s->tx_packets, 1);
	VMH_COUNT(s->tx_bytes, size);
	if (f->wr.send_flags & IBV_SEND_INLINE)
		VMH_COUNT(s->tx_inline, 1);
	if (f->wr.send_flags & IBV_SEND_SIGNALED) {
		x->unsignalled = 0;
		vmh_verbs_reap(x);
		VMH_SET(s->pool_tx_free, x->tx_slots - (x->tx_posted - x->tx_done));
	} else {
		x->unsignalled++;
	}
	return 0;
}

int vmh_verbs_send(struct vmh_ring *r, const struct vmh_frame_hdr *h, const struct iovec *iov, int n, size_t len)
{
	struct verbs_ring *x = verbs_ring_of(r);
	struct frame f;
	int rc;

	if (vmh_unlikely(len + 28 > r->mtu || len + HEADERS > x->tx_buf_size))
		return -EMSGSIZE;
	if (vmh_unlikely(!has_slot(x)))
		return -EAGAIN;
	if (vmh_unlikely(!compose(x, &f, h, iov, n, len)))
		return -EINVAL;
	rc = post(x, &f, len + HEADERS);
	x->ip_id = (uint16_t)(x->ip_id + !rc);
	return rc;
}

/* Its checksums are in it. */
int vmh_verbs_send_frame(struct vmh_ring *r, const void *frame, size_t len)
{
	struct verbs_ring *x = verbs_ring_of(r);
	struct frame f = { 0 };

	if (vmh_unlikely(len > r->mtu + 14u || len > x->tx_buf_size))
		return -EMSGSIZE;
	if (vmh_unlikely(!has_slot(x)))
		return -EAGAIN;
	f.sge[0] = (struct ibv_sge){ .addr = (uintptr_t)frame, .length = (uint32_t)len, .lkey = x->tx_mr->lkey };
	f.wr = (struct ibv_send_wr){ .wr_id = x->tx_posted + 1, .sg_list = f.sge, .num_sge = 1, .opcode = IBV_WR_SEND };
	if (len <= x->max_inline) {
		f.wr.send_flags = IBV_SEND_INLINE; /* read before the call returns, from where it is */
	} else {
		unsigned char *at = x->tx_mem + (size_t)(x->tx_posted % x->tx_slots) * x->tx_buf_size;

		memcpy(at, frame, len);
		f.sge[0].addr = (uintptr_t)at;
	}
	return post(x, &f, len);
}

/* ibv_post_send has rung the doorbell of each frame. */
int vmh_verbs_kick(struct vmh_ring *r)
{
	(void)r;
	return 0;
}
