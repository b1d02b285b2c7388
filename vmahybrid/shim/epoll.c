/* epoll_ctl and the life of a set. The kernel set under the same fd has every member with the user's
 * own events and data; it is always changed first, and its answer is the answer. */
#include "vmh_iomux_int.h"
#include "vmh_params.h"
#include "vmh_sock.h"
#include "vmh_tcps.h"

#define ANY_FD (-1)

long vmh_ep_kernel_ctl(int epfd, int op, int fd, struct epoll_event *ev)
{
	return vmh_sys(SYS_epoll_ctl, epfd, op, fd, ev);
}

void vmh_epoll_created(int epfd)
{
	struct vmh_ep *e = vmh_ep_alloc();

	if (!e)
		return; /* a kernel fd like any other */
	e->obj.fd = epfd;
	e->obj.items = NULL;
	atomic_store(&e->obj.closed, 0);
	atomic_store(&e->obj.class_, VMH_CLASS_EPOLL);
	e->stats = vmh_stats_epoll_new(epfd);
	if (vmh_fd_install(epfd, &e->obj) < 0)
		vmh_epoll_recycle(&e->obj);
}

void vmh_epoll_closed(struct vmh_obj *ep)
{
	struct vmh_ep *e = vmh_ep_of(ep);

	vmh_lock(&ep->lock);
	atomic_store(&ep->closed, 1);
	while (e->items)
		vmh_epitem_unlink(e->items);
	vmh_unlock(&ep->lock);
	vmh_wake_all(); /* waits in progress return EBADF */
}

/* Its calls name it by more than one number from now on. */
void vmh_epoll_duped(struct vmh_obj *ep)
{
	vmh_lock(&ep->lock);
	vmh_ep_shut_all(vmh_ep_of(ep));
	vmh_unlock(&ep->lock);
}

void vmh_epoll_recycle(struct vmh_obj *ep)
{
	struct vmh_ep *e = vmh_ep_of(ep);

	vmh_stats_epoll_free(e->stats);
	e->stats = NULL;
	atomic_store(&ep->class_, VMH_CLASS_FREE);
	vmh_ep_free(e);
}

/* ---- data values that kernel-only members use ---- */

static unsigned foreign_bit(uint64_t data)
{
	return (unsigned)((data * 0x9e3779b97f4a7c15u) >> 52) % (VMH_EP_FOREIGN * 64);
}

bool vmh_ep_foreign(const struct vmh_ep *e, uint64_t data)
{
	unsigned b = foreign_bit(data);

	return VMH_GET(e->foreign[b / 64]) >> (b % 64) & 1;
}

void vmh_epoll_others(struct vmh_obj *ep, uint64_t data)
{
	struct vmh_ep *e = vmh_ep_of(ep);
	unsigned b = foreign_bit(data);

	if (!vmh_ep_foreign(e, data))
		__atomic_fetch_or(&e->foreign[b / 64], (uint64_t)1 << (b % 64), __ATOMIC_RELAXED);
}

int vmh_epoll_ctl_kernels(struct vmh_obj *ep, int epfd, int op, int fd, struct epoll_event *ev)
{
	long r = vmh_ep_kernel_ctl(epfd, op, fd, ev);

	if (r == 0 && op != EPOLL_CTL_DEL)
		vmh_epoll_others(ep, ev->data.u64);
	return (int)r;
}

/* ---- members that rings can make ready ---- */

static struct vmh_epitem *item_new(struct vmh_ep *e, struct vmh_obj *m, int fd)
{
	struct vmh_epitem *it = vmh_epitem_alloc();

	if (!it)
		return NULL;
	__atomic_store_n(&it->member, m, __ATOMIC_RELAXED); /* a stale hint may look at it */
	it->fd = fd;
	it->events = 0;
	it->data = 0;
	it->call = 0;
	it->disarmed = it->sent = it->silent = 0;
	__atomic_store_n(&it->set, e, __ATOMIC_RELEASE);
	return it;
}

/* Set lock held; the kernel has accepted. Arms it as ADD and MOD do: what is ready now is reported. */
static bool arm(struct vmh_ep *e, struct vmh_epitem *it, const struct epoll_event *ev)
{
	vmh_lock(&e->rdy_lock);
	if (it->events & EPOLLONESHOT)
		e->noneshot--;
	if (ev->events & EPOLLONESHOT)
		e->noneshot++;
	it->events = ev->events;
	it->data = ev->data.u64;
	VMH_SET(it->disarmed, 0);
	it->sent = 0;
	vmh_unlock(&e->rdy_lock);
	if (vmh_ep_out_edges(it) && atomic_load(&it->member->class_) == VMH_CLASS_UDP) {
		atomic_store(&e->out_armed, 1);
		atomic_store(&vmh_sock_of(it->member)->out_edges, 1); /* after events: see vmh_epoll_sent */
	}
	return vmh_ep_push_if_ready(it);
}

