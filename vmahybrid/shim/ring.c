/* What all rings have in common: the list, locking, and the way back of delivered buffers.
 *
 * A buffer can be given back while another thread polls. Instead of waiting for the lock it is pushed on
 * ring->returned, and whoever unlocks looks there afterwards: push; try to lock || unlock; look. With a
 * full barrier in the middle of both, one of the two sees the other, so that no buffer stays behind.
 */
#include "vmh_ring.h"
#include "vmh_heap.h"
#include "vmh_stats.h"
#include <sys/epoll.h>

#define DRAIN 65536 /* frames: more than any ring holds */
#define RETIRE_POLLS 4

struct vmh_ring *_Atomic vmh_rings;
_Atomic int vmh_want_stamps, vmh_want_hw_stamps;
_Atomic bool vmh_wanted_hw_stamps;
int64_t vmh_ring_batching = 1;
_Atomic uint32_t vmh_os_reports;

static struct vmh_ring_stats no_stats; /* of closed rings; nobody reads it */

/* Between an atomic read-modify-write and a load: on x86 the former is a full barrier already. */
static inline void barrier_after_rmw(void)
{
#if defined(__x86_64__) || defined(__i386__)
	atomic_signal_fence(memory_order_seq_cst);
#else
	atomic_thread_fence(memory_order_seq_cst);
#endif
}

VMH_COLD static void take_returned(struct vmh_ring *r)
{
	struct vmh_buf *b = atomic_exchange_explicit(&r->returned, NULL, memory_order_acquire), *next;

	for (; b; b = next) {
		next = b->next; /* the last put of a closed ring unmaps b */
		r->ops->put(r, b);
	}
}

VMH_HOT static void unlock(struct vmh_ring *r)
{
	for (;;) {
		vmh_unlock(&r->lock);
		barrier_after_rmw();
		if (vmh_likely(!atomic_load_explicit(&r->returned, memory_order_relaxed)) || !vmh_trylock(&r->lock))
			return;
		take_returned(r);
	}
}

static inline bool gone(struct vmh_ring *r)
{
	return vmh_unlikely(atomic_load_explicit(&r->gone, memory_order_relaxed));
}

static inline struct vmh_ring *first(void)
{
	return atomic_load_explicit(&vmh_rings, memory_order_acquire);
}

void vmh_ring_add(struct vmh_ring *r)
{
	struct vmh_ring *last = first();

	r->next = NULL;
	if (!last) {
		atomic_store_explicit(&vmh_rings, r, memory_order_release);
		return;
	}
	while (last->next)
		last = last->next;
	__atomic_store_n(&last->next, r, __ATOMIC_RELEASE);
}

static inline struct vmh_ring *next_of(struct vmh_ring *r)
{
	return __atomic_load_n(&r->next, __ATOMIC_ACQUIRE);
}

struct vmh_ring *vmh_lane_ring(unsigned ifindex, unsigned lane)
{
	struct vmh_ring *lowest = NULL;

	for (struct vmh_ring *r = first(); r; r = next_of(r)) {
		if (r->ifindex != ifindex || gone(r))
			continue;
		if (r->lane == lane)
			return r;
		if (!lowest || r->lane < lowest->lane)
			lowest = r;
	}
	return lowest;
}

/* For a walk through all rings, or `only` one. */
static inline struct vmh_ring *first_of(struct vmh_ring *only)
{
	return only ? only : first();
}

static inline struct vmh_ring *after_it(struct vmh_ring *only, struct vmh_ring *r)
{
	return only ? NULL : next_of(r);
}

static inline void put_kept(struct vmh_ring *r)
{
	struct vmh_buf *b;

	if (vmh_likely(!atomic_load_explicit(&r->kept, memory_order_relaxed)))
		return;
	b = atomic_exchange_explicit(&r->kept, NULL, memory_order_acq_rel);
	if (b)
		vmh_ring_put(b);
}

static inline void reclaim(struct vmh_ring *r)
{
	if (vmh_ring_batching == 1)
		put_kept(r);
}

