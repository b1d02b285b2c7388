/* The ready list of an epoll set. */
#include "vmh_iomux_int.h"
#include "vmh_sock.h"
#include "vmh_tcps.h"

void vmh_ep_rdy_remove(struct vmh_ep *e, struct vmh_epitem *it) /* ready lock held */
{
	it->rdy_prev->rdy_next = it->rdy_next;
	it->rdy_next->rdy_prev = it->rdy_prev;
	it->rdy_next = NULL;
	atomic_store_explicit(&e->rdy_n, atomic_load_explicit(&e->rdy_n, memory_order_relaxed) - 1,
			      memory_order_release);
}

static void rdy_append(struct vmh_ep *e, struct vmh_epitem *it) /* ready lock held */
{
	it->rdy_prev = e->rdy.rdy_prev;
	it->rdy_next = &e->rdy;
	it->rdy_prev->rdy_next = it;
	e->rdy.rdy_prev = it;
	atomic_store_explicit(&e->rdy_n, atomic_load_explicit(&e->rdy_n, memory_order_relaxed) + 1,
			      memory_order_release);
}

static inline bool is_tcp(const struct vmh_epitem *it)
{
	return vmh_unlikely(atomic_load_explicit(&it->member->class_, memory_order_relaxed) == VMH_CLASS_TCP);
}

static inline bool armed(const struct vmh_epitem *it)
{
	return ((it->events & VMH_IN) || is_tcp(it)) && !it->disarmed;
}

static inline uint32_t tcp_bits(const struct vmh_epitem *it)
{
	return vmh_tcps_bits((const struct vmh_tcps *)it->member) & (it->events | EPOLLERR | EPOLLHUP);
}

static inline bool member_ready(const struct vmh_epitem *it)
{
	return is_tcp(it) ? tcp_bits(it) != 0 : vmh_sock_ready((const struct vmh_sock *)it->member);
}

/* What the item reports now; ready lock held. */
static inline uint32_t bits_of(const struct vmh_epitem *it)
{
	if (is_tcp(it))
		return armed(it) ? tcp_bits(it) : 0;
	if (armed(it) && member_ready(it))
		return it->events & (VMH_IN | VMH_OUT);
	return vmh_unlikely(it->sent) ? it->events & VMH_OUT : 0;
}

void vmh_ep_push(struct vmh_epitem *it)
{
	struct vmh_ep *e = it->set;

	vmh_lock(&e->rdy_lock);
	if (!it->rdy_next && armed(it))
		rdy_append(e, it);
	vmh_unlock(&e->rdy_lock);
}

void vmh_ep_push_out(struct vmh_epitem *it)
{
	struct vmh_ep *e = it->set;

	vmh_lock(&e->rdy_lock);
	it->sent = 1;
	if (!it->rdy_next)
		rdy_append(e, it);
	vmh_unlock(&e->rdy_lock);
}

bool vmh_ep_push_if_ready(struct vmh_epitem *it)
{
	if (!member_ready(it))
		return false;
	vmh_ep_push(it);
	return true;
}

struct fired {
	struct vmh_epitem *it;
	struct epoll_event *out;
	int fd;         /* as registered; may be closed meanwhile while a dup keeps the membership */
	int live_fd;
	uint32_t other; /* wanted, and for the kernel to say */
};
#define FIRED_MAX 64

/* ONESHOT fires once for all its bits: a writer would never hear of EPOLLOUT while the rings are busy. */
static void other_bits(const struct fired *f)
{
	struct pollfd p = { .fd = f->live_fd, .events = (short)f->other };
	struct timespec zero = { 0 };

	if (vmh_sys(SYS_ppoll, &p, 1, &zero, NULL, sizeof(uint64_t)) > 0 && !(p.revents & POLLNVAL))
		f->out->events |= (uint32_t)(unsigned short)p.revents;
}

/* What the kernel does itself when the event came from there. ONESHOT instead of no events at all:
 * MOD always adds ERR and HUP, which would keep the set readable; so they fire once and are dropped. */
static void disarm_kernel(struct vmh_ep *e, int epfd, const struct fired *f, unsigned n)
{
	for (unsigned i = 0; i < n; i++)
		if (f[i].other)
			other_bits(&f[i]);
	vmh_lock(&e->obj.lock);
	for (; n; f++, n--) {
		struct epoll_event ev = { .events = EPOLLONESHOT };

		/* the user's MOD may have armed it again, or DEL and another ADD reused the item */
		if (f->it->set != e || f->it->fd != f->fd || !VMH_GET(f->it->disarmed))
			continue;
		ev.data.u64 = f->it->silent ? vmh_ep_silent_data() : f->it->data;
		vmh_ep_kernel_ctl(epfd, EPOLL_CTL_MOD, f->fd, &ev);
	}
	vmh_unlock(&e->obj.lock);
}

