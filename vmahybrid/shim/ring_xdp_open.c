/* Life of an AF_XDP ring: made from a grant of the service, closed when it is gone. */
#include "ring_xdp.h"
#include "vmh_obj.h"
#include "vmh_stats.h"
#include <stdlib.h>
#include <sys/mman.h>

#define SO_XDP_MAX_TX_SKB_BUDGET 9 /* linux 6.17 */
#define TX_BUDGET_MAX 512
#define BATCH 16
#define SOCKET_BUFFER (4 << 20)

static int xdp_wait_fds(struct vmh_ring *r, int *fds, int max)
{
	struct xdp_ring *x = xdp_ring_of(r);
	int n = 0;

	for (; n < (int)x->nq && n < max; n++)
		fds[n] = x->q[n].fd;
	return n;
}

void vmh_xdp_free_memory(struct xdp_ring *x)
{
	vmh_sys(SYS_munmap, x->umem, x->umem_len);
	vmh_sys(SYS_munmap, x->bufs, x->tables_len);
	VMH_SET(x->umem, NULL);
	x->bufs = NULL;
}

static void unmap_ring(struct xring *g)
{
	if (g->map)
		vmh_sys(SYS_munmap, g->map, g->map_len);
	g->map = NULL;
}

/* A thread may be in vmh_xdp_pending: it goes on reading, zeros. The struct is never freed either. */
static void blank_ring(struct xring *g)
{
	if (g->map)
		vmh_sys(SYS_mmap, g->map, g->map_len, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	g->map = NULL;
}

static void unmap_queue(struct xqueue *q)
{
	unmap_ring(&q->rx);
	unmap_ring(&q->fill);
	unmap_ring(&q->tx);
	unmap_ring(&q->comp);
}

static void xdp_close(struct vmh_ring *r)
{
	struct xdp_ring *x = xdp_ring_of(r);

	if (x->closed)
		return;
	x->closed = true;
	for (uint32_t i = 0; i < x->nq; i++) {
		blank_ring(&x->q[i].rx);
		blank_ring(&x->q[i].fill);
		unmap_queue(&x->q[i]);
		vmh_fd_hidden_close(x->q[i].fd);
	}
	VMH_SET(x->nq, 0);
	vmh_xdp_clock_close(&x->clock);
	x->far = 0;
	x->far_first = false;
	if (!atomic_load_explicit(&r->bufs_out, memory_order_relaxed))
		vmh_xdp_free_memory(x);
}

static bool xdp_crowded(struct vmh_ring *r)
{
	struct xdp_ring *x = xdp_ring_of(r);

	for (uint32_t i = 0; i < x->nq; i++) {
		const struct xring *g = &x->q[i].rx;
		uint32_t goal = frames_wanted(x), most = g->size < goal ? g->size : goal;

		if (kernel_index(g->prod) - g->here >= most / 2)
			return true;
	}
	return false;
}

static const struct vmh_ring_ops xdp_ops = {
	.poll = vmh_xdp_poll,
	.pending = vmh_xdp_pending,
	.put = vmh_xdp_put,
	.send = vmh_xdp_send,
	.send_frame = vmh_xdp_send_frame,
	.kick = vmh_xdp_kick,
	.wait_fds = xdp_wait_fds,
	.crowded = xdp_crowded,
	.close = xdp_close,
};

static int map_ring(struct xring *g, int fd, uint64_t page_offset, uint32_t size, size_t entry,
		    const struct xdp_ring_offset *o)
{
	size_t len = o->desc + size * entry;
	long p = vmh_sys(SYS_mmap, NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, page_offset);

	if (p < 0 && p > -4096)
		return (int)p;
	g->map = (void *)p;
	g->map_len = len;
	g->prod = (void *)(p + (long)o->producer);
	g->cons = (void *)(p + (long)o->consumer);
	g->flags = (void *)(p + (long)o->flags);
	g->desc = (void *)(p + (long)o->desc);
	g->size = size;
	g->mask = size - 1;
	return 0;
}

static int map_queue(struct xqueue *q, const struct vmh_msg_ring_reply *grant)
{
	struct xdp_mmap_offsets o;
	socklen_t len = sizeof(o);
	long rc = vmh_sys(SYS_getsockopt, q->fd, SOL_XDP, XDP_MMAP_OFFSETS, &o, &len);

	if (rc < 0)
		return (int)rc;
	if (len != sizeof(o)) /* before linux 5.4, without flags */
		return -EPROTO;
	rc = map_ring(&q->rx, q->fd, XDP_PGOFF_RX_RING, grant->rx_size, sizeof(struct xdp_desc), &o.rx);
	if (!rc)
		rc = map_ring(&q->tx, q->fd, XDP_PGOFF_TX_RING, grant->tx_size, sizeof(struct xdp_desc), &o.tx);
	if (!rc)
		rc = map_ring(&q->fill, q->fd, XDP_UMEM_PGOFF_FILL_RING, grant->fill_size, sizeof(uint64_t), &o.fr);
	if (!rc)
		rc = map_ring(&q->comp, q->fd, XDP_UMEM_PGOFF_COMPLETION_RING, grant->comp_size, sizeof(uint64_t),
			      &o.cr);
	if (rc)
		return (int)rc;
	/* normally all zero; a service could hand over XSKs that were used before */
	q->rx.here = q->rx.there = kernel_index(q->rx.cons);
	q->comp.here = q->comp.there = kernel_index(q->comp.cons);
	q->tx.here = kernel_index(q->tx.prod);
	q->tx.there = kernel_index(q->tx.cons);
	q->fill.here = kernel_index(q->fill.prod);
	q->ahead = q->fill.here - q->rx.here;
	q->fill.there = kernel_index(q->fill.cons);
	return 0;
}

/* Best effort: bigger batches per sendto, and room for more skbs in flight. */
static void tune_socket(int fd, uint32_t tx_size)
{
	int budget = tx_size < TX_BUDGET_MAX ? (int)tx_size : TX_BUDGET_MAX, bytes = SOCKET_BUFFER;

	vmh_sys(SYS_setsockopt, fd, SOL_XDP, SO_XDP_MAX_TX_SKB_BUDGET, &budget, sizeof(budget));
	vmh_sys(SYS_setsockopt, fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes));
}