/* Worth taking the lock? */
static inline bool pending(struct vmh_ring *r)
{
	if (gone(r))
		return false;
	if (!r->ops->pending || r->ops->pending(r))
		return true;
	reclaim(r);
	return false;
}

static inline void after(struct vmh_ring *r, int frames)
{
	void (*fn)(struct vmh_ring *, int) = __atomic_load_n(&r->after, __ATOMIC_RELAXED);

	if (vmh_unlikely(fn != NULL))
		fn(r, frames);
}

/* Frames to their sockets; the first datagram for socket `s`, if one is given, to *taken. seen: it is pending. */
static inline int poll_for(struct vmh_ring *r, const struct vmh_sock *s, struct vmh_buf **taken, unsigned budget,
			   bool seen)
{
	int n = 0;

	if (!VMH_GET(r->polled) && !vmh_held.internal)
		VMH_SET(r->polled, 1);
	if ((!seen && !pending(r)) || !vmh_trylock(&r->lock)) {
		after(r, 0);
		return 0;
	}
	if (!gone(r)) {
		r->taker = s;
		r->brimming = false;
		n = r->ops->poll(r, budget);
		if (s) {
			*taken = r->taken;
			r->taker = NULL;
			r->taken = NULL;
		}
	}
	unlock(r);
	after(r, n);
	if (!n && !r->ops->pending)
		reclaim(r);
	return n;
}

int vmh_ring_poll(struct vmh_ring *r, unsigned budget)
{
	return poll_for(r, NULL, NULL, budget, false);
}

bool vmh_rings_pending(struct vmh_ring *only)
{
	for (struct vmh_ring *r = first_of(only); r; r = after_it(only, r))
		if (pending(r))
			return true;
	return false;
}

struct vmh_buf *vmh_rings_take(struct vmh_ring *only, const struct vmh_sock *s, unsigned budget, int *frames,
			       bool seen)
{
	struct vmh_buf *b = NULL;

	*frames = 0;
	for (struct vmh_ring *r = first_of(only); r; r = after_it(only, r))
		*frames += poll_for(r, b ? NULL : s, &b, budget, seen && only);
	return b;
}

void vmh_ring_retire(struct vmh_ring *r)
{
	if (r->ops->stop && !gone(r))
		r->ops->stop(r);
	vmh_lock(&r->lock);
	if (!gone(r)) {
		for (int i = 0; i < RETIRE_POLLS && r->ops->poll(r, DRAIN) > 0; i++)
			; /* frames may still come, until the service takes the rules away */
		atomic_store(&r->gone, 1);
	}
	unlock(r);
}

int vmh_rings_poll(unsigned budget)
{
	int n = 0;

	for (struct vmh_ring *r = first(); r; r = next_of(r))
		n += vmh_ring_poll(r, budget);
	return n;
}

void vmh_rings_catch_up(unsigned budget)
{
	unsigned n = 0;
	int got;

	do {
		got = vmh_rings_poll(budget);
		n += (unsigned)got;
	} while (got > 0 && n < VMH_CATCH_UP);
}

void vmh_rings_settle(void)
{
	for (struct vmh_ring *r = first(); r; r = next_of(r)) {
		if (gone(r))
			continue;
		vmh_lock(&r->lock);
		int n = gone(r) ? 0 : r->ops->poll(r, DRAIN);
		unlock(r);
		after(r, n);
	}
}

#define DRAIN_STEP 32

/* Lock held. What waits in the ring costs nobody anything, and moved to a socket it counts against its buffer: so half
 * of that stays free, unless the ring is crowded. A program that looks itself finds it: for each frame that this thread
 * takes, there are locks that cost the program more than its own look, and with VMA_THREAD_MODE=0 system calls. */
static int drain(struct vmh_ring *r, unsigned budget)
{
	unsigned n = 0;
	int got = 1;

	bool polled = VMH_GET(r->polled);

	VMH_SET(r->polled, 0);
	if (r->ops->crowded(r))
		return r->ops->poll(r, budget);
	while (!polled && got > 0 && n < budget && !r->brimming) {
		got = r->ops->poll(r, budget - n < DRAIN_STEP ? budget - n : DRAIN_STEP);
		n += got > 0 ? (unsigned)got : 0;
	}
	return (int)n;
}

