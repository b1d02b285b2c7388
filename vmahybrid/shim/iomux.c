/* poll. */
#include "vmh_iomux_int.h"
#include "vmh_sock.h"
#include "vmh_tcps.h"
#include <fcntl.h>

/* A member of the caller's array that rings can make ready; a reference is held during the call. */
struct entry {
	struct vmh_obj *o;
	unsigned i;
	int fd;           /* of a TCP socket, whose kernel socket is not asked while it is parked */
	/* us of the clock, odd, when it was first seen that it is closed, and that its number is nothing: 0: it is not; SETTLED:
	 * that is something else */
	uint32_t gone, none;
};

#define SETTLED 2
#define SETTLES_US 200000u /* another thread is between our part of close() and the kernel's for less */
#define ENDS_US 10000000u  /* or in ours */
#define NONE_US 1000u      /* from a close() to a socket() that gets the same number */

struct poll_waiter {
	struct vmh_waiter w; /* first */
	struct entry *ent;
	unsigned nent, tcp; /* tcp: those of them that are TCP sockets */
	struct entry *few;  /* ent, when they fit on the stack */
};

static __thread struct vmh_oslook poll_look __attribute__((tls_model("initial-exec")));

static bool obj_wanted(const struct vmh_obj *o)
{
	switch (atomic_load_explicit(&o->class_, memory_order_relaxed)) {
	case VMH_CLASS_UDP:
		return !VMH_GET(((const struct vmh_sock *)o)->home) || vmh_sock_on_ring((const struct vmh_sock *)o) ||
		       vmh_os_forced();
	case VMH_CLASS_EPOLL:
		return VMH_GET(((const struct vmh_ep *)o)->nitems) != 0;
	case VMH_CLASS_TCP:
		return vmh_tcps_state((const struct vmh_tcps *)o) != VMH_TCPS_HOME || vmh_os_forced();
	}
	return false;
}

/* Is the long way worth it? Without a reference: objects are type-stable, a stale answer is at worst the slow way. */
bool vmh_fd_wanted(int fd)
{
	struct vmh_obj *o;

	if ((unsigned)fd >= vmh_fdtab_size)
		return false;
	o = atomic_load_explicit(&vmh_fdtab[fd], memory_order_acquire);
	return vmh_unlikely(o != NULL) && vmh_fd_is_mine(fd, o) && obj_wanted(o);
}

bool vmh_poll_wanted(const struct pollfd *fds, nfds_t n)
{
	if (n > vmh_fdtab_size) /* EINVAL over RLIMIT_NOFILE: the kernel never reads the array */
		return false;
	for (nfds_t i = 0; i < n; i++)
		if (vmh_fd_wanted(fds[i].fd))
			return true;
	return false;
}

/* By another thread, while this one waits. With the kernel that ends no wait, but what happens to the socket after that does,
 * which nobody would see here: so it does, unless the number is something else by now, which is told at the end. */
static bool is_gone(const struct entry *t)
{
	if (vmh_unlikely(vmh_fds_apart)) /* nobody else has its numbers, and the kernel has what others have closed in theirs */
		return false;
	return vmh_unlikely(atomic_load_explicit(&vmh_fdtab[t->fd], memory_order_relaxed) != t->o);
}

/* What rings alone say of it. The kernel is not asked each time: what it would say of a UDP socket that can receive is
 * that it can send, too. */
static int entry_bits(const struct entry *t, short events)
{
	if (is_gone(t))
		return 0;
	switch (atomic_load_explicit(&t->o->class_, memory_order_relaxed)) {
	case VMH_CLASS_UDP:
		return (events & VMH_IN) && vmh_sock_ready(vmh_sock_of(t->o)) ? events & (int)(VMH_IN | VMH_OUT) : 0;
	case VMH_CLASS_EPOLL:
		return (events & VMH_IN) && vmh_epoll_ready(t->o) ? events & (int)VMH_IN : 0;
	case VMH_CLASS_TCP:
		return (int)vmh_tcps_bits(vmh_tcps_of(t->o)) & (events | POLLERR | POLLHUP);
	}
	return 0;
}

static bool is_tcp(const struct entry *t)
{
	return atomic_load_explicit(&t->o->class_, memory_order_relaxed) == VMH_CLASS_TCP;
}

