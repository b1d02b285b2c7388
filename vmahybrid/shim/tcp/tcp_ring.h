/* An instance of the TCP stack on a ring: frames in, frames out, and the two held together.
 *
 * What the ring receives and is no UDP datagram goes to the stack; a frame stays in the UMEM until its bytes are read.
 * What the stack sends is posted at once and pushed to the wire by vmh_tcp_ring_flush, so that a burst costs one system
 * call. Lock order: ring lock, stack, tx_lock. */
#ifndef VMH_TCP_RING_H
#define VMH_TCP_RING_H
#include "tcp_stack.h"
#include "vmh_ring.h"

#define VMH_TCP_RING_LOOK 64

struct vmh_tcp_ring {
	struct vmh_ring *ring;
	struct vmh_tcp *tcp;
	_Atomic bool posted;        /* frames that flush has to push */
	bool at_once;               /* the next frame does not wait for it */
	_Atomic uint64_t due;       /* ns of the next timer */
	_Atomic uint64_t soon;      /* vmh_cycles() at which ACKs go that wait for company; 0: there are none */
	uint64_t cycles, ns;        /* stack lock: the last reading of the clock */
	uint32_t most_out;          /* frames that are out at which no more stay; ring lock */
	uint64_t unwanted;          /* frames of no connection; the service steers none here, so they are few */
	void (*ready)(void *arg, void *user, struct vmh_tcp_conn *c);
	/* may be set after vmh_tcp_ring_open */
	void (*level)(void *arg, void *user, unsigned events, const struct vmh_tcp_amounts *a);
	/* of struct vmh_tcp_env, without ctx */
	unsigned (*opened)(const struct vmh_tcp_addr *a);
	void (*over)(unsigned place);
	bool (*no_way_back)(const struct vmh_tcp_ring *tr, const struct vmh_ip *laddr, const struct vmh_ip *raddr);
	/* ring lock held: of no connection */
	void (*stray)(struct vmh_tcp_ring *tr, unsigned char *frame, uint32_t len);
	/* ring lock, and held: true if the frame is not the stack's, since its connection is being moved; NULL: none is */
	bool (*aside)(struct vmh_tcp_ring *tr, unsigned char *frame, uint32_t len);
	void *arg;
	/* ring lock: frames of this look, which the stack gets together; none between two looks */
	unsigned waiting, merge_max;
	struct vmh_buf *buf[VMH_TCP_RING_LOOK];
	struct vmh_tcp_in in[VMH_TCP_RING_LOOK];
};

/* partial (true of virtual interfaces) and merge_max: as of struct vmh_tcp_env. */
int vmh_tcp_ring_open(struct vmh_tcp_ring *tr, struct vmh_ring *r, bool partial, unsigned merge_max,
		      void (*ready)(void *arg, void *user, struct vmh_tcp_conn *c), void *arg);
/* Frames, timers, and a flush. Frames taken. */
int vmh_tcp_ring_poll(struct vmh_tcp_ring *tr, unsigned budget);
void vmh_tcp_ring_flush(struct vmh_tcp_ring *tr); /* after calls that may have sent */
/* Ends the wait of ACKs for what may carry them, if it is time, or `now`: nobody is about to write. */
void vmh_tcp_ring_acks_go(struct vmh_tcp_ring *tr);
static inline void vmh_tcp_ring_acks(struct vmh_tcp_ring *tr, bool now)
{
	uint64_t soon = atomic_load_explicit(&tr->soon, memory_order_relaxed);

	if (vmh_unlikely(soon != 0) && (now || vmh_cycles() >= soon))
		vmh_tcp_ring_acks_go(tr);
}
void vmh_tcp_ring_close(struct vmh_tcp_ring *tr); /* before vmh_ring_close */
#endif
