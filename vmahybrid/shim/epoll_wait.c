/* epoll_wait over rings and the kernel set: one entry per socket, nobody starves. */
#include "vmh_iomux_int.h"
#include "vmh_real.h"
#include "vmh_sock.h"
#include "vmh_tcps.h"
#include <limits.h>
#include <sched.h>

struct ep_waiter {
	struct vmh_waiter w; /* first */
	struct vmh_ep *e;
	int epfd;
	struct epoll_event *evs;
	int max;
	struct pollfd pfd;
};

/* ---- the kernel's side ---- */

/* ONESHOT: the event of a member whose other side reported already is not passed on; it comes back
 * with the user's MOD, as the kernel looks again then. Data shared by several members, or with a
 * kernel-only one, does not say whose event this is: then it passes, at worst once too often. */
static bool oneshot_pass(struct vmh_ep *e, uint64_t data)
{
	struct vmh_epitem *found = NULL;
	bool pass = true;

	if (vmh_ep_foreign(e, data))
		return true;
	vmh_lock(&e->obj.lock);
	for (struct vmh_epitem *it = e->items; it; it = it->set_next) {
		if (it->data != data)
			continue;
		if (found || !(it->events & EPOLLONESHOT)) {
			found = NULL;
			break;
		}
		found = it;
	}
	if (found) {
		vmh_lock(&e->rdy_lock);
		pass = !found->disarmed;
		VMH_SET(found->disarmed, 1);
		vmh_unlock(&e->rdy_lock);
	}
	vmh_unlock(&e->obj.lock);
	return pass;
}

/* The kernel's ERR or HUP of a parked TCP socket, whose readiness is the stack's to tell. Alone, without any event that
 * the program waits for, they may be of one that was parked when the kernel said so: it is closed by now, by another
 * thread, or at home. */
static bool parked(struct vmh_ep *e, const struct epoll_event *ev)
{
	bool found = false, hushed = true, hung_up = false;

	if (vmh_ep_foreign(e, ev->data.u64))
		return false;
	vmh_lock(&e->obj.lock);
	for (struct vmh_epitem *it = e->items; it && !hung_up; it = it->set_next) {
		if (it->data != ev->data.u64)
			continue;
		found = true;
		if (vmh_epitem_hushed(it))
			continue;
		hushed = false;
		hung_up = !vmh_epitem_tcp(it) || vmh_has_hung_up(it->member->fd);
	}
	vmh_unlock(&e->obj.lock);
	if (found && hushed)
		return true;
	return !(ev->events & ~(uint32_t)(EPOLLERR | EPOLLHUP)) && !hung_up;
}

/* Data of the members that move now. At most max of them; the others' events pass. */
VMH_COLD static int moving(struct vmh_ep *e, uint64_t *data, int max)
{
	int n = 0;

	vmh_lock(&e->obj.lock);
	for (struct vmh_epitem *it = e->items; it && n < max; it = it->set_next) {
		const struct vmh_tcps *s = vmh_epitem_tcp(it);

		/* ONESHOT: what is dropped is not armed any more */
		if (s && vmh_tcps_state(s) == VMH_TCPS_ADOPTING && !(it->events & EPOLLONESHOT))
			data[n++] = it->data;
	}
	vmh_unlock(&e->obj.lock);
	return n;
}

/* Is the event of one that moves with others? Who is told of it would stand still in his next call: he is when that is
 * over. What several members have as data, or one of the kernel's alone, does not say whose event it is. */
VMH_COLD static bool moves(struct vmh_ep *e, const uint64_t *data, int n, uint64_t of)
{
	struct vmh_epitem *found = NULL;
	bool is = false;

	for (int i = 0; i < n && !is; i++)
		is = data[i] == of;
	if (!is || vmh_ep_foreign(e, of))
		return false;
	vmh_lock(&e->obj.lock);
	for (struct vmh_epitem *it = e->items; it && is; it = it->set_next) {
		if (it->data != of)
			continue;
		is = !found;
		found = it;
	}
	is = is && found && vmh_epitem_hushed(found);
	vmh_unlock(&e->obj.lock);
	return is;
}

static bool lot_moves(const struct vmh_ep *e)
{
	return vmh_unlikely(atomic_load_explicit(&vmh_tcps_lots, memory_order_relaxed)) &&
	       atomic_load_explicit(&e->tcp, memory_order_relaxed);
}

static int settle(struct vmh_ep *e, int epfd, struct epoll_event *evs, int n)
{
	uint64_t data[VMH_TAKES_MAX];
	int k = 0, nmoving = lot_moves(e) ? moving(e, data, VMH_TAKES_MAX) : 0;

	for (int i = 0; i < n; i++) {
		if (vmh_ep_is_kick(evs[i].data.u64)) {
			vmh_ep_kick_seen(e, epfd);
			continue;
		}
		if (vmh_ep_is_silent(evs[i].data.u64))
			continue;
		if (vmh_unlikely(evs[i].events & (EPOLLERR | EPOLLHUP)) &&
		    atomic_load_explicit(&e->tcp, memory_order_relaxed) && parked(e, evs + i))
			continue;
		if (vmh_unlikely(nmoving) && moves(e, data, nmoving, evs[i].data.u64))
			continue;
		if (vmh_unlikely(VMH_GET(e->noneshot)) && !oneshot_pass(e, evs[i].data.u64))
			continue;
		evs[k++] = evs[i];
	}
	return k;
}

