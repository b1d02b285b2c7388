/* Private to ring_verbs*.c: the state of a ring on a raw packet QP, its device, and the memory of all such rings.
 *
 * Locks: r.lock guards receiving, r.tx_lock transmitting, as for all rings; inside them come the flow table's lock
 * (ring_verbs_flow.c) and then a pool's lock, both leaves for the rest of the shim. The library's own mutexes are
 * innermost. Between start_poll and end_poll of an extended CQ the library may hold the CQ: nothing is posted then.
 */
#ifndef VMH_RING_VERBS_H
#define VMH_RING_VERBS_H
#include "vmh_ring.h"
#include "vmh_verbs.h"
#include <infiniband/verbs.h>

/* Exported functions, found by dlsym; verbs.h calls the others through public structs. */
#define VERBS_FUNCTIONS(X) \
	X(struct ibv_device **, get_device_list, (int *)) \
	X(void, free_device_list, (struct ibv_device **)) \
	X(const char *, get_device_name, (struct ibv_device *)) \
	X(struct ibv_context *, open_device, (struct ibv_device *)) \
	X(int, close_device, (struct ibv_context *)) \
	X(int, query_device, (struct ibv_context *, struct ibv_device_attr *)) \
	X(struct ibv_pd *, alloc_pd, (struct ibv_context *)) \
	X(int, dealloc_pd, (struct ibv_pd *)) \
	X(struct ibv_mr *, reg_mr, (struct ibv_pd *, void *, size_t, int)) \
	X(int, dereg_mr, (struct ibv_mr *)) \
	X(struct ibv_comp_channel *, create_comp_channel, (struct ibv_context *)) \
	X(int, destroy_comp_channel, (struct ibv_comp_channel *)) \
	X(struct ibv_cq *, create_cq, (struct ibv_context *, int, void *, struct ibv_comp_channel *, int)) \
	X(int, destroy_cq, (struct ibv_cq *)) \
	X(int, get_cq_event, (struct ibv_comp_channel *, struct ibv_cq **, void **)) \
	X(void, ack_cq_events, (struct ibv_cq *, unsigned)) \
	X(struct ibv_qp *, create_qp, (struct ibv_pd *, struct ibv_qp_init_attr *)) \
	X(int, modify_qp, (struct ibv_qp *, struct ibv_qp_attr *, int)) \
	X(int, query_qp, (struct ibv_qp *, struct ibv_qp_attr *, int, struct ibv_qp_init_attr *)) \
	X(int, destroy_qp, (struct ibv_qp *)) \
	X(int, get_async_event, (struct ibv_context *, struct ibv_async_event *)) \
	X(void, ack_async_event, (struct ibv_async_event *)) \
	X(int, fork_init, (void))

struct verbs_lib {
#define X(ret, name, args) ret (*name) args;
	VERBS_FUNCTIONS(X)
#undef X
};
extern struct verbs_lib vmh_ibv; /* filled by the first vmh_verbs_probe */

struct verbs_dev {
	struct ibv_context *ctx;
	struct ibv_pd *pd;
	char name[VMH_VERBS_DEVICE];
	uint8_t port;
	uint32_t max_wr, max_cqe;
	bool soft;       /* softverbs */
	bool csum;       /* IPv4 and UDP checksums in both directions */
	uint64_t max_dm; /* bytes of memory on the device that may be had */
};

/* One receive buffer; a cache line. */
struct verbs_buf {
	_Alignas(64) struct vmh_buf b;
	uint32_t owner; /* owner_id of the ring that posted it to its QP; 0: delivered, spare or free */
};
_Static_assert(sizeof(struct verbs_buf) == 64, "a cache line");

/* The receive memory of the process for one size of frames. Never freed: a datagram may be read long after its ring. */
struct verbs_pool {
	struct verbs_pool *next;
	unsigned char *mem;
	size_t mem_len, tables_len;
	struct verbs_buf *bufs;
	uint32_t count, buf_size;
	struct vmh_lock lock; /* free, nfree, fresh */
	uint32_t *free, nfree;
	uint32_t fresh;       /* buffers from here on were never used, nor their memory touched */
	struct verbs_ring *_Atomic reporter; /* whose statistics count what is free here: one's, since views add rings up */
};

struct verbs_dm { /* memory on the device, a ring of frames on their way; guarded by r.tx_lock */
	struct ibv_dm *dm;
	struct ibv_mr *mr;
	uint32_t size, head, used;
};

#define VERBS_POLL_MAX 128 /* of VMA_CQ_POLL_BATCH_MAX */

struct verbs_completion {
	uint64_t id;
	enum ibv_wc_status status;
	uint32_t len, tag;
	unsigned flags;
	uint64_t hw_ns; /* 0: none */
};