void vmh_rings_drain(unsigned budget)
{
	for (struct vmh_ring *r = first(); r; r = next_of(r)) {
		reclaim(r);
		if (!pending(r) || !vmh_trylock(&r->lock))
			continue;
		int n = gone(r) ? 0 : drain(r, budget);
		unlock(r);
		after(r, n);
	}
}

void vmh_ring_put(struct vmh_buf *b)
{
	struct vmh_ring *r = b->ring;
	struct vmh_buf *head;

	if (vmh_unlikely(b->shared)) {
		vmh_heap_free(b);
		return;
	}
	if (vmh_likely(vmh_trylock(&r->lock))) {
		r->ops->put(r, b);
		unlock(r);
		return;
	}
	head = atomic_load_explicit(&r->returned, memory_order_relaxed);
	do {
		b->next = head;
	} while (!atomic_compare_exchange_weak_explicit(&r->returned, &head, b, memory_order_seq_cst,
							memory_order_relaxed));
	barrier_after_rmw();
	if (vmh_trylock(&r->lock)) {
		take_returned(r);
		unlock(r);
	}
}

void vmh_ring_put_later(struct vmh_buf *b)
{
	struct vmh_ring *r = b->ring;

	if (!b->shared && vmh_ring_batching)
		b = atomic_exchange(&r->kept, b);
	if (b)
		vmh_ring_put(b);
	barrier_after_rmw();
	if (gone(r))
		put_kept(r);
}

int vmh_ring_send(struct vmh_ring *r, const struct vmh_frame_hdr *h, const struct iovec *iov, int n, size_t len,
		  unsigned how)
{
	int rc;

	vmh_lock(&r->tx_lock);
	if (gone(r)) {
		rc = -ENETDOWN;
	} else {
		r->again = how & VMH_SEND_AGAIN;
		rc = r->ops->send(r, h, iov, n, len);
		if (vmh_likely(rc == 0 && !(how & VMH_SEND_MORE)))
			rc = r->ops->kick(r);
	}
	vmh_unlock(&r->tx_lock);
	return rc;
}

int vmh_ring_send_frame(struct vmh_ring *r, const void *frame, size_t len, bool more)
{
	int rc;

	if (!r->ops->send_frame)
		return -EOPNOTSUPP;
	vmh_lock(&r->tx_lock);
	if (gone(r)) {
		rc = -ENETDOWN;
	} else {
		r->again = false;
		rc = r->ops->send_frame(r, frame, len);
		if (vmh_likely(rc == 0 && !more))
			rc = r->ops->kick(r);
	}
	vmh_unlock(&r->tx_lock);
	return rc;
}

int vmh_ring_kick(struct vmh_ring *r)
{
	int rc;

	vmh_lock(&r->tx_lock);
	rc = gone(r) ? -ENETDOWN : r->ops->kick(r);
	vmh_unlock(&r->tx_lock);
	return rc;
}

int vmh_ring_wait_fds(struct vmh_ring *r, int *fds, int max)
{
	int n = 0;

	if (gone(r))
		return 0;
	after(r, VMH_BEFORE_SLEEP);
	vmh_lock(&r->lock); /* not while the fds are being closed */
	if (!gone(r)) {
		n = r->ops->wait_fds(r, fds, max);
		if (r->ops->arm)
			r->ops->arm(r);
		VMH_COUNT(r->stats->interrupts_requested, 1);
	}
	unlock(r);
	if (r->ops->arm)
		after(r, 0); /* of what arming has delivered */
	return n;
}

int vmh_rings_wait_fds(int *fds, int max)
{
	int n = 0;

	for (struct vmh_ring *r = first(); r && n < max; r = next_of(r))
		n += vmh_ring_wait_fds(r, fds + n, max - n);
	return n;
}

void vmh_rings_woken(const struct pollfd *p, int n)
{
	for (struct vmh_ring *r = first(); r; r = next_of(r)) {
		int fds[VMH_RING_WAIT_FDS], own = 0;
		bool woken = false;

		if (gone(r))
			continue;
		vmh_lock(&r->lock);
		if (!gone(r))
			own = r->ops->wait_fds(r, fds, VMH_RING_WAIT_FDS);
		for (int i = 0; i < own; i++)
			for (int k = 0; k < n; k++)
				woken |= p[k].fd == fds[i] && p[k].revents;
		if (woken)
			VMH_COUNT(r->stats->interrupts_received, 1);
		unlock(r);
	}
}