struct ctl_after { /* what must be done without the set lock */
	bool wake, kick;
};

/* ONESHOT instead of no events: see disarm_kernel in epoll_set.c. MOD refuses an EXCLUSIVE item. */
void vmh_epitem_tell(struct vmh_epitem *it, int epfd, bool silent)
{
	struct epoll_event ev = { .events = silent || VMH_GET(it->disarmed) ? EPOLLONESHOT : it->events,
				  .data.u64 = silent ? vmh_ep_silent_data() : it->data };

	if (!(it->events & EPOLLEXCLUSIVE))
		vmh_ep_kernel_ctl(epfd, EPOLL_CTL_MOD, it->fd, &ev);
	else if (!vmh_ep_kernel_ctl(epfd, EPOLL_CTL_DEL, it->fd, NULL))
		vmh_ep_kernel_ctl(epfd, EPOLL_CTL_ADD, it->fd, &ev);
	it->silent = silent;
}

/* silent: as the kernel was told. */
static int set_member(struct vmh_ep *e, struct vmh_obj *m, int epfd, int fd, const struct epoll_event *ev, bool silent,
		      struct ctl_after *after)
{
	struct vmh_epitem *it = vmh_epitem_find(e, m, fd);

	if (!it) {
		it = item_new(e, m, fd);
		if (!it) {
			vmh_ep_kernel_ctl(epfd, EPOLL_CTL_DEL, fd, NULL);
			return -ENOMEM;
		}
		if (!vmh_epitem_link(it)) {
			__atomic_store_n(&it->set, NULL, __ATOMIC_RELAXED);
			vmh_epitem_free(it);
			return 0;
		}
	}
	after->wake = arm(e, it, ev);
	vmh_ep_open(it, epfd);
	it->silent = silent;
	if (vmh_epitem_parked(it) != silent) /* it has moved since */
		vmh_epitem_tell(it, epfd, !silent);
	if (vmh_epitem_on_ring(it)) {
		__atomic_store_n(&e->hint, it, __ATOMIC_RELAXED);
		atomic_store(&e->maybe_ring, 1);
		after->kick = true;
	}
	return 0;
}

static bool is_parked(struct vmh_obj *m)
{
	return atomic_load(&m->class_) == VMH_CLASS_TCP && vmh_tcps_parked(vmh_tcps_of(m));
}

#define EXCLUSIVE_KNOWS ((uint32_t)(EPOLLIN | EPOLLOUT | EPOLLERR | EPOLLHUP | EPOLLWAKEUP | EPOLLET | EPOLLEXCLUSIVE))

/* What the kernel would refuse if it saw the events. Set lock held. */
static bool bad_exclusive(struct vmh_ep *e, struct vmh_obj *m, int op, int fd, const struct epoll_event *ev)
{
	const struct vmh_epitem *it;

	if (ev->events & EPOLLEXCLUSIVE)
		return op == EPOLL_CTL_MOD || ev->events & ~EXCLUSIVE_KNOWS;
	it = op == EPOLL_CTL_MOD ? vmh_epitem_find(e, m, fd) : NULL;
	return it && it->events & EPOLLEXCLUSIVE;
}

static int ctl_ring_member(struct vmh_ep *e, struct vmh_obj *m, int epfd, int op, int fd, struct epoll_event *ev,
		   struct ctl_after *after)
{
	struct vmh_epitem *it;
	bool silent;
	int r;

	vmh_lock(&e->obj.lock);
	if (atomic_load(&m->class_) == VMH_CLASS_TCP)
		atomic_store(&e->tcp, 1);
	silent = op != EPOLL_CTL_DEL && is_parked(m);
	if (silent && bad_exclusive(e, m, op, fd, ev)) {
		r = -EINVAL;
	} else if (silent) {
		struct epoll_event none = { .events = EPOLLONESHOT, .data.u64 = vmh_ep_silent_data() };

		r = (int)vmh_ep_kernel_ctl(epfd, op, fd, &none);
	} else {
		r = (int)vmh_ep_kernel_ctl(epfd, op, fd, ev);
	}
	if (atomic_load(&e->obj.closed)) {
		;
	} else if (r == 0 && op != EPOLL_CTL_DEL) {
		r = set_member(e, m, epfd, fd, ev, silent, after);
	} else if (r == 0 || r == -ENOENT) {
		it = vmh_epitem_find(e, m, fd);
		if (it)
			vmh_epitem_unlink(it);
	}
	vmh_unlock(&e->obj.lock);
	return r;
}