/* poll(2) passes by a negative number. What another thread has put there meanwhile stays. */
static void hide(const struct poll_waiter *x, const struct entry *t, bool on)
{
	struct pollfd *p = &x->w.fds[t->i];

	if (p->fd == (on ? t->fd : ~t->fd))
		p->fd = ~p->fd;
}

/* Whether any is gone. */
static bool hide_parked(struct poll_waiter *x)
{
	unsigned gone = 0;

	for (unsigned k = 0; k < x->nent; k++) {
		const struct entry *t = &x->ent[k];
		bool hidden = is_gone(t);

		gone += hidden;
		hide(x, t, hidden || (is_tcp(t) && vmh_tcps_parked(vmh_tcps_of(t->o))));
	}
	x->w.forced &= gone < x->nent;
	return gone;
}

bool vmh_has_hung_up(int fd)
{
	const struct timespec now = { 0 };
	struct pollfd p = { .fd = fd };

	return vmh_sys(SYS_ppoll, &p, 1, &now, NULL, 0) != 0;
}

/* What the kernel says of one that is being parked, or was while we slept, which may be at home by now. Entries that are
 * left empty. */
static int hush_moved(struct poll_waiter *x)
{
	int n = 0;

	for (unsigned k = 0; x->tcp && k < x->nent; k++) {
		struct pollfd *p = &x->w.fds[x->ent[k].i];

		if (!(p->revents & (POLLERR | POLLHUP)) || !is_tcp(&x->ent[k]))
			continue;
		if (!vmh_tcps_hushed(vmh_tcps_of(x->ent[k].o)) &&
		    ((p->revents & ~(POLLERR | POLLHUP)) || vmh_has_hung_up(x->ent[k].fd)))
			continue;
		p->revents = 0;
		n++;
	}
	return n;
}

static bool any_ready(const struct poll_waiter *x)
{
	for (unsigned k = 0; k < x->nent; k++)
		if (entry_bits(&x->ent[k], x->w.fds[x->ent[k].i].events))
			return true;
	return false;
}

static int add_ring_bits(struct poll_waiter *x)
{
	int more = 0;

	for (unsigned k = 0; k < x->nent; k++) {
		struct pollfd *p = &x->w.fds[x->ent[k].i];

		int bits = (p->revents & POLLNVAL) ? 0 : entry_bits(&x->ent[k], p->events);

		if (!bits)
			continue;
		more += p->revents == 0;
		p->revents = (short)(p->revents | bits);
		x->w.ring_n++;
		x->w.ring_rx += (bits & ~(int)VMH_NOT_RX) != 0;
	}
	return more;
}

static int count_ready(const struct vmh_waiter *w)
{
	int n = 0;

	for (unsigned i = 0; i < w->nfds; i++)
		n += w->fds[i].revents != 0;
	return n;
}

int vmh_poll_rx(const struct pollfd *fds, nfds_t nfds)
{
	int n = 0;

	for (nfds_t i = 0; i < nfds; i++)
		n += (fds[i].revents & ~(int)VMH_NOT_RX) != 0;
	return n;
}

static void drop(struct vmh_obj **o)
{
	if (*o)
		vmh_obj_put(*o);
}

/* Of a number that is nothing now; select(2) says all that it was asked. */
static short gone_bits(const struct vmh_waiter *w, const struct entry *t)
{
	return w->is_select ? w->fds[t->i].events : POLLNVAL;
}

/* What is to be said of the number now: it may be another socket of ours. */
static short look_at_gone(const struct poll_waiter *x, const struct entry *t)
{
	struct pollfd p = { .fd = t->fd, .events = x->w.fds[t->i].events };
	__attribute__((cleanup(drop))) struct vmh_obj *o = vmh_fd_get(t->fd);
	const struct entry now = { .o = o, .i = t->i, .fd = t->fd };
	const struct timespec zero = { 0 }, moment = { 0, 200000 };

	if (!o || !is_tcp(&now) || !vmh_tcps_parked(vmh_tcps_of(o)))
		vmh_sys(SYS_ppoll, &p, 1, &zero, NULL, 0);
	if (!o && p.revents & (POLLHUP | POLLERR)) { /* the internal thread may have had it for a moment, for a socket of its own */
		vmh_sys(SYS_nanosleep, &moment, NULL);
		vmh_sys(SYS_ppoll, &p, 1, &zero, NULL, 0);
	}
	if (o)
		p.revents = (short)(p.revents | entry_bits(&now, p.events));
	return p.revents & POLLNVAL ? gone_bits(&x->w, t) : p.revents;
}