/* Level items go to the tail, so that all get their turn whatever max is. */
int vmh_ep_harvest(struct vmh_ep *e, int epfd, struct epoll_event *out, int max, uint64_t call)
{
	struct fired fired[FIRED_MAX];
	unsigned nf = 0, left;
	int n = 0;

	vmh_lock(&e->rdy_lock);
	for (left = atomic_load_explicit(&e->rdy_n, memory_order_relaxed); left && n < max && nf < FIRED_MAX; left--) {
		struct vmh_epitem *it = e->rdy.rdy_next;

		if (it->call == call) /* all that follows was reported by this call */
			break;
		vmh_ep_rdy_remove(e, it);
		out[n].events = bits_of(it);
		it->sent = 0;
		if (!out[n].events)
			continue;
		out[n].data.u64 = it->data;
		it->call = call;
		if (it->events & EPOLLONESHOT) {
			VMH_SET(it->disarmed, 1);
			/* the flags are above the bits that poll knows */
			fired[nf++] = (struct fired){ it, &out[n], it->fd, VMH_GET(it->member->fd),
						      is_tcp(it) ? 0 : it->events & 0xffff & ~(uint32_t)VMH_IN };
		} else if (!(it->events & EPOLLET)) {
			rdy_append(e, it);
		}
		n++;
	}
	vmh_unlock(&e->rdy_lock);
	if (vmh_unlikely(nf))
		disarm_kernel(e, epfd, fired, nf);
	return n;
}

#define JOIN_MAX 4096 /* comparisons: a large set gets the bits by its next calls */

void vmh_ep_join(struct vmh_ep *e, struct epoll_event *evs, int n, uint64_t call)
{
	struct vmh_epitem *next;

	vmh_lock(&e->rdy_lock);
	if ((uint64_t)atomic_load_explicit(&e->rdy_n, memory_order_relaxed) * (unsigned)n > JOIN_MAX) {
		vmh_unlock(&e->rdy_lock);
		return;
	}
	for (struct vmh_epitem *it = e->rdy.rdy_next; it != &e->rdy; it = next) {
		next = it->rdy_next;
		if (it->call == call || !bits_of(it))
			continue;
		for (int i = 0; i < n; i++) {
			if (evs[i].data.u64 != it->data || (vmh_ep_foreign(e, it->data) && vmh_epitem_parked(it)))
				continue;
			evs[i].events |= bits_of(it);
			it->call = call;
			it->sent = 0;
			if (it->events & EPOLLET)
				vmh_ep_rdy_remove(e, it);
			break;
		}
	}
	vmh_unlock(&e->rdy_lock);
}

bool vmh_epoll_ready(struct vmh_obj *ep)
{
	struct vmh_ep *e = vmh_ep_of(ep);
	bool ready = false;

	if (!atomic_load_explicit(&e->rdy_n, memory_order_acquire))
		return false;
	vmh_lock(&e->rdy_lock);
	for (struct vmh_epitem *it = e->rdy.rdy_next; it != &e->rdy && !ready; it = it->rdy_next)
		ready = bits_of(it) != 0;
	vmh_unlock(&e->rdy_lock);
	return ready;
}

bool vmh_epoll_on_ring(struct vmh_obj *ep)
{
	struct vmh_ep *e = vmh_ep_of(ep);
	struct vmh_epitem *it;
	bool found;

	if (!atomic_load_explicit(&e->maybe_ring, memory_order_relaxed))
		return false;
	/* items are type-stable: a stale hint says at worst "spin" once too often */
	it = __atomic_load_n(&e->hint, __ATOMIC_RELAXED);
	if (it && __atomic_load_n(&it->set, __ATOMIC_ACQUIRE) == e && vmh_epitem_on_ring(it))
		return true;
	vmh_lock(&e->obj.lock);
	/* cleared before the search: whoever comes on a ring meanwhile sets it again */
	atomic_store(&e->maybe_ring, 0);
	for (it = e->items; it && !vmh_epitem_on_ring(it); it = it->set_next)
		;
	found = it != NULL;
	if (found) {
		atomic_store(&e->maybe_ring, 1);
		__atomic_store_n(&e->hint, it, __ATOMIC_RELAXED);
	}
	vmh_unlock(&e->obj.lock);
	return found;
}