static bool is_home(struct vmh_obj *m)
{
	if (atomic_load(&m->class_) == VMH_CLASS_TCP)
		return vmh_tcps_state(vmh_tcps_of(m)) == VMH_TCPS_HOME;
	return VMH_GET(vmh_sock_of(m)->home);
}

static void home_nested(struct vmh_obj *m, unsigned reason)
{
	if (atomic_load(&m->class_) == VMH_CLASS_TCP)
		vmh_tcps_home(vmh_tcps_of(m), reason, false);
	else if (!VMH_GET(vmh_sock_of(m)->home))
		vmh_sock_home(vmh_sock_of(m), reason, 0);
}

/* Inside another set, or by another process' descriptor, only the kernel can say that this set is ready: its members go
 * home. */
void vmh_epoll_nested(struct vmh_obj *ep, unsigned reason)
{
	struct vmh_ep *inner = vmh_ep_of(ep);

	atomic_store(&inner->nested, (uint8_t)reason);
	/* members added from now on go home in vmh_epoll_ctl: the count can only shrink */
	for (unsigned tries = VMH_GET(inner->nitems); tries; tries--) {
		struct vmh_epitem *it;
		struct vmh_obj *m = NULL;

		vmh_lock(&inner->obj.lock);
		vmh_ep_shut_all(inner);
		for (it = inner->items; it && is_home(it->member); it = it->set_next)
			;
		if (it) {
			m = it->member;
			vmh_obj_hold(m);
		}
		vmh_unlock(&inner->obj.lock);
		if (!m)
			return;
		home_nested(m, reason);
		vmh_obj_put(m);
	}
}

static void home_if_nested(struct vmh_ep *e, struct vmh_obj *m, int op)
{
	unsigned reason = atomic_load(&e->nested);

	if (vmh_unlikely(reason && op != EPOLL_CTL_DEL))
		home_nested(m, reason);
}

int vmh_epoll_ctl(struct vmh_obj *ep, int epfd, int op, int fd, struct epoll_event *ev)
{
	struct vmh_ep *e = vmh_ep_of(ep);
	struct vmh_obj *m = vmh_fd_get(fd);
	struct ctl_after after = { 0 };
	int r;

	if (!m)
		return vmh_epoll_ctl_kernels(ep, epfd, op, fd, ev);
	if (atomic_load(&m->class_) == VMH_CLASS_TCP && op != EPOLL_CTL_DEL)
		vmh_tcps_waited_for(m, fd);
	if (atomic_load(&m->class_) != VMH_CLASS_EPOLL) {
		home_if_nested(e, m, op); /* first: another process may be told of it as it is in the kernel */
		r = ctl_ring_member(e, m, epfd, op, fd, ev, &after);
		home_if_nested(e, m, op); /* since then */
	} else {
		r = vmh_epoll_ctl_kernels(ep, epfd, op, fd, ev);
		if (r == 0 && op == EPOLL_CTL_ADD && atomic_load(&m->class_) == VMH_CLASS_EPOLL)
			vmh_epoll_nested(m, VMH_R_NESTED);
	}
	vmh_obj_put(m);
	if (after.kick)
		vmh_ep_kick(e);
	if (after.wake)
		vmh_wake_all();
	return r;
}

/* ---- upcalls from the socket class ---- */

static bool any_set(const struct vmh_ep *e)
{
	(void)e;
	return true;
}

void vmh_epoll_member_closed(struct vmh_obj *member, bool held)
{
	struct vmh_ep *e;

	atomic_store(&member->closed, 1);
	while ((e = vmh_ep_of_member(member, any_set))) {
		struct vmh_epitem *it;

		vmh_lock(&e->obj.lock);
		while ((it = vmh_epitem_find(e, member, ANY_FD))) {
			if (held)
				vmh_ep_kernel_ctl(e->obj.fd, EPOLL_CTL_DEL, it->fd, NULL);
			vmh_epitem_unlink(it);
		}
		vmh_unlock(&e->obj.lock);
		vmh_obj_put(&e->obj);
	}
}

static bool blind(const struct vmh_ep *e)
{
	return atomic_load(&e->kwait) > 0 && !atomic_load(&e->kick_on);
}

void vmh_epoll_member_on_ring(struct vmh_obj *member)
{
	struct vmh_ep *e;

	vmh_ep_mark_ring(member);
	/* bounded: a kick that the kernel refuses would be tried for ever */
	for (int i = 0; i < 1000 && (e = vmh_ep_of_member(member, blind)); i++) {
		vmh_ep_kick(e);
		vmh_obj_put(&e->obj);
	}
	/* Threads that sleep on rings sleep on those that existed when they went to sleep. */
	vmh_wake_all();
}