static int kernel_now(struct ep_waiter *x, struct epoll_event *evs, int max)
{
	int n = 0, k = 0;

	/* again when all were dropped: with a small max the others wait behind them */
	for (int tries = 0; tries < 3 && k == 0; tries++) {
		n = (int)vmh_sys(SYS_epoll_pwait, x->epfd, evs, max, 0, x->w.os_mask, sizeof(uint64_t));
		if (n <= 0)
			return n;
		vmh_os_reported(n);
		k = settle(x->e, x->epfd, evs, n);
	}
	return k;
}

/* Those that may have something to receive. */
static int rx_of(const struct epoll_event *evs, int n)
{
	int found = 0;

	for (int i = 0; i < n; i++)
		found += (evs[i].events & ~VMH_NOT_RX) != 0;
	return found;
}

/* ---- both sides ---- */

/* Is an event of the kernel with that data another member's than the ring's with the same? It says nothing of those that are
 * parked; of a datagram socket it tells as a ring does. */
static bool is_of_another(struct vmh_ep *e, uint64_t data)
{
	unsigned parked_ones = 0, others = vmh_ep_foreign(e, data);
	bool both_tell = false;

	vmh_lock(&e->obj.lock);
	for (struct vmh_epitem *it = e->items; it && !both_tell; it = it->set_next) {
		if (it->data != data)
			continue;
		both_tell = !vmh_epitem_tcp(it);
		parked_ones += vmh_epitem_parked(it);
		others += !vmh_epitem_parked(it);
	}
	vmh_unlock(&e->obj.lock);
	return parked_ones && others && !both_tell;
}

/* Moves the bits of events in b[] whose data is in a[] over to a[]; the rest of b[] closes up. */
static int merge(struct vmh_ep *e, struct epoll_event *a, int na, struct epoll_event *b, int nb)
{
	int k = 0;

	for (int i = 0; i < nb; i++) {
		int j = 0;

		while (j < na && a[j].data.u64 != b[i].data.u64)
			j++;
		if (j < na && !(atomic_load_explicit(&e->tcp, memory_order_relaxed) && is_of_another(e, b[i].data.u64)))
			a[j].events |= b[i].events;
		else
			b[k++] = b[i];
	}
	return k;
}

static int collect_both(struct ep_waiter *x, uint64_t call)
{
	struct epoll_event *evs = x->evs;
	int share = x->max - x->max / 2, n, k = 0, m;

	if (x->max == 1) {
		uint8_t flip = VMH_GET(x->e->flip);

		VMH_SET(x->e->flip, !flip);
		share = flip;
	}
	n = share ? vmh_ep_harvest(x->e, x->epfd, evs, share, call) : 0;
	if (n < x->max)
		k = kernel_now(x, evs + n, x->max - n);
	if (k < 0 && n == 0)
		return k;
	if (k < 0)
		k = 0;
	x->w.ring_n = n;
	x->w.ring_rx = rx_of(evs, n);
	x->w.os_rx = rx_of(evs + n, k);
	k = merge(x->e, evs, n, evs + n, k);
	if (n + k == x->max) {
		/* no room for more entries, but the kernel's may be ready by a ring as well */
		vmh_ep_join(x->e, evs + n, k, call);
		return n + k;
	}
	/* room is left: the rest of the rings */
	m = vmh_ep_harvest(x->e, x->epfd, evs + n + k, x->max - n - k, call);
	x->w.ring_n += m;
	x->w.ring_rx += rx_of(evs + n + k, m);
	return n + k + merge(x->e, evs + n, k, evs + n + k, m);
}

static int collect(struct vmh_waiter *w, bool os)
{
	struct ep_waiter *x = (struct ep_waiter *)w;
	bool ready = atomic_load_explicit(&x->e->rdy_n, memory_order_acquire) != 0;
	uint64_t call;
	int n;

	w->ring_n = w->ring_rx = w->os_rx = 0;
	if (!ready && !os)
		return 0;
	call = atomic_fetch_add(&x->e->calls, 1) + 1;
	if (ready && !os)
		os = vmh_os_skip_due(w) || atomic_exchange_explicit(&x->e->out_armed, 0, memory_order_relaxed);
	if (ready && os)
		return collect_both(x, call);
	if (ready) {
		n = w->ring_n = vmh_ep_harvest(x->e, x->epfd, x->evs, x->max, call);
		w->ring_rx = rx_of(x->evs, n);
		return n;
	}
	n = kernel_now(x, x->evs, x->max);
	w->os_rx = rx_of(x->evs, n);
	return n;
}

static bool on_ring(struct vmh_waiter *w)
{
	return vmh_epoll_on_ring(&((struct ep_waiter *)w)->e->obj);
}