static bool is_open(int fd)
{
	return vmh_sys(SYS_fcntl, fd, F_GETFD) >= 0;
}

/* The first that is gone, and whose number has been nothing for so long that it is not about to be used again. */
static const struct entry *first_gone(struct poll_waiter *x)
{
	for (unsigned k = 0; k < x->nent; k++) {
		struct entry *t = &x->ent[k];
		uint32_t now;
		bool open;

		if (vmh_likely(!is_gone(t)) || t->gone == SETTLED)
			continue;
		now = (uint32_t)(vmh_now_ns() / 1000) | 1;
		open = is_open(t->fd);
		if (!t->gone)
			t->gone = now;
		if (open || !t->none)
			t->none = open ? 0 : now;
		if (t->none && now - t->none >= NONE_US)
			return t;
		if (now - t->gone > (atomic_load(&t->o->closed) ? SETTLES_US : ENDS_US))
			t->gone = SETTLED;
		else
			x->w.hurries = true;
	}
	return NULL;
}

/* What the kernel has said of a number that is closed meanwhile, or of what that is now. Entries that are left empty. */
static int hush_gone(const struct poll_waiter *x)
{
	int n = 0;

	for (unsigned k = 0; k < x->nent; k++) {
		struct pollfd *p = &x->w.fds[x->ent[k].i];

		if (vmh_likely(!is_gone(&x->ent[k])) || !p->revents)
			continue;
		p->revents = 0;
		n++;
	}
	return n;
}

/* The end of the wait: as `n`, with what is to be said of those that are gone. What the caller's array has of a wait that
 * found nothing is not to be told. */
static int with_gone(const struct poll_waiter *x, int n)
{
	int all = n;

	if (n < 0) /* a handler may have closed it */
		return n;
	for (unsigned k = 0; k < x->nent; k++) {
		short *told = &x->w.fds[x->ent[k].i].revents;

		if (vmh_likely(!is_gone(&x->ent[k])))
			continue;
		for (unsigned i = 0; !all && i < x->w.nfds; i++)
			x->w.fds[i].revents = 0;
		all -= *told != 0;
		*told = look_at_gone(x, &x->ent[k]);
		if (n > 0 && !all && !*told) /* it was nothing when the wait ended */
			*told = gone_bits(&x->w, &x->ent[k]);
		all += *told != 0;
	}
	return all;
}

static int collect(struct vmh_waiter *w, bool os)
{
	struct poll_waiter *x = (struct poll_waiter *)w;
	struct timespec t = { 0 }; /* the kernel writes to it */
	const struct entry *gone = NULL;
	int n = 0;

	w->ring_n = w->ring_rx = w->os_rx = 0;
	w->hurries = false;
	if (vmh_unlikely(hide_parked(x)))
		gone = first_gone(x);
	if (!os) {
		if (!gone && !any_ready(x))
			return 0;
		os = vmh_os_skip_due(w) || gone;
	}
	if (os && w->fresh) {
		hush_moved(x);
		n = count_ready(w);
	} else if (os) {
		n = (int)vmh_sys(SYS_ppoll, w->fds, w->nfds, &t, w->os_mask, sizeof(uint64_t));
		if (vmh_unlikely(n == -EINVAL && w->is_select))
			n = (int)vmh_poll_few(w->fds, w->nfds, &t, w->os_mask, false);
		if (n < 0)
			return n;
		n -= n ? hush_moved(x) : 0;
	} else {
		for (unsigned i = 0; i < w->nfds; i++)
			w->fds[i].revents = 0;
	}
	n -= n ? hush_gone(x) : 0;
	if (n > 0)
		w->os_rx = vmh_poll_rx(w->fds, w->nfds);
	else
		w->os_saw |= os;
	n = vmh_os_reported(n) + add_ring_bits(x);
	if (gone && !w->fds[gone->i].revents) {
		w->fds[gone->i].revents = gone_bits(w, gone);
		n++;
	}
	return n;
}