static bool power_of_two(uint32_t v)
{
	return v && !(v & (v - 1));
}

static bool sane(const struct vmh_msg_ring_reply *g, int nfds)
{
	uint32_t least = g->flags & VMH_RING_F_FAR ? 2 : 1;

	return g->nqueues >= least && g->nqueues <= VMH_RING_WAIT_FDS && nfds == (int)g->nqueues + 1 &&
	       power_of_two(g->frame_size) && g->frame_size >= 2048 && g->frame_size <= 65536 && g->frames >= 4 &&
	       g->frames <= 1u << 24 && g->frames / 2 >= g->nqueues && power_of_two(g->rx_size) &&
	       power_of_two(g->tx_size) && power_of_two(g->fill_size) && power_of_two(g->comp_size);
}

static int map_memory(struct xdp_ring *x, int memfd)
{
	const int prot = PROT_READ | PROT_WRITE;
	long size = vmh_sys(SYS_lseek, memfd, 0, SEEK_END), p;

	if (size < 0)
		return (int)size;
	if ((size_t)size < x->umem_len) /* touching what is not there would be a SIGBUS */
		return -EPROTO;
	p = vmh_sys(SYS_mmap, NULL, x->umem_len, prot, MAP_SHARED | MAP_POPULATE, memfd, 0);
	if (p < 0 && p > -4096)
		return (int)p;
	x->umem = (void *)p;
	p = vmh_sys(SYS_mmap, NULL, x->tables_len, prot, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	if (p < 0 && p > -4096) {
		vmh_sys(SYS_munmap, x->umem, x->umem_len);
		return (int)p;
	}
	x->bufs = (void *)p;
	return 0;
}

/* At least one of each for every queue that has them. */
static uint32_t limited(uint32_t frames, uint32_t limit, uint32_t least)
{
	if (!limit || limit >= frames)
		return frames;
	return limit > least ? limit : least;
}

static void share_frames(struct xdp_ring *x, const struct vmh_msg_ring_reply *g, const struct vmh_xdp_limits *l)
{
	uint32_t f, half = x->frames / 2;

	x->rx_free = (uint32_t *)(x->bufs + x->frames);
	x->tx_free = x->rx_free + x->frames;
	x->tx_frames = !l->tx_bufs ? x->frames / 4 : limited(half, l->tx_bufs, 1);
	if (x->tx_frames > g->tx_size + g->comp_size)
		x->tx_frames = g->tx_size + g->comp_size;
	x->rx_frames = limited(x->frames - x->tx_frames, l->rx_bufs, x->nq);
	x->most = (x->rx_frames + x->nq - 1) / x->nq;
	x->share = limited(x->most, l->posted, 1);
	x->batch = x->tx_batch = vmh_ring_batching ? BATCH : 1;
	if (vmh_ring_batching && l->batch)
		x->batch = l->batch;
	x->low = x->share / 2 ? x->share / 2 : 1;
	if (x->low > g->fill_size / 2)
		x->low = g->fill_size / 2 ? g->fill_size / 2 : 1;
	for (f = 0; f < x->tx_frames; f++)
		x->tx_free[x->tx_nfree++] = f;
	for (f = x->tx_frames + x->rx_frames; f-- > x->tx_frames;)
		free_rx_frame(x, f);
	for (f = 0; f < x->frames; f++) {
		x->bufs[f].b.ring = &x->r;
		x->bufs[f].b.frame = f;
	}
}

static void describe(struct vmh_ring *r, const struct vmh_msg_ring_reply *g, const char *ifname)
{
	struct vmh_ring_stats *s = vmh_stats_ring_new();

	r->ops = &xdp_ops;
	r->id = g->ring_id;
	r->ifindex = g->ifindex;
	r->mtu = g->mtu;
	r->kind = g->kind;
	r->xdp_mode = g->xdp_mode;
	r->flags = g->flags;
	r->lane = g->lane;
	r->rx_frames = xdp_ring_of(r)->rx_frames;
	r->rx_share = xdp_ring_of(r)->most;
	memcpy(r->mac, g->mac, sizeof(r->mac));
	strncpy(r->ifname, ifname, sizeof(r->ifname) - 1);
	r->stats = s;
	s->ring_id = g->ring_id;
	s->ifindex = g->ifindex;
	s->kind = g->kind;
	s->xdp_mode = g->xdp_mode;
	s->flags = g->flags;
	memcpy(s->ifname, r->ifname, sizeof(s->ifname));
	VMH_SET(s->pool_rx_free, xdp_ring_of(r)->rx_frames);
	VMH_SET(s->pool_tx_free, xdp_ring_of(r)->tx_nfree);
	__atomic_store_n(&s->used, 1, __ATOMIC_RELEASE);
}

static int open_queues(struct xdp_ring *x, struct vmh_msg_ring_reply *g, const int *fds,
		       int (*bound)(struct vmh_msg_ring_reply *))
{
	int rc = 0;

	for (uint32_t i = 0; i < x->nq && !rc; i++) {
		x->q[i].fd = fds[i + 1];
		rc = map_queue(&x->q[i], g);
	}
	if (!rc && (g->flags & VMH_RING_F_BIND_AFTER))
		rc = bound ? bound(g) : -EPROTO;
	if (rc)
		for (uint32_t i = 0; i < x->nq; i++)
			unmap_queue(&x->q[i]);
	return rc;
}

int vmh_ring_xdp_open(struct vmh_msg_ring_reply *grant, const char *ifname, const int *fds, int nfds,
		      const struct vmh_xdp_limits *limits, int (*bound)(struct vmh_msg_ring_reply *), struct vmh_ring **out)
{
	struct xdp_ring *x;
	size_t size;
	int rc;

	if (!sane(grant, nfds))
		return -EPROTO;
	size = sizeof(*x) + grant->nqueues * sizeof(struct xqueue);
	x = aligned_alloc(64, (size + 63) & ~(size_t)63);
	if (!x)
		return -ENOMEM;
	memset(x, 0, size);
	x->frames = grant->frames;
	x->frame_size = grant->frame_size;
	x->frame_shift = (uint32_t)__builtin_ctz(grant->frame_size);
	x->nq = grant->nqueues;
	x->far = x->nq - (grant->flags & VMH_RING_F_FAR ? 1 : 0);
	x->verify = grant->flags & VMH_RING_F_VERIFY_CSUM;
	x->umem_len = (size_t)x->frames << x->frame_shift;
	x->tables_len = x->frames * (sizeof(struct xbuf) + 2 * sizeof(uint32_t));
	if (grant->flags & (VMH_RING_F_CHAINS | VMH_RING_F_BIND_AFTER))
		x->tables_len += CHAIN_MAX;
	rc = map_memory(x, fds[0]);
	if (rc)
		goto fail;
	rc = open_queues(x, grant, fds, bound);
	if (rc) {
		vmh_xdp_free_memory(x);
		goto fail;
	}
	x->zerocopy = grant->flags & VMH_RING_F_ZEROCOPY;
	share_frames(x, grant, limits);
	if (grant->flags & VMH_RING_F_CHAINS)
		x->chain = (unsigned char *)(x->tx_free + x->frames);
	describe(&x->r, grant, ifname);
	x->clock.fd = -1;
	x->r.hw_stamps = grant->flags & VMH_RING_F_STAMP &&
			 vmh_xdp_clock_open(&x->clock, ifname, limits->hw_ts_conversion);
	for (uint32_t i = 0; i < x->nq; i++) {
		tune_socket(x->q[i].fd, grant->tx_size);
		vmh_xdp_refill(x, &x->q[i]);
	}
	vmh_sys(SYS_close, fds[0]); /* the mapping is enough */
	vmh_ring_add(&x->r);
	*out = &x->r;
	return 0;
fail:
	free(x);
	return rc;
}