static bool ctl(struct vmh_ring *r, int op, uint32_t events)
{
	struct epoll_event ev = { .events = events };
	int fds[VMH_RING_WAIT_FDS], n = r->ops->wait_fds(r, fds, VMH_RING_WAIT_FDS);

	for (int i = 0; i < n; i++)
		if (vmh_sys(SYS_epoll_ctl, r->heard_by, op, fds[i], &ev) < 0)
			return false;
	return true;
}

/* Lock held. The set may outlive the ring in this process, and the service has its descriptors too. */
static void unheard(struct vmh_ring *r)
{
	if (r->heard != VMH_HEARD_NOT)
		ctl(r, EPOLL_CTL_DEL, 0);
	VMH_SET(r->heard, VMH_HEARD_NOT);
}

static bool hear(struct vmh_ring *r, int set, bool on)
{
	bool ok = true;

	vmh_lock(&r->lock);
	if (gone(r)) {
		unheard(r);
	} else {
		r->heard_by = set;
		ok = ctl(r, r->heard == VMH_HEARD_NOT ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, on ? EPOLLIN : 0);
		VMH_SET(r->heard, !ok ? VMH_HEARD_NOT : on ? VMH_HEARD : VMH_MUTED);
	}
	unlock(r);
	return ok;
}

bool vmh_rings_hear(int set, bool muted)
{
	bool ok = true;

	for (struct vmh_ring *r = first(); r; r = next_of(r)) {
		bool on = !muted && !r->first;

		if (gone(r) ? VMH_GET(r->heard) != VMH_HEARD_NOT : VMH_GET(r->heard) != (on ? VMH_HEARD : VMH_MUTED))
			ok &= hear(r, set, on);
	}
	return ok;
}

void vmh_rings_heard(void)
{
	for (struct vmh_ring *r = first(); r; r = next_of(r)) {
		if (VMH_GET(r->heard) != VMH_HEARD || !pending(r))
			continue;
		vmh_lock(&r->lock);
		VMH_COUNT(r->stats->interrupts_received, 1);
		unlock(r);
	}
}

bool vmh_rings_waiting(void)
{
	for (struct vmh_ring *r = first(); r; r = next_of(r))
		if (!gone(r) && (!r->ops->pending || r->ops->pending(r)))
			return true;
	return false;
}

void vmh_rings_before_sleep(void)
{
	for (struct vmh_ring *r = first(); r; r = next_of(r))
		if (!gone(r))
			after(r, VMH_BEFORE_SLEEP);
}

void vmh_ring_close(struct vmh_ring *r)
{
	atomic_store(&r->gone, 1);
	put_kept(r);
	vmh_lock(&r->lock);
	unheard(r);
	vmh_lock(&r->tx_lock);
	r->ops->close(r);
	if (r->stats != &no_stats)
		vmh_stats_ring_free(r->stats);
	r->stats = &no_stats;
	vmh_unlock(&r->tx_lock);
	unlock(r);
}

bool vmh_rings_closed(void)
{
	for (struct vmh_ring *r = first(); r; r = next_of(r))
		if (VMH_GET(r->stats) != &no_stats)
			return false;
	return true;
}

void vmh_rings_fork_child(void)
{
	for (struct vmh_ring *r = first(); r; r = next_of(r)) {
		/* threads that held the locks do not exist here */
		vmh_lock_reset(&r->lock);
		vmh_lock_reset(&r->tx_lock);
		if (atomic_exchange(&r->kept, NULL)) /* else the memory would stay mapped for it */
			atomic_store(&r->bufs_out, atomic_load(&r->bufs_out) - 1);
		r->stats = &no_stats; /* the other page is the parent's */
		r->heard = VMH_HEARD_NOT; /* and so is the set */
		r->first = NULL;
		vmh_ring_close(r);
	}
}