/* ---- no member on a ring: the kernel alone ---- */

static int libc_wait(int epfd, struct epoll_event *evs, int max, int64_t timeout_ns, const sigset_t *mask)
{
	struct vmh_real *real = vmh_real();
	int64_t ms = timeout_ns < 0 ? -1 : timeout_ns / 1000000;
	int saved = errno, n;

	if (timeout_ns > 0 && (timeout_ns % 1000000 || ms > INT_MAX)) {
		struct timespec ts = { .tv_sec = timeout_ns / 1000000000, .tv_nsec = timeout_ns % 1000000000 };

		n = -1;
		errno = ENOSYS;
		if (real->epoll_pwait2)
			n = real->epoll_pwait2(epfd, evs, max, &ts, mask);
		if (n >= 0 || errno != ENOSYS)
			goto out;
		ms = ms >= INT_MAX ? INT_MAX : ms + 1; /* a kernel before 5.11: rather late than early */
	}
	n = mask ? real->epoll_pwait(epfd, evs, max, (int)ms, mask) : real->epoll_wait(epfd, evs, max, (int)ms);
out:
	if (n < 0) {
		n = -errno;
		errno = saved;
	}
	return vmh_os_reported(n);
}

#define LOOK_AT_RINGS INT_MIN

static int wait_kernel(struct vmh_ep *e, int epfd, struct epoll_event *evs, int max, int64_t timeout_ns,
		       const sigset_t *mask)
{
	int n;

	if (timeout_ns == 0) {
		int k = 0;

		/* as in kernel_now() */
		for (int tries = 0; tries < 3 && k == 0; tries++) {
			n = libc_wait(epfd, evs, max, 0, mask);
			if (n <= 0)
				return n;
			k = settle(e, epfd, evs, n);
		}
		return k;
	}
	vmh_ep_kernel_enter(e, epfd);
	if (atomic_load(&e->maybe_ring)) {
		n = LOOK_AT_RINGS;
	} else {
		n = libc_wait(epfd, evs, max, timeout_ns, mask);
		if (n > 0) {
			n = settle(e, epfd, evs, n);
			if (n == 0) /* a kick, or an event that was dropped */
				n = LOOK_AT_RINGS;
		}
	}
	vmh_ep_kernel_leave(e, epfd);
	return n;
}

/* When a wait began that the kernel alone serves. Needed only if it is kicked, which is rare, so it must
 * cost nothing; then the wait may end late by a tick, and never early. */
#define COARSE_NS 10000000u

static uint64_t coarse_now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

int vmh_epoll_wait(struct vmh_obj *ep, int epfd, struct epoll_event *evs, int max, int64_t timeout_ns,
		   const sigset_t *mask)
{
	struct vmh_ep *e = vmh_ep_of(ep);
	bool faults = vmh_bad_ptr(evs);
	bool forced = vmh_os_forced() && timeout_ns && VMH_GET(e->nitems);
	struct epoll_event nowhere;
	uint64_t start = 0;
	int64_t left = timeout_ns;
	int n;

	if (max <= 0 || max > INT_MAX / (int)sizeof(*evs))
		return libc_wait(epfd, evs, max, timeout_ns, mask); /* its error */
	if (faults) { /* EFAULT, as from the kernel, when there is something to write */
		evs = &nowhere;
		max = 1;
	}
	while (!forced && !vmh_epoll_on_ring(ep)) {
		if (timeout_ns > 0 && !start)
			start = coarse_now_ns() + COARSE_NS;
		n = wait_kernel(e, epfd, evs, max, left, mask);
		if (n != LOOK_AT_RINGS) {
			n = faults && n > 0 ? -EFAULT : n;
			vmh_iomux_count_os(e->stats, n, rx_of(evs, n));
			return n;
		}
		if (atomic_load(&e->obj.closed))
			return -EBADF;
		if (atomic_load(&e->kick_on) || lot_moves(e))
			sched_yield(); /* the kick stands until all have seen it, and events of some that move until they have */
		if (timeout_ns > 0) {
			int64_t gone = (int64_t)(vmh_now_ns() - start);

			left = gone <= 0 ? timeout_ns : gone < timeout_ns ? timeout_ns - gone : 0;
		}
	}
	struct ep_waiter x = {
		.w = { .collect = collect, .on_ring = on_ring, .nfds = 1, .closed_with = ep, .only = ep,
		       .sig0 = vmh_signals_any, .look = &e->look, .stats = e->stats, .faults = faults, .forced = forced },
		.e = e, .epfd = epfd, .evs = evs, .max = max, .pfd = { .fd = epfd, .events = POLLIN },
	};
	x.w.fds = &x.pfd;
	if (!atomic_load_explicit(&e->tcp, memory_order_relaxed))
		return vmh_waiter_run(&x.w, left, mask);
	vmh_batch_begin(0);
	n = vmh_waiter_run(&x.w, left, mask);
	vmh_batch_begin(x.w.ring_n);
	return n;
}
