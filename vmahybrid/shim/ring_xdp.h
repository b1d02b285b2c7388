/* Private to ring_xdp.c (receive, transmit) and ring_xdp_open.c (life): the state of an AF_XDP ring. */
#ifndef VMH_RING_XDP_H
#define VMH_RING_XDP_H
#include "vmh_flow.h"
#include "vmh_ring.h"
#include <linux/if_xdp.h>
#include <sys/socket.h>

#ifndef AF_XDP
#define AF_XDP 44
#endif
#ifndef SOL_XDP
#define SOL_XDP 283
#endif

#define CHAIN_MAX 65664 /* the longest IP packet with Ethernet header and tags, whole cache lines */

struct xring {
	_Atomic uint32_t *prod, *cons, *flags;
	void *desc;
	uint32_t mask, size;
	uint32_t here, there; /* our index; the last seen index of the kernel */
	void *map;
	size_t map_len;
};

struct xqueue {
	int fd;
	uint32_t posted; /* frames that the kernel holds for receiving */
	uint32_t ahead;  /* index of a fill entry less the RX index at which its frame comes back */
	struct xring rx, fill, tx, comp;
};

struct xbuf {
	_Alignas(64) struct vmh_buf b; /* a cache line each */
};

/* Of VMA_HW_TS_CONVERSION: the adapter's clock, and what is added to it for CLOCK_REALTIME. */
struct xdp_clock {
	bool synchronised;
	int fd;          /* of /dev/ptpN; -1: none */
	clockid_t id;
	uint64_t ahead;  /* ns, modulo 2^64 */
	uint64_t again;  /* when both are looked at */
};

struct xdp_ring {
	struct vmh_ring r;
	unsigned char *umem;
	size_t umem_len;
	struct xbuf *bufs;
	size_t tables_len; /* bufs and the two stacks are one mapping */
	uint32_t frames, frame_size, frame_shift, nq;
	bool verify, zerocopy, closed;
	uint32_t far; /* the queue of the far end (VMH_RING_F_FAR), or nq */
	bool far_first; /* frames came by it last; guarded by r.lock */
	/* receive; guarded by r.lock */
	uint32_t *rx_free, rx_nfree, rx_frames;
	uint32_t batch; /* free frames worth a write to the producer index, which the kernel's core reads */
	uint32_t share, low; /* frames wanted per fill ring, VMA_RX_WRE at most; below `low` they are posted one by one */
	uint32_t most;       /* the same with those of TCP connections */
	struct xdp_clock clock; /* where r.hw_stamps */
	unsigned char *chain; /* CHAIN_MAX bytes for a frame that came in several; NULL: none does */
	/* transmit; guarded by r.tx_lock */
	_Alignas(64) uint32_t *tx_free;
	uint32_t tx_nfree, tx_frames;
	uint32_t tx_batch; /* in flight before completions are looked at: keeps few frames in use, so in cache */
	uint16_t ip_id;
	uint32_t priority;       /* of the socket of queue 0, and so of what it sends */
	_Atomic bool kick_later; /* the kernel could not take everything; also read under r.lock */
	struct xqueue q[];
};

static inline struct xdp_ring *xdp_ring_of(struct vmh_ring *r)
{
	return (struct xdp_ring *)r;
}

/* The only places that touch the indexes shared with the kernel. */
static inline uint32_t kernel_index(_Atomic uint32_t *i)
{
	return atomic_load_explicit(i, memory_order_acquire);
}

static inline void publish(_Atomic uint32_t *i, uint32_t v)
{
	atomic_store_explicit(i, v, memory_order_release);
}

static inline bool needs_wakeup(const struct xring *g)
{
	return atomic_load_explicit(g->flags, memory_order_relaxed) & XDP_RING_NEED_WAKEUP;
}

/* entries to consume; the kernel's index is read only when the known ones are used up */
static inline uint32_t to_consume(struct xring *g)
{
	if (g->there == g->here)
		g->there = kernel_index(g->prod);
	return g->there - g->here;
}

static inline uint32_t room(struct xring *g, uint32_t wanted)
{
	uint32_t n = g->size - (g->here - g->there);

	if (n < wanted) {
		g->there = kernel_index(g->cons);
		n = g->size - (g->here - g->there);
	}
	return n;
}

static inline uint64_t *addr_at(struct xring *g, uint32_t i)
{
	return (uint64_t *)g->desc + (i & g->mask);
}

static inline struct xdp_desc *desc_at(struct xring *g, uint32_t i)
{
	return (struct xdp_desc *)g->desc + (i & g->mask);
}

/* All connections of TCP may send at the same time, and what finds no frame is sent again 10 ms later at best. Those that
 * are silent have none: the kernel takes frames in turn, and as many as there are come from memory, not from the cache. */
#define FRAMES_PER_CONN 2 /* a segment, and the ACK of ours */
static inline uint32_t frames_wanted(const struct xdp_ring *x)
{
	uint32_t conns = atomic_load_explicit(&x->r.conns, memory_order_relaxed);
	uint32_t talkers = x->r.talkers < conns ? x->r.talkers : conns; /* the others have been closed */
	uint64_t n = x->share + (uint64_t)FRAMES_PER_CONN * talkers;

	return n < x->most ? (uint32_t)n : x->most;
}

static inline void free_rx_frame(struct xdp_ring *x, uint32_t frame)
{
	x->rx_free[x->rx_nfree++] = frame;
}

/* ring_xdp.c; the lock that guards what they do is held */
VMH_HOT int vmh_xdp_poll(struct vmh_ring *r, unsigned budget);
VMH_HOT bool vmh_xdp_pending(struct vmh_ring *r); /* no lock held */
void vmh_xdp_put(struct vmh_ring *r, struct vmh_buf *b);
VMH_HOT int vmh_xdp_send(struct vmh_ring *r, const struct vmh_frame_hdr *h, const struct iovec *iov, int n, size_t len);
int vmh_xdp_send_frame(struct vmh_ring *r, const void *frame, size_t len);
VMH_HOT int vmh_xdp_kick(struct vmh_ring *r);
void vmh_xdp_refill(struct xdp_ring *x, struct xqueue *q);
/* ring_xdp_open.c */
void vmh_xdp_free_memory(struct xdp_ring *x);
/* ring_xdp_clock.c. For `conversion` of this interface's stamps: false where they would not be what it says. */
bool vmh_xdp_clock_open(struct xdp_clock *c, const char *ifname, int conversion);
bool vmh_xdp_clock_look(struct xdp_clock *c);
uint64_t vmh_xdp_clock_ns(struct xdp_clock *c, uint64_t ns); /* of a stamp */
void vmh_xdp_clock_close(struct xdp_clock *c);
#endif