static bool on_ring(struct vmh_waiter *w)
{
	struct poll_waiter *x = (struct poll_waiter *)w;

	for (unsigned k = 0; k < x->nent; k++) {
		struct vmh_obj *o = x->ent[k].o;

		if (is_tcp(&x->ent[k]) && vmh_tcps_on_rings(vmh_tcps_of(o)))
			return true;
		if (!(w->fds[x->ent[k].i].events & VMH_IN) || is_tcp(&x->ent[k]))
			continue;
		if (atomic_load_explicit(&o->class_, memory_order_relaxed) == VMH_CLASS_EPOLL ?
		    vmh_epoll_on_ring(o) : vmh_sock_on_ring(vmh_sock_of(o)))
			return true;
	}
	return false;
}

#define ON_STACK 40 /* a handler may have a stack of 8 KiB */

/* Also when the thread is cancelled in its wait. */
static void let_go(struct poll_waiter *x)
{
	for (unsigned k = 0; k < x->nent; k++) {
		hide(x, &x->ent[k], false);
		vmh_obj_put(x->ent[k].o);
	}
	if (x->ent != x->few)
		vmh_scratch_give_back(x->ent);
}

int vmh_poll_run(struct pollfd *fds, unsigned n, int64_t timeout_ns, const sigset_t *mask,
		 struct vmh_oslook *look, struct vmh_iomux_stats *stats)
{
	struct entry st[ON_STACK];
	__attribute__((cleanup(let_go))) struct poll_waiter x = {
		.w = { .collect = collect, .on_ring = on_ring, .fds = fds, .nfds = n,
		       .sig0 = vmh_signals_any, .look = look, .stats = stats,
		       .is_select = stats == &vmh_stats->select },
		.ent = st, .few = st,
	};
	unsigned many = 0;
	int r;

	for (unsigned i = 0; i < n; i++)
		many += vmh_fd_wanted(fds[i].fd);
	if (many > ON_STACK) {
		void *p = vmh_scratch_lent(many * sizeof(*x.ent));

		if (!p)
			return -ENOMEM;
		x.ent = p;
	}
	for (unsigned i = 0; i < n && x.nent < many; i++) {
		struct vmh_obj *o;

		if (fds[i].fd < 0 || !(o = vmh_fd_get(fds[i].fd)))
			continue;
		if (!obj_wanted(o)) {
			vmh_obj_put(o);
			continue;
		}
		x.ent[x.nent++] = (struct entry){ .o = o, .i = i, .fd = fds[i].fd };
		if (is_tcp(&x.ent[x.nent - 1])) {
			vmh_tcps_waited_for(o, fds[i].fd);
			x.tcp++;
		}
	}
	x.w.forced = x.nent && vmh_os_forced();
	x.w.only = x.nent == 1 ? x.ent->o : NULL;
	if (x.tcp)
		vmh_batch_begin(0);
	r = vmh_waiter_run(&x.w, timeout_ns, mask);
	if (x.tcp)
		vmh_batch_begin(x.w.ring_n);
	/* a timeout found by the rings alone has not written the results */
	for (unsigned i = 0; r == 0 && i < n; i++)
		fds[i].revents = 0;
	return with_gone(&x, r);
}

static void give_back(void **p)
{
	if (*p)
		vmh_scratch_give_back(*p);
}

/* In an array of our own: another thread may look at the caller's, and a handler may leave this by siglongjmp(), with
 * negative numbers in it. */
int vmh_poll(struct pollfd *fds, nfds_t n, int64_t timeout_ns, const sigset_t *mask)
{
	__attribute__((cleanup(give_back))) void *lent = NULL;
	struct pollfd few[ON_STACK], *p = few;
	int r;

	if (n > ON_STACK) {
		p = lent = vmh_scratch_lent(n * sizeof(*p));
		if (!p)
			return -ENOMEM;
	}
	memcpy(p, fds, n * sizeof(*fds));
	r = vmh_poll_run(p, (unsigned)n, timeout_ns, mask, &poll_look, &vmh_stats->poll);
	for (nfds_t i = 0; i < n; i++)
		fds[i].revents = p[i].revents;
	return r;
}