struct verbs_ring {
	struct vmh_ring r;
	struct verbs_dev *dev;
	struct ibv_comp_channel *channel;
	struct ibv_cq *rx_cq, *tx_cq;
	struct ibv_cq_ex *rx_ex; /* the same as rx_cq where it is an extended one with flow tags */
	struct ibv_qp *qp;
	uint32_t owner_id;       /* never 0, and never used twice in a process */
	pid_t pid;               /* whose it is: a child of a fork leaves all of it alone */
	bool closed;
	_Atomic bool suspect;    /* a completion with an error: the QP may be dead */
	uint32_t rules;          /* that steer to it; guarded by the flow table's lock */
	_Atomic int refused;     /* errno of a rule that could not be made while it had none: it is of no use */
	/* receive; guarded by r.lock */
	struct verbs_pool *pool;
	struct ibv_mr *rx_mr;
	uint32_t rx_wr, debt;    /* descriptors of the QP; how many of them are not posted */
	uint32_t batch, level, poll_max;
	uint32_t *spare, nspare; /* free buffers that the ring holds, at most 2 * level */
	uint32_t *order, ordered, came; /* VMA_RX_PREFETCH_BYTES_BEFORE_POLL: buffers as they were posted; NULL without */
	struct ibv_recv_wr *rwr; /* `batch` of them, chained */
	struct ibv_sge *rsge;
	bool keep_full, armed;
	uint32_t polls, polls_seen;
	union { /* what a poll has found: too much for the stack of a coroutine or a signal handler */
		struct ibv_wc wc[VERBS_POLL_MAX];
		struct verbs_completion later[VERBS_POLL_MAX];
	} rx;
	struct {
		uint64_t due_ns, packets, bytes; /* of the interval: the counters at its begin */
		uint32_t count, usec;
		bool unsupported;
	} mod;
	struct { /* of VMA_HW_TS_CONVERSION; khz and mask are the adapter's; at `ticks` it was `real` ns */
		int how;
		uint64_t khz, mask, ticks, real, again;
	} clock;
	/* transmit; guarded by r.tx_lock */
	_Alignas(64) unsigned char *tx_mem;
	size_t tx_mem_len;
	struct ibv_mr *tx_mr;
	uint32_t tx_slots, tx_buf_size, tx_batch, unsignalled, max_inline;
	uint64_t tx_posted, tx_done; /* frames; slot of frame n is n % tx_slots */
	uint32_t *slot_dm;           /* bytes of device memory that the slot holds; NULL without any */
	struct verbs_dm dm;
	uint16_t ip_id;
};

static inline struct verbs_ring *verbs_ring_of(struct vmh_ring *r)
{
	return (struct verbs_ring *)r;
}

/* ring_verbs.c; the lock that guards what they do is held */
int vmh_verbs_poll(struct vmh_ring *r, unsigned budget);
void vmh_verbs_put(struct vmh_ring *r, struct vmh_buf *b);
int vmh_verbs_send(struct vmh_ring *r, const struct vmh_frame_hdr *h, const struct iovec *iov, int n, size_t len);
int vmh_verbs_send_frame(struct vmh_ring *r, const void *frame, size_t len);
int vmh_verbs_kick(struct vmh_ring *r);
void vmh_verbs_refill(struct verbs_ring *x);
void vmh_verbs_reap(struct verbs_ring *x);
/* ring_verbs_cq.c; r.lock held */
int vmh_verbs_wait_fds(struct vmh_ring *r, int *fds, int max);
void vmh_verbs_arm(struct vmh_ring *r);
bool vmh_verbs_crowded(struct vmh_ring *r);
void vmh_verbs_moderation_start(struct verbs_ring *x);
void vmh_verbs_take_events(struct verbs_ring *x);
/* ring_verbs_clock.c; before the CQ is made, if it could not be made so, and when it is */
uint64_t vmh_verbs_clock_flags(struct verbs_ring *x);
uint64_t vmh_verbs_clock_less(struct verbs_ring *x);
void vmh_verbs_clock_ready(struct verbs_ring *x);
uint64_t vmh_verbs_stamp(struct verbs_ring *x);          /* of the completion that rx_ex is at: ns */
/* ring_verbs_mem.c */
int vmh_verbs_pool_get(struct verbs_ring *x);            /* sets pool and rx_mr */
uint32_t vmh_verbs_pool_take(struct verbs_pool *p, uint32_t *ids, uint32_t n);
void vmh_verbs_pool_give(struct verbs_pool *p, const uint32_t *ids, uint32_t n);
void vmh_verbs_pool_recover(struct verbs_pool *p, uint32_t owner_id); /* what the ring's QP still held */
uint32_t vmh_verbs_pool_free(const struct verbs_pool *p);
void vmh_verbs_pool_report(struct verbs_ring *x);        /* the gauge of free receive buffers */
int vmh_verbs_tx_memory(struct verbs_ring *x);           /* tx_mem, tx_mr, slot_dm and dm */
void vmh_verbs_tx_memory_free(struct verbs_ring *x);
void *vmh_verbs_map(size_t len);                         /* zeroed; NULL */
void vmh_verbs_mem_fork_child(void);
/* ring_verbs_dev.c: the interface's device failed; for a while it is not offered */
void vmh_verbs_distrust(unsigned ifindex);
/* ring_verbs_flow.c */
struct vmh_sock *vmh_verbs_tagged(uint32_t tag);         /* NULL: no flow has it */
int vmh_verbs_try_rule(struct verbs_ring *x);            /* 0, or -errno: the device takes no rules */
void vmh_verbs_ring_opened(void);
void vmh_verbs_ring_closing(struct verbs_ring *x);       /* its rules are destroyed */
void vmh_verbs_flows_fork_child(void);
#endif
